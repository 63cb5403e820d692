"""Tiles that a program visits: of keys, where the mask may be visible; of queries, where a repair finds marks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.program import intervals
from pallas_kernels.program.evaluate import Evaluation
from pallas_kernels.program.ir import Axes
from pallas_kernels.spec import AttentionSpec
from pallas_kernels.split_kv.work import Requests, Work, WorkItem
from pallas_kernels.triton.containment import MARKS_AT_ONCE, MAX_PROGRAMS, any_nan
from pallas_kernels.triton.launch import runner_of
from pallas_kernels.triton.scores import evaluation
from pallas_kernels.types import Index, Ref

MAX_JUDGED_RUNS = 1024  # runs of tiles of keys whose mask is bounded at once, each a value in a register


class KeyTiles(NamedTuple):
    """Tiles of keys that some queries visit, and the unmasked (full) ones among them: first, and one past the last."""

    first: Index
    last: Index
    first_whole: Index
    last_whole: Index


def walk_of(spec: AttentionSpec, tile: int, mask: Evaluation | None, item: WorkItem) -> KeyTiles:
    """The tiles of `tile` keys that a work item visits.

    Args:
      tile: Keys of a tile.
      mask: The mask of the item's rows, evaluated where it does not depend on keys; None without one.
    """
    last, whole = lax.div(item.length + (tile - 1), tile), lax.div(item.length, tile)
    if mask is None:
        return KeyTiles(0, last, 0, whole)
    assert spec.programs.mask is not None  # that was evaluated
    tiles = pl.cdiv(spec.S, tile)
    run = pl.cdiv(tiles, MAX_JUDGED_RUNS)  # tiles judged as one
    count = 1 << (pl.cdiv(tiles, run) - 1).bit_length()
    i = lax.broadcasted_iota(jnp.int32, (count,), 0)
    first_key = i * (run * tile)
    visible = intervals.visibility(spec.programs.mask, mask, first_key, first_key + (run * tile - 1))
    exists = i * run < last
    some, whole_runs = visible.some & exists, visible.all & ((i + 1) * run <= whole)
    first, after = _first_where(some, i, count), _last_where(some, i) + 1
    first_whole = _first_where(whole_runs, i, count)
    last_whole = _first_where(~whole_runs & (i > first_whole), i, count)
    end = jnp.minimum(after * run, last)
    begin = jnp.minimum(first * run, end)
    return KeyTiles(begin, end, jnp.minimum(first_whole * run, end), jnp.minimum(last_whole * run, end))


def walk_of_all_heads(
    spec: AttentionSpec, work: Work, refs: Sequence[Ref], item: WorkItem, per_request: int | None = None
) -> KeyTiles:
    """The tiles that all groups of heads of a work item visit, where they visit the same; all of them otherwise.

    Args:
      spec: The spec; its key heads are the groups.
      refs: What the mask captures.
      per_request: Queries of each request, if the mask counts them from the first of its own.
    """
    program, tile = spec.programs.mask, work.tiles.block_kv
    if program is None or (spec.Hkv > 1 and program.argument("h") in program.nodes):
        return walk_of(spec, tile, None, item)
    row = item.rows(spec, work, jnp.zeros_like(item.request))
    q = row.n if per_request is None else row.n - item.request * per_request
    at = {"b": item.request, "h": row.h[:, None], "q": q[:, None]}
    mask = evaluation(program, refs, work.tiles.shape, at, approximate=True, runner=runner_of(spec))
    mask.prepare(program.nodes, (Axes.UNIFORM, Axes.ROW))
    return walk_of(spec, tile, mask, item)


def _first_where(x: jax.Array, i: jax.Array, count: int) -> jax.Array:
    return jnp.min(jnp.where(x, i, count))


def _last_where(x: jax.Array, i: jax.Array) -> jax.Array:
    return jnp.max(jnp.where(x, i, -1))


class QueryBlocks(NamedTuple):
    """Blocks of packed queries that a repair looks at, with a program for each key head.

    A program that finds no mark ends without the plan of the requests. H200, jax 0.11.2, Hq 32, Hkv 8, D 128, 256
    requests that decode and 3840 tokens of prompts: 12.8 and 34.7 us with one program for each tile, which planned
    first; 1.8 and 2.1 with as many programs as here, each for all heads of fewer queries. This form was not timed. Each
    key head has programs of its own because a request whose queries are NaN is repaired in every step.

    Attributes:
      work: The launch whose tiles are repaired.
    """

    spec: AttentionSpec
    work: Work

    @property
    def size(self) -> int:
        """Queries of a block."""
        return pl.cdiv(self.spec.T, max(1, MAX_PROGRAMS // self.spec.Hkv))

    @property
    def programs(self) -> int:
        """Size of the grid: the key heads of a block side by side."""
        return pl.cdiv(self.spec.T, self.size) * self.spec.Hkv

    def has_marks(self, lse: Ref, block: Index, kv_h: Index) -> jax.Array:
        """True if there is a mark, for a key head, among the rows that the tiles of a block may hold."""
        group, reach = self.spec.group, self.size + self.work.queries(self.spec) - 1
        at_once = min(MARKS_AT_ONCE, pl.next_power_of_2(reach * group))

        def load(chunk: Index, any_marked: jax.Array) -> jax.Array:
            i = jnp.minimum(chunk * at_once + lax.broadcasted_iota(jnp.int32, (at_once,), 0), reach * group - 1)
            n = jnp.minimum(block * self.size + lax.div(i, group), self.spec.T - 1)
            marked = any_nan(runner_of(self.spec).load(lse.at[(n, kv_h * group + lax.rem(i, group))]))
            return jnp.maximum(any_marked, marked.astype(jnp.int32))

        return lax.fori_loop(0, pl.cdiv(reach * group, at_once), load, jnp.int32(0)) > 0

    def items(self, planned: Requests, block: Index) -> tuple[jax.Array, jax.Array]:
        """The first of the work items that begin in a block, and one past the last, for work without splits."""
        per_tile = self.work.queries(self.spec)

        def before(query: Index) -> jax.Array:
            begin = lax.div(jnp.maximum(query - planned.start, 0) + (per_tile - 1), per_tile)
            return jnp.sum(jnp.minimum(begin, planned.tiles))

        return before(block * self.size), before((block + 1) * self.size)

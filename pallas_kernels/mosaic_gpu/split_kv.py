"""The kernels with split-KV: inputs, plan, launch, roles of warp groups, stores of results, ends of keys.

Persistent CTAs take work items (`pallas_kernels.mosaic_gpu.work_items`), with a producer warp group and two consumers.
Of an item whose keys are not split the output is stored; of the others, partial results, which a second kernel merges.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plg

from pallas_kernels.mosaic_gpu import smem
from pallas_kernels.mosaic_gpu.launch import WARP_GROUP, flatten_captured, launch, output
from pallas_kernels.mosaic_gpu.score import scores
from pallas_kernels.mosaic_gpu.score.tile import TILE, has_spare_registers, limit_of_mods
from pallas_kernels.mosaic_gpu.work_items import TILE_KEYS, Item, PageRows, num_ctas, num_queries, over_items, page_rows
from pallas_kernels.plan import Refusal
from pallas_kernels.spec import AttentionSpec, Captured, Operands
from pallas_kernels.types import A, Index, Ref

if TYPE_CHECKING:
    from pallas_kernels.mosaic_gpu.decode.sizes import DecodeRows, Packing
    from pallas_kernels.mosaic_gpu.latent.sizes import Heads, LatentRows
    from pallas_kernels.split_kv.work import PagedOperands, Work

CONSUMERS = 2  # warp groups; the producer is the one after them
TileRows: TypeAlias = "DecodeRows | LatentRows"


class SplitKvInputs(NamedTuple, Generic[A]):
    """The inputs of a kernel (in it: the refs to them)."""

    query: A  # [N, Hq, D], packed: the queries of one request after those of the other
    # [pages of all layers, page_size, Hkv, D]; of a dense call, in its layout; without the axis of heads for MLA, whose
    # values are the first columns of the keys
    key: A
    value: A | None  # like the key; None for MLA
    table: A | None  # int32 [R, max_pages], the page table; None for a dense call
    first_page: A | None  # int32 [1], the first page of the layer; None for a dense call
    items: A  # int32 [items, 8], the work items (`pallas_kernels.mosaic_gpu.work_items`)
    captured: Captured[A]

    def of_mods(self) -> Operands[A]:
        """Inputs of the scores, in the form in which all kernels take them."""
        return Operands(self.query, self.key, self.key if self.value is None else self.value, None, self.captured)


@dataclasses.dataclass(frozen=True)
class SplitKvPlan:
    """The plan of a call: its kernel, and how queries and heads fill the rows of a tile."""

    spec: AttentionSpec  # the call, with its tile programs; `Hkv` counts the groups of heads
    packing: Packing | Heads
    description: str  # kernel and tiles, for `jflex.explain`
    kernel: Callable[[AttentionSpec, Any, int, SplitKvInputs[jax.Array]], list[jax.Array]]

    @property
    def work(self) -> Work:
        """All requests in one launch."""
        from pallas_kernels.split_kv.items import work_of

        return work_of(self.packing.rows, TILE_KEYS, self.packing.queries)

    def describe(self) -> str:
        """Kernel and tiles, for `jflex.explain`."""
        return self.description

    def attend(self, slots: int, arrays: SplitKvInputs[jax.Array]) -> list[jax.Array]:
        """Runs the kernel, as `attend` below does, with so many partial results at most; 0 if no keys are split."""
        return self.kernel(self.spec, self.packing, slots, arrays)

    def run(self, arrays: PagedOperands[jax.Array]) -> list[jax.Array]:
        """Out and lse of a paged call, before repairs."""
        return run_work(self.spec, self.work, arrays, self.attend)

    def count_splits(self, indptr: np.ndarray, lengths: np.ndarray) -> tuple[int, int]:
        """Tiles of queries, and the splits of their keys, for each group of heads."""
        from pallas_kernels.split_kv import items

        return items.count_splits(self.spec, self.work, indptr, lengths)


def run_work(
    spec: AttentionSpec,
    work: Work,
    arrays: PagedOperands[jax.Array],
    attend: Callable[[int, SplitKvInputs[jax.Array]], list[jax.Array]],
) -> list[jax.Array]:
    """Out and lse of the requests that `work` takes, before repairs: plans their items, attends, and merges splits.

    `attend` gets the number of partial results.
    """
    from pallas_kernels.split_kv import items

    extents, pages = (arrays.indptr, arrays.lengths), (arrays.table, arrays.first_page)
    planned, slots = items.plan_items(spec, work, extents, arrays.captured.mask)
    inputs = SplitKvInputs(arrays.query, arrays.key, arrays.value, *pages, planned, arrays.captured)
    return items.merge(spec, work, extents, planned, attend(slots, inputs))


def limit_of_kernel(spec: AttentionSpec, declare: Callable[[], object]) -> Refusal | None:
    """Mods that a kernel does not support, or scratch that a CTA does not hold."""
    missing = limit_of_mods(spec)
    if missing is not None:
        return missing
    needed = smem.bytes_of(jax.tree.leaves(declare()))
    if needed > smem.LIMIT:
        return Refusal(f"its tiles need {needed} bytes of shared memory, and a CTA has {smem.LIMIT}")
    return None


# --- launch

P = TypeVar("P")
S = TypeVar("S")


class Static(NamedTuple, Generic[P, S]):
    """State that producer and consumers share."""

    spec: AttentionSpec
    packing: P  # how queries and heads fill the rows of a tile
    rows: int  # rows of a partial result
    captured: scores.CapturedShapes  # shapes of the captured arrays
    arrays: SplitKvInputs[Ref]
    outputs: tuple[Ref, ...]  # out, lse, and partial results
    scratch: S  # shared memory and barriers
    cta_id: Index

    def over_items(self, body: Callable[[jax.Array, Item, jax.Array], jax.Array]) -> None:
        """Runs ``count = body(i, item, count)`` for the items of this CTA; `count` is the caller's, from 0 on."""
        over_items(self.arrays.items, self.spec.Hkv, self.cta_id, body)

    def page_rows(self, item: Item, tile: jax.Array) -> list[PageRows]:
        """Pages and rows of a tile of keys of a request."""
        table, first_page = self.arrays.table, self.arrays.first_page
        assert table is not None  # of a paged call
        assert first_page is not None
        return page_rows(self.spec, table, first_page, item, tile)

    def prepare(self, item: Item, rows: TileRows, q: jax.Array, q_first: jax.Array) -> scores.Scores:
        """The scores of an item, whose rows have these indices of queries in mods."""
        return scores.prepare(
            self.spec,
            self.arrays.of_mods(),
            self.captured,
            (smem.WARP_GROUP_ROWS, TILE_KEYS),
            item.request,
            rows.h,
            q=q,
            q_first=q_first,
            may_end=False,
        )

    def store(
        self,
        item: Item,
        rows: TileRows,
        of_partial: Callable[[jax.Array], jax.Array],  # from the first line of the partial result, the line of each row
        # gets the refs of out and lse, and the line of each row, -1 for padding
        write: Callable[[tuple[Ref, ...], jax.Array], None],
    ) -> None:
        """Stores rows of out and lse, to the result or to the partial results."""
        exists = lambda line: jnp.where(rows.exists, line, -1)
        whole = lambda: write(self.outputs[:2], exists(rows.n * self.spec.Hq + rows.h))
        if len(self.outputs) == 2:
            whole()
            return
        first = (item.slot * self.spec.Hkv + item.group) * self.rows
        pl.when(item.slot < 0)(whole)
        pl.when(item.slot >= 0)(lambda: write(self.outputs[2:], exists(of_partial(first))))


class Roles(NamedTuple):
    """Programs of the warp groups of a CTA."""

    name: str  # of the kernel, in profiles
    produce: Callable[[Any], None]  # of the producer, with a `Static`
    consume: Callable[[Any, int], None]  # of a consumer, with a `Static` and its number


def attend(
    roles: Roles,
    spec: AttentionSpec,
    packing: Packing | Heads,
    slots: int,
    arrays: SplitKvInputs[jax.Array],
    scratch: NamedTuple,
) -> list[jax.Array]:
    """Computes out [queries, Hq, Dv] and lse, float32 [queries, Hq], of the tiles whose keys are not split.

    After them come the partial results of the others, if there may be any: out [slots, Hkv, rows, Dv] and lse [slots,
    Hkv, rows], float32. The programs of the spec are traced with heads in rows; captured arrays have their shapes.
    """
    queries, partials = num_queries(spec), (slots, spec.Hkv, packing.rows)
    outputs = [output((queries, spec.Hq, spec.Dv), spec.out_dtype), output((queries, spec.Hq), jnp.float32)]
    if slots:
        outputs += [output((*partials, spec.Dv), jnp.float32), output(partials, jnp.float32)]
    of_mods = arrays.of_mods()
    flat, captured = flatten_captured(of_mods), scores.CapturedShapes.from_operands(of_mods)

    def kernel(cta_id: Index, arrays: Any, outputs: tuple[Ref, ...], scratch: Any) -> None:
        static = Static(spec, packing, packing.rows, captured, arrays, tuple(outputs), scratch, cta_id)
        group = lax.axis_index(WARP_GROUP)
        pl.when(group == CONSUMERS)(lambda: roles.produce(static))
        for number in range(CONSUMERS):
            pl.when(group == number)(functools.partial(roles.consume, static, number))

    return launch(
        kernel,
        arrays._replace(captured=flat.captured),
        outputs,
        scratch,
        name=roles.name,
        num_ctas=num_ctas(len(arrays.items), spec.Hkv),
        warp_groups=CONSUMERS + 1,
    )


# --- the state of the softmax, and keys past the end of a request, which may be NaN


def finite(row_max: jax.Array) -> jax.Array:
    """The row_max that is subtracted from scores: 0 for rows that are masked so far."""
    return jnp.where(row_max == -jnp.inf, 0.0, row_max)


def scores_of(prepared: scores.Scores, raw: jax.Array, first: Index, end: Index) -> jax.Array:
    """Scores [rows, keys] of the tile of keys from `first` on: mods, and -inf from `end` on.

    A tile counts as partial without a mask, too: keys past the end may be NaN, which pairs of logistics would share.
    """
    by_clause = has_spare_registers(prepared.spec.programs.score)
    return scores.mask_from(end, first, scores.modify(prepared, raw, first, is_partial=True, by_clause=by_clause).s)


def clear_values(ref: Ref, valid: jax.Array) -> None:
    """Overwrites rows of values from `valid` on with zeros, where there are any: a weight of 0 times NaN is NaN."""
    pl.when(valid < ref.shape[0])(functools.partial(_clear_rows, ref, valid))


def _clear_rows(ref: Ref, valid: jax.Array) -> None:
    keys, size = ref.shape
    width = smem.swizzle_of(size, 2) // 2
    row = plg.broadcasted_iota(jnp.int32, (keys, width), 0, layout=TILE)
    for column in range(0, size, width):
        part = ref.at[:, pl.ds(column, width)]
        part[...] = jnp.where(row < valid, smem.load(part, TILE), jnp.zeros((), ref.dtype))
    plg.commit_smem()

"""Which tiles of queries a program of the repair looks at: those of a key head that begin in a block of packed queries.

A program that finds no mark ends without the plan of the requests. H200, jax 0.11.2, Hq 32, Hkv 8, D 128, 256 requests
that decode and 3840 tokens of prompts: 12.8 and 34.7 us with one program for each tile, which planned first; 1.8 and
2.1 with as many programs as here, each for all heads of fewer queries. This form was not timed. Each key head has
programs of its own because a request whose queries are NaN is repaired in every step.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.spec import AttentionSpec
from pallas_kernels.split_kv.work import Requests, Work
from pallas_kernels.triton.containment import MARKS_AT_ONCE, MAX_PROGRAMS, any_nan
from pallas_kernels.triton.launch import runner_of
from pallas_kernels.types import Index, Ref


class QueryBlocks(NamedTuple):
    """Blocks of packed queries, with a program for each key head.

    Attributes:
      spec: The spec.
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
        """Whether there is a mark, for a key head, among the rows that the tiles of a block may hold."""
        group, reach = self.spec.group, self.size + self.work.queries(self.spec) - 1
        at_once = min(MARKS_AT_ONCE, pl.next_power_of_2(reach * group))

        def load(chunk: Index, found: jax.Array) -> jax.Array:
            i = jnp.minimum(chunk * at_once + lax.broadcasted_iota(jnp.int32, (at_once,), 0), reach * group - 1)
            n = jnp.minimum(block * self.size + lax.div(i, group), self.spec.T - 1)
            marked = any_nan(runner_of(self.spec).load(lse.at[(n, kv_h * group + lax.rem(i, group))]))
            return jnp.maximum(found, marked.astype(jnp.int32))

        return lax.fori_loop(0, pl.cdiv(reach * group, at_once), load, jnp.int32(0)) > 0

    def items(self, of: Requests, block: Index) -> tuple[jax.Array, jax.Array]:
        """The first of the work items that begin in a block, and one past the last, for work without splits."""
        per_tile = self.work.queries(self.spec)

        def before(query: Index) -> jax.Array:
            begin = lax.div(jnp.maximum(query - of.start, 0) + (per_tile - 1), per_tile)
            return jnp.sum(jnp.minimum(begin, of.tiles))

        return before(block * self.size), before((block + 1) * self.size)

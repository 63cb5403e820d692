"""Which tiles of queries a program of the repair looks at: those that begin in its block of packed queries.

The marks of such a block are contiguous, so where there is none a program ends after one load, without the plan of the
requests. One program for each tile and key head, which planned first, took 12.8 us for 256 requests that decode, and
34.7 us for 3840 tokens of prompts; this takes 1.8 and 2.1 (H200, jax 0.11.2, Hq 32, Hkv 8, D 128).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.spec import AttentionSpec
from pallas_kernels.triton import language
from pallas_kernels.triton.containment import MARKS_AT_ONCE, MAX_PROGRAMS, any_nan
from pallas_kernels.triton.paged.work import Requests, Work
from pallas_kernels.types import Index, Ref


class QueryBlocks(NamedTuple):
    """Blocks of packed queries, one for each program.

    Attributes:
      spec: The spec.
      work: The launch whose tiles are repaired.
    """

    spec: AttentionSpec
    work: Work

    @property
    def size(self) -> int:
        """Queries of a block."""
        return pl.cdiv(self.spec.T, MAX_PROGRAMS)

    @property
    def programs(self) -> int:
        """Size of the grid."""
        return pl.cdiv(self.spec.T, self.size)

    def has_marks(self, lse: Ref, block: Index) -> jax.Array:
        """Whether any row of a tile that begins in a block has a mark, or another row near it."""
        heads, reach = self.spec.Hq, self.size + self.work.queries(self.spec) - 1
        marks, start = reach * heads, block * self.size * heads
        at_once = min(MARKS_AT_ONCE, pl.next_power_of_2(marks))
        end = jnp.minimum(start + marks, self.spec.T * heads)

        def load(chunk: Index, found: jax.Array) -> jax.Array:
            i = start + chunk * at_once + lax.broadcasted_iota(jnp.int32, (at_once,), 0)
            at = jnp.minimum(i, end - 1)
            marked = any_nan(language.load(self.spec.route, lse.at[(lax.div(at, heads), lax.rem(at, heads))]))
            return jnp.maximum(found, marked.astype(jnp.int32))

        return lax.fori_loop(0, pl.cdiv(marks, at_once), load, jnp.int32(0)) > 0

    def items(self, of: Requests, block: Index) -> tuple[jax.Array, jax.Array]:
        """The first of the work items that begin in a block, and the end of them; the work does not split."""
        per_tile = self.work.queries(self.spec)

        def before(query: Index) -> jax.Array:
            begin = lax.div(jnp.maximum(query - of.start, 0) + (per_tile - 1), per_tile)
            return jnp.sum(jnp.minimum(begin, of.tiles))

        return before(block * self.size), before((block + 1) * self.size)

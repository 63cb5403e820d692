"""Streams of the backward kernels through shared memory: tiles of queries, dO, and row statistics (lse and delta)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plg
from jax.typing import DTypeLike

from pallas_kernels.config import Tiles
from pallas_kernels.gradients import RowOperands, log2_lse
from pallas_kernels.mosaic_gpu import smem
from pallas_kernels.mosaic_gpu.score import bias_tiles, scores
from pallas_kernels.mosaic_gpu.smem import BitRing, Ring
from pallas_kernels.program.build import Derivative
from pallas_kernels.program.cotangents import LoadGroups
from pallas_kernels.spec import LOG2_E, AttentionSpec, Operands
from pallas_kernels.types import A, Index, Ref, RegisterLayout

LSE, DELTA = 0, 1  # rows of `RowStats.stats`
KEY, VALUE = "key", "value"  # names of the dK and dV accumulators of a kernel


class BackwardStatic(NamedTuple):
    """Statics of a launch."""

    spec: AttentionSpec
    tiles: Tiles
    derivative: Derivative | None  # of the score mod; None without one
    groups: LoadGroups  # loads of captured arrays with requested gradients
    captured: scores.CapturedShapes  # shapes of the captured arrays
    sums: tuple[str, ...] = (KEY, VALUE)  # which of dK (`KEY`) and dV (`VALUE`) a warp group of dK/dV computes

    def for_sum(self, name: str) -> BackwardStatic:
        """Statics of a warp group with dK or dV alone; that of dK computes the cotangents of loads."""
        return self._replace(sums=(name,), derivative=self.derivative if name == KEY else None)

    def bias(self, arrays: Operands[Ref], refs: Sequence[Ref], *, transposed: bool = False) -> bias_tiles.BiasTiles:
        """The bias tiles that TMA loads; `refs` are empty if they do not fit."""
        loads = bias_tiles.bias_loads(self.spec, transposed=transposed) if refs else ()
        return bias_tiles.BiasTiles(self.spec, self.tiles, arrays.captured.score, loads, refs)

    @property
    def warp_groups(self) -> int:
        """Consumer warp groups of a CTA."""
        return self.tiles.num_warps // 4

    @property
    def shares_keys(self) -> bool:
        """True if a CTA of dK/dV has 64 keys, of which one warp group computes dK and the other dV."""
        return self.tiles.block_kv < self.warp_groups * smem.WARP_GROUP_ROWS

    @property
    def folds(self) -> bool:
        """True if scores are the QK^T accumulator itself, which may then be initialized with -lse.

        That needs no registers for the lse while weights are computed.
        """
        return self.spec.programs.score is None and self.spec.scale > 0 and self.spec.normalize == "softmax"

    @property
    def lse_scale(self) -> float:
        """The divisor of the lse, in base 2, that a kernel reads."""
        return LOG2_E * self.spec.scale if self.folds else 1.0

    def prepare(
        self,
        arrays: Operands[Ref],
        tile: tuple[int, int],
        b: jax.Array,
        h: jax.Array,
        *,
        q_first: jax.Array | None = None,
        k_first: jax.Array | None = None,
    ) -> scores.Scores:
        """Prologue of a warp group for queries or keys from the first one on; see `scores.prepare`."""
        block, length = (self.tiles.block_kv, self.spec.S) if q_first is None else (self.tiles.block_q, self.spec.T)
        nodes = None if self.derivative is None else self.derivative.nodes
        return scores.prepare(
            self.spec, arrays, self.captured, tile, b, h, q_first=q_first, k_first=k_first, may_end=length % block != 0,
            nodes=nodes,
        )  # fmt: skip


class QueryStream(NamedTuple):
    """Rings of shared-memory stages with a tile of queries each."""

    queries: Ring  # [rows, D]
    d_out: Ring  # [rows, Dv]
    stats: Ring  # float32 [2, rows]: -lse, which is added to scores in base 2, and -delta, which is added to dP
    bias: Ring | None  # bias tiles [rows, keys of the CTA]; None without

    @classmethod
    def declare(
        cls, spec: AttentionSpec, tiles: Tiles, dtype: DTypeLike, bias: Ring | None, swizzle: int | None
    ) -> QueryStream:
        """Declares the rings; queries have the given swizzle, or the widest."""
        stages, rows, readers = tiles.num_stages, tiles.block_q, tiles.num_warps // 4
        return cls(
            BitRing.from_tiles((smem.tiled((stages, rows, spec.D), dtype, swizzle),), readers),
            BitRing.declare(stages, rows, (spec.Dv,), dtype, readers),
            BitRing.from_tiles((smem.declared(plg.SMEM((stages, 2, rows), jnp.float32)),), readers),
            bias,
        )

    def fill(
        self,
        spec: AttentionSpec,
        i: Index,
        arrays: Operands[Ref],
        row_stats: RowStats[Ref],
        index: tuple[Index, Index, Index],
        bias: Sequence[Ref],
    ) -> None:
        """Starts the TMA copies of the ith tile: that at batch, query head and first query, with its bias tiles."""
        b, h, first = index
        rows = self.queries.tiles[0].shape[1]
        at = smem.rows_at(spec, b, h, first, rows)
        self.queries.fill(i, arrays.query.at[at])
        self.stats.fill(i, row_stats.stats.at[b, h, :, pl.ds(first, rows)])
        self.d_out.fill(i, row_stats.d_out.at[at])
        if self.bias is not None:
            self.bias.fill(i, *bias)


class RowStats(NamedTuple, Generic[A]):
    """Per query: dO, in the spec's layout, and `stats`, float32 [B, Hq, 2, T]: -lse (in base 2) and -delta.

    In padding past the end the lse is inf, so that weights are 0 there.
    """

    d_out: A
    stats: A


def pack_row_stats(rows: RowOperands[jax.Array], multiple: int, lse_scale: float = 1.0) -> RowStats[jax.Array]:
    """Row statistics as the kernels read them, padded to a multiple of rows; the lse is divided by `lse_scale`."""
    # On an H200 the sum behind delta and this stack took 0.57 ms as one kernel of XLA (B 2, H 16, T 16384, D 128).
    rows = rows._replace(delta=lax.optimization_barrier(rows.delta))
    end = ((0, 0), (0, 0), (0, -rows.lse.shape[2] % multiple))
    lse_log2 = jnp.pad(log2_lse(rows.lse) / lse_scale, end, constant_values=jnp.inf)
    return RowStats(rows.d_out, -jnp.stack((lse_log2, jnp.pad(rows.delta, end)), axis=2))


def load_vector(ref: Ref, layout: RegisterLayout) -> jax.Array:
    """Loads a vector of row statistics, as column or row values of a tile."""
    return plg.load(ref, layout=layout, optimized=False)  # pyright: ignore[reportCallIssue]  (JAX 0.10 wants an index)


def store_sums(staged: Ref, out: Ref, x: jax.Array) -> None:
    """Starts the TMA store of a vector, staged in shared memory."""
    plg.wait_smem_to_gmem(0, wait_read_only=True)
    staged[...] = x
    plg.commit_smem()
    plg.copy_smem_to_gmem(staged, out)


def wait_and_get(ring: Ring, i: Index) -> Ref:
    """Waits for the ith tile of a ring of one array, and returns it."""
    ring.wait(i)
    return ring.stage(i)[0]


def wait_and_get_all(ring: Ring | None, i: Index) -> tuple[Ref, ...]:
    """Waits for the ith tile of a ring, and returns its arrays; none without a ring."""
    if ring is None:
        return ()
    ring.wait(i)
    return ring.stage(i)

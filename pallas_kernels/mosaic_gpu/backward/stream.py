"""What the backward kernels stream: tiles of queries, cotangents of the output, and statistics of rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plg

from pallas_kernels.config import Tiles
from pallas_kernels.gradients import Rows, shift_of
from pallas_kernels.mosaic_gpu import bias_tiles as planes
from pallas_kernels.mosaic_gpu import scores, smem
from pallas_kernels.mosaic_gpu.pipeline import Ring
from pallas_kernels.program.build import Derivative
from pallas_kernels.program.cotangents import LoadGroups
from pallas_kernels.spec import LOG2_E, Arrays, AttentionSpec

SHIFT, DELTA = 0, 1  # places in the array of statistics
KEY, VALUE = "key", "value"  # the sums that a kernel holds


class Static(NamedTuple):
    """What is known ahead of a launch.

    Attributes:
      spec: The spec.
      tiles: Of the kernel.
      derivative: Of the score mod; None without one.
      groups: The wanted loads.
      captured: Shapes of what the mods capture.
      sums: Which of `KEY` and `VALUE` the kernel that owns keys computes.
    """

    spec: AttentionSpec
    tiles: Tiles
    derivative: Derivative | None
    groups: LoadGroups
    captured: scores.Captured
    sums: tuple[str, ...] = (KEY, VALUE)

    @classmethod
    def of(
        cls, spec: AttentionSpec, tiles: Tiles, arrays: Arrays, derivative: Derivative | None, groups: LoadGroups
    ) -> Static:
        """From the arrays of the call, for both sums."""
        captured = scores.Captured(*(tuple(x.shape for x in group) for group in arrays[4:6]))
        return cls(spec, tiles, derivative, groups, captured)

    def of_sum(self, name: str) -> Static:
        """For one of the sums; cotangents of loads belong to that for dK."""
        if name == KEY:
            return self._replace(sums=(name,))
        return self._replace(sums=(name,), derivative=None, groups=self.groups._replace(columns=()))

    def elements(self, arrays: Arrays, refs: Any, *, transposed: bool = False) -> planes.Brought:
        """What the copy engine brings of what the score mod captures; `refs` are empty if that does not fit."""
        found = planes.planes_of(self.spec, transposed=transposed) if refs else ()
        return planes.Brought(self.spec, self.tiles, arrays.score_operands, found, refs)

    @property
    def warp_groups(self) -> int:
        """Those that compute."""
        return self.tiles.num_warps // 4

    @property
    def folds(self) -> bool:
        """Whether scores are the products, so that these may start from what would be added to them.

        That takes no registers while weights are computed.
        """
        return self.spec.programs.score is None and self.spec.scale > 0

    @property
    def unit(self) -> float:
        """That of the shift which the kernel is given."""
        return LOG2_E * self.spec.scale if self.folds else 1.0

    @property
    def nodes(self) -> Any:
        """What to prepare of the score mod."""
        return None if self.derivative is None else self.derivative.nodes


class Stream(NamedTuple):
    """Rings of what belongs to a tile of queries.

    Attributes:
      queries: [rows, D].
      d_out: [rows, Dv].
      statistics: float32 [2, rows]: what is added to scores in base 2, and to cotangents of weights.
      elements: Of `planes`, [rows, keys of the block]; None without.
    """

    queries: Ring
    d_out: Ring
    statistics: Ring
    elements: Ring | None

    @classmethod
    def declare(
        cls, spec: AttentionSpec, rows: int, stages: int, dtype: Any, readers: int, elements: Ring | None
    ) -> Stream:
        """What to allocate for it."""
        return cls(
            Ring.declare(stages, rows, (spec.D,), dtype, readers),
            Ring.declare(stages, rows, (spec.Dv,), dtype, readers),
            Ring.of((plg.SMEM((stages, 2, rows), jnp.float32),), readers),
            elements,
        )

    def fill(
        self, spec: AttentionSpec, nth: Any, arrays: Arrays, given: Given, place: tuple[Any, Any, Any], elements: Any
    ) -> None:
        """Starts to copy the nth tile: that at batch, query head and first query, with its elements of `planes`."""
        b, h, first = place
        rows = self.queries.tiles[0].shape[1]
        at = smem.rows_at(spec, b, h, first, rows)
        self.queries.fill(nth, arrays.query.at[at])
        self.statistics.fill(nth, given.statistics.at[b, h, :, pl.ds(first, rows)])
        self.d_out.fill(nth, given.d_out.at[at])
        if self.elements is not None:
            self.elements.fill(nth, *elements)


class Given(NamedTuple):
    """Per query: cotangent of the output, in the spec's layout, and float32 [B, Hq, 2, T]: -shift and -delta.

    Past the end the shift is inf, so that weights are 0 there.
    """

    d_out: Any
    statistics: Any


def give(rows: Rows, multiple: int, unit: float = 1.0) -> Given:
    """Statistics as the kernels read them, for rows up to a multiple; the shift in `unit`, that of `scores.Scores`."""
    # On an H200 the sum behind delta and this stack took 0.57 ms as one kernel of XLA (B 2, H 16, T 16384, D 128).
    rows = rows._replace(delta=lax.optimization_barrier(rows.delta))
    end = ((0, 0), (0, 0), (0, -rows.lse.shape[2] % multiple))
    shift = jnp.pad(shift_of(rows.lse) / unit, end, constant_values=jnp.inf)
    return Given(rows.d_out, -jnp.stack((shift, jnp.pad(rows.delta, end)), axis=2))


def load_vector(ref: Any, layout: Any) -> jax.Array:
    """A vector of the statistics, over the columns or rows of a tile."""
    return plg.load(ref, layout=layout, optimized=False)  # pyright: ignore[reportCallIssue]  (JAX 0.10 wants an index)


def store_sums(staged: Any, out: Any, x: jax.Array) -> None:
    """Starts to store a vector through shared memory."""
    plg.wait_smem_to_gmem(0, wait_read_only=True)
    staged[...] = x
    plg.commit_smem()
    plg.copy_smem_to_gmem(staged, out)


def awaited(ring: Ring, nth: Any) -> Any:
    """The nth tile of a ring of one array, once it is there."""
    ring.wait(nth)
    return ring.stage(nth)[0]


def awaited_all(ring: Ring | None, nth: Any) -> tuple[Any, ...]:
    """The nth tiles of a ring, once they are there; none without a ring."""
    if ring is None:
        return ()
    ring.wait(nth)
    return ring.stage(nth)


def accumulator(rows: int, columns: int) -> Any:
    """Of products of a warp group."""
    return plg.ACC((rows, columns), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]

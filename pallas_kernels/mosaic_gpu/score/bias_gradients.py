"""Gradients of captured arrays that are indexed by query and key (a pair bias), stored by TMA tile by tile.

Where no element is read by two scores, its gradient is the cotangent of that score, times the derivative of the mod.
The kernel for dQ has it in registers, in the order of the array, and stores it in the same pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plg

from pallas_kernels import block_walk
from pallas_kernels.config import Tiles
from pallas_kernels.mosaic_gpu import smem
from pallas_kernels.mosaic_gpu.launch import ROWS_MULTIPLE
from pallas_kernels.mosaic_gpu.score.bias_tiles import BiasLoad, reads_by_query_and_key
from pallas_kernels.program.cotangents import covers
from pallas_kernels.program.evaluate import Evaluation
from pallas_kernels.program.ir import Node
from pallas_kernels.spec import AttentionSpec
from pallas_kernels.types import Index, Ref

_COLUMNS = 64  # multiple of columns in a stored array: whole swizzled tiles of 16 and of 32 bits


def bias_load(spec: AttentionSpec, load: Node) -> BiasLoad | None:
    """A load by query and key of an array [..., queries, keys] of the sizes of the call; None if it is no such load."""
    shape = spec.score_shapes[load.value]
    if spec.programs.score is None or shape[-2:] != (spec.T, spec.S) or load.dtype.itemsize not in (2, 4):
        return None
    return BiasLoad.from_load(load, shape) if reads_by_query_and_key(spec.programs.score, load) else None


def declare(loads: Sequence[Node], tiles: Tiles) -> tuple[Ref, ...]:
    """Shared memory to stage the cotangents of loads, [groups, rows, keys] each, in the dtypes of their arrays."""
    groups = tiles.num_warps // 4
    return tuple(smem.tiled((groups, tiles.block_q // groups, tiles.block_kv), load.dtype) for load in loads)


def padded_shape(spec: AttentionSpec, load: Node) -> tuple[int, int, int]:
    """The shape of the gradient in a kernel, [leading, queries, keys], padded for TMA."""
    bias = bias_load(spec, load)
    assert bias is not None  # the plan has checked
    leading, T, S = bias.shape
    return leading, T + -T % ROWS_MULTIPLE, S + -S % _COLUMNS


def without_padding(spec: AttentionSpec, load: Node, x: jax.Array) -> jax.Array:
    """A gradient in the shape of its array."""
    return x[:, : spec.T, : spec.S].reshape(spec.score_shapes[load.value])


def zeros(spec: AttentionSpec, loads: Sequence[Node]) -> dict[int, jax.Ref]:
    """Arrays of zeros, by position of the load, where a kernel that skips blocks does not write all of one."""
    writes_all = lambda load: block_walk.visits_all(spec) and covers(spec, load, spec.score_shapes[load.value])
    make = lambda load: jax.new_ref(jnp.zeros(padded_shape(spec, load), load.dtype))
    return {i: make(load) for i, load in enumerate(loads) if not writes_all(load)}


class BiasGradients(NamedTuple):
    """Targets of the cotangents of a consumer warp group."""

    staged: Sequence[Ref]  # its shared memory, [rows, keys] for each load
    targets: Sequence[Callable[[Index], Ref]]  # ``(first key) -> global memory`` of a tile, for each load

    @classmethod
    def from_loads(
        cls,
        spec: AttentionSpec,
        loads: Sequence[Node],
        staged: Sequence[Ref],
        outs: Sequence[Ref],
        prepared: Evaluation | None,
        q_first: Index,
    ) -> BiasGradients:
        """For rows from `q_first` on; `prepared` has the uniform values of the score mod."""

        def target(load: Node, out: Ref) -> Callable[[Index], Ref]:
            bias = bias_load(spec, load)
            assert bias is not None  # the plan has checked
            assert prepared is not None  # whose load it is
            leading = bias.leading(prepared, spec.score_shapes[load.value])
            rows, keys = staged[0].shape
            return lambda first: out.at[leading, pl.ds(q_first, rows), pl.ds(first, keys)]

        return cls(staged, [target(load, out) for load, out in zip(loads, outs, strict=True)])

    def store(self, first: Index, cotangents: Sequence[jax.Array]) -> None:
        """Starts the TMA stores of a tile, which drop elements past the end."""
        if not self.staged:
            return
        plg.wait_smem_to_gmem(0, wait_read_only=True)
        for ref, x in zip(self.staged, cotangents, strict=True):
            ref[...] = x.astype(ref.dtype)
        plg.commit_smem()
        for ref, target in zip(self.staged, self.targets, strict=True):
            plg.copy_smem_to_gmem(ref, target(first))

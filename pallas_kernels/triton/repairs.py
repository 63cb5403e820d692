"""Triton kernels recompute what the Hopper kernels marked (`pallas_kernels.softmax.mark`)."""

from __future__ import annotations

import functools

import jax

from pallas_kernels.config import Tiles
from pallas_kernels.gradients import Repairs, row_statistics
from pallas_kernels.program.build import Derivative
from pallas_kernels.spec import AttentionSpec, Operands
from pallas_kernels.triton import forward as forward_kernel
from pallas_kernels.triton.backward import dkv, dq
from pallas_kernels.triton.containment import MAX_TILE

TILES = Tiles(MAX_TILE, MAX_TILE, 4, 1)  # they divide the blocks that the Hopper kernels take


def forward(spec: AttentionSpec, arrays: Operands, result: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Out and lse, recomputed where the lse is NaN."""
    return forward_kernel.repair(spec, TILES, arrays, result)


def backward(
    spec: AttentionSpec,
    arrays: Operands,
    derivative: Derivative | None,
    saved: tuple[jax.Array, jax.Array],
    d_saved: tuple[jax.Array, jax.Array | None],
) -> Repairs:
    """How gradients are recomputed, from output and lse of the forward pass and their cotangents."""
    rows = row_statistics(spec, saved, d_saved)
    return Repairs(
        functools.partial(dq.repair, spec, TILES, arrays, rows, derivative),
        functools.partial(dkv.repair, spec, TILES, arrays, rows, derivative),
    )

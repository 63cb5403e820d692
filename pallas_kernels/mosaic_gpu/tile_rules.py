"""Tiles of the Hopper kernels."""

from __future__ import annotations

from typing import Any

import jax

from pallas_kernels.config import Tiles
from pallas_kernels.mosaic_gpu import bias_tiles, smem
from pallas_kernels.mosaic_gpu.cost import much_arithmetic
from pallas_kernels.mosaic_gpu.forward import kernel
from pallas_kernels.spec import AttentionSpec

MOST_STAGES = 4


def forward_tiles(spec: AttentionSpec, dtype: Any) -> Tiles:
    """Tiles of the forward kernel: two warp groups of 64 queries, and as many stages as fit.

    Stages, then keys, give way to a block of threads that computes many tiles.

    A thread holds half a tile's columns of scores in registers, beside half of Dv for the output: 128 keys go with
    head sizes up to 128, if a mod does not compute much on each element (it spills 1420 bytes where it has a gelu and
    a softplus). H200, jax 0.11.2, bf16, S 16384, no mod, with the first version of the kernel: head size 128 in 6.84 ms
    with 128 keys, 8.32 with 64; head size 64 in 9.12 with 128 keys, 11.58 with 64.
    """
    blocks = spec.block_size or (128, 128)
    groups = 2 if blocks[0] % 128 == 0 and spec.T > 64 else 1
    light = not (much_arithmetic(spec.programs.score) or much_arithmetic(spec.programs.mask))
    wide = max(spec.D, spec.Dv) <= 128 and blocks[1] % 128 == 0 and light
    found = [
        Tiles(64 * groups, block_kv, 4 * groups, stages)
        for block_kv in ((128, 64) if wide else (64,))
        for stages in range(MOST_STAGES, 1, -1)
    ]
    fitting = [t for t in found if suits(spec, t, dtype)] or found[-1:]
    many = (t for t in fitting if kernel.declare(spec, t, dtype).numbers is not None)
    return next(many, fitting[0])


def suits(spec: AttentionSpec, tiles: Tiles, dtype: Any) -> bool:
    """Whether shared memory holds tiles of the forward kernel, and of the elements that the copy engine can bring."""
    declared = kernel.declare(spec, tiles, dtype)
    fits = smem.bytes_of(jax.tree.leaves(declared)) <= smem.LIMIT
    return fits and (declared.brings or not bias_tiles.planes_of(spec))

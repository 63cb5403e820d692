"""Tile sizes of the Hopper forward kernel, where no table has them."""

from __future__ import annotations

import jax
from jax.typing import DTypeLike

from pallas_kernels.config import Tiles
from pallas_kernels.mosaic_gpu import smem
from pallas_kernels.mosaic_gpu.forward import kernel
from pallas_kernels.mosaic_gpu.plan.cost import is_heavy
from pallas_kernels.mosaic_gpu.score import bias_tiles
from pallas_kernels.spec import AttentionSpec

MAX_STAGES = 4


def forward_tiles(spec: AttentionSpec, dtype: DTypeLike) -> Tiles:
    """Tiles of the forward kernel: two consumer warp groups of 64 queries each, and as many stages as fit.

    A persistent kernel has priority: stages, then keys in a tile, are given up for it.

    Register budget: a thread holds half a tile's columns of scores, beside half of Dv for the O accumulator. 128 keys
    go with head sizes up to 128, unless a mod is heavy (one with a gelu and a softplus spills 1420 bytes). H200, jax
    0.11.2, bf16, S 16384, no mod, with the first version of the kernel: head size 128 in 6.84 ms with 128 keys, 8.32
    with 64; head size 64 in 9.12 with 128 keys, 11.58 with 64.
    """
    blocks = spec.block_size or (128, 128)
    groups = 2 if blocks[0] % 128 == 0 and spec.T > 64 else 1
    light = not (is_heavy(spec.programs.score) or is_heavy(spec.programs.mask))
    wide = max(spec.D, spec.Dv) <= 128 and blocks[1] % 128 == 0 and light
    candidates = [
        Tiles(64 * groups, block_kv, 4 * groups, stages)
        for block_kv in ((128, 64) if wide else (64,))
        for stages in range(MAX_STAGES, 1, -1)
    ]
    fitting = [t for t in candidates if suits(spec, t, dtype)] or candidates[-1:]
    persistent = (t for t in fitting if kernel.declare(spec, t, dtype).tile_ids is not None)
    return next(persistent, fitting[0])


def suits(spec: AttentionSpec, tiles: Tiles, dtype: DTypeLike) -> bool:
    """Whether shared memory holds the tiles of the forward kernel, and all bias tiles that TMA can load."""
    declared = kernel.declare(spec, tiles, dtype)
    fits = smem.bytes_of(jax.tree.leaves(declared)) <= smem.LIMIT
    return fits and (declared.has_bias_tiles or not bias_tiles.bias_loads(spec))

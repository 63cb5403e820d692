"""Tiles of the Hopper kernels."""

from __future__ import annotations

from typing import Any

import jax

from pallas_kernels.mosaic_gpu import forward_sm90, memory
from pallas_kernels.setting import Setting, Tiles

MOST_STAGES = 4


def forward_tiles(setting: Setting, dtype: Any) -> Tiles:
    """Tiles of the forward kernel: two warp groups of 64 queries, and as many stages as fit."""
    blocks = setting.blocks or (128, 128)
    groups = 2 if blocks[0] % 128 == 0 and setting.T > 64 else 1
    wide = max(setting.D, setting.Dv) <= 128 and blocks[1] % 128 == 0
    block_kv = 128 if wide else 64
    for stages in range(MOST_STAGES, 1, -1):
        tiles = Tiles(64 * groups, block_kv, 4 * groups, stages)
        if memory.bytes_of(jax.tree.leaves(forward_sm90.declare(setting, tiles, dtype))) <= memory.LIMIT:
            break
    return tiles

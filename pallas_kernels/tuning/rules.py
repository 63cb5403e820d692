"""Tiles when no measured table has them: rules, each with its reason."""

from __future__ import annotations

from pallas_kernels.setting import Tiles


def forward_tiles(head_size: int, itemsize: int) -> Tiles:
    """Tiles of the Triton forward kernel.

    A tile must hold query, output and scores in registers, and `num_stages` tiles of key and value in shared memory (227
    KiB on Hopper). Products use wgmma from 64 rows and 4 warps on.
    """
    if itemsize == 4:
        return Tiles(64, 32, 4, 2) if head_size <= 128 else Tiles(32, 32, 4, 1)
    if head_size <= 64:
        return Tiles(128, 64, 4, 3)
    return Tiles(128, 64, 8, 3) if head_size <= 128 else Tiles(64, 64, 8, 2)


def dkv_tiles(head_size: int, itemsize: int) -> Tiles:
    """Tiles of the Triton kernel for dK and dV, which holds key, value and both gradients in registers."""
    if itemsize == 4:
        return Tiles(32, 32, 4, 2) if head_size <= 128 else Tiles(16, 32, 4, 1)
    return Tiles(64, 64, 4, 2) if head_size <= 64 else Tiles(64, 64, 8, 2) if head_size <= 128 else Tiles(32, 64, 8, 1)


def dq_tiles(head_size: int, itemsize: int) -> Tiles:
    """Tiles of the Triton kernel for dQ."""
    if itemsize == 4:
        return Tiles(32, 32, 4, 2) if head_size <= 128 else Tiles(32, 16, 4, 1)
    return Tiles(64, 64, 4, 2) if head_size <= 64 else Tiles(64, 64, 8, 2) if head_size <= 128 else Tiles(64, 32, 8, 1)

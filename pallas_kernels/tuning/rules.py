"""Tiles when no measured table has them: rules, each with its reason."""

from __future__ import annotations

from typing import NamedTuple

from pallas_kernels.mods import Program
from pallas_kernels.setting import Tiles

HEAVY = 24  # values of a mod at the size of a tile, from which on it takes the registers of a large tile


def is_heavy(score: Program | None, mask: Program | None) -> bool:
    """Whether mods take the registers of a large tile: they read by element, compute much, or change scores by the key.

    Compiled for sm_90a at head size 64, 128 x 128, 4 warps: a table by element spills 516 bytes, a float32 bias by the
    key 4200; a mask by the key (document ids) spills nothing.
    """
    nodes = [node for program in (score, mask) if program is not None for node in program.nodes]
    tiles = [node for node in nodes if node.kind == "qk"]
    by_key = score is not None and any(node.kind == "k" for node in score.loads)
    return by_key or len(tiles) > HEAVY or any(node.op == "load" for node in tiles)


class Need(NamedTuple):
    """What decides on tiles.

    Attributes:
      head_size: The larger one, D or Dv.
      itemsize: Bytes of an element of query, key and value.
      heavy: See `is_heavy`.
      large_memory: Whether a block may have 227 KiB of shared memory (Hopper and later), or 99 (Ada; Ampere has 99 or
        163).
    """

    head_size: int
    itemsize: int
    heavy: bool
    large_memory: bool


def has_large_memory(device_kind: str) -> bool:
    """Whether a device of this name is known to have Hopper's shared memory."""
    return any(
        name in device_kind for name in ("H100", "H200", "H800", "H20", "GH200", "B100", "B200", "GB200", "B300")
    )


def forward_tiles(need: Need) -> Tiles:
    """Tiles of the Triton forward kernel.

    A tile must hold query, output and scores in registers, and `num_stages` tiles of key and value in shared memory.
    Products use wgmma from 64 rows and 4 warps on. H200, jax 0.11.2, bf16, S 16384, causal, TFLOP/s: head size 64 (B 4,
    H 16) 344 with 128 x 128, 4 warps, 2 stages; 324 with 128 x 64, 4 or 8 warps, 3 stages. Head size 128 (B 2, H 16)
    396 with 128 x 128, 8 warps, 3 stages; 392 with 2 stages; 310 with 128 x 64, 8 warps, 3 stages. Without Hopper's
    shared memory: what fits, unmeasured.
    """
    if need.itemsize == 4:
        return Tiles(64, 32, 4, 2) if need.head_size <= 128 else Tiles(32, 32, 4, 1)
    if not need.large_memory:
        return Tiles(64, 64, 4, 2) if need.head_size <= 128 else Tiles(32, 32, 4, 1)
    if need.heavy and need.head_size <= 128:
        return Tiles(128, 64, 8, 2)
    if need.head_size <= 64:
        return Tiles(128, 128, 4, 2)
    return Tiles(128, 128, 8, 3) if need.head_size <= 128 else Tiles(64, 64, 8, 2)


def dkv_tiles(need: Need) -> Tiles:
    """Tiles of the Triton kernel for dK and dV, which holds key, value and both gradients in registers.

    Backward pass, as above: head size 64, 333 with 64 x 64, 4 warps, 2 stages, at most 290 with larger tiles and 8
    warps; head size 128, 359, against 263 with 64 x 128, 8 warps, and 236 with a third stage.
    """
    if need.itemsize == 4:
        return Tiles(32, 32, 4, 2) if need.head_size <= 128 else Tiles(16, 32, 4, 1)
    if need.head_size > 128:
        return Tiles(32, 64, 8, 1) if need.large_memory else Tiles(16, 32, 4, 1)
    if need.head_size > 64 and not need.large_memory:
        return Tiles(32, 64, 4, 1)
    return Tiles(64, 64, 8 if need.heavy else 4, 2)


def dq_tiles(need: Need) -> Tiles:
    """Tiles of the Triton kernel for dQ; measured with `dkv_tiles`."""
    if need.itemsize == 4:
        return Tiles(32, 32, 4, 2) if need.head_size <= 128 else Tiles(32, 16, 4, 1)
    if need.head_size > 128:
        return Tiles(64, 32, 8, 1) if need.large_memory else Tiles(32, 16, 4, 1)
    if need.head_size > 64 and not need.large_memory:
        return Tiles(64, 32, 4, 1)
    return Tiles(64, 64, 8 if need.heavy else 4, 2)

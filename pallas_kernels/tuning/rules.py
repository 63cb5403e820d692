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
    Products use wgmma from 64 rows and 4 warps on. H200, jax 0.11.2, bf16, S 16384, TFLOP/s over visited blocks for
    causal, none, ALiBi and causal: head size 64 (B 4, H 16) 393, 419, 313 with 128 x 128, 4 warps, 2 stages; 355, 416,
    302 with 128 x 64, 4 warps, 3 stages; 274, 322, 236 with 128 x 128, 8 warps. Head size 128 (B 2, H 16) 474, 491, 422
    with 128 x 64, 4 warps, 2 stages; 401, 480, 359 with 128 x 128, 8 warps, 3 stages; 363, 405, 353 with 64 x 64, 4
    warps, which spills nothing where mods are heavy. Without Hopper's shared memory: what fits, unmeasured.
    """
    if need.itemsize == 4:
        return Tiles(64, 32, 4, 2) if need.head_size <= 128 else Tiles(32, 32, 4, 1)
    if need.head_size > 128:
        return Tiles(64, 64, 8, 2) if need.large_memory else Tiles(32, 32, 4, 1)
    if need.heavy or not need.large_memory:
        return Tiles(64, 64, 4, 2)
    return Tiles(128, 128, 4, 2) if need.head_size <= 64 else Tiles(128, 64, 4, 2)


def dkv_tiles(need: Need) -> Tiles:
    """Tiles of the Triton kernel for dK and dV, which holds key, value and both gradients in registers.

    As above, causal, ALiBi and causal, in milliseconds: head size 64, 9.1 and 11.9 with 64 x 64, 4 warps, 2 stages,
    10.4 and 12.2 with 128 x 128, 8 warps, 27.6 and 30.5 with 64 x 64, 8 warps; head size 128, 8.5 and 8.9 with 64 x 64,
    4 warps, 8.7 and 9.4 with 64 x 128, 8 warps.
    """
    if need.itemsize == 4:
        return Tiles(32, 32, 4, 2) if need.head_size <= 128 else Tiles(16, 32, 4, 1)
    if need.head_size > 128:
        return Tiles(32, 64, 8, 1) if need.large_memory else Tiles(16, 32, 4, 1)
    if need.head_size > 64 and not need.large_memory:
        return Tiles(32, 64, 4, 1)
    return Tiles(64, 64, 4, 2)


def dq_tiles(need: Need) -> Tiles:
    """Tiles of the Triton kernel for dQ.

    As above: head size 64, 6.6 and 7.5 ms with 64 x 64, 4 warps, 2 stages, 6.5 and 11.0 with 128 x 64, 8 warps; head
    size 128, 6.1 and 6.4 with 64 x 64, 4 warps, 6.2 and 6.6 with 128 x 128, 8 warps.
    """
    if need.itemsize == 4:
        return Tiles(32, 32, 4, 2) if need.head_size <= 128 else Tiles(32, 16, 4, 1)
    if need.head_size > 128:
        return Tiles(64, 32, 8, 1) if need.large_memory else Tiles(32, 16, 4, 1)
    if need.head_size > 64 and not need.large_memory:
        return Tiles(64, 32, 4, 1)
    return Tiles(64, 64, 4, 2)

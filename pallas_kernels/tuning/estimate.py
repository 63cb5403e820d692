"""What a tile takes, counted from what the kernels hold: to tell configurations that cannot work before compiling."""

from __future__ import annotations

from pallas_kernels.setting import Tiles
from pallas_kernels.triton.columns import chunks

HOPPER_SHARED_MEMORY = 232448  # bytes that a block may have
MOST_REGISTERS = (
    272  # of values that live through a loop; a thread has 255, and some values are rounded to 16 bits early
)


def shared_memory(kernel: str, tiles: Tiles, D: int, Dv: int, itemsize: int) -> int:
    """Bytes of shared memory of a Triton kernel, at least: its own rows, and `num_stages` tiles of those it walks.

    What mods read by element, and the exchange of rows between warps, comes on top.

    >>> shared_memory("forward", Tiles(128, 128, 4, 2), 64, 64, 2)
    81920
    """
    size, size_v = (sum(width for _, width in chunks(x)) for x in (D, Dv))
    both = size + size_v
    if kernel == "forward":
        elements = tiles.block_q * size + tiles.num_stages * tiles.block_kv * both
    elif kernel == "dq":
        elements = tiles.block_q * both + tiles.num_stages * tiles.block_kv * both
    else:
        elements = tiles.block_kv * both + tiles.num_stages * tiles.block_q * both
    return elements * itemsize


def registers(kernel: str, tiles: Tiles, D: int, Dv: int) -> float:
    """Registers of a thread that accumulators, scores and weights take.

    >>> registers("forward", Tiles(128, 64, 4, 2), 128, 128)
    224.0
    """
    size, size_v = (sum(width for _, width in chunks(x)) for x in (D, Dv))
    scores = tiles.block_q * tiles.block_kv
    held = {
        "forward": tiles.block_q * size_v + 1.5 * scores,  # the weights stand beside the scores, in 16 bits
        "dq": tiles.block_q * size + 2.5 * scores,
        "dkv": tiles.block_kv * (size + size_v) + 2.5 * scores,
    }
    return held[kernel] / (32 * tiles.num_warps)


def may_work(kernel: str, tiles: Tiles, D: int, Dv: int, itemsize: int) -> bool:
    """Whether a configuration has a chance on Hopper."""
    fits = shared_memory(kernel, tiles, D, Dv, itemsize) <= HOPPER_SHARED_MEMORY
    return fits and registers(kernel, tiles, D, Dv) <= MOST_REGISTERS

"""Adapter of the Triton kernel of paged attention."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jflex.backends.gpu.programs import Programs, programs_of, traced_alone
from jflex.backends.gpu.triton import MOST_DECODED, MOST_ROWS, SMALLEST_TILE, limit_of_kernels
from jflex.backends.paged_base import PagedBackend
from jflex.config import Tiles
from jflex.paged.problem import PagedInputs, PagedProblem

MOST_GROUPED = 128  # query heads of a key head, all of them rows of a tile
_ALL = 1 << 30


class PagedTriton(PagedBackend):
    """Fused kernels for NVIDIA GPUs from Ampere on."""

    name: ClassVar[str] = "triton"

    def unsupported(self, problem: PagedProblem) -> str | None:
        """The first thing that stands in the way."""
        reason = limit_of_kernels(problem)
        if reason is not None:
            return reason
        if problem.group > MOST_GROUPED:
            return f"its kernels take up to {MOST_GROUPED} query heads for each key head, not {problem.group}"
        programs = programs_of(problem, heads_in_rows=True)
        if isinstance(programs, str):
            return programs
        smallest = min(min(tiles.block_q, tiles.block_kv) for tiles, _, _ in _works(problem))
        if smallest < SMALLEST_TILE:
            return f"its tiles are powers of two from {SMALLEST_TILE} on, and what `config` sets asks for {smallest}"
        return None

    @traced_alone
    def attend(self, problem: PagedProblem, inputs: PagedInputs) -> tuple[jax.Array, jax.Array]:
        """Runs the kernel, once for requests with few queries, and once for those with many if there can be any."""
        from pallas_kernels.spec import Tiles as KernelTiles
        from pallas_kernels.spec import as_int8
        from pallas_kernels.triton.paged import kernel as paged_kernel
        from pallas_kernels.triton.paged.work import PagedArrays, Work

        captured = (tuple(map(as_int8, group)) for group in (inputs.score_operands, inputs.mask_operands))
        works = tuple(
            Work(KernelTiles(*dataclasses.astuple(tiles)), least, most) for tiles, least, most in _works(problem)
        )
        return paged_kernel.paged(_setting(problem), works, PagedArrays(*inputs[:7], *captured))


def _works(p: PagedProblem) -> list[tuple[Tiles, int, int]]:
    """Tiles for requests from so many queries to so many.

    With no more queries than requests, a request with many is possible only beside others with none: that is right too,
    and not worth a launch (2 us) in every step of decoding.
    """
    mean = -(-p.T // max(p.B, 1))
    queries = mean if mean <= MOST_DECODED else 1
    rows = min(p.group * queries, max(MOST_ROWS, p.group))
    if p.B == 1 and p.T > MOST_DECODED:  # most likely one request with all of them, or with most
        return [(_tiles(p, "forward", p.group), 0, _ALL)]
    if max(p.B, MOST_DECODED) >= p.T:
        return [(_tiles(p, "decode", rows), 0, _ALL)]
    return [(_tiles(p, "decode", rows), 0, MOST_DECODED), (_tiles(p, "forward", p.group), MOST_DECODED + 1, _ALL)]


def _tiles(p: PagedProblem, kernel: str, rows: int) -> Tiles:
    """The user's, else those of the rules for dense keys; at least so many rows."""
    from pallas_kernels.triton import cost
    from pallas_kernels.tuning import triton_rules

    given = getattr(p.config, kernel)
    programs = programs_of(p, heads_in_rows=True)
    assert isinstance(programs, Programs)
    need = triton_rules.Need(
        max(p.D, p.Dv),
        jnp.dtype(p.dtype).itemsize,
        triton_rules.is_heavy(programs.score, programs.mask),
        programs.score is not None,
        triton_rules.has_large_memory(p.device_kind),
    )
    if kernel == "decode":
        made = triton_rules.paged_decode_tiles(need, rows, p.max_pages, p.S)
    else:
        made = triton_rules.paged_prefill_tiles(need)
    tiles = Tiles(*made) if given is None else given
    least = triton_rules.decode_rows(rows)
    block_q = least if kernel == "decode" else max(tiles.block_q, least)
    if given is None and block_q > 64:
        tiles = dataclasses.replace(tiles, num_warps=8)
    block_kv = min(tiles.block_kv, max(SMALLEST_TILE, 1 << (p.S - 1).bit_length())) if given is None else tiles.block_kv
    stages = tiles.num_stages if cost.can_pipeline(programs.score) else 1
    return dataclasses.replace(tiles, block_q=block_q, block_kv=block_kv, num_stages=stages)


@functools.lru_cache(maxsize=256)
def _setting(p: PagedProblem) -> Any:
    from pallas_kernels.spec import Setting
    from pallas_kernels.triton.paged.work import PagedSetting

    programs = programs_of(p, heads_in_rows=True)
    assert isinstance(programs, Programs)
    mods = (programs.score, programs.mask)
    sizes = (p.B, p.T, p.S, p.Hq, p.Hkv, p.B, p.D, p.Dv)
    attention = Setting(*sizes, "BTNH", p.scale, *mods, None, 1, 1, p.precision, p.config.interpret)
    return PagedSetting(attention, p.page_size, p.num_pages, p.max_pages, p.out_dtype)

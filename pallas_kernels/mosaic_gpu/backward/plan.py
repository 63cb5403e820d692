"""Tiles of the backward kernels for Hopper, and which gradients and tiles these kernels support."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.config import Tiles
from pallas_kernels.mosaic_gpu.backward import captured_work, dq, walk
from pallas_kernels.mosaic_gpu.backward.dkv import MAX_HEAD_SIZE_BOTH_SUMS
from pallas_kernels.mosaic_gpu.backward.one_pass import fits
from pallas_kernels.mosaic_gpu.launch import padded_head_sizes
from pallas_kernels.mosaic_gpu.score import bias_gradients, bias_tiles
from pallas_kernels.mosaic_gpu.score.tile import is_heavy
from pallas_kernels.program.cotangents import LoadGroups
from pallas_kernels.spec import AttentionSpec

MAX_HEAD_SIZE_BIAS_TILES = 192  # up to which shared memory holds bias tiles beside the queries of two groups


class BackwardTiles(NamedTuple):
    """Tiles of the kernels."""

    dkv: Tiles  # for dK and dV
    # for dQ; None where the kernel for captured arrays computes dQ, or without it the one for dK and dV. Neither is
    # deterministic.
    dq: Tiles | None
    captured: Tiles | None = None  # for captured arrays that are shared by batch or heads; None without such


def unsupported_groups(spec: AttentionSpec, groups: LoadGroups) -> str | None:
    """The gradients of captured arrays that these kernels do not support, as part of a sentence, or None."""
    shared = all(captured_work.supports(spec, group) for group in groups.repeated)
    if not shared or groups.atomics or any(bias_gradients.bias_load(spec, n) is None for n in groups.stores):
        return "the gradient of an array that is read by query and key at once needs additions by element"
    return None


def unsupported_tiles(spec: AttentionSpec, dkv: Tiles | None, dq: Tiles | None, *, one_pass: bool) -> str | None:
    """Why tiles that a user set are not supported, as part of a sentence, or None.

    Without tiles for dQ one pass is to compute all, which `one_pass` allows.
    """
    if dkv is None:
        return "`config` sets tiles for dq alone"
    wide = max(_padded(spec).D, _padded(spec).Dv) > MAX_HEAD_SIZE_BOTH_SUMS
    for name, tiles, rows, columns in (("dkv", dkv, "block_kv", "block_q"), ("dq", dq, "block_q", "block_kv")):
        if tiles is None:
            continue
        sizes = dataclasses.asdict(tiles)
        shapes, rule = ((4, 64), (8, 128)), "a warp group of 4 warps takes 64 rows"
        if wide and name == "dkv":
            shapes, rule = ((8, 64),), "two warp groups of 4 warps share 64 keys"
            if dq is None and _holds_both_sums(_padded(spec), tiles):
                continue
        if (tiles.num_warps, sizes[rows]) not in shapes or sizes[columns] % 64:
            return (
                f"{rule}, and `config` sets for {name} `{rows}` {sizes[rows]} and `{columns}` {sizes[columns]} with "
                f"{tiles.num_warps} warps"
            )
    if dq is None and not (one_pass and fits(_padded(spec), dkv) and _holds_both_sums(_padded(spec), dkv)):
        return "`config` sets no tiles for dq, which a kernel of its own computes here"
    return None


def is_one_pass_faster(spec: AttentionSpec, tiles: BackwardTiles, groups: LoadGroups) -> bool:
    """True if tiles are of one pass, and it is faster than two.

    Short sequences have few MMAs beside the float32 dQ in global memory, which one pass sets to zero, adds to and
    converts. H200, jax 0.11.2, bf16, 16384 tokens, 16 heads, causal, one pass and two in us: head size 64, 256 tokens
    201 and 224, 512 231 and 284; head size 128, 512 tokens 411 and 385. With 4 key heads, head size 64, 512 tokens 242
    and 232; main kernels alone, 1024 tokens 203 and 304; head size 128, 1024 tokens 396 and 415, 2048 558 and 716. At
    head size 64 other kernels take 81 us around one pass, 30 around two; at 128 they have twice the bytes.

    False too where TMA loads bias tiles in the kernel for dQ alone, as it does for 32 bits: with such a pair bias for
    each of 16 heads, 4 x 4096 tokens, 3920 and 3769 at head size 128. With one of 16 bits 2553 and 3251.
    """
    is_grouped = spec.group > 1
    least = (1024 if is_grouped else 256) if max(spec.D, spec.Dv) <= 64 else (2048 if is_grouped else 1024)
    if tiles.dq is not None or least > spec.T:
        return False
    has_bias_tiles = declare(spec, tiles, jnp.bfloat16, groups)[0].stream.bias is not None
    return has_bias_tiles or not bias_tiles.bias_loads(_padded(spec))


def backward_tiles(spec: AttentionSpec, *, one_pass: bool) -> BackwardTiles | None:
    """The tiles that were fastest on an H200, cut to divide the blocks; None if no tile does.

    In one pass, where they fit it and `one_pass` allows it. A heavy mod takes two kernels: with T5's buckets at head
    size 64 a tile of 128 x 128 spills 1568 bytes, tiles half as large in two kernels none.
    """
    spec, blocks = _padded(spec), spec.block_size or (128, 128)
    if any(size % 64 for size in blocks):
        return None
    widest = max(spec.D, spec.Dv)
    light = not is_heavy(spec.programs.score) and spec.dropout is None
    narrow = widest <= 64 and light and len(bias_tiles.bias_loads(spec)) < 2
    groups_q, groups_kv = (2 if size % 128 == 0 else 1 for size in blocks)
    if widest > MAX_HEAD_SIZE_BIAS_TILES and bias_tiles.bias_loads(spec):
        groups_q = 1
    block_q = 128 if narrow and groups_q == 2 and groups_kv == 2 else 64
    dkv = Tiles(block_q, 64 * groups_kv, 4 * groups_kv, 2)
    if widest > MAX_HEAD_SIZE_BOTH_SUMS:
        dkv = Tiles(64, 64, 8, 2)  # two groups share the keys
        if one_pass and light and groups_kv == 2 and _holds_both_sums(spec, _OF_WIDE):
            return BackwardTiles(_OF_WIDE, None)
    elif one_pass and fits(spec, dkv):
        return BackwardTiles(dkv, None)
    return BackwardTiles(dkv, Tiles(64 * groups_q, 128 if narrow and groups_kv == 2 else 64, 4 * groups_q, 2))


_OF_WIDE = Tiles(64, 128, num_warps=8, num_stages=2)
_MAX_WIDE, _MAX_WIDE_SUM = 192, 320  # head size of queries and of values, and both together


def _holds_both_sums(spec: AttentionSpec, tiles: Tiles) -> bool:
    """True if each warp group has registers for dK and dV of 64 keys."""
    widest = max(spec.D, spec.Dv)
    if widest <= MAX_HEAD_SIZE_BOTH_SUMS:
        return True
    fits_registers = widest <= _MAX_WIDE and spec.D + spec.Dv <= _MAX_WIDE_SUM
    is_pair = tiles.shape == _OF_WIDE.shape and tiles.num_warps == _OF_WIDE.num_warps  # of groups
    return fits_registers and is_pair and fits(spec, tiles)


def captured_tiles(spec: AttentionSpec, dtype: DTypeLike, groups: LoadGroups, *, with_query: bool) -> Tiles | None:
    """Tiles of the kernel for shared captured arrays, with which its scratch fits; None if there are none."""
    spec = _padded(spec)
    tiles = captured_work.tiles_for(spec)
    if tiles is None or not all(captured_work.supports(spec, group) for group in groups.repeated):
        return None
    stages = []
    for group in groups.repeated:
        work = captured_work.CapturedWork.from_group(spec, tiles, group)
        scratch = captured_work.declare(spec, work, dtype, with_query=with_query)
        if scratch is None:
            return None
        stages.append(scratch.stream.tiles[0].shape[0])
    return dataclasses.replace(tiles, num_stages=min(stages, default=tiles.num_stages))


def declare(
    spec: AttentionSpec, tiles: BackwardTiles, dtype: DTypeLike, groups: LoadGroups
) -> tuple[walk.DkvScratch, *tuple[dq.DqScratch, ...]]:
    """The scratch of a CTA of each kernel, for `smem.bytes_of` of its leaves."""
    spec = _padded(spec)
    one_pass = tiles.dq is None and tiles.captured is None
    dkv_scratch = walk.declare(spec, tiles.dkv, dtype, groups, one_pass=one_pass)
    return (dkv_scratch,) if tiles.dq is None else (dkv_scratch, dq.declare(spec, tiles.dq, dtype, groups))


def _padded(spec: AttentionSpec) -> AttentionSpec:
    D, Dv = padded_head_sizes(spec, jnp.bfloat16)  # float16 is as wide
    return spec.replace(D=D, Dv=Dv)

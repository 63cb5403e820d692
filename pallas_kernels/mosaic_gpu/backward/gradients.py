"""Backward pass for Hopper: its kernels, and the gradients of captured arrays.

With P the probabilities and dO the cotangent of the output (Dao 2023, arXiv:2307.08691, section 3.1.2)::

    dV = P^T dO,   dS = P * (dO V^T - delta),   delta = rowsum(dO * O) - dlse,   dQ = dS' K,   dK = dS'^T Q

where dS' is dS pulled back through the score mod. One pass computes all of it with five GEMMs; tiles of keys add to dQ
in no fixed order, so its last bits may differ between runs. Or two kernels recompute P and dO V^T each, one for dK and
dV, one for dQ: seven GEMMs, and the same bits in each run. Head sizes of more than 128 take three kernels, one for each
gradient: eight GEMMs.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.config import Tiles
from pallas_kernels.gradients import (
    Gradients,
    Repairs,
    RequestedGradients,
    collect,
    row_statistics,
    sum_batch,
    sum_gradients,
)
from pallas_kernels.mosaic_gpu import padding
from pallas_kernels.mosaic_gpu.backward import captured as backward_captured
from pallas_kernels.mosaic_gpu.backward import captured_work, walk
from pallas_kernels.mosaic_gpu.backward import dkv as backward_dkv
from pallas_kernels.mosaic_gpu.backward import dq as backward_dq
from pallas_kernels.mosaic_gpu.backward.one_pass import fits
from pallas_kernels.mosaic_gpu.plan.cost import is_heavy
from pallas_kernels.mosaic_gpu.score import bias_gradients, bias_tiles
from pallas_kernels.program.cotangents import LoadGroups, group_loads
from pallas_kernels.spec import AttentionSpec, Operands

MIN_ONE_PASS_LENGTH = 1024  # queries from which on one pass is faster (`is_one_pass_faster`)
MAX_HEAD_SIZE_TWO_GROUPS = 192  # up to which shared memory holds what two consumers own, beside what they stream


class BackwardTiles(NamedTuple):
    """Tiles of the kernels.

    Attributes:
      dkv: Of the kernel for dK and dV.
      dq: Of that for dQ; None where another computes dQ too, which is not deterministic: that for captured arrays, and
        without it that for dK and dV.
      captured: Of the kernel for captured arrays that are shared by batch or heads; None without such.
    """

    dkv: Tiles
    dq: Tiles | None
    captured: Tiles | None = None


def unsupported_groups(spec: AttentionSpec, groups: LoadGroups) -> str | None:
    """Which gradients of captured arrays these kernels do not support, as part of a sentence, or None."""
    shared = all(captured_work.supports(spec, group) for group in groups.repeated)
    if not shared or groups.atomics or any(bias_gradients.bias_load(spec, n) is None for n in groups.stores):
        return "the gradient of an array that is read by query and key at once needs additions by element"
    return None


def unsupported_tiles(spec: AttentionSpec, dkv: Tiles | None, dq: Tiles | None, *, one_pass: bool) -> str | None:
    """Why tiles that a user set are not supported, as part of a sentence, or None.

    Args:
      spec: The spec.
      dkv: Of the kernel for dK and dV.
      dq: Of that for dQ; None if one pass is to compute it.
      one_pass: Whether one pass may.
    """
    if dkv is None:
        return "`config` sets tiles for dq alone"
    for name, tiles, own, walked in (("dkv", dkv, "block_kv", "block_q"), ("dq", dq, "block_q", "block_kv")):
        if tiles is None:
            continue
        sizes = dataclasses.asdict(tiles)
        if tiles.num_warps not in (4, 8) or sizes[own] != 16 * tiles.num_warps or sizes[walked] % 64:
            return (
                f"a warp group of 4 warps takes 64 rows, and `config` sets for {name} `{own}` {sizes[own]} and "
                f"`{walked}` {sizes[walked]} with {tiles.num_warps} warps"
            )
    narrow = max(_padded(spec).D, _padded(spec).Dv) <= backward_dkv.MAX_HEAD_SIZE_BOTH_SUMS
    if dq is None and not (one_pass and narrow and fits(_padded(spec), dkv)):
        return "`config` sets no tiles for dq, which a kernel of its own computes here"
    return None


def is_one_pass_faster(spec: AttentionSpec, tiles: BackwardTiles, groups: LoadGroups) -> bool:
    """Whether tiles are of one pass, and it is faster than two.

    Short sequences have few MMAs beside the float32 dQ in global memory, which one pass sets to zero, adds to and
    converts. H200, jax 0.11.2, bf16, 32768 tokens, 16 heads, one pass and two in us, causal: head size 64 438 and 383
    at 256 tokens, 533 and 493 at 512, 660 and 644 at 1024; head size 128 730 and 575, 867 and 748, 1051 and 1007.
    Without a mask, 1024 tokens: 915 and 928, 1493 and 1544.

    Nor where TMA loads bias tiles in the kernel for dQ alone, as it does those of 32 bits: with
    such a pair bias for each of 16 heads, 4 x 4096 tokens, 3538 and 3278 at head size 64, 3920 and 3769 at 128. With
    one of 16 bits 2012 and 1992, 2553 and 3251; under a causal mask 998 and 1090, 1587 and 1778.
    """
    if tiles.dq is not None or spec.T < MIN_ONE_PASS_LENGTH:
        return False
    has_bias_tiles = declare(spec, tiles, jnp.bfloat16, groups)[0].stream.bias is not None
    return has_bias_tiles or not bias_tiles.bias_loads(_padded(spec))


def tiles_for(spec: AttentionSpec, *, one_pass: bool) -> BackwardTiles | None:
    """The tiles that were fastest on an H200, cut to what divides the blocks; None if no tile does.

    In one pass, where they fit it and `one_pass` allows it. A heavy mod takes two kernels, by the compiler's account
    and not by measurement: with T5's buckets at head size 64 a tile of 128 x 128 spills 1568 bytes, tiles half as large
    in two kernels none.
    """
    spec, blocks = _padded(spec), spec.block_size or (128, 128)
    if any(size % 64 for size in blocks):
        return None
    widest = max(spec.D, spec.Dv)
    light = not is_heavy(spec.programs.score) and spec.dropout is None
    narrow = widest <= 64 and light and len(bias_tiles.bias_loads(spec)) < 2
    pair = lambda size: 2 if size % 128 == 0 and widest <= MAX_HEAD_SIZE_TWO_GROUPS else 1
    groups_kv, groups_q = pair(blocks[1]), pair(blocks[0])
    block_q = 128 if narrow and groups_q == 2 and groups_kv == 2 else 64
    dkv = Tiles(block_q, 64 * groups_kv, 4 * groups_kv, 2)
    if one_pass and widest <= backward_dkv.MAX_HEAD_SIZE_BOTH_SUMS and fits(spec, dkv):
        return BackwardTiles(dkv, None)
    return BackwardTiles(dkv, Tiles(64 * groups_q, 128 if narrow and groups_kv == 2 else 64, 4 * groups_q, 2))


def _padded(spec: AttentionSpec) -> AttentionSpec:
    D, Dv = padding.head_sizes(spec, jnp.bfloat16)  # float16 is as wide
    return spec.replace(D=D, Dv=Dv)


def declare(
    spec: AttentionSpec, tiles: BackwardTiles, dtype: DTypeLike, groups: LoadGroups
) -> tuple[walk.Scratch, *tuple[backward_dq.Scratch, ...]]:
    """The scratch of a CTA of each kernel, for `smem.bytes_of` of its leaves."""
    spec = _padded(spec)
    one_pass = tiles.dq is None and tiles.captured is None
    declared = walk.declare(spec, tiles.dkv, dtype, groups, one_pass=one_pass)
    return (declared,) if tiles.dq is None else (declared, backward_dq.declare(spec, tiles.dq, dtype, groups))


def captured_tiles(spec: AttentionSpec, dtype: DTypeLike, groups: LoadGroups, *, with_query: bool) -> Tiles | None:
    """Tiles of the kernel for shared captured arrays, with which its scratch fits; None if there are none."""
    spec = _padded(spec)
    tiles = captured_work.tiles_for(spec)
    if tiles is None or not all(captured_work.supports(spec, group) for group in groups.repeated):
        return None
    work = [captured_work.Work.of(spec, tiles, group) for group in groups.repeated]
    stages = []
    for x in work:
        declared = captured_work.declare(spec, x, dtype, with_query=with_query)
        if declared is None:
            return None
        stages.append(declared.stream.tiles[0].shape[0])
    return dataclasses.replace(tiles, num_stages=min(stages, default=tiles.num_stages))


def backward(
    spec: AttentionSpec,
    tiles: BackwardTiles,
    arrays: Operands[jax.Array],
    requested: RequestedGradients,
    saved: tuple[jax.Array, jax.Array],
    d_saved: tuple[jax.Array, jax.Array | None],
    repairs: Repairs,
) -> Gradients:
    """Computes the requested gradients.

    Args:
      spec: The spec.
      tiles: Of the kernels; without those for dQ, one pass computes all.
      arrays: The inputs of the forward pass.
      requested: Which gradients; `unsupported_groups` of its loads must be None.
      saved: Output and lse of the forward pass.
      d_saved: Their cotangents; that of lse may be None.
      repairs: What computes marked rows again, where there is a mask.
    """
    rows = row_statistics(spec, saved, d_saved)
    if spec.normalize == "none":  # the kernels add -delta to dP
        rows = rows._replace(delta=jnp.zeros_like(rows.delta))
    groups = group_loads(spec, requested.derivative)
    unpadded, (spec, arrays) = spec, padding.padded(spec, arrays)
    rows = rows._replace(d_out=padding.pad_rows(spec, rows.d_out, spec.Dv))
    assert unsupported_groups(spec, groups) is None  # the plan has checked
    gradients: dict[int, list[jax.Array]] = {i: [] for i in range(len(arrays.captured.score))}
    d_query = d_key = d_value = None
    summed = [captured_work.Work.of(spec, tiles.captured, x) for x in groups.repeated] if tiles.captured else []
    query_by_captured = bool(summed) and tiles.dq is None and requested.query
    one_pass = tiles.dq is None and requested.query and not query_by_captured
    for n, work in enumerate(summed):
        assert requested.derivative is not None  # whose loads they are
        found = backward_captured.captured(
            spec, work, arrays, rows, requested.derivative, groups, with_query=query_by_captured and n == 0
        )
        for load, x in zip(work.loads, found.loads, strict=True):
            gradients[load.value].append(x)
        if found.query is not None:
            d_query = _like_query(spec, arrays, unpadded, found.query)
            if spec.needs_marks:
                d_query = repairs.query(d_query, _marks_of_rows(found.query))
    if groups.rows or groups.stores or (requested.query and tiles.dq is not None):
        assert tiles.dq is not None, "cotangents of loads by query are computed by the kernel for dQ"
        outputs = backward_dq.dq(spec, tiles.dq, arrays, rows, requested.derivative, groups)
        d_query = padding.cut_rows(spec, outputs.query, unpadded.T, unpadded.D) if requested.query else None
        if d_query is not None and outputs.marks is not None:
            d_query = repairs.query(d_query, outputs.marks)
        collect(spec, requested.derivative, arrays, groups.rows, outputs.rows, gradients)
        for load, x in zip(groups.stores, outputs.stores, strict=True):
            gradients[load.value].append(x)
    if requested.key_or_value or groups.columns or one_pass:
        outputs = backward_dkv.dkv(spec, tiles.dkv, arrays, rows, requested.derivative, groups, one_pass=one_pass)
        if outputs.query is not None:
            d_query = _like_query(spec, arrays, unpadded, outputs.query)
            if outputs.marks is not None:
                d_query = repairs.query(d_query, _marks_of_queries(spec, outputs.marks))
        if requested.key_or_value:
            assert outputs.key is not None
            assert outputs.value is not None
            cut = functools.partial(padding.cut_rows, spec)
            both = (cut(outputs.key, unpadded.S, unpadded.D), cut(outputs.value, unpadded.S, unpadded.Dv))
            both = both if outputs.marks is None else repairs.key_value(both, outputs.marks)
            d_key, d_value = (sum_batch(spec, x) for x in both)
        collect(spec, requested.derivative, arrays, groups.columns, outputs.columns, gradients)
    return Gradients(d_query, d_key, d_value, tuple(map(sum_gradients, gradients.values())))


def _marks_of_rows(x: jax.Array) -> jax.Array:
    """Marks of rows [..., D], float32 [...]: NaN where one is not finite."""
    return jnp.where(jnp.all(jnp.isfinite(x), axis=-1), jnp.float32(0), jnp.float32(jnp.nan))


def _marks_of_queries(spec: AttentionSpec, marks: jax.Array) -> jax.Array:
    """Marks of the heads to whose dQ a marked key added, [B, Hq, 1], from those of keys [B, Hkv, S]."""
    return jnp.repeat(jnp.sum(marks, axis=2, keepdims=True), spec.group, axis=1)


def _like_query(spec: AttentionSpec, arrays: Operands[jax.Array], unpadded: AttentionSpec, x: jax.Array) -> jax.Array:
    """Gives dQ in the layout and dtype of the query, from sums [B, Hq, T, D]."""
    x = (x[..., : unpadded.D] * unpadded.scale).astype(arrays.query.dtype)
    return x.swapaxes(1, 2) if spec.layout == "BTNH" else x

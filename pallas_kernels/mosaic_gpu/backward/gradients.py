"""Backward pass for Hopper: its kernels, and the gradients of captured arrays.

With P the probabilities and dO the cotangent of the output (Dao 2023, arXiv:2307.08691, section 3.1.2)::

    dV = P^T dO,   dS = P * (dO V^T - delta),   delta = rowsum(dO * O) - dlse,   dQ = dS' K,   dK = dS'^T Q

where dS' is dS pulled back through the score mod. One pass computes all of it with five products; what blocks of keys
add to dQ is summed in no fixed order, so its last bits may differ between runs. Or two kernels compute P and dO V^T
each for itself, one for dK and dV, one for dQ: seven products, and the same bits in each run. Head sizes of more than
128 take three, one for each sum: eight products.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.config import Tiles
from pallas_kernels.gradients import Found, Requested, collect, row_statistics, sum_batch, total
from pallas_kernels.marks import Repairs
from pallas_kernels.mosaic_gpu import bias_tiles as planes
from pallas_kernels.mosaic_gpu import padding
from pallas_kernels.mosaic_gpu.backward import dkv as backward_dkv
from pallas_kernels.mosaic_gpu.backward import dq as backward_dq
from pallas_kernels.mosaic_gpu.backward import walk
from pallas_kernels.mosaic_gpu.backward.one_pass import fits
from pallas_kernels.mosaic_gpu.cost import much_arithmetic
from pallas_kernels.program.cotangents import LoadGroups, group_loads
from pallas_kernels.spec import Arrays, AttentionSpec

SHORTEST_ONE_PASS = 1024  # queries from which on one pass is faster (`is_one_pass_faster`)
TWO_GROUPS = 192  # head size up to which shared memory holds what two warp groups own, beside what they walk over


class BackwardTiles(NamedTuple):
    """Tiles of the kernels; dq is None where one pass computes dQ too, which is not deterministic."""

    dkv: Tiles
    dq: Tiles | None


def unsupported_groups(groups: LoadGroups) -> str | None:
    """Which captured gradients these kernels cannot compute, as part of a sentence, or None."""
    if groups.repeated or groups.stores or groups.atomics:
        return "the gradient of an array that is read by query and key at once needs additions by element"
    return None


def unsupported_tiles(spec: AttentionSpec, dkv: Tiles | None, dq: Tiles | None, *, one_pass: bool) -> str | None:
    """Which tiles that a user set cannot be, as part of a sentence, or None.

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
    narrow = max(_padded(spec).D, _padded(spec).Dv) <= backward_dkv.BOTH_SUMS
    if dq is None and not (one_pass and narrow and fits(_padded(spec), dkv)):
        return "`config` sets no tiles for dq, which a kernel of its own computes here"
    return None


def is_one_pass_faster(spec: AttentionSpec, tiles: BackwardTiles, groups: LoadGroups) -> bool:
    """Whether tiles are of one pass, and it is faster than two.

    Short sequences have little to multiply beside the float32 sums of dQ, which one pass sets to zero, adds to and
    converts. H200, jax 0.11.2, bf16, 32768 tokens, 16 heads, one pass and two in us, causal: head size 64 438 and 383
    at 256 tokens, 533 and 493 at 512, 660 and 644 at 1024; head size 128 730 and 575, 867 and 748, 1051 and 1007.
    Without a mask, 1024 tokens: 915 and 928, 1493 and 1544.

    Nor where the copy engine brings elements (`planes`) to the kernel for dQ alone, as it does those of 32 bits: with
    such a pair bias for each of 16 heads, 4 x 4096 tokens, 3538 and 3278 at head size 64, 3920 and 3769 at 128. With
    one of 16 bits 2012 and 1992, 2553 and 3251; under a causal mask 998 and 1090, 1587 and 1778.
    """
    if tiles.dq is not None or spec.T < SHORTEST_ONE_PASS:
        return False
    brings = declare(spec, tiles, jnp.bfloat16, groups)[0].stream.elements is not None
    return brings or not planes.planes_of(_padded(spec))


def tiles_for(spec: AttentionSpec, *, one_pass: bool) -> BackwardTiles | None:
    """The tiles that an H200 measured as best, cut to what divides the blocks; None if nothing fits them.

    In one pass, where they fit it and `one_pass` allows it. A mod that computes much on each element takes two kernels,
    by the compiler's account and not by measurement: of T5's buckets at head size 64 a tile of 128 by 128 stores 1568
    bytes away, tiles half as large in two kernels none.
    """
    spec, blocks = _padded(spec), spec.block_size or (128, 128)
    if any(size % 64 for size in blocks):
        return None
    widest = max(spec.D, spec.Dv)
    narrow = widest <= 64 and not much_arithmetic(spec.programs.score) and len(planes.planes_of(spec)) < 2
    pair = lambda size: 2 if size % 128 == 0 and widest <= TWO_GROUPS else 1
    groups_kv, groups_q = pair(blocks[1]), pair(blocks[0])
    block_q = 128 if narrow and groups_q == 2 and groups_kv == 2 else 64
    dkv = Tiles(block_q, 64 * groups_kv, 4 * groups_kv, 2)
    if one_pass and widest <= backward_dkv.BOTH_SUMS and fits(spec, dkv):
        return BackwardTiles(dkv, None)
    return BackwardTiles(dkv, Tiles(64 * groups_q, 128 if narrow and groups_kv == 2 else 64, 4 * groups_q, 2))


def _padded(spec: AttentionSpec) -> AttentionSpec:
    D, Dv = padding.head_sizes(spec, jnp.bfloat16)  # float16 is as wide
    return dataclasses.replace(spec, D=D, Dv=Dv)


def declare(spec: AttentionSpec, tiles: BackwardTiles, dtype: Any, groups: LoadGroups) -> list[Any]:
    """What a block of threads of each kernel needs, for `memory.bytes_of` of its leaves."""
    spec = _padded(spec)
    declared = [walk.declare(spec, tiles.dkv, dtype, groups, one_pass=tiles.dq is None)]
    return declared if tiles.dq is None else [*declared, backward_dq.declare(spec, tiles.dq, dtype)]


def backward(
    spec: AttentionSpec,
    tiles: BackwardTiles,
    arrays: Arrays,
    requested: Requested,
    saved: tuple[jax.Array, jax.Array],
    d_saved: tuple[jax.Array, jax.Array | None],
    repairs: Repairs,
) -> Found:
    """Computes the requested gradients.

    Args:
      spec: The spec.
      tiles: Of the kernels; without those for dQ, one pass computes all.
      arrays: The inputs of the forward pass.
      requested: Which gradients; `unsupported_groups` of its loads must be None.
      saved: Output and lse of the forward pass.
      d_saved: Their cotangents; that of lse may be None.
      repairs: What computes marked rows again, where a mask may hide.
    """
    rows = row_statistics(spec, saved, d_saved)
    groups = group_loads(spec, requested.derivative)
    given, (spec, arrays) = spec, padding.padded(spec, arrays)
    rows = rows._replace(d_out=padding.pad_rows(spec, rows.d_out, spec.Dv))
    assert unsupported_groups(groups) is None  # the adapter has asked
    gradients: dict[int, list[jax.Array]] = {i: [] for i in range(len(arrays.score_operands))}
    d_query = d_key = d_value = None
    one_pass = tiles.dq is None and requested.query
    if groups.rows or (requested.query and tiles.dq is not None):
        assert tiles.dq is not None, "cotangents of loads by query are summed by the kernel for dQ"
        found = backward_dq.dq(spec, tiles.dq, arrays, rows, requested.derivative, groups)
        d_query = padding.cut_rows(spec, found.query, given.T, given.D) if requested.query else None
        if d_query is not None and found.marks is not None:
            d_query = repairs.query(d_query, found.marks)
        collect(spec, requested.derivative, arrays, groups.rows, found.rows, gradients)
    if requested.key_or_value or groups.columns or one_pass:
        found = backward_dkv.dkv(spec, tiles.dkv, arrays, rows, requested.derivative, groups, one_pass=one_pass)
        if found.query is not None:
            d_query = _like_query(spec, arrays, given, found.query)
            if found.marks is not None:
                d_query = repairs.query(d_query, _marks_of_queries(spec, found.marks))
        if requested.key_or_value:
            assert found.key is not None
            assert found.value is not None
            cut = functools.partial(padding.cut_rows, spec)
            both = (cut(found.key, given.S, given.D), cut(found.value, given.S, given.Dv))
            both = both if found.marks is None else repairs.key_value(both, found.marks)
            d_key, d_value = (sum_batch(spec, x) for x in both)
        collect(spec, requested.derivative, arrays, groups.columns, found.columns, gradients)
    return Found(d_query, d_key, d_value, tuple(map(total, gradients.values())))


def _marks_of_queries(spec: AttentionSpec, marks: jax.Array) -> jax.Array:
    """Marks of the heads to whose dQ a marked key added, [B, Hq, 1], from those of keys [B, Hkv, S]."""
    return jnp.repeat(jnp.sum(marks, axis=2, keepdims=True), spec.group, axis=1)


def _like_query(spec: AttentionSpec, arrays: Arrays, given: AttentionSpec, x: jax.Array) -> jax.Array:
    """Gives dQ in the layout and dtype of the query, from sums [B, Hq, T, D]."""
    x = (x[..., : given.D] * given.scale).astype(arrays.query.dtype)
    return x.swapaxes(1, 2) if spec.layout == "BTNH" else x

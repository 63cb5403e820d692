"""The plan of a dense call: the Hopper kernels that run it, and their tiles, or why they cannot."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_kernels.block_walk import count_tiles, without_lists
from pallas_kernels.config import Tiles
from pallas_kernels.mosaic_gpu import smem
from pallas_kernels.mosaic_gpu.backward import plan as backward_plan
from pallas_kernels.mosaic_gpu.backward.plan import BackwardTiles
from pallas_kernels.mosaic_gpu.forward import kernel
from pallas_kernels.mosaic_gpu.launch import NUM_SMS
from pallas_kernels.mosaic_gpu.plan.limits import ROWS, limit_of_arrays
from pallas_kernels.mosaic_gpu.score import bias_tiles
from pallas_kernels.mosaic_gpu.score.tile import (
    exceeds_registers,
    is_heavy,
    limit_of_mods,
    mask_exceeds_registers,
    unsupported_primitive,
)
from pallas_kernels.plan import GradientRequest, Refusal, TileChoice, derivative_of, with_programs
from pallas_kernels.program.build import Derivative
from pallas_kernels.program.cotangents import LoadGroups, group_loads
from pallas_kernels.program.ranges import is_prefix
from pallas_kernels.spec import AttentionSpec
from pallas_kernels.tuning import tables


@dataclasses.dataclass(frozen=True)
class BackwardPlan:
    """The backward pass of these kernels."""

    requested: GradientRequest  # the gradients that they compute
    derivative: Derivative | None  # of the score mod; None without one
    tiles: BackwardTiles


@dataclasses.dataclass(frozen=True)
class HopperPlan:
    """The plan of a call."""

    spec: AttentionSpec  # the call, with its tile programs
    forward: TileChoice  # tiles of the forward kernel
    forward_spec: AttentionSpec  # of the forward kernel: where it walks the range of the mask, without lists
    has_bias_tiles: bool  # whether TMA loads elements of captured arrays, tile by tile
    # the requested gradients that these kernels compute; None for none, or forward only
    backward: BackwardPlan | None = None
    deferred: GradientRequest | None = None  # the requested gradients that other kernels compute, or None
    deferred_reason: str = ""  # Why all are deferred, as part of a sentence, or which arrays have the deferred ones

    def describe(self, forward: str | None = None) -> str:
        """Kernels and tiles, for `jflex.explain`; `forward` describes another forward kernel that runs instead."""
        text = _sizes("forward", self.forward.tiles) if forward is None else forward
        if self.spec.qk_dtype is not None:
            text += f" with QK^T in {self.spec.qk_dtype}"
        if self.has_bias_tiles and forward is None:
            text += " with bias tiles by TMA"
        if self.backward is not None:
            dkv, dq, captured = self.backward.tiles
            text += f", {_sizes('dkv' if dq or captured else 'dkv and dq', dkv)}"
            text += f", {_sizes('dq', dq)}" if dq else ""
            text += f", {_sizes('captured' if dq else 'captured and dq', captured)}" if captured else ""
        return text


@functools.lru_cache(maxsize=256)
def plan(spec: AttentionSpec, requested: GradientRequest | None) -> HopperPlan | Refusal:
    """Plans a dense call without `spec.kv_lengths`, forward only if `requested` is None.

    The machine is one that `limits.limit_of_machine` does not refuse.
    """
    reason = limit_of_arrays(spec)
    traced = with_programs(spec) if reason is None else Refusal(reason)
    if isinstance(traced, Refusal):
        return traced
    forward = limit_of_mods(traced) or _plan_forward(traced)
    if isinstance(forward, Refusal) or requested is None:
        return forward
    return _plan_backward(forward, requested)


def _plan_forward(spec: AttentionSpec) -> HopperPlan | Refusal:
    choice = _forward_tiles(spec)
    tiles = choice.tiles
    if choice.source == "config" and (tiles.num_warps, tiles.block_q * 4 // tiles.num_warps) not in _WARP_GROUPS:
        return Refusal(
            f"a tile has one or two warp groups of 64 or 128 queries, or three or four of 64 (4 warps each); `config` "
            f"sets {tiles.block_q} queries and {tiles.num_warps} warps"
        )
    if tiles.num_warps == 16 and max(tiles.block_kv, spec.D, spec.Dv) > 64:
        return Refusal("four warp groups have registers for tiles of 64 keys, and for head sizes up to 64")
    blocks = spec.block_size or tiles.shape  # blocks made of `kv_lengths` are unknown where `config` is checked
    if choice.source == "config" and any(size % tile for size, tile in zip(blocks, tiles.shape, strict=True)):
        return Refusal(f"its tiles divide blocks of {blocks}, and `config` sets tiles of {tiles.shape}")
    if tiles.block_kv % ROWS and choice != _THREE_OF_96:
        return Refusal(f"its tiles are multiples of {ROWS} keys, and `config` sets tiles of {tiles.block_kv}")
    declared = kernel.declare(spec, tiles, jnp.dtype(spec.dtype))
    needed = smem.bytes_of(jax.tree.leaves(declared))
    if needed > smem.LIMIT:
        return Refusal(f"its tile needs {needed} bytes of shared memory, and a CTA has {smem.LIMIT}")
    walked = without_lists(spec, "k") if choice in _WIDE else spec
    return HopperPlan(spec, choice, walked, bool(declared.has_bias_tiles))


_WARP_GROUPS = {(4, 64), (4, 128), (8, 64), (8, 128), (12, 64), (16, 64)}  # their warps, and the queries of each
_MANY = 1024  # batch entries
MAX_STAGES = 4  # of the forward kernel
_NO_ENTROPY = "they have no derivative of the entropy (where its gradient is not requested, they run)"


def _plan_backward(forward: HopperPlan, requested: GradientRequest) -> HopperPlan | Refusal:
    """Divides the requested gradients between these kernels and others.

    Deferred are gradients of arrays that are read by query and key, but not as a pair bias that
    `captured_work.supports` and that fits, such as a table of distances; and all gradients where there are no tiles, or
    where the entropy of rows is differentiated.
    """
    spec = forward.spec
    if "entropy" in spec.stats:
        return dataclasses.replace(forward, deferred=requested, deferred_reason=_NO_ENTROPY)
    derivative = derivative_of(spec, requested.score_operands)
    if isinstance(derivative, Refusal):
        return derivative
    computed, deferred = requested, None
    groups = group_loads(spec, derivative)
    alone = groups._replace(repeated=())
    if groups.repeated and not _sums_shared(spec, groups) and backward_plan.unsupported_groups(spec, alone) is None:
        repeated = {load.value for _, loads in groups.repeated for load in loads}
        pick = lambda inside: tuple(r and (i in repeated) == inside for i, r in enumerate(requested.score_operands))
        computed = requested._replace(score_operands=pick(inside=False))
        deferred = GradientRequest(query=False, key=False, value=False, score_operands=pick(inside=True))
        derivative = derivative_of(spec, computed.score_operands)
        if isinstance(derivative, Refusal):
            return derivative
        groups = group_loads(spec, derivative)
    tiles = _backward_tiles(spec, derivative, groups)
    if isinstance(tiles, Refusal):
        return dataclasses.replace(forward, deferred=requested, deferred_reason=tiles.reason)
    return dataclasses.replace(
        forward,
        backward=BackwardPlan(computed, derivative, tiles),
        deferred=deferred,
        deferred_reason="are read by query and key at once" if deferred else "",
    )


# --- tiles


def _forward_tiles(spec: AttentionSpec) -> TileChoice:
    """The user's tiles, else `_wide_tiles`, else measured ones where they divide the mask's blocks, else a rule's."""
    if spec.config.forward is not None:
        return TileChoice(spec.config.forward, "config")
    dtype = jnp.dtype(spec.dtype)
    if spec.config.batch_invariant:  # as if there were more tiles than CTAs: with few, other tiles may be persistent
        many = spec.replace(B=_MANY)
        return TileChoice(forward_tiles(many, dtype), "rule")
    if (wide := _wide_tiles(without_lists(spec, "k"))) is not None:
        return wide
    has_wide_keys = kernel.has_wide_keys(spec.D, spec.Dv)  # the values of the table are as wide
    measured = None if has_wide_keys else _measured_tiles(spec, "forward_sm90", spec.S)
    if measured is not None and measured.block_q <= spec.T and suits(spec, measured, dtype):
        return TileChoice(measured, "table")
    return TileChoice(forward_tiles(spec, dtype), "rule")


_THREE_GROUPS = TileChoice(Tiles(192, 128, num_warps=12, num_stages=3), "rule")
_THREE_OF_96 = TileChoice(Tiles(192, 96, num_warps=12, num_stages=3), "rule")
_FOUR_GROUPS = TileChoice(Tiles(256, 64, num_warps=16, num_stages=6), "rule")
_SHORTEST = TileChoice(Tiles(128, 64, num_warps=8, num_stages=4), "rule")
_MANY_KEYS = TileChoice(Tiles(128, 192, num_warps=8, num_stages=2), "rule")
_WIDE = (_THREE_GROUPS, _THREE_OF_96, _FOUR_GROUPS, _SHORTEST, _MANY_KEYS)
_NARROW = 64  # head size up to which three and four groups have enough registers
_FEW = 1024  # queries and keys up to which four groups are preferred to three
_LONG = 8192  # queries and keys from which on tiles of many keys are preferred
_BALANCED = 2**17  # queries of all heads from which on a masked call has five waves of these tiles


@functools.lru_cache(maxsize=256)
def _wide_tiles(spec: AttentionSpec) -> TileChoice | None:
    """Three or four consumer warp groups if these are faster: they share loads of keys. Two for `kernel.is_shortest`.

    H200, jax 0.11.2, bf16, 16 heads, us by two and by three: no mask, D 64, 8092 and 7411 (B 4, S 16384), D 32, 1826
    and 1582 (B 4, S 8192), D 80, 1204 and 1345 (B 2); causal 4169 and 3917 (B 4, S 16384). Where wider tiles compute
    more, they lose: no mask 139 and 149 (B 1, S 4096), a window of 1024 667 and 707, a mask without a range 3485 and
    3622. So they do with few keys: 66 and 149 (B 8, T 4096, S 128).

    By two and by four, B 32: no mask 31.8 and 28.4 (S 256), 88.2 and 84.5 (S 512), 297 and 290 (S 1024), but 53.9 and
    66.4 where tiles are half empty (S 384); causal, each group with its prefix, 34.7 and 26.9, 72.7 and 63.3, 201 and
    187, and 324 and 321 (B 16, S 2048); ALiBi 36.5 and 28.6 (S 256).

    TFLOP/s, B 2, S 16384: D 96, two groups and three with 96 keys, no mask 654 and 688, causal 644 and 667; 128 keys
    spill there, 603 and 545. D 128, no mask, 128 and 192 keys, 714 and 739, though 60 bytes are spilled.
    """
    is_plain = spec.normalize == "softmax" and spec.block_size is None and not spec.stats
    is_light = tables.mods_of(*spec.programs) in ("none", "arithmetic") and spec.qk_dtype is None
    if not (is_plain and is_light):
        return None
    if spec.D == spec.Dv == 128:
        return _MANY_KEYS if _takes_many_keys(spec) else None
    is_narrow = max(spec.D, spec.Dv) <= _NARROW
    if not is_narrow and not (spec.D == spec.Dv == 96 and spec.dropout is None):
        return None
    if kernel.is_shortest(spec):
        return _SHORTEST
    queries = lambda size: size * pl.cdiv(spec.B * spec.Hq * pl.cdiv(spec.T, size), NUM_SMS)  # of an SM, with padding
    mask, fewest, most = spec.programs.mask, min(spec.T, spec.S), max(spec.T, spec.S)
    is_short = is_narrow and fewest >= 256 and most <= _FEW
    if is_short and (mask is None or is_prefix(mask)) and queries(256) <= queries(128):
        return _FOUR_GROUPS
    if fewest < 512:
        return None
    three, gain = (_THREE_GROUPS, 1.05) if is_narrow else (_THREE_OF_96, 1.02)
    if mask is None:
        return three if queries(192) < gain * queries(128) else None
    visits = count_tiles(spec, Tiles(128, 128)) if spec.B * spec.Hq * spec.T >= _BALANCED else None
    return three if visits is not None and visits[1] > 0.95 * visits[0] else None  # full tiles among all


def _takes_many_keys(spec: AttentionSpec) -> bool:
    """True for long calls without mods, where 192 keys in a tile pad them by at most 1 %."""
    is_bare = spec.programs.mask is None and spec.programs.score is None and spec.dropout is None
    return is_bare and min(spec.T, spec.S) >= _LONG and pl.cdiv(spec.S, 192) * 192 <= 1.01 * spec.S


_OF_WIDE_KEYS = Tiles(128, 128, num_warps=8, num_stages=2)


def forward_tiles(spec: AttentionSpec, dtype: DTypeLike) -> Tiles:
    """Rule for the forward kernel: two consumer warp groups of 64 queries each, and as many stages as fit.

    A persistent kernel has priority: stages, then keys in a tile, are given up for it.

    Register budget: a thread holds half a tile's columns of scores, beside half of Dv for the O accumulator. 128 keys
    go with head sizes up to 128, unless a mod is heavy (one with a gelu and a softplus spills 1420 bytes).

    Wide keys have no memory for 128 keys in a persistent kernel, but gain: H200, jax 0.11.2, TFLOP/s, B 2, H 16,
    S 16384, D 192, Dv 128, two readings with 64 and 128 keys, no mask 657, 609 and 756, 746, causal 672 and 758.
    """
    blocks = spec.block_size or (128, 128)
    groups = 2 if blocks[0] % 128 == 0 and spec.T > 64 else 1
    light = not (is_heavy(spec.programs.score) or is_heavy(spec.programs.mask)) and blocks[1] % 128 == 0
    has_wide_keys = kernel.has_wide_keys(spec.D, spec.Dv) and spec.qk_dtype is None
    if light and groups == 2 and has_wide_keys and suits(spec, _OF_WIDE_KEYS, dtype):
        return _OF_WIDE_KEYS
    wide = max(spec.D, spec.Dv) <= 128 and light
    candidates = [
        Tiles(64 * groups, block_kv, 4 * groups, stages)
        for block_kv in ((128, 64) if wide else (64,))
        for stages in range(MAX_STAGES, 1, -1)
    ]
    fitting = [t for t in candidates if suits(spec, t, dtype)] or candidates[-1:]
    persistent = (t for t in fitting if kernel.declare(spec, t, dtype).tile_ids is not None)
    return next(persistent, fitting[0])


def suits(spec: AttentionSpec, tiles: Tiles, dtype: DTypeLike) -> bool:
    """True if shared memory holds the tiles of the forward kernel, and all bias tiles that TMA can load."""
    scratch = kernel.declare(spec, tiles, dtype)
    fits = smem.bytes_of(jax.tree.leaves(scratch)) <= smem.LIMIT
    return fits and (scratch.has_bias_tiles or not bias_tiles.bias_loads(spec))


def _backward_tiles(spec: AttentionSpec, derivative: Derivative | None, groups: LoadGroups) -> BackwardTiles | Refusal:
    reason = backward_plan.unsupported_groups(spec, groups)
    if mask_exceeds_registers(spec.programs.mask):
        reason = "the mask computes more on each element than registers hold"
    if reason is None and derivative is not None:
        reason = unsupported_primitive(derivative.nodes)
        if exceeds_registers(derivative):
            reason = "the derivative of the score mod computes more on each element than registers hold"
    if reason is not None:
        return Refusal(reason)
    one_pass = not (spec.config.deterministic or groups.rows or groups.stores)
    tiles = _configured_backward(spec, one_pass=one_pass)
    if tiles is None and groups.repeated:
        tiles = _best_backward(spec, one_pass=False)
    elif tiles is None:
        tiles = _best_backward(spec, one_pass=one_pass)
        if one_pass and tiles is not None and not backward_plan.is_one_pass_faster(spec, tiles, groups):
            tiles = _best_backward(spec, one_pass=False)
    if groups.repeated and isinstance(tiles, BackwardTiles):
        tiles = _with_captured(spec, tiles, groups, may_add=one_pass)
    if tiles is None:
        return Refusal("no tile of them divides the blocks of the mask")
    if isinstance(tiles, Refusal):
        return tiles
    needed = max(smem.bytes_of(jax.tree.leaves(x)) for x in backward_plan.declare(spec, tiles, spec.dtype, groups))
    if needed > smem.LIMIT:
        return Refusal(f"their tiles need {needed} bytes of shared memory, and a CTA has {smem.LIMIT}")
    return tiles


def _sums_shared(spec: AttentionSpec, groups: LoadGroups) -> bool:
    """True if the kernel for shared arrays computes their gradients: not where a config wants one pass for the rest."""
    wants_one_pass = spec.config.dkv is not None and spec.config.dq is None
    return not wants_one_pass and backward_plan.captured_tiles(spec, spec.dtype, groups, with_query=False) is not None


def _with_captured(spec: AttentionSpec, tiles: BackwardTiles, groups: LoadGroups, *, may_add: bool) -> BackwardTiles:
    """With tiles of the kernel for shared arrays, which adds to dQ too if it may, and a config sets no tiles for it."""
    if may_add and spec.config.dq is None:
        both = backward_plan.captured_tiles(spec, spec.dtype, groups, with_query=True)
        if both is not None:
            return BackwardTiles(tiles.dkv, None, both)
    return tiles._replace(captured=backward_plan.captured_tiles(spec, spec.dtype, groups, with_query=False))


def _configured_backward(spec: AttentionSpec, *, one_pass: bool) -> BackwardTiles | Refusal | None:
    """The user's tiles, or None where `config` sets none."""
    dkv, dq = spec.config.dkv, spec.config.dq
    if dkv is None and dq is None:
        return None
    reason = backward_plan.unsupported_tiles(spec, dkv, dq, one_pass=one_pass)
    if reason is not None:
        return Refusal(reason)
    assert dkv is not None  # or there was a reason
    return BackwardTiles(dkv, dq)


def _best_backward(spec: AttentionSpec, *, one_pass: bool) -> BackwardTiles | None:
    """Measured tiles, of one pass where it is allowed, or a rule's; None if no tile divides the blocks of the mask."""
    if one_pass:
        dkv, dq = _measured_tiles(spec, "one_pass_sm90", spec.T), None
    else:
        dkv, dq = _measured_tiles(spec, "dkv_sm90", spec.T), _measured_tiles(spec, "dq_sm90", spec.S)
    fits = lambda: backward_plan.unsupported_tiles(spec, dkv, dq, one_pass=one_pass) is None
    if dkv is not None and (dq is not None or one_pass) and fits():
        return BackwardTiles(dkv, dq)
    return backward_plan.backward_tiles(spec, one_pass=one_pass)


def _measured_tiles(spec: AttentionSpec, name: str, length: int) -> Tiles | None:
    """Tiles of a table, for the kernel's name there and the length of its loop.

    The mods there compute little, the elements that they read are loaded by TMA, and nothing has eight bits.
    """
    if spec.qk_dtype is not None:
        return None
    programs, itemsize = spec.programs, jnp.dtype(spec.dtype).itemsize
    if is_heavy(programs.score) or is_heavy(programs.mask):
        return None
    key = tables.key_of(name, max(spec.D, spec.Dv), itemsize, programs, length)
    tiles = tables.look_up(spec.device_kind, key)
    if tiles is None or (key.mods == "elements" and not bias_tiles.bias_loads(spec)):
        return None
    size = spec.block_size
    divides = size is None or (size[0] % tiles.block_q == 0 and size[1] % tiles.block_kv == 0)
    return tiles if divides else None


def _sizes(name: str, tiles: Tiles) -> str:
    return (
        f"{name} {tiles.block_q} x {tiles.block_kv} ({tiles.num_warps} warps that compute, {tiles.num_stages} stages)"
    )

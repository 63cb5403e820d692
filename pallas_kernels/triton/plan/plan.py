"""Plan of a dense call: its Triton kernels and their tiles, or a refusal."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax.numpy as jnp

from pallas_kernels.config import Tiles
from pallas_kernels.plan import (
    GradientRequest,
    Kernel,
    Refusal,
    TileChoice,
    derivative_of,
    with_programs,
)
from pallas_kernels.program.build import Derivative
from pallas_kernels.program.cotangents import group_loads, is_ordered
from pallas_kernels.spec import AttentionSpec
from pallas_kernels.triton.plan import cost, limits
from pallas_kernels.triton.plan.limits import MIN_TILE, decodes, limit_of_device
from pallas_kernels.tuning import tables, triton_rules

MAX_SORTED = 1 << 31  # elements of an array: positions in it have 32 bits
_UNORDERED = (
    "the gradient of a captured array of which a query reads elements for each key, and the same ones repeatedly, is "
    "added by atomics, in no fixed order, which `Config(deterministic=True)` excludes ('xla' adds it in order)"
)

_UNSORTED = (
    "`Config(deterministic=True)` sorts the positions in a captured array that gets a gradient, and 32 bits hold those "
    "of fewer than 2 ** 31 elements"
)


@dataclasses.dataclass(frozen=True)
class BackwardPlan:
    """The backward pass.

    Attributes:
      spec: The call, with its tile programs.
      requested: The gradients that it computes.
      derivative: That of the score mod, None without one.
      dkv: Tiles of the kernel for dK and dV.
      dq: Tiles of the kernel for dQ.
    """

    spec: AttentionSpec
    requested: GradientRequest
    derivative: Derivative | None
    dkv: TileChoice
    dq: TileChoice


@dataclasses.dataclass(frozen=True)
class Plan:
    """Plan of a dense call.

    Attributes:
      spec: The call, with its tile programs; that of few queries has heads in rows.
      forward: Tiles of the forward kernel, or of the decoding kernel if `spec.heads_in_rows`.
      backward: The backward pass; None for forward only.
    """

    spec: AttentionSpec
    forward: TileChoice
    backward: BackwardPlan | None = None

    @property
    def decodes(self) -> bool:
        """True if the split-KV kernel for few queries runs."""
        return self.spec.heads_in_rows

    def describe(self) -> str:
        """Kernels, tiles and the source of tiles, for `jflex.explain`."""
        kernels = [("decode" if self.decodes else "forward", self.forward)]
        if self.backward is not None:
            kernels += [("dkv", self.backward.dkv), ("dq", self.backward.dq)]
        text = ", ".join(f"{kernel} {describe_tiles(choice)}" for kernel, choice in kernels)
        return text + describe_splits(self.spec) if self.decodes else text


@functools.lru_cache(maxsize=256)
def plan(spec: AttentionSpec, requested: GradientRequest | None) -> Plan | Refusal:
    """Plans a dense call; `pallas_kernels.split_kv.plan` plans a paged one.

    Args:
      spec: The call; only the decoding kernel knows `spec.kv_lengths`.
      requested: Which gradients; None for forward only.
    """
    reason = limit_of_device(spec)
    if reason is not None:
        return Refusal(reason)
    forward = _plan_forward(spec)
    if isinstance(forward, Refusal) or requested is None:
        return forward
    backward = _plan_backward(spec, requested)
    return backward if isinstance(backward, Refusal) else dataclasses.replace(forward, backward=backward)


def _plan_forward(spec: AttentionSpec) -> Plan | Refusal:
    decoded = decodes(spec)
    traced = with_programs(spec.replace(heads_in_rows=decoded))
    if isinstance(traced, Refusal):
        return traced
    choice = _choose_tiles(traced, "decode" if decoded else "forward")
    return choice if isinstance(choice, Refusal) else Plan(traced, choice)


def _plan_backward(spec: AttentionSpec, requested: GradientRequest) -> BackwardPlan | Refusal:
    traced = with_programs(spec)
    if isinstance(traced, Refusal):
        return traced
    derivative = derivative_of(traced, requested.score_operands)
    if isinstance(derivative, Refusal):
        return derivative
    if spec.config.deterministic and not is_ordered(traced, group_loads(traced, derivative)):
        return Refusal(_UNORDERED)
    if spec.config.deterministic and _is_too_large_to_sort(traced, requested):
        return Refusal(_UNSORTED)
    dkv, dq = _choose_tiles(traced, "dkv"), _choose_tiles(traced, "dq")
    if isinstance(dkv, Refusal):
        return dkv
    if isinstance(dq, Refusal):
        return dq
    return BackwardPlan(traced, requested, derivative, dkv, dq)


def _is_too_large_to_sort(spec: AttentionSpec, requested: GradientRequest) -> bool:
    sizes = zip(spec.score_shapes, requested.score_operands, strict=True)
    return any(is_requested and math.prod(shape) >= MAX_SORTED for shape, is_requested in sizes)


# --- tiles


def _choose_tiles(spec: AttentionSpec, kernel: Kernel) -> TileChoice | Refusal:
    """The tiles of a kernel; of one stage where the loop must not be pipelined."""
    choice = _tiles_of(spec, kernel)
    smallest = min(choice.tiles.shape)
    if smallest < MIN_TILE:
        where = "the mask's block size allows" if spec.blocks is not None else "`config` sets"
        return Refusal(
            f"it needs tiles of at least {MIN_TILE}, in powers of two; {where} {smallest} (create the mask with a "
            f"`block_size` that is a multiple of {MIN_TILE})"
        )
    if cost.can_pipeline(spec.programs.score):
        return choice
    return dataclasses.replace(choice, tiles=dataclasses.replace(choice.tiles, num_stages=1))


def _tiles_of(spec: AttentionSpec, kernel: Kernel) -> TileChoice:
    """The user's tiles, else measured ones, else a rule's.

    Those of jflex are cut to what divides the mask's blocks and is no larger than the call.
    """
    configured: Tiles | None = getattr(spec.config, kernel)
    if configured is not None:
        rows = triton_rules.decode_rows(spec.group * spec.T)
        return TileChoice(dataclasses.replace(configured, block_q=rows) if kernel == "decode" else configured, "config")
    invariant = spec.config.batch_invariant and kernel == "forward"
    measured = None if kernel == "decode" or invariant else _measured_tiles(spec, kernel)
    tiles = triton_rules.tiles_for(kernel, cost.need_of(spec), spec.group * spec.T) if measured is None else measured
    block_q, block_kv = tiles.shape
    if kernel == "decode":  # rows of its tile are queries of several heads
        block_kv = min(block_kv, spec.blocks.size[1] & -spec.blocks.size[1] if spec.blocks else block_kv)
    elif spec.blocks is not None:
        block_q, block_kv = (min(x, block & -block) for x, block in zip(tiles.shape, spec.blocks.size, strict=True))
    elif not invariant:
        block_q = min(block_q, max(MIN_TILE, 1 << (spec.T - 1).bit_length()))
        block_kv = min(block_kv, max(MIN_TILE, 1 << (spec.S - 1).bit_length()))
    cut = dataclasses.replace(tiles, block_q=block_q, block_kv=block_kv)
    return TileChoice(cost.fitting(spec, kernel, cut), "rule" if measured is None else "table")


def _measured_tiles(spec: AttentionSpec, kernel: Kernel) -> Tiles | None:
    length, itemsize = spec.T if kernel == "dkv" else spec.S, jnp.dtype(spec.dtype).itemsize
    key = tables.key_of(kernel, max(spec.D, spec.Dv), itemsize, spec.programs, length)
    if kernel == "forward" and spec.normalize == "none" and key.mods in ("arithmetic", "functions"):
        key = key._replace(mods="none")  # see `triton_rules.forward_tiles`
    official = tables.look_up(spec.device_kind, tables.official(key)) if spec.device.compiler == "official" else None
    return tables.look_up(spec.device_kind, key) if official is None else official


def faster_by_official(plan: Plan, requested: GradientRequest | None) -> str | None:
    """Why official Triton compiles faster kernels for a pass, by the table of the device, or None.

    Args:
      requested: The gradients of the backward pass; None for the forward pass.
    """
    backward = plan.backward if requested is not None else None
    if plan.decodes if requested is None else backward is None:
        return None
    spec, kernels = (plan.spec, ("forward",)) if backward is None else (backward.spec, ("dkv", "dq"))
    length = lambda kernel: spec.T if kernel == "dkv" else spec.S
    itemsize, head_size = jnp.dtype(spec.dtype).itemsize, max(spec.D, spec.Dv)
    keys = [tables.key_of(kernel, head_size, itemsize, spec.programs, length(kernel)) for kernel in kernels]
    by_pallas = [tables.microseconds(spec.device_kind, key) for key in keys]
    by_official = [tables.microseconds(spec.device_kind, tables.official(key)) for key in keys]
    if None in (*by_pallas, *by_official):
        return None
    before, after = (sum(x for x in times if x is not None) for times in (by_pallas, by_official))
    if after >= before:
        return None
    return f"official Triton was measured to be faster ({' and '.join(kernels)}: {after:.1f} us, not {before:.1f})"


def describe_tiles(choice: TileChoice) -> str:
    """Sizes, and the source of the choice."""
    tiles = choice.tiles
    sizes = f"{tiles.num_warps} warps, {tiles.num_stages} stages, by {choice.source}"
    return f"{tiles.block_q} x {tiles.block_kv} ({sizes})"


def describe_splits(spec: AttentionSpec) -> str:
    """Splits of a constant number of keys, where the batch must not matter."""
    return f" in splits of {limits.KEYS_OF_SPLIT} keys" if spec.config.batch_invariant else ""

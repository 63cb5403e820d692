"""Plan of a dense call: its Triton kernels and their tiles, or a refusal.

Shared memory and registers are estimated from the tiles, to rule out configurations early.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from pallas_kernels.block_walk import without_lists
from pallas_kernels.config import Tiles
from pallas_kernels.plan import GradientRequest, Kernel, Refusal, TileChoice, derivative_of, with_programs
from pallas_kernels.program.build import Derivative, Program
from pallas_kernels.program.cotangents import group_loads, is_ordered
from pallas_kernels.program.ir import Axes, Node, reachable
from pallas_kernels.spec import AttentionSpec, is_amd
from pallas_kernels.triton.head_chunks import chunks
from pallas_kernels.triton.plan import limits
from pallas_kernels.triton.plan.limits import MIN_TILE, decodes, limit_of_device
from pallas_kernels.tuning import tables

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
    """The backward pass."""

    spec: AttentionSpec  # the call, with its tile programs
    requested: GradientRequest  # the gradients that it computes
    derivative: Derivative | None  # of the score mod; None without one
    dkv: TileChoice  # tiles of the kernel for dK and dV
    dq: TileChoice  # tiles of the kernel for dQ


@dataclasses.dataclass(frozen=True)
class TritonPlan:
    """Plan of a dense call."""

    spec: AttentionSpec  # the call, with its tile programs; that of few queries has heads in rows
    forward: TileChoice  # tiles of the forward kernel, or of the decoding kernel if `spec.heads_in_rows`
    backward: BackwardPlan | None = None  # the backward pass; None for forward only

    @property
    def decodes(self) -> bool:
        """True if the split-KV kernel for few queries runs."""
        return self.spec.heads_in_rows

    def describe(self) -> str:
        """Kernels, tiles and the source of tiles, for `jflex.explain`."""
        kernels = [("decode" if self.decodes else "forward", self.forward)]
        if self.backward is not None:
            kernels += [("dkv", self.backward.dkv), ("dq", self.backward.dq)]
        text = ", ".join(f"{kernel} {choice.describe()}" for kernel, choice in kernels)
        return text + describe_splits(self.spec) if self.decodes else text


@functools.lru_cache(maxsize=256)
def plan(spec: AttentionSpec, requested: GradientRequest | None) -> TritonPlan | Refusal:
    """Plans a dense call, forward only if `requested` is None; only the decoding kernel knows `spec.kv_lengths`."""
    reason = limit_of_device(spec)
    forward = _plan_forward(spec) if reason is None else Refusal(reason)
    if isinstance(forward, Refusal) or requested is None:
        return forward
    backward = _plan_backward(spec, requested)
    return backward if isinstance(backward, Refusal) else dataclasses.replace(forward, backward=backward)


def _plan_forward(spec: AttentionSpec) -> TritonPlan | Refusal:
    decoded = decodes(spec)
    traced = with_programs(spec.replace(heads_in_rows=decoded))
    if isinstance(traced, Refusal):
        return traced
    choice = choose_tiles(traced, "decode" if decoded else "forward")
    return choice if isinstance(choice, Refusal) else TritonPlan(traced, choice)


def _plan_backward(spec: AttentionSpec, requested: GradientRequest) -> BackwardPlan | Refusal:
    traced = with_programs(spec)
    if isinstance(traced, Refusal):
        return traced
    derivative = derivative_of(traced, requested.score_operands)
    if isinstance(derivative, Refusal):
        return derivative
    groups = group_loads(traced, derivative)
    if spec.config.deterministic and not is_ordered(traced, groups):
        return Refusal(_UNORDERED)
    if spec.config.deterministic and _is_too_large_to_sort(traced, requested):
        return Refusal(_UNSORTED)
    # H200, us of both passes by lists and by ranges: D 64, causal, B 32, S 512 313 and 290, B 2, S 8192 2889 and 2608;
    # D 128, B 4, S 2048 968 and 846; a window of 256, B 2, S 16384, H 8 712 and 617.
    # The kernel of repeated loads skips the blocks that lists leave out.
    traced = traced if groups.repeated else without_lists(traced, "k", "q")
    dkv, dq = choose_tiles(traced, "dkv"), choose_tiles(traced, "dq")
    if isinstance(dkv, Refusal):
        return dkv
    if isinstance(dq, Refusal):
        return dq
    return BackwardPlan(traced, requested, derivative, dkv, dq)


def _is_too_large_to_sort(spec: AttentionSpec, requested: GradientRequest) -> bool:
    sizes = zip(spec.score_shapes, requested.score_operands, strict=True)
    return any(is_requested and math.prod(shape) >= MAX_SORTED for shape, is_requested in sizes)


# --- tiles


def choose_tiles(spec: AttentionSpec, kernel: Kernel) -> TileChoice | Refusal:
    """The tiles of a kernel; of one stage where the loop must not be pipelined."""
    choice = _tiles_of(spec, kernel)
    size = next((x for x in choice.tiles.shape if x < MIN_TILE or x & (x - 1)), None)
    if size is not None:
        where = "`config` sets" if choice.source == "config" else "the mask's block size allows"
        return Refusal(
            f"it needs tiles of at least {MIN_TILE}, in powers of two; {where} {size} (create the mask with a "
            f"`block_size` that is a multiple of {MIN_TILE})"
        )
    if tables.can_pipeline(spec.programs.score):
        return choice
    return dataclasses.replace(choice, tiles=dataclasses.replace(choice.tiles, num_stages=1))


def _tiles_of(spec: AttentionSpec, kernel: Kernel) -> TileChoice:
    """The user's tiles, else measured ones, else a rule's.

    Tiles that no user set are cut to what divides the mask's blocks and is no larger than the call.
    """
    configured: Tiles | None = getattr(spec.config, kernel, None)
    if configured is not None:
        rows = tables.decode_rows(spec.group * spec.T)
        return TileChoice(dataclasses.replace(configured, block_q=rows) if kernel == "decode" else configured, "config")
    invariant = spec.config.batch_invariant and kernel == "forward"
    measured = None if kernel in ("decode", "tangent") or invariant else _measured_tiles(spec, kernel)
    tiles = tables.tiles_for(kernel, tables.need_of(spec), spec.group * spec.T) if measured is None else measured
    block_q, block_kv = tiles.shape
    if kernel == "decode":  # rows of its tile are queries of several heads
        block_kv = min(block_kv, spec.blocks.size[1] & -spec.blocks.size[1] if spec.blocks else block_kv)
    elif spec.blocks is not None:
        block_q, block_kv = (min(x, block & -block) for x, block in zip(tiles.shape, spec.blocks.size, strict=True))
    elif not invariant:
        block_q = min(block_q, max(MIN_TILE, 1 << (spec.T - 1).bit_length()))
        block_kv = min(block_kv, max(MIN_TILE, 1 << (spec.S - 1).bit_length()))
    cut = dataclasses.replace(tiles, block_q=block_q, block_kv=block_kv)
    return TileChoice(fitted(spec, kernel, cut), "rule" if measured is None else "table")


def _measured_tiles(spec: AttentionSpec, kernel: Kernel) -> Tiles | None:
    length, itemsize = spec.T if kernel == "dkv" else spec.S, jnp.dtype(spec.dtype).itemsize
    key = tables.key_of(kernel, max(spec.D, spec.Dv), itemsize, spec.programs, length)
    if kernel == "forward" and spec.normalize == "none" and key.mods in ("arithmetic", "functions"):
        key = key._replace(mods="none")  # see `tables.forward_tiles`
    official = tables.look_up(spec.device_kind, tables.official(key)) if spec.device.compiler == "official" else None
    return tables.look_up(spec.device_kind, key) if official is None else official


def faster_by_official(plan: TritonPlan, requested: GradientRequest | None) -> str | None:
    """Why official Triton compiles faster kernels for a pass, by the table of the device, or None.

    The pass is the backward one if gradients are requested.
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


def describe_splits(spec: AttentionSpec) -> str:
    """Splits of a constant number of keys, where the batch must not matter."""
    return f" in splits of {limits.KEYS_OF_SPLIT} keys" if spec.config.batch_invariant else ""


# Bytes of shared memory that a CTA may have, by a part of the name of the device; elsewhere the minimum.
HOPPER_SHARED_MEMORY, AMPERE_SHARED_MEMORY, MIN_SHARED_MEMORY, AMD_SHARED_MEMORY = 232448, 166912, 101376, 65536


class LoadBytes(NamedTuple):
    """Bytes that loads of mods read, at least 4 each in the dK/dV kernel, where Triton holds 16 bits in two ways."""

    by_element: int = 0
    by_row: int = 0  # for each key that a kernel walks, or query in the dK/dV kernel


NO_LOADS = LoadBytes()


def shared_memory(kernel: str, tiles: Tiles, D: int, Dv: int, itemsize: int, loads: LoadBytes = NO_LOADS) -> int:
    """Bytes of shared memory of a Triton kernel: its own rows, and `num_stages` tiles of those it walks.

    What is no MMA operand has a stage less: loads of mods, and the lse and delta of the queries that the dK/dV kernel
    walks. It is what Triton takes for sm_90a, where tests compile it; that of ``captured`` is compared by none.

    >>> shared_memory("forward", Tiles(128, 128, 4, 2), 64, 64, 2)
    81920
    """
    size, size_v = (sum(width for _, width in chunks(x)) for x in (D, Dv))
    walked = tiles.block_q if kernel == "dkv" else tiles.block_kv
    mod_bytes = tiles.block_q * tiles.block_kv * loads.by_element + walked * loads.by_row
    both, more = size + size_v, (tiles.num_stages - 1) * mod_bytes
    if kernel in ("forward", "decode"):
        elements = tiles.block_q * size + tiles.num_stages * tiles.block_kv * both
    elif kernel == "captured":  # it walks batch entries and heads
        elements = tiles.num_stages * (tiles.block_q + tiles.block_kv) * both
    elif kernel == "tangent":  # each array has a tangent beside it
        elements = 2 * (tiles.block_q * size + tiles.num_stages * tiles.block_kv * both)
    elif kernel == "dq":
        elements = tiles.block_q * both + tiles.num_stages * tiles.block_kv * both
    else:
        elements = tiles.block_kv * both + tiles.num_stages * tiles.block_q * both
        more += (tiles.num_stages - 1) * tiles.block_q * 2 * 4
    return elements * itemsize + more


def bytes_of_loads(kernel: str, programs: Sequence[Program | None]) -> LoadBytes:
    """Bytes of mods that `shared_memory` counts."""
    loads = [node for program in programs if program is not None for node in program.loads]
    read = lambda kind: sum(max(x.dtype.itemsize, 4 if kernel == "dkv" else 1) for x in loads if x.kind == kind)
    return LoadBytes(read(Axes.TILE), read(Axes.ROW if kernel == "dkv" else Axes.COLUMN))


def stages_that_fit(
    kernel: str, tiles: Tiles, head_sizes: tuple[int, int], itemsize: int, loads: LoadBytes, device_kind: str
) -> int:
    """The stages of `tiles`, or fewer if the shared memory of the device does not hold them.

    >>> stages_that_fit("forward", Tiles(64, 64, 4, 3), (64, 64), 2, LoadBytes(32), "NVIDIA H200")
    2
    """
    taken = lambda n: shared_memory(kernel, dataclasses.replace(tiles, num_stages=n), *head_sizes, itemsize, loads)
    return _most_stages(tiles.num_stages, taken, device_kind)


def fitted(spec: AttentionSpec, kernel: str, tiles: Tiles, cotangents: Iterable[Node] = ()) -> Tiles:
    """The tiles, with fewer stages where mods read more than the shared memory of the device holds.

    Triton may hold what the cotangents of loads depend on once more: with the gradients of a random mod that reads 20
    bytes of each element, the dK/dV kernel held 36.
    """
    read = bytes_of_loads(kernel, spec.programs)
    again = (node for node in reachable(list(cotangents)) if node.op == "load" and node.kind == Axes.TILE)
    read = read._replace(by_element=read.by_element + sum(max(node.dtype.itemsize, 4) for node in again))
    if not any(read):
        return tiles
    itemsize = np.dtype(spec.dtype).itemsize
    stages = stages_that_fit(kernel, tiles, (spec.D, spec.Dv), itemsize, read, spec.device_kind)
    return dataclasses.replace(tiles, num_stages=stages)


def paged_stages(spec: AttentionSpec, tiles: Tiles) -> int:
    """The stages of a paged kernel with key or value mods, or fewer if the shared memory does not hold their loads."""
    return _most_stages(tiles.num_stages, functools.partial(paged_shared_memory, spec, tiles), spec.device_kind)


def paged_shared_memory(spec: AttentionSpec, tiles: Tiles, stages: int) -> int:
    """Estimated bytes of shared memory of a paged kernel: what Triton takes for sm_90a, where tests compile it.

    Where pages are looked up, loads of keys wait for loads of the page table, and each has half of the stages. A tile
    that a mod has made is an operand of an MMA, in shared memory once more.
    """
    itemsize, per_key, mod_width = np.dtype(spec.dtype).itemsize, 0, 0
    for size, program in zip((spec.D, spec.Dv), spec.vector_programs, strict=True):
        if program is None:
            per_key += sum(width for _, width in chunks(size)) * itemsize
            continue
        mod_width = max(mod_width, *(chunk.width for chunk in program.chunks))
        per_key += sum(
            lanes.width * node.dtype.itemsize
            for lanes in program.lane_programs
            for node in lanes.nodes
            if node.op == "load" and node.kind == Axes.TILE
        )
    buffers = max(1, (stages - 1) // 2 if spec.max_pages > 1 else stages - 1)
    queries = tiles.block_q * sum(width for _, width in chunks(spec.D))
    return (buffers * per_key + mod_width * itemsize) * tiles.block_kv + queries * itemsize


def _most_stages(stages: int, taken: Callable[[int], float], device_kind: str) -> int:
    """So many stages, or fewer if the shared memory that they take is more than the device has."""
    return next((n for n in range(stages, 1, -1) if taken(n) <= _memory_of(device_kind)), 1)


def _memory_of(device_kind: str) -> int:
    if tables.has_large_memory(device_kind):
        return HOPPER_SHARED_MEMORY
    if is_amd(device_kind):
        return AMD_SHARED_MEMORY
    return AMPERE_SHARED_MEMORY if any(name in device_kind for name in ("A100", "A800", "A30")) else MIN_SHARED_MEMORY

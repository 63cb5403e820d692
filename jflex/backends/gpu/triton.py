"""Adapter of the Triton kernels: plans a call, and passes its arrays to the kernels, which Pallas compiles."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jflex._mesh import isolated_trace
from jflex.backends import lengths as kv_lengths
from jflex.backends.base import Backend, Gradients, Inputs, PagedInputs, Plan, Saved, SavedCotangents, Splits
from jflex.backends.eight_bits import widened
from jflex.backends.gpu.operands import operands_of, requested_gradients
from jflex.backends.results import fold_sinks
from pallas_kernels.plan import GradientRequest, Refusal, limit_of_pallas, unreached_by_pallas
from pallas_kernels.spec import AttentionSpec, Compiler, Operands, as_int8
from pallas_kernels.triton.plan.limits import MAX_DECODED, MIN_TILE, decodes, limit_of_device
from pallas_kernels.triton.plan.limits import loads_e4m3 as loads_e4m3

if TYPE_CHECKING:
    from pallas_kernels.gradients import Entropy, Repairs
    from pallas_kernels.program.build import Derivative
    from pallas_kernels.triton.paged.work import PagedOperands, Work
    from pallas_kernels.triton.plan import plan as triton_plan


class TritonKernels(Backend):
    """The Triton kernels, whoever compiles them.

    Attributes:
      compiler: Who does.
    """

    compiler: ClassVar[Compiler]

    @abc.abstractmethod
    def limit_of_compiler(self, spec: AttentionSpec) -> str | None:
        """Why the compiler cannot compile a call, or None."""

    @isolated_trace
    def plan(self, spec: AttentionSpec, requested: GradientRequest | None) -> Plan | Refusal:
        """The kernels and tiles of both passes. Lengths become a mask, except in decoding."""
        reason = limit_of_device(spec) or self.limit_of_compiler(spec)  # the second depends on more than the call
        return _plan(self.own(spec), requested) if reason is None else Refusal(reason)

    def own(self, spec: AttentionSpec) -> AttentionSpec:
        """The call, compiled by this compiler."""
        return spec if spec.device.compiler == self.compiler else spec.replace(compiler=self.compiler)

    @isolated_trace
    def forward(self, spec: AttentionSpec, inputs: Inputs | PagedInputs) -> Saved:
        """Runs the forward, the decoding or the paged kernel."""
        from pallas_kernels.triton import forward
        from pallas_kernels.triton.decode.kernel import decode

        spec = self.own(spec)
        planned = _planned(spec, None)
        if isinstance(inputs, PagedInputs):
            return _attend_paged(planned, inputs)
        assert planned.forward is not None  # the call is dense
        tiles = planned.forward.tiles
        if planned.decodes:
            saved = decode(planned.spec, tiles, operands_of(inputs), inputs.kv_lengths)
            return fold_sinks(spec, _saved(spec, saved), inputs.sinks)
        inputs = kv_lengths.inputs_without_lengths(spec, inputs, _block_size(spec))
        if spec.qk_dtype is not None:  # once: to widen each tile took 13.1 ms, and 16 bits 8.8 (H200, D 128, S 16384)
            inputs = widened(inputs)
        return _saved(spec, forward.forward(planned.spec, tiles, operands_of(inputs)._replace(sinks=inputs.sinks)))

    @isolated_trace
    def backward(
        self,
        spec: AttentionSpec,
        inputs: Inputs,
        saved: Saved,
        d_saved: SavedCotangents,
        requested: GradientRequest,
    ) -> Gradients:
        """Runs the dK/dV and the dQ kernel, if their gradients are requested."""
        from pallas_kernels.gradients import RequestedGradients
        from pallas_kernels.triton.backward import gradients

        spec = self.own(spec)
        plan = _planned(spec, requested).backward
        assert plan is not None  # gradients were requested
        inputs = kv_lengths.inputs_without_lengths(spec, inputs, _block_size(spec))
        found = gradients.backward(
            plan.spec,
            gradients.BackwardTiles(plan.dkv.tiles, plan.dq.tiles),
            operands_of(inputs),
            RequestedGradients(requested.query, requested.key or requested.value, plan.derivative),
            (saved.out, saved.lse),
            (d_saved.out, d_saved.lse),
            _entropy(saved, d_saved),
        )
        result = requested_gradients(found, requested)
        return kv_lengths.sum_shared_batch(spec, result) if spec.kv_lengths else result


class Triton(TritonKernels):
    """Fused kernels for NVIDIA GPUs from Ampere on, through Pallas and Triton."""

    name: ClassVar[str] = "triton"
    compiler: ClassVar[Compiler] = "pallas"

    def limit_of_compiler(self, spec: AttentionSpec) -> str | None:
        """A JAX whose Pallas has no Triton, and pages that it does not reach; Pallas' interpreter needs none."""
        return None if spec.config.interpret else limit_of_pallas() or _limit_of_pages(spec)

    @isolated_trace
    def not_preferred(self, spec: AttentionSpec, requested: GradientRequest | None) -> str | None:
        """Calls that official Triton was measured to run faster."""
        from pallas_kernels.triton.compiler import preference

        if spec.paging is not None or spec.config.batch_invariant:
            return None
        plan = _planned(spec, requested)
        if requested is not None:
            return None if plan.backward is None else preference.faster(plan.backward.spec, ("dkv", "dq"))
        return None if plan.decodes else preference.faster(plan.spec, ("forward",))


def _limit_of_pages(spec: AttentionSpec) -> str | None:
    """Why Pallas' Triton does not reach the last page of a cache in eight bits, as part of a sentence, or None.

    It reaches them as words of two columns: 2 ** 32 bytes are 2 ** 31 of these.
    """
    from pallas_kernels.triton.head_chunks import may_hold_pairs

    paging = spec.paging
    if paging is None or paging.dtype is None:
        return None
    sides = [(spec.Dv, None)] if spec.has_latent_tiles else [(spec.D, spec.key_mod), (spec.Dv, spec.value_mod)]
    in_words = lambda size, mod: may_hold_pairs(spec, size, mod) and not spec.has_latent_tiles
    in_bytes = [spec.paged_rows * size for size, mod in sides if not in_words(size, mod)]
    unreached = [elements for elements in in_bytes if unreached_by_pallas(elements)]
    if not unreached:
        return None
    return (
        f"pages of {paging.dtype} have {unreached[0]} elements: with more than 2 ** 31 in at most 2 ** 32 bytes, "
        "Pallas does not reach the last ones ('official_triton' does; or take fewer or more pages)"
    )


def _saved(spec: AttentionSpec, results: Sequence[jax.Array]) -> Saved:
    """From out, lse and ``spec.stats``, as the kernels return them."""
    out, lse, *stats = results
    return Saved(out, lse, **dict(zip(spec.stats, stats, strict=True)))


def _entropy(saved: Saved, d_saved: SavedCotangents) -> Entropy | None:
    """The entropy and its cotangent, for the kernels; None without a cotangent."""
    from pallas_kernels.gradients import Entropy

    if saved.entropy is None or d_saved.entropy is None:
        return None
    return Entropy(saved.entropy, d_saved.entropy)


def repair_forward(
    spec: AttentionSpec, operands: Operands, result: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Out and lse of the Hopper kernels, with the marked rows recomputed (`pallas_kernels.softmax.mark`)."""
    from pallas_kernels.triton import repairs

    return repairs.forward(spec, operands, result)


def repairs_of(
    spec: AttentionSpec,
    operands: Operands,
    derivative: Derivative | None,
    saved: tuple[jax.Array, jax.Array],
    d_saved: tuple[jax.Array, jax.Array | None],
) -> Repairs:
    """Functions that recompute gradients of the Hopper kernels where these marked them."""
    from pallas_kernels.triton import repairs

    return repairs.backward(spec, operands, derivative, saved, d_saved)


def is_decoded(spec: AttentionSpec) -> bool:
    """Whether the kernel for few queries runs; calls with many ask no kernel."""
    return spec.T <= MAX_DECODED and decodes(spec)


@functools.lru_cache(maxsize=256)
def _plan(spec: AttentionSpec, requested: GradientRequest | None) -> Plan | Refusal:
    from pallas_kernels.triton.plan.plan import plan

    lengthless = kv_lengths.spec_without_lengths(spec, _block_size(spec))
    decoded = plan(spec, None) if spec.kv_lengths and is_decoded(spec) else None  # the decoding kernel takes lengths
    planned = decoded if decoded is not None and requested is None else plan(lengthless, requested)
    if isinstance(planned, Refusal):
        return planned
    if isinstance(decoded, Refusal):
        return decoded
    if decoded is not None:
        planned = dataclasses.replace(decoded, backward=planned.backward)
    count_splits = None if spec.paging is None else functools.partial(_count_splits, planned)
    return Plan(planned.describe, planned, count_splits=count_splits)


def _planned(spec: AttentionSpec, requested: GradientRequest | None) -> triton_plan.Plan:
    """The plan of a supported call."""
    plan = _plan(spec, requested)
    assert isinstance(plan, Plan), plan
    return plan.kernels


@isolated_trace
def _count_splits(plan: triton_plan.Plan, indptr: np.ndarray, lengths: np.ndarray) -> Splits:
    with jax.ensure_compile_time_eval():
        return Splits(*plan.count_splits(indptr, lengths))


def _attend_paged(plan: triton_plan.Plan, inputs: PagedInputs) -> Saved:
    from pallas_kernels.triton.paged.kernel import paged

    return _saved(plan.spec, paged(plan.spec, plan.paged, paged_operands(inputs)))


def paged_operands(inputs: PagedInputs) -> PagedOperands[jax.Array]:
    """The arrays of a paged call; booleans that mods capture as int8."""
    from pallas_kernels.triton.paged.work import PagedOperands

    return PagedOperands(*inputs._replace(captured=jax.tree.map(as_int8, inputs.captured)))


# --- what the Hopper kernels with split-KV leave to these


Extents = tuple["jax.Array | np.ndarray", "jax.Array | np.ndarray"]
"""Where the queries of each request begin and the last ones end, int32 [R + 1], and its keys, [R]."""


def work_for_hopper(rows: int, keys: int, queries: int) -> Work:
    """Their one launch, with tiles of so many rows and keys, which hold so many queries."""
    from pallas_kernels.triton.paged.for_hopper import work_of

    return work_of(rows, keys, queries)


def items_for_hopper(
    spec: AttentionSpec,
    work: Work,
    extents: Extents,
    mask_operands: tuple[jax.Array, ...],
    per_request: int | None = None,
) -> tuple[jax.Array, tuple[int, int]]:
    """Their work items, and upper bounds on these and on partial results (0 if no keys are split).

    Where the extents are known, and no mask bounds the tiles that are visited, no kernel plans them.

    Args:
      spec: Of the kernel; its T counts packed queries.
      work: The launch.
      extents: Queries and keys of the requests; in numpy if they are known.
      mask_operands: What the mask captures.
      per_request: Queries of each request, if the mask counts them from the first of its own (dense calls).
    """
    from pallas_kernels.triton.paged import for_hopper
    from pallas_kernels.triton.paged.work import RequestExtents

    indptr, lengths = extents
    if isinstance(indptr, np.ndarray) and isinstance(lengths, np.ndarray) and spec.mask_mod is None:
        items, slots = for_hopper.items_on_host(spec, work, RequestExtents(indptr, lengths))
        return jnp.asarray(items), (len(items), slots)
    arrays = RequestExtents(jnp.asarray(indptr), jnp.asarray(lengths))
    items = for_hopper.work_items(spec, work, arrays, mask_operands, per_request)
    return items, (work.num_items(spec), work.slots(spec) if work.max_splits(spec) > 1 else 0)


def merge_for_hopper(spec: AttentionSpec, work: Work, extents: Extents, result: Sequence[jax.Array]) -> list[jax.Array]:
    """Out [N, Hq, Dv] and lse [N, Hq], from these and the partial results that may follow them."""
    from pallas_kernels.triton.paged.for_hopper import merge
    from pallas_kernels.triton.paged.work import RequestExtents

    return merge(spec, work, RequestExtents(*map(jnp.asarray, extents)), result)


@isolated_trace
def count_splits_for_hopper(spec: AttentionSpec, work: Work, indptr: np.ndarray, lengths: np.ndarray) -> Splits:
    """Tiles of queries, and the splits of their keys, for each group of heads."""
    from pallas_kernels.triton.paged.work import requests_on_host

    with jax.ensure_compile_time_eval():
        of = requests_on_host(spec, work, indptr, lengths)
        return Splits(int(of.tiles.sum()), int((of.tiles * of.splits).sum()))


def repair_paged(spec: AttentionSpec, arrays: PagedOperands[jax.Array], result: list[jax.Array]) -> list[jax.Array]:
    """Out and lse of a Hopper kernel for pages, with the marked rows recomputed (`pallas_kernels.softmax.mark`)."""
    from pallas_kernels.triton.paged.kernel import repair

    planned = _planned(spec, None)
    return repair(planned.spec, planned.paged, arrays, result)


def repair_decoded(
    spec: AttentionSpec, operands: Operands, lengths: jax.Array | None, result: list[jax.Array]
) -> Sequence[jax.Array]:
    """Likewise of its kernel for few queries."""
    from pallas_kernels.triton.decode.kernel import repair

    planned = _planned(spec, None)
    assert planned.forward is not None  # the call is dense
    return repair(planned.spec, planned.forward.tiles, operands, lengths, result)


def _block_size(spec: AttentionSpec) -> tuple[int, int]:
    """Block size of lists made from lengths alone: no smaller than any tile, not much larger than the call.

    It orders the tiles of keys, so that where the batch must not matter the size of the call does not either.
    """
    given = [t for t in (spec.config.forward, spec.config.dkv, spec.config.dq) if t is not None]
    most = kv_lengths.LENGTHS_BLOCK
    small = MIN_TILE if not spec.config.batch_invariant else most
    cover = lambda length: min(most, max(small, 1 << (length - 1).bit_length()))
    return max([cover(spec.T), *(t.block_q for t in given)]), max([cover(spec.S), *(t.block_kv for t in given)])

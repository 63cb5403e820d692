"""Adapter of the Hopper kernels: plans a call, and passes its arrays to the kernels.

The Triton kernels compute the gradients that these do not, plan and merge splits of keys, and recompute tiles that
masked NaN reached.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, ClassVar

import jax
import numpy as np

from jflex._mesh import isolated_trace
from jflex.backends import lengths as kv_lengths
from jflex.backends.base import Backend, Gradients, GradientsBy, Inputs, PagedInputs, Plan, Saved, SavedCotangents
from jflex.backends.gpu.triton import NAMES, Triton, operands_of, paged_operands, requested_gradients, splits_of
from jflex.backends.results import fold_sinks
from pallas_kernels.mosaic_gpu.plan.limits import limit_of_machine
from pallas_kernels.plan import GradientRequest, Refusal, limit_of_pallas
from pallas_kernels.spec import AttentionSpec
from pallas_kernels.triton.plan.limits import MAX_DECODED, available_compiler, decodes, limit_of_compiler

if TYPE_CHECKING:
    from pallas_kernels.mosaic_gpu.plan import plan as mosaic_plan
    from pallas_kernels.mosaic_gpu.prompt.plan import PromptPlan
    from pallas_kernels.mosaic_gpu.split_kv import SplitKvPlan
    from pallas_kernels.plan import TangentPlan
    from pallas_kernels.spec import Operands
    from pallas_kernels.tangents import Moved, Pushed

_LISTS = (kv_lengths.LENGTHS_BLOCK, kv_lengths.LENGTHS_BLOCK)  # block size of lists made from lengths alone


class MosaicGpu(Backend):
    """Fused kernels for Hopper, through Pallas and Mosaic GPU: TMA, wgmma, warp specialisation."""

    name: ClassVar[str] = "mosaic_gpu"

    @isolated_trace
    def plan(self, spec: AttentionSpec, requested: GradientRequest | None) -> Plan | Refusal:
        """The kernels and tiles of both passes, and which gradients the Triton kernels compute."""
        reason = limit_of_machine(spec)  # depends on more than the call: not cached
        return _plan(_with_compiler(spec), requested) if reason is None else Refusal(reason)

    @isolated_trace
    def forward(self, spec: AttentionSpec, inputs: Inputs | PagedInputs) -> Saved:
        """Runs the forward kernel, or one with split-KV."""
        from pallas_kernels.mosaic_gpu.forward.kernel import forward
        from pallas_kernels.split_kv.repair import TILES
        from pallas_kernels.triton.forward import repair

        spec = _with_compiler(spec)
        if isinstance(inputs, PagedInputs):
            return _attend_paged(spec, inputs)
        if (decoded := _plan_decode(spec)) is not None:
            return _decode(spec, decoded.kernels, inputs)
        plan = _dense_kernels(spec, None)
        if spec.kv_lengths:
            inputs = kv_lengths.inputs_without_lengths(spec, inputs, _LISTS)
        operands = operands_of(inputs)._replace(sinks=inputs.sinks)
        out, lse, *stats = forward(plan.forward_spec, plan.forward.tiles, operands)
        if plan.spec.needs_marks:
            out, lse = repair(plan.spec, TILES, operands, (out, lse))
        return Saved(out, lse, **dict(zip(spec.stats, stats, strict=True)))

    @isolated_trace
    def backward(
        self, spec: AttentionSpec, inputs: Inputs, saved: Saved, d_saved: SavedCotangents, requested: GradientRequest
    ) -> Gradients:
        """Runs the backward kernels, and those of `triton` for the gradients that these do not compute."""
        spec = _with_compiler(spec)
        if d_saved.entropy is None:  # nothing of the statistics is differentiated
            spec = spec.replace(stats=())
        plan, others = _dense_kernels(spec, requested), None
        if plan.deferred is not None:
            others = Triton(spec.device.compiler).backward(spec, inputs, saved, d_saved, plan.deferred)
            if plan.backward is None:
                return others
        gradients = _gradients(spec, plan, inputs, saved, d_saved)
        if others is None:
            return gradients
        either = lambda x, other: other if x is None else x
        return gradients._replace(score_operands=tuple(map(either, gradients.score_operands, others.score_operands)))

    @isolated_trace
    def plan_tangent(self, spec: AttentionSpec, requested: GradientRequest) -> Plan | Refusal:
        """The kernel and its tiles."""
        reason = limit_of_machine(spec)
        return _plan_tangent(_with_compiler(spec), requested) if reason is None else Refusal(reason)

    @isolated_trace
    def tangent(self, spec: AttentionSpec, inputs: Inputs, saved: Saved, tangents: Gradients) -> SavedCotangents:
        """Runs the tangent kernel."""
        from jflex.backends.gpu.tangents import push_forward

        plan = _plan_tangent(_with_compiler(spec), tangents.requested)
        assert isinstance(plan, Plan), plan
        arrays = operands_of(kv_lengths.inputs_without_lengths(spec, inputs, _LISTS))
        return push_forward(spec, arrays, inputs, saved, tangents, functools.partial(_push_forward, plan.kernels))

    def not_preferred(self, spec: AttentionSpec, requested: GradientRequest | None) -> str | None:
        """Calls that underfill a CTA or the GPU or are not MMA-bound: `pallas_kernels.mosaic_gpu.plan.preference`."""
        from pallas_kernels.mosaic_gpu.plan import preference

        spec = _with_compiler(spec)
        if requested is not None:
            return preference.slower_backward(_dense_kernels(spec, requested))
        if spec.paging is not None:
            if spec.values_in_keys:
                return preference.slower_latent(spec)
            return preference.slower_prompts(spec) if _has_prompts(spec) else preference.slower_decode()
        if _is_decoded(spec):
            missing = _plan_split_kv(spec)
            if isinstance(missing, Refusal):
                return f"only 'triton' has a split-KV kernel for this call of few queries: {missing.reason}"
            return preference.slower_decode()
        if spec.config.batch_invariant:
            return None  # or the choice would depend on the batch
        return preference.slower_forward(_dense_kernels(spec, None))


# --- plans


def _with_compiler(spec: AttentionSpec) -> AttentionSpec:
    """The call, with the compiler of the Triton kernels beside these: Pallas', unless it cannot compile them."""
    has_pallas = spec.paging is None and limit_of_pallas() is None  # its other limit is of pages
    return spec.replace(compiler="pallas" if has_pallas else available_compiler(spec))


def _plan(spec: AttentionSpec, requested: GradientRequest | None) -> Plan | Refusal:
    """The plan on a machine that is not refused."""
    if spec.paging is not None:
        return _plan_split_kv(spec)
    decoded = _plan_decode(spec) if requested is None else None
    return _plan_dense(spec, requested) if decoded is None else decoded


def _plan_decode(spec: AttentionSpec) -> Plan | None:
    """The plan of the kernel for few queries, where it runs."""
    plan = _plan_split_kv(spec) if _is_decoded(spec) else None
    return plan if isinstance(plan, Plan) else None


def _is_decoded(spec: AttentionSpec) -> bool:
    """Returns whether a kernel for few queries may run; calls with many ask none."""
    return spec.T <= MAX_DECODED and decodes(spec)


def _dense_kernels(spec: AttentionSpec, requested: GradientRequest | None) -> mosaic_plan.HopperPlan:
    """The plan of forward and backward kernels, for a call that they support."""
    plan = _plan_dense(spec, requested)
    assert isinstance(plan, Plan), plan
    return plan.kernels


@functools.lru_cache(maxsize=256)
def _plan_split_kv(spec: AttentionSpec) -> Plan | Refusal:
    """The plan of a paged call, or of a dense one with few queries."""
    from pallas_kernels.mosaic_gpu.decode import plan as decode_plan
    from pallas_kernels.mosaic_gpu.latent import plan as latent_plan
    from pallas_kernels.mosaic_gpu.prompt import plan as prompt_plan
    from pallas_kernels.split_kv import repair

    if _has_prompts(spec):
        plan = prompt_plan.plan(spec)
    else:
        plan = latent_plan.plan(spec) if spec.values_in_keys else decode_plan.plan(spec)
    if isinstance(plan, Refusal):
        return plan
    refusal = repair.limit_of_split_kv(spec, needs_marks=plan.spec.needs_marks)
    if refusal is not None:
        return refusal
    count_splits = None if spec.paging is None else functools.partial(splits_of, plan.count_splits)
    return Plan(plan.describe, plan, count_splits=count_splits)


def _has_prompts(spec: AttentionSpec) -> bool:
    """True if a kernel for prompts takes requests of a paged call; latent pages have one for all."""
    from pallas_kernels.split_kv.plan import has_prompts

    return spec.paging is not None and not spec.values_in_keys and has_prompts(spec)


@functools.lru_cache(maxsize=256)
def _plan_dense(spec: AttentionSpec, requested: GradientRequest | None) -> Plan | Refusal:
    from pallas_kernels import block_walk
    from pallas_kernels.mosaic_gpu.plan.plan import plan as plan_call

    plan = plan_call(kv_lengths.spec_without_lengths(spec, _LISTS) if spec.kv_lengths else spec, requested)
    triton = Triton(spec.device.compiler)
    if isinstance(plan, Refusal):
        return plan
    if plan.spec.needs_marks and spec.device.compiler == "official":  # Pallas' was chosen because it has no limit here
        missing = limit_of_compiler(spec, spec.device.compiler)
        if missing is not None:
            return Refusal(f"the kernels of Triton recompute what NaN reached, and {missing} (or `contain_nan=False`)")
    if plan.deferred is not None:
        others = triton.plan(spec, plan.deferred)
        if isinstance(others, Refusal):
            reason = f"for gradients, {plan.deferred_reason}; and of '{triton.name}': {others.reason}"
            return dataclasses.replace(others, reason=reason, mod=None)
    all_by_triton = plan.deferred is not None and plan.backward is None
    by_triton = GradientsBy(triton.name, plan.deferred_reason) if all_by_triton else None
    count_tiles = functools.partial(block_walk.count_tiles, plan.spec, plan.forward.tiles)
    return Plan(functools.partial(_describe, plan, spec), plan, by_triton, count_tiles=count_tiles)


def _describe(plan: mosaic_plan.HopperPlan, spec: AttentionSpec) -> str:
    decoded = _plan_decode(spec)
    text = plan.describe(None if decoded is None else decoded.describe())
    if plan.deferred is None or plan.backward is None:
        return text
    return f"{text}; gradients of arrays that {plan.deferred_reason} by '{NAMES[spec.device.compiler]}'"


# --- tangents


@functools.lru_cache(maxsize=256)
def _plan_tangent(spec: AttentionSpec, requested: GradientRequest) -> Plan | Refusal:
    from pallas_kernels.mosaic_gpu.tangent.plan import plan as plan_call

    plan = plan_call(kv_lengths.spec_without_lengths(spec, _LISTS), requested)
    if isinstance(plan, Refusal):
        return plan
    missing = limit_of_compiler(spec, spec.device.compiler) if plan.spec.needs_marks else None
    if missing is not None:
        return Refusal(f"the kernels of Triton recompute what NaN reached, and {missing} (or `contain_nan=False`)")
    return Plan(plan.describe, plan)


def _push_forward(plan: TangentPlan, arrays: Operands[jax.Array], moved: Moved[jax.Array]) -> Pushed[jax.Array]:
    """The tangents of out and lse, with the rows recomputed that masked NaN reached."""
    from pallas_kernels.mosaic_gpu.tangent.kernel import tangent
    from pallas_kernels.triton import tangent as by_triton

    pushed = tangent(plan, arrays, moved)
    if not plan.spec.needs_marks:
        return pushed
    out, lse = by_triton.repair(plan, arrays, moved, pushed[:2])
    return pushed._replace(out=out, lse=lse)


# --- split-KV


def _attend_paged(spec: AttentionSpec, inputs: PagedInputs) -> Saved:
    """Out and lse of a paged call."""
    from pallas_kernels.split_kv import repair

    planned = _plan_split_kv(spec)
    assert isinstance(planned, Plan), planned
    plan: SplitKvPlan | PromptPlan = planned.kernels
    arrays = paged_operands(inputs)
    result = plan.run(arrays)
    return Saved(*(repair.paged(spec, arrays, result) if plan.spec.needs_marks else result))


def _decode(spec: AttentionSpec, plan: SplitKvPlan, inputs: Inputs) -> Saved:
    """Out and lse of few queries against contiguous keys: each batch entry is a request with T queries."""
    from pallas_kernels.mosaic_gpu.split_kv import SplitKvInputs
    from pallas_kernels.split_kv import items, repair

    arrays, work = operands_of(inputs), plan.work
    packed = plan.spec.replace(T=spec.B * spec.T)  # to the plan of items and the merge
    indptr, lengths = np.arange(spec.B + 1, dtype=np.int32) * spec.T, inputs.kv_lengths
    extents = indptr, np.full(spec.B, spec.S, np.int32) if lengths is None else lengths
    work_items, slots = items.plan_items(packed, work, extents, arrays.captured.mask, per_request=spec.T)
    query = arrays.query if spec.layout == "BTNH" else arrays.query.swapaxes(1, 2)
    query = query.reshape(spec.B * spec.T, *query.shape[2:])  # queries of a batch entry side by side
    operands = SplitKvInputs(query, arrays.key, arrays.value, None, None, work_items, arrays.captured)
    partials = plan.attend(slots, operands)
    out, lse = items.merge(packed, work, extents, work_items, partials)
    by_batch = lambda x: x.reshape(spec.B, spec.T, *x.shape[1:])
    out, lse = by_batch(out), by_batch(lse).swapaxes(1, 2)
    result = [out if spec.layout == "BTNH" else out.swapaxes(1, 2), lse]
    if plan.spec.needs_marks:
        result = repair.decode(spec, arrays, lengths, result)
    return fold_sinks(spec, Saved(*result), inputs.sinks)


# --- gradients


def _gradients(
    spec: AttentionSpec, plan: mosaic_plan.HopperPlan, inputs: Inputs, saved: Saved, d_saved: SavedCotangents
) -> Gradients:
    from pallas_kernels.gradients import RequestedGradients
    from pallas_kernels.mosaic_gpu.backward import gradients
    from pallas_kernels.split_kv import repair

    assert plan.backward is not None  # else the caller has returned
    requested, derivative, tiles = plan.backward.requested, plan.backward.derivative, plan.backward.tiles
    operands = operands_of(kv_lengths.inputs_without_lengths(spec, inputs, _LISTS))
    states = (saved.out, saved.lse), (d_saved.out, d_saved.lse)
    result = gradients.backward(
        plan.spec,
        tiles,
        operands,
        RequestedGradients(requested.query, requested.key or requested.value, derivative),
        *states,
        repair.backward(plan.spec, operands, derivative, *states),
    )
    return kv_lengths.sum_shared_batch(spec, requested_gradients(result, requested))

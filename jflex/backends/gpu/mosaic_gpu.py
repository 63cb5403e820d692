"""Adapter of the Hopper kernels: plans a call, and passes its arrays to the kernels.

The Triton kernels compute the gradients that these do not, and recompute tiles that masked NaN reached.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, ClassVar

from jflex._mesh import isolated_trace
from jflex.backends import lengths as kv_lengths
from jflex.backends.base import Backend, Gradients, GradientsBy, Inputs, PagedInputs, Plan, Saved, SavedCotangents
from jflex.backends.gpu import hopper_split_kv as split_kv
from jflex.backends.gpu import triton
from jflex.backends.gpu.official_triton import triton_here
from jflex.backends.gpu.operands import operands_of, requested_gradients
from pallas_kernels.mosaic_gpu.plan.limits import limit_of_machine
from pallas_kernels.plan import GradientRequest, Refusal
from pallas_kernels.spec import AttentionSpec

if TYPE_CHECKING:
    from pallas_kernels.mosaic_gpu.plan import plan as mosaic_plan

_LISTS = (kv_lengths.LENGTHS_BLOCK, kv_lengths.LENGTHS_BLOCK)  # block size of lists made from lengths alone


class MosaicGpu(Backend):
    """Fused kernels for Hopper, through Pallas and Mosaic GPU: TMA, wgmma, warp specialisation."""

    name: ClassVar[str] = "mosaic_gpu"

    @isolated_trace
    def plan(self, spec: AttentionSpec, requested: GradientRequest | None) -> Plan | Refusal:
        """The kernels and tiles of both passes, and which gradients the Triton kernels compute."""
        reason = limit_of_machine(spec)  # depends on more than the call: not cached
        if reason is not None:
            return Refusal(reason)
        own = triton_here(spec).own(spec)
        if spec.paging is not None:
            return split_kv.plan_paged(own)
        decoded = _decoded(own)
        return _plan(own, requested) if requested is not None or decoded is None else decoded

    @isolated_trace
    def forward(self, spec: AttentionSpec, inputs: Inputs | PagedInputs) -> Saved:
        """Runs the forward kernel."""
        from pallas_kernels.mosaic_gpu.forward.kernel import forward

        if isinstance(inputs, PagedInputs):
            return split_kv.attend_paged(triton_here(spec).own(spec), inputs)
        if _decoded(triton_here(spec).own(spec)) is not None:
            return split_kv.decode(triton_here(spec).own(spec), inputs)
        plan = _own(spec, None)
        operands = operands_of(kv_lengths.inputs_without_lengths(spec, inputs, _LISTS))._replace(sinks=inputs.sinks)
        out, lse, *stats = forward(plan.spec, plan.forward.tiles, operands)
        if plan.spec.needs_marks:
            out, lse = triton.repair_forward(plan.spec, operands, (out, lse))
        return Saved(out, lse, **dict(zip(spec.stats, stats, strict=True)))

    @isolated_trace
    def backward(
        self,
        spec: AttentionSpec,
        inputs: Inputs,
        saved: Saved,
        d_saved: SavedCotangents,
        requested: GradientRequest,
    ) -> Gradients:
        """Runs the backward kernels, and those of `triton` for the gradients that these do not compute."""
        if d_saved.entropy is None:  # nothing of the statistics is differentiated
            spec = spec.replace(stats=())
        own = _own(spec, requested)
        rest = None
        if own.left is not None:
            rest = triton_here(spec).backward(spec, inputs, saved, d_saved, own.left)
            if own.backward is None:
                return rest
        gradients = _own_gradients(spec, own, inputs, saved, d_saved)
        if rest is None:
            return gradients
        either = lambda mine, theirs: theirs if mine is None else mine
        return gradients._replace(score_operands=tuple(map(either, gradients.score_operands, rest.score_operands)))

    def not_preferred(self, spec: AttentionSpec, requested: GradientRequest | None) -> str | None:
        """Calls that underfill a CTA or the GPU or are not MMA-bound: `pallas_kernels.mosaic_gpu.plan.preference`."""
        from pallas_kernels.mosaic_gpu.plan import preference

        if requested is not None:
            return preference.slower_backward(_own(spec, requested))
        if spec.paging is not None:
            return preference.slower_latent(spec) if spec.values_in_keys else preference.slower_decode()
        if triton.is_decoded(spec):
            missing = split_kv.plan_decode(triton_here(spec).own(spec))
            if isinstance(missing, Refusal):
                return f"only 'triton' has a split-KV kernel for this call of few queries: {missing.reason}"
            return preference.slower_decode()
        if spec.config.batch_invariant:
            return None  # or the choice would depend on the batch
        return preference.slower_forward(_own(spec, None))


@functools.lru_cache(maxsize=256)
def _plan(spec: AttentionSpec, requested: GradientRequest | None) -> Plan | Refusal:
    from pallas_kernels.mosaic_gpu.plan.plan import plan

    own = plan(kv_lengths.spec_without_lengths(spec, _LISTS), requested)
    if isinstance(own, Refusal):
        return own
    if own.spec.needs_marks and (missing := triton_here(spec).limit_of_compiler(spec)) is not None:
        return Refusal(f"the kernels of Triton recompute what NaN reached, and {missing} (or `contain_nan=False`)")
    if own.left is not None:
        others = triton_here(spec).plan(spec, own.left)
        if isinstance(others, Refusal):
            return dataclasses.replace(
                others,
                reason=f"for gradients, {own.left_reason}; and of '{triton_here(spec).name}': {others.reason}",
                mod=None,
            )
    all_left = own.left is not None and own.backward is None
    return Plan(
        functools.partial(_describe, own, spec),
        own,
        GradientsBy(triton_here(spec).name, own.left_reason) if all_left else None,
    )


def _decoded(spec: AttentionSpec) -> Plan | None:
    """The plan of the split-KV kernel for few queries, where it runs."""
    plan = split_kv.plan_decode(spec) if triton.is_decoded(spec) else None
    return plan if isinstance(plan, Plan) else None


def _describe(own: mosaic_plan.Plan, spec: AttentionSpec) -> str:
    decoded = _decoded(spec)
    text = own.describe(None if decoded is None else decoded.describe())
    if own.left is None or own.backward is None:
        return text
    return f"{text}; gradients of arrays that {own.left_reason} by '{triton_here(own.spec).name}'"


def _own(spec: AttentionSpec, requested: GradientRequest | None) -> mosaic_plan.Plan:
    """The plan of the Hopper kernels, for a call that they support."""
    plan = _plan(triton_here(spec).own(spec), requested)
    assert isinstance(plan, Plan), plan
    return plan.kernels


def _own_gradients(
    spec: AttentionSpec, plan: mosaic_plan.Plan, inputs: Inputs, saved: Saved, d_saved: SavedCotangents
) -> Gradients:
    from pallas_kernels.gradients import RequestedGradients
    from pallas_kernels.mosaic_gpu.backward import gradients

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
        triton.repairs_of(plan.spec, operands, derivative, *states),
    )
    own = requested_gradients(result, requested)
    return kv_lengths.sum_shared_batch(spec, own) if spec.kv_lengths else own

"""Adapter of the Triton kernels: plans a call, and passes its arrays to the kernels.

Two compilers have an implementation each: the Triton inside Pallas, ``"triton"``, and the package `triton`,
``"official_triton"``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jflex._mesh import isolated_trace
from jflex.backends import lengths as kv_lengths
from jflex.backends.base import Backend, Gradients, Inputs, PagedInputs, Plan, Saved, SavedCotangents, Splits
from jflex.backends.eight_bits import widened
from jflex.backends.results import fold_sinks
from pallas_kernels.plan import GradientRequest, Refusal
from pallas_kernels.spec import AttentionSpec, Compiler, Operands, as_int8
from pallas_kernels.triton.plan.limits import MIN_TILE, decodes, describe_compiler, limit_of_compiler, limit_of_device

if TYPE_CHECKING:
    from pallas_kernels.gradients import Gradients as KernelGradients
    from pallas_kernels.split_kv.plan import PagedPlan
    from pallas_kernels.split_kv.work import PagedOperands
    from pallas_kernels.triton.plan import plan as triton_plan

NAMES: dict[Compiler, str] = {"pallas": "triton", "official": "official_triton"}


@dataclasses.dataclass(frozen=True)
class Triton(Backend):
    """Fused kernels for NVIDIA GPUs from Ampere on, traced by Pallas."""

    # ``"pallas"``, or ``"official"``: emitted as Triton source, and compiled by the package `triton`
    compiler: Compiler = "pallas"

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The implementation."""
        return NAMES[self.compiler]

    @isolated_trace
    def plan(self, spec: AttentionSpec, requested: GradientRequest | None) -> Plan | Refusal:
        """The kernels and tiles of both passes. Lengths become a mask, except in decoding."""
        reason = limit_of_device(spec) or limit_of_compiler(spec, self.compiler)  # not cached: depends on the machine
        plan = self._plan(spec, requested) if reason is None else Refusal(reason)
        if isinstance(plan, Refusal) or self.compiler == "pallas":
            return plan
        return dataclasses.replace(plan, describe=lambda: f"{plan.describe()}; {describe_compiler(spec)}")

    def _plan(self, spec: AttentionSpec, requested: GradientRequest | None) -> Plan | Refusal:
        compiled = spec.replace(compiler=self.compiler)
        return _plan_dense(compiled, requested) if spec.paging is None else _plan_paged(compiled)

    @isolated_trace
    def forward(self, spec: AttentionSpec, inputs: Inputs | PagedInputs) -> Saved:
        """Runs the forward, the decoding or the paged kernel."""
        from pallas_kernels.split_kv.decode import decode
        from pallas_kernels.split_kv.paged import paged
        from pallas_kernels.triton.forward import forward

        if isinstance(inputs, PagedInputs):
            pages: PagedPlan = self._kernels(spec, None)
            return _saved(spec, paged(pages.spec, pages.launches, paged_operands(inputs)))
        plan: triton_plan.TritonPlan = self._kernels(spec, None)
        tiles = plan.forward.tiles
        if plan.decodes:
            results = decode(plan.spec, tiles, operands_of(inputs), inputs.kv_lengths)
            return fold_sinks(spec, _saved(spec, results), inputs.sinks)
        if spec.kv_lengths:
            inputs = kv_lengths.inputs_without_lengths(spec, inputs, _block_size(spec))
        if spec.qk_dtype is not None:  # once: to widen each tile took 13.1 ms, and 16 bits 8.8 (H200, D 128, S 16384)
            inputs = widened(inputs)
        return _saved(spec, forward(plan.spec, tiles, operands_of(inputs)._replace(sinks=inputs.sinks)))

    def _kernels(self, spec: AttentionSpec, requested: GradientRequest | None) -> Any:
        """The plan of the kernels themselves, a `TritonPlan` or a `PagedPlan`, for a call that they support."""
        plan = self._plan(spec, requested)
        assert isinstance(plan, Plan), plan
        return plan.kernels

    @isolated_trace
    def backward(
        self, spec: AttentionSpec, inputs: Inputs, saved: Saved, d_saved: SavedCotangents, requested: GradientRequest
    ) -> Gradients:
        """Runs the dK/dV and the dQ kernel, if their gradients are requested."""
        from pallas_kernels.gradients import Entropy, RequestedGradients
        from pallas_kernels.triton.backward import gradients

        plan: triton_plan.BackwardPlan = self._kernels(spec, requested).backward  # gradients were requested
        inputs = kv_lengths.inputs_without_lengths(spec, inputs, _block_size(spec))
        entropy = None
        if saved.entropy is not None and d_saved.entropy is not None:
            entropy = Entropy(saved.entropy, d_saved.entropy)
        result = gradients.backward(
            plan.spec,
            gradients.BackwardTiles(plan.dkv.tiles, plan.dq.tiles),
            operands_of(inputs),
            RequestedGradients(requested.query, requested.key or requested.value, plan.derivative),
            (saved.out, saved.lse),
            (d_saved.out, d_saved.lse),
            entropy,
        )
        return kv_lengths.sum_shared_batch(spec, requested_gradients(result, requested))

    @isolated_trace
    def plan_tangent(self, spec: AttentionSpec, requested: GradientRequest) -> Plan | Refusal:
        """The kernel and its tiles."""
        reason = limit_of_device(spec) or limit_of_compiler(spec, self.compiler)
        return self._plan_tangent(spec, requested) if reason is None else Refusal(reason)

    def _plan_tangent(self, spec: AttentionSpec, requested: GradientRequest) -> Plan | Refusal:
        from pallas_kernels.triton.plan.tangent import plan

        spec = spec.replace(compiler=self.compiler)
        planned = plan(kv_lengths.spec_without_lengths(spec, _block_size(spec)), requested)
        return planned if isinstance(planned, Refusal) else Plan(planned.describe, planned)

    @isolated_trace
    def tangent(self, spec: AttentionSpec, inputs: Inputs, saved: Saved, tangents: Gradients) -> SavedCotangents:
        """Runs the tangent kernel."""
        from jflex.backends.gpu.tangents import push_forward
        from pallas_kernels.triton.tangent import tangent

        plan = self._plan_tangent(spec, tangents.requested)
        assert isinstance(plan, Plan), plan
        arrays = operands_of(kv_lengths.inputs_without_lengths(spec, inputs, _block_size(spec)))
        return push_forward(spec, arrays, inputs, saved, tangents, functools.partial(tangent, plan.kernels))

    @isolated_trace
    def not_preferred(self, spec: AttentionSpec, requested: GradientRequest | None) -> str | None:
        """Calls of Pallas' Triton that official Triton was measured to run faster."""
        from pallas_kernels.triton.plan.plan import faster_by_official

        if self.compiler == "official" or spec.paging is not None or spec.config.batch_invariant:
            return None
        return faster_by_official(self._kernels(spec, requested), requested)


@functools.lru_cache(maxsize=256)
def _plan_dense(spec: AttentionSpec, requested: GradientRequest | None) -> Plan | Refusal:
    from pallas_kernels import block_walk
    from pallas_kernels.triton.plan.plan import plan

    lengthless = kv_lengths.spec_without_lengths(spec, _block_size(spec)) if spec.kv_lengths else spec
    decoded = plan(spec, None) if spec.kv_lengths and decodes(spec) else None  # the decoding kernel takes lengths
    planned = decoded if decoded is not None and requested is None else plan(lengthless, requested)
    if isinstance(planned, Refusal):
        return planned
    if isinstance(decoded, Refusal):
        return decoded
    if decoded is not None:
        planned = dataclasses.replace(decoded, backward=planned.backward)
    if planned.decodes:
        return Plan(planned.describe, planned)
    count_tiles = functools.partial(block_walk.count_tiles, planned.spec, planned.forward.tiles)
    return Plan(planned.describe, planned, count_tiles=count_tiles)


@functools.lru_cache(maxsize=256)
def _plan_paged(spec: AttentionSpec) -> Plan | Refusal:
    from pallas_kernels.split_kv.plan import plan

    planned = plan(spec)
    if isinstance(planned, Refusal):
        return planned
    return Plan(planned.describe, planned, count_splits=functools.partial(splits_of, planned.count_splits))


@isolated_trace
def splits_of(count: Callable[..., tuple[int, int]], indptr: np.ndarray, lengths: np.ndarray) -> Splits:
    """Splits of a paged call, by a function of its kernels' plan; also inside of a trace."""
    with jax.ensure_compile_time_eval():
        return Splits(*count(indptr, lengths))


# --- operands and results of kernels


def operands_of(inputs: Inputs) -> Operands:
    """The arrays of a dense call; booleans that mods capture as int8."""
    lists = None if inputs.lists is None else tuple(inputs.lists)
    return Operands(inputs.query, inputs.key, inputs.value, lists, jax.tree.map(as_int8, inputs.captured))


def paged_operands(inputs: PagedInputs) -> PagedOperands[jax.Array]:
    """The arrays of a paged call; booleans that mods capture as int8."""
    from pallas_kernels.split_kv.work import PagedOperands

    return PagedOperands(*inputs._replace(captured=jax.tree.map(as_int8, inputs.captured)))


def requested_gradients(result: KernelGradients, requested: GradientRequest) -> Gradients:
    """The gradients of the kernels, without those of captured arrays that were not requested."""
    captured = tuple(g if r else None for g, r in zip(result.score_operands, requested.score_operands, strict=True))
    return Gradients(result.query, result.key, result.value, captured)


def _saved(spec: AttentionSpec, results: Sequence[jax.Array]) -> Saved:
    """From out, lse and ``spec.stats``, as the kernels return them."""
    out, lse, *stats = results
    return Saved(out, lse, **dict(zip(spec.stats, stats, strict=True)))


def _block_size(spec: AttentionSpec) -> tuple[int, int]:
    """Block size of lists made from lengths alone: no smaller than any tile, not much larger than the call.

    It orders the tiles of keys, so that where the batch must not matter the size of the call does not either.
    """
    tiles = [t for t in (spec.config.forward, spec.config.dkv, spec.config.dq) if t is not None]
    most = kv_lengths.LENGTHS_BLOCK
    small = MIN_TILE if not spec.config.batch_invariant else most
    cover = lambda length: min(most, max(small, 1 << (length - 1).bit_length()))
    return max([cover(spec.T), *(t.block_q for t in tiles)]), max([cover(spec.S), *(t.block_kv for t in tiles)])

"""Plan of the Triton kernel for tangents."""

from __future__ import annotations

import dataclasses
import functools

from pallas_kernels.plan import GradientRequest, Refusal, TangentPlan, tangent_of, with_programs
from pallas_kernels.spec import AttentionSpec
from pallas_kernels.triton.plan.limits import limit_of_device
from pallas_kernels.triton.plan.plan import choose_tiles, fitted


@functools.lru_cache(maxsize=256)
def plan(spec: AttentionSpec, requested: GradientRequest) -> TangentPlan | Refusal:
    """Plans the tangent of a dense call without lengths."""
    reason = limit_of_device(spec)
    traced = with_programs(spec) if reason is None else Refusal(reason)
    if isinstance(traced, Refusal):
        return traced
    tangent, choice = tangent_of(traced, requested), choose_tiles(traced, "tangent")
    if isinstance(tangent, Refusal):
        return tangent
    if isinstance(choice, Refusal):
        return choice
    if tangent is not None:
        tiles = fitted(traced, "tangent", choice.tiles, (tangent.output,))
        choice = dataclasses.replace(choice, tiles=tiles)
    return TangentPlan(traced, requested, tangent, choice)

"""Operands of the GPU kernels, from the inputs of a call."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax

from jflex.backends.base import Gradients, Inputs
from pallas_kernels.plan import GradientRequest
from pallas_kernels.spec import Operands, as_int8

if TYPE_CHECKING:
    from pallas_kernels.gradients import Gradients as KernelGradients


def operands_of(inputs: Inputs) -> Operands:
    """The arrays; booleans that mods capture as int8."""
    lists = None if inputs.lists is None else tuple(inputs.lists)
    return Operands(inputs.query, inputs.key, inputs.value, lists, jax.tree.map(as_int8, inputs.captured))


def requested_gradients(result: KernelGradients, requested: GradientRequest) -> Gradients:
    """The gradients of the kernels, without those of captured arrays that were not requested."""
    captured = tuple(g if r else None for g, r in zip(result.score_operands, requested.score_operands, strict=True))
    return Gradients(result.query, result.key, result.value, captured)

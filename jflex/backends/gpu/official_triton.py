"""Adapter of the Triton kernels, compiled by official Triton."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from jflex._mesh import isolated_trace
from jflex.backends.base import Plan
from jflex.backends.gpu.triton import Triton, TritonKernels, loads_e4m3
from pallas_kernels.plan import GradientRequest, Refusal
from pallas_kernels.spec import AttentionSpec, Compiler
from pallas_kernels.triton.compiler.limits import limit_of_compiler, said_of_compiler


class OfficialTriton(TritonKernels):
    """The same kernels as `triton`, emitted as Triton source and compiled by the package `triton`."""

    name: ClassVar[str] = "official_triton"
    compiler: ClassVar[Compiler] = "official"

    def limit_of_compiler(self, spec: AttentionSpec) -> str | None:
        """Packages that are missing, and devices that are not known."""
        return limit_of_compiler(spec, loads_e4m3=loads_e4m3(spec))

    @isolated_trace
    def plan(self, spec: AttentionSpec, requested: GradientRequest | None) -> Plan | Refusal:
        """As `triton`, and says what compiles and launches."""
        plan = super().plan(spec, requested)
        if isinstance(plan, Refusal):
            return plan
        return dataclasses.replace(plan, describe=lambda: f"{plan.describe()}; {said_of_compiler(spec)}")

    def not_preferred(self, spec: AttentionSpec, requested: GradientRequest | None) -> str | None:
        """Nothing later in the order is faster."""
        del spec, requested
        return None


def triton_here(spec: AttentionSpec) -> TritonKernels:
    """The Triton kernels by the compiler that is here: Pallas' own, unless its Triton is gone."""
    return Triton() if Triton().limit_of_compiler(spec) is None else OfficialTriton()

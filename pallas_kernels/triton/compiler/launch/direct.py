"""Launches compiled kernels by jaxlib's custom call for Triton, without jax-triton."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence

import jax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir

from pallas_kernels.triton.compiler.compile import Compiled
from pallas_kernels.triton.compiler.emit.emit import Source
from pallas_kernels.triton.compiler.launch.target import Target

CUSTOM_CALL = "triton_kernel_call_ffi"
_call_p = Primitive("jflex_triton_kernel")
_call_p.multiple_results = True


def call(
    *args: jax.Array,
    compiled: Compiled,
    source: Source,
    target: Target,
    outputs: Sequence[jax.ShapeDtypeStruct],
    aliases: dict[int, int],
) -> list[jax.Array]:
    """Calls a kernel. `aliases`: which arguments are the memory of outputs; the kernel has no parameters for these."""
    # jaxlib hands over arguments and results in order, as many as there are parameters: aliased ones come last.
    order = sorted(range(len(outputs)), key=lambda n: n in aliases)
    avals = tuple(ShapedArray(outputs[n].shape, outputs[n].dtype) for n in order)
    pairs = tuple((aliases[n], position) for position, n in enumerate(order) if n in aliases)
    results = _call_p.bind(*args, compiled=compiled, grid=source.grid, arch=target.arch, outputs=avals, aliases=pairs)
    return [x for _, x in sorted(zip(order, results, strict=True), key=lambda pair: pair[0])]


_call_p.def_abstract_eval(lambda *_, outputs, **__: list(outputs))


def _lowering(ctx, *args, compiled, grid, arch, outputs, aliases):
    from jaxlib import gpu_triton

    kernel = gpu_triton.TritonKernel(
        compiled.name, compiled.num_warps, 1, compiled.shared_memory, compiled.code, "", arch
    )
    pointers = [gpu_triton.create_array_parameter(0, 16) for _ in range(len(args) + len(outputs) - len(aliases))]
    opaque = gpu_triton.TritonKernelCall(kernel, *grid, pointers).to_proto(compiled.name, b"")
    rule = jax.ffi.ffi_lowering(CUSTOM_CALL, api_version=4, operand_output_aliases=dict(aliases))
    return rule(ctx, *args, opaque=zlib.compress(opaque))


mlir.register_lowering(_call_p, _lowering, platform="cuda")
_call_p.def_impl(lambda *args, **params: jax.jit(functools.partial(_call_p.bind, **params))(*args))

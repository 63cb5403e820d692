"""What kernels say beyond Pallas' core, by who runs them: masked loads and stores, functions of the SFU.

Pallas' Triton gets its own operations, and official Triton primitives of ours. With `launch`, this is what needs
`jax.experimental.pallas.triton`, and only where that compiles a kernel, or interprets it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.ref import get as ref_get
from jax.ref import set as ref_set

from pallas_kernels.plan import limit_of_pallas
from pallas_kernels.spec import Route
from pallas_kernels.triton import interpreted
from pallas_kernels.triton.compiler.rules import primitives
from pallas_kernels.types import Ref


def load(route: Route, ref: Ref, *, mask: jax.Array | None = None, other: float | None = None) -> jax.Array:
    """Loads what a ref, or an index of one, refers to.

    Args:
      route: Who runs the kernel.
      ref: The ref.
      mask: Where to load, of the shape of what is loaded; None for everywhere.
      other: What is there elsewhere; None for anything.
    """
    if _has_pallas(route):
        from jax.experimental.pallas import triton as plgpu

        return plgpu.load(ref, mask=mask, other=other)
    if route == "interpreted":
        return interpreted.load(ref, mask, other)
    return ref_get(ref) if mask is None else primitives.masked_load(ref, mask, other)


def store(route: Route, ref: Ref, x: jax.Array, *, mask: jax.Array | None = None) -> None:
    """Stores to what a ref refers to, where a mask is true.

    The interpreter also writes the elements that are masked, with their old values.
    """
    if _has_pallas(route):
        from jax.experimental.pallas import triton as plgpu

        plgpu.store(ref, x, mask=mask)
    elif route == "interpreted":
        interpreted.store(ref, x, mask)
    elif mask is None:
        ref_set(ref, None, x)
    else:
        primitives.masked_store(ref, x, mask)


def _has_pallas(route: Route) -> bool:
    """Whether Pallas' own operations are used: its interpreter knows them too, while they are there."""
    return route == "pallas" or (route == "interpreted" and limit_of_pallas() is None)


def multiply_add(route: Route, a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
    """``a * b + c`` of float32 arrays of one shape, as one FMA instruction."""
    return a * b + c if route == "interpreted" else element(route, "multiply_add", a, b, c)


def relu(route: Route, x: jax.Array) -> jax.Array:
    """The positive elements of a float32 array, zeros for the others, and NaN, which Triton's maximum drops."""
    return jnp.maximum(x, 0.0) if route == "interpreted" else element(route, "relu", x)


def exp2_of_multiple(route: Route, x: jax.Array, factor: float, subtracted: jax.Array) -> jax.Array:
    """``2 ** (factor * x - subtracted)``, by one FMA and one ``ex2.approx`` (relative error 2 ** -22).

    Inline PTX for Pallas' Triton, because XLA's rounds product and difference separately, and its exponential guards
    numbers below 2 ** -126, which here become 0: together seven SASS instructions for each score.
    """
    if route == "interpreted":
        return jnp.exp2(x * factor - subtracted)
    addend = jnp.broadcast_to(-subtracted, x.shape)
    if route == "official":
        return jnp.exp2(element(route, "multiply_add", x, jnp.full_like(x, factor), addend))
    bits = np.float32(factor).view(np.uint32)
    return _inline_ptx(f"{{ fma.rn.f32 $0, $1, 0f{bits:08X}, $2; ex2.approx.ftz.f32 $0, $0; }}", x, addend)


def element(route: Route, name: str, *args: jax.Array) -> jax.Array:
    """One of `primitives.FUNCTIONS` on each element of arrays of one shape; not for the interpreter."""
    if route == "official":
        return primitives.element(name, *args)
    function = primitives.FUNCTIONS[name]
    return _inline_ptx(function.ptx, *args, dtype=function.dtype)


def _inline_ptx(ptx: str, *args: jax.Array, dtype: str = "float32") -> jax.Array:
    """Runs PTX on each element, or each two of 16 bits: ``$0`` is the result, what follows are the arguments."""
    from jax.experimental.pallas import triton as plgpu

    [out] = plgpu.elementwise_inline_asm(
        ptx,
        args=args,
        constraints=primitives.constraints(dtype, len(args)),
        pack=primitives.pack(dtype),
        result_shape_dtypes=[jax.ShapeDtypeStruct(args[0].shape, jnp.dtype(dtype))],
    )
    return out

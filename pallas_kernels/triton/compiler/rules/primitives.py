"""Primitives of our own, for what a kernel says and Pallas' core does not: masked loads and stores, and inline PTX.

They hold no state and have no effects. A masked load is `mask_load` of what a ref gives, a masked store the store of
what `mask_store` gives; the emitter makes one instruction of both.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.ref import get as ref_get
from jax.ref import set as ref_set


class ElementFunction(NamedTuple):
    """A function of elements of 32 bits, or of 16."""

    # the instructions: ``$0`` is the result, what follows are the arguments. Registers hold two elements of 16 bits.
    ptx: str
    portable: str  # the same in Triton, for targets without PTX, in terms of ``{0}``, ``{1}``, ``{2}``
    dtype: str = "float32"


def pack(dtype: str) -> int:
    """Elements of the result in a register."""
    return 4 // jnp.dtype(dtype).itemsize


def constraints(dtype: str, count: int) -> str:
    """LLVM's constraints of inline PTX: registers of floats of 32 bits, or of any two of 16."""
    kind = "f" if pack(dtype) == 1 else "r"
    return ",".join([f"={kind}", *(kind for _ in range(count))])


def _bytes_of(dtype: str, ptx: tuple[str, str]) -> dict[str, ElementFunction]:
    """The lower and the upper byte of each word of 16 bits, numbers of a dtype, as float16."""
    names = {
        "int8": "",
        "float8_e4m3fn": ".to(tl.float8e4nv, bitcast=True)",
        "float8_e5m2": ".to(tl.float8e5, bitcast=True)",
    }
    shifted = {"even": "{0}", "odd": "({0} >> 8)"}
    return {
        f"{which}_{dtype}": ElementFunction(code, f"{word}.to(tl.int8){names[dtype]}.to(tl.float16)", "float16")
        for (which, word), code in zip(shifted.items(), ptx, strict=True)
    }


def _widen_e4m3(selector: str) -> str:
    pair = f"prmt.b32 t, $1, 0, {selector}; mov.b32 {{low, high}}, t;"
    return f"{{ .reg .b32 t; .reg .b16 low, high; {pair} cvt.rn.f16x2.e4m3x2 $0, low; }}"


def _widen_int8(selector: str) -> str:
    """In float16, 0x6400 is 1024, whose last bit counts 1: ``1024 + (x + 128) - 1152`` is x."""
    biased = f"xor.b32 t, $1, 0x80808080; prmt.b32 t, t, 0x64646464, {selector};"
    return f"{{ .reg .b32 t, c; {biased} mov.b32 c, 0x64806480; sub.f16x2 $0, t, c; }}"


FUNCTIONS = {
    "multiply_add": ElementFunction("fma.rn.f32 $0, $1, $2, $3;", "tl.fma({0}, {1}, {2})"),
    # LLVM cannot see through it: `pallas_kernels.triton.scores.opaque` says what for.
    "opaque": ElementFunction("mov.b32 $0, $1;", "{0}"),
    "relu": ElementFunction(
        "max.NaN.f32 $0, $1, 0f00000000;", "tl.maximum({0}, 0.0, propagate_nan=tl.PropagateNan.ALL)"
    ),
    "tanh": ElementFunction("tanh.approx.f32 $0, $1;", "2.0 / (1.0 + tl.exp(-2.0 * {0})) - 1.0"),
    "sin": ElementFunction("sin.approx.f32 $0, $1;", "tl.sin({0})"),
    "cos": ElementFunction("cos.approx.f32 $0, $1;", "tl.cos({0})"),
    "logistic": ElementFunction(
        "{ ex2.approx.ftz.f32 $0, $1; add.rn.f32 $0, $0, 0f3F800000; rcp.approx.ftz.f32 $0, $0; }",
        "1.0 / (1.0 + tl.exp2({0}))",
    ),
    **_bytes_of("float8_e4m3fn", (_widen_e4m3("0x4420"), _widen_e4m3("0x4431"))),
    **_bytes_of("float8_e5m2", ("prmt.b32 $0, $1, 0, 0x2404;", "and.b32 $0, $1, 0xff00ff00;")),
    **_bytes_of("int8", (_widen_int8("0x4240"), _widen_int8("0x4341"))),
}

mask_load_p = Primitive("jflex_mask_load")
mask_store_p = Primitive("jflex_mask_store")
element_p = Primitive("jflex_element")


def masked_load(ref: jax.Ref, mask: jax.Array, other: float) -> jax.Array:
    """Loads elements of a ref where a mask is true; elsewhere `other`."""
    x = ref_get(ref)
    return mask_load_p.bind(x, jnp.broadcast_to(mask, x.shape), other=other)


def masked_store(ref: jax.Ref, x: jax.Array, mask: jax.Array) -> None:
    """Stores where a mask is true."""
    ref_set(ref, None, mask_store_p.bind(x, jnp.broadcast_to(mask, x.shape)))


def element(name: str, *args: jax.Array) -> jax.Array:
    """One of `FUNCTIONS` on each element of arrays of one shape."""
    return element_p.bind(*args, name=name)


@element_p.def_abstract_eval
def _of_function(x: ShapedArray, *_: ShapedArray, name: str) -> ShapedArray:
    return ShapedArray(x.shape, jnp.dtype(FUNCTIONS[name].dtype))


@mask_load_p.def_abstract_eval
@mask_store_p.def_abstract_eval
def _like_the_first(x: ShapedArray, *_: ShapedArray, **__: object) -> ShapedArray:
    return ShapedArray(x.shape, x.dtype)

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
    """A function of float32 elements.

    Attributes:
      ptx: The instructions: ``$0`` is the result, what follows are the arguments.
      portable: The same in Triton, for targets without PTX, in terms of ``{0}``, ``{1}``, ``{2}``.
    """

    ptx: str
    portable: str


FUNCTIONS = {
    "multiply_add": ElementFunction("fma.rn.f32 $0, $1, $2, $3;", "tl.fma({0}, {1}, {2})"),
    # LLVM cannot see through it: `pallas_kernels.triton.tile.opaque` says what for.
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
}

mask_load_p = Primitive("jflex_mask_load")
mask_store_p = Primitive("jflex_mask_store")
element_p = Primitive("jflex_element")


def masked_load(ref: jax.Ref, mask: jax.Array, other: float | None) -> jax.Array:
    """Loads elements of a ref where a mask is true; elsewhere `other`, or anything."""
    x = ref_get(ref)
    return mask_load_p.bind(x, jnp.broadcast_to(mask, x.shape), other=other)


def masked_store(ref: jax.Ref, x: jax.Array, mask: jax.Array) -> None:
    """Stores where a mask is true."""
    ref_set(ref, None, mask_store_p.bind(x, jnp.broadcast_to(mask, x.shape)))


def element(name: str, *args: jax.Array) -> jax.Array:
    """One of `FUNCTIONS` on each element of float32 arrays of one shape."""
    return element_p.bind(*args, name=name)


@mask_load_p.def_abstract_eval
@mask_store_p.def_abstract_eval
@element_p.def_abstract_eval
def _like_the_first(x: ShapedArray, *_: ShapedArray, **__: object) -> ShapedArray:
    return ShapedArray(x.shape, x.dtype)

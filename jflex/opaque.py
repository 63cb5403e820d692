"""A function of arrays as one step of JAX's programs.

A backend's forward or backward pass is traced once for each problem and kept; eager calls compile once, and a transformation
sees one primitive. It is traced free of the mesh of an enclosing `jax.shard_map`: loops whose carry starts from a constant
would not pass that one's checks. The primitive needs no derivative, because it only stands inside of a custom_vjp.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir

from jflex.fingerprint import open_jaxpr


def opaque_call(function: Callable[..., Any], static: Hashable, arrays: Any) -> Any:
    """Computes ``function(static, arrays)``.

    Args:
      function: A function of a module: it keys a cache, together with `static`.
      static: What does not depend on values.
      arrays: A pytree of arrays, all varying over the same axes of an enclosing `jax.shard_map`.
    """
    flat, tree = jax.tree.flatten(arrays)
    avals = tuple((x.shape, x.dtype, bool(getattr(x, "weak_type", False))) for x in flat)
    jaxpr, out_tree = _traced(function, static, tree, avals, bool(jax.config.jax_enable_x64))
    return jax.tree.unflatten(out_tree, _opaque_p.bind(*flat, jaxpr=jaxpr))


@functools.lru_cache(maxsize=1024)
def _traced(function: Callable[..., Any], static: Hashable, tree: Any, avals: Sequence[Any], x64: bool) -> tuple[Any, Any]:
    del x64  # what it traces to depends on it
    call = jax.jit(lambda *xs: function(static, jax.tree.unflatten(tree, xs)))
    inputs = [jax.ShapeDtypeStruct(shape, dtype, weak_type=weak) for shape, dtype, weak in avals]
    with _no_mesh():
        jaxpr, shapes = jax.make_jaxpr(call, return_shape=True)(*inputs)
    return jaxpr, jax.tree.structure(shapes)


@functools.lru_cache(maxsize=1024)
def _batched(jaxpr: Any, in_axes: Sequence[int | None], shapes: Sequence[Any]) -> Any:
    inputs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    with _no_mesh():
        return jax.make_jaxpr(jax.vmap(jaxpr_as_fun(jaxpr), in_axes=in_axes))(*inputs)


@functools.lru_cache(maxsize=1024)
def _compiled(jaxpr: Any) -> Callable[..., Any]:
    return jax.jit(lambda *xs: _opaque_p.bind(*xs, jaxpr=jaxpr))


def _no_mesh() -> Any:
    """No mesh, but the abstract device of the one at hand, for which a program may be lowered."""
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))


_opaque_p = Primitive("jflex_call")
_opaque_p.multiple_results = True
_opaque_p.def_impl(lambda *args, jaxpr: _compiled(jaxpr)(*args))


@_opaque_p.def_abstract_eval
def _abstract(*avals, jaxpr):
    outs = [v.aval for v in open_jaxpr(jaxpr).jaxpr.outvars]
    varying = avals[0].manual_axis_type
    return [jax.core.ShapedArray(x.shape, x.dtype, manual_axis_type=varying) for x in outs]


def _lowering(ctx, *args, jaxpr):
    plain = lambda avals: [jax.core.ShapedArray(x.shape, x.dtype) for x in avals]
    with _no_mesh():
        ctx = ctx.replace(avals_in=plain(ctx.avals_in), avals_out=plain(ctx.avals_out))
        return mlir.lower_fun(jaxpr_as_fun(jaxpr), multiple_results=True)(ctx, *args)


mlir.register_lowering(_opaque_p, _lowering)


def _batching(args, dims, *, jaxpr):
    in_axes = tuple(None if d is batching.not_mapped else d for d in dims)
    new = _batched(jaxpr, in_axes, tuple((x.shape, x.dtype) for x in args))
    outs = _opaque_p.bind(*args, jaxpr=new)
    return outs, [0] * len(outs)


batching.primitive_batchers[_opaque_p] = _batching

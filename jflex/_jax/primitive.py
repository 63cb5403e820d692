"""Wraps a pass of a backend in one JAX primitive.

A backend's forward or backward pass is traced once for each spec and cached; eager calls compile once, and a
transformation sees one primitive. It is traced without the mesh of an enclosing `jax.shard_map`, whose checks refuse
loops with a carry that starts from a constant. The primitive has no derivative: only rules of derivatives use it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeAlias, TypeVar

import jax
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec

from jflex._mesh import no_mesh
from jflex.mods.fingerprint import aval_of, open_jaxpr

ONLY_REVERSE = (
    "By default, the calls of jflex have first derivatives in reverse mode only (`jax.grad`, `jax.vjp`). For forward "
    "mode (`jax.jvp`, `jax.jacfwd`) and for its second derivatives (`jax.jvp` of a gradient or tangent, `jax.hessian`) "
    "pass config=jflex.Config(forward_mode=True); for derivatives of any order and mode, "
    'implementation="reference".'
)


X = TypeVar("X", contravariant=True)  # pytrees of arrays
Y = TypeVar("Y")
Flat: TypeAlias = Callable[..., tuple[jax.Array, ...]]


class Op(Protocol[X, Y]):
    """A pass of a backend: hashable, and equal if it computes the same."""

    def __call__(self, arrays: X, /) -> Y:
        """Computes the pass on a pytree of arrays."""
        ...

    def partitioned(self, arrays: X, outputs: Y, whole: Flat, /) -> Flat:
        """Makes `whole`, a function of flat arrays, partitionable over a mesh; unchanged, XLA partitions or gathers."""
        return whole

    def out_specs(self, arrays: X, outputs: Y, pspec: PartitionSpec, /) -> list[PartitionSpec]:
        """Shardings of the flat outputs, from that of the first input."""
        ...


def call_as_primitive(function: Op[X, Y], arrays: X) -> Y:
    """Computes ``function(arrays)``; all arrays vary over the same axes of an enclosing `jax.shard_map`."""
    flat, tree = jax.tree.flatten(arrays)
    avals = tuple((x.shape, x.dtype, bool(getattr(x, "weak_type", False))) for x in flat)
    x64 = bool(jax.config.jax_enable_x64)  # pyright: ignore[reportAttributeAccessIssue]  # made at run time
    with jax.disable_jit(False):  # a pass has no eager form: its loops and kernels are compiled, also for a debugger
        traced = _trace(function, tree, avals, x64, jax.device_count() > 1)
        results = _opaque_p.bind(*flat, jaxpr=traced.jaxpr, traced=traced, jvp=traced.jvp)
        return jax.tree.unflatten(traced.tree, results)


def lower_separately(function: Callable[..., Sequence[jax.Array]], *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Computes ``function(*arrays)``, a flat sequence of arrays, as a primitive that is lowered by itself.

    The path on which JAX lowers for XLA's partitioner does not support mutable arrays, which some kernels use.
    """
    with jax.disable_jit(False):
        return tuple(_opaque_p.bind(*arrays, jaxpr=jax.make_jaxpr(function)(*arrays), traced=None, jvp=None))


@dataclasses.dataclass(frozen=True, eq=False)
class _Traced:
    """A traced pass."""

    jaxpr: ClosedJaxpr
    plain: ClosedJaxpr
    tree: object
    out_specs: Callable[[PartitionSpec], list[PartitionSpec]]
    jvp: Flat | None  # of flat arrays and tangents, None where these are zero; of an operation that has it


@functools.lru_cache(maxsize=1024)
def _trace(
    function: Op,
    tree: object,
    avals: Sequence[tuple[tuple[int, ...], np.dtype, bool]],
    x64: bool,
    several_devices: bool,
) -> _Traced:
    del x64  # a cache key: the trace depends on it
    call = jax.jit(lambda *xs: function(jax.tree.unflatten(tree, xs)))
    inputs = [jax.ShapeDtypeStruct(shape, dtype, weak_type=weak) for shape, dtype, weak in avals]
    arrays = jax.tree.unflatten(tree, inputs)
    with no_mesh():
        plain, outputs = jax.make_jaxpr(call, return_shape=True)(*inputs)
        jaxpr = plain
        if several_devices:
            split = function.partitioned(arrays, outputs, lambda *xs: tuple(jaxpr_as_fun(plain)(*xs)))
            jaxpr = jax.make_jaxpr(split)(*inputs)
    out_specs = functools.partial(function.out_specs, arrays, outputs)
    jvp = getattr(function, "jvp", None)
    return _Traced(jaxpr, plain, jax.tree.structure(outputs), out_specs, jvp and functools.partial(jvp, tree))


@functools.lru_cache(maxsize=1024)
def _batched(
    jaxpr: ClosedJaxpr, in_axes: Sequence[int | None], shapes: Sequence[tuple[tuple[int, ...], np.dtype]], x64: bool
) -> ClosedJaxpr:
    """The vmapped jaxpr; a 32-bit one stays 32-bit, as the loops over batched kernels must."""
    inputs, function = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes], jaxpr_as_fun(jaxpr)
    if _holds_refs(open_jaxpr(jaxpr).jaxpr):  # JAX does not batch them; a call with one fills the GPU by itself
        function = jax.custom_batching.sequential_vmap(function)
    with no_mesh(), jax.enable_x64(x64 and _computes_in_64_bits(open_jaxpr(jaxpr).jaxpr)):
        return jax.make_jaxpr(jax.vmap(function, in_axes=in_axes))(*inputs)


def _holds_refs(jaxpr: Jaxpr) -> bool:
    return any(eqn.primitive.name == "new_ref" or any(map(_holds_refs, _inner(eqn))) for eqn in jaxpr.eqns)


def _computes_in_64_bits(jaxpr: Jaxpr) -> bool:
    wide = lambda v: getattr(getattr(v.aval, "dtype", None), "itemsize", 0) > 4
    if any(wide(v) for v in (*jaxpr.constvars, *jaxpr.invars)):
        return True
    return any(any(map(wide, eqn.outvars)) or any(map(_computes_in_64_bits, _inner(eqn))) for eqn in jaxpr.eqns)


def _inner(eqn: JaxprEqn) -> Iterator[Jaxpr]:
    """The jaxprs in an equation's parameters."""
    for value in eqn.params.values():
        for x in value if isinstance(value, (tuple, list)) else (value,):
            opened = open_jaxpr(x).jaxpr
            if hasattr(opened, "eqns"):
                yield opened


@functools.lru_cache(maxsize=1024)
def _compiled(jaxpr: ClosedJaxpr, traced: _Traced | None) -> Callable[..., list[jax.Array]]:
    return jax.jit(lambda *xs: _opaque_p.bind(*xs, jaxpr=jaxpr, traced=traced, jvp=None))


_opaque_p = Primitive("jflex_call")
_opaque_p.multiple_results = True
# Newer versions of JAX expand "high" primitives such as `searchsorted` late, and count a primitive that holds one as
# high, too. This one is not: `lower_fun` expands what it holds.
_opaque_p.is_high = lambda *_, **__: False
_opaque_p.def_impl(lambda *args, jaxpr, traced, **_: _compiled(jaxpr, traced)(*args))


@_opaque_p.def_abstract_eval
def _abstract(*avals, jaxpr, traced, **_):
    outs, first = [aval_of(v) for v in open_jaxpr(jaxpr).jaxpr.outvars], avals[0]
    specs = [(None,) * len(x.shape) for x in outs]
    if traced is not None and any(name is not None for name in first.sharding.spec):
        specs = traced.out_specs(first.sharding.spec)  # a mesh with explicit axes: shardings are part of the types
    shardings = [first.sharding.update(spec=jax.sharding.PartitionSpec(*spec)) for spec in specs]
    return [
        ShapedArray(x.shape, x.dtype, manual_axis_type=first.manual_axis_type, sharding=sharding)
        for x, sharding in zip(outs, shardings, strict=True)
    ]


def lower_without_mesh(function, ctx, args):
    """Lowers a function of flat arrays with several results, outside of the caller's mesh."""
    plain = lambda avals: [ShapedArray(x.shape, x.dtype) for x in avals]
    with no_mesh():
        ctx = ctx.replace(avals_in=plain(ctx.avals_in), avals_out=plain(ctx.avals_out))
        return mlir.lower_fun(function, multiple_results=True)(ctx, *args)


mlir.register_lowering(_opaque_p, lambda ctx, *args, jaxpr, **_: lower_without_mesh(jaxpr_as_fun(jaxpr), ctx, args))


def _refuse(*_, **__):
    """Refuses the derivatives of a pass, second ones or higher, and in reverse mode over another derivative."""
    raise NotImplementedError(ONLY_REVERSE)


def _jvp(args, tangents, *, jvp, **_):
    return (jvp or _refuse)(list(args), [None if type(x) is ad.Zero else x for x in tangents])


ad.primitive_jvps[_opaque_p] = _jvp
ad.primitive_transposes[_opaque_p] = _refuse


@functools.lru_cache(maxsize=1024)
def _mapped(jvp: Flat, in_axes: Sequence[int | None]) -> Flat:
    return jax.vmap(jvp, in_axes=(list(in_axes), list(in_axes)))


def _batching(args, dims, *, jaxpr, traced, jvp):
    in_axes = tuple(dims)  # None where an array is not mapped
    plain = jaxpr if traced is None else traced.plain
    x64 = bool(jax.config.jax_enable_x64)  # pyright: ignore[reportAttributeAccessIssue]  # made at run time
    new = _batched(plain, in_axes, tuple((x.shape, x.dtype) for x in args), x64)
    outs = _opaque_p.bind(*args, jaxpr=new, traced=None, jvp=jvp and _mapped(jvp, in_axes))
    return outs, [0] * len(outs)


batching.primitive_batchers[_opaque_p] = _batching

"""Dense calls under JAX's transformations: the passes of a backend, joined by one custom_vjp.

A pass is an operation for `call_as_primitive`, which XLA may partition over devices.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import PyTree

from jflex._call.dispatch import Requested, get_backend, no_gradients, select_passes
from jflex._jax import partitioning
from jflex._jax.partitioning import Axes, BackendOp, Split
from jflex._jax.primitive import ONLY_REVERSE, call_as_primitive
from jflex._mesh import compiled_in_shard_map, match_manual_axes, placed_as
from jflex.backends.base import Gradients, Inputs, Saved, SavedCotangents
from jflex.backends.results import sinks_gradient
from jflex.errors import UnsupportedError
from pallas_kernels.plan import GradientRequest
from pallas_kernels.spec import AttentionSpec


class ForwardOp(BackendOp[Inputs, Saved]):
    """``Inputs -> Saved``."""

    def __call__(self, inputs: Inputs) -> Saved:
        """Runs the backend."""
        return get_backend(self.backend).forward(self.spec, inputs)

    def axes(self, inputs: Inputs, saved: Saved) -> tuple[list[Axes], list[Axes]]:
        """See `BackendOp`."""
        return partitioning.input_axes(self.spec, inputs), partitioning.saved_axes(self.spec, saved)

    def of_shard(self, inputs: Inputs, saved: Saved, mesh: jax.sharding.Mesh, split: Split) -> Saved:
        """See `BackendOp`."""
        shard = partitioning.shard_of(self.spec, inputs, mesh, split)
        return ForwardOp(self.backend, shard.spec)(shard.inputs)


_Pulled: TypeAlias = tuple[Inputs, Saved, SavedCotangents]


@dataclasses.dataclass(frozen=True)
class BackwardOp(BackendOp[_Pulled, Gradients]):
    """``(Inputs, Saved, cotangent of Saved) -> Gradients``."""

    requested: GradientRequest

    def __call__(self, arrays: _Pulled) -> Gradients:
        """Runs the backend; sinks have their gradient here, the same for all."""
        gradients = get_backend(self.backend).backward(self.spec, *arrays, self.requested)
        if not self.requested.sinks:
            return gradients
        inputs, saved, d_saved = arrays
        assert inputs.sinks is not None  # their gradient is requested
        return gradients._replace(sinks=sinks_gradient(self.spec, inputs.sinks, saved, d_saved))

    def axes(self, arrays: _Pulled, gradients: Gradients) -> tuple[list[Axes], list[Axes]]:
        """See `BackendOp`."""
        inputs, saved, d_saved = arrays
        rows = [axes for x in (saved, d_saved) for axes in partitioning.saved_axes(self.spec, x)]
        return [*partitioning.input_axes(self.spec, inputs), *rows], partitioning.gradient_axes(self.spec, gradients)

    def of_shard(self, arrays: _Pulled, gradients: Gradients, mesh: jax.sharding.Mesh, split: Split) -> Gradients:
        """See `BackendOp`."""
        inputs, saved, d_saved = arrays
        shard = partitioning.shard_of(self.spec, inputs, mesh, split)
        local_op = BackwardOp(self.backend, shard.spec, shard.requested(self.requested))
        local = local_op((shard.inputs, saved, d_saved))
        of_rows = (*split.batch, *split.queries)
        of_keys = of_rows if self.spec.Bkv < self.spec.B else split.queries
        captured: list[jax.Array | None] = []
        for number, x in zip(shard.operands, gradients.score_operands, strict=True):
            unread = None if x is None else jnp.zeros(x.shape, x.dtype)
            part = unread if x is None or number is None else local.score_operands[number]
            captured.append(_sum(part, (*of_rows, *split.heads)))
        key, value, sinks = _sum(local.key, of_keys), _sum(local.value, of_keys), _sum(local.sinks, of_rows)
        return Gradients(local.query, key, value, tuple(captured), sinks)


def _sum(x: jax.Array | None, names: tuple[str, ...]) -> jax.Array | None:
    """The sum over axes of the mesh, if there is an array."""
    return jax.lax.psum(x, names) if names and x is not None else x


class Static(NamedTuple):
    """The static part of a call."""

    backend: str  # the backend of the forward pass if no gradient is requested
    implementation: Requested
    spec: AttentionSpec


def attend(static: Static, inputs: Inputs) -> Saved:
    """Runs a backend so that JAX can differentiate the result in reverse mode."""
    eight_bits = static.spec.qk_dtype is not None
    inputs = reverse_only(inputs, f"This call has no derivatives: {no_gradients(static.spec)}." if eight_bits else "")
    try:
        return _call(static, inputs)
    except TypeError as error:
        if "forward-mode" in str(error):  # JAX's error for custom_vjp, which `jit(jacfwd(...))` raises before the guard
            raise NotImplementedError(ONLY_REVERSE) from error
        raise


def reverse_only(inputs: Inputs, unsupported: str = "") -> Inputs:
    """Inputs that refuse forward mode with a message of the library; all derivatives if `unsupported` says why."""
    guard = lambda x: _reverse_only(unsupported, x) if jnp.issubdtype(x.dtype, jnp.floating) else x
    query, key, value = map(guard, inputs[:3])
    captured = inputs.captured._replace(score=tuple(map(guard, inputs.captured.score)))
    sinks = None if inputs.sinks is None else guard(inputs.sinks)
    return inputs._replace(query=query, key=key, value=value, captured=captured, sinks=sinks)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static: Static, inputs: Inputs) -> Saved:
    return run_forward(ForwardOp(static.backend, static.spec), inputs)


def run_forward(op: ForwardOp, inputs: Inputs) -> Saved:
    """Runs the forward pass; `jax.checkpoint` knows its results by their names."""
    return named(call_as_primitive(op, inputs))


def named(saved: Saved) -> Saved:
    """The results with their names for policies of `jax.checkpoint`."""
    arrays = {name: x for name, x in saved._asdict().items() if x is not None}
    return saved._replace(**{name: checkpoint_name(x, f"jflex_{name}") for name, x in arrays.items()})


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class BackwardPass:
    """The backend of each gradient: a static part of the residuals."""

    backend: str
    requested: GradientRequest


_is_primal = lambda x: isinstance(x, CustomVJPPrimal)


def primals(perturbed: PyTree) -> PyTree:
    """The values of the arguments of a forward rule."""
    return jax.tree.map(lambda x: x.value, perturbed, is_leaf=_is_primal)


def requested_gradients(perturbed: Inputs) -> GradientRequest:
    """The gradients that the arguments of a forward rule request: of arrays in floating point alone."""
    is_requested = lambda x: x.perturbed and jnp.issubdtype(x.value.dtype, jnp.floating)
    flags = jax.tree.map(is_requested, perturbed, is_leaf=_is_primal)
    return GradientRequest(flags.query, flags.key, flags.value, flags.captured.score, bool(flags.sinks))


def saved_cotangents(saved: Saved, cotangents: Saved) -> SavedCotangents:
    """The cotangents of the results, without symbolic zeros."""
    zero = lambda x: isinstance(x, SymbolicZero)
    d_out = jnp.zeros_like(saved.out) if zero(cotangents.out) else cotangents.out
    return SavedCotangents(d_out, *(None if zero(x) else x for x in (cotangents.lse, cotangents.entropy)))


def input_cotangents(inputs: Inputs, gradients: Gradients) -> Inputs:
    """The result of a backward rule: requested gradients in the dtypes of their arrays, else None."""
    like = lambda g, x: None if g is None else g.astype(x.dtype)
    sinks = None if gradients.sinks is None or inputs.sinks is None else placed_as(gradients.sinks, inputs.sinks)
    nothing = jax.tree.map(lambda _: None, inputs)
    query, key, value = map(like, gradients[:3], inputs[:3])
    captured = nothing.captured._replace(score=tuple(map(like, gradients.score_operands, inputs.captured.score)))
    return nothing._replace(query=query, key=key, value=value, captured=captured, sinks=sinks)


def _attend_fwd(static: Static, perturbed: Inputs) -> tuple[Saved, tuple[Inputs, Saved, BackwardPass]]:
    inputs, requested = primals(perturbed), requested_gradients(perturbed)
    passes = select_passes(static.implementation, static.spec, requested)
    saved = run_forward(ForwardOp(passes.forward, static.spec), inputs)
    return saved, (inputs, saved._replace(max=None), BackwardPass(passes.backward, requested))


def _attend_bwd(static: Static, residuals: tuple[Inputs, Saved, BackwardPass], cotangents: Saved) -> tuple[Inputs]:
    inputs, saved, backward = residuals
    arrays = match_manual_axes((inputs, saved, saved_cotangents(saved, cotangents)))
    gradients = call_as_primitive(BackwardOp(backward.backend, static.spec, backward.requested), arrays)
    return (input_cotangents(inputs, gradients),)


_attend.defvjp(_attend_fwd, _attend_bwd, symbolic_zeros=True)
_call = compiled_in_shard_map(_attend, (0,))


# A custom_vjp refuses forward mode with JAX's own message, and under jit not before lowering. This identity comes
# before it: its tangent passes through a linear primitive that can be transposed, but not evaluated.
_guard_p = Primitive("jflex_reverse_only")


def _refuse(*_, unsupported: str):
    raise UnsupportedError(unsupported) if unsupported else NotImplementedError(ONLY_REVERSE)


_guard_p.def_impl(_refuse)
_guard_p.def_abstract_eval(lambda x, **_: x)
ad.deflinear2(_guard_p, lambda ct, *_, **__: [ct])
batching.defvectorized(_guard_p)
mlir.register_lowering(_guard_p, _refuse)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _reverse_only(unsupported: str, x: jax.Array) -> jax.Array:
    return x


@_reverse_only.defjvp
def _reverse_only_jvp(unsupported, primals, tangents):
    return primals[0], _guard_p.bind(tangents[0], unsupported=unsupported)

"""Dense calls with derivatives in both modes: a custom_jvp, whose tangent is one linear primitive.

The primitive is evaluated as the tangent of a call, and transposed into its backward pass. So `jax.grad` runs the
passes that it runs by `custom_vjp`, and never the tangent; `jax.jvp` runs the tangent alone. Second derivatives are
those of the passes of ``"xla"`` in forward mode: its loops over blocks take linear memory.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import TypeAlias, cast

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.custom_derivatives import SymbolicZero
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import ClosedJaxpr, Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec

from jflex._call.dispatch import Requested, get_backend, select_passes, select_tangent
from jflex._jax import partitioning
from jflex._jax.custom_vjp import BackwardOp, ForwardOp, Static, input_cotangents, named, run_forward
from jflex._jax.partitioning import Axes, BackendOp, Split
from jflex._jax.primitive import Op, call_as_primitive, lower_without_mesh
from jflex._mesh import match_manual_axes, no_mesh, placed_as
from jflex.backends.base import Gradients, Inputs, Saved, SavedCotangents
from jflex.backends.xla.attention import Xla
from jflex.errors import UnsupportedError
from pallas_kernels.plan import GradientRequest
from pallas_kernels.spec import AttentionSpec

_Moving: TypeAlias = tuple[Inputs, Saved, Gradients]
_Flat: TypeAlias = tuple[list[jax.Array], list[jax.Array]]


class TangentOp(BackendOp[_Moving, SavedCotangents]):
    """``(Inputs, Saved, tangents of some inputs) -> tangents of Saved``."""

    def __call__(self, arrays: _Moving) -> SavedCotangents:
        """Runs the backend."""
        return get_backend(self.backend).tangent(self.spec, *arrays)

    def axes(self, arrays: _Moving, results: SavedCotangents) -> tuple[list[Axes], list[Axes]]:
        """See `BackendOp`."""
        inputs, saved, tangents = arrays
        ins = [
            *partitioning.input_axes(self.spec, inputs),
            *partitioning.saved_axes(self.spec, saved),
            *partitioning.gradient_axes(self.spec, tangents),
        ]
        return ins, partitioning.saved_axes(self.spec, results)

    def of_shard(
        self, arrays: _Moving, results: SavedCotangents, mesh: jax.sharding.Mesh, split: Split
    ) -> SavedCotangents:
        """See `BackendOp`. Each device has its rows and all keys: nothing is summed."""
        inputs, saved, tangents = arrays
        shard = partitioning.shard_of(self.spec, inputs, mesh, split)
        captured: list[jax.Array | None] = [None] * len(shard.inputs.captured.score)
        for number, x in zip(shard.operands, tangents.score_operands, strict=True):
            if number is not None:
                captured[number] = x
        tangents = tangents._replace(score_operands=tuple(captured))
        return TangentOp(self.backend, shard.spec)((shard.inputs, saved, tangents))


# --- the linear map between tangents of the inputs and of the results


_Level: TypeAlias = tuple[int, tuple[int | None, ...]]
"""A level of `jax.vmap`: its size, and the axis of each residual, 0 or None. Other arrays are mapped at axis 0."""


@dataclasses.dataclass(frozen=True)
class _Linear:
    """A linear map at a point, the residuals: ``(*residuals, *linear) -> results``, all flat.

    Forward, `linear` are tangents of the requested inputs, and the results tangents of out, lse and entropy. In reverse
    they are cotangents of these, and the results gradients.
    """

    spec: AttentionSpec
    tree: jax.tree_util.PyTreeDef  # pyright: ignore[reportInvalidTypeForm]  # of the residuals, (Inputs, Saved)
    requested: GradientRequest
    outputs: tuple[bool, bool, bool]  # whether out, lse and entropy have tangents here
    implementation: Requested
    backend: str  # of the backward pass
    refusal: str  # why no backend has it; else ""
    reverse: bool = False
    levels: tuple[_Level, ...] = ()  # the innermost first

    @property
    def count(self) -> int:
        """The number of residuals."""
        return self.tree.num_leaves

    def __call__(self, *flat: jax.Array) -> list[jax.Array]:
        """The results, by the passes of the backends."""
        return self._mapped(self._reverse if self.reverse else self._forward, flat)

    def differentiable(self, *flat: jax.Array) -> list[jax.Array]:
        """The results by plain JAX, and by the inputs alone: out and lse are computed of them."""
        direction = self._reverse if self.reverse else self._forward
        how = {"run": lambda op, arrays: op(arrays), "saved": functools.partial(_saved, self.spec)}
        return self._mapped(functools.partial(direction, **how), flat)

    def _mapped(self, function: Callable[..., list[jax.Array]], flat: Sequence[jax.Array]) -> list[jax.Array]:
        for size, axes in self.levels:
            function = jax.vmap(function, in_axes=(list(axes), 0), axis_size=size)
        return function(list(flat[: self.count]), list(flat[self.count :]))

    def _forward(self, residuals, linear, run=call_as_primitive, saved=None) -> list[jax.Array]:
        inputs, known = jax.tree.unflatten(self.tree, residuals)
        tangents = jax.tree.unflatten(jax.tree.structure(_chosen(inputs, self.requested)), linear)
        backend = Xla.name
        if saved is None:
            backend = str(select_tangent(self.implementation, self.spec, self.requested).name)
        results = run(TangentOp(backend, self.spec), (inputs, known if saved is None else saved(inputs), tangents))
        return list(itertools.compress(results, self.outputs))

    def _reverse(self, residuals, linear, run=call_as_primitive, saved=None) -> list[jax.Array]:
        inputs, known = jax.tree.unflatten(self.tree, residuals)
        known, cotangents = known if saved is None else saved(inputs), iter(linear)
        d_out, d_lse, d_entropy = (next(cotangents) if has_tangent else None for has_tangent in self.outputs)
        d_saved = SavedCotangents(jnp.zeros_like(known.out) if d_out is None else d_out, d_lse, d_entropy)
        backward = BackwardOp(self.backend if saved is None else Xla.name, self.spec, self.requested)
        gradients = input_cotangents(inputs, run(backward, (inputs, known, d_saved)))
        return jax.tree.leaves(_chosen(gradients, self.requested))

    def transposed(self, cotangents: Sequence[object]) -> _Linear:
        """The map in the other direction, for the cotangents that are not zero."""
        nonzero = [type(x) is not ad.Zero for x in cotangents]
        if not self.reverse:
            kept = iter(nonzero)
            return dataclasses.replace(self, reverse=True, outputs=tuple(x and next(kept) for x in self.outputs))
        (flags, tree), kept = jax.tree.flatten(self.requested), iter(nonzero)
        requested = jax.tree.unflatten(tree, [x and next(kept) for x in flags])
        return dataclasses.replace(self, reverse=False, requested=requested)

    def results(self, residuals: Sequence[ShapedArray]) -> list[ShapedArray]:
        """The types of the results: of the inputs, or of what was saved."""
        types = []
        for number, x in enumerate(residuals):
            mapped = sum(axes[number] is not None for _, axes in self.levels)
            sizes, spec = (size for size, _ in reversed(self.levels)), x.sharding.spec[mapped:]
            types.append(
                ShapedArray(
                    (*sizes, *x.shape[mapped:]),
                    x.dtype,
                    sharding=x.sharding.update(spec=PartitionSpec(*[None] * len(self.levels), *spec)),
                    manual_axis_type=residuals[0].manual_axis_type,
                )
            )
        inputs, saved = jax.tree.unflatten(self.tree, types)
        if self.reverse:
            return jax.tree.leaves(_chosen(inputs, self.requested))
        return list(itertools.compress((saved.out, saved.lse, saved.entropy), self.outputs))


def _request(tangents: Inputs, inputs: Inputs) -> GradientRequest:
    """The floating-point inputs that have a tangent."""
    is_zero = lambda x: isinstance(x, SymbolicZero)
    moves = lambda dx, x: not is_zero(dx) and jnp.issubdtype(x.dtype, jnp.floating)
    flags = jax.tree.map(moves, tangents, inputs, is_leaf=is_zero)
    return GradientRequest(flags.query, flags.key, flags.value, flags.captured.score, bool(flags.sinks))


def _chosen(inputs: Inputs, requested: GradientRequest) -> Gradients:
    """The requested ones of some arrays."""
    choose = lambda x, want: x if want else None
    captured = tuple(map(choose, inputs.captured.score, requested.score_operands))
    query, key, value = map(choose, inputs[:3], requested[:3])
    return Gradients(query, key, value, captured, choose(inputs.sinks, requested.sinks))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _saved(spec: AttentionSpec, inputs: Inputs) -> Saved:
    return Xla().forward(spec, inputs)._replace(max=None)


@functools.partial(_saved.defjvp, symbolic_zeros=True)
def _saved_jvp(spec: AttentionSpec, primals: tuple[Inputs], tangents: tuple[Inputs]) -> tuple[Saved, Saved]:
    (inputs,), (d_inputs,), saved = primals, tangents, _saved(spec, *primals)
    return saved, _as_saved(Xla().tangent(spec, inputs, saved, _chosen(d_inputs, _request(d_inputs, inputs))), None)


def _as_saved(tangents: SavedCotangents, d_max: SymbolicZero | None) -> Saved:
    """Tangents in the shape of the results; the max has none."""
    assert tangents.lse is not None  # of a tangent, as opposed to a cotangent
    return Saved(tangents.out, tangents.lse, cast(jax.Array, d_max), tangents.entropy)


@dataclasses.dataclass(frozen=True)
class SecondOp(Op[_Flat, list[jax.Array]]):
    """``(residuals and linear arrays, tangents of some) -> tangents of the results`` of a linear map."""

    linear: _Linear
    moving: tuple[int, ...]  # the arrays that have tangents

    def __call__(self, arrays: _Flat) -> list[jax.Array]:
        """Differentiates plain JAX."""
        flat, tangents = arrays

        def results(*moved: jax.Array) -> list[jax.Array]:
            new = dict(zip(self.moving, moved, strict=True))
            return self.linear.differentiable(*(new.get(number, x) for number, x in enumerate(flat)))

        return jax.jvp(results, [flat[number] for number in self.moving], tangents)[1]

    def out_specs(self, arrays: object, results: list[jax.Array], pspec: object) -> list[PartitionSpec]:
        """See `jflex._jax.primitive.Op`."""
        return [PartitionSpec(*[None] * len(x.shape)) for x in results]


_linear_p = Primitive("jflex_linear")
_linear_p.multiple_results = True
_linear_p.is_high = lambda *_, **__: False  # as `jflex._jax.primitive`


def _bind(linear: _Linear, *arrays: jax.Array) -> list[jax.Array]:
    return _linear_p.bind(*arrays, linear=linear, marker=_marker() if jax.device_count() > 1 else None)


@functools.cache
def _marker() -> ClosedJaxpr:
    """A program that XLA partitions: JAX looks for one in the parameters, and knows the devices where it lowers one.

    What the primitive lowers to is partitioned, but is not traced before.
    """
    identity = custom_partitioning(lambda x: x)
    identity.def_partition(lambda *_: None, sharding_rule="... -> ...")
    with no_mesh():
        return jax.make_jaxpr(identity)(0.0)


@functools.lru_cache(maxsize=1024)
def _compiled(linear: _Linear) -> Callable[..., list[jax.Array]]:
    return jax.jit(functools.partial(_bind, linear))


_linear_p.def_impl(lambda *xs, linear, **_: _compiled(linear)(*xs))
_linear_p.def_abstract_eval(lambda *avals, linear, **_: linear.results(avals[: linear.count]))


mlir.register_lowering(_linear_p, lambda ctx, *args, linear, **_: lower_without_mesh(linear, ctx, args))


def _transpose(cotangents, *args, linear, **_):
    if linear.refusal and not linear.reverse:
        raise UnsupportedError(linear.refusal)
    nonzero, residuals = [x for x in cotangents if type(x) is not ad.Zero], args[: linear.count]
    return [None] * linear.count + _bind(linear.transposed(cotangents), *match_manual_axes([*residuals, *nonzero]))


ad.primitive_transposes[_linear_p] = _transpose


def _jvp(args, tangents, *, linear, **_):
    results = _bind(linear, *args)
    is_zero = [type(x) is ad.Zero for x in tangents]
    if all(is_zero[: linear.count]):
        moved = map(ad.instantiate_zeros, tangents[linear.count :])
        return results, _bind(linear, *args[: linear.count], *moved)
    inputs, _ = jax.tree.unflatten(linear.tree, range(linear.count))
    arguments = [*jax.tree.leaves(inputs), *range(linear.count, len(args))]  # without out and lse, their functions
    moving = tuple(number for number in arguments if not is_zero[number])
    arrays = match_manual_axes((list(args), [tangents[number] for number in moving]))
    return results, list(map(placed_as, call_as_primitive(SecondOp(linear, moving), arrays), results))


ad.primitive_jvps[_linear_p] = _jvp


def _batching(args, dims, *, linear, **_):
    size = next(x.shape[axis] for x, axis in zip(args, dims, strict=True) if axis is not None)
    args = [x if axis in (None, 0) else jnp.moveaxis(x, axis, 0) for x, axis in zip(args, dims, strict=True)]
    count = linear.count
    moved = [
        jnp.broadcast_to(x, (size, *x.shape)) if axis is None else x  # the transpose sums over the batch
        for x, axis in zip(args[count:], dims[count:], strict=True)
    ]
    level = size, tuple(None if axis is None else 0 for axis in dims[:count])
    linear = dataclasses.replace(linear, levels=(*linear.levels, level))
    results = _bind(linear, *args[:count], *moved)
    return results, [0] * len(results)


batching.primitive_batchers[_linear_p] = _batching


# --- the call


@dataclasses.dataclass(frozen=True)
class _AttendOp(ForwardOp):
    """A forward pass with tangents: the gradient of a `jax.lax.scan` drops the rule of a `jax.custom_jvp` in it."""

    implementation: Requested

    def jvp(self, tree, flat, tangents) -> tuple[list[jax.Array], list[jax.Array]]:
        """Pushes tangents of flat inputs forward."""
        static = Static(self.backend, self.implementation, self.spec)

        def results(moving: dict[int, jax.Array]) -> list[jax.Array]:
            inputs = jax.tree.unflatten(tree, [moving.get(number, x) for number, x in enumerate(flat)])
            return jax.tree.leaves(attend(static, inputs))

        moved = {number: x for number, x in enumerate(tangents) if x is not None}
        return jax.jvp(results, ({number: flat[number] for number in moved},), (moved,))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def attend(static: Static, inputs: Inputs) -> Saved:
    """Runs a backend so that JAX can differentiate the result in both modes."""
    return run_forward(_AttendOp(static.backend, static.spec, static.implementation), inputs)


@functools.partial(attend.defjvp, symbolic_zeros=True)
def _attend_jvp(static: Static, primals: tuple[Inputs], tangents: tuple[Inputs]) -> tuple[Saved, Saved]:
    (inputs,), (d_inputs,), spec = primals, tangents, static.spec
    requested = _request(d_inputs, inputs)
    try:
        passes = select_passes(static.implementation, spec, requested)
        forward, backward, refusal = passes.forward, passes.backward, ""
    except UnsupportedError as error:  # raised where it is transposed; a tangent does not need a backward pass
        forward, backward, refusal = static.backend, "", str(error)
    saved = named(attend(static._replace(backend=forward), inputs))  # `jax.checkpoint` sees the names given here
    residuals, d_inputs = match_manual_axes(((inputs, saved._replace(max=None)), _chosen(d_inputs, requested)))
    flat, tree = jax.tree.flatten(residuals)
    outputs = (True, True, saved.entropy is not None)
    linear = _Linear(spec, tree, requested, outputs, static.implementation, backward, refusal)
    d_out, d_lse, *d_entropy = _bind(linear, *flat, *jax.tree.leaves(d_inputs))
    d_max = None if saved.max is None else SymbolicZero.from_primal_value(saved.max)
    return saved, _as_saved(SavedCotangents(d_out, d_lse, d_entropy[0] if d_entropy else None), d_max)

"""From a user's mod to a jaxpr and its operands.

A mod is traced once, on scalars, or on one vector and scalars. Every array or tracer that it closes over becomes an
operand. Work that depends on captures alone (``jnp.exp(table)``) is hoisted out of the kernel: XLA computes it, and JAX
differentiates it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend import core
from jax.typing import ArrayLike, DTypeLike

from jflex._mesh import as_known, match_manual_axes, varying_axes, without_mesh
from jflex.mods.array_sizes import CallSizes, Requirement, check_requirements, program_requirements, requirements_of
from jflex.mods.batchable import CALLS, batchable
from jflex.mods.dependence import check_integer_powers, index_requirements
from jflex.mods.fingerprint import Open, bind, fingerprint, known_literal, open_jaxpr, sub_jaxpr
from jflex.mods.signature import ScalarRole, accept_numpy, check_signature, checked_result
from jflex.mods.stored_programs import load_program, store_program
from jflex.mods.types import MaskMod, ScoreMod

Role = Literal["score", "mask", "key", "value"]
VectorRole = Literal["key", "value"]
# What `jax.shard_map` puts around a mod that captures sharded arrays; the traced program knows no mesh.
_TYPE_CASTS = frozenset({"pvary", "pcast"})
_INDEX = jax.ShapeDtypeStruct((), np.int32)


@dataclasses.dataclass(frozen=True)
class TracedMod:
    """A traced mod without its captured values: static, hashable, equal when the programs are equal.

    Two lambdas with the same program over captures of the same shapes are equal, whatever the values of the captures;
    so a ``TracedMod`` is the key of every cache.
    """

    role: Role
    fingerprint: str  # the program as text, compared for equality
    operands: tuple[tuple[tuple[int, ...], str], ...]
    # takes ``(score,) b, h, q_idx, kv_idx`` and the operands, and returns one scalar; or ``vector, b, h, idx`` and the
    # operands, and returns a vector
    jaxpr: core.ClosedJaxpr = dataclasses.field(compare=False, repr=False)
    source: str = dataclasses.field(compare=False)  # the user's function, for messages: ``causal (model.py:41)``
    # the sizes that the mod was made for
    requirements: tuple[Requirement, ...] = dataclasses.field(default=(), compare=False, repr=False)
    # of a mask, the number of the first of four operands that the program does not read: its limits
    # (`pallas_kernels.row_limits`), and orders of rows and columns of blocks (`block_walk`); None without
    limits: int | None = None

    def __call__(self, operands: Sequence[jax.Array], *arguments: jax.Array) -> jax.Array:
        """Evaluates the mod at one position, as plain JAX, given the captured arrays (``jax.vmap`` it for more)."""
        args, program = (*arguments, *operands), batchable_program(self)
        if not varying_axes(*args):
            return core.jaxpr_as_fun(program)(*args)[0]
        return jnp.asarray(_evaluate_varying(open_jaxpr(program), match_manual_axes(args))[0])

    def __deepcopy__(self, memo: dict[int, object]) -> TracedMod:
        """Itself: it never changes, as the function that it was traced from."""
        return self

    __copy__ = functools.partialmethod(__deepcopy__, None)

    def __reduce__(self) -> tuple[object, ...]:
        try:
            program = store_program(self.jaxpr)
        except TypeError as error:
            raise TypeError(
                f"A BlockMask of {self.source} cannot be pickled: its {error}. Pickle the arrays that it is made of, "
                "and call `create_block_mask` in the process that uses it."
            ) from error
        return _load_mod, (
            jax.__version__,
            program,
            self.role,
            self.operands,
            self.source,
            self.requirements,
            self.limits,
        )


def _load_mod(
    version: str,
    program: bytes,
    role: Role,
    operands: tuple[tuple[tuple[int, ...], str], ...],
    source: str,
    requirements: tuple[Requirement, ...],
    limits: int | None,
) -> TracedMod:
    if version != jax.__version__:
        raise ValueError(
            f"A BlockMask of {source} was pickled with JAX {version}, and this is {jax.__version__}: a program belongs "
            "to one version. Make the mask anew, with `create_block_mask`."
        )
    jaxpr = load_program(program)
    key = fingerprint(jaxpr, differentiable=role != "mask")
    return TracedMod(role, key, operands, jaxpr, source, requirements, limits)


@functools.lru_cache(maxsize=256)
def batchable_program(traced: TracedMod) -> core.ClosedJaxpr:
    """The program of a mod for evaluation in plain JAX under `jax.vmap`; see `jflex.mods.batchable`."""
    return batchable(traced.jaxpr)


def trace_score_mod(mod: Callable[..., ArrayLike]) -> tuple[TracedMod, tuple[jax.Array, ...]]:
    """Traces ``mod(score, b, h, q_idx, kv_idx) -> score``; also returns the arrays that it closes over."""
    return _residual(mod, *_scalar_call(mod, "score"), "score")


def trace_mask_mod(mod: Callable[..., ArrayLike]) -> tuple[TracedMod, tuple[jax.Array, ...]]:
    """Traces ``mod(b, h, q_idx, kv_idx) -> bool``; also returns the arrays that it closes over."""
    return _residual(mod, *_scalar_call(mod, "mask"), "mask")


def trace_vector_mod(
    mod: Callable[..., ArrayLike], role: VectorRole, size: int, dtype: DTypeLike
) -> tuple[TracedMod, tuple[jax.Array, ...]]:
    """Traces ``mod(vector[size], b, h, idx) -> [size]`` in float32 or float64, which was checked."""
    arguments = [jax.ShapeDtypeStruct((size,), dtype), *[_INDEX] * 3]
    return _residual(mod, lambda *args: jnp.asarray(accept_numpy(mod)(*args)), arguments, role)


def trace_vector_call(
    call: Callable[..., jax.Array], vectors: Sequence[jax.ShapeDtypeStruct]
) -> tuple[TracedMod, tuple[jax.Array, ...]]:
    """Traces a call of any vector mod, which was checked, on the vectors of one token and on its indices."""
    return _residual(call, call, [*vectors, *[_INDEX] * 3], "value")


def trace_mask(function: Callable[..., jax.Array], operands: Sequence[tuple[tuple[int, ...], str]]) -> core.ClosedJaxpr:
    """The program of a mask, as a function of its indices and operands."""
    scalars = [jax.ShapeDtypeStruct((), jnp.int32)] * 4
    avals = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in operands]
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        return jax.make_jaxpr(function)(*scalars, *avals)


def mod_requirements(mod: object, traced: TracedMod | None) -> tuple[Requirement, ...]:
    """The requirements of a mod and of its program; none without a mod."""
    return (*requirements_of(mod), *(() if traced is None else traced.requirements))


def check_call_sizes(score_mod: ScoreMod | None, mask_mod: MaskMod | None, sizes: CallSizes) -> None:
    """Raises unless mods were made for the sizes of a call, which evaluates them at other indices than its own."""
    roles: tuple[tuple[ScalarRole, ScoreMod | MaskMod | None], ...] = (("score", score_mod), ("mask", mask_mod))
    for role, mod in roles:
        check_requirements(requirements_of(mod), sizes)
        if mod is not None and 0 not in sizes[:4]:  # else there is nothing to read, maybe in an empty array
            program = _first_trace(mod, *_scalar_call(mod, role), role)
            check_requirements(index_requirements(program, role, describe(mod)), sizes)


def describe(mod: Any) -> str:
    """Names a user's function with its file and line, for messages."""
    function = inspect.unwrap(mod) if callable(mod) else mod
    while hasattr(function, "func"):  # functools.partial
        function = function.func
    name = getattr(function, "__qualname__", type(function).__qualname__).replace("<locals>.", "")
    code = getattr(function, "__code__", None)
    if code is None:
        code = getattr(type(function).__call__, "__code__", None)
    if code is None:
        return name
    return f"{name} ({code.co_filename.rsplit('/', 1)[-1]}:{code.co_firstlineno})"


def _scalar_call(
    mod: Callable[..., ArrayLike], role: ScalarRole
) -> tuple[Callable[..., jax.Array], Sequence[jax.ShapeDtypeStruct]]:
    """A mod with its checks, and its arguments."""
    source = describe(mod)
    check_signature(mod, role, source)
    scalars = [jax.ShapeDtypeStruct((), jnp.float32)] if role == "score" else []
    return lambda *args: checked_result(accept_numpy(mod)(*args), role, source), [*scalars, *[_INDEX] * 4]


def _first_trace(
    mod: object, call: Callable[..., jax.Array], arguments: Sequence[jax.ShapeDtypeStruct], role: Role
) -> core.ClosedJaxpr:
    """Traces `call`, which evaluates `mod`."""
    with explained(role, describe(mod)):
        program = jax.make_jaxpr(call)(*arguments)
    check_integer_powers(program, role, describe(mod))
    return program


def _residual(
    mod: Callable[..., ArrayLike], call: Callable[..., jax.Array], arguments: Sequence[jax.ShapeDtypeStruct], role: Role
) -> tuple[TracedMod, tuple[jax.Array, ...]]:
    """Traces `call`, which evaluates `mod`, and hoists what depends on no argument."""
    traced, source = _first_trace(mod, call, arguments, role), describe(mod)
    requirements = (*program_requirements(mod), *index_requirements(traced, role, source))
    replay, operands = _hoist(traced)
    replay, operands = _with_key_data(replay, operands, len(arguments))
    avals = [jax.ShapeDtypeStruct(jnp.shape(x), jax.dtypes.canonicalize_dtype(x.dtype)) for x in operands]
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        residual = jax.make_jaxpr(replay)(*arguments, *avals)
    key = fingerprint(residual, differentiable=role != "mask")
    signature = tuple((aval.shape, str(aval.dtype)) for aval in avals)
    return TracedMod(role, key, signature, residual, source, requirements), operands


@contextlib.contextmanager
def explained(role: str, source: str):
    """Turns JAX's errors about tracers into messages about the user's function."""
    try:
        yield
    except jax.errors.TracerBoolConversionError as error:
        raise ValueError(
            f"`{role}_mod` cannot branch in Python on its arguments, which are traced: {source} uses one as a "
            "condition (`if`, `and`, `or`, `not`, `min`, `max`). Use `jnp.where`, `&`, `|`, `~`, "
            "`jnp.minimum`, `jnp.maximum`."
        ) from error
    except (jax.errors.TracerIntegerConversionError, jax.errors.TracerArrayConversionError) as error:
        raise ValueError(
            f"`{role}_mod` cannot hand its arguments, which are traced, to numpy or Python: {source} indexes a list, "
            "or an attribute that is a numpy array, with one, or passes one to a function of numpy or to `range`. Wrap "
            "what it captures in `jnp.asarray(...)`, outside of the function, and use `jnp` functions and "
            "`jax.lax.fori_loop`."
        ) from error
    except jax.errors.ConcretizationTypeError as error:
        raise ValueError(
            f"`{role}_mod` cannot turn its arguments, which are traced, into Python numbers: {source} does. "
            "Use `jnp` functions on them."
        ) from error


@dataclasses.dataclass(frozen=True, eq=False)
class _Known:
    """A value that depends on no argument of the mod; `captured` if it depends on a user's array or tracer."""

    value: Any  # a constant of a jaxpr
    captured: bool


_Value: TypeAlias = int | _Known  # an int is the id of a value that a remaining equation computes


def _hoist(traced: core.ClosedJaxpr) -> tuple[Callable[..., jax.Array], tuple[jax.Array, ...]]:
    """Computes what depends on the constants of a jaxpr alone; returns the rest as a function, and its operands."""
    steps: list[tuple[core.JaxprEqn, list[_Value], list[int]]] = []  # (equation, inputs: id or _Known, output ids)
    count = iter(range(1 << 30))

    def run(jaxpr: core.Jaxpr, consts: Sequence[ArrayLike], args: Sequence[_Value]) -> list[_Value]:
        env: dict[core.Var, _Value] = dict(zip(jaxpr.constvars, (_Known(c, True) for c in consts), strict=True))
        env |= dict(zip(jaxpr.invars, args, strict=True))
        for eqn in jaxpr.eqns:
            ins = [_known_literal(v) if isinstance(v, core.Literal) else env[v] for v in eqn.invars]
            inner = sub_jaxpr(eqn) if eqn.primitive.name in CALLS else None
            if eqn.primitive.name in _TYPE_CASTS:
                outs = ins
            elif len(known := [x for x in ins if isinstance(x, _Known)]) == len(ins) and not eqn.effects:
                outs = _compute(eqn, known)
            elif inner is not None and (
                inner.consts
                or any(isinstance(x, _Known) and x.captured for x in ins)
                or any(e.primitive.name in _TYPE_CASTS for e in inner.jaxpr.eqns)
            ):
                outs = run(inner.jaxpr, inner.consts, ins)
            else:
                outs = [next(count) for _ in eqn.outvars]
                steps.append((eqn, ins, outs))
            env.update(zip(eqn.outvars, outs, strict=True))
        return [_known_literal(v) if isinstance(v, core.Literal) else env[v] for v in jaxpr.outvars]

    jaxpr, consts = open_jaxpr(traced)
    arguments = [next(count) for _ in jaxpr.invars]
    [result] = run(jaxpr, consts, arguments)

    used = [x for _, ins, _ in steps for x in ins] + [result]
    captured = {id(x.value): x.value for x in used if isinstance(x, _Known) and (x.captured or np.ndim(x.value))}
    slots = {key: len(arguments) + i for i, key in enumerate(captured)}

    def replay(*args: jax.Array) -> jax.Array:
        env = dict(zip(arguments, args, strict=False))

        def read(x: _Value) -> jax.Array:
            if not isinstance(x, _Known):
                return env[x]
            return args[slots[id(x.value)]] if id(x.value) in slots else x.value

        for eqn, ins, outs in steps:
            env.update(zip(outs, bind(eqn, [read(x) for x in ins]), strict=True))
        return jnp.asarray(read(result))

    with as_known(True):  # inside of `jit`, too
        arrays = {key: jnp.asarray(x) for key, x in captured.items() if isinstance(x, np.ndarray)}
    return replay, tuple((captured | without_mesh(arrays)).values())


def _with_key_data(
    replay: Callable[..., jax.Array], operands: tuple[jax.Array, ...], arguments: int
) -> tuple[Callable[..., jax.Array], tuple[jax.Array, ...]]:
    """Passes random keys as uint32, which any array may be; they become keys again where the mod uses them."""
    if not any(map(_is_key, operands)):
        return replay, operands
    kinds = [jax.random.key_impl(x) if _is_key(x) else None for x in operands]

    def with_keys(*args: jax.Array) -> jax.Array:
        captured = zip(args[arguments:], kinds, strict=True)
        keys = (x if kind is None else jax.random.wrap_key_data(x, impl=kind) for x, kind in captured)
        return replay(*args[:arguments], *keys)

    return with_keys, tuple(jax.random.key_data(x) if _is_key(x) else x for x in operands)


def _is_key(x: ArrayLike) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)


def _known_literal(literal: core.Literal) -> _Known:
    """A literal: programs know no mesh."""
    return _Known(literal.val if jax.sharding.get_abstract_mesh().empty else known_literal(literal), False)


def _compute(eqn: core.JaxprEqn, ins: Sequence[_Known]) -> list[_Known]:
    values = [x.value for x in ins]
    concrete = not any(isinstance(x, Tracer) for x in values)
    with as_known(concrete):
        outs = bind(eqn, values if concrete else match_manual_axes(values))
    captured = any(x.captured for x in ins) or not concrete or any(map(_is_key, outs))
    if not captured and all(np.ndim(x) == 0 for x in outs):
        outs = [np.asarray(x) for x in outs]
    elif concrete:
        outs = without_mesh(outs)
    return [_Known(x, captured) for x in outs]


def _evaluate_varying(opened: Open, args: Sequence[ArrayLike]) -> list[ArrayLike]:
    """Evaluates a jaxpr inside a `jax.shard_map`, where all inputs of a primitive must vary over the same axes.

    The jaxpr was traced without a mesh, so its literals and the bodies of its calls are not typed for one.
    """
    env = dict(zip((*opened.jaxpr.constvars, *opened.jaxpr.invars), (*opened.consts, *args), strict=True))
    read = lambda v: jnp.asarray(v.val) if isinstance(v, core.Literal) else env[v]
    for eqn in opened.jaxpr.eqns:
        values = match_manual_axes([read(v) for v in eqn.invars])
        inner = sub_jaxpr(eqn) if eqn.primitive.name in CALLS else None
        outs = bind(eqn, values) if inner is None else _evaluate_varying(inner, values)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in opened.jaxpr.outvars]

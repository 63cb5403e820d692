"""Launches kernels of Pallas by official Triton: a call that emits, compiles and launches when it is lowered."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir

from pallas_kernels.config import Tiles
from pallas_kernels.plan import Refusal
from pallas_kernels.triton.compiler.compile import compiled
from pallas_kernels.triton.compiler.emit.emit import Launched, Source, emit
from pallas_kernels.triton.compiler.launch import by_jax_triton, direct
from pallas_kernels.triton.compiler.launch.installed import launcher
from pallas_kernels.triton.compiler.launch.target import Target, target_of
from pallas_kernels.types import aval_of


def call_primitive(name: str) -> Primitive:
    """A primitive of a traced call of a kernel, its parameter `jaxpr`, with all rules but the one that lowers it."""
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_effectful_abstract_eval(_abstract)
    primitive.def_impl(lambda *args, **params: jax.jit(functools.partial(primitive.bind, **params))(*args))
    batching.primitive_batchers[primitive] = functools.partial(_batching, primitive)
    return primitive


def bind(primitive: Primitive, call: Callable[..., list[jax.Array]], inputs: Sequence[object], **params: object):
    """Traces `call` of `pl.pallas_call`, and binds a `call_primitive` to it."""
    flat, tree = jax.tree.flatten(tuple(inputs))
    jaxpr = jax.make_jaxpr(lambda *xs: call(*jax.tree.unflatten(tree, xs)))(*flat)
    return primitive.bind(*flat, jaxpr=jaxpr, **params)


def _abstract(*_, jaxpr, **__):
    opened = getattr(jaxpr, "jaxpr", jaxpr)
    return [v.aval for v in opened.outvars], opened.effects


def _batching(primitive, args, dims, *, jaxpr, **params):
    """`jax.vmap` gives the grid of a kernel another axis."""
    new = jax.make_jaxpr(jax.vmap(jaxpr_as_fun(jaxpr), in_axes=tuple(dims)))(*args)
    outs = primitive.bind(*args, jaxpr=new, **params)
    return outs, [0] * len(outs)


_call_p = call_primitive("jflex_official_triton")


def launch(
    call: Callable[..., list[jax.Array]],
    inputs: Sequence[object],
    names: tuple[str, ...],
    tiles: Tiles,
    device_kind: str,
) -> list[jax.Array]:
    """Runs a kernel, `call` of `pl.pallas_call`, on a device; `names` of its arguments are as `names_of` gives them."""
    return bind(_call_p, call, inputs, names=names, tiles=tiles, device_kind=device_kind)


def names_of(kernel: Callable[..., None], inputs: Sequence[object], outputs: int) -> tuple[str, ...]:
    """Names for the arguments of a kernel, from those of its parameters and of the fields of its inputs.

    >>> names_of(lambda arrays, out: None, [{"query": 1, "lists": [2, 3]}], 1)
    ('lists_0', 'lists_1', 'query', 'out')
    """
    parameters = inspect.signature(kernel).parameters.values()
    named = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    variadic = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "out")
    parameter = lambda n: named[n] if n < len(named) else f"{variadic}_{n - len(named)}"
    names: list[str] = []
    for n, argument in enumerate(inputs):
        for path, _ in jax.tree_util.tree_leaves_with_path(argument):
            words = re.findall(r"\w+", jax.tree_util.keystr(path))
            numbered = not words or words[0].isdigit()
            names.append("_".join([parameter(n), *words] if numbered else words))
    names += [parameter(len(inputs) + n) for n in range(outputs)]
    return tuple(name if names.count(name) == 1 else f"{name}_{n}" for n, name in enumerate(names))


def _lowering(ctx, *args, jaxpr, names, tiles, device_kind):
    target = target_of(device_kind)
    if isinstance(target, str):
        raise NotImplementedError(f"official_triton: {target}.")
    run = lambda *xs: _run(jaxpr, xs, names, tiles, target)
    return mlir.lower_fun(run, multiple_results=True)(ctx, *args)


mlir.register_lowering(_call_p, _lowering, platform="cuda")


def _run(
    jaxpr: ClosedJaxpr, args: Sequence[jax.Array], names: tuple[str, ...], tiles: Tiles, target: Target
) -> list[jax.Array]:
    """Evaluates a jaxpr with a kernel, which Triton runs; before a batched one, `jax.vmap` may broadcast arrays."""
    opened = jaxpr.jaxpr
    values: dict[Any, Any] = dict(zip([*opened.constvars, *opened.invars], [*jaxpr.consts, *args], strict=True))
    read = lambda v: v.val if isinstance(v, Literal) else values[v]
    for eqn in opened.eqns:
        ins = [read(v) for v in eqn.invars]
        if eqn.primitive.name == "pallas_call":
            outs = _launch(launched_of(eqn), eqn, ins, names, tiles, target)
        else:
            results = eqn.primitive.bind(*ins, **eqn.primitive.get_bind_params(eqn.params))
            outs = results if eqn.primitive.multiple_results else [results]
        values.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in opened.outvars]


def _launch(
    launched: Launched, eqn: JaxprEqn, args: Sequence[jax.Array], names: tuple[str, ...], tiles: Tiles, target: Target
) -> list[jax.Array]:
    source = emit(launched, names, target.dialect)
    if isinstance(source, Refusal):
        raise NotImplementedError(f"official_triton: {source.reason}; pass implementation='xla'.")
    outputs = [jax.ShapeDtypeStruct(aval_of(v).shape, aval_of(v).dtype) for v in eqn.outvars]
    return call(source, args, tiles, target, outputs, launched.aliases)


def call(
    source: Source,
    args: Sequence[jax.Array],
    tiles: Tiles,
    target: Target,
    outputs: Sequence[jax.ShapeDtypeStruct],
    aliases: dict[int, int],
) -> list[jax.Array]:
    """Compiles and calls a kernel, by the launcher that is here.

    The kernel takes addresses to be multiples of 16. The barrier keeps slices out of the call: otherwise XLA hands over
    an address inside of the whole array.
    """
    args, chosen = lax.optimization_barrier(tuple(args)), launcher()
    if isinstance(chosen, str):
        raise NotImplementedError(f"official_triton: {chosen}.")
    sizes = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    if chosen.name == "jax_triton":
        return by_jax_triton.call(*args, source=source, target=target, outputs=outputs, aliases=aliases, **sizes)
    kernel = compiled(source, target, **sizes)
    return direct.call(*args, compiled=kernel, source=source, target=target, outputs=outputs, aliases=aliases)


def launched_of(eqn: JaxprEqn) -> Launched:
    """A kernel from the equation that `pl.pallas_call` leaves."""
    params, inputs = eqn.params, len(eqn.invars)
    jaxpr, mapping = getattr(params["jaxpr"], "jaxpr", params["jaxpr"]), params["grid_mapping"]
    shapes = tuple(tuple(aval_of(v).shape) for v in (*eqn.invars, *eqn.outvars))
    aliases = {int(output): int(argument) for argument, output in params["input_output_aliases"]}
    name = re.sub(r"\W", "_", str(params["name"] if "name" in params else params["name_and_src_info"].name))
    index = tuple(  # maps of the blocks that are not whole arrays
        None if whole == tuple(aval_of(part).shape) else block.index_map_jaxpr
        for whole, part, block in zip(shapes, jaxpr.invars, mapping.block_mappings, strict=True)
    )
    return Launched(name, jaxpr, tuple(mapping.grid), shapes, index, aliases, inputs)


def kernels_in(jaxpr: Any) -> Iterator[tuple[Launched, tuple[str, ...], Tiles]]:
    """All kernels that a traced program launches, for tests and benchmarks: kernel, names, tiles."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if eqn.primitive is _call_p:
            for inner in eqn.params["jaxpr"].jaxpr.eqns:
                if inner.primitive.name == "pallas_call":
                    yield launched_of(inner), eqn.params["names"], eqn.params["tiles"]
            continue
        for value in eqn.params.values():
            for x in value if isinstance(value, (tuple, list)) else (value,):
                if hasattr(getattr(x, "jaxpr", x), "eqns"):
                    yield from kernels_in(x)

"""Rules of structural primitives: they move, stack or reduce the few values that a mod holds for one element."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.program.ir import Graph, Node
from pallas_kernels.program.rules.random_bits import Key, select_key
from pallas_kernels.program.rules.views import NotOnTile, Scalars, View, gather, scalars
from pallas_kernels.types import Params

Value = Scalars | View


def _squeeze(graph: Graph, ins: Sequence[Value], params: Params, shape: tuple[int, ...]) -> Value:
    [x] = ins
    if isinstance(x, View):
        return x.select_dimensions([d for d in range(len(x.shape)) if d not in params["dimensions"]])
    return x.reshape(shape)


def _reshape(graph: Graph, ins: Sequence[Value], params: Params, shape: tuple[int, ...]) -> Value:
    """Another shape; a view must be loaded unless only dimensions of size 1 are added or dropped."""
    x = ins[0]
    if isinstance(x, View):
        kept = [d for d, size in enumerate(x.shape) if size != 1]
        if [x.shape[d] for d in kept] == [size for size in shape if size != 1]:
            into = [d for d, size in enumerate(shape) if size != 1]
            return x.select_dimensions(kept).broadcast(shape, into)
        x = x.load(graph)
    return x.reshape(shape)


def _broadcast_in_dim(graph: Graph, ins: Sequence[Value], params: Params, shape: tuple[int, ...]) -> Value:
    x, dimensions = ins[0], params["broadcast_dimensions"]
    if isinstance(x, View):
        return x.broadcast(shape, dimensions)
    placed = [1] * len(shape)
    for have, d in enumerate(dimensions):
        placed[d] = x.shape[have]
    return np.broadcast_to(x.reshape(placed), shape)


def _transpose(graph: Graph, ins: Sequence[Value], params: Params, shape: tuple[int, ...]) -> Value:
    [x] = ins
    return x.select_dimensions(params["permutation"]) if isinstance(x, View) else x.transpose(params["permutation"])


def _slice(graph: Graph, ins: Sequence[Value], params: Params, shape: tuple[int, ...]) -> Value:
    [x] = ins
    starts, steps = params["start_indices"], params["strides"] or (1,) * len(shape)
    if isinstance(x, View):
        return x.window(graph, list(starts), shape, steps)
    return x[tuple(slice(a, b, s) for a, b, s in zip(starts, params["limit_indices"], steps, strict=True))]


def _dynamic_slice(graph: Graph, ins: Sequence[Value], params: Params, shape: tuple[int, ...]) -> Value:
    x, *starts = ins
    nodes = [element(graph, s) for s in starts]
    if isinstance(x, View):
        return x.dynamic(graph, nodes, params["slice_sizes"])
    for d, (node, size) in enumerate(zip(nodes, params["slice_sizes"], strict=True)):
        positions = range(x.shape[d] - size + 1)
        node = graph.clamp(graph.cast(node, np.int32), 0, positions[-1])
        windows = [np.take(x, range(p, p + size), axis=d) for p in positions]
        x = functools.reduce(lambda other, p: _where(graph, node, p, windows[p], other), positions[1:], windows[0])
    return x


def _dynamic_update_slice(graph: Graph, ins: Sequence[Value], params: Params, shape: tuple[int, ...]) -> Value:
    x, update, *starts = ins
    x, update = load(graph, x), load(graph, update)
    positions = [range(have - size + 1) for have, size in zip(x.shape, update.shape, strict=True)]
    nodes = [
        graph.clamp(graph.cast(element(graph, s), np.int32), 0, p[-1]) for s, p in zip(starts, positions, strict=True)
    ]
    out = x
    for position in itertools.product(*positions):
        there = [graph.compare("eq", n, graph.literal(p, np.int32)) for n, p in zip(nodes, position, strict=True)]
        hit = functools.reduce(lambda a, b: graph.same_dtype("and", lax.bitwise_and, a, b), there)
        window = tuple(slice(p, p + size) for p, size in zip(position, update.shape, strict=True))
        out = out.copy()
        for i in itertools.product(*map(range, update.shape)):
            out[window][i] = graph.select(hit, update[i], out[window][i])
    return out


def _gather(graph: Graph, ins: Sequence[Value], params: Params, shape: tuple[int, ...]) -> Value:
    x, indices = ins
    if not isinstance(x, View):
        raise NotOnTile("primitive `gather`: it indexes an array that it computed itself with an array of indices")
    return gather(graph, x, load(graph, indices), params)


def _iota(graph: Graph, ins: Sequence[Value], params: Params, shape: tuple[int, ...]) -> Value:
    return scalars(shape, lambda i: graph.literal(i[params["dimension"]], params["dtype"]))


def _empty(graph: Graph, ins: Sequence[Value], params: Params, shape: tuple[int, ...]) -> Value:
    """Zeros, as XLA allocates on a CPU."""
    return scalars(shape, lambda _: graph.literal(0, params["dtype"]))


def entry(graph: Graph, x: Value, axis: int, position: int) -> Value:
    """The element or row at a position along a dimension."""
    if isinstance(x, View):
        starts = [position if d == axis else 0 for d in range(len(x.shape))]
        sizes = [1 if d == axis else size for d, size in enumerate(x.shape)]
        kept = [d for d in range(len(x.shape)) if d != axis]
        return x.window(graph, starts, sizes, (1,) * len(sizes)).select_dimensions(kept)
    return np.asarray(np.moveaxis(x, axis, 0)[position], object)


def _pad(graph: Graph, ins: Sequence[Value], params: Params, shape: tuple[int, ...]) -> Value:
    """Pads around and between; negative padding cuts."""
    x, value = load(graph, ins[0]), element(graph, ins[1])
    out = scalars(shape, lambda _: value)
    steps = [(int(low), int(inner) + 1) for low, _, inner in params["padding_config"]]
    for i in np.ndindex(*x.shape):
        at = tuple(low + step * p for p, (low, step) in zip(i, steps, strict=True))
        if all(0 <= p < size for p, size in zip(at, shape, strict=True)):
            out[at] = x[i]
    return out


def split(graph: Graph, x: Value, axis: int, sizes: Sequence[int]) -> list[Value]:
    """Windows along a dimension, one after the other."""
    x = load(graph, x)
    return list(np.split(x, np.cumsum(sizes)[:-1], axis=axis))


def _select_n(graph: Graph, ins: Sequence[Value], params: Params, shape: tuple[int, ...]) -> Value:
    which, *cases = (load(graph, x) for x in ins)
    which = np.broadcast_to(which, shape)
    return scalars(shape, lambda i: choose(graph, which[i], [case[i] for case in cases]))


def _clamp(graph: Graph, ins: Sequence[Value], params: Params, shape: tuple[int, ...]) -> Value:
    bounds_and_values = [np.broadcast_to(load(graph, v), shape) for v in ins]

    def at(i: tuple[int, ...]) -> Node:
        below, value, above = (v[i] for v in bounds_and_values)
        return graph.same_dtype("min", lax.min, graph.same_dtype("max", lax.max, value, below), above)

    return scalars(shape, at)


def _dot_general(graph: Graph, ins: Sequence[Value], params: Params, shape: tuple[int, ...]) -> Value:
    """A small GEMM over the mod's own axes, unrolled into multiplies and adds."""
    a, b = (load(graph, x) for x in ins)
    (contract_a, contract_b), (batch_a, batch_b) = params["dimension_numbers"]
    free = lambda x, used: [d for d in range(x.ndim) if d not in used]
    order_a = [*batch_a, *free(a, {*batch_a, *contract_a}), *contract_a]
    order_b = [*batch_b, *free(b, {*batch_b, *contract_b}), *contract_b]
    n, m = len(batch_a), len(contract_a)
    a, b = a.transpose(order_a), b.transpose(order_b)
    free_a, dtype = a.ndim - n - m, np.dtype(params["preferred_element_type"] or a.flat[0].dtype)
    exact = accumulator(dtype)

    def at(i: tuple[int, ...]) -> Node:
        lhs, rhs = a[i[: n + free_a]], b[(*i[:n], *i[n + free_a :])]
        pairs = zip(np.ravel(lhs), np.ravel(rhs), strict=True)
        products = [graph.same_dtype("mul", lax.mul, graph.cast(x, exact), graph.cast(y, exact)) for x, y in pairs]
        return graph.cast(functools.reduce(lambda x, y: graph.same_dtype("add", lax.add, x, y), products), dtype)

    return scalars(shape, at)


def polynomial(graph: Graph, x: Node, *coefficients: Node) -> Node:
    """``sum(c[n] * x ** n)`` by Horner's rule, in float32 for 16-bit floats, rounded once: no compiler has it."""
    dtype = accumulator(x.dtype)
    by, *terms = (graph.cast(n, dtype) for n in (x, *coefficients))
    multiply_add = lambda out, c: graph.same_dtype("add", lax.add, graph.same_dtype("mul", lax.mul, out, by), c)
    return graph.cast(functools.reduce(multiply_add, reversed(terms)), x.dtype)


def _reduction(op: str, function: Callable[..., jax.Array]) -> Callable[..., Value]:
    def rule(graph: Graph, ins: Sequence[Value], params: Params, shape: tuple[int, ...]) -> Value:
        x = load(graph, ins[0])
        axes = params["axes"]
        if x.size == 0:
            raise NotOnTile(f"primitive `reduce` by `{op}` of no values")
        x = np.moveaxis(x, axes, range(x.ndim - len(axes), x.ndim)).reshape(*shape, -1)

        def at(i: tuple[int, ...]) -> Node:
            terms = [graph.cast(n, accumulator(n.dtype)) for n in x[i]]
            return graph.cast(functools.reduce(lambda a, b: graph.same_dtype(op, function, a, b), terms), x[i][0].dtype)

        return scalars(shape, at)

    return rule


def _cumulation(op: str, function: Callable[..., jax.Array]) -> Callable[..., Value]:
    def rule(graph: Graph, ins: Sequence[Value], params: Params, shape: tuple[int, ...]) -> Value:
        x, axis = load(graph, ins[0]), params["axis"]
        x = np.flip(x, axis) if params["reverse"] else x
        x = np.moveaxis(x, axis, 0)
        slices = [x[p : p + 1] for p in range(x.shape[0])]
        parts = itertools.accumulate(
            slices, lambda a, b: scalars(a.shape, lambda i: graph.same_dtype(op, function, a[i], b[i]))
        )
        out = np.moveaxis(np.concatenate(list(parts)), 0, axis)
        return np.flip(out, axis) if params["reverse"] else out

    return rule


def _position(better: str) -> Callable[..., Value]:
    def rule(graph: Graph, ins: Sequence[Value], params: Params, shape: tuple[int, ...]) -> Value:
        [axis], dtype = params["axes"], params["index_dtype"]
        x = np.moveaxis(load(graph, ins[0]), axis, -1)

        def at(i: tuple[int, ...]) -> Node:
            best, position = x[i][0], graph.literal(0, dtype)
            for p, candidate in enumerate(x[i][1:], start=1):
                wins = graph.compare(better, candidate, best)
                best = graph.select(wins, candidate, best)
                position = graph.select(wins, graph.literal(p, dtype), position)
            return position

        return scalars(shape, at)

    return rule


def accumulator(dtype: np.dtype) -> np.dtype:
    """The dtype of reductions: 16-bit floats are accumulated in float32 and rounded once, at the end."""
    return np.dtype(np.float32) if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize == 2 else dtype


def load(graph: Graph, x: Value) -> Scalars:
    """The values themselves, loaded if they are still a view."""
    return x.load(graph) if isinstance(x, View) else x


def element(graph: Graph, x: Value) -> Node:
    """The value of an array without dimensions."""
    return load(graph, x).item()


def choose(graph: Graph, which: Node, cases: Sequence[Node]) -> Node:
    """One of several values, by a boolean or by a number from 0."""
    if which.dtype == np.bool_:
        return _select(graph, which, cases[1], cases[0])
    chosen = cases[-1]
    for number in reversed(range(len(cases) - 1)):
        is_it = graph.compare("le", which, graph.literal(number, which.dtype))
        chosen = _select(graph, is_it, cases[number], chosen)
    return chosen


def _select(graph: Graph, predicate: Node, if_true: Node | Key, if_false: Node | Key) -> Node:
    """One of two values, or of two random keys."""
    if isinstance(if_true, Key):
        return cast(Node, select_key(graph, predicate, if_true, cast(Key, if_false)))
    return graph.select(predicate, if_true, cast(Node, if_false))


def _where(graph: Graph, node: Node, position: int, if_there: Scalars, otherwise: Scalars) -> Scalars:
    there = graph.compare("eq", node, graph.literal(position, np.int32))
    return scalars(if_there.shape, lambda i: _select(graph, there, if_there[i], otherwise[i]))


RULES: dict[str, Callable[..., Value]] = {
    "squeeze": _squeeze, "reshape": _reshape, "broadcast_in_dim": _broadcast_in_dim, "transpose": _transpose,
    "slice": _slice, "dynamic_slice": _dynamic_slice, "dynamic_update_slice": _dynamic_update_slice, "gather": _gather,
    "concatenate": lambda graph, ins, params, _: np.concatenate([load(graph, x) for x in ins], params["dimension"]),
    "stack": lambda graph, ins, params, _: np.stack([load(graph, x) for x in ins], params["axis"]),
    "rev": lambda graph, ins, params, _: np.asarray(np.flip(load(graph, ins[0]), params["dimensions"]), object),
    "iota": _iota, "empty": _empty, "pad": _pad, "select_n": _select_n, "clamp": _clamp,
    "dot_general": _dot_general,
    "reduce_sum": _reduction("add", lax.add), "reduce_max": _reduction("max", lax.max),
    "reduce_min": _reduction("min", lax.min), "reduce_prod": _reduction("mul", lax.mul),
    "reduce_and": _reduction("and", lax.bitwise_and), "reduce_or": _reduction("or", lax.bitwise_or),
    "cumsum": _cumulation("add", lax.add), "cumprod": _cumulation("mul", lax.mul),
    "cummax": _cumulation("max", lax.max), "cummin": _cumulation("min", lax.min),
    "argmax": _position("gt"), "argmin": _position("lt"),
}  # fmt: skip

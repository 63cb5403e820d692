"""Rules of the primitives of vector mods that move or reduce lanes, on arrays that are functions of an index.

Each takes the graph, the inputs, the parameters and the shape of the result, as the rules for scalars in
`primitive_rules` do.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.program.ir import Graph, Node
from pallas_kernels.program.rules.primitive_rules import accumulator, choose
from pallas_kernels.program.rules.views import NotOnTile, fill_of
from pallas_kernels.program.vectors.lazy_arrays import (
    MAX_CHOICES,
    LazyArray,
    Position,
    added,
    as_node,
    as_position,
    chosen,
    clamped,
    is_below,
    multiplied,
    ravel,
    unravel,
)
from pallas_kernels.types import Params

Inputs = Sequence[LazyArray]
MAX_UNROLLED = 8  # terms of a sum that are added one by one


class Lanes(NamedTuple):
    """The lanes of a tile: an index node, how many there are, and the step between them."""

    node: Node
    width: int
    step: int


def _reshape(graph: Graph, ins: Inputs, params: Params, shape: tuple[int, ...]) -> LazyArray:
    x = ins[0]
    kept = [d for d, size in enumerate(x.shape) if size != 1]
    if [x.shape[d] for d in kept] == [size for size in shape if size != 1]:

        def without_ones(index: tuple[Position, ...]) -> Node:
            source = dict(zip(kept, (i for i, size in zip(index, shape, strict=True) if size != 1), strict=True))
            return x.at([source.get(d, 0) for d in range(len(x.shape))])

        return LazyArray(shape, x.dtype, without_ones)
    return LazyArray(shape, x.dtype, lambda index: x.at(unravel(graph, ravel(graph, index, shape), x.shape)))


def _broadcast_in_dim(graph: Graph, ins: Inputs, params: Params, shape: tuple[int, ...]) -> LazyArray:
    x, dimensions = ins[0], params["broadcast_dimensions"]
    return LazyArray(shape, x.dtype, lambda index: x.broadcast_at([index[int(d)] for d in dimensions]))


def _transpose(graph: Graph, ins: Inputs, params: Params, shape: tuple[int, ...]) -> LazyArray:
    [x], order = ins, params["permutation"]
    return LazyArray(shape, x.dtype, lambda index: x.at([index[order.index(d)] for d in range(len(order))]))


def _slice(graph: Graph, ins: Inputs, params: Params, shape: tuple[int, ...]) -> LazyArray:
    [x], starts, steps = ins, params["start_indices"], params["strides"] or (1,) * len(shape)

    def element(index: tuple[Position, ...]) -> Node:
        where = zip(index, starts, steps, strict=True)
        return x.at([added(graph, multiplied(graph, i, int(step)), int(start)) for i, start, step in where])

    return LazyArray(shape, x.dtype, element)


def _dynamic_slice(graph: Graph, ins: Inputs, params: Params, shape: tuple[int, ...]) -> LazyArray:
    x, *starts = ins

    def element(index: tuple[Position, ...]) -> Node:
        begin = [_start(graph, s, have, size) for s, have, size in zip(starts, x.shape, shape, strict=True)]
        return x.at([added(graph, i, s) for i, s in zip(index, begin, strict=True)])

    return LazyArray(shape, x.dtype, element)


def _empty(graph: Graph, ins: Inputs, params: Params, shape: tuple[int, ...]) -> LazyArray:
    return LazyArray(shape, params["dtype"], lambda index: graph.literal(0, params["dtype"]))


def _start(graph: Graph, start: LazyArray, have: int, size: int) -> Position:
    """Start of a window, clamped so that it lies inside."""
    return as_position(graph, start.at(()), have - size + 1)


def _dynamic_update_slice(graph: Graph, ins: Inputs, params: Params, shape: tuple[int, ...]) -> LazyArray:
    x, update, *starts = ins

    def element(index: tuple[Position, ...]) -> Node:
        inside, at = graph.literal(True, np.bool_), list[Position]()
        for i, s, have, size in zip(index, starts, shape, update.shape, strict=True):
            start = as_node(graph, _start(graph, s, have, size))
            i = graph.same_dtype("sub", lax.sub, as_node(graph, i), start)
            for op, limit in (("ge", 0), ("lt", size)):
                within = graph.compare(op, i, as_node(graph, limit))
                inside = graph.same_dtype("and", lax.bitwise_and, inside, within)
            at.append(as_position(graph, i, size))
        return graph.select(inside, update.at(at), x.at(index))

    return LazyArray(shape, x.dtype, element)


def _gather(graph: Graph, ins: Inputs, params: Params, shape: tuple[int, ...]) -> LazyArray:
    (x, indices), numbers, sizes = ins, params["dimension_numbers"], params["slice_sizes"]
    dropped = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    kept = [d for d in range(len(sizes)) if d not in dropped]
    outer = [d for d in range(len(shape)) if d not in numbers.offset_dims]

    def element(index: tuple[Position, ...]) -> Node:
        batch, at, valid = [index[d] for d in outer], list[Position]([0] * len(sizes)), graph.literal(True, np.bool_)
        for number, d in enumerate(numbers.start_index_map):
            start, count = graph.cast(indices.at([*batch, number]), np.int32), x.shape[d] - sizes[d] + 1
            if params["mode"] == lax.GatherScatterMode.FILL_OR_DROP:
                for op, limit in (("ge", 0), ("lt", count)):
                    within = graph.compare(op, start, as_node(graph, limit))
                    valid = graph.same_dtype("and", lax.bitwise_and, valid, within)
            at[d] = as_position(graph, start, count)
        for d, dimension in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True):
            at[d] = batch[dimension]
        for d, o in zip(kept, numbers.offset_dims, strict=True):
            at[d] = added(graph, at[d], index[o])
        result = x.at(at)
        if valid.bounds == (1, 1):
            return result
        return graph.select(valid, result, graph.literal(fill_of(x.dtype, params.get("fill_value")), x.dtype))

    return LazyArray(shape, x.dtype, element)


def concatenate(graph: Graph, ins: Inputs, params: Params, shape: tuple[int, ...]) -> LazyArray:
    """Joins along a dimension: a select between the pieces that the lanes of a tile may lie in."""
    d, sizes = params["dimension"], [x.shape[params["dimension"]] for x in ins]
    ends = list(itertools.accumulate(sizes))

    def element(index: tuple[Position, ...]) -> Node:
        i = index[d]
        bounds = (i, i) if isinstance(i, int) else i.bounds or (0, shape[d] - 1)
        result: Node | None = None
        for x, size, end in reversed(list(zip(ins, sizes, ends, strict=True))):
            if bounds[1] < end - size or bounds[0] >= end or not size:
                continue
            offset = clamped(graph, added(graph, i, size - end), size)
            value = x.at([*index[:d], offset, *index[d + 1 :]])
            result = value if result is None else graph.select(is_below(graph, i, end), value, result)
        assert result is not None  # the index is in range
        return result

    return LazyArray(shape, ins[0].dtype, element)


def _stack(graph: Graph, ins: Inputs, params: Params, shape: tuple[int, ...]) -> LazyArray:
    d = params["axis"]
    element = lambda index: chosen(graph, index[d], [x.at([*index[:d], *index[d + 1 :]]) for x in ins])
    return LazyArray(shape, ins[0].dtype, element)


def _iota(graph: Graph, ins: Inputs, params: Params, shape: tuple[int, ...]) -> LazyArray:
    element = lambda index: graph.cast(as_node(graph, index[params["dimension"]]), params["dtype"])
    return LazyArray(shape, params["dtype"], element)


def _rev(graph: Graph, ins: Inputs, params: Params, shape: tuple[int, ...]) -> LazyArray:
    [x] = ins

    def element(index: tuple[Position, ...]) -> Node:
        back = lambda i, size: added(graph, multiplied(graph, i, -1), size - 1)
        pairs = enumerate(zip(index, shape, strict=True))
        return x.at([back(i, size) if d in params["dimensions"] else i for d, (i, size) in pairs])

    return LazyArray(shape, x.dtype, element)


def unstacked(x: LazyArray, axis: int, position: int) -> LazyArray:
    """One element along a dimension."""
    shape = (*x.shape[:axis], *x.shape[axis + 1 :])
    return LazyArray(shape, x.dtype, lambda index: x.at([*index[:axis], position, *index[axis:]]))


def split(graph: Graph, x: LazyArray, axis: int, sizes: Sequence[int]) -> list[LazyArray]:
    """Windows along a dimension, one after the other."""

    def window(start: int, size: int) -> LazyArray:
        shape = (*x.shape[:axis], size, *x.shape[axis + 1 :])
        element = lambda index: x.at([*index[:axis], added(graph, index[axis], start), *index[axis + 1 :]])
        return LazyArray(shape, x.dtype, element)

    ends = itertools.accumulate(map(int, sizes))
    return [window(end - int(size), int(size)) for size, end in zip(sizes, ends, strict=True)]


def _select_n(graph: Graph, ins: Inputs, params: Params, shape: tuple[int, ...]) -> LazyArray:
    which, *cases = ins
    element = lambda index: choose(graph, which.broadcast_at(index), [x.broadcast_at(index) for x in cases])
    return LazyArray(shape, cases[0].dtype, element)


def _clamp(graph: Graph, ins: Inputs, params: Params, shape: tuple[int, ...]) -> LazyArray:
    def element(index: tuple[Position, ...]) -> Node:
        below, value, above = (x.broadcast_at(index) for x in ins)
        return graph.same_dtype("min", lax.min, graph.same_dtype("max", lax.max, value, below), above)

    return LazyArray(shape, ins[1].dtype, element)


# --- reductions

_REDUCED: dict[str, tuple[str, Callable[..., jax.Array]]] = {
    "reduce_sum": ("add", lax.add),
    "reduce_max": ("max", lax.max),
    "reduce_min": ("min", lax.min),
}
REDUCTIONS = frozenset(_REDUCED)


def reduce(graph: Graph, name: str, x: LazyArray, axes: Sequence[int], lanes: Lanes) -> LazyArray:
    """One of `REDUCTIONS`: of a few values one by one, else over the lanes of tiles; long dimensions take several.

    Raises:
      NotOnTile: Many values are left, which may differ between lanes.
    """
    op, function = _REDUCED[name]
    kept = [d for d in range(len(x.shape)) if d not in axes]
    shape, over = [x.shape[d] for d in kept], [x.shape[d] for d in axes]
    exact = accumulator(x.dtype)

    def value(index: Sequence[Position], reduced: Sequence[Position]) -> Node:
        at = dict(zip((*kept, *axes), (*index, *reduced), strict=True))
        return graph.cast(x.at([at[d] for d in range(len(x.shape))]), exact)

    def element(index: tuple[Position, ...]) -> Node:
        if math.prod(over) <= MAX_UNROLLED:
            terms = [value(index, position) for position in itertools.product(*map(range, over))]
            return graph.cast(functools.reduce(functools.partial(graph.same_dtype, op, function), terms), x.dtype)
        if math.prod(shape) > MAX_CHOICES:
            raise NotOnTile(
                f"primitive `{name}` leaves {shape} values, and a tile holds at most {MAX_CHOICES} sums over lanes"
            )
        positions, flat = list(itertools.product(*map(range, shape))), ravel(graph, index, shape)
        positions, flat = ([positions[flat]], 0) if isinstance(flat, int) else (positions, flat)
        sums = [_over_lanes(graph, name, lambda r, p=p: value(p, r), over, exact, lanes) for p in positions]
        return graph.cast(chosen(graph, flat, sums), x.dtype)

    return LazyArray(shape, x.dtype, element)


def _over_lanes(
    graph: Graph,
    name: str,
    value: Callable[[Sequence[Position]], Node],
    over: Sequence[int],
    dtype: np.dtype,
    lanes: Lanes,
) -> Node:
    """One reduction over all values of some dimensions."""
    (lane, width, step), count, terms = lanes, math.prod(over), list[Node]()
    for first in (tile + i for tile in range(0, count, width * step) for i in range(step)):
        flat = added(graph, multiplied(graph, lane, step), first)
        term = value(unravel(graph, clamped(graph, flat, count), over))
        if first + step * (width - 1) >= count:
            term = graph.select(is_below(graph, flat, count), term, graph.literal(_neutral(name, dtype), dtype))
        terms.append(term)
    return graph.reduce_lanes(name, terms)


def _neutral(name: str, dtype: np.dtype) -> float:
    if name == "reduce_sum":
        return 0
    if jnp.issubdtype(dtype, jnp.floating):
        return -np.inf if name == "reduce_max" else np.inf
    return jnp.iinfo(dtype).min if name == "reduce_max" else jnp.iinfo(dtype).max


def dot_general(graph: Graph, ins: Inputs, params: Params, shape: tuple[int, ...], lanes: Lanes) -> LazyArray:
    """A product of few results: a dot product of vectors, or a sum of few terms.

    Raises:
      NotOnTile: It is a product with a matrix, whose results need all lanes each.
    """
    a, b = ins
    (contract_a, contract_b), (batch_a, batch_b) = params["dimension_numbers"]
    free_a = [d for d in range(len(a.shape)) if d not in (*contract_a, *batch_a)]
    free_b = [d for d in range(len(b.shape)) if d not in (*contract_b, *batch_b)]
    over, dtype = [a.shape[d] for d in contract_a], np.dtype(params["preferred_element_type"] or a.dtype)
    if math.prod(over) > MAX_UNROLLED and math.prod(shape) > MAX_CHOICES:
        raise NotOnTile(
            f"primitive `dot_general` of {list(a.shape)} and {list(b.shape)} mixes all lanes of a vector: apply a "
            "matrix before keys are written"
        )
    exact = accumulator(dtype)

    def product(index: tuple[Position, ...]) -> Node:
        batch, free = index[: len(batch_a)], list(index[len(batch_a) :])
        lhs, rhs = free[: len(free_a)], free[len(free_a) : -len(over) or None]
        contracted = free[len(free) - len(over) :]
        nodes = []
        for x, dimensions, positions in (
            (a, (*batch_a, *free_a, *contract_a), (*batch, *lhs, *contracted)),
            (b, (*batch_b, *free_b, *contract_b), (*batch, *rhs, *contracted)),
        ):
            at = dict(zip(dimensions, positions, strict=True))
            nodes.append(graph.cast(x.at([at[d] for d in range(len(x.shape))]), exact))
        return graph.same_dtype("mul", lax.mul, *nodes)

    whole = LazyArray((*shape, *over), exact, product)
    total = reduce(graph, "reduce_sum", whole, range(len(shape), len(shape) + len(over)), lanes)
    return LazyArray(shape, dtype, lambda index: graph.cast(total.at(index), dtype))


RULES: dict[str, Callable[..., LazyArray]] = {
    "squeeze": _reshape, "reshape": _reshape, "expand_dims": _reshape, "broadcast_in_dim": _broadcast_in_dim,
    "transpose": _transpose, "slice": _slice, "dynamic_slice": _dynamic_slice, "gather": _gather,
    "dynamic_update_slice": _dynamic_update_slice, "concatenate": concatenate, "stack": _stack, "iota": _iota,
    "rev": _rev, "empty": _empty, "select_n": _select_n, "clamp": _clamp,
}  # fmt: skip

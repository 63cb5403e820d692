"""Builds the tile program of a traced mod, which every GPU backend evaluates.

`trace_program` interprets a jaxpr on nodes (see ir.py): calls are inlined, loops unrolled, branches become selects,
indexing becomes loads. `Derivative` is the program of ``jax.vjp`` of it, with the loads as arguments: so the cotangent
of a load is a tile value, which a kernel reduces to the kind of the load before anything is written.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.extend import core
from jax.typing import DTypeLike

from pallas_kernels.program.evaluate import ELEMENTWISE, substitute, without_accuracy
from pallas_kernels.program.ir import Axes, Graph, Node, reachable
from pallas_kernels.program.rules import random_bits
from pallas_kernels.program.rules.primitive_rules import RULES, Value, choose, element, entry, load, polynomial, split
from pallas_kernels.program.rules.views import NotOnTile, Scalars, View, scalars
from pallas_kernels.types import Params, aval_of

MAX_STEPS = 64  # of an unrolled loop
CALLS = frozenset({"jit", "pjit", "closed_call", "eval_jaxpr", "checkpoint", "remat", "remat2", "core_call"})
RULED = frozenset({"call_hi_primitive", "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"})
# Identities, whose derivative is the identity too.
IDENTITIES = frozenset({"copy", "copy_p", "optimization_barrier", "pvary", "pcast", "name", "sharding_constraint"})
# Primitives whose rules in `primitive_rules` have other derivatives at ties than JAX's.
_TIES = frozenset({"clamp", "cummax", "cummin", "reduce_max", "reduce_min"})


@dataclasses.dataclass(frozen=True)
class IndexRanges:
    """Ranges of the indices: batch, query heads, queries, keys."""

    B: int
    Hq: int
    T: int
    S: int
    # whether the rows of a tile belong to several heads: then the head is a row value, as the query is
    heads_in_rows: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """The tile program of a mod."""

    graph: Graph  # owner of the nodes
    arguments: tuple[Node, ...]  # ``(score,) b, h, q, k``
    output: Node  # the score, or the boolean

    @functools.cached_property
    def nodes(self) -> list[Node]:
        """All nodes that the output needs, inputs first."""
        return reachable([self.output])

    def argument(self, name: str) -> Node:
        """The node of ``score``, ``b``, ``h``, ``q`` or ``k``."""
        return next(node for node in self.arguments if node.value == name)

    @property
    def loads(self) -> list[Node]:
        """The loads from captured arrays."""
        return [node for node in self.nodes if node.op == "load"]


@dataclasses.dataclass(frozen=True, eq=False)
class Derivative:
    """The derivative of a score program."""

    program: Program
    cotangent: Node  # the argument: cotangent of the program's output
    d_score: Node  # cotangent of the score
    d_loads: dict[Node, Node]  # cotangent of each load of a captured array with a requested gradient, float32

    @functools.cached_property
    def nodes(self) -> list[Node]:
        """All nodes that program and derivative need."""
        return reachable([self.program.output, self.d_score, *self.d_loads.values()])


def trace_program(
    jaxpr: core.ClosedJaxpr, operands: Sequence[tuple[tuple[int, ...], str]], sizes: IndexRanges
) -> Program:
    """Builds the tile program of a mod, whose jaxpr takes ``(score,) b, h, q, k, *operands``.

    Raises:
      NotOnTile: A primitive has no meaning on a tile.
    """
    graph, head_kind = Graph(), Axes.ROW if sizes.heads_in_rows else Axes.UNIFORM
    arguments = [
        graph.input(name, kind, np.int32, (0, max(size - 1, 0)))
        for name, kind, size in (
            ("b", Axes.UNIFORM, sizes.B),
            ("h", head_kind, sizes.Hq),
            ("q", Axes.ROW, sizes.T),
            ("k", Axes.COLUMN, sizes.S),
        )
    ]
    opened, consts = open_jaxpr(jaxpr)
    if len(opened.invars) - len(operands) == 5:
        arguments.insert(0, graph.input("score", Axes.TILE, np.float32))
    views = [View.whole(graph, i, shape, dtype) for i, (shape, dtype) in enumerate(operands)]
    ins = [*(box(node) for node in arguments), *views]
    [out] = Run(graph).jaxpr(opened, consts, ins)
    return Program(graph, tuple(arguments), element(graph, out))


def differentiate(program: Program, requested: Sequence[bool]) -> Derivative:
    """Builds the derivative with respect to the score and the loads of requested captured arrays.

    Raises:
      NotOnTile: A primitive of the derivative has no meaning on a tile.
    """
    graph, every = program.graph, all_loads(program)
    loads = [n for n in every if jnp.issubdtype(n.dtype, jnp.floating) and requested[n.value]]

    def pulled(cotangent, *arguments_and_loads):
        arguments, values = arguments_and_loads[:5], arguments_and_loads[5:]
        others = dict(zip((*program.arguments[1:], *remaining), (*arguments[1:], *values[len(loads) :]), strict=True))
        moving = (program.arguments[0], *loads)
        f = lambda *xs: evaluate_scalars(program, others | dict(zip(moving, xs, strict=True)))
        return jax.vjp(f, arguments[0], *values[: len(loads)])[1](cotangent)

    remaining = [n for n in every if n not in loads]
    ct = graph.input("cotangent", Axes.TILE, np.float32)
    exact = [graph.cast(n, np.float32) for n in loads]  # 16-bit loads: cotangents are summed before they are rounded
    ins = [ct, *program.arguments, *exact, *remaining]
    try:
        jaxpr, consts = open_jaxpr(jax.make_jaxpr(pulled)(*(jax.ShapeDtypeStruct((), n.dtype) for n in ins)))
    except NotImplementedError as error:  # JAX itself has no derivative of `nextafter`, say
        raise NotOnTile(f"JAX cannot differentiate it: {error}") from error
    d_score, *d_loads = (element(graph, x) for x in Run(graph).jaxpr(jaxpr, consts, [box(n) for n in ins]))
    return Derivative(program, ct, d_score, dict(zip(loads, d_loads, strict=True)))


def box(node: Node) -> Scalars:
    """An array of one node, without axes."""
    return scalars((), lambda _: node)


def _stopped(graph: Graph, x: Scalars) -> Scalars:
    return scalars(x.shape, lambda i: graph.stop_gradient(x[i]))


@dataclasses.dataclass(frozen=True, eq=False)
class _Call:
    """A call with a custom derivative rule, with its equation in the jaxpr."""

    eqn: core.JaxprEqn
    inputs: tuple[Scalars, ...]


class Run:
    """Interprets jaxprs on nodes, or arrays of few nodes."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    def jaxpr(self, jaxpr: core.Jaxpr, consts: Sequence[npt.ArrayLike], args: Sequence[Value]) -> Sequence[Value]:
        """Values of the outputs."""
        env: dict[core.Var, Value] = dict(zip(jaxpr.constvars, map(self._literal, consts), strict=True))
        env |= dict(zip(jaxpr.invars, args, strict=True))

        def read(v: core.Var | core.Literal) -> Value:
            if isinstance(v, core.Literal):
                return self._literal(v.val, aval_of(v).dtype)
            return env[v]

        for eqn in jaxpr.eqns:
            env.update(zip(eqn.outvars, self._equation(eqn, [read(v) for v in eqn.invars]), strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _literal(self, value: npt.ArrayLike, dtype: DTypeLike | None = None) -> Scalars:
        value = np.asarray(value)
        return scalars(value.shape, lambda i: self.graph.literal(value[i], dtype or value.dtype))

    def _equation(self, eqn: core.JaxprEqn, ins: list[Value]) -> Sequence[Value]:
        name = eqn.primitive.name
        if name in IDENTITIES:
            return ins[: len(eqn.outvars)]
        if name == "stop_gradient":
            return [x.stop_gradient() if isinstance(x, View) else _stopped(self.graph, x) for x in ins]
        if name in CALLS:
            return self._division(eqn, ins) or self.jaxpr(*body_of(eqn), ins)
        if name in RULED:
            return self._differentiated_as(eqn, ins, self.jaxpr(*body_of(eqn), ins))
        if name == "scan":
            return self._scan(eqn, ins)
        makes_keys = any(jnp.issubdtype(aval_of(v).dtype, jax.dtypes.prng_key) for v in eqn.outvars)
        if name in random_bits.RULES or makes_keys:
            loaded = [load(self.graph, x) for x in ins]
            inline = lambda closed, args: [load(self.graph, x) for x in self.jaxpr(*open_jaxpr(closed), args)]
            if (bits := random_bits.apply(eqn, loaded, inline)) is not None:
                return bits
        if name == "cond":
            return self._cond(eqn, ins)
        if name == "unstack":
            return [entry(self.graph, ins[0], eqn.params["axis"], i) for i in range(len(eqn.outvars))]
        if name == "split":
            return split(self.graph, ins[0], eqn.params["axis"], eqn.params["sizes"])
        if name in RULES:
            outs = [RULES[name](self.graph, ins, eqn.params, tuple(aval_of(eqn.outvars[0]).shape))]
            return self._differentiated_as(eqn, ins, outs) if name in _TIES else outs
        if name in ELEMENTWISE:
            return [self._elementwise(eqn, ins)]
        hint = " (a loop whose number of steps is not fixed)" if name == "while" else ""
        raise NotOnTile(f"primitive `{name}`{hint} has no meaning on a tile")

    def _elementwise(self, eqn: core.JaxprEqn, ins: list[Value]) -> Scalars:
        shape, function = tuple(aval_of(eqn.outvars[0]).shape), self.elementwise(eqn)
        values = [np.broadcast_to(load(self.graph, x), shape) for x in ins]
        return scalars(shape, lambda i: function([v[i] for v in values]))  # pyright: ignore[reportArgumentType]

    def elementwise(self, eqn: core.JaxprEqn) -> Callable[[Sequence[Node]], Node]:
        """An elementwise primitive, as a function of one element of each input."""
        graph, primitive, params = self.graph, eqn.primitive, without_accuracy(eqn.params)
        dtype = aval_of(eqn.outvars[0]).dtype
        bind_params = primitive.get_bind_params(params)
        apply = lambda *xs: primitive.bind(*xs, **bind_params)
        formula = substitute(primitive.name, params, [aval_of(v).dtype for v in eqn.invars])
        if primitive.name == "convert_element_type":
            return lambda ins: graph.cast(ins[0], dtype)
        if primitive.name == "add_any":
            return lambda ins: graph.same_dtype("add", jax.lax.add, *ins)
        if primitive.name == "polynomial":
            return lambda ins: self._called(eqn, ins, polynomial(graph, *ins))
        key = tuple(sorted((k, str(v)) for k, v in params.items() if v is not None))
        if formula is None:
            return lambda ins: graph.apply(primitive.name, apply, ins, dtype, key)
        return lambda ins: self._formula(eqn, formula, ins, dtype)

    def _formula(
        self, eqn: core.JaxprEqn, formula: Callable[..., jax.Array], ins: Sequence[Node], dtype: np.dtype
    ) -> Node:
        """Evaluates a primitive by a substitute formula, and differentiates the primitive itself."""
        exact = [self.graph.cast(n, np.float32) for n in ins]
        jaxpr, consts = open_jaxpr(jax.make_jaxpr(formula)(*(jax.ShapeDtypeStruct((), np.float32) for _ in ins)))
        [out] = self.jaxpr(jaxpr, consts, [box(n) for n in exact])
        return self._called(eqn, ins, self.graph.cast(element(self.graph, out), dtype))

    def _called(self, eqn: core.JaxprEqn, ins: Sequence[Node], out: Node) -> Node:
        return self.graph.call(out, _Call(eqn, tuple(map(box, ins))), 0)

    def _division(self, eqn: core.JaxprEqn, ins: list[Value]) -> Sequence[Value] | None:
        """``//`` and ``%`` of non-negative integers, which need no correction of the sign."""
        op = {"floor_divide": "div", "remainder": "rem"}.get(eqn.params.get("name", ""))
        if op is None or len(ins) != 2 or any(isinstance(x, View) or x.shape != () for x in ins):
            return None
        dtype = aval_of(eqn.outvars[0]).dtype
        a, b = (self.graph.cast(element(self.graph, x), dtype) for x in ins)
        if a.bounds is None or b.bounds is None or a.bounds[0] < 0 or b.bounds[0] <= 0 or dtype.kind not in "iu":
            return None
        reference = jax.make_jaxpr(jnp.floor_divide if op == "div" else jnp.remainder)(*(v.aval for v in eqn.invars))
        if str(open_jaxpr(reference)[0].eqns[0].params["jaxpr"]) != str(eqn.params["jaxpr"]):
            return None  # a user's function of that name
        return [box(self.graph.same_dtype(op, getattr(jax.lax, op), a, b))]

    def _differentiated_as(self, eqn: core.JaxprEqn, ins: list[Value], outs: Sequence[Value]) -> Sequence[Value]:
        """Values that were computed as `outs`, with the derivative of the equation itself."""
        graph = self.graph
        outs = [load(graph, x) for x in outs]
        if not any(jnp.issubdtype(aval_of(v).dtype, jnp.floating) for v in eqn.outvars):
            return outs
        call = _Call(eqn, tuple(load(graph, x) for x in ins))
        index = iter(range(1 << 30))
        return [scalars(x.shape, lambda i, x=x: graph.call(x[i], call, next(index))) for x in outs]

    def _cond(self, eqn: core.JaxprEqn, ins: list[Value]) -> Sequence[Value]:
        graph, (which, *operands) = self.graph, ins
        index = element(graph, which)
        branches = [
            [load(graph, x) for x in self.jaxpr(*open_jaxpr(branch), operands)] for branch in eqn.params["branches"]
        ]
        return [
            scalars(outs[0].shape, lambda i, outs=outs: choose(graph, index, [x[i] for x in outs]))
            for outs in zip(*branches, strict=True)
        ]

    def _scan(self, eqn: core.JaxprEqn, ins: list[Value]) -> Sequence[Value]:
        graph, params = self.graph, eqn.params
        length = params["length"]
        if length > MAX_STEPS:
            raise NotOnTile(f"primitive `scan` with {length} steps: loops are unrolled, up to {MAX_STEPS} steps")
        num_consts, num_carry = scan_layout(params)
        consts, carry, xs = ins[:num_consts], ins[num_consts : num_consts + num_carry], ins[num_consts + num_carry :]
        jaxpr, closed = open_jaxpr(params["jaxpr"])
        stacked: list[list[Scalars]] = []
        for step in reversed(range(length)) if params["reverse"] else range(length):
            outs = self.jaxpr(jaxpr, closed, [*consts, *carry, *(entry(graph, x, 0, step) for x in xs)])
            carry = outs[:num_carry]
            stacked.append([load(graph, x) for x in outs[num_carry:]])
        stacked = stacked[::-1] if params["reverse"] else stacked
        empty = [np.empty((0, *aval_of(v).shape[1:]), object) for v in eqn.outvars[num_carry:]]
        return [*carry, *([np.stack(ys) for ys in zip(*stacked, strict=True)] if stacked else empty)]


def all_loads(program: Program) -> list[Node]:
    """The loads of a program and of its derivatives: a function with a rule of its own may load more for it."""
    return list(dict.fromkeys((*program.loads, *(n for n in _needed(program.output) if n.op == "load"))))


def evaluate_scalars(program: Program, values: Mapping[Node, jax.Array]) -> jax.Array:
    """Evaluates a program on scalars as plain JAX, with its own derivative rules; for `jax.vjp` and `jax.jvp`.

    The values are of its arguments and loads.
    """
    env: dict[Node, jax.Array] = {}
    called: dict[_Call, list[jax.Array]] = {}
    for node in _needed(program.output):
        if node in values:
            env[node] = values[node]
        elif node.op == "literal":
            env[node] = jnp.asarray(node.value)
        elif node.op == "call":
            call, index = node.value
            if call not in called:
                called[call] = _bind_call(call, env)
            env[node] = called[call][index]
        else:
            assert node.apply is not None  # all that is left are primitives
            env[node] = node.apply(*(_as_used(node, n, env[n]) for n in node.inputs))
    return env[program.output]


def _as_used(user: Node, used: Node, x: jax.Array) -> jax.Array:
    """16-bit loads are passed as float32: a cast to float32 uses them as they are, all other users round them."""
    return x if user.op == "convert_element_type" or x.dtype == used.dtype else x.astype(used.dtype)


def _bind_call(call: _Call, env: dict[Node, jax.Array]) -> list[jax.Array]:
    values = []
    for nodes in call.inputs:
        flat = [env[n].astype(n.dtype) for n in nodes.ravel()]
        values.append(flat[0] if nodes.shape == () else jnp.stack(flat).reshape(nodes.shape))
    primitive = call.eqn.primitive
    outs = primitive.bind(*values, **primitive.get_bind_params(call.eqn.params))
    flat = [out.reshape(-1) for out in (outs if primitive.multiple_results else [outs])]
    return [x[i] for x in flat for i in range(x.size)]


def _needed(output: Node) -> list[Node]:
    """Reachable nodes, like `reachable`, but through the inputs of calls rather than through their inlined bodies."""
    called = lambda node: (n for nodes in node.value[0].inputs for n in nodes.ravel())
    return reachable([output], lambda node: called(node) if node.op == "call" else node.inputs)


def open_jaxpr(x: core.ClosedJaxpr | core.Jaxpr) -> tuple[core.Jaxpr, tuple[npt.ArrayLike, ...]]:
    """Opens a ``ClosedJaxpr`` (JAX <= 0.10) or a ``Jaxpr`` with constants (JAX >= 0.11)."""
    return getattr(x, "jaxpr", x), tuple(getattr(x, "consts", ()))  # pyright: ignore[reportReturnType]  (by version)


def body_of(eqn: core.JaxprEqn) -> tuple[core.Jaxpr, tuple[npt.ArrayLike, ...]]:
    """The jaxpr that a call inlines, and its constants."""
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if key in eqn.params:
            return open_jaxpr(eqn.params[key])
    if "_prim" in eqn.params:  # JAX >= 0.12: `jnp.ldexp`
        called = eqn.params["_prim"]
        expand = lambda *xs: jax.tree.leaves(called.expand(*jax.tree.unflatten(called.in_tree, xs)))
        return open_jaxpr(jax.make_jaxpr(expand)(*(aval_of(v) for v in eqn.invars)))
    raise NotOnTile(f"primitive `{eqn.primitive.name}` has no meaning on a tile")


def scan_layout(params: Params) -> tuple[int, int]:
    """Number of constant and of carried inputs of a `scan`."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, *_ = (len(group) for group in params["ft_in"].unpack())  # JAX >= 0.11
    return consts, carry

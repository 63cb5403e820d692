"""The lines of a kernel: one named value for each equation, with its dtype and shape behind it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeAlias

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.typing import DTypeLike

from pallas_kernels.triton.compiler.emit.dialect import Dialect
from pallas_kernels.triton.compiler.emit.text import Value, number_of
from pallas_kernels.types import aval_of

_MAX_PROGRAMS_YZ = 65535  # of the second and third axis of a grid of CUDA
_CALLS = ("jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")

Rule: TypeAlias = "Callable[[Emitter, JaxprEqn, list[Value]], list[Value]]"
"""Emits an equation: from the emitter, the equation and the values of its operands to those of its outputs."""


class UnknownPrimitiveError(Exception):
    """A primitive has no rule, or a form that its rule does not know."""


class Emitter:
    """The lines of a kernel so far, by rules of primitives; the kernel knows the grid as `grid`."""

    def __init__(
        self, dialect: Dialect, rules: Mapping[str, Rule], grid: tuple[int, ...] = (), names: Collection[str] = ()
    ) -> None:
        self.dialect, self.rules, self.grid = dialect, rules, grid
        self.lines: list[str] = []
        self.loads: dict[Var, tuple[int, str]] = {}  # line and pointers of each: what `jflex_mask_load` must know
        self.masks: dict[Var, Value] = {}  # of values that are stored next
        self._depth, self._counts, self._taken = 1, {}, set(names)

    def block(self, jaxpr: Jaxpr, args: Sequence[Value]) -> list[Value]:
        """Emits equations, and gives the values of the outputs."""
        values: dict[Var, Value] = dict(zip(jaxpr.invars, args, strict=True))
        read = lambda v: number_of(v.val, aval_of(v).dtype) if isinstance(v, Literal) else values[v]
        for eqn in jaxpr.eqns:
            outs = self._equation(eqn, [read(v) for v in eqn.invars])
            values.update(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _equation(self, eqn: JaxprEqn, ins: list[Value]) -> list[Value]:
        name = eqn.primitive.name
        if name in _CALLS:
            inner = next(eqn.params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in eqn.params)
            return self.block(getattr(inner, "jaxpr", inner), ins)
        if name not in self.rules:
            raise UnknownPrimitiveError(f"the primitive `{name}`")
        return self.rules[name](self, eqn, ins)

    # --- lines

    def put(self, line: str) -> None:
        """Adds a line."""
        self.lines.append("    " * self._depth + line)

    def name(self, hint: str) -> str:
        """A name that is not taken."""
        for n in itertools.count(self._counts.get(hint, 0)):
            if (name := f"{hint}_{n}") not in self._taken:
                self._counts[hint] = n + 1
                return name
        raise AssertionError

    def let(self, hint: str, expression: str, shape: tuple[int, ...], dtype: np.dtype) -> Value:
        """Gives an expression a name."""
        value = Value(self.name(hint), shape, dtype)
        self.put(f"{value.text} = {expression}  # {described(shape, dtype)}")
        return value

    def out(self, eqn: JaxprEqn, expression: str, hint: str = "") -> list[Value]:
        """Names the one output of an equation."""
        aval = aval_of(eqn.outvars[0])
        return [self.let(hint or eqn.primitive.name, expression, aval.shape, np.dtype(aval.dtype))]

    def body(self, emit_body: Callable[[], None]) -> None:
        """Emits the indented body of a loop or a branch."""
        self._depth += 1
        before = len(self.lines)
        emit_body()
        if len(self.lines) == before:
            self.put("pass")
        self._depth -= 1

    def tensor(self, value: Value) -> str:
        """A value that has its dtype and shape in Triton too, where a number has none."""
        dtype = self.dialect.dtype(value.dtype)
        return f"tl.full((), {value.text}, {dtype})" if value.is_number else value.text

    # --- the grid

    def program_id(self, axis: int) -> Value:
        """The index of the program along an axis of the grid."""
        if not self._is_flat:
            return self.let("program", f"tl.program_id({axis})", (), np.dtype("int32"))
        order = self._order()
        before = math.prod(self.grid[i] for i in order[: order.index(axis)])
        return self.let("program", f"tl.program_id(0) // {before} % {self.grid[axis]}", (), np.dtype("int32"))

    @property
    def launch_grid(self) -> tuple[int, int, int]:
        """The grid as it is launched, of three axes."""
        if self._is_flat:
            return math.prod(self.grid), 1, 1
        x, y, z = (*self.grid, 1, 1, 1)[:3]
        return x, y, z

    @property
    def _is_flat(self) -> bool:
        return len(self.grid) > 3 or any(n > _MAX_PROGRAMS_YZ for n in self.grid[1:])

    def _order(self) -> list[int]:
        """Axes of a flat grid, fastest first. `jax.vmap` puts its axes in front; they come last here."""
        batched = max(0, len(self.grid) - 3)
        return [*range(batched, len(self.grid)), *range(batched)]


def described(shape: Sequence[int], dtype: DTypeLike) -> str:
    """Dtype and shape, as jaxprs write them: ``float32[64, 128]``."""
    return f"{np.dtype(dtype).name}[{', '.join(map(str, shape))}]"

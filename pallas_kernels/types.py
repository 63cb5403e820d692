"""Types of what kernels handle: refs, and scalars that a trace may know."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypeVar, cast

import jax
import numpy as np
from jax.core import ShapedArray
from jax.extend import core

if TYPE_CHECKING:
    from types import EllipsisType

    from jax.experimental.pallas import Slice
    from jax.ref import AbstractRef

    class _JaxRef(AbstractRef, jax.Ref): ...
else:
    _JaxRef = object

A = TypeVar("A")  # arrays, or refs to them in a kernel
S = TypeVar("S")  # what a loop carries

Index: TypeAlias = int | jax.Array
"""An int32 scalar: a batch entry, a head, a token, a tile."""

Axis: TypeAlias = "int | jax.Array | slice | Slice | EllipsisType | None"
"""What indexes one axis of a ref."""

Location: TypeAlias = tuple[jax.Array, jax.Array, jax.Array]
"""Batch, head, and number of a tile."""

RegisterLayout: TypeAlias = Any
"""How a warp group holds an array in registers; JAX's own type of it, `SomeLayout`, is private."""

Accumulator: TypeAlias = Any
"""A ref to a wgmma accumulator; JAX's own type of it is private."""

Step: TypeAlias = Callable[[S, Index, bool], S]
"""A mainloop step: from the state, the first index of a tile, and whether it is partial, to the new state."""

Params: TypeAlias = Mapping[str, Any]
"""The parameters of an equation of a jaxpr, to which JAX gives no types."""


Role = Literal["score", "mask", "key", "value"]


class Mod(Protocol):
    """A traced mod: static, hashable, equal to those of the same program and the same shapes.

    Attributes:
      role: ``"score"``, ``"mask"``, ``"key"`` or ``"value"``.
      fingerprint: The program as text; what equality compares.
      operands: Shape and dtype of each captured array.
      jaxpr: Takes ``(score,) b, h, q_idx, kv_idx`` and the captured arrays, and returns one scalar; of a key or a value
        mod ``vector, b, h_kv, kv_idx`` and the captured arrays, and returns a vector like the one it takes.
      source: The user's function, for messages; equal mods may come from different ones.
      limits: Of a mask, the number of the first of four captured arrays that the program does not read: the two of
        `row_limits.RowLimits`, then the orders in which rows and columns of blocks are started; None without.
    """

    @property
    def role(self) -> Role: ...  # noqa: D102
    @property
    def fingerprint(self) -> str: ...  # noqa: D102
    @property
    def operands(self) -> tuple[tuple[tuple[int, ...], str], ...]: ...  # noqa: D102
    @property
    def jaxpr(self) -> core.ClosedJaxpr: ...  # noqa: D102
    @property
    def source(self) -> str: ...  # noqa: D102
    @property
    def limits(self) -> int | None: ...  # noqa: D102
    def __call__(self, operands: Sequence[jax.Array], *arguments: jax.Array) -> jax.Array: ...  # noqa: D102


class ScoreShape(Protocol):
    """The shape of the scores of a call: batch, query heads, queries, keys."""

    @property
    def B(self) -> int: ...  # noqa: D102
    @property
    def Hq(self) -> int: ...  # noqa: D102
    @property
    def T(self) -> int: ...  # noqa: D102
    @property
    def S(self) -> int: ...  # noqa: D102


class Ref(_JaxRef):
    """A reference to an array in the memory of the device, as a Pallas kernel gets it; for type checkers alone.

    JAX annotates what takes one by `AbstractRef`, its type in a trace, or by `jax.Ref`. They declare nothing of what a
    kernel does with it.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...  # noqa: D102
    @property
    def dtype(self) -> np.dtype: ...  # noqa: D102
    @property
    def at(self) -> _RefIndexer: ...  # noqa: D102
    @property
    def T(self) -> Ref: ...  # noqa: D102
    def __getitem__(self, index: Axis | tuple[Axis, ...], /) -> jax.Array: ...
    def __setitem__(self, index: Axis | tuple[Axis, ...], value: jax.typing.ArrayLike, /) -> None: ...


class _RefIndexer(Protocol):
    def __getitem__(self, index: Axis | tuple[Axis, ...], /) -> Ref: ...


aval_of = cast("Callable[[core.Var | core.Literal], ShapedArray]", operator.attrgetter("aval"))
"""Shape and dtype of a variable of a jaxpr, which JAX declares without them."""

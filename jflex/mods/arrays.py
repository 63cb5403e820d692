"""The arrays of ready mods: their checks, and their evaluation inside ``jit``."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable
from typing import Literal, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike, DTypeLike

from jflex._mesh import as_known

P = ParamSpec("P")
R = TypeVar("R")

_KINDS: dict[str, tuple[DTypeLike, str]] = {
    "integers": (jnp.integer, "Cast with `.astype(jnp.int32)`."),
    "booleans": (jnp.bool_, "Compare, as in `x > 0`, or cast with `.astype(bool)`."),
    "floating-point": (jnp.floating, "Cast with `.astype(jnp.float32)`."),
}


def compile_time(*captures: object) -> contextlib.AbstractContextManager[object]:
    """Returns a context that evaluates operations at once, also while tracing, unless a capture is traced."""
    return as_known(not any(isinstance(x, Tracer) for x in jax.tree.leaves(captures)))


def at_compile_time(factory: Callable[P, R]) -> Callable[P, R]:
    """Decorates a factory of arrays for ready mods: inside ``jit`` too, they are tracers only if it gets tracers.

    >>> numbers = at_compile_time(lambda heads: jnp.arange(heads))
    >>> jax.jit(lambda: print(numbers(4)))()
    [0 1 2 3]
    """

    @functools.wraps(factory)
    def evaluate(*args: P.args, **kwargs: P.kwargs) -> R:
        with compile_time(args, kwargs):
            return factory(*args, **kwargs)

    return evaluate


def checked_array(
    x: ArrayLike, argument: str, kind: Literal["integers", "booleans", "floating-point"], axes: str | None = None
) -> jax.Array:
    """An argument of a ready mod as an array.

    >>> checked_array([3, 4], "`kv_lengths` of `padding`", "integers", "[B]").tolist()
    [3, 4]
    """
    array = jnp.asarray(x)
    dtype, remedy = _KINDS[kind]
    if not jnp.issubdtype(array.dtype, dtype):
        got = f"{array.dtype}[{','.join(map(str, array.shape))}]"
        raise TypeError(f"{argument} must be {kind}. Got {got}. {remedy}")
    if axes is not None and array.ndim != axes.count(",") + 1:
        raise ValueError(f"{argument} must be {axes}. Got shape {array.shape}.")
    return array


def known_count(x: object) -> int | None:
    """A count that is part of the program, as an int; None for an array, whose value may change."""
    return operator.index(x) if isinstance(x, int | np.integer) else None

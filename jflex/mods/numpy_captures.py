"""Mods that capture arrays which a trace refuses: of numpy, or of the explicit mesh of an enclosing `jax.shard_map`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from jflex._mesh import replicated

_R = TypeVar("_R")
_NUMBERS = "biufc"  # kinds of dtypes that JAX has


def indexable(mod: Callable[..., _R]) -> Callable[..., _R]:
    """The mod with captured numpy arrays, and arrays of an explicit mesh, that tracers may index.

    These are the arrays in closures, globals, defaults and arguments of `functools.partial`, also inside of tuples,
    lists, dicts and mods of jflex, and of functions that the mod calls by name. Attributes of other objects stay.
    """
    return _Conversion()(mod)


class _Indexable(np.ndarray):
    """A numpy array that a traced index reads as a JAX array."""

    def __getitem__(self, index: Any) -> ArrayLike:
        if any(isinstance(x, Tracer) for x in jax.tree.leaves(index)):
            return jnp.asarray(np.asarray(self))[index]
        return super().__getitem__(index)


class _Conversion:
    """Copies functions and containers, with arrays that tracers may index in place of numpy arrays."""

    def __init__(self) -> None:
        self._copies: dict[int, types.FunctionType] = {}

    def __call__(self, x: object) -> Any:
        """Converts an array, a function or a container; returns anything else as it is."""
        x = replicated(x) if isinstance(x, jax.Array) else x
        if isinstance(x, np.ndarray) and x.dtype.kind in _NUMBERS:
            return x.view(_Indexable)
        if isinstance(x, types.FunctionType):
            return self._function(x)
        if isinstance(x, types.MethodType):
            return types.MethodType(self(x.__func__), self(x.__self__))
        if isinstance(x, functools.partial):
            return functools.partial(self(x.func), *self(x.args), **self(x.keywords))
        if type(x) is dict:
            return {key: self(value) for key, value in x.items()}
        if type(x) is tuple or type(x) is list:
            return tuple(map(self, x)) if type(x) is tuple else [*map(self, x)]
        if dataclasses.is_dataclass(x) and not isinstance(x, type) and type(x).__module__.startswith("jflex."):
            return dataclasses.replace(x, **{f.name: self(getattr(x, f.name)) for f in dataclasses.fields(x) if f.init})
        return x

    def _function(self, x: types.FunctionType) -> types.FunctionType:
        if (x.__module__ or "").partition(".")[0] in ("jax", "numpy"):
            return x
        if id(x) not in self._copies:
            cells, names = tuple(types.CellType() for _ in x.__closure__ or ()), dict(x.__globals__)
            copy = self._copies[id(x)] = types.FunctionType(x.__code__, names, x.__name__, None, cells)
            for cell, new in zip(x.__closure__ or (), cells, strict=True):
                with contextlib.suppress(ValueError):  # a name that has no value yet
                    new.cell_contents = self(cell.cell_contents)
            names.update({name: self(names[name]) for name in _names(x.__code__) if name in names})
            copy.__defaults__, copy.__kwdefaults__ = self(x.__defaults__), self(x.__kwdefaults__)
        return self._copies[id(x)]


def _names(code: types.CodeType) -> Iterator[str]:
    """The global names of a function, and of those inside of it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)

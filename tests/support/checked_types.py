"""Public functions whose annotations are checked at each call, shapes and dtypes too; only tests pay for that."""

from __future__ import annotations

import contextlib
import inspect
import pkgutil
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import beartype
import jaxtyping

import flax_layers.functional
import flax_layers.nnx
import jflex

# Every element of a container, and not one at random, as beartype has it.
_CHECKER = beartype.beartype(conf=beartype.BeartypeConf(strategy=beartype.BeartypeStrategy.On))
# Dataclasses are not made under a check: JAX makes pytrees of anything, of None, strings or its own markers.
_SKIPPED = frozenset({"tree_flatten", "tree_unflatten"})
NAMESPACES = (jflex, jflex.masks, jflex.scores, jflex.paged, jflex.rotary, flax_layers.functional, flax_layers.nnx)


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that raises `jaxtyping.TypeCheckError` where its annotations are not true."""
    return jaxtyping.jaxtyped(inspect.unwrap(function), typechecker=_CHECKER)


def public() -> dict[str, Any]:
    """What users import: functions, and classes that have methods."""
    return {
        f"{space.__name__}.{name}": x
        for space in NAMESPACES
        for name, x in vars(space).items()
        if not name.startswith("_") and getattr(x, "__module__", "").startswith(("jflex", "flax_layers"))
        and (inspect.isfunction(x) or inspect.isclass(x))
    }  # fmt: skip


def methods(cls: type) -> dict[str, Any]:
    """The public methods that a class itself defines, and calls of its objects; as its dictionary holds them."""
    wanted = lambda name: name == "__call__" or not (name.startswith("_") or name in _SKIPPED)
    kinds = (types.FunctionType, classmethod, staticmethod)
    return {name: x for name, x in vars(cls).items() if wanted(name) and isinstance(x, kinds)}


@contextlib.contextmanager
def all_checked() -> Iterator[None]:
    """Checks all public functions and methods, wherever a module of the packages or of the tests has them."""
    with contextlib.ExitStack() as undo:
        swap = lambda owner, name, new: _swap(undo, owner, name, new)
        for package in (jflex, flax_layers):
            for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
                if not found.name.endswith("__main__"):
                    __import__(found.name)
        modules = [m for name, m in sys.modules.items() if name.partition(".")[0] in ("jflex", "flax_layers", "tests")]
        for x in set(public().values()):
            if inspect.isclass(x):
                for name, method in methods(x).items():
                    swap(x, name, _checked_method(method))
                continue
            new = checked(x)
            for module in modules:
                for name in [name for name, value in vars(module).items() if value is x]:
                    swap(module, name, new)
        yield


def _checked_method(method: Any) -> Any:
    if isinstance(method, classmethod | staticmethod):
        return type(method)(checked(method.__func__))
    return checked(method)


def _swap(undo: contextlib.ExitStack, owner: Any, name: str, new: Any) -> None:
    undo.callback(setattr, owner, name, vars(owner)[name])
    setattr(owner, name, new)

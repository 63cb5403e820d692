"""Mods while Flax captures intermediate values, which would be tracers of the trace in which jflex reads a mod."""

import functools
from collections.abc import Callable
from typing import TypeVar, cast

from flax import linen, nnx

from flax_layers.attention.mods import captures

Mod = TypeVar("Mod", bound=Callable[..., object] | None)


class _Nothing(linen.Module):
    """The module of an `apply` that captures no outputs."""


def without_capture(mod: Mod) -> Mod:
    """The mod, whose outputs neither `capture_intermediates` of linen nor `nnx.capture` keeps.

    Outside of these it is the mod itself.

    Example:
        >>> from flax_layers.nnx import AlibiBias
        >>> bias = AlibiBias(4, rngs=nnx.Rngs(0))
        >>> without_capture(bias) is bias
        True
    """
    if mod is None:
        return mod
    reachable = list(captures(mod))
    bound = (x for x in reachable if isinstance(x, linen.Module) and x.scope is not None)
    if any(module.is_mutable_collection("intermediates") for module in bound):
        uncaptured = linen.apply(lambda _, *arguments: mod(*arguments), _Nothing(parent=None))
        return cast(Mod, functools.update_wrapper(functools.partial(uncaptured, {}), mod, updated=()))
    inner = (module for x in reachable if isinstance(x, nnx.Module) for _, module in nnx.iter_modules(x))
    if sowing := [module for module in inner if hasattr(module, "__captures__")]:  # inside of `nnx.capture`
        return cast(Mod, functools.update_wrapper(functools.partial(_call_unsown, sowing, mod), mod, updated=()))
    return mod


def _call_unsown(modules: list[nnx.Module], mod: Callable[..., object], *arguments: object) -> object:
    kept = [vars(module)["__captures__"] for module in modules]
    try:
        for module in modules:
            vars(module)["__captures__"] = ()  # `sow` finds nothing to write to
        return mod(*arguments)
    finally:
        for module, values in zip(modules, kept, strict=True):
            vars(module)["__captures__"] = values

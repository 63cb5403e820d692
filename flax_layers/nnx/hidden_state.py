"""Which mods a layer may keep from its constructor: those that hold no parameters behind the back of Flax."""

import dataclasses
import functools
import inspect
import types
from collections.abc import Iterator
from typing import TypeAlias

from flax import nnx

from jflex import MaskMod, ScoreMod

Mod: TypeAlias = ScoreMod | MaskMod
"""A `score_mod` or a `mask_mod`, as `jflex.flex_attention` takes them."""


def check_no_hidden_state(name: str, mod: Mod | None) -> None:
    """Refuses a mod that would read its parameters behind the back of Flax's transformations.

    Args:
        name: Of the argument, for the message.
        mod: What it was given.

    Raises:
        ValueError: The mod is no module, and reaches a module or a variable.

    Example:
        >>> def capped(cap):  # the function that it returns holds the parameter
        ...     return lambda score, b, h, q_idx, kv_idx: cap[...] * score
        >>> check_no_hidden_state("score_mod", capped(nnx.Param(0.5)))
        Traceback (most recent call last):
        ValueError: `score_mod` holds a Param, which a layer cannot keep from its constructor: ...
    """
    if mod is None or isinstance(mod, nnx.Module):
        return
    for value in _captures(mod):
        if isinstance(value, nnx.Module | nnx.Variable):
            raise ValueError(
                f"`{name}` holds a {type(value).__name__}, which a layer cannot keep from its constructor: inside "
                "nnx.jit and nnx.grad the function would read the parameters of the old module, and they would get no "
                f"gradients. Pass it to the call, `layer(inputs, {name}=...)`, or make it a callable nnx.Module."
            )


def _captures(mod: Mod) -> Iterator[object]:
    """What a function, a method or a `functools.partial` of one reaches: owner, arguments, closure, and so on down."""
    empty_cell = types.CellType()
    pending: list[object] = [mod]
    seen: set[int] = set()
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        yield value
        if isinstance(value, tuple | list):
            pending += value
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):  # what `jflex.and_masks` returns is one
            pending += vars(value).values()
        elif isinstance(value, functools.partial):
            pending += [value.func, *value.args, *value.keywords.values()]
        elif inspect.ismethod(value):
            pending += [value.__self__, value.__func__]
        elif inspect.isfunction(value):
            # A variable that is assigned after the function was made has an empty cell so far.
            pending += [cell.cell_contents for cell in value.__closure__ or () if cell != empty_cell]
            pending += value.__defaults__ or ()

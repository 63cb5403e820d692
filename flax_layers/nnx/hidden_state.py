"""Checks the mods of a constructor: a layer may keep only mods whose parameters Flax can see."""

from typing import TypeAlias

from flax import nnx

from flax_layers.captures import captures
from jflex import MaskMod, ScoreMod

Mod: TypeAlias = ScoreMod | MaskMod
"""A `score_mod` or a `mask_mod` of `jflex.flex_attention`."""


_REMEDY = "Pass it to the call, `layer(inputs, {name}=...)`, or make it a callable nnx.Module."


def check_no_hidden_state(name: str, mod: Mod | None, remedy: str = _REMEDY) -> None:
    """Refuses a mod whose parameters the transformations of Flax would not see.

    Args:
        name: Name of the argument, for the message.
        mod: The value of the argument.
        remedy: The end of the message.

    Raises:
        ValueError: The mod is not a module, and captures a module or a variable.

    Example:
        >>> def capped(cap):  # the function that it returns holds the parameter
        ...     return lambda score, b, h, q_idx, kv_idx: cap[...] * score
        >>> check_no_hidden_state("score_mod", capped(nnx.Param(0.5)))
        Traceback (most recent call last):
        ValueError: `score_mod` holds a Param, which a layer cannot keep from its constructor: ...
    """
    if mod is None or isinstance(mod, nnx.Module):
        return
    for value in captures(mod):
        if isinstance(value, nnx.Module | nnx.Variable):
            raise ValueError(
                f"`{name}` holds a {type(value).__name__}, which a layer cannot keep from its constructor: inside "
                "nnx.jit and nnx.grad the function would read the parameters of the old module, which get no "
                f"gradients. {remedy.format(name=name)}"
            )

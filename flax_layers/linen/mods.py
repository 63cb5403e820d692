"""Mods of linen layers that hold or create parameters."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import linen, nnx

from flax_layers.attention.captures import captures
from flax_layers.attention.layer_mods import Mods


def check_no_nnx_state(name: str, mod: Callable[..., Any] | None) -> None:
    """Refuses a mod with NNX parameters, which linen would treat as constants.

    Args:
        name: Name of the argument, for the message.
        mod: The value of the argument.

    Raises:
        ValueError: The mod captures a module or a variable of NNX.

    Example:
        >>> def capped(cap):  # the function that it returns holds the parameter
        ...     return lambda score, b, h, q_idx, kv_idx: cap[...] * score
        >>> check_no_nnx_state("score_mod", capped(nnx.Param(0.5)))
        Traceback (most recent call last):
        ValueError: `score_mod` holds a Param of flax.nnx, which gets no gradients in a linen module. ...
    """
    for value in () if mod is None else captures(mod):
        if isinstance(value, nnx.Module | nnx.Variable):
            raise ValueError(
                f"`{name}` holds a {type(value).__name__} of flax.nnx, which gets no gradients in a linen module. Make "
                "the mod a linen module, or have it capture what `self.param` returns."
            )


def with_parameters(name: str, mod: Any, example: tuple[Any, ...] | None = None) -> Any:
    """Creates the parameters of a mod, and returns it.

    jflex traces a mod separately. Parameters that linen creates inside that trace would leak as tracers. So during
    initialisation, a mod that captures a linen module is evaluated once before the trace.

    Args:
        name: Name of the argument, for the message.
        mod: A mod of the constructor or of the call, or None.
        example: Arguments of a vector mod.

    Returns:
        The same mod.

    Raises:
        ValueError: The mod is an unbound linen module.
    """
    if mod is None:
        return mod
    if isinstance(mod, linen.Module) and mod.scope is None:
        raise ValueError(
            f"`{name}` is an unbound linen module, {type(mod).__name__}: its parameters have no scope. "
            f"{'Pass it to the constructor of the layer, or create' if example is None else 'Create'} it in the module "
            "that calls the layer."
        )
    modules = [value for value in captures(mod) if isinstance(value, linen.Module) and value.scope is not None]
    if any(module.is_initializing() for module in modules):
        scores = [jnp.float32(0)] if name == "score_mod" else []
        mod(*(example or (*scores, *[jnp.int32(0)] * 4)))
    return mod


def mods_with_parameters(mods: Mods) -> Mods:
    """Creates the parameters of the mods of a call, and returns these.

    Args:
        mods: Of the constructor or of the call.

    Returns:
        The same mods.

    Raises:
        ValueError: One of them is an unbound linen module.
    """
    score_mod = with_parameters("score_mod", mods.score_mod)
    return mods._replace(score_mod=score_mod, mask_mod=with_parameters("mask_mod", mods.mask_mod))

"""Mods of linen layers that hold or create parameters."""

from collections.abc import Callable

import jax.numpy as jnp
from flax import linen, nnx
from flax.typing import Dtype
from jaxtyping import Array

import jflex
from flax_layers.attention.layer import Layer
from flax_layers.attention.mods import Mods, captures
from flax_layers.attention.selection import BlockSelection


class LinenLayer(Layer):
    """Attributes of a linen layer. linen wraps none of these methods, which are not of the class's own namespace."""

    dtype: Dtype | None
    param_dtype: Dtype

    def _mods(
        self,
        score_mod: jflex.ScoreMod | None,
        mask_mod: jflex.MaskMod | None,
        block_mask: jflex.BlockMask | BlockSelection | None = None,
    ) -> Mods:
        mods = super()._mods(score_mod, mask_mod, block_mask)
        for name in ("score_mod", "mask_mod"):
            create_parameters(name, getattr(mods, name))
        return mods

    def _compute_dtype(self) -> Dtype:
        return self.dtype or self.param_dtype


def check_no_nnx_state(name: str, mod: Callable[..., object] | None) -> None:
    """Raises ValueError for a mod with NNX parameters, which linen would treat as constants.

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


def create_parameters(name: str, mod: Callable[..., object] | None, example: tuple[Array, ...] | None = None) -> None:
    """Creates the parameters of a mod of the constructor or of the call.

    jflex traces a mod separately. Parameters that linen creates inside that trace would leak as tracers. So during
    initialization, a mod that captures a linen module is evaluated once before the trace: a vector mod with the
    `example` of its arguments.

    Raises:
        ValueError: The mod is an unbound linen module.
    """
    if mod is None:
        return
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

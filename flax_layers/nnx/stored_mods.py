"""Mods and masks as attributes of nnx modules: constants of the program, or variables where their values are traced."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

import jax.numpy as jnp
from flax import linen, nnx
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array

import jflex
from flax_layers.attention.constant_mask import ConstantMask, constant_mask
from flax_layers.attention.mods import captures
from jflex import MaskMod, ScoreMod
from jflex.mods.array_sizes import Requirement, SizedMod
from jflex.mods.trace import trace_mask_mod, trace_score_mod

Mod: TypeAlias = ScoreMod | MaskMod
"""A `score_mod` or a `mask_mod` of `jflex.flex_attention`."""

_REMEDY = "Pass it to the call, `layer(inputs, {name}=...)`, or make it a callable nnx.Module."
_TRACERS = {"score_mod": trace_score_mod, "mask_mod": trace_mask_mod}


class AttentionMask(nnx.Variable):
    """A BlockMask as a variable: its values are data, so that layers with other masks run the same program.

    A layer stores a mask of traced values so. Assign one, ``layer.block_mask = AttentionMask(mask)``, where the mask of
    a layer changes from step to step; a known mask that is assigned bare is a constant, and a new one compiles again.
    """


class CapturedArray(nnx.Variable):
    """A traced array that a mod captures."""


class HoistedMod(SizedMod, nnx.Module):
    """A mod whose captured arrays are variables, for layers that are constructed inside ``jit``.

    A closure over tracers could not be called outside. `nnx.jit` returns the variables. `name` is the argument of the
    layer, ``"score_mod"`` or ``"mask_mod"``.
    """

    def __init__(self, name: str, mod: Callable[..., ArrayLike]):
        self.program, arrays = _TRACERS[name](mod)
        self.arrays = nnx.List([CapturedArray(x) for x in arrays])

    @property
    def __signature__(self) -> inspect.Signature:
        names = ["score"] * (self.program.role == "score") + ["b", "h", "q_idx", "kv_idx"]
        return inspect.Signature([inspect.Parameter(x, inspect.Parameter.POSITIONAL_OR_KEYWORD) for x in names])

    def __call__(self, *arguments: ArrayLike) -> Array:
        """Evaluates the mod at one position."""
        dtypes = [jnp.float32] * (len(arguments) - 4) + [jnp.int32] * 4
        scalars = (jnp.asarray(x, dtype) for x, dtype in zip(arguments, dtypes, strict=True))
        return self.program([x[...] for x in self.arrays], *scalars)

    def requirements(self) -> tuple[Requirement, ...]:
        """Returns the sizes that a ready mod was made for."""
        return self.program.requirements


class ModAttributes(nnx.Module):
    """Attributes `score_mod`, `mask_mod` and `block_mask` that Flax can split, merge, save and trace."""

    def __setattr__(self, name: str, value: object) -> None:
        if name in (*_TRACERS, "block_mask") and not isinstance(value, dataclasses.Field):  # of `nnx.data`
            value = stored(name, value)
            value = (nnx.data if is_state(value) else nnx.static)(value)
        super().__setattr__(name, value)


def stored(name: str, value: Any) -> Any:
    """Returns a mod or a mask in the form in which a module stores it.

    That is a `ConstantMask` for a known mask, an `AttentionMask` for a traced one, a `HoistedMod` for a function that
    captures tracers, and the value itself for anything else.
    """
    if name == "block_mask":
        value = constant_mask(value)
        is_traced = isinstance(value, jflex.BlockMask) and not isinstance(value, ConstantMask)
        return AttentionMask(value) if is_traced else value
    if value is None or isinstance(value, nnx.Module) or not _may_capture_tracers(value):
        return value
    hoisted = HoistedMod(name, value)
    return hoisted if any(isinstance(x[...], Tracer) for x in hoisted.arrays) else value


def is_state(value: object) -> bool:
    """Tests whether an attribute is a part of the state of a module."""
    return isinstance(value, nnx.Module | nnx.Variable)


def _may_capture_tracers(mod: Mod) -> bool:
    reachable = list(captures(mod))
    if any(isinstance(x, linen.Module) for x in reachable):
        return False  # linen holds its parameters, which a trace of the mod must not create
    is_tracing = isinstance(jnp.zeros(()), Tracer)  # then an object may hold tracers where `captures` does not look
    return is_tracing or any(isinstance(x, Tracer) for x in reachable)


def check_no_hidden_state(name: str, mod: Mod | None, remedy: str = _REMEDY) -> None:
    """Raises ValueError for a mod whose parameters the transformations of Flax would not see.

    It is not a module, and captures a module or a variable. `remedy` ends the message.

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

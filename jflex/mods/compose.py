"""Composition of mask_mods: ``and_masks``, ``or_masks``, ``not_mask``, ``noop_mask``.

The composites keep their parts in a field, so that the structure of a mask can be read.
"""

from __future__ import annotations

import dataclasses
import functools
import operator

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Int

from jflex.mods.array_sizes import Requirement, SizedMod, requirements_of
from jflex.mods.trace import TracedMod
from jflex.mods.types import MaskMod


@dataclasses.dataclass(frozen=True)
class _Joined(SizedMod):
    parts: tuple[MaskMod, ...]

    def requirements(self) -> tuple[Requirement, ...]:
        """See `SizedMod`."""
        return requirements_of(*self.parts)


class AndMasks(_Joined):
    """Visible where every part is; with no parts, everywhere. Made by `and_masks`."""

    def __call__(self, b: jax.Array, h: jax.Array, q_idx: jax.Array, kv_idx: jax.Array) -> Bool[Array, ""]:
        """Evaluates the mask at one position."""
        return functools.reduce(operator.and_, (part(b, h, q_idx, kv_idx) for part in self.parts), jnp.asarray(True))


class OrMasks(_Joined):
    """Visible where any part is; with no parts, nowhere. Made by `or_masks`."""

    def __call__(self, b: jax.Array, h: jax.Array, q_idx: jax.Array, kv_idx: jax.Array) -> Bool[Array, ""]:
        """Evaluates the mask at one position."""
        return functools.reduce(operator.or_, (part(b, h, q_idx, kv_idx) for part in self.parts), jnp.asarray(False))


@dataclasses.dataclass(frozen=True)
class NotMask(SizedMod):
    """Visible where the part is not. Made by `not_mask`."""

    part: MaskMod

    def __call__(self, b: jax.Array, h: jax.Array, q_idx: jax.Array, kv_idx: jax.Array) -> Bool[Array, ""]:
        """Evaluates the mask at one position."""
        return ~jnp.asarray(self.part(b, h, q_idx, kv_idx))

    def requirements(self) -> tuple[Requirement, ...]:
        """See `SizedMod`."""
        return requirements_of(self.part)


@dataclasses.dataclass(frozen=True, eq=False)
class BoundMask(SizedMod):
    """A traced mask_mod with the values of its captures: a mask_mod again."""

    traced: TracedMod
    operands: tuple[jax.Array, ...]

    def __call__(self, b: jax.Array, h: jax.Array, q_idx: jax.Array, kv_idx: jax.Array) -> Bool[Array, ""]:
        """Evaluates the mask at one position."""
        indices = (jnp.asarray(index, jnp.int32) for index in (b, h, q_idx, kv_idx))
        return self.traced(self.operands, *indices)

    def requirements(self) -> tuple[Requirement, ...]:
        """See `SizedMod`."""
        return self.traced.requirements


def and_masks(*mask_mods: MaskMod) -> AndMasks:
    """The intersection of masks: a key is visible where every mask is True.

    Args:
      *mask_mods: Functions ``(b, h, q_idx, kv_idx) -> bool``. Without any, nothing is masked.

    Returns:
      A mask_mod whose field ``parts`` holds the arguments.

    Raises:
      TypeError: One of them cannot be called.

    >>> causal_window = and_masks(lambda b, h, q, kv: q >= kv, lambda b, h, q, kv: q - kv < 4)
    >>> bool(causal_window(0, 0, 5, 3)), bool(causal_window(0, 0, 5, 1)), len(causal_window.parts)
    (True, False, 2)
    """
    return AndMasks(_callables("and_masks", mask_mods))


def or_masks(*mask_mods: MaskMod) -> OrMasks:
    """The union of masks: a key is visible where any mask is True.

    Args:
      *mask_mods: Functions ``(b, h, q_idx, kv_idx) -> bool``. Without any, everything is masked.

    Returns:
      A mask_mod whose field ``parts`` holds the arguments.

    Raises:
      TypeError: One of them cannot be called.

    >>> prefix_lm = or_masks(lambda b, h, q, kv: q >= kv, lambda b, h, q, kv: kv < 2)
    >>> bool(prefix_lm(0, 0, 0, 1)), bool(prefix_lm(0, 0, 0, 2))
    (True, False)
    """
    return OrMasks(_callables("or_masks", mask_mods))


def not_mask(mask_mod: MaskMod) -> NotMask:
    """Negates a mask_mod.

    Args:
      mask_mod: A function ``(b, h, q_idx, kv_idx) -> bool``.

    Returns:
      A mask_mod whose field ``part`` holds the argument.

    Raises:
      TypeError: It cannot be called.

    >>> future = not_mask(lambda b, h, q, kv: q >= kv)
    >>> bool(future(0, 0, 1, 2))
    True
    """
    return NotMask(*_callables("not_mask", (mask_mod,)))


def noop_mask(
    b: Int[ArrayLike, ""], h: Int[ArrayLike, ""], q_idx: Int[ArrayLike, ""], kv_idx: Int[ArrayLike, ""]
) -> Bool[Array, ""]:
    """Masks nothing: every query attends to every key.

    >>> bool(noop_mask(0, 0, 3, 7))
    True
    """
    return jnp.asarray(True)


def _callables(caller: str, mask_mods: tuple[MaskMod, ...]) -> tuple[MaskMod, ...]:
    for position, mask_mod in enumerate(mask_mods):
        if not callable(mask_mod):
            hint = " Combine BlockMasks with `&`, `|`, `~`." if hasattr(mask_mod, "kv_num_blocks") else ""
            raise TypeError(
                f"`{caller}` takes functions (b, h, q_idx, kv_idx) -> bool. "
                f"Argument {position} is of type {type(mask_mod).__name__}.{hint}"
            )
    return mask_mods

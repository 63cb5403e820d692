"""`ConstantMask`: a BlockMask in a Flax layer that is no state of the model."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from typing import TypeVar

import jax
import numpy as np
from flax import nnx
from jax.core import Tracer, eval_context

import jflex

Content = tuple[jax.tree_util.PyTreeDef, str]
"""The structure of a mask, and a digest of its arrays."""

T = TypeVar("T")


@jax.tree_util.register_static
class ConstantMask(jflex.BlockMask):
    """A BlockMask of known values without leaves, equal by content: a constant of the programs that use it.

    Flax sees no state in it. So checkpoints, moving averages, casts and optimizers act on parameters alone, and layers
    with equal masks share compiled programs.

    Example:
        >>> masks = [jflex.create_block_mask(jflex.masks.causal(), None, None, 64, 64) for _ in range(2)]
        >>> constant, other = map(ConstantMask, masks)
        >>> constant == other, len(jax.tree.leaves(constant)), len(jax.tree.leaves(constant.data()))
        (True, 0, 8)
    """

    def __init__(self, mask: jflex.BlockMask):
        super().__init__(**_fields(mask))

    def data(self) -> jflex.BlockMask:
        """The BlockMask as a pytree of arrays, for a call."""
        return jflex.BlockMask(**_fields(self))

    @functools.cached_property
    def _content(self) -> Content:
        arrays, structure = jax.tree.flatten(self.data())
        digest = hashlib.sha256()
        for array in map(np.asarray, arrays):
            digest.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
        return structure, digest.hexdigest()

    @property
    def __fn_or_cls__(self) -> Content:
        """The key by which `linen.jit` recognizes an attribute of a module, instead of one made of all fields."""
        return self._content

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, ConstantMask) and self._content == other._content)

    def __hash__(self) -> int:
        return hash(self._content)

    def __deepcopy__(self, memo: dict[int, object]) -> ConstantMask:
        return self

    def __reduce__(self) -> tuple[type[ConstantMask], tuple[jflex.BlockMask]]:
        return ConstantMask, (self.data(),)


def constant_mask(mask: T) -> T | ConstantMask:
    """Returns a BlockMask of known values as a `ConstantMask`, and anything else as it is.

    Inside ``jit`` the lists of a mask are traced. They are evaluated again if its mask_mod captures known arrays.
    """
    if not isinstance(mask, jflex.BlockMask) or isinstance(mask, ConstantMask):
        return mask
    if not _is_traced(mask):
        return ConstantMask(mask)
    if not mask.lists_follow_mod or _is_traced(mask.mask_operands):
        return mask
    assert mask.mask_mod is not None  # `lists_follow_mod`
    with eval_context():
        return ConstantMask(jflex.create_block_mask(mask.mask_mod, *mask.shape, block_size=mask.block_size))


def block_mask_data(mask: T | nnx.Variable[jflex.BlockMask]) -> T | jflex.BlockMask:
    """Returns the BlockMask of a layer's attribute as a pytree of arrays, and anything else as it is."""
    if isinstance(mask, nnx.Variable):
        return mask.get_value()
    return mask.data() if isinstance(mask, ConstantMask) else mask


def _is_traced(tree: object) -> bool:
    return any(isinstance(x, Tracer) for x in jax.tree.leaves(tree))


def _fields(mask: jflex.BlockMask) -> dict:
    return {field.name: getattr(mask, field.name) for field in dataclasses.fields(jflex.BlockMask)}

"""Padding: sequences of different lengths in one batch."""

from __future__ import annotations

from jax.typing import ArrayLike
from jaxtyping import Int

from jflex.mods.array_sizes import ReadyMod, Requirement, ready
from jflex.mods.arrays import checked_array
from jflex.mods.compose import MaskMod


@ready
def padding(kv_lengths: Int[ArrayLike, " B"]) -> MaskMod:
    """Shows the first ``kv_lengths[b]`` keys of every batch entry.

    Padding queries still attend to keys: the caller must drop their outputs.

    Args:
      kv_lengths: How many keys of each batch entry are not padding.

    Returns:
      A mask_mod; it uses ``b``.

    Raises:
      TypeError: The lengths are not integers.
      ValueError: The lengths do not have one axis.

    >>> import jax.numpy as jnp
    >>> from jflex.block_mask.dense import create_mask
    >>> create_mask(padding(jnp.array([1, 3])), 2, None, 1, 3)[:, 0, 0].astype(int).tolist()
    [[1, 0, 0], [1, 1, 1]]
    """
    lengths = checked_array(kv_lengths, "`kv_lengths` of `padding`", "integers", "[B]")
    rule = "`kv_lengths` of `padding` must hold one length for each batch entry"
    return ReadyMod(
        lambda b, h, q_idx, kv_idx: kv_idx < lengths[b],
        (Requirement("b", lengths.shape[0], rule, "Pass lengths [{}]."),),
    )

"""Cross-attention of text to interleaved images."""

from __future__ import annotations

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Int

from jflex.mods.array_sizes import ReadyMod, Requirement, ready
from jflex.mods.arrays import checked_array
from jflex.mods.compose import MaskMod


@ready
def vision_cross_attention(intervals: Int[ArrayLike, "*B N 2"], image: int) -> MaskMod:
    """Shows each image to an interval of the text: queries are text, keys are images of as many tokens, in a row.

    In Flamingo the interval of an image begins where the image stands in the text, and ends at the next one.

    Args:
      intervals: For each image its first query, and the one after its last: integers [N, 2], or [B, N, 2].
      image: Tokens of an image.

    Returns:
      A mask_mod, for ``N * image`` keys, or fewer; it uses ``b`` if the intervals have a batch axis.

    Raises:
      TypeError: The intervals are not integers.
      ValueError: They have another shape, or `image` is not positive.

    >>> from jflex.block_mask.mask import create_block_mask
    >>> mask_mod = vision_cross_attention(jnp.array([[0, 4], [1, 4], [4, 6]]), 2)
    >>> print(create_block_mask(mask_mod, None, None, 6, 6, block_size=1))
    BlockMask(shape=(1, 1, 6, 6), block_size=(1, 1), sparsity=50.00%)
    batch 0, head 0
    ████        |
    ████████    |
    ████████    |
    ████████    |
            ████|
            ████|
    """
    intervals = checked_array(intervals, "`intervals` of `vision_cross_attention`", "integers").astype(jnp.int32)
    if intervals.ndim not in (2, 3) or intervals.shape[-1] != 2:
        raise ValueError(
            "`intervals` of `vision_cross_attention` must be [N, 2] or [B, N, 2]: the first query of each image, and "
            f"the one after its last. Got shape {intervals.shape}."
        )
    if image < 1:
        raise ValueError(f"`image` of `vision_cross_attention` must be positive. Got {image}.")
    starts, ends = intervals[..., 0], intervals[..., 1]

    def mask(b, h, q_idx, kv_idx):
        at = kv_idx // image if intervals.ndim == 2 else (b, kv_idx // image)
        return (q_idx >= starts[at]) & (q_idx < ends[at])

    rule = "`intervals` and `image` of `vision_cross_attention` must make up all keys, images of one length"
    remedy = "Pass an interval for each image; an empty one for padding."
    required = [Requirement("kv_idx", starts.shape[-1] * image, rule, remedy)]
    if intervals.ndim == 3:
        rule = "`intervals` of `vision_cross_attention` must hold those of each batch entry"
        remedy = "Pass intervals [{}, N, 2], or [N, 2] for those that all batch entries share."
        required.append(Requirement("b", starts.shape[0], rule, remedy))
    return ReadyMod(mask, tuple(required))

"""A mask within consecutive groups of as many tokens: a batch in one row, as the images of a packed sequence."""

from __future__ import annotations

from jflex.mods.array_sizes import ReadyMod, check_mod_sizes, ready, requirements_of, without
from jflex.mods.compose import MaskMod


@ready
def batchify(mask_mod: MaskMod, length: int) -> MaskMod:
    """Applies a mask within each group of `length` consecutive tokens; no group attends to another.

    The inner mask sees positions within the group, from 0 to ``length - 1``. Groups of different lengths are documents:
    see `document`.

    Args:
      mask_mod: The inner mask, ``(b, h, q_idx, kv_idx) -> bool``.
      length: Tokens of a group, in queries and keys alike.

    Returns:
      A mask_mod, for any number of groups.

    Raises:
      TypeError: `mask_mod` cannot be called.
      ValueError: `length` is not positive, or `mask_mod` was made for fewer positions.

    >>> from jflex.block_mask.mask import create_block_mask
    >>> from jflex.masks.causal import causal
    >>> print(create_block_mask(batchify(causal(), 4), None, None, 8, 8, block_size=1))
    BlockMask(shape=(1, 1, 8, 8), block_size=(1, 1), sparsity=68.75%)
    batch 0, head 0
    ██              |
    ████            |
    ██████          |
    ████████        |
            ██      |
            ████    |
            ██████  |
            ████████|
    """
    if not callable(mask_mod):
        raise TypeError(
            f"`mask_mod` of `batchify` must be a function (b, h, q_idx, kv_idx) -> bool. Got {type(mask_mod).__name__}."
        )
    if length < 1:
        raise ValueError(f"`length` of `batchify` must be positive. Got {length}.")
    check_mod_sizes(mask_mod, queries=length, keys=length, caller="groups of `batchify`")

    def mask(b, h, q_idx, kv_idx):
        return (q_idx // length == kv_idx // length) & mask_mod(b, h, q_idx % length, kv_idx % length)

    return ReadyMod(mask, without(requirements_of(mask_mod), "q_idx", "kv_idx"))

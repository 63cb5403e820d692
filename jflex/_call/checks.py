"""Checks of the BlockMask and of the config of a call."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jflex.block_mask.mask import BlockMask
from jflex.config import Config
from jflex.mods.dependence import uses_index
from pallas_kernels.spec import Blocks


def check_block_mask(block_mask: object, mask_mod: object, B: int, Hq: int, T: int, S: int) -> None:
    """Raises unless `block_mask` fits the call.

    Raises:
      TypeError: `block_mask` is not a BlockMask.
      ValueError: It was made for another call, or `mask_mod` is passed too.
    """
    if block_mask is None:
        return
    if not isinstance(block_mask, BlockMask):
        hint, kind = "", type(block_mask).__name__
        if callable(block_mask):
            hint = " A mask function goes to `mask_mod`, or through `create_block_mask`."
        elif isinstance(block_mask, (jax.Array, np.ndarray)):
            hint, kind = " Pass a mask [B, H, T, S] as `mask` of `jflex.dot_product_attention`.", "an array"
        raise TypeError(f"`block_mask` must be a `BlockMask`. Got {kind}.{hint}")
    if mask_mod is not None:
        raise ValueError(
            "`block_mask` and `mask_mod` cannot both be given: a BlockMask holds its own mask_mod. Combine them: "
            "create_block_mask(and_masks(f, g), ...)."
        )
    sentence = block_mask_mismatch(block_mask, B, Hq, T, S)
    if sentence is not None:
        raise ValueError(sentence)


def block_mask_mismatch(block_mask: BlockMask, batch: int, heads: int, q_length: int, kv_length: int) -> str | None:
    """Says in one sentence or two why a BlockMask does not fit a call, and what would.

    Args:
      block_mask: The mask.
      batch: ``B`` of the call.
      heads: Query heads ``Hq`` of the call.
      q_length: Queries ``T`` of the call.
      kv_length: Keys ``S`` of the call.

    Returns:
      The sentence, or None when the mask fits.

    >>> from jflex.block_mask.mask import create_block_mask
    >>> block_mask = create_block_mask(lambda b, h, q, kv: q >= kv, 2, None, 256, 256)
    >>> block_mask_mismatch(block_mask, 2, 8, 256, 256) is None
    True
    >>> block_mask_mismatch(block_mask, 2, 8, 128, 256)  # doctest: +ELLIPSIS
    '`block_mask` is for 256 queries and 256 keys, the call has 128 and 256. Crop it with ...'
    """
    if block_mask.kv_num_blocks.ndim != 3:
        return (
            f"`block_mask` has lists with {block_mask.kv_num_blocks.ndim - 3} leading axes more than a BlockMask has. "
            "Map over them with `jax.vmap`."
        )
    mask_batch, mask_heads, mask_q, mask_kv = block_mask.shape
    for name, argument, of_mask, of_call in (("batch", "B", mask_batch, batch), ("heads", "H", mask_heads, heads)):
        if of_mask not in (1, of_call):
            return (
                f"`block_mask` has {name} {of_mask}, the query {of_call}. Make it with `create_block_mask(mask_mod, "
                f"{argument}={of_call}, ...)`, or with `{argument}=None` for one mask that all share."
            )
        index = "b" if argument == "B" else "h"
        if of_mask == 1 and of_call != 1 and block_mask.traced is not None and uses_index(block_mask.traced, index):
            return (
                f"`block_mask` has {name} 1, the query {of_call}, but its mask_mod {block_mask.traced.source} uses "
                f"`{index}`. Make it with `create_block_mask(mask_mod, {argument}={of_call}, ...)`."
            )
    if (mask_q, mask_kv) == (q_length, kv_length):
        return None
    fault = f"`block_mask` is for {mask_q} queries and {mask_kv} keys, the call has {q_length} and {kv_length}."
    if mask_q >= q_length and mask_kv >= kv_length:
        return f"{fault} Crop it with `block_mask.with_lengths({q_length}, {kv_length})`."
    return (
        f"{fault} Make it with `create_block_mask(mask_mod, B, H, {q_length}, {kv_length})`, or extend it with "
        f"`block_mask.with_lengths({q_length}, {kv_length})`."
    )


def check_config(config: Any, blocks: Blocks | None) -> Config:
    """Returns the config; the default one for None.

    Raises:
      TypeError: `config` is not a Config.
      ValueError: A tile does not divide the blocks of the mask.
    """
    if config is None:
        return Config()
    if not isinstance(config, Config):
        raise TypeError(f"`config` must be a `jflex.Config`. Got {type(config).__name__}.")
    for name in ("forward", "dkv", "dq", "decode"):
        tiles = getattr(config, name)
        if tiles is None or blocks is None:
            continue
        for size, tile, axis in zip(blocks.size, (tiles.block_q, tiles.block_kv), ("q", "kv"), strict=True):
            if size % tile and (name, axis) != ("decode", "q"):
                raise ValueError(
                    f"`config.{name}.block_{axis}` must divide the block size of the mask, {size}. Got {tile}. "
                    "Take a divisor, or create the mask with another `block_size`."
                )
    return config

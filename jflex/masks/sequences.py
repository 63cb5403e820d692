"""Masks of one sequence: causal, windows, prefixes, padding, groups, diffusion blocks."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Int

from jflex.mods.array_sizes import (
    Axis,
    ReadyMod,
    Requirement,
    check_mod_sizes,
    for_positions,
    ready,
    requirements_of,
    without,
)
from jflex.mods.arrays import checked_array, known_count
from jflex.mods.compose import MaskMod

_Length = int | Int[Array, ""]


@ready
def causal(
    alignment: Literal["top_left", "bottom_right"] = "top_left",
    *,
    q_length: _Length | None = None,
    kv_length: _Length | None = None,
) -> MaskMod:
    """Masks the keys after the query.

    Args:
      alignment: ``"top_left"``: query 0 is at key 0. ``"bottom_right"``: the last query is at the last key, as when new
        queries follow a cache of earlier keys. For equal lengths they are the same.
      q_length: Number of queries, for ``"bottom_right"``. If it is a Python number, a call must not have more.
      kv_length: Number of keys, likewise.

    Raises:
      ValueError: `alignment` is unknown, or the lengths are missing for ``"bottom_right"`` or set for ``"top_left"``.

    >>> from jflex.block_mask.dense import create_mask
    >>> create_mask(causal("bottom_right", q_length=2, kv_length=4), None, None, 2, 4)[0, 0].astype(int).tolist()
    [[1, 1, 1, 0], [1, 1, 1, 1]]
    """
    if alignment not in ("top_left", "bottom_right"):
        raise ValueError(f"`alignment` must be 'top_left' or 'bottom_right'. Got {alignment!r}.")
    if alignment == "top_left":
        if q_length is not None or kv_length is not None:
            raise ValueError("`q_length` and `kv_length` are for `alignment='bottom_right'` only.")
        return lambda b, h, q_idx, kv_idx: q_idx >= kv_idx
    if q_length is None or kv_length is None:
        raise ValueError("`alignment='bottom_right'` needs `q_length` and `kv_length`.")
    offset = kv_length - q_length

    def causal_bottom_right(b, h, q_idx, kv_idx):
        return q_idx + offset >= kv_idx

    lengths: tuple[tuple[Axis, _Length, str, str], ...] = (
        ("q_idx", q_length, "q_length", "queries"),
        ("kv_idx", kv_length, "kv_length", "keys"),
    )
    required = []
    for axis, length, name, what in lengths:
        known = known_count(length)
        if known is not None:
            rule = f"`{name}` of `causal` must count all {what}, the last of which are aligned"
            remedy = f"Pass `{name}={{}}`, or an array if the {what} after them are padding."
            required.append(Requirement(axis, known, rule, remedy, in_program=False))
    return ReadyMod(causal_bottom_right, tuple(required))


@ready
def sliding_window(left: int | Int[ArrayLike, ""], right: int | Int[ArrayLike, ""] = 0) -> MaskMod:
    """Shows the keys from `left` positions before the query to `right` positions after it.

    Source: Longformer, https://arxiv.org/abs/2004.05150.

    With ``right=0`` the window is causal and holds ``left + 1`` keys, the query's own included: for a model with a
    window of 4096 that counts the query's own key, pass ``left=4095``.

    Args:
      left: Keys before the query.
      right: Keys after the query.

    Raises:
      ValueError: Two numbers leave no key between them.

    >>> from jflex.block_mask.dense import create_mask
    >>> create_mask(sliding_window(1), None, None, 3, 3)[0, 0].astype(int).tolist()
    [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    """
    _check_window(left, right)

    def window(b, h, q_idx, kv_idx):
        return (kv_idx >= q_idx - left) & (kv_idx <= q_idx + right)

    return window


@ready
def dilated_window(left: int, right: int = 0, *, dilation: int) -> MaskMod:
    """Shows every `dilation`-th key from `left` positions before the query to `right` positions after it.

    Source: Longformer, https://arxiv.org/abs/2004.05150, section 3.1.

    Args:
      left: How far the window reaches back, in positions.
      right: How far it reaches forward, in positions.
      dilation: Distance between visible keys; the query's own key is one of them.

    Raises:
      ValueError: `dilation` is not positive, or two numbers leave no key between them.

    >>> from jflex.block_mask.dense import create_mask
    >>> create_mask(dilated_window(4, dilation=2), None, None, 5, 5)[0, 0, 4].astype(int).tolist()
    [1, 0, 1, 0, 1]
    """
    if dilation < 1:
        raise ValueError(f"`dilation` must be at least 1. Got {dilation}.")
    _check_window(left, right)

    def window(b, h, q_idx, kv_idx):
        distance = q_idx - kv_idx
        return (distance <= left) & (distance >= -right) & (distance % dilation == 0)

    return window


def _check_window(*sizes: object) -> None:
    numbers = [size for size in sizes if isinstance(size, int)]
    if len(numbers) == 2 and sum(numbers) < 0:
        raise ValueError(
            f"`left` and `right` must leave a key in the window. Got {numbers[0]} and {numbers[1]}. For a side without "
            "a bound, pass the length of the keys; -1 does not mean that, as it does in FlashAttention."
        )


@ready
def global_tokens(is_global: Bool[ArrayLike, " S"]) -> MaskMod:
    """Shows every key to the global queries, and the global keys to every query. Add them to a window with `or_masks`.

    Args:
      is_global: Which positions are global, for queries and keys alike: booleans; may be longer than a call.

    Raises:
      TypeError: `is_global` is not boolean.
      ValueError: `is_global` does not have one axis.

    >>> import jax.numpy as jnp
    >>> from jflex.block_mask.dense import create_mask
    >>> create_mask(global_tokens(jnp.array([True, False, False])), None, None, 3, 3)[0, 0].astype(int).tolist()
    [[1, 1, 1], [1, 0, 0], [1, 0, 0]]

    With a window, as in Longformer:

    >>> import jflex
    >>> mask_mod = jflex.or_masks(jflex.masks.sliding_window(1, 1), global_tokens(jnp.arange(8) == 3))
    >>> print(jflex.create_block_mask(mask_mod, None, None, 8, 8, block_size=1))
    BlockMask(shape=(1, 1, 8, 8), block_size=(1, 1), sparsity=50.00%)
    batch 0, head 0
    ████  ██        |
    ████████        |
      ██████        |
    ████████████████|
          ██████    |
          ████████  |
          ██  ██████|
          ██    ████|
    """
    flags = checked_array(is_global, "`is_global` of `global_tokens`", "booleans", "[S]")
    rule = "`is_global` of `global_tokens` must hold one flag for each {}"
    return ReadyMod(
        lambda b, h, q_idx, kv_idx: flags[q_idx] | flags[kv_idx],
        for_positions(flags.shape[0], rule, "Pass flags [{}]."),
    )


@ready
def prefix_lm(prefix_length: int | Int[ArrayLike, ""] | Int[ArrayLike, " B"]) -> MaskMod:
    """Shows the prefix to every query, and the keys up to the query itself.

    Source: T5, https://arxiv.org/abs/1910.10683, section 3.2.

    Args:
      prefix_length: Length of the prefix; an array of one axis holds one for every batch entry.

    Raises:
      TypeError: `prefix_length` is not an integer.
      ValueError: `prefix_length` has more than one axis.

    >>> from jflex.block_mask.dense import create_mask
    >>> create_mask(prefix_lm(2), None, None, 3, 3)[0, 0].astype(int).tolist()
    [[1, 1, 0], [1, 1, 0], [1, 1, 1]]
    """
    argument = "`prefix_length` of `prefix_lm`"
    lengths = prefix_length if isinstance(prefix_length, int) else checked_array(prefix_length, argument, "integers")
    if isinstance(lengths, int) or lengths.ndim == 0:
        return lambda b, h, q_idx, kv_idx: (kv_idx < prefix_length) | (q_idx >= kv_idx)
    if lengths.ndim > 1:
        raise ValueError(f"{argument} must be one length, or lengths [B]. Got shape {lengths.shape}.")
    rule = f"{argument} must be one length, or hold one for each batch entry"
    return ReadyMod(
        lambda b, h, q_idx, kv_idx: (kv_idx < lengths[b]) | (q_idx >= kv_idx),
        (Requirement("b", lengths.shape[0], rule, "Pass lengths [{}]."),),
    )


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
    >>> from jflex.masks.sequences import causal
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


@ready
def block_diffusion(length: int, block: int) -> MaskMod:
    """A noised copy of a sequence, at positions 0 to ``length - 1``, followed by the clean one.

    Source: BD3-LM, https://arxiv.org/abs/2503.09573, section 3.3.

    A noised or clean block attends to itself and to the clean blocks before it.

    Args:
      length: Tokens of the sequence; the mask is for ``2 * length`` queries and keys, or fewer.
      block: Tokens of a diffusion block.

    Raises:
      ValueError: A size is not positive.

    >>> from jflex.block_mask.dense import create_mask
    >>> create_mask(block_diffusion(2, 1), None, None, 4, 4)[0, 0].astype(int).tolist()
    [[1, 0, 0, 0], [0, 1, 1, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    """
    if length < 1 or block < 1:
        raise ValueError(f"`length` and `block` must be positive. Got {length} and {block}.")

    def mask(b, h, q_idx, kv_idx):
        q_clean, kv_clean = q_idx >= length, kv_idx >= length
        q_block = jnp.where(q_clean, q_idx - length, q_idx) // block
        kv_block = jnp.where(kv_clean, kv_idx - length, kv_idx) // block
        same_block = (q_clean == kv_clean) & (q_block == kv_block)
        return same_block | (kv_clean & (q_block > kv_block))

    rule = "`length` of `block_diffusion` must give 2 * length positions, one for each {}"
    remedy = "Pass the length of one copy, and pad each copy by itself."
    return ReadyMod(mask, for_positions(2 * length, rule, remedy))

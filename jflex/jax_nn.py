"""`dot_product_attention`: what `jax.nn.dot_product_attention` computes, by the fused kernels of `flex_attention`."""

from __future__ import annotations

import math
import operator
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int32

from jflex._call.checks import check_arrays
from jflex._call.dispatch import Implementation, hashable, names_of
from jflex._check.arguments import check_config, check_scale, checked_lengths, describe_array
from jflex.attention import flex_attention
from jflex.block_mask.bands import Band, band_block_mask
from jflex.block_mask.mask import BlockMask
from jflex.config import Config
from jflex.masks.sequences import causal, sliding_window
from jflex.mods.compose import and_masks
from jflex.mods.signature import answers_keywords
from jflex.mods.types import MaskMod, ScoreMod

_BLOCK = 128
_AXES = (("B", "batch"), ("Hq", "query heads"), ("T", "queries"), ("S", "keys"))


class NnOptions(TypedDict, total=False):
    """Keywords of `dot_product_attention`, for its overloads."""

    scale: ArrayLike | None
    is_causal: bool
    query_seq_lengths: ArrayLike | None
    key_value_seq_lengths: ArrayLike | None
    local_window_size: int | tuple[int, int] | None
    implementation: Implementation
    config: Config | None


# fmt: off
@overload
def dot_product_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, bias: ArrayLike | None = None, mask: ArrayLike | None = None, *,
    return_residual: Literal[False] = False, **options: Unpack[NnOptions],
) -> Array: ...
@overload
def dot_product_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, bias: ArrayLike | None = None, mask: ArrayLike | None = None, *,
    return_residual: Literal[True], **options: Unpack[NnOptions],
) -> tuple[Array, Array]: ...
# fmt: on
@answers_keywords
def dot_product_attention(
    query: Float[ArrayLike, "*B T Hq D"],
    key: Float[ArrayLike, "*B S Hkv D"],
    value: Float[ArrayLike, "*B S Hkv Dv"],
    bias: Float[ArrayLike, ...] | None = None,
    mask: Bool[ArrayLike, ...] | None = None,
    *,
    scale: ArrayLike | None = None,
    is_causal: bool = False,
    query_seq_lengths: Int32[ArrayLike, " B"] | None = None,
    key_value_seq_lengths: Int32[ArrayLike, " B"] | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: Implementation = None,
    return_residual: bool = False,
    config: Config | None = None,
) -> Float[Array, "*B T Hq Dv"] | tuple[Float[Array, "*B T Hq Dv"], Float[Array, "*B T Hq"]]:
    """`jax.nn.dot_product_attention` by the kernels of `flex_attention`: the same arguments, the same results.

    Scores are ``scale * <query, key> + bias``; keys masked by `mask`, `is_causal`, `local_window_size` or the lengths
    do not enter the softmax. Blocks outside the causal band, the window or the lengths are skipped, and no ``T x S``
    array is made. A `bias` or `mask` is read in the kernel: its axes of size 1 are not repeated. The gradient of a bias
    has the shape of the bias.

    A dense `mask` is read in the kernel, and if heads share it, once before, to find its empty blocks. If it follows a
    rule (documents, a prefix, a window), pass that as a ``mask_mod`` to `create_block_mask` and `flex_attention`: then
    no ``T x S`` array is stored or read, and one mask serves all layers.

    It differs from `jax.nn.dot_product_attention` in this:

    * A query that attends to no key gives zeros, an lse of ``-inf`` and zero gradients; there, on XLA, the mean of all
      values, and an lse of about ``-2e38``. Queries beyond `query_seq_lengths` give zeros in both. Where a bias is
      below ``-2e38``, as ``finfo.min`` is, for all keys of a query, kernels for GPUs give zeros, too, and XLA a mean.
    * `key` and `value` may have batch size 1, and `value` its own head size. NaN that is masked has no effect.
    * A length beyond the arrays and a window that masks every key are refused; traced lengths clamp. In such a window,
      -1 is no bound, as in FlashAttention: ``(-1, 0)`` is causal.
    * Sharded by plain `jax.jit`, a `bias` or `mask` is gathered; under `jax.shard_map` each shard has its own.

    Args:
      query: As in `flex_attention`, in the layout BTNH; or [T, Hq, D], if key and value have no batch axis either.
      bias: Added to the scaled scores: [B, Hq, T, S], where each axis may be 1 and leading ones may be missing. A
        boolean one adds 1 where it is True.
      mask: Booleans, True where a query attends, of the same shapes.
      scale: Multiplies the raw scores; ``D ** -0.5`` for None. A number, or a 0-d array, which gets a gradient.
      is_causal: Masks the keys after the query; query 0 is at key 0, also if ``T != S``. (For queries that follow a
        cache, see `jflex.masks.causal` with ``"bottom_right"``.)
      query_seq_lengths: How many queries each batch entry has, int32 [B]; they are data.
      key_value_seq_lengths: How many keys, likewise.
      local_window_size: ``(left, right)``: a query attends to keys from `left` before its position to `right` after it,
        both included. One number sets both.
      implementation: As in `flex_attention`; ``"xla"`` is jflex's own, too.
      return_residual: Also return the logsumexp (natural log) of the scores over the visible keys, without a gradient;
        `flex_attention` returns one in float32 that has gradients.
      config: As in `flex_attention`; the one argument that jax.nn does not have.

    Returns:
      The output, shaped as `query` but for ``Dv``, in its dtype; or a pair of it and the lse, [B, T, Hq], likewise.

    Raises:
      TypeError: An argument has a wrong type or dtype.
      ValueError: Shapes disagree, or a value is out of range.
      UnsupportedError: As `flex_attention`.

    >>> import jax
    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 256, 4, 32))
    >>> bias, padding = jnp.zeros((4, 256, 256)), jnp.array([256, 100], jnp.int32)
    >>> call = dict(bias=bias, is_causal=True, key_value_seq_lengths=padding)
    >>> out = dot_product_attention(q, k, v, **call)
    >>> bool(jnp.allclose(out, jax.nn.dot_product_attention(q, k, v, **call), atol=1e-5))
    True
    """
    call = translate(
        query, key, value, bias, mask, scale=scale, is_causal=is_causal, query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths, local_window_size=local_window_size,
        implementation=implementation, config=config,
    )  # fmt: skip
    _check_flag(return_residual, "return_residual")
    out, lse = flex_attention(**call._asdict(), return_lse=True)
    unbatched = np.ndim(query) == 3
    out = out[0] if unbatched else out
    if not return_residual:
        return out
    lse = jnp.swapaxes(jax.lax.stop_gradient(lse), 1, 2).astype(out.dtype)
    return out, lse[0] if unbatched else lse


class FlexCall(NamedTuple):
    """The equivalent arguments of `flex_attention`, or of `jflex.explain`; see there."""

    query: Array
    key: Array
    value: Array
    score_mod: ScoreMod | None
    block_mask: BlockMask | None
    mask_mod: MaskMod | None
    kv_lengths: Array | None
    scale: float
    implementation: Implementation
    config: Config | None


def translate(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, bias: ArrayLike | None = None, mask: ArrayLike | None = None, *,
    scale: ArrayLike | None = None, is_causal: bool = False, query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None, local_window_size: int | tuple[int, int] | None = None,
    implementation: Implementation = None, config: Config | None = None,
) -> FlexCall:  # fmt: skip
    """Checks every argument of `dot_product_attention`, and translates the call to mods and a BlockMask."""
    query, key, value = (_batched(x, name) for x, name in ((query, "query"), (key, "key"), (value, "value")))
    check_arrays(query, key, value, "BTNH")
    B, T, Hq, D = query.shape
    S = key.shape[1]
    bias = _checked_bias(bias, (B, Hq, T, S))
    mask = _checked_mask(mask, (B, Hq, T, S))
    scale, factor = _checked_scale(scale)
    scale = check_scale(scale, D)
    _check_flag(is_causal, "is_causal")
    q_lengths = _checked_seq_lengths(query_seq_lengths, "query_seq_lengths", B, T)
    kv_lengths = _checked_seq_lengths(key_value_seq_lengths, "key_value_seq_lengths", B, S)
    before, after = _checked_window(local_window_size)
    _check_implementation(implementation)
    config = check_config(config, None)
    band = Band(before, after if not is_causal else 0 if after is None else min(after, 0)).within(T, S)
    score_mod, block_mask, mask_mod = None, None, None
    if 0 not in (B, T, S):  # else there is nothing to index
        score_mod = _score_mod(factor, bias)
        block_mask, mask_mod = _masks(band, q_lengths, mask, (B, Hq, T, S), config)
    return FlexCall(query, key, value, score_mod, block_mask, mask_mod, kv_lengths, scale, implementation, config)


def _score_mod(factor: ArrayLike | None, bias: Array | None) -> ScoreMod | None:
    if factor is None and bias is None:
        return None
    added = None if bias is None else _broadcast_load(bias)

    def scale_and_add_bias(score, b, h, q_idx, kv_idx):
        score = score if factor is None else score * factor
        return score if added is None else score + jnp.asarray(added(b, h, q_idx, kv_idx), jnp.float32)

    return scale_and_add_bias


def _masks(
    band: Band, q_lengths: Array | None, mask: Array | None, shape: tuple[int, int, int, int], config: Config
) -> tuple[BlockMask | None, MaskMod | None]:
    """The mask of a call, as a BlockMask where blocks can be skipped."""
    B, Hq, T, S = shape
    parts: list[MaskMod] = []
    if band == Band(None, 0):
        parts.append(causal())
    elif band != Band():
        parts.append(sliding_window(*(n if side is None else side for side, n in zip(band, (T, S), strict=True))))
    if q_lengths is not None:
        parts.append(lambda b, h, q_idx, kv_idx: q_idx < q_lengths[b])
    if mask is not None:
        parts.append(_broadcast_load(mask))
    if not parts:
        return None, None
    mask_mod = parts[0] if len(parts) == 1 else and_masks(*parts)
    block = block_size_of(config)
    # Reading a mask costs a byte for each of its elements. That pays if several heads skip its empty blocks.
    listed = mask is not None and block[0] < T and (Hq > mask.shape[1] or Hq == 1 or 1 in mask.shape[2:])
    b, h = (1, 1) if mask is None else mask.shape[:2]
    sizes = (b if q_lengths is None else B, h, T, S)
    block_mask = band_block_mask(
        mask_mod, band, sizes, block, q_lengths, mask if listed else None,
        hides_more=mask is not None and not listed,
    )  # fmt: skip
    return (None, mask_mod) if block_mask is None else (block_mask, None)


def _broadcast_load(x: Array) -> MaskMod:
    """Reads an array [B, Hq, T, S] at the axes that are not 1."""
    kept = [axis for axis, size in enumerate(x.shape) if size > 1]
    x = x.reshape([x.shape[axis] for axis in kept])

    def load(b, h, q_idx, kv_idx):
        indices = (b, h, q_idx, kv_idx)
        return x[tuple(indices[axis] for axis in kept)]

    return load


def block_size_of(config: Config) -> tuple[int, int]:
    """The block size of a mask, of queries and keys: a multiple of the tiles of the user."""
    tiles = [x for x in (config.forward, config.dkv, config.dq) if x is not None]
    kv_tiles = tiles if config.decode is None else [*tiles, config.decode]
    return math.lcm(_BLOCK, *(x.block_q for x in tiles)), math.lcm(_BLOCK, *(x.block_kv for x in kv_tiles))


# --- checks of the arguments that `jax.nn.dot_product_attention` has


def _as_array(x: ArrayLike, name: str) -> jax.Array:
    """An argument as an array; numbers and nested sequences are converted, as everywhere in `jax.nn`."""
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError) as error:
        raise TypeError(f"`{name}` must be an array. Got {type(x).__name__}.") from error


def _batched(x: ArrayLike, name: str) -> jax.Array:
    """Query, key or value with four axes: adds the batch axis to three."""
    x = _as_array(x, name)
    heads, length = ("Hq", "T") if name == "query" else ("Hkv", "S")
    if x.ndim not in (3, 4):
        raise ValueError(
            f"`{name}` must have four axes, [B, {length}, {heads}, D], or three without the batch. Got "
            f"{describe_array(x)}. Add the axis of heads with `x[..., None, :]`; fold several batch axes into one, or "
            "`jax.vmap` the call."
        )
    return x if x.ndim == 4 else x[None]


def _checked_bias(bias: ArrayLike | None, shape: tuple[int, int, int, int]) -> jax.Array | None:
    """The bias with four axes; a boolean one as numbers, which `jax.nn` adds."""
    if bias is None:
        return None
    bias = _as_array(bias, "bias")
    bias = bias.astype(jnp.int8) if bias.dtype == jnp.bool_ else bias
    if not (jnp.issubdtype(bias.dtype, jnp.floating) or jnp.issubdtype(bias.dtype, jnp.integer)):
        raise TypeError(f"`bias` must be floating-point or integers. Got {describe_array(bias)}.")
    return _broadcastable(bias, "bias", shape)


def _checked_mask(mask: ArrayLike | None, shape: tuple[int, int, int, int]) -> jax.Array | None:
    """The mask with four axes."""
    if mask is None:
        return None
    mask = _as_array(mask, "mask")
    if mask.dtype != jnp.bool_:
        raise TypeError(
            f"`mask` must be boolean, True where a query attends. Got {describe_array(mask)}. Cast a mask of 0 and 1 "
            "with `.astype(bool)`; pass one that is added to the scores as `bias`."
        )
    return _broadcastable(mask, "mask", shape)


def _broadcastable(x: jax.Array, name: str, shape: tuple[int, int, int, int]) -> jax.Array:
    rule = f"`{name}` must be [B, Hq, T, S], each of them 1 or as in the call, {list(shape)}"
    if x.ndim > 4:
        raise ValueError(f"{rule}. Got {describe_array(x)}, with {x.ndim} axes. `jax.vmap` the call over the others.")
    full = x.reshape((1,) * (4 - x.ndim) + x.shape)
    for (letter, what), got, size in zip(_AXES, full.shape, shape, strict=True):
        if got not in (1, size):
            hint = ""
            if x.ndim == 3 and shape[0] > 1 and x.shape[0] == shape[0]:
                hint = (
                    f" Three axes are [Hq, T, S]: for one {name} for each batch entry, insert the heads, `x[:, None]`."
                )
            raise ValueError(f"{rule}. Got {describe_array(x)}: {letter} is {got}, for {size} {what}.{hint}")
    return full


def _checked_scale(scale: ArrayLike | None) -> tuple[Any, ArrayLike | None]:
    """The scale as a Python number or None, and a factor to apply to the scaled scores, or None."""
    if isinstance(scale, (jax.Array, np.ndarray)):
        real = jnp.issubdtype(scale.dtype, jnp.floating) or jnp.issubdtype(scale.dtype, jnp.integer)
        if scale.shape != () or not real:
            raise TypeError(
                f"`scale` must be one real number. Got {describe_array(scale)}. To scale by head or position, multiply "
                "`query` or `key`, or use a `score_mod` with `jflex.flex_attention`."
            )
        return 1.0, jnp.asarray(scale).astype(jnp.float32)
    if isinstance(scale, (int, float, np.number)) and not isinstance(scale, bool) and scale == 0:
        return 1.0, 0.0
    return scale, None


def _check_flag(flag: object, name: str) -> None:
    """Raises TypeError unless a flag is known while tracing."""
    if not isinstance(flag, (bool, np.bool_)):
        hint = f" Under `jax.jit`, make it static: `static_argnames={name!r}`." if isinstance(flag, Tracer) else ""
        raise TypeError(f"`{name}` must be True or False. Got {type(flag).__name__}.{hint}")


def _checked_seq_lengths(lengths: ArrayLike | None, name: str, B: int, size: int) -> jax.Array | None:
    """Lengths as an int32 array."""
    if lengths is None:
        return None
    array = _as_array(lengths, name)
    known = lengths.astype(array.dtype) if isinstance(lengths, np.ndarray) else array  # inside of `jit`, too
    return checked_lengths(known, B, size, name, "queries" if name == "query_seq_lengths" else "keys", "Clamp")


def _checked_window(window: int | tuple[int, int] | None) -> tuple[int | None, int | None]:
    """``(before, after)``, with None for a side without a bound.

    A window that hides every key has no bound on the sides that are -1, as in FlashAttention: ``(-1, 0)`` is causal.
    """
    if window is None:
        return None, None
    rule = "`local_window_size` must be a Python int, or a pair (left, right) of them"
    sides = tuple(window) if isinstance(window, (tuple, list)) else (window, window)
    try:
        before, after = (operator.index(side) for side in sides if not isinstance(side, (bool, jax.Array)))
    except (TypeError, ValueError):
        raise TypeError(
            f"{rule}. Got {window!r}. For sizes that are data, pass arrays to `jflex.masks.sliding_window`, and the "
            "mask to `jflex.flex_attention`."
        ) from None
    if before >= -after:
        return before, after
    if -1 not in (before, after):
        raise ValueError(
            f"{rule}, of keys before and after the position of the query. Got {(before, after)}, which hides every "
            "key. Pass -1 for a side without a bound."
        )
    return None if before == -1 else before, None if after == -1 else after


def _check_implementation(implementation: Implementation) -> None:
    """Raises ValueError for a name that jflex does not have."""
    if "cudnn" in (hashable(implementation) or ()):
        raise ValueError(
            "`implementation` cannot be 'cudnn', which `jax.nn.dot_product_attention` has: jflex does not call cuDNN. "
            "Pass None, which selects among jflex's own kernels, or 'mosaic_gpu' or 'triton' by name."
        )
    names_of(implementation)

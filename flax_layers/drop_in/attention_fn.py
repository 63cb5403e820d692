"""`attention_fn`: runs jflex in Flax's own attention layers."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype as linen_promote_dtype
from flax.typing import Dtype
from jaxtyping import Array, Bool, Float, Int, Num

import jflex
from flax_layers.attention.capture import without_capture
from flax_layers.attention.constant_mask import block_mask_data
from flax_layers.attention.core import fold_batch
from flax_layers.attention.layer import AttentionOptions
from flax_layers.attention.mods import Mods
from flax_layers.drop_in.flax_arguments import (
    DropoutOptions,
    allowed_lengths,
    check_flax_arguments,
    dropout_options,
    four_axes,
    matmul_precision,
    reader,
)
from flax_layers.linen.mods import create_parameters
from flax_layers.nnx.stored_mods import ModAttributes, check_no_hidden_state, is_state, stored
from jflex.block_mask.bands import Band, band_block_mask
from jflex.jax_nn import block_size_of
from jflex.mods.signature import answers_keywords


@answers_keywords
def attention_fn(
    score_mod: jflex.ScoreMod | None = None,
    mask_mod: jflex.MaskMod | None = None,
    block_mask: jflex.BlockMask | None = None,
    *,
    scale: float | None = None,
    decode: bool | None = None,
    implementation: str | tuple[str, ...] | None = None,
    config: jflex.Config | None = None,
) -> AttentionFn:
    """A function for `attention_fn=` of `nnx.MultiHeadAttention` and `linen.MultiHeadDotProductAttention`.

    Mods and masks are those of `jflex.flex_attention`, combined with the arguments that Flax passes: a score is
    ``score_mod(scale * <query, key>) + bias``, and a query attends to a key if `mask_mod` or `block_mask`, the `mask`
    of the call and `is_causal` all allow it. The kernel reads a dense `mask` or `bias` tile by tile; a bias gets its
    gradient. A `mask_mod` needs no such array. `is_causal` skips the blocks above the diagonal, and a `block_mask`
    skips blocks that it does not list. (With either, a dense mask is read once before, to find its empty blocks.)

    A mod may be a callable `nnx.Module` with parameters. Then the function is a module too, and becomes a child of the
    `nnx.MultiHeadAttention`. In linen, a mod may be a module of the caller, or capture what `self.param` returned.

    In decode mode, Flax passes one query, the whole cache and a mask, but not the position of the query. With
    `decode=True`, that position is the last key that the mask allows for any head of any sequence. This is the index of
    the cache, unless a mask of the caller excludes the newest token for all of them.

    Two things differ from Flax's own function: a query that attends to no key returns 0, not the mean of all values;
    and scores and softmax are in float32 for every dtype.

    Args:
        score_mod: `(score, b, h, q_idx, kv_idx) -> score`; `b` counts all leading axes, the last fastest.
        mask_mod: `(b, h, q_idx, kv_idx) -> bool`, true where the query attends to the key.
        block_mask: A `jflex.BlockMask` in place of `mask_mod`. In decode mode, its mask_mod is used.
        scale: Factor of the raw scores. Default: ``head_dim ** -0.5``, as in Flax.
        decode: The meaning of a call with one query, several keys and a mask. True: a step of Flax's decode mode.
            False: a single query at position 0. Default: such a call is refused if there are mods or `is_causal`.
        implementation: The jflex backend, or a sequence of them in order of preference. Default: jflex chooses.
        config: Tile sizes. Default: tuned tile sizes.

    Returns:
        The function. It takes every argument of `nnx.dot_product_attention` and of `linen.dot_product_attention`.

    Raises:
        ValueError: Both `mask_mod` and `block_mask` are set; with `decode`, the BlockMask masks more than its
            mask_mod; or a function holds NNX parameters.

    Example:
        >>> from flax import nnx
        >>> alibi = jflex.scores.alibi(jflex.scores.alibi_slopes(4))
        >>> function = attention_fn(alibi, jflex.masks.causal(), decode=True)
        >>> layer = nnx.MultiHeadAttention(4, 32, attention_fn=function, decode=False, rngs=nnx.Rngs(0))
        >>> inputs = jnp.sin(jnp.arange(2 * 5 * 32.0)).reshape(2, 5, 32)
        >>> whole = layer(inputs)
        >>> layer.decode = True
        >>> layer.init_cache(inputs.shape)
        >>> tokens = [layer(inputs[:, i : i + 1]) for i in range(5)]
        >>> print(jnp.allclose(jnp.concatenate(tokens, axis=1), whole, atol=1e-5))
        True
    """
    if mask_mod is not None and block_mask is not None:
        raise ValueError(
            "`mask_mod` and `block_mask` are two forms of one mask. Got both. Pass one: to combine masks, use "
            "`jflex.create_block_mask(jflex.and_masks(f, g), ...)`."
        )
    if decode and block_mask is not None and not block_mask.lists_follow_mod:
        raise ValueError(
            "`block_mask` masks more than its mask_mod, so it cannot be used with `decode`. Pass a `mask_mod` of "
            "positions in the whole sequence instead."
        )
    for name, mod in (("score_mod", score_mod), ("mask_mod", mask_mod)):
        check_no_hidden_state(name, mod, "Make it a callable nnx.Module.")
    mods = Mods(stored("score_mod", score_mod), stored("mask_mod", mask_mod), stored("block_mask", block_mask))
    kind = AttentionModule if any(map(is_state, mods)) else AttentionFn
    return kind(mods, decode, {"scale": scale, "implementation": implementation, "config": config})


class AttentionFn:
    """The return value of `attention_fn`, in place of Flax's `dot_product_attention`.

    `options` are other arguments of `jflex.flex_attention`.
    """

    def __init__(self, mods: Mods, decode: bool | None, options: AttentionOptions):
        self.score_mod = mods.score_mod
        self.mask_mod = mods.mask_mod
        self.block_mask = mods.block_mask
        self.decode = decode
        self.options = options

    def __call__(
        self,
        query: Float[Array, "*batch T Hq D"],
        key: Float[Array, "*batch S Hkv D"],
        value: Float[Array, "*batch S Hkv Dv"],
        bias: Float[Array, "*shape"] | None = None,
        mask: Num[Array, "*shape"] | Bool[Array, "*shape"] | None = None,
        *,
        broadcast_dropout: bool = True,
        dropout_rng: Array | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: Dtype | None = None,
        precision: jax.lax.PrecisionLike | jax.lax.DotAlgorithmPreset = None,
        module: object = None,
        is_causal: bool = False,
        input_positions: Int[Array, "*shape"] | None = None,
        promote_dtype: Callable[..., tuple[Array, Array, Array]] | None = None,
        force_fp32_for_softmax: bool = False,
        einsum_dot_general: object = None,
        qk_attn_weights_einsum: object = None,
        attn_weights_value_einsum: object = None,
    ) -> Float[Array, "*batch T Hq Dv"]:
        """Computes attention. The signature lists every argument of Flax, because linen inspects it.

        Each key head is shared by `Hq // Hkv` query heads. `bias` is added to the scores, and a `mask` is 0 or
        False where a key is not attended to; both broadcast to [*batch, Hq, T, S]. Every weight is dropped with
        `dropout_rate` unless `deterministic`, with the same draws for all batch entries and heads if
        `broadcast_dropout`. Queries, keys and values are cast by `promote_dtype((query, key, value), dtype=dtype)`,
        or else to `dtype`, or else to their promoted dtype. `precision` is for float32 matrix products, forward
        and backward. With `is_causal`, a query attends only to keys up to its own position. The softmax is always
        in float32.

        Raises:
            NotImplementedError: `module`, which sows attention weights, `input_positions` or a function for an einsum
                is not None.
            ValueError: Shapes do not fit, the position of the query is unknown, or dropout has no key.
        """
        del force_fp32_for_softmax
        einsums = {
            "einsum_dot_general": einsum_dot_general,
            "qk_attn_weights_einsum": qk_attn_weights_einsum,
            "attn_weights_value_einsum": attn_weights_value_einsum,
        }
        dropout = dropout_options(dropout_rate, deterministic, broadcast_dropout, dropout_rng)
        check_flax_arguments(module=module, input_positions=input_positions, einsums=einsums)
        if promote_dtype is None:
            query, key, value = linen_promote_dtype(query, key, value, dtype=dtype)
        else:
            query, key, value = promote_dtype((query, key, value), dtype=dtype)
        _check_batch(query, key, value)
        create_parameters("score_mod", self.score_mod)
        create_parameters("mask_mod", self.mask_mod)
        score_mod, mask_mod = without_capture(self.score_mod), without_capture(self.mask_mod)
        mods = Mods(score_mod, mask_mod, block_mask_data(self.block_mask))
        call = _Call(mods, (query, key, value), bias, mask, is_causal)
        with matmul_precision(precision):
            attended = call.run(self.decode, self.options, dropout)
        return attended.reshape(*query.shape[:-1], value.shape[-1])


class AttentionModule(AttentionFn, ModAttributes):
    """An `AttentionFn` whose mods hold NNX parameters, or which is made inside ``jit`` of traced values."""


class _Call:
    """The arguments of a call, with all batch axes folded into one."""

    def __init__(
        self, mods: Mods, arrays: tuple[Array, Array, Array], bias: Array | None, mask: Array | None, is_causal: bool
    ):
        query, key, value = arrays
        shape = (*query.shape[:-3], query.shape[-2], query.shape[-3], key.shape[-3])
        self.mods = mods
        self.query, self.key, self.value = fold_batch(query), fold_batch(key), fold_batch(value)
        self.bias = None if bias is None else four_axes("bias", jnp.asarray(bias), shape)
        self.mask = None if mask is None else four_axes("mask", jnp.asarray(mask).astype(bool), shape)
        self.dense = None if self.mask is None else reader(self.mask)
        self.causal = jflex.masks.causal() if is_causal else None
        self.B, self.T, self.S, self.Hq = self.query.shape[0], *shape[-2:], shape[-3]

    def run(self, decode: bool | None, options: AttentionOptions, dropout: DropoutOptions) -> Float[Array, "B T Hq Dv"]:
        lengths, mods, causal = None, self.mods, self.causal
        if self.T == 1 and self.mask is not None:
            if decode is None and self.S > 1:
                self._check_no_mods()
            if mods.block_mask is None or decode:
                lengths = allowed_lengths(self.mask, self.B, self.S)
            if decode and lengths is not None:
                mods = mods.for_decoding()
                mods = mods.at(jnp.max(lengths, initial=1) - 1)
                causal = None  # keys after the query are beyond `lengths`
        mask_mod, block_mask = self._mask(mods, causal, block_size_of(options["config"] or jflex.Config()))
        score_mod = self._with_bias(mods.score_mod)
        return jflex.flex_attention(
            self.query, self.key, self.value, score_mod, block_mask, mask_mod=mask_mod, kv_lengths=lengths,
            **options, **dropout,
        )  # fmt: skip

    def _mask(
        self, mods: Mods, causal: jflex.MaskMod | None, block_size: tuple[int, int]
    ) -> tuple[jflex.MaskMod | None, jflex.BlockMask | None]:
        """The conjunction of the mods' mask, `is_causal` and the dense mask: a mask_mod or a BlockMask."""
        masks = [mask for mask in (mods.mask_mod, causal, self.dense) if mask is not None]
        combined = jflex.and_masks(*masks) if len(masks) > 1 else masks[0] if masks else None
        if 0 in (self.B, self.T, self.S):
            return (combined, None) if mods.block_mask is None else (None, mods.block_mask)
        if mods.block_mask is None:
            block_mask = None
            if combined is not None and causal is not None and self.T > 1:
                block_mask = self._blocks(combined, causal, block_size, hides_more=mods.mask_mod is not None)
            return (combined, None) if block_mask is None else (None, block_mask)
        if combined is None:
            return None, mods.block_mask
        block_size = mods.block_mask.block_size
        listed = self._blocks(combined, causal, block_size)
        if listed is None:  # there is only one block, for example
            sizes = (1, 1) if self.mask is None else self.mask.shape[:2]
            batch, heads = (size if size > 1 else None for size in sizes)
            listed = jflex.create_block_mask(combined, batch, heads, self.T, self.S, block_size=block_size)
        return None, mods.block_mask & listed

    def _blocks(
        self,
        combined: jflex.MaskMod,
        causal: jflex.MaskMod | None,
        block_size: tuple[int, int],
        hides_more: bool = False,
    ) -> jflex.BlockMask | None:
        """The BlockMask without blocks above the diagonal or empty in the dense mask; None if it would skip none."""
        band, shape = Band(None, None if causal is None else 0), (self.B, self.Hq, self.T, self.S)
        return band_block_mask(combined, band, shape, block_size, mask=self.mask, hides_more=hides_more)

    def _with_bias(self, score_mod: jflex.ScoreMod | None) -> jflex.ScoreMod | None:
        if self.bias is None:
            return score_mod
        jflex.check_mod_sizes(score_mod, batch=self.B, heads=self.Hq, queries=self.T, keys=self.S)
        read = reader(self.bias)

        def biased(score, b, h, q_idx, kv_idx):
            score = score if score_mod is None else score_mod(score, b, h, q_idx, kv_idx)
            return score + read(b, h, q_idx, kv_idx).astype(jnp.float32)

        return biased

    def _check_no_mods(self) -> None:
        """Refuses mods and `is_causal`, which need the position of the query."""
        for name, value in {**self.mods._asdict(), "is_causal": self.causal}.items():
            if value is not None:
                raise ValueError(
                    f"`{name}` needs the position of the query, which Flax does not pass. Got one query, {self.S} keys "
                    "and a `mask`. In decode mode, pass decode=True to `attention_fn`: the query is at the last key "
                    "that the mask allows. For a single query in cross-attention, pass decode=False: the query is at "
                    "position 0. Or use `FlexAttention` of flax_layers, which knows the positions in its caches."
                )


def _check_batch(query: Array, key: Array, value: Array) -> None:
    shapes = {"query": query.shape, "key": key.shape, "value": value.shape}
    if min(map(len, shapes.values())) < 3 or len({shape[:-3] for shape in shapes.values()}) > 1:
        got = ", ".join(f"`{name}` {list(shape)}" for name, shape in shapes.items())
        raise ValueError(
            f"`query`, `key` and `value` must be [*batch, length, heads, head_dim] with the same batch axes. Got {got}."
        )

"""Attributes and checks of the attention layers of nnx and linen."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias, TypedDict

import jax.numpy as jnp
from flax import linen, nnx
from flax.typing import Dtype
from jaxtyping import Array, Float, Int

import jflex
from flax_layers import functional
from flax_layers.attention.caches.dense import DenseCache, known
from flax_layers.attention.caches.owned_pages import OwnedPages
from flax_layers.attention.capture import without_capture
from flax_layers.attention.constant_mask import block_mask_data
from flax_layers.attention.mods import Mods
from flax_layers.attention.selection import BlockSelection
from jflex.rotary import RotaryScaling

Norm: TypeAlias = Callable[[Array], Array]
Projection: TypeAlias = nnx.Linear | linen.Dense


class AttentionOptions(TypedDict):
    """Arguments of every attention call of a layer."""

    scale: float | None
    implementation: str | tuple[str, ...] | None
    config: jflex.Config | None


class Layer:
    """Attributes of an attention layer, nnx or linen."""

    in_features: int
    num_heads: int
    score_mod: jflex.ScoreMod | None
    mask_mod: jflex.MaskMod | None
    block_mask: jflex.BlockMask | BlockSelection | nnx.Variable[jflex.BlockMask] | None
    scale: float | None
    rotary_base: float | None
    rotary_scaling: RotaryScaling | None
    rotary_dim: int | None = None
    rotary_interleaved: bool = False
    implementation: str | tuple[str, ...] | None
    config: jflex.Config | None
    query: Projection
    out: Projection
    query_norm: Norm | None

    def _mods(
        self,
        score_mod: jflex.ScoreMod | None,
        mask_mod: jflex.MaskMod | None,
        block_mask: jflex.BlockMask | BlockSelection | None = None,
    ) -> Mods:
        """The mods of a call, or else of the constructor."""
        stored = Mods().replaced_by(self.score_mod, self.mask_mod, block_mask_data(self.block_mask))
        mods = stored.replaced_by(score_mod, mask_mod, block_mask)
        return mods._replace(score_mod=without_capture(mods.score_mod), mask_mod=without_capture(mods.mask_mod))

    def _compute_dtype(self) -> Dtype:
        """The dtype of the computation, or of the parameters where the layer has none of its own."""
        raise NotImplementedError


def attention_options(layer: Layer, scale: float | None) -> AttentionOptions:
    """Options that every attention call of a layer gets."""
    return {"scale": scale, "implementation": layer.implementation, "config": layer.config}


def check_features(layer: Layer, inputs: Float[Array, "*batch T features"]) -> None:
    """Raises ValueError unless the last axis has the `in_features` of the layer."""
    if inputs.shape[-1] != layer.in_features:
        raise ValueError(
            f"`inputs` must have `in_features`, {layer.in_features}, in its last axis. Got shape {inputs.shape}."
        )


def rotated(
    layer: Layer, heads: Float[Array, "*batch T H D"], positions: Int[Array, "*#batch T"], length: int | None
) -> Float[Array, "*batch T H D"]:
    """Queries or keys with the rotary embedding of the layer, if it has one; `length` as for `functional.rotate`."""
    if layer.rotary_base is None:
        return heads
    options = {"rotary_dim": layer.rotary_dim, "interleaved": layer.rotary_interleaved, "length": length}
    return functional.rotate(heads, positions, layer.rotary_base, scaling=layer.rotary_scaling, **options)


def check_dense(inputs: Float[Array, "*batch T features"], cache: object, kind: type[DenseCache | OwnedPages]) -> None:
    """Raises unless a dense cache has the type and the batch size of a call."""
    if not isinstance(cache, kind):
        raise TypeError(
            f"`cache` must be a {kind.__name__}. Got {type(cache).__name__}. Make one with `layer.init_cache`, or pass "
            "a paged cache to `layer.decode_paged`."
        )
    if math.prod(inputs.shape[:-2]) != cache.batch_size:
        raise ValueError(
            f"`inputs` must have as many sequences as the cache, {cache.batch_size}. Got {math.prod(inputs.shape[:-2])}"
            f", the product of all axes but the last two of {inputs.shape}. Make the cache with this batch size."
        )


def check_packed(inputs: Float[Array, "N features"]) -> None:
    """Raises ValueError unless the tokens of requests are packed."""
    if inputs.ndim != 2:
        raise ValueError(
            f"`inputs` must be [N, features]: the tokens of all requests, packed. Got {inputs.shape}. Reshape "
            "[B, T, features] to [B * T, features], with `qo_indptr` in steps of T."
        )


def nan_beyond_room(
    outputs: Float[Array, "*batch T features"], cache: DenseCache | OwnedPages
) -> Float[Array, "*batch T features"]:
    """NaN in place of the outputs of tokens that a cache had no room for; known lengths have been checked."""
    if known(cache.lengths) is not None:
        return outputs
    tokens = outputs.shape[-2]
    positions = cache.lengths[:, None] - tokens + jnp.arange(tokens, dtype=jnp.int32)[None]
    has_room = (positions < cache.max_length).reshape(*outputs.shape[:-1], 1)
    return jnp.where(has_room, outputs, jnp.full((), jnp.nan, outputs.dtype))

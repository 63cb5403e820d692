"""The computation of multi-head latent attention (MLA), for the layers of nnx and linen.

DeepSeek-AI 2024, DeepSeek-V2, arXiv:2405.04434, section 2.1. Both forms have the same parameters:

* *up-projected*: keys and values of each head are made of the latent vectors. For many queries.
* *absorbed*: queries go into the latent space, and the latent vectors are key and value. For few queries.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from flax.typing import Dtype
from jaxtyping import Array, Float, Int, Int32

import jflex
from flax_layers import functional
from flax_layers.attention.caches.dense import known
from flax_layers.attention.caches.owned_pages import DenseLatentCache
from flax_layers.attention.layer import (
    Layer,
    Norm,
    Projection,
    attention_options,
    check_dense,
    check_features,
    check_packed,
    nan_beyond_room,
    rotated,
)
from flax_layers.attention.mods import Mods
from jflex.paged.eight_bits import QUERIES
from jflex.paged.latent import check_latent_cache
from jflex.rotary import YarnScaling


class LatentLayer(Layer):
    """Attributes of a `MultiHeadLatentAttention`, nnx or linen."""

    latent_dim: int
    nope_head_dim: int
    rope_head_dim: int
    value_head_dim: int
    query_down: Projection | None
    latent: Projection
    latent_norm: Norm

    def up_kernel(self) -> Float[Array, "latent Hq_times_both"]:
        """The projection of latent vectors to keys and values of each head: `nope` columns, then value columns."""
        raise NotImplementedError


class Queries(NamedTuple):
    """Queries in two parts; the second one is rotated."""

    nope: Float[Array, "*batch T Hq nope"]
    rope: Float[Array, "*batch T Hq rope"]


class Latents(NamedTuple):
    """The content of a cache for each token: its latent vector, normalized, and its rotated key."""

    latent: Float[Array, "*batch T latent"]
    rope_key: Float[Array, "*batch T rope"]


class Up(NamedTuple):
    """The up-projections of each head."""

    key: Float[Array, "latent Hq nope"]
    value: Float[Array, "latent Hq v"]


def check_sizes(num_heads: int, **sizes: int) -> None:
    """Raises ValueError unless a layer has heads, and each of its sizes is positive."""
    for name, size in {"num_heads": num_heads, **sizes}.items():
        if size < 1:
            raise ValueError(f"`{name}` must be at least 1. Got {size}. Change it.")


def scale_of(layer: LatentLayer) -> float:
    """The factor of the scores, in both forms: from the head size before queries are absorbed.

    YaRN with `mscale_all_dim` sharpens all of a score, and not only its rotated part, as in DeepSeek-V2 and V3.
    """
    if layer.scale is not None:
        return layer.scale
    scale, yarn = (layer.nope_head_dim + layer.rope_head_dim) ** -0.5, layer.rotary_scaling
    if not isinstance(yarn, YarnScaling) or not yarn.mscale_all_dim or yarn.factor <= 1:
        return scale
    return scale * (0.1 * yarn.mscale_all_dim * math.log(yarn.factor) + 1) ** 2


def queries_of(
    layer: LatentLayer,
    inputs: Float[Array, "*batch T features"],
    positions: Int[Array, "*#batch T"],
    length: int | None,
) -> Queries:
    """Queries of a call; `length` as for `flax_layers.functional.rotate`."""
    check_features(layer, inputs)
    query_inputs = inputs
    if layer.query_down is not None and layer.query_norm is not None:
        query_inputs = layer.query_norm(layer.query_down(inputs))
    heads = functional.split_heads(layer.query(query_inputs), layer.num_heads)
    nope, rope = jnp.split(heads, [layer.nope_head_dim], axis=-1)
    return Queries(nope, rotated(layer, rope, positions, length))


def latents_of(
    layer: LatentLayer,
    inputs: Float[Array, "*batch T features"],
    positions: Int[Array, "*#batch T"],
    length: int | None,
) -> Latents:
    """The latent vectors and the rotated keys of the tokens of a call."""
    latent, rope_key = jnp.split(layer.latent(inputs), [layer.latent_dim], axis=-1)
    rope_key = rotated(layer, rope_key[..., None, :], positions, length)[..., 0, :]
    return Latents(layer.latent_norm(latent), rope_key)


def up_projections(layer: LatentLayer, dtype: Dtype) -> Up:
    """The up-projections in the dtype of the computation."""
    kernel = layer.up_kernel().astype(dtype).reshape(layer.latent_dim, layer.num_heads, -1)
    return Up(*jnp.split(kernel, [layer.nope_head_dim], axis=-1))


def up_projected(
    layer: LatentLayer, tokens: Latents
) -> tuple[Float[Array, "*batch T Hq D"], Float[Array, "*batch T Hq v"]]:
    """Keys and values of each head."""
    up = up_projections(layer, tokens.latent.dtype)
    nope = jnp.einsum("...c,chd->...hd", tokens.latent, up.key)
    rope = jnp.broadcast_to(tokens.rope_key[..., None, :], (*nope.shape[:-1], layer.rope_head_dim))
    return jnp.concatenate([nope, rope], axis=-1), jnp.einsum("...c,chv->...hv", tokens.latent, up.value)


def absorbed(layer: LatentLayer, query: Queries) -> Float[Array, "*batch T Hq W"]:
    """Queries in the latent space, beside their rotated part."""
    up = up_projections(layer, query.nope.dtype)
    return jnp.concatenate([jnp.einsum("...hd,chd->...hc", query.nope, up.key), query.rope], axis=-1)


def joined(layer: LatentLayer, attended: Float[Array, "*batch T Hq latent"]) -> Float[Array, "*batch T features"]:
    """The output of absorbed attention, up-projected to values of heads, through the output projection."""
    up = up_projections(layer, attended.dtype)
    return layer.out(functional.merge_heads(jnp.einsum("...hc,chv->...hv", attended, up.value)))


def fewest_queries_to_project(layer: LatentLayer) -> int:
    """The number of queries of a sequence from which the up-projected form takes fewer operations.

    For each key and head, T queries take ``2 * T * (2 * latent + rope)`` absorbed, and ``2 * T * (nope + rope + v) + 2
    * latent * (nope + v)`` up-projected: 171 with the sizes of DeepSeek-V3.
    """
    both = layer.nope_head_dim + layer.value_head_dim
    saved = 2 * layer.latent_dim + layer.rope_head_dim - (both + layer.rope_head_dim)
    return math.ceil(layer.latent_dim * both / saved) if saved > 0 else 1 << 30


def attend(
    layer: LatentLayer, inputs: Float[Array, "*batch T features"], mods: Mods, positions: Int[Array, "*#batch T"] | None
) -> Float[Array, "*batch T features"]:
    """Computes the call of a layer, up-projected."""
    length = inputs.shape[-2]
    known = length if positions is None else None
    positions = jnp.arange(length) if positions is None else positions
    query = jnp.concatenate(queries_of(layer, inputs, positions, known), axis=-1)
    key, value = up_projected(layer, latents_of(layer, inputs, positions, known))
    q, k, v = (x.reshape(-1, *x.shape[-3:]) for x in (query, key, value))
    options = attention_options(layer, scale_of(layer))
    attended = jflex.flex_attention(q, k, v, mods.score_mod, mods.mask_for(q, k), mask_mod=mods.mask_mod, **options)
    return layer.out(functional.merge_heads(attended.reshape(*query.shape[:-1], layer.value_head_dim)))


def decode(
    layer: LatentLayer, inputs: Float[Array, "*batch T features"], cache: DenseLatentCache, mods: Mods
) -> tuple[Float[Array, "*batch T features"], DenseLatentCache]:
    """Computes `decode` of a layer, in the form that takes fewer operations for so many tokens."""
    check_dense(inputs, cache, DenseLatentCache)
    tokens, before = inputs.shape[-2], cache.lengths
    mods = mods.for_decoding(tokens)
    rows = inputs.reshape(cache.batch_size, *inputs.shape[-2:])
    positions = before[:, None] + jnp.arange(tokens, dtype=jnp.int32)[None]
    query = queries_of(layer, rows, positions, cache.max_length)
    cache = cache.append(*latents_of(layer, rows, positions, cache.max_length))
    options = attention_options(layer, scale_of(layer))
    if tokens < fewest_queries_to_project(layer):
        pages = cache.pages.rows
        q = absorbed(layer, query).astype(pages.dtype).reshape(-1, layer.num_heads, pages.shape[-1])
        attended = jflex.mla_attention(
            q, cache.pages, cache.batch(tokens), score_mod=mods.score_mod, mask_mod=mods.mask_mod, **options
        )
        attended = attended.astype(query.nope.dtype).reshape(*inputs.shape[:-1], *attended.shape[1:])
        return nan_beyond_room(joined(layer, attended), cache), cache
    stored = jnp.split(cache.rows(), [layer.latent_dim], axis=-1)
    key, value = up_projected(layer, Latents(*(x.astype(query.nope.dtype) for x in stored)))
    shifted = mods.at(before)
    attended = jflex.flex_attention(
        jnp.concatenate(query, axis=-1), key, value, shifted.score_mod, mask_mod=shifted.mask_mod,
        kv_lengths=jnp.minimum(cache.lengths, cache.max_length), **options,
    )  # fmt: skip
    return nan_beyond_room(layer.out(functional.merge_heads(attended)).reshape(inputs.shape), cache), cache


def decode_paged(
    layer: LatentLayer,
    inputs: Float[Array, "N features"],
    cache: jflex.paged.LatentCache,
    batch: jflex.paged.PagedBatch,
    mods: Mods,
    number: int | Int32[Array, ""] | None,
    *,
    new_prompts: bool,
) -> tuple[Float[Array, "N features"], jflex.paged.LatentCache]:
    """Computes `decode_paged` of a layer; `number` is the index of the layer in the cache."""
    check_packed(inputs)
    check_latent_cache(cache)
    tokens, mods = inputs.shape[0], mods.for_decoding()
    jflex.paged.check_batch(batch, cache, tokens)
    positions = jflex.paged.token_positions(batch, tokens)
    length = batch.page_table.shape[1] * cache.page_size
    query, new = queries_of(layer, inputs, positions, length), latents_of(layer, inputs, positions, length)
    slots = jflex.paged.token_slots(batch, tokens, cache.page_size)
    dtype = cache.keys.dtype if cache.scale is None else query.nope.dtype  # before quantization
    if cache.scale is not None and str(dtype) not in QUERIES:
        raise TypeError(
            f"`dtype` of the layer must be one of {', '.join(QUERIES)}: the cache holds {cache.rows.dtype} with "
            f"scales. Got {dtype}."
        )
    latent, rope_key = (x.astype(dtype) for x in new)
    cache = jflex.paged.write_latent(cache, latent, rope_key, slots, layer=number)
    options = {**attention_options(layer, scale_of(layer)), "score_mod": mods.score_mod, "mask_mod": mods.mask_mod}
    if not new_prompts:
        attended = jflex.mla_attention(absorbed(layer, query).astype(dtype), cache, batch, layer=number, **options)
        return joined(layer, attended.astype(query.nope.dtype)), cache
    _check_new(batch)
    key, value = up_projected(layer, new)
    ends = jnp.asarray(batch.qo_indptr)
    attended = jflex.flex_attention_varlen(
        jnp.concatenate(query, axis=-1), key, value, cu_seqlens_q=ends, cu_seqlens_k=ends, **options
    )
    return layer.out(functional.merge_heads(attended)), cache


def _check_new(batch: jflex.paged.PagedBatch) -> None:
    """Raises ValueError if a request is known to have keys from before the call."""
    indptr, lengths = known(batch.qo_indptr), known(batch.kv_lengths)
    if indptr is None or lengths is None or (np.diff(indptr) == lengths).all():
        return
    first = int(np.argmax(np.diff(indptr) != lengths))
    raise ValueError(
        "`new_prompts` must be False where a request has keys from before the call. Request "
        f"{first} has {int(np.diff(indptr)[first])} tokens and {int(lengths[first])} keys. Leave it out."
    )

"""The computation of the attention layers of nnx and linen."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Int32

import jflex
from flax_layers import functional
from flax_layers.attention import streaming as streaming_llm
from flax_layers.attention.caches.dense import DenseCache
from flax_layers.attention.caches.owned_pages import EightBitCache
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
from flax_layers.attention.mods import Mods, VectorModOptions, VectorMods
from flax_layers.attention.selection import BlockSelection
from flax_layers.attention.streaming import Streaming
from flax_layers.context_parallel import ContextParallel


class SharedPrefix(NamedTuple):
    """The first requests of a paged batch that begin with the same pages; a pytree, so both numbers may be traced.

    Attributes:
        requests: How many requests, counted from the first one.
        tokens: How many keys are on the pages, a multiple of the page size. Each of these requests has as many.
    """

    requests: int | Int32[Array, ""]
    tokens: int | Int32[Array, ""]


class HeadsLayer(Layer):
    """Attributes of a `FlexAttention`, nnx or linen."""

    in_kv_features: int | None
    num_kv_heads: int | None
    head_dim: int | None
    dropout_rate: float
    key: Projection
    value: Projection
    key_norm: Norm | None
    sinks: nnx.Variable | Array | None

    @property
    def sizes(self) -> tuple[int, int]:
        """Number of key heads, and the size of a head."""
        num_kv_heads = self.num_heads if self.num_kv_heads is None else self.num_kv_heads
        return num_kv_heads, self.in_features // self.num_heads if self.head_dim is None else self.head_dim


def check_heads(in_features: int, num_heads: int, num_kv_heads: int | None, head_dim: int | None) -> None:
    """Raises ValueError if the head counts or sizes of a layer do not fit."""
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"`num_kv_heads` must divide `num_heads`, so that every key head is shared by the same number of query "
            f"heads. Got num_heads={num_heads}, num_kv_heads={num_kv_heads}. Change one of them."
        )
    if head_dim is None and in_features % num_heads:
        raise ValueError(
            f"`num_heads` must divide `in_features` if `head_dim` is not set. Got in_features={in_features}, num_heads="
            f"{num_heads}. Pass `head_dim`, or change one of them."
        )


def check_dropout_rate(rate: float) -> None:
    """Raises ValueError if the `dropout_rate` of a layer is outside of [0, 1)."""
    if not 0 <= rate < 1:
        raise ValueError(f"`dropout_rate` must be at least 0 and less than 1. Got {rate}.")


class KeyValue(NamedTuple):
    """Projected keys and values for calls of cross-attention; a pytree.

    Attributes:
        key: Keys, normalized and rotated if the layer does so.
        value: Values, for the same positions.
    """

    key: Float[Array, "*batch S Hkv D"]
    value: Float[Array, "*batch S Hkv D"]


KeyValueInputs: TypeAlias = Float[Array, "*batch S kv_features"] | KeyValue | None
"""The source of keys and values in cross-attention, as features or projected; None for self-attention."""


DropoutKeys: TypeAlias = nnx.Rngs | nnx.RngStream | Array
"""Source of the key of a call, or the key."""


class CallOptions(VectorModOptions, total=False):
    """Keyword arguments of `FlexAttention.__call__`: `rngs` in nnx, `dropout_rng` in linen, the others in both."""

    rngs: DropoutKeys | None
    dropout_rng: Array | None
    score_mod: jflex.ScoreMod | None
    mask_mod: jflex.MaskMod | None
    block_mask: jflex.BlockMask | BlockSelection | None
    positions: Int[Array, "*#batch T"] | None
    context: ContextParallel | None
    inputs_kv: KeyValueInputs


Attended: TypeAlias = Float[Array, "*batch T features"] | tuple[Float[Array, "*batch T features"], jflex.AttentionStats]
"""The outputs of a call; or a pair of them and the statistics that it asked for."""


class Call(NamedTuple):
    """The arguments of a call of a layer beside inputs and mods, as in `FlexAttention.__call__`."""

    positions: Int[Array, "*#batch T"] | None
    dropout_key: Array | None
    return_stats: tuple[jflex.Stat, ...]
    vectors: VectorMods
    context: ContextParallel | None
    inputs_kv: KeyValueInputs


class PagedCall(NamedTuple):
    """The arguments of `decode_paged` beside inputs, cache, batch and mods; `number` is the layer's in the cache."""

    vectors: VectorMods
    number: int | Int32[Array, ""] | None = None
    shared: SharedPrefix | None = None
    streaming: Streaming | None = None


def query_heads(layer: HeadsLayer, inputs: Float[Array, "*batch T features"]) -> Float[Array, "*batch T Hq D"]:
    """Queries, split into heads and normalized, before they are rotated."""
    check_features(layer, inputs)
    query = functional.split_heads(layer.query(inputs), layer.num_heads)
    return query if layer.query_norm is None else layer.query_norm(query)


def key_value_heads(layer: HeadsLayer, inputs: Float[Array, "*batch S kv_features"]) -> KeyValue:
    """Keys and values, split into heads, keys normalized and not yet rotated."""
    features = layer.in_features if layer.in_kv_features is None else layer.in_kv_features
    if inputs.shape[-1] != features:
        raise ValueError(
            f"Keys and values must be projected from `in_kv_features`, {features}, in the last axis. Got shape "
            f"{inputs.shape}. Pass `inputs_kv` of that size, or change `in_kv_features` of the layer."
        )
    key = functional.split_heads(layer.key(inputs), layer.sizes[0])
    value = functional.split_heads(layer.value(inputs), layer.sizes[0])
    return KeyValue(key if layer.key_norm is None else layer.key_norm(key), value)


def project_kv(
    layer: HeadsLayer,
    inputs: Float[Array, "*batch S kv_features"],
    positions: Int[Array, "*#batch S"] | None = None,
    length: int | None = None,
) -> KeyValue:
    """Keys and values of a call, at 0, 1, 2, ... without `positions`; `length` as for `functional.rotate`."""
    if positions is None:
        length = inputs.shape[-2]
        positions = jnp.arange(length)
    key, value = key_value_heads(layer, inputs)
    return KeyValue(rotated(layer, key, positions, length), value)


def join(layer: HeadsLayer, attended: Float[Array, "*batch T Hq D"]) -> Float[Array, "*batch T features"]:
    """The output projection of the layer."""
    return layer.out(functional.merge_heads(attended))


def sinks(layer: HeadsLayer) -> Float[Array, " Hq"] | None:
    """The sinks of the layer, if it has any."""
    return None if layer.sinks is None else layer.sinks[...]


def fold_batch(heads: Float[Array, "*batch T H D"]) -> Float[Array, "B T H D"]:
    """Folds all leading axes into one batch axis, the last of them fastest.

    Example:
        >>> fold_batch(jnp.zeros((2, 3, 7, 4, 16))).shape, fold_batch(jnp.zeros((7, 4, 16))).shape
        ((6, 7, 4, 16), (1, 7, 4, 16))
    """
    return heads.reshape(math.prod(heads.shape[:-3]), *heads.shape[-3:])


def attend(layer: HeadsLayer, inputs: Float[Array, "*batch T features"], mods: Mods, call: Call) -> Attended:
    """Computes the call of a layer. It drops weights if there is a `dropout_key`.

    Raises:
        ValueError: Blocks are to be selected, or tokens to be divided among devices, where that is not supported; or
            axes of `inputs` and `inputs_kv` do not fit.
    """
    _check_call(inputs, mods, call)
    batch, length = inputs.shape[:-2], inputs.shape[-2]
    positions, known_length = call.positions, length if call.positions is None else None
    if positions is None:
        positions = jnp.arange(length) if call.context is None else call.context.positions(length)
    query = fold_batch(rotated(layer, query_heads(layer, inputs), positions, known_length))
    if call.inputs_kv is None:
        key_value = project_kv(layer, inputs, positions, known_length)
    else:
        key_value = call.inputs_kv if isinstance(call.inputs_kv, KeyValue) else project_kv(layer, call.inputs_kv)
    key, value = map(fold_batch, key_value)
    attention: Callable = jflex.flex_attention
    if call.context is not None:
        attention = functools.partial(jflex.context_parallel_attention, **call.context.arguments())
    if call.dropout_key is not None:
        attention = functools.partial(attention, dropout_rate=layer.dropout_rate, dropout_key=call.dropout_key)
    result = attention(
        query, key, value, mods.score_mod, mods.mask_for(query, key), mask_mod=mods.mask_mod, sinks=sinks(layer),
        **attention_options(layer, layer.scale), return_stats=call.return_stats, **call.vectors._asdict(),
    )  # fmt: skip
    attended, stats = result if isinstance(result, tuple) else (result, None)
    unfold = lambda x: x.reshape(*batch, *x.shape[1:])
    outputs = join(layer, unfold(attended))
    return outputs if stats is None else (outputs, jax.tree.map(unfold, stats))


def _check_call(inputs: Float[Array, "*batch T features"], mods: Mods, call: Call) -> None:
    if inputs.ndim < 2:
        raise ValueError(f"`inputs` must be [*batch, T, features]. Got shape {inputs.shape}. Add axes with `x[None]`.")
    for name, value in (("context", call.context), ("inputs_kv", call.inputs_kv)):
        if value is not None and mods.selection is not None:
            raise ValueError(
                f"`block_mask` must not be a BlockSelection in a call with `{name}`: it takes the tokens of whole "
                "sequences in their natural order, as queries and keys. Got a BlockSelection. Pass a BlockMask or a "
                f"`mask_mod` to this call, or leave out `{name}`."
            )
    if call.inputs_kv is None:
        return
    if call.context is not None:
        raise ValueError(
            "`context` divides the tokens of self-attention among devices. Got `inputs_kv`, too. Leave one of them out."
        )
    shape = call.inputs_kv.key.shape[:-1] if isinstance(call.inputs_kv, KeyValue) else call.inputs_kv.shape
    if len(shape) < 2 or (shape[:-2] != inputs.shape[:-2] and math.prod(shape[:-2]) != 1):
        raise ValueError(
            "`inputs_kv` must be [*batch, S, features], with the batch axes of `inputs` or axes of size 1, for keys "
            f"that all sequences share. Got {list(shape)} and `inputs` {list(inputs.shape)}."
        )


def decode(
    layer: HeadsLayer,
    inputs: Float[Array, "*batch T features"],
    cache: DenseCache,
    mods: Mods,
    block_mask: jflex.BlockMask | None,
    vectors: VectorMods,
) -> tuple[Float[Array, "*batch T features"], DenseCache]:
    """Computes `decode` of a layer. A `block_mask` covers the queries of this call and replaces the mask in `mods`."""
    check_dense(inputs, cache, DenseCache)
    batch, length = inputs.shape[:-2], inputs.shape[-2]
    before = cache.lengths
    mods = (Mods(mods.score_mod) if block_mask is not None else mods.for_decoding(length)).at(before)
    positions = before.reshape(*batch, 1) + jnp.arange(length, dtype=jnp.int32).reshape(*[1] * len(batch), length)
    query = rotated(layer, query_heads(layer, inputs), positions, cache.max_length)
    key, value = map(fold_batch, project_kv(layer, inputs, positions, cache.max_length))
    rows = jnp.indices(key.shape[:2], dtype=jnp.int32)[0]
    key, value = vectors.stored(key, value, positions.reshape(rows.shape), rows)
    cache = cache.append(key, value)
    attended = jflex.flex_attention(
        fold_batch(query).astype(cache.k.dtype), cache.k, cache.v, mods.score_mod, block_mask, mask_mod=mods.mask_mod,
        kv_lengths=cache.lengths, sinks=sinks(layer), **attention_options(layer, layer.scale),
        **vectors.for_cached_keys(before)._asdict(),
    )  # fmt: skip
    outputs = join(layer, attended.reshape(query.shape).astype(query.dtype))
    return nan_beyond_room(outputs, cache), cache


def decode_eight_bits(
    layer: HeadsLayer, inputs: Float[Array, "*batch T features"], cache: EightBitCache, mods: Mods, vectors: VectorMods
) -> tuple[Float[Array, "*batch T features"], EightBitCache]:
    """Computes `decode` of a layer over eight bits: its sequences are requests, which keep their pages."""
    check_dense(inputs, cache, EightBitCache)
    batch = cache.next_tokens(inputs.shape[-2])
    packed, mods = inputs.reshape(-1, inputs.shape[-1]), mods.for_decoding(inputs.shape[-2])
    outputs, pages = decode_paged(layer, packed, cache.pages, batch, mods, PagedCall(vectors))
    cache = dataclasses.replace(cache, pages=pages, lengths=batch.kv_lengths)
    outputs = outputs.reshape(*inputs.shape[:-1], outputs.shape[-1])
    return nan_beyond_room(outputs, cache), cache


def decode_paged(
    layer: HeadsLayer,
    inputs: Float[Array, "N features"],
    cache: jflex.paged.PagedCache,
    batch: jflex.paged.PagedBatch,
    mods: Mods,
    call: PagedCall,
) -> tuple[Float[Array, "N features"], jflex.paged.PagedCache]:
    """Computes `decode_paged` of a layer."""
    vectors, number, shared, streaming = call
    check_packed(inputs)
    if shared is not None and streaming is not None:
        raise ValueError(
            "`shared_prefix` and `streaming` must not be passed together. Got both. Leave one of them out."
        )
    if streaming is not None and vectors.any:
        raise ValueError(
            "`streaming` moves queries to other positions than those of vector mods, so they must not be passed "
            "together. Got both. Leave one of them out."
        )
    tokens = inputs.shape[0]
    jflex.paged.check_batch(batch, cache, tokens)
    mods = mods.for_decoding()
    positions, length = jflex.paged.token_positions(batch, tokens), batch.page_table.shape[1] * cache.page_size
    query, (key, value) = query_heads(layer, inputs), key_value_heads(layer, inputs)
    if streaming is None:
        query, key = rotated(layer, query, positions, length), rotated(layer, key, positions, length)
    dtype = query.dtype if cache.k_scale is not None else cache.k.dtype  # `write` quantizes to eight bits
    slots = jflex.paged.token_slots(batch, tokens, cache.page_size)
    requests = jflex.paged.token_requests(batch, tokens)
    key, value = vectors.stored(key, value, positions, requests)
    cache = jflex.paged.write(cache, key.astype(dtype), value.astype(dtype), slots, layer=number)
    packed = query.astype(dtype)
    options: dict[str, Any] = {**attention_options(layer, layer.scale), "sinks": sinks(layer)}
    if streaming is not None:
        rope = None
        if layer.rotary_base is not None:
            scaling, size = layer.rotary_scaling, streaming.size
            rope = jflex.rope(layer.rotary_base, scaling=scaling, rotary_dim=layer.rotary_dim, length=size)
        parts = streaming.parts(batch, tokens, rope, mods.score_mod, mods.mask_mod)
        attended = streaming_llm.attend(packed, cache, parts, layer=number, **options)
        return join(layer, attended.astype(query.dtype)), cache
    options |= {"query_mod": vectors.query_mod, "output_mod": vectors.output_mod}
    options |= {"score_mod": mods.score_mod, "mask_mod": mods.mask_mod}
    if shared is not None:
        levels = jflex.shared_prefix_levels(cache, batch, *shared, layer=number)
        attended = jflex.cascade_attention(packed, levels, positions=positions, requests=requests, **options)
    else:
        attended = jflex.paged_attention(packed, cache, batch, layer=number, **options)
    return join(layer, attended.astype(query.dtype)), cache

"""What the attention layers of nnx and linen compute."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int32

import jflex
from flax_layers import functional, streaming_llm
from flax_layers.block_selection import BlockSelection
from flax_layers.constant_mask import block_mask_data
from flax_layers.context_parallel import ContextParallel
from flax_layers.dense_cache import DenseCache
from flax_layers.eight_bit_cache import EightBitCache
from flax_layers.streaming_llm import Streaming
from flax_layers.vector_mods import VectorMods


class SharedPrefix(NamedTuple):
    """The first requests of a paged batch that begin with the same pages; a pytree, so both numbers may be traced.

    Attributes:
        requests: How many requests, counted from the first one.
        tokens: How many keys are on the pages, a multiple of the page size. Each of these requests has as many.
    """

    requests: Int32[Array, ""]
    tokens: Int32[Array, ""]


class Mods(NamedTuple):
    """The mods and the mask of a constructor or of a call; or, in place of a mask, the selection that makes one.

    Example:
        >>> own, softcap = Mods(mask_mod=jflex.masks.causal()), jflex.scores.softcap(30.0)
        >>> own.replaced_by(score_mod=softcap).mask_mod is own.mask_mod
        True
    """

    score_mod: jflex.ScoreMod | None = None
    mask_mod: jflex.MaskMod | None = None
    block_mask: jflex.BlockMask | None = None
    selection: BlockSelection | None = None

    def replaced_by(
        self,
        score_mod: jflex.ScoreMod | None = None,
        mask_mod: jflex.MaskMod | None = None,
        block_mask: jflex.BlockMask | BlockSelection | None = None,
    ) -> Mods:
        """Replaces these by those of a call. Either form of a mask replaces both."""
        score_mod = self.score_mod if score_mod is None else score_mod
        if mask_mod is None and block_mask is None:
            return self._replace(score_mod=score_mod)
        if isinstance(block_mask, BlockSelection):
            return Mods(score_mod, mask_mod, None, block_mask)
        return Mods(score_mod, mask_mod, block_mask)

    def mask_for(self, query: Float[Array, "B T Hq D"], key: Float[Array, "B T Hkv D"]) -> jflex.BlockMask | None:
        """The BlockMask of a call, made of its queries and keys if they select blocks."""
        return self.block_mask if self.selection is None else self.selection.block_mask(query, key)

    def for_decoding(self) -> Mods:
        """Replaces the BlockMask by its mask_mod, which takes positions in the whole sequence.

        Raises:
            ValueError: The BlockMask masks more than its mask_mod, or is a selection.
        """
        if self.selection is not None:
            raise ValueError(
                "The `block_mask` of this layer's constructor is a BlockSelection, which selects blocks in calls on "
                "whole sequences, so it cannot be used for decoding. Pass `mask_mod` to this call: with "
                "`jflex.masks.causal()`, tokens attend to all keys before them."
            )
        if self.block_mask is None:
            return self
        if self.mask_mod is not None or not self.block_mask.lists_follow_mod:
            raise ValueError(
                "The `block_mask` of this layer's constructor masks more than its mask_mod, so it cannot be used for "
                "decoding. Pass `mask_mod` to this call, a mask of positions in the whole sequence."
            )
        return Mods(self.score_mod, self.block_mask.mask_mod)

    def at(self, first: Int32[Array, ""] | Int32[Array, " B"]) -> Mods:
        """The mods for queries whose positions begin at `first`; they must have no BlockMask."""
        move = lambda mod: None if mod is None else jflex.with_offset(mod, first)
        return Mods(move(self.score_mod), move(self.mask_mod))


class LayerMods:
    """The mods and the mask that a layer's constructor got, and those of a call."""

    score_mod: Any
    mask_mod: Any
    block_mask: Any

    def _mods(
        self,
        score_mod: jflex.ScoreMod | None,
        mask_mod: jflex.MaskMod | None,
        block_mask: jflex.BlockMask | BlockSelection | None = None,
    ) -> Mods:
        """The mods of a call: its own, or else those of the constructor."""
        own = Mods().replaced_by(self.score_mod, self.mask_mod, block_mask_data(self.block_mask))
        return own.replaced_by(score_mod, mask_mod, block_mask)


class Layer(LayerMods):
    """The attributes of a layer, nnx or linen, that the functions below and `AttentionMethods` read."""

    in_features: Any
    num_heads: Any
    num_kv_heads: Any
    head_dim: Any
    scale: Any
    rotary_base: Any
    rotary_scaling: Any
    rotary_dim: Any
    implementation: Any
    config: Any
    dropout_rate: Any
    query: Any
    key: Any
    value: Any
    out: Any
    query_norm: Any
    key_norm: Any
    sinks: Any


def check_heads(in_features: int, num_heads: int, num_kv_heads: int, head_dim: int | None) -> None:
    """Raises ValueError if the head counts or sizes of a layer do not fit."""
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


def heads_of(
    layer: Layer, inputs: Float[Array, "*batch T features"]
) -> tuple[Float[Array, "*batch T Hq D"], Float[Array, "*batch T Hkv D"], Float[Array, "*batch T Hkv D"]]:
    """Queries, keys and values, split into heads and normalised, before they are rotated."""
    if inputs.shape[-1] != layer.in_features:
        raise ValueError(
            f"`inputs` must have `in_features`, {layer.in_features}, in its last axis. Got shape {inputs.shape}."
        )
    query = functional.split_heads(layer.query(inputs), layer.num_heads)
    key = functional.split_heads(layer.key(inputs), layer.num_kv_heads)
    value = functional.split_heads(layer.value(inputs), layer.num_kv_heads)
    if layer.query_norm is not None and layer.key_norm is not None:
        query, key = layer.query_norm(query), layer.key_norm(key)
    return query, key, value


def rotated(
    layer: Layer, heads: Float[Array, "*batch T H D"], positions: Int[Array, "*#batch T"], length: int | None
) -> Float[Array, "*batch T H D"]:
    """Queries or keys with the rotary embedding of the layer, if it has one; options as for `functional.rotate`."""
    if layer.rotary_base is None:
        return heads
    options = {"scaling": layer.rotary_scaling, "rotary_dim": layer.rotary_dim, "length": length}
    return functional.rotate(heads, positions, layer.rotary_base, **options)


def rope_of(layer: Layer, length: int) -> jflex.VectorMod | None:
    """The rotary embedding of the layer as a vector mod, if it has one."""
    if layer.rotary_base is None:
        return None
    return jflex.rope(layer.rotary_base, scaling=layer.rotary_scaling, rotary_dim=layer.rotary_dim, length=length)


def project(
    layer: Layer,
    inputs: Float[Array, "*batch T features"],
    positions: Int[Array, "*#batch T"],
    length: int | None = None,
) -> tuple[Float[Array, "*batch T Hq D"], Float[Array, "*batch T Hkv D"], Float[Array, "*batch T Hkv D"]]:
    """Queries, keys and values of a call; `length` as for `functional.rotate`."""
    query, key, value = heads_of(layer, inputs)
    return rotated(layer, query, positions, length), rotated(layer, key, positions, length), value


def join(layer: Layer, attended: Float[Array, "*batch T Hq D"]) -> Float[Array, "*batch T features"]:
    """The output projection of the layer."""
    return layer.out(functional.merge_heads(attended))


def sinks_of(layer: Layer) -> Float[Array, " Hq"] | None:
    """The sinks of the layer, if it has any."""
    return None if layer.sinks is None else layer.sinks[...]


def how_of(layer: Layer) -> dict[str, Any]:
    """Options that every attention call of the layer gets."""
    return {"scale": layer.scale, "implementation": layer.implementation, "config": layer.config}


def fold_batch(heads: Float[Array, "*batch T H D"]) -> Float[Array, "B T H D"]:
    """Folds all leading axes into one batch axis, the last of them fastest.

    Example:
        >>> fold_batch(jnp.zeros((2, 3, 7, 4, 16))).shape, fold_batch(jnp.zeros((7, 4, 16))).shape
        ((6, 7, 4, 16), (1, 7, 4, 16))
    """
    return heads.reshape(math.prod(heads.shape[:-3]), *heads.shape[-3:])


def attend(
    layer: Layer,
    inputs: Float[Array, "*batch T features"],
    mods: Mods,
    positions: Int[Array, "*#batch T"] | None,
    dropout_key: Any,
    vectors: VectorMods,
    return_stats: tuple[jflex.Stat, ...],
    context: ContextParallel | None,
) -> Float[Array, "*batch T features"] | tuple[Float[Array, "*batch T features"], jflex.AttentionStats]:
    """Computes the call of a layer. It drops weights if there is a `dropout_key`.

    Raises:
        ValueError: Blocks are to be selected of tokens that are divided among devices, or `inputs` have no axis of
            tokens.
    """
    if context is not None and mods.selection is not None:
        raise ValueError(
            "`block_mask` must not be a BlockSelection in a call with `context`: a BlockSelection takes the tokens of "
            "whole sequences in their natural order. Got a BlockSelection. Pass a BlockMask or a `mask_mod` to this "
            "call, or leave out `context`."
        )
    if inputs.ndim < 2:
        raise ValueError(f"`inputs` must be [*batch, T, features]. Got shape {inputs.shape}. Add axes with `x[None]`.")
    batch, length = inputs.shape[:-2], inputs.shape[-2]
    dropout: dict[str, Any] = {}
    if dropout_key is not None:
        dropout = {"dropout_rate": layer.dropout_rate, "dropout_key": dropout_key}
    known = length if positions is None else None
    if positions is None:
        positions = jnp.arange(length) if context is None else context.positions(length)
    query, key, value = map(fold_batch, project(layer, inputs, positions, known))
    call: Any = jflex.flex_attention
    if context is not None:
        call = functools.partial(jflex.context_parallel_attention, **context.arguments())
    found = call(
        query,
        key,
        value,
        mods.score_mod,
        mods.mask_for(query, key),
        mask_mod=mods.mask_mod,
        sinks=sinks_of(layer),
        **how_of(layer),
        return_stats=return_stats,
        **vectors._asdict(),
        **dropout,
    )
    attended, stats = found if isinstance(found, tuple) else (found, None)
    unfold = lambda x: x.reshape(*batch, *x.shape[1:])
    outputs = join(layer, unfold(attended))
    return outputs if stats is None else (outputs, jax.tree.map(unfold, stats))


def check_one_mask(mask_mod: jflex.MaskMod | None, block_mask: jflex.BlockMask | None) -> None:
    """Raises ValueError if a call gets both forms of a mask."""
    if mask_mod is not None and block_mask is not None:
        raise ValueError("`mask_mod` and `block_mask` are two forms of one mask. Got both. Pass one of them.")


def check_dense(inputs: Float[Array, "*batch T features"], cache: Any, kind: type) -> None:
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


def decode(
    layer: Layer,
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
    mods = (Mods(mods.score_mod) if block_mask is not None else mods.for_decoding()).at(before)
    positions = before.reshape(*batch, 1) + jnp.arange(length, dtype=jnp.int32).reshape(*[1] * len(batch), length)
    query, key, value = project(layer, inputs, positions, cache.max_length)
    key, value = map(fold_batch, (key, value))
    rows = jnp.indices(key.shape[:2], dtype=jnp.int32)[0]
    key, value = vectors.stored(key, value, positions.reshape(rows.shape), rows)
    cache = cache.append(key, value)
    attended = jflex.flex_attention(
        fold_batch(query).astype(cache.k.dtype),
        cache.k,
        cache.v,
        mods.score_mod,
        block_mask,
        mask_mod=mods.mask_mod,
        kv_lengths=cache.lengths,
        sinks=sinks_of(layer),
        **how_of(layer),
        **vectors.of_queries(before)._asdict(),
    )
    return join(layer, attended.reshape(query.shape).astype(query.dtype)), cache


def decode_eight_bits(
    layer: Layer, inputs: Float[Array, "*batch T features"], cache: EightBitCache, mods: Mods, vectors: VectorMods
) -> tuple[Float[Array, "*batch T features"], EightBitCache]:
    """Computes `decode` of a layer over eight bits: its sequences are requests, which keep their pages."""
    check_dense(inputs, cache, EightBitCache)
    batch = cache.next_tokens(inputs.shape[-2])
    packed = inputs.reshape(-1, inputs.shape[-1])
    outputs, pages = decode_paged(layer, packed, cache.pages, batch, mods, None, None, None, vectors)
    cache = dataclasses.replace(cache, pages=pages, lengths=batch.kv_lengths)
    return outputs.reshape(*inputs.shape[:-1], outputs.shape[-1]), cache


def decode_paged(
    layer: Layer,
    inputs: Float[Array, "N features"],
    cache: jflex.paged.PagedCache,
    batch: jflex.paged.PagedBatch,
    mods: Mods,
    number: int | Int32[Array, ""] | None,
    shared: SharedPrefix | None,
    streaming: Streaming | None,
    vectors: VectorMods,
) -> tuple[Float[Array, "N features"], jflex.paged.PagedCache]:
    """Computes `decode_paged` of a layer; `number` is the index of the layer in the cache."""
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
    query, key, value = heads_of(layer, inputs)
    if streaming is None:
        query, key = rotated(layer, query, positions, length), rotated(layer, key, positions, length)
    dtype = query.dtype if cache.k_scale is not None else cache.k.dtype  # `write` quantises to eight bits
    slots = jflex.paged.token_slots(batch, tokens, cache.page_size)
    requests = jflex.paged.token_requests(batch, tokens)
    key, value = vectors.stored(key, value, positions, requests)
    cache = jflex.paged.write(cache, key.astype(dtype), value.astype(dtype), slots, layer=number)
    packed = query.astype(dtype)
    how: dict[str, Any] = how_of(layer) | {"sinks": sinks_of(layer)}
    if streaming is not None:
        parts = streaming.parts(batch, tokens, rope_of(layer, streaming.size), mods.score_mod, mods.mask_mod)
        attended = streaming_llm.attend(packed, cache, parts, layer=number, **how)
        return join(layer, attended.astype(query.dtype)), cache
    how |= {"query_mod": vectors.query_mod, "output_mod": vectors.output_mod}
    how |= {"score_mod": mods.score_mod, "mask_mod": mods.mask_mod}
    if shared is not None:
        levels = jflex.shared_prefix_levels(cache, batch, *shared, layer=number)
        attended = jflex.cascade_attention(packed, levels, positions=positions, requests=requests, **how)
    else:
        attended = jflex.paged_attention(packed, cache, batch, layer=number, **how)
    return join(layer, attended.astype(query.dtype)), cache

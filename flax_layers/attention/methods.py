"""The methods that the attention layers of nnx and linen share.

Each layer adds its constructor, its parameters, and the key of dropout, as Flax passes it. A call merges its mods with
those of the constructor; `core.attend` projects, rotates and calls `jflex.flex_attention`.
"""

from __future__ import annotations

from typing import Any, Unpack, overload

from flax.typing import Dtype
from jaxtyping import Array, Float, Int32

import jflex
from flax_layers.attention import core as attention_core
from flax_layers.attention.caches.dense import DenseCache
from flax_layers.attention.caches.owned_pages import EightBitCache, has_eight_bits
from flax_layers.attention.capture import without_capture
from flax_layers.attention.core import Call, CallOptions, KeyValue, PagedCall
from flax_layers.attention.mods import VectorModOptions, VectorMods
from flax_layers.attention.streaming import Streaming

Cache = DenseCache | EightBitCache
"""Keys and values with a row for each sequence, whatever their dtype."""


class AttentionMethods(attention_core.HeadsLayer):
    """The calls of a `FlexAttention` on whole sequences, and with a dense or a paged cache.

    With a cache they are inference and never drop.
    """

    _key_option: str
    """The keyword of the source of dropout's key."""

    # Return types, by `return_stats`.
    # fmt: off
    @overload
    def __call__(
        self, inputs: Float[Array, "*batch T features"], *, deterministic: bool | None = None,
        return_stats: tuple[()] = (), **options: Unpack[CallOptions],
    ) -> Float[Array, "*batch T features"]: ...
    @overload
    def __call__(
        self, inputs: Float[Array, "*batch T features"], *, deterministic: bool | None = None,
        return_stats: tuple[jflex.Stat, ...], **options: Unpack[CallOptions],
    ) -> tuple[Float[Array, "*batch T features"], jflex.AttentionStats]: ...
    # fmt: on
    def __call__(
        self,
        inputs: Float[Array, "*batch T features"],
        *,
        deterministic: bool | None = None,
        return_stats: tuple[jflex.Stat, ...] = (),
        **options: Unpack[CallOptions],
    ) -> attention_core.Attended:
        """Attends within each sequence, or from it to `inputs_kv`.

        Args:
            inputs: One vector for each position. The leading axes are folded into one batch axis, the last of them
                fastest; `b` in mods, and the batch of a BlockMask, count along that axis.
            score_mod: Replaces the score_mod of the constructor.
            mask_mod: Replaces the constructor's mask, of either form.
            block_mask: Replaces the constructor's mask, of either form.
            positions: Positions for the rotary embedding. Default: 0, 1, 2, ... `q_idx` and `kv_idx` in mods are
                always indices within the sequence.
            deterministic: Whether dropout is off. In nnx, it replaces the attribute of the layer. In linen, pass it
                here or to the constructor, not to both.
            rngs: In nnx, the source of the key of this call's dropout, or the key. Replaces the stream that the layer
                keeps.
            dropout_rng: In linen, the key of this call's dropout. Default: one from `self.make_rng("dropout")`.
            return_stats: Also return these statistics of each row, as in `jflex.flex_attention`: "max" for QK-clip,
                say.
            query_mod: `(query[D], b, h, q_idx) -> [D]`, as in `jflex.flex_attention`, after the normalization and the
                rotary embedding of the layer, and so are the next three.
            key_mod: `(key[D], b, h_kv, kv_idx) -> [D]`.
            value_mod: `(value[D], b, h_kv, kv_idx) -> [D]`.
            output_mod: `(out[D], lse, b, h, q_idx) -> [D]`, before the output projection.
            context: The devices among which tokens are divided, and the order of these; see `ContextParallel`.
            inputs_kv: Keys and values are projected from these in place of `inputs`: cross-attention. Or the result of
                `project_kv`. Batch axes of size 1 are shared by all sequences. Keys rotate at 0, 1, 2, ...

        Returns:
            One vector for each position, in the dtype of the computation; or a pair of it and the
            `jflex.AttentionStats`, [*batch, Hq, T].

        Raises:
            TypeError: `rngs` has a wrong type.
            ValueError: Dropout without `deterministic` or without a key, a BlockMask for another length or batch, and
                what `jflex.flex_attention` raises.
        """
        arguments: dict[str, Any] = {**options}
        take = lambda *names: (arguments.pop(name, None) for name in names)
        dropout_key = self._dropout_key(deterministic, *take(self._key_option))
        mods = self._mods(*take("score_mod", "mask_mod", "block_mask"))
        positions, context, inputs_kv = take("positions", "context", "inputs_kv")
        vectors = self._vectors(VectorMods.from_options(arguments))
        call = Call(positions, dropout_key, return_stats, vectors, context, inputs_kv)
        return attention_core.attend(self, inputs, mods, call)

    def init_cache(self, batch_size: int, max_length: int, *, dtype: Dtype | None = None) -> Cache:
        """A dense cache of empty sequences for `decode`. It needs no parameters.

        Args:
            batch_size: B, the number of sequences: the product of the leading axes of the inputs to `decode`.
            max_length: Capacity of each sequence in tokens, prompt included.
            dtype: Of keys and values, and of the attention over them. Default: the dtype of the layer's computation,
                or of its parameters where the layer has none of its own. ``float8_e4m3fn``, ``float8_e5m2`` and
                ``int8`` have a scale for each token and head, and attention over them is in the dtype of the layer's
                computation.

        Returns:
            The cache; an `EightBitCache` for a dtype of eight bits.

        Raises:
            TypeError: A size is not an integer, or the dtype is none of these.
            ValueError: A size is negative, or `max_length` is 0.
        """
        cache_dtype = dtype or self._compute_dtype()
        kind = EightBitCache if has_eight_bits(cache_dtype) else DenseCache
        return kind.create(batch_size, max_length, *self.sizes, dtype=cache_dtype)

    def init_paged_cache(
        self, num_pages: int, page_size: int, *, layers: int | None = None, dtype: Dtype | None = None
    ) -> jflex.paged.PagedCache:
        """A paged cache for `decode_paged`. It needs no parameters.

        Args:
            num_pages: Number of pages, including page 0, which holds no tokens.
            page_size: Tokens in a page, 1 to 256.
            layers: Number of layers like this one that share the cache and its page tables. Default: the cache is this
                layer's own, without an axis of layers.
            dtype: As for `init_cache`; or ``float8_e4m3fn``, ``float8_e5m2`` or ``int8``, with a scale for each token
                and head. Attention over these is in the dtype of the layer's computation.

        Raises:
            TypeError: A size is not an integer, or the dtype is not floating-point.
            ValueError: A size is out of its range.
        """
        sizes = (num_pages, page_size, *self.sizes)
        return jflex.paged.PagedCache.create(*sizes, dtype=dtype or self._compute_dtype(), layers=layers)

    def project_kv(self, inputs_kv: Float[Array, "*batch S kv_features"]) -> KeyValue:
        """Projects the inputs of cross-attention to keys and values, once for many calls.

        In a decoder, project the outputs of the encoder once, and pass the result, a pytree, as `inputs_kv` to the
        calls of each token.
        """
        return attention_core.project_kv(self, inputs_kv)

    def decode(
        self,
        inputs: Float[Array, "*batch T features"],
        cache: Cache,
        *,
        score_mod: jflex.ScoreMod | None = None,
        mask_mod: jflex.MaskMod | None = None,
        block_mask: jflex.BlockMask | None = None,
        **vector_mods: Unpack[VectorModOptions],
    ) -> tuple[Float[Array, "*batch T features"], Cache]:
        """Appends T tokens to each sequence of a cache: a prompt, one token, or a few speculated ones.

        Queries, keys and values are as in `__call__` on whole sequences: positions, in mods and in the rotary
        embedding, count from the beginning of each sequence. Pass the mods of `__call__`, without an offset. If the
        constructor got a BlockMask, its mask_mod is used. No mask is implied: a decoder needs a causal one. Arrays that
        mods capture must cover all positions in use, not only in this call; for ready mods this is checked as far
        as lengths are known.

        The lengths are data: one program serves all of them. Donate the cache to `jit` to update it in place. This is
        inference: it never drops weights, whatever the layer's `dropout_rate`.

        Args:
            inputs: The next T tokens of each sequence. Leading axes are folded as by `__call__`.
            cache: From `init_cache` or from the last call.
            score_mod: Replaces the score_mod of the constructor.
            mask_mod: Replaces the constructor's mask, of either form.
            block_mask: Replaces both: the mask of this call's T queries, which count from 0, and all positions of
                the cache. Blocks that it does not list are not read, as in a layer with a window. Make it with
                `cache.block_mask(mask_mod, T)`, once for all layers that share it. Not over eight bits, where tiles
                that a comparison of positions masks are not read in any case.
            **vector_mods: `query_mod`, `key_mod`, `value_mod` and `output_mod`, as in `__call__`, at positions in the
                whole sequence. New keys and values are modified before they are written into the cache.

        Returns:
            One vector for each token, in the dtype of the computation; and the cache with T more tokens in every
            sequence. If traced lengths leave no room for a token, it is dropped, and its output is NaN.

        Raises:
            TypeError: `cache` is neither a DenseCache nor an EightBitCache.
            ValueError: The cache has another batch; the tokens do not fit into it, as far as lengths are known;
                the constructor's BlockMask masks more than its mask_mod; or there is a `block_mask` over eight bits.
        """
        if mask_mod is not None and block_mask is not None:
            raise ValueError("`mask_mod` and `block_mask` are two forms of one mask. Got both. Pass one of them.")
        vectors = self._vectors(VectorMods.from_options(vector_mods))
        mods = self._mods(score_mod, mask_mod)
        if not isinstance(cache, EightBitCache):
            return attention_core.decode(self, inputs, cache, mods, block_mask, vectors)
        if block_mask is not None:
            raise ValueError(
                "`block_mask` must be None with an EightBitCache. Got a BlockMask. Pass its `mask_mod`, of positions "
                "in whole sequences: tiles of keys that it masks by comparing positions are not read."
            )
        return attention_core.decode_eight_bits(self, inputs, cache, mods, vectors)

    def decode_paged(
        self,
        inputs: Float[Array, "N features"],
        cache: jflex.paged.PagedCache,
        batch: jflex.paged.PagedBatch,
        *,
        layer: int | Int32[Array, ""] | None = None,
        score_mod: jflex.ScoreMod | None = None,
        mask_mod: jflex.MaskMod | None = None,
        shared_prefix: attention_core.SharedPrefix | None = None,
        streaming: Streaming | None = None,
        **vector_mods: Unpack[VectorModOptions],
    ) -> tuple[Float[Array, "N features"], jflex.paged.PagedCache]:
        """Appends to requests in a paged cache, each by as many tokens as it has in `inputs`.

        Prompts, chunks of prompts and single tokens go in one call, without padding. Mods, positions, masks and
        donation are as in `decode`; `b` is the number of the request in `batch`. It never drops weights, either.

        Args:
            inputs: The tokens of all requests, packed in the order of `batch`.
            cache: From `init_paged_cache` or from the last call.
            batch: The tokens and the pages of each request. Its `kv_lengths` include the tokens of this call. Every
                page that is written must belong to one request alone.
            layer: Index of the layer in a cache for several, a Python int or traced.
            score_mod: Replaces the score_mod of the constructor.
            mask_mod: Replaces the constructor's mask, of either form.
            shared_prefix: The first requests begin with the same pages: their keys are read once for all
                (`jflex.cascade_attention`). The result is the same, to rounding.
            streaming: Attends to sinks and to a window alone, at positions within that cache, which mods get, too. It
                is causal without a mask. The cache then holds raw keys, which are rotated as they are loaded: pass it
                in every call on a cache, or in none.
            **vector_mods: `query_mod`, `key_mod`, `value_mod` and `output_mod`, as in `decode`; none with `streaming`.

        Returns:
            One vector for each token, in the dtype of the computation (arbitrary for padding after the last request);
            and the cache that holds their keys and values.

        Raises:
            TypeError: `cache` or `batch` has a wrong type.
            ValueError: `inputs` do not have two axes; cache, batch and layer do not fit together, as far as values are
                known; the constructor's BlockMask masks more than its mask_mod; vector mods with `streaming`.
        """
        mods = self._mods(score_mod, mask_mod)
        call = PagedCall(self._vectors(VectorMods.from_options(vector_mods)), layer, shared_prefix, streaming)
        return attention_core.decode_paged(self, inputs, cache, batch, mods, call)

    def _dropout_key(self, deterministic: bool | None, source: Any) -> Array | None:
        """The key of a call, None if it drops nothing."""
        raise NotImplementedError

    def _vectors(self, vectors: VectorMods) -> VectorMods:
        """The vector mods of a call; linen creates their parameters first."""
        return VectorMods(**{name: without_capture(mod) for name, mod in vectors._asdict().items()})

"""The methods that the layers of multi-head latent attention of nnx and linen share."""

from __future__ import annotations

from flax.typing import Dtype
from jaxtyping import Array, Float, Int32

import jflex
from flax_layers.attention import latent_core
from flax_layers.attention.caches.latent import DenseLatentCache


class LatentMethods(latent_core.LatentLayer):
    """The calls of a `MultiHeadLatentAttention` on sequences in a dense or a paged cache."""

    def init_cache(self, batch_size: int, max_length: int, *, dtype: Dtype | None = None) -> DenseLatentCache:
        """A dense cache of empty sequences for `decode`. It needs no parameters.

        Args:
            batch_size: B, the number of sequences: the product of the leading axes of the inputs to `decode`.
            max_length: Capacity of each sequence in tokens, prompt included.
            dtype: Of the cache, and of absorbed attention over it. Default: the dtype of the layer's computation, or of
                its parameters where the layer has none of its own.

        Returns:
            The cache.

        Raises:
            TypeError: A size is not an integer, or the dtype is not floating-point.
            ValueError: A size is negative, or `max_length` is 0.
        """
        sizes = {"latent_size": self.latent_dim, "rope_size": self.rope_head_dim}
        return DenseLatentCache.create(batch_size, max_length, **sizes, dtype=dtype or self._compute_dtype())

    def init_paged_cache(
        self, num_pages: int, page_size: int, *, layers: int | None = None, dtype: Dtype | None = None
    ) -> jflex.paged.LatentCache:
        """A paged cache for `decode_paged`. It needs no parameters.

        Args:
            num_pages: Number of pages, including page 0, which holds no tokens.
            page_size: Tokens in a page, 1 to 256.
            layers: Number of layers like this one that share the cache and its page tables. Default: the cache is this
                layer's own, without an axis of layers.
            dtype: As for `init_cache`; or ``float8_e4m3fn``, with scales, for layers that compute in bfloat16 or
                float32.

        Returns:
            The cache.

        Raises:
            TypeError: A size is not an integer, or the dtype is not floating-point.
            ValueError: A size is out of its range.
        """
        sizes = (num_pages, page_size, self.latent_dim, self.rope_head_dim)
        return jflex.paged.LatentCache.create(*sizes, dtype=dtype or self._compute_dtype(), layers=layers)

    def decode(
        self,
        inputs: Float[Array, "*batch T features"],
        cache: DenseLatentCache,
        *,
        score_mod: jflex.ScoreMod | None = None,
        mask_mod: jflex.MaskMod | None = None,
    ) -> tuple[Float[Array, "*batch T features"], DenseLatentCache]:
        """Appends T tokens to each sequence of a cache: a prompt, one token, or a few speculated ones.

        Positions, in mods and in the rotary embedding, count from the beginning of each sequence; pass the mods of
        `__call__`. If the constructor got a BlockMask, its mask_mod is used. No mask is implied.

        With few tokens, attention is absorbed (`jflex.mla_attention`). With many, the whole cache is up-projected for
        the time of the call: from 171 tokens on with the sizes of DeepSeek-V3, where that takes fewer operations.

        Args:
            inputs: The next T tokens of each sequence. Leading axes are folded as by `__call__`.
            cache: From `init_cache` or from the last call. Donate it to `jit` to update it in place.
            score_mod: Replaces the constructor's.
            mask_mod: Replaces the constructor's mask, of either form.

        Returns:
            One vector for each token; and the cache with T more tokens in every sequence. If traced lengths leave no
            room for a token, it is dropped, and its output is NaN.

        Raises:
            TypeError: `cache` is not a DenseLatentCache.
            ValueError: The batch is not that of the cache; the tokens do not fit into it, as far as lengths are known;
                the constructor's BlockMask masks more than its mask_mod.
        """
        return latent_core.decode(self, inputs, cache, self._mods(score_mod, mask_mod))

    def decode_paged(
        self,
        inputs: Float[Array, "N features"],
        cache: jflex.paged.LatentCache,
        batch: jflex.paged.PagedBatch,
        *,
        layer: int | Int32[Array, ""] | None = None,
        score_mod: jflex.ScoreMod | None = None,
        mask_mod: jflex.MaskMod | None = None,
        new_prompts: bool = False,
    ) -> tuple[Float[Array, "N features"], jflex.paged.LatentCache]:
        """Appends to requests in a paged cache, each by as many tokens as it has in `inputs`.

        Prompts, chunks of prompts and single tokens go in one call, without padding. Mods, positions, masks and
        donation are as in `decode`; `b` is the number of the request in `batch`.

        Args:
            inputs: The tokens of all requests, packed in the order of `batch`.
            cache: From `init_paged_cache` or from the last call.
            batch: The tokens and the pages of each request. Its `kv_lengths` include the tokens of this call. Every
                page that is written must belong to one request alone.
            layer: Index of the layer in a cache for several, a Python int or traced.
            score_mod: Replaces the constructor's.
            mask_mod: Replaces the constructor's mask, of either form.
            new_prompts: Whether no request has keys from before this call, so that its tokens attend to one another
                alone. Then attention is up-projected (`jflex.flex_attention_varlen`), which takes fewer operations for
                long prompts; else it is absorbed.

        Returns:
            One vector for each token (arbitrary for padding after the last request); and the cache that holds them.

        Raises:
            TypeError: `cache` or `batch` has a wrong type.
            ValueError: `inputs` do not have two axes; cache, batch and layer do not fit together, as far as values are
                known; the constructor's BlockMask masks more than its mask_mod.
        """
        mods = self._mods(score_mod, mask_mod)
        return latent_core.decode_paged(self, inputs, cache, batch, mods, layer, new_prompts=new_prompts)

    def _compute_dtype(self) -> Dtype:
        """The dtype of the computation, or of the parameters where the layer has none of its own."""
        raise NotImplementedError

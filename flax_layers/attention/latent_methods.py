"""The methods that the layers of multi-head latent attention of nnx and linen share."""

from __future__ import annotations

from flax.typing import Dtype
from jaxtyping import Array, Float, Int, Int32

import jflex
from flax_layers.attention import latent_core
from flax_layers.attention.caches.owned_pages import DenseLatentCache
from flax_layers.attention.selection import BlockSelection


class LatentMethods(latent_core.LatentLayer):
    """The calls of a `MultiHeadLatentAttention` on whole sequences, and with a dense or a paged cache."""

    def __call__(
        self,
        inputs: Float[Array, "*batch T features"],
        *,
        score_mod: jflex.ScoreMod | None = None,
        mask_mod: jflex.MaskMod | None = None,
        block_mask: jflex.BlockMask | BlockSelection | None = None,
        positions: Int[Array, "*#batch T"] | None = None,
    ) -> Float[Array, "*batch T features"]:
        """Attends within each sequence, over up-projected keys and values.

        Arguments, results and errors are as for a call of `FlexAttention`.
        """
        return latent_core.attend(self, inputs, self._mods(score_mod, mask_mod, block_mask), positions)

    def init_cache(self, batch_size: int, max_length: int, *, dtype: Dtype | None = None) -> DenseLatentCache:
        """A dense cache of empty sequences for `decode`, with arguments and errors as for `FlexAttention.init_cache`.

        Its dtype, in which absorbed attention over it computes, has 16 bits or more.
        """
        sizes = {"latent_size": self.latent_dim, "rope_size": self.rope_head_dim}
        return DenseLatentCache.create(batch_size, max_length, **sizes, dtype=dtype or self._compute_dtype())

    def init_paged_cache(
        self, num_pages: int, page_size: int, *, layers: int | None = None, dtype: Dtype | None = None
    ) -> jflex.paged.LatentCache:
        """A paged cache for `decode_paged`, with arguments and errors as for `FlexAttention.init_paged_cache`.

        Of the dtypes of eight bits it takes ``float8_e4m3fn``, with scales, for layers that compute in bfloat16 or
        float32.
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
        """Appends T tokens to each sequence of a cache; arguments, results and errors as for `FlexAttention.decode`.

        With few tokens, attention is absorbed (`jflex.mla_attention`). With many, the whole cache is up-projected for
        the time of the call: from 171 tokens on with the sizes of DeepSeek-V3, where that takes fewer operations.
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
        """Appends to requests in a paged cache; arguments, results and errors as for `FlexAttention.decode_paged`.

        `new_prompts` tells that no request has keys from before this call, so that its tokens attend to one another
        alone. Then attention is up-projected (`jflex.flex_attention_varlen`), which takes fewer operations for long
        prompts; else it is absorbed.
        """
        mods = self._mods(score_mod, mask_mod)
        return latent_core.decode_paged(self, inputs, cache, batch, mods, layer, new_prompts=new_prompts)

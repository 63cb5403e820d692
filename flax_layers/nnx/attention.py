"""Self-attention for Flax NNX whose scores and sparsity are ordinary functions."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype, Initializer
from jaxtyping import Array, Float, Int, Int32

import jflex
from flax_layers import attention_core
from flax_layers.dense_cache import DenseCache
from flax_layers.nnx.hidden_state import check_no_hidden_state
from flax_layers.nnx.projections import Projections
from flax_layers.rotary_scaling import RotaryScaling


class FlexAttention(Projections):
    """Projects to queries, keys and values, attends with `jflex.flex_attention`, and projects back.

    Pass mods and the mask here, for all calls, or to a call, where they replace those of the constructor (`mask_mod`
    and `block_mask` are two forms of one mask: either replaces both).

    A mod may hold parameters, and they get gradients. The constructor takes such a mod as a callable `nnx.Module`,
    which becomes a child of this layer. A call also takes a method of the module that owns this layer, or any function
    that captures parameters of the caller. (Flax builds new modules inside `nnx.jit` and `nnx.grad`; a function kept by
    the constructor would still read the old parameters, so the constructor refuses it.)

    Args:
        in_features: Size of the input's last axis, and of the output's.
        num_heads: Query heads.
        num_kv_heads: Key and value heads, a divisor of `num_heads`; each is shared by `num_heads // num_kv_heads`
            neighbouring query heads. Default: `num_heads`.
        head_dim: Size of a head. Default: `in_features // num_heads`.
        score_mod: `(score, b, h, q_idx, kv_idx) -> score`, applied to every scaled score.
        mask_mod: `(b, h, q_idx, kv_idx) -> bool`, true where the query attends to the key; it skips no blocks.
        block_mask: A `jflex.BlockMask`: a mask that says which blocks can be skipped, for inputs of its own length.
        scale: Factor of the raw scores. Default: `head_dim ** -0.5`.
        rotary_base: Base of the rotary position embedding (`flax_layers.functional.rotate`); the usual value is 10000.
            Default: no rotary embedding.
        rotary_scaling: Changes the frequencies of the rotary embedding for longer contexts, as those of
            `flax_layers.rotary_scaling` do.
        rotary_dim: How many features of a head rotate, the first ones. Default: all.
        qk_norm: Whether each query and key head is normalised (RMS, with learned scales) before the rotary embedding,
            as in Henry et al. 2020, arXiv:2010.04245, with RMS in place of L2.
        qk_norm_options: Arguments of `flax_layers.nnx.RMSNorm` for these two, as `{"epsilon": 1e-5}`.
        use_bias: Whether the four projections have biases.
        out_bias: Whether the last of the four has one. Default: `use_bias`.
        dtype: Dtype of the computation; the parameters are cast to it. Default: what inputs and parameters promote to.
        param_dtype: Dtype of the parameters.
        kernel_init: Initializer of the four projections.
        bias_init: Initializer of their biases.
        implementation: The jflex backend, or a sequence of them in order of preference. Default: jflex chooses.
        rngs: Source of the keys of the initializers.

    Raises:
        ValueError: The head counts or sizes do not fit, a ready mod was made for other heads, or a mod holds
            parameters that would get no gradients.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from flax_layers.nnx import FlexAttention
        >>> layer = FlexAttention(
        ...     in_features=32, num_heads=4, num_kv_heads=2, rotary_base=10000.0,
        ...     mask_mod=lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, rngs=nnx.Rngs(0),
        ... )
        >>> layer(jnp.ones((2, 10, 32))).shape
        (2, 10, 32)
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        score_mod: jflex.ScoreMod | None = None,
        mask_mod: jflex.MaskMod | None = None,
        block_mask: jflex.BlockMask | None = None,
        scale: float | None = None,
        rotary_base: float | None = None,
        rotary_scaling: RotaryScaling | None = None,
        rotary_dim: int | None = None,
        qk_norm: bool = False,
        qk_norm_options: dict[str, Any] | None = None,
        use_bias: bool = False,
        out_bias: bool | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        kernel_init: Initializer = nnx.initializers.lecun_normal(),  # noqa: B008  a pure function, Flax's own habit
        bias_init: Initializer = nnx.initializers.zeros_init(),  # noqa: B008
        implementation: str | tuple[str, ...] | None = None,
        rngs: nnx.Rngs,
    ):
        for name, mod in (("score_mod", score_mod), ("mask_mod", mask_mod)):
            check_no_hidden_state(name, mod)
            jflex.check_mod_sizes(mod, heads=num_heads, caller="a layer")
        super().__init__(
            in_features, num_heads, num_kv_heads, head_dim,
            rotary_base=rotary_base, rotary_scaling=rotary_scaling, rotary_dim=rotary_dim,
            qk_norm=qk_norm, qk_norm_options=qk_norm_options or {}, use_bias=use_bias, out_bias=out_bias,
            dtype=dtype, param_dtype=param_dtype, kernel_init=kernel_init, bias_init=bias_init, rngs=rngs,
        )  # fmt: skip
        self.score_mod = score_mod
        self.mask_mod = mask_mod
        self.block_mask = nnx.data(block_mask)
        self.scale = scale
        self.implementation = implementation

    def __call__(
        self,
        inputs: Float[Array, "*batch T features"],
        *,
        score_mod: jflex.ScoreMod | None = None,
        mask_mod: jflex.MaskMod | None = None,
        block_mask: jflex.BlockMask | None = None,
        positions: Int[Array, "*#batch T"] | None = None,
    ) -> Float[Array, "*batch T features"]:
        """Attends within each sequence.

        Args:
            inputs: One vector for each position. The leading axes are folded into one batch axis, the last of them
                fastest; `b` in mods, and the batch of a BlockMask, count along that axis.
            score_mod: Replaces the constructor's.
            mask_mod: Replaces the constructor's mask, of either form.
            block_mask: Replaces the constructor's mask, of either form.
            positions: Positions for the rotary embedding. Default: 0, 1, 2, ... `q_idx` and `kv_idx` in mods are
                always indices within the sequence.

        Returns:
            One vector for each position, in the dtype of the computation.

        Raises:
            ValueError: A BlockMask for another length or batch, and what `jflex.flex_attention` raises.
        """
        mods = self._mods(score_mod, mask_mod, block_mask)
        return attention_core.attend(self, inputs, mods, positions)

    def init_cache(self, batch_size: int, max_length: int, *, dtype: Dtype | None = None) -> DenseCache:
        """A dense cache of empty sequences for `decode`.

        Args:
            batch_size: B, the number of sequences: the product of the leading axes of the inputs to `decode`.
            max_length: Tokens that each sequence has room for, prompt included.
            dtype: Of keys and values, and of the attention over them. Default: the dtype of the layer's computation,
                or of its parameters where the layer has none of its own.

        Returns:
            The cache.

        Raises:
            TypeError: A size is no integer, or the dtype is not floating-point.
            ValueError: A size is negative, or `max_length` is 0.
        """
        return DenseCache.create(
            batch_size, max_length, self.num_kv_heads, self.head_dim, dtype=self._cache_dtype(dtype)
        )

    def init_paged_cache(
        self, num_pages: int, page_size: int, *, layers: int | None = None, dtype: Dtype | None = None
    ) -> jflex.paged.PagedCache:
        """A paged cache for `decode_paged`.

        Args:
            num_pages: Pages in all, page 0 included, which holds no tokens.
            page_size: Tokens in a page, 1 to 256.
            layers: How many layers like this one share the cache and its page tables. Default: it is this layer's own,
                without an axis of layers.
            dtype: As for `init_cache`.

        Returns:
            The cache.

        Raises:
            TypeError: A size is no integer, or the dtype is not floating-point.
            ValueError: A size is out of its range.
        """
        return jflex.paged.PagedCache.create(
            num_pages, page_size, self.num_kv_heads, self.head_dim, dtype=self._cache_dtype(dtype), layers=layers
        )

    def decode(
        self,
        inputs: Float[Array, "*batch T features"],
        cache: DenseCache,
        *,
        score_mod: jflex.ScoreMod | None = None,
        mask_mod: jflex.MaskMod | None = None,
        block_mask: jflex.BlockMask | None = None,
    ) -> tuple[Float[Array, "*batch T features"], DenseCache]:
        """Appends T tokens to each sequence of a cache: a prompt, one token, or a few speculated ones.

        Queries, keys and values are those of `__call__` on whole sequences: positions, in mods and in the rotary
        embedding, count from the beginning of each sequence. Pass the mods of `__call__`, without an offset; of a
        BlockMask in the constructor, the mask_mod is used. No mask is implied: a decoder needs a causal one. Arrays
        that mods capture must cover all positions in use, not only those of this call; for ready mods this is checked
        as far as lengths are known.

        The lengths are data: one program serves all of them. Donate the cache to `jit`, and it is updated in place.

        Args:
            inputs: The next T tokens of each sequence. Leading axes are folded as by `__call__`.
            cache: Of `init_cache`, or what the last call returned.
            score_mod: Replaces the constructor's.
            mask_mod: Replaces the constructor's mask, of either form.
            block_mask: Replaces both: the mask of this call's T queries, which count from 0, and all positions of
                the cache. Blocks that it does not list are not read, as of a layer with a window. Make it with
                `cache.block_mask(mask_mod, T)`, once for all layers that share it.

        Returns:
            One vector for each token, in the dtype of the computation; and the cache with T more tokens in every
            sequence. Where traced lengths leave no room for them, they are dropped, and the outputs of what was
            dropped mean nothing.

        Raises:
            TypeError: `cache` is no DenseCache.
            ValueError: The batch is not that of the cache; the tokens do not fit into it, as far as lengths are known;
                the constructor's BlockMask masks more than its mask_mod.

        Example:
            >>> import jax
            >>> import jax.numpy as jnp
            >>> from flax import nnx
            >>> from flax_layers.nnx import FlexAttention
            >>> layer = FlexAttention(32, 4, mask_mod=lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, rngs=nnx.Rngs(0))
            >>> inputs = jax.random.normal(jax.random.key(0), (2, 10, 32))
            >>> prompt, cache = layer.decode(inputs[:, :9], layer.init_cache(batch_size=2, max_length=64))
            >>> token, cache = layer.decode(inputs[:, 9:], cache)
            >>> print(jnp.allclose(token, layer(inputs)[:, 9:], atol=1e-5), cache.lengths)
            True [10 10]
        """
        attention_core.check_one_mask(mask_mod, block_mask)
        return attention_core.decode(self, inputs, cache, self._mods(score_mod, mask_mod), block_mask)

    def decode_paged(
        self,
        inputs: Float[Array, "N features"],
        cache: jflex.paged.PagedCache,
        batch: jflex.paged.PagedBatch,
        *,
        layer: int | Int32[Array, ""] | None = None,
        score_mod: jflex.ScoreMod | None = None,
        mask_mod: jflex.MaskMod | None = None,
    ) -> tuple[Float[Array, "N features"], jflex.paged.PagedCache]:
        """Appends to requests in a paged cache, each by as many tokens as it has in `inputs`.

        Prompts, pieces of prompts and single tokens go in one call, without padding. What is said of mods, positions,
        masks and donation in `decode` holds here; ``b`` is the number of the request in `batch`.

        Args:
            inputs: The tokens of all requests, packed in the order of `batch`.
            cache: Of `init_paged_cache`, or what the last call returned.
            batch: The tokens and the pages of each request. Its `kv_lengths` include the tokens of this call. Every
                page that is written must belong to one request alone.
            layer: Which layer of a cache for several, a Python int or traced.
            score_mod: Replaces the constructor's.
            mask_mod: Replaces the constructor's mask, of either form.

        Returns:
            One vector for each token, in the dtype of the computation (arbitrary for padding behind the last request);
            and the cache that holds their keys and values.

        Raises:
            TypeError: `cache` or `batch` is of a wrong kind.
            ValueError: `inputs` have other than two axes; cache, batch and layer do not fit together, as far as values
                are known; the constructor's BlockMask masks more than its mask_mod.

        Example:
            >>> import jax.numpy as jnp
            >>> from flax import nnx
            >>> import jflex
            >>> from flax_layers.nnx import FlexAttention
            >>> layer = FlexAttention(32, 4, mask_mod=lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, rngs=nnx.Rngs(0))
            >>> cache = layer.init_paged_cache(num_pages=8, page_size=16)
            >>> batch = jflex.paged.PagedBatch(  # a prompt of 20 tokens, and one of 3
            ...     jnp.array([0, 20, 23]), jnp.array([20, 3]), jnp.array([[5, 2], [7, 0]]))
            >>> outputs, cache = layer.decode_paged(jnp.ones((23, 32)), cache, batch)
            >>> batch = jflex.paged.PagedBatch(jnp.array([0, 1, 2]), jnp.array([21, 4]), batch.page_table)
            >>> outputs, cache = layer.decode_paged(jnp.ones((2, 32)), cache, batch)  # one more token for each
            >>> outputs.shape
            (2, 32)
        """
        return attention_core.decode_paged(self, inputs, cache, batch, self._mods(score_mod, mask_mod), layer)

    def _mods(self, *of_call: Any) -> attention_core.Mods:
        return attention_core.Mods(self.score_mod, self.mask_mod, self.block_mask).replaced_by(*of_call)

    def _cache_dtype(self, dtype: Dtype | None) -> Dtype:
        return dtype or self.key.dtype or self.key.param_dtype

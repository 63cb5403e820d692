"""Self-attention for Flax linen whose scores and sparsity are ordinary functions."""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from flax import linen
from flax.typing import Dtype, Initializer
from jaxtyping import Array, Float, Int, Int32

import jflex
from flax_layers import attention_core
from flax_layers.dense_cache import DenseCache
from flax_layers.linen.mods import check_no_nnx_state, with_parameters
from flax_layers.linen.rms_norm import RMSNorm
from flax_layers.rotary_scaling import RotaryScaling


class FlexAttention(linen.Module):
    """Projects to queries, keys and values, attends with `jflex.flex_attention`, and projects back.

    The layer of `flax_layers.nnx.FlexAttention` for linen: the same arguments, shapes, caches and errors, and the same
    parameters, which `flax_layers.linen.params_from_nnx` and `params_to_nnx` convert.

    Pass mods and the mask here, for all calls, or to a call, where they replace those of the constructor (`mask_mod`
    and `block_mask` are two forms of one mask: either replaces both).

    A mod may hold parameters, and they get gradients. It may be a callable linen module, which becomes a child of
    this layer if passed to the constructor; a function that captures what `self.param` returned to the caller; or a
    method of the module that calls the layer.

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
        qk_norm: Whether each query and key head is normalised (RMS, with learned scales) before the rotary embedding.
        qk_norm_options: Arguments of `flax_layers.linen.RMSNorm` for these two, as `{"epsilon": 1e-5}`.
        use_bias: Whether the four projections have biases.
        out_bias: Whether the last of the four has one. Default: `use_bias`.
        dtype: Dtype of the computation; the parameters are cast to it. Default: what inputs and parameters promote to.
        param_dtype: Dtype of the parameters.
        kernel_init: Initializer of the four projections.
        bias_init: Initializer of their biases.
        implementation: The jflex backend, or a sequence of them in order of preference. Default: jflex chooses.

    Raises:
        ValueError: The head counts or sizes do not fit, a ready mod was made for other heads, or a mod holds
            parameters of NNX.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from flax_layers.linen import FlexAttention
        >>> layer = FlexAttention(
        ...     in_features=32, num_heads=4, num_kv_heads=2, rotary_base=10000.0,
        ...     mask_mod=lambda b, h, q_idx, kv_idx: q_idx >= kv_idx,
        ... )
        >>> inputs = jnp.ones((2, 10, 32))
        >>> variables = layer.init(jax.random.key(0), inputs)
        >>> layer.apply(variables, inputs).shape
        (2, 10, 32)
    """

    in_features: int
    num_heads: int
    _: dataclasses.KW_ONLY
    num_kv_heads: int | None = None
    head_dim: int | None = None
    score_mod: jflex.ScoreMod | None = None
    mask_mod: jflex.MaskMod | None = None
    block_mask: jflex.BlockMask | None = None
    scale: float | None = None
    rotary_base: float | None = None
    rotary_scaling: RotaryScaling | None = None
    rotary_dim: int | None = None
    qk_norm: bool = False
    qk_norm_options: dict[str, Any] | None = None
    use_bias: bool = False
    out_bias: bool | None = None
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    kernel_init: Initializer = linen.initializers.lecun_normal()
    bias_init: Initializer = linen.initializers.zeros_init()
    implementation: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        """Checks the arguments and fills in the sizes that have defaults."""
        self.num_kv_heads = self.num_heads if self.num_kv_heads is None else self.num_kv_heads
        attention_core.check_heads(self.in_features, self.num_heads, self.num_kv_heads, self.head_dim)
        self.head_dim = self.in_features // self.num_heads if self.head_dim is None else self.head_dim
        for name, mod in (("score_mod", self.score_mod), ("mask_mod", self.mask_mod)):
            check_no_nnx_state(name, mod)
            jflex.check_mod_sizes(mod, heads=self.num_heads, caller="a layer")
        super().__post_init__()

    def setup(self) -> None:
        """Makes the projections."""
        num_kv_heads, head_dim = _sizes(self)
        dtypes = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        inits = {"kernel_init": self.kernel_init, "bias_init": self.bias_init}
        linear = functools.partial(linen.Dense, **inits, **dtypes)
        self.query = linear(self.num_heads * head_dim, use_bias=self.use_bias)
        self.key = linear(num_kv_heads * head_dim, use_bias=self.use_bias)
        self.value = linear(num_kv_heads * head_dim, use_bias=self.use_bias)
        self.out = linear(self.in_features, use_bias=self.use_bias if self.out_bias is None else self.out_bias)
        norm = functools.partial(RMSNorm, head_dim, **dtypes, **(self.qk_norm_options or {}))
        self.query_norm = norm() if self.qk_norm else None
        self.key_norm = norm() if self.qk_norm else None

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

    @linen.nowrap
    def init_cache(self, batch_size: int, max_length: int, *, dtype: Dtype | None = None) -> DenseCache:
        """A dense cache of empty sequences for `decode`. It needs no variables.

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
        return DenseCache.create(batch_size, max_length, *_sizes(self), dtype=dtype or self.dtype or self.param_dtype)

    @linen.nowrap
    def init_paged_cache(
        self, num_pages: int, page_size: int, *, layers: int | None = None, dtype: Dtype | None = None
    ) -> jflex.paged.PagedCache:
        """A paged cache for `decode_paged`. It needs no variables.

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
        dtype = dtype or self.dtype or self.param_dtype
        assert dtype is not None  # Flax's type of dtypes has None in it
        return jflex.paged.PagedCache.create(num_pages, page_size, *_sizes(self), dtype=dtype, layers=layers)

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

        What `flax_layers.nnx.FlexAttention.decode` says of mods, positions, masks and donation holds here.

        Args:
            inputs: The next T tokens of each sequence. Leading axes are folded as by `__call__`.
            cache: Of `init_cache`, or what the last call returned.
            score_mod: Replaces the constructor's.
            mask_mod: Replaces the constructor's mask, of either form.
            block_mask: Replaces both: the mask of this call's T queries, which count from 0, and all positions of
                the cache. Make it with `cache.block_mask(mask_mod, T)`, once for all layers that share it.

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
            >>> from flax_layers.linen import FlexAttention
            >>> layer = FlexAttention(32, 4, mask_mod=lambda b, h, q_idx, kv_idx: q_idx >= kv_idx)
            >>> inputs = jax.random.normal(jax.random.key(0), (2, 10, 32))
            >>> variables = layer.init(jax.random.key(1), inputs)
            >>> cache = layer.init_cache(batch_size=2, max_length=64)
            >>> prompt, cache = layer.apply(variables, inputs[:, :9], cache, method="decode")
            >>> token, cache = layer.apply(variables, inputs[:, 9:], cache, method="decode")
            >>> print(jnp.allclose(token, layer.apply(variables, inputs)[:, 9:], atol=1e-5), cache.lengths)
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

        What `flax_layers.nnx.FlexAttention.decode_paged` says of requests, mods and donation holds here.

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
        """
        return attention_core.decode_paged(self, inputs, cache, batch, self._mods(score_mod, mask_mod), layer)

    def _mods(
        self,
        score_mod: jflex.ScoreMod | None,
        mask_mod: jflex.MaskMod | None,
        block_mask: jflex.BlockMask | None = None,
    ) -> attention_core.Mods:
        own = attention_core.Mods(self.score_mod, self.mask_mod, self.block_mask)
        mods = own.replaced_by(score_mod, mask_mod, block_mask)
        score_mod = with_parameters("score_mod", mods.score_mod)
        return attention_core.Mods(score_mod, with_parameters("mask_mod", mods.mask_mod), mods.block_mask)


def _sizes(layer: FlexAttention) -> tuple[int, int]:
    """Key heads and head size, which `__post_init__` filled in."""
    assert layer.num_kv_heads is not None
    assert layer.head_dim is not None
    return layer.num_kv_heads, layer.head_dim

"""Multi-head latent attention for Flax NNX."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype, Initializer
from jaxtyping import Array, Float

import jflex
from flax_layers.attention import latent_core
from flax_layers.attention.latent_methods import LatentMethods
from flax_layers.attention.mods import check_mods
from flax_layers.attention.selection import BlockSelection
from flax_layers.nnx.rms_norm import RMSNorm
from flax_layers.nnx.stored_mods import ModAttributes, check_no_hidden_state
from jflex.rotary import RotaryScaling


class MultiHeadLatentAttention(LatentMethods, ModAttributes):
    """Multi-head latent attention (MLA) of DeepSeek-V2 and V3: keys and values are made of one small vector a token.

    A call on whole sequences up-projects keys and values and attends with `jflex.flex_attention`. Decoding keeps the
    latent vectors alone, and attends to them with absorbed queries (`jflex.mla_attention`). Both have the same
    parameters and, but for rounding, the same results. Mods, masks, `dtype`, `param_dtype`, `kernel_init`,
    `implementation`, `config` and `rngs` are as for `FlexAttention`.

    Args:
        in_features: Size of the input's last axis, and of the output's.
        num_heads: Number of attention heads.
        latent_dim: Size of the latent vector of keys and values (512 in DeepSeek-V2 and V3).
        nope_head_dim: Size of the part of a query and key that is not rotated (128).
        rope_head_dim: Size of the part that is rotated, whose key all heads share (64).
        value_head_dim: Size of the value of a head (128).
        query_latent_dim: Size of the latent vector of queries (1536). Default: queries are projected directly.
        scale: Factor of the raw scores. Default: `(nope_head_dim + rope_head_dim) ** -0.5`; with a `YarnScaling` that
            has an `mscale_all_dim`, times `(0.1 * mscale_all_dim * log(factor) + 1) ** 2`, as in DeepSeek-V3.
        rotary_base: Base of the rotary position embedding. None: no rotary embedding.
        rotary_scaling: Scaling of its frequencies, such as `flax_layers.rotary_scaling.YarnScaling`.
        rotary_interleaved: Whether a pair of rotated features is two neighbors, as in DeepSeek's checkpoints.
        norm_epsilon: Epsilon of the RMS norms of both latent vectors.

    Raises:
        ValueError: A size is not positive, a ready mod was made for another number of heads, or a mod holds parameters
            that would get no gradients.

    References:
        DeepSeek-AI 2024, DeepSeek-V2, arXiv:2405.04434, section 2.1.

    Example:
        >>> layer = MultiHeadLatentAttention(
        ...     64, 4, latent_dim=32, nope_head_dim=16, rope_head_dim=8, value_head_dim=16, query_latent_dim=24,
        ...     mask_mod=jflex.masks.causal(), rngs=nnx.Rngs(0),
        ... )
        >>> inputs = jnp.sin(jnp.arange(2 * 10 * 64.0)).reshape(2, 10, 64)
        >>> outputs = layer(inputs)
        >>> prompt, cache = layer.decode(inputs[:, :9], layer.init_cache(batch_size=2, max_length=64))
        >>> token, cache = layer.decode(inputs[:, 9:], cache)
        >>> print(jnp.allclose(token, outputs[:, 9:], atol=1e-5), cache.lengths)
        True [10 10]
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        latent_dim: int,
        nope_head_dim: int,
        rope_head_dim: int,
        value_head_dim: int,
        query_latent_dim: int | None = None,
        score_mod: jflex.ScoreMod | None = None,
        mask_mod: jflex.MaskMod | None = None,
        block_mask: jflex.BlockMask | BlockSelection | None = None,
        scale: float | None = None,
        rotary_base: float | None = 10000.0,
        rotary_scaling: RotaryScaling | None = None,
        rotary_interleaved: bool = True,
        norm_epsilon: float = 1e-6,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        kernel_init: Initializer = nnx.initializers.lecun_normal(),  # noqa: B008  a pure function, Flax's own habit
        implementation: str | tuple[str, ...] | None = None,
        config: jflex.Config | None = None,
        rngs: nnx.Rngs,
    ):
        sizes = {"latent_dim": latent_dim, "nope_head_dim": nope_head_dim, "rope_head_dim": rope_head_dim}
        latent_core.check_sizes(num_heads, **sizes, value_head_dim=value_head_dim)
        check_mods(score_mod, mask_mod, num_heads, check_no_hidden_state)
        linear = functools.partial(nnx.Linear, use_bias=False, kernel_init=kernel_init)
        linear = functools.partial(linear, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        norm = functools.partial(RMSNorm, epsilon=norm_epsilon, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        is_low = query_latent_dim is not None
        self.query_down = nnx.data(linear(in_features, query_latent_dim) if is_low else None)
        self.query_norm = nnx.data(norm(query_latent_dim) if is_low else None)
        self.query = linear(query_latent_dim if is_low else in_features, num_heads * (nope_head_dim + rope_head_dim))
        self.latent = linear(in_features, latent_dim + rope_head_dim)
        self.latent_norm = norm(latent_dim)
        self.up = linear(latent_dim, num_heads * (nope_head_dim + value_head_dim))
        self.out = linear(num_heads * value_head_dim, in_features)
        self.in_features, self.num_heads, self.latent_dim = in_features, num_heads, latent_dim
        self.nope_head_dim, self.rope_head_dim, self.value_head_dim = nope_head_dim, rope_head_dim, value_head_dim
        self.score_mod, self.mask_mod, self.block_mask = score_mod, mask_mod, block_mask
        self.scale, self.implementation, self.config = scale, implementation, config
        self.rotary_base, self.rotary_scaling, self.rotary_interleaved = rotary_base, rotary_scaling, rotary_interleaved

    def up_kernel(self) -> Float[Array, "latent Hq_times_both"]:
        """The projection of latent vectors to keys and values."""
        return self.up.kernel[...]

    def _compute_dtype(self) -> Dtype:
        return self.latent.dtype or jax.tree.leaves(self.latent)[0].dtype  # as they are, if they were cast

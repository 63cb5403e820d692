"""Multi-head latent attention for Flax linen."""

import dataclasses
import functools

import jax.numpy as jnp
from flax import linen
from flax.typing import Dtype, Initializer
from jaxtyping import Array, Float

import jflex
from flax_layers.attention import latent_core
from flax_layers.attention.constant_mask import constant_mask
from flax_layers.attention.latent_methods import LatentMethods
from flax_layers.attention.mods import check_mods
from flax_layers.attention.selection import BlockSelection
from flax_layers.linen.mods import LinenLayer, check_no_nnx_state
from flax_layers.linen.rms_norm import RMSNorm
from jflex.rotary import RotaryScaling


class _Kernel(linen.Module):
    """The kernel of a projection, for a layer that multiplies by parts of it."""

    shape: tuple[int, int]
    kernel_init: Initializer
    param_dtype: Dtype

    @linen.compact
    def __call__(self) -> Float[Array, "in out"]:
        return self.param("kernel", self.kernel_init, self.shape, self.param_dtype)


class MultiHeadLatentAttention(LinenLayer, LatentMethods, linen.Module):
    """Multi-head latent attention (MLA) for linen: as `flax_layers.nnx.MultiHeadLatentAttention`, with its parameters.

    It takes the arguments of that layer, but no `rngs`. A mod may hold parameters, as in
    `flax_layers.linen.FlexAttention`.

    Raises:
        ValueError: A size is not positive, a ready mod was made for another number of heads, or a mod holds parameters
            of NNX.

    Example:
        >>> import jax
        >>> layer = MultiHeadLatentAttention(
        ...     64, 4, latent_dim=32, nope_head_dim=16, rope_head_dim=8, value_head_dim=16,
        ...     mask_mod=jflex.masks.causal(),
        ... )
        >>> inputs = jnp.sin(jnp.arange(2 * 10 * 64.0)).reshape(2, 10, 64)
        >>> outputs, variables = layer.init_with_output(jax.random.key(0), inputs)
        >>> cache = layer.init_cache(batch_size=2, max_length=64)
        >>> prompt, cache = layer.apply(variables, inputs[:, :9], cache, method="decode")
        >>> token, cache = layer.apply(variables, inputs[:, 9:], cache, method="decode")
        >>> print(jnp.allclose(token, outputs[:, 9:], atol=1e-5), cache.lengths)
        True [10 10]
    """

    in_features: int
    num_heads: int
    _: dataclasses.KW_ONLY
    latent_dim: int
    nope_head_dim: int
    rope_head_dim: int
    value_head_dim: int
    query_latent_dim: int | None = None
    score_mod: jflex.ScoreMod | None = None
    mask_mod: jflex.MaskMod | None = None
    block_mask: jflex.BlockMask | BlockSelection | None = None
    scale: float | None = None
    rotary_base: float | None = 10000.0
    rotary_scaling: RotaryScaling | None = None
    rotary_interleaved: bool = True
    norm_epsilon: float = 1e-6
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    kernel_init: Initializer = linen.initializers.lecun_normal()
    implementation: str | tuple[str, ...] | None = None
    config: jflex.Config | None = None

    def __post_init__(self) -> None:
        """Checks the arguments."""
        names = ("latent_dim", "nope_head_dim", "rope_head_dim", "value_head_dim")
        latent_core.check_sizes(self.num_heads, **{name: getattr(self, name) for name in names})
        check_mods(self.score_mod, self.mask_mod, self.num_heads, check_no_nnx_state)
        self.block_mask = constant_mask(self.block_mask)
        super().__post_init__()

    def setup(self) -> None:
        """Makes the projections."""
        dtypes = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        linear = functools.partial(linen.Dense, use_bias=False, kernel_init=self.kernel_init, **dtypes)
        norm = functools.partial(RMSNorm, epsilon=self.norm_epsilon, **dtypes)
        self.query_down = None if self.query_latent_dim is None else linear(self.query_latent_dim)
        self.query_norm = None if self.query_latent_dim is None else norm(self.query_latent_dim)
        self.query = linear(self.num_heads * (self.nope_head_dim + self.rope_head_dim))
        self.latent = linear(self.latent_dim + self.rope_head_dim)
        self.latent_norm = norm(self.latent_dim)
        size = self.num_heads * (self.nope_head_dim + self.value_head_dim)
        self.up = _Kernel((self.latent_dim, size), self.kernel_init, self.param_dtype)
        self.out = linear(self.in_features)

    # linen wraps only methods of the class's own namespace, not inherited ones.
    __call__ = LatentMethods.__call__
    decode = LatentMethods.decode
    decode_paged = LatentMethods.decode_paged

    def up_kernel(self) -> Float[Array, "latent Hq_times_both"]:
        """The projection of latent vectors to keys and values."""
        return self.up()

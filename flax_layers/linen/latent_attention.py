"""Multi-head latent attention for Flax linen."""

import dataclasses
import functools

import jax.numpy as jnp
from flax import linen
from flax.typing import Dtype, Initializer
from jaxtyping import Array, Float, Int

import jflex
from flax_layers.attention import latent_core
from flax_layers.attention.constant_mask import constant_mask
from flax_layers.attention.latent_methods import LatentMethods
from flax_layers.attention.layer_mods import Mods
from flax_layers.attention.selection import BlockSelection
from flax_layers.linen.mods import check_no_nnx_state, mods_with_parameters
from flax_layers.linen.rms_norm import RMSNorm
from flax_layers.rotary_scaling import RotaryScaling


class _Kernel(linen.Module):
    """The kernel of a projection, for a layer that multiplies by parts of it."""

    shape: tuple[int, int]
    kernel_init: Initializer
    param_dtype: Dtype

    @linen.compact
    def __call__(self) -> Float[Array, "in out"]:
        return self.param("kernel", self.kernel_init, self.shape, self.param_dtype)


class MultiHeadLatentAttention(LatentMethods, linen.Module):
    """Multi-head latent attention (MLA) for linen: as `flax_layers.nnx.MultiHeadLatentAttention`, with its parameters.

    A mod may hold parameters, as in `flax_layers.linen.FlexAttention`.

    Args:
        in_features: Size of the input's last axis, and of the output's.
        num_heads: Heads.
        latent_dim: Size of the latent vector of keys and values (512 in DeepSeek-V2 and V3).
        nope_head_dim: Size of the part of a query and key that is not rotated (128).
        rope_head_dim: Size of the part that is rotated, whose key all heads share (64).
        value_head_dim: Size of the value of a head (128).
        query_latent_dim: Size of the latent vector of queries (1536). Default: queries are projected directly.
        score_mod: `(score, b, h, q_idx, kv_idx) -> score`, applied to every scaled score.
        mask_mod: `(b, h, q_idx, kv_idx) -> bool`, true where the query attends to the key; it skips no blocks.
        block_mask: A `jflex.BlockMask`: a mask that lists which blocks are computed, for inputs of its length; or a
            `BlockSelection`, with which each call makes one of the blocks that its queries select.
        scale: Factor of the raw scores. Default: `(nope_head_dim + rope_head_dim) ** -0.5`; with a `YarnScaling` that
            has an `mscale_all_dim`, times `(0.1 * mscale_all_dim * log(factor) + 1) ** 2`, as in DeepSeek-V3.
        rotary_base: Base of the rotary position embedding. None: none.
        rotary_scaling: Scaling of its frequencies.
        rotary_interleaved: Whether a pair of rotated features is two neighbours, as in DeepSeek's checkpoints.
        norm_epsilon: Epsilon of the RMS norms of both latent vectors.
        dtype: Dtype of the computation. Default: the promoted dtype of inputs and parameters.
        param_dtype: Dtype of the parameters.
        kernel_init: Initializer of the projections.
        implementation: The jflex backend, or a sequence of them in order of preference. Default: jflex chooses.
        config: Tile sizes and promises of its attention, not of its projections. Default: jflex chooses.

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
        for name, mod in (("score_mod", self.score_mod), ("mask_mod", self.mask_mod)):
            check_no_nnx_state(name, mod)
            jflex.check_mod_sizes(mod, heads=self.num_heads, caller="a layer")
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

    def __call__(
        self,
        inputs: Float[Array, "*batch T features"],
        *,
        score_mod: jflex.ScoreMod | None = None,
        mask_mod: jflex.MaskMod | None = None,
        block_mask: jflex.BlockMask | BlockSelection | None = None,
        positions: Int[Array, "*#batch T"] | None = None,
    ) -> Float[Array, "*batch T features"]:
        """Attends within each sequence, over up-projected keys and values; as `flax_layers.nnx` has it.

        Args:
            inputs: One vector for each position. The leading axes are folded into one batch axis, the last of them
                fastest; `b` in mods, and the batch of a BlockMask, count along that axis.
            score_mod: Replaces the constructor's.
            mask_mod: Replaces the constructor's mask, of either form.
            block_mask: Replaces the constructor's mask, of either form.
            positions: Positions for the rotary embedding. Default: 0, 1, 2, ...

        Returns:
            One vector for each position, in the dtype of the computation.

        Raises:
            ValueError: A BlockMask for another length or batch, and what `jflex.flex_attention` raises.
        """
        return latent_core.attend(self, inputs, self._mods(score_mod, mask_mod, block_mask), positions)

    # linen wraps only methods of the class's own namespace, not inherited ones.
    decode = LatentMethods.decode
    decode_paged = LatentMethods.decode_paged

    def up_kernel(self) -> Float[Array, "latent Hq_times_both"]:
        """The projection of latent vectors to keys and values."""
        return self.up()

    def _mods(
        self,
        score_mod: jflex.ScoreMod | None,
        mask_mod: jflex.MaskMod | None,
        block_mask: jflex.BlockMask | BlockSelection | None = None,
    ) -> Mods:
        return mods_with_parameters(super()._mods(score_mod, mask_mod, block_mask))

    @linen.nowrap
    def _compute_dtype(self) -> Dtype:
        return self.dtype or self.param_dtype

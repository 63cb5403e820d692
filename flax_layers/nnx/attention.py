"""Attention for Flax NNX whose scores and sparsity are ordinary functions."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype, Initializer
from jaxtyping import Array

import jflex
from flax_layers.attention import core as attention_core
from flax_layers.attention.methods import AttentionMethods
from flax_layers.attention.mods import check_mods
from flax_layers.attention.selection import BlockSelection
from flax_layers.nnx.rms_norm import RMSNorm
from flax_layers.nnx.stored_mods import ModAttributes, check_no_hidden_state
from jflex.rotary import RotaryScaling


class FlexAttention(AttentionMethods, ModAttributes):
    """Projects to queries, keys and values, attends with `jflex.flex_attention`, and projects back.

    Pass mods and the mask to the constructor, or to a call, where they replace the constructor's. `mask_mod` and
    `block_mask` are two forms of one mask: either replaces both.

    A mod may hold parameters, and they get gradients. The constructor takes such a mod as a callable `nnx.Module`,
    which becomes a child of this layer. A call also takes a method of the module that owns this layer, or any function
    that captures parameters of the caller. (Flax makes new modules inside `nnx.jit` and `nnx.grad`, where a function
    that the constructor kept would still read the old parameters. So the constructor refuses such a function.)

    Args:
        in_features: Size of the input's last axis, and of the output's.
        num_heads: Number of query heads.
        in_kv_features: Size of the last axis of `inputs_kv` in cross-attention. Default: `in_features`.
        num_kv_heads: Key and value heads, a divisor of `num_heads`; each is shared by `num_heads // num_kv_heads`
            adjacent query heads. Default: `num_heads`.
        head_dim: Size of a head. Default: `in_features // num_heads`.
        score_mod: `(score, b, h, q_idx, kv_idx) -> score`, applied to every scaled score.
        mask_mod: `(b, h, q_idx, kv_idx) -> bool`, true where the query attends to the key. On a GPU, one that
            compares positions skips blocks without a BlockMask.
        block_mask: A `jflex.BlockMask`: a mask that lists which blocks are computed, for inputs of its length; or a
            `BlockSelection`, with which each call makes one of the blocks that its queries select.
        scale: Factor of the raw scores. Default: `head_dim ** -0.5`.
        rotary_base: Base of the rotary position embedding (`flax_layers.functional.rotate`); the usual value is 10000.
            Default: none, and no rotary embedding.
        rotary_scaling: Scaling of the frequencies for longer contexts, as by `flax_layers.rotary_scaling.YarnScaling`.
        rotary_dim: Number of features of a head that rotate, from the first on. Default: all.
        qk_norm: Whether each query and key head is normalized (RMS, with learned scales) before the rotary embedding,
            as in Henry et al. 2020, arXiv:2010.04245, with RMS in place of L2.
        qk_norm_options: Arguments of `flax_layers.nnx.RMSNorm` for both, such as `{"epsilon": 1e-5}`.
        use_sinks: Whether each head has a sink (`jflex.with_sinks`): a logit in the denominator of its softmax, learned
            from 0 on.
        use_bias: Whether the four projections have biases.
        out_bias: Whether the output projection has a bias. Default: `use_bias`.
        dtype: Dtype of the computation; the parameters are cast to it. Default: the promoted dtype of inputs and
            parameters.
        param_dtype: Dtype of the parameters.
        kernel_init: Initializer of the four projections.
        bias_init: Initializer of their biases.
        dropout_rate: Probability with which a call drops each attention weight; every weight has its own draw.
            `decode` and `decode_paged` never drop.
        deterministic: Whether dropout is off; `train()`, `eval()` and `nnx.view` set it. With a rate, it must be set in
            one of these ways or in the call.
        keep_rngs: Whether the layer keeps a stream of its own for dropout, forked from `rngs.dropout` if there is a
            rate. If not, pass `rngs` to each call.
        implementation: The jflex backend, or a sequence of them in order of preference. Default: jflex chooses.
        config: Tile sizes and promises of its attention, not of its projections. Default: jflex chooses.
        rngs: Source of the keys of the initializers, and of dropout.

    Raises:
        ValueError: The numbers or sizes of heads do not fit, a ready mod was made for another number of heads, a mod
            holds parameters that would get no gradients, the rate is outside of [0, 1), or `rngs` have no stream for
            dropout.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from flax_layers.nnx import FlexAttention
        >>> layer = FlexAttention(
        ...     in_features=32, num_heads=4, num_kv_heads=2, rotary_base=10000.0,
        ...     mask_mod=lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, rngs=nnx.Rngs(0),
        ... )
        >>> inputs = jnp.sin(jnp.arange(2 * 10 * 32.0)).reshape(2, 10, 32)
        >>> outputs = layer(inputs)

        A prompt of nine tokens, then one token, with a dense cache:

        >>> prompt, cache = layer.decode(inputs[:, :9], layer.init_cache(batch_size=2, max_length=64))
        >>> token, cache = layer.decode(inputs[:, 9:], cache)
        >>> print(jnp.allclose(token, outputs[:, 9:], atol=1e-5), cache.lengths)
        True [10 10]

        A prompt of 20 tokens and one of 3 with a paged cache, then one more token for each:

        >>> pages = layer.init_paged_cache(num_pages=8, page_size=16)
        >>> table = jnp.array([[5, 2], [7, 0]])
        >>> batch = jflex.paged.PagedBatch(jnp.array([0, 20, 23]), jnp.array([20, 3]), table)
        >>> outputs, pages = layer.decode_paged(jnp.ones((23, 32)), pages, batch)
        >>> batch = jflex.paged.PagedBatch(jnp.array([0, 1, 2]), jnp.array([21, 4]), table)
        >>> outputs, pages = layer.decode_paged(jnp.ones((2, 32)), pages, batch)
        >>> outputs.shape
        (2, 32)
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        in_kv_features: int | None = None,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        score_mod: jflex.ScoreMod | None = None,
        mask_mod: jflex.MaskMod | None = None,
        block_mask: jflex.BlockMask | BlockSelection | None = None,
        scale: float | None = None,
        rotary_base: float | None = None,
        rotary_scaling: RotaryScaling | None = None,
        rotary_dim: int | None = None,
        qk_norm: bool = False,
        qk_norm_options: Mapping[str, Any] | None = None,
        use_sinks: bool = False,
        use_bias: bool = False,
        out_bias: bool | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        kernel_init: Initializer = nnx.initializers.lecun_normal(),  # noqa: B008  a pure function, Flax's own habit
        bias_init: Initializer = nnx.initializers.zeros_init(),  # noqa: B008
        dropout_rate: float = 0.0,
        deterministic: bool | None = None,
        keep_rngs: bool = True,
        implementation: str | tuple[str, ...] | None = None,
        config: jflex.Config | None = None,
        rngs: nnx.Rngs,
    ):
        check_mods(score_mod, mask_mod, num_heads, check_no_hidden_state)
        attention_core.check_dropout_rate(dropout_rate)
        attention_core.check_heads(in_features, num_heads, num_kv_heads, head_dim)
        self.in_features, self.in_kv_features = in_features, in_kv_features
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.num_kv_heads, self.head_dim = self.sizes
        linear = functools.partial(nnx.Linear, kernel_init=kernel_init, bias_init=bias_init)
        linear = functools.partial(linear, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self._add_projections(linear, use_bias, use_bias if out_bias is None else out_bias)
        norm = functools.partial(RMSNorm, self.head_dim, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        norm = functools.partial(norm, **(qk_norm_options or {}))
        self.query_norm, self.key_norm = (nnx.data(norm() if qk_norm else None) for _ in range(2))
        self.sinks = nnx.data(nnx.Param(jnp.zeros(num_heads, param_dtype)) if use_sinks else None)
        self.score_mod, self.mask_mod, self.block_mask = score_mod, mask_mod, block_mask
        self.rotary_base, self.rotary_scaling, self.rotary_dim = rotary_base, rotary_scaling, rotary_dim
        self.scale, self.implementation, self.config = scale, implementation, config
        self.dropout_rate, self.deterministic = dropout_rate, deterministic
        self.rngs = nnx.data(_dropout_stream(rngs).fork() if keep_rngs and dropout_rate > 0 else None)

    def _add_projections(self, linear: Callable[..., nnx.Linear], use_bias: bool, out_bias: bool) -> None:
        kv_features = self.in_features if self.in_kv_features is None else self.in_kv_features
        num_kv_heads, head_dim = self.sizes
        self.query = linear(self.in_features, self.num_heads * head_dim, use_bias=use_bias)
        self.key = linear(kv_features, num_kv_heads * head_dim, use_bias=use_bias)
        self.value = linear(kv_features, num_kv_heads * head_dim, use_bias=use_bias)
        self.out = linear(self.num_heads * head_dim, self.in_features, use_bias=out_bias)

    _key_option = "rngs"

    def set_view(self, deterministic: bool | None = None) -> None:
        """Sets whether dropout is off, for `nnx.view`; None leaves it unchanged."""
        if deterministic is not None:
            self.deterministic = deterministic

    def _dropout_key(self, deterministic: bool | None, rngs: attention_core.DropoutKeys | None) -> Array | None:
        if self.dropout_rate == 0:
            return None
        deterministic = self.deterministic if deterministic is None else deterministic
        if deterministic is None:
            raise ValueError(
                f"`deterministic` is not set, and `dropout_rate` is {self.dropout_rate}. Call `layer.train()` or "
                "`layer.eval()`, or pass `deterministic` to the constructor or to this call."
            )
        if deterministic:
            return None
        rngs = self.rngs if rngs is None else rngs
        if isinstance(rngs, Array):
            return rngs
        if rngs is None:
            raise ValueError(
                f"`rngs` are missing: `dropout_rate` is {self.dropout_rate}, and the layer keeps no stream "
                "(keep_rngs=False). Pass `rngs=nnx.Rngs(dropout=key)` to this call, or deterministic=True."
            )
        return _dropout_stream(rngs)()

    def _compute_dtype(self) -> Dtype:
        return self.key.dtype or jax.tree.leaves(self.key)[0].dtype  # as they are, if they were cast


def _dropout_stream(rngs: nnx.Rngs | nnx.RngStream) -> nnx.RngStream:
    """The stream of the name "dropout", or else the default one."""
    if isinstance(rngs, nnx.RngStream):
        return rngs
    if not isinstance(rngs, nnx.Rngs):
        raise TypeError(f"`rngs` must be nnx.Rngs, an nnx.RngStream or a random key. Got {type(rngs).__name__}.")
    if "dropout" not in rngs and "default" not in rngs:
        raise ValueError(
            f'`rngs` must have a stream "dropout" or a default one, because `dropout_rate` is above 0. Got the streams '
            f"{sorted(rngs)}. Add one, as `nnx.Rngs(params=0, dropout=1)`."
        )
    return rngs.dropout

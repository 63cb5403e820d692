"""Attention for Flax linen whose scores and sparsity are ordinary functions."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import linen
from flax.typing import Dtype, Initializer
from jaxtyping import Array

import jflex
from flax_layers.attention import core as attention_core
from flax_layers.attention.constant_mask import constant_mask
from flax_layers.attention.methods import AttentionMethods
from flax_layers.attention.mods import VectorMods, check_mods
from flax_layers.attention.selection import BlockSelection
from flax_layers.linen.mods import LinenLayer, check_no_nnx_state, create_parameters
from flax_layers.linen.rms_norm import RMSNorm
from jflex.rotary import RotaryScaling


class FlexAttention(LinenLayer, AttentionMethods, linen.Module):
    """Projects to queries, keys and values, attends with `jflex.flex_attention`, and projects back.

    The layer of `flax_layers.nnx.FlexAttention` for linen: the same arguments, shapes, caches and errors, and the same
    parameters, which `flax_layers.linen.params_from_nnx` and `params_to_nnx` convert. Four arguments differ: there are
    no `rngs` and `keep_rngs`; with a `dropout_rate`, `deterministic` must be set here or in the call; and
    `qk_norm_options` are arguments of `flax_layers.linen.RMSNorm`.

    Pass mods and the mask to the constructor, or to a call, where they replace the constructor's. `mask_mod` and
    `block_mask` are two forms of one mask: either replaces both.

    A mod may hold parameters, and they get gradients. It may be a callable linen module, which becomes a child of
    this layer if passed to the constructor; a function that captures what `self.param` returned to the caller; or a
    method of the module that calls the layer.

    Raises:
        ValueError: The numbers or sizes of heads do not fit, a ready mod was made for another number of heads, a mod
            holds parameters of NNX, or the rate is outside of [0, 1).

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from flax_layers.linen import FlexAttention
        >>> layer = FlexAttention(
        ...     in_features=32, num_heads=4, num_kv_heads=2, rotary_base=10000.0,
        ...     mask_mod=lambda b, h, q_idx, kv_idx: q_idx >= kv_idx,
        ... )
        >>> inputs = jnp.sin(jnp.arange(2 * 10 * 32.0)).reshape(2, 10, 32)
        >>> variables = layer.init(jax.random.key(0), inputs)
        >>> outputs = layer.apply(variables, inputs)

        A prompt of nine tokens, then one token, with a dense cache:

        >>> cache = layer.init_cache(batch_size=2, max_length=64)
        >>> prompt, cache = layer.apply(variables, inputs[:, :9], cache, method="decode")
        >>> token, cache = layer.apply(variables, inputs[:, 9:], cache, method="decode")
        >>> print(jnp.allclose(token, outputs[:, 9:], atol=1e-5), cache.lengths)
        True [10 10]
    """

    in_features: int
    num_heads: int
    _: dataclasses.KW_ONLY
    in_kv_features: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    score_mod: jflex.ScoreMod | None = None
    mask_mod: jflex.MaskMod | None = None
    block_mask: jflex.BlockMask | BlockSelection | None = None
    scale: float | None = None
    rotary_base: float | None = None
    rotary_scaling: RotaryScaling | None = None
    rotary_dim: int | None = None
    qk_norm: bool = False
    qk_norm_options: Mapping[str, Any] | None = None
    use_sinks: bool = False
    use_bias: bool = False
    out_bias: bool | None = None
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    kernel_init: Initializer = linen.initializers.lecun_normal()
    bias_init: Initializer = linen.initializers.zeros_init()
    dropout_rate: float = 0.0
    deterministic: bool | None = None
    implementation: str | tuple[str, ...] | None = None
    config: jflex.Config | None = None

    def __post_init__(self) -> None:
        """Checks the arguments."""
        attention_core.check_heads(self.in_features, self.num_heads, self.num_kv_heads, self.head_dim)
        check_mods(self.score_mod, self.mask_mod, self.num_heads, check_no_nnx_state)
        attention_core.check_dropout_rate(self.dropout_rate)
        self.block_mask = constant_mask(self.block_mask)
        super().__post_init__()

    def setup(self) -> None:
        """Makes the projections."""
        num_kv_heads, head_dim = self.sizes
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
        zeros = linen.initializers.zeros_init()
        self.sinks = self.param("sinks", zeros, (self.num_heads,), self.param_dtype) if self.use_sinks else None

    _key_option = "dropout_rng"

    # linen wraps only methods of the class's own namespace, not inherited ones.
    __call__ = AttentionMethods.__call__
    decode = AttentionMethods.decode
    decode_paged = AttentionMethods.decode_paged
    project_kv = AttentionMethods.project_kv

    def _vectors(self, vectors: VectorMods) -> VectorMods:
        for example in vectors.examples(self.sizes[1]):
            create_parameters(*example)
        return super()._vectors(vectors)

    @linen.nowrap
    def _dropout_key(self, deterministic: bool | None, dropout_rng: Array | None) -> Array | None:
        if self.dropout_rate == 0 or linen.merge_param("deterministic", self.deterministic, deterministic):
            return None
        if dropout_rng is not None:
            return dropout_rng
        if not (self.has_rng("dropout") or self.has_rng("params")):  # linen falls back to that one
            raise ValueError(
                f"There is no key for dropout, and `dropout_rate` is {self.dropout_rate}. Pass "
                '`rngs={"dropout": key}` to `apply`, `dropout_rng` to this call, or deterministic=True.'
            )
        return self.make_rng("dropout")

"""The projections of an attention layer."""

import functools
from typing import Any

import jax.numpy as jnp
from flax import nnx

from flax_layers.attention import core as attention_core
from flax_layers.nnx.rms_norm import RMSNorm
from flax_layers.rotary_scaling import RotaryScaling


class Projections(nnx.Module):
    """The parameters of an attention layer: projections to queries, keys and values, and back to outputs.

    `flax_layers.attention.core` computes with them.

    Args:
        in_features: Size of the input's last axis, and of the output's.
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
        head_dim: Size of a head.
        in_kv_features: Size of the last axis of the inputs of keys and values. None: `in_features`.
        rotary_base: Base of the rotary position embedding. None: no rotary embedding.
        rotary_scaling: Scaling of its frequencies.
        rotary_dim: Number of features of a head that rotate. None: all.
        qk_norm: Whether query and key heads are normalised.
        qk_norm_options: Arguments of `flax_layers.nnx.RMSNorm` for both.
        use_sinks: Whether each query head has a sink.
        use_bias: Whether the projections have biases.
        out_bias: Whether the output projection has a bias. None: `use_bias`.
        rngs: Source of the keys of the initializers.
        linear_options: Arguments of `nnx.Linear` for the four projections.

    Raises:
        ValueError: The numbers or sizes of heads do not fit.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        num_kv_heads: int | None,
        head_dim: int | None,
        *,
        in_kv_features: int | None,
        rotary_base: float | None,
        rotary_scaling: RotaryScaling | None,
        rotary_dim: int | None,
        qk_norm: bool,
        qk_norm_options: dict[str, Any],
        use_sinks: bool,
        use_bias: bool,
        out_bias: bool | None,
        rngs: nnx.Rngs,
        **linear_options: Any,
    ):
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        attention_core.check_heads(in_features, num_heads, num_kv_heads, head_dim)
        head_dim = in_features // num_heads if head_dim is None else head_dim
        linear = functools.partial(nnx.Linear, rngs=rngs, **linear_options)
        dtypes = {name: linear_options[name] for name in ("dtype", "param_dtype")}
        norm = functools.partial(RMSNorm, head_dim, rngs=rngs, **dtypes, **qk_norm_options)
        self.query = linear(in_features, num_heads * head_dim, use_bias=use_bias)
        kv_features = in_features if in_kv_features is None else in_kv_features
        self.key = linear(kv_features, num_kv_heads * head_dim, use_bias=use_bias)
        self.value = linear(kv_features, num_kv_heads * head_dim, use_bias=use_bias)
        self.out = linear(num_heads * head_dim, in_features, use_bias=use_bias if out_bias is None else out_bias)
        self.query_norm = nnx.data(norm() if qk_norm else None)
        self.key_norm = nnx.data(norm() if qk_norm else None)
        self.sinks = nnx.data(nnx.Param(jnp.zeros(num_heads, dtypes["param_dtype"])) if use_sinks else None)
        self.in_features = in_features
        self.in_kv_features = in_kv_features
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.rotary_base = rotary_base
        self.rotary_scaling = rotary_scaling
        self.rotary_dim = rotary_dim

"""A transformer block of the decoder of all families."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

import jflex
from flax_layers.attention_methods import Cache
from flax_layers.context_parallel import ContextParallel
from flax_layers.models import mods
from flax_layers.models.config import LayerConfig, ModelConfig
from flax_layers.nnx import FlexAttention, RMSNorm, SharedPrefix
from flax_layers.streaming_llm import Streaming
from jflex.paged import PagedBatch, PagedCache

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_pytorch_tanh": jax.nn.gelu,
}
"""Activations, by their names in Transformers."""

MakeScoreMod = Callable[..., nnx.Module]
"""Takes `rngs` and returns a callable module, such as `functools.partial(flax_layers.nnx.AlibiBias, num_heads)`."""


class MLP(nnx.Module):
    """A gated MLP.

    Args:
        config: The configuration of the model.
        linear: Makes a projection with given input and output sizes.
    """

    def __init__(self, config: ModelConfig, linear: Callable[..., nnx.Linear]):
        self.gate = linear(config.width, config.mlp_width, use_bias=config.mlp_bias)
        self.up = linear(config.width, config.mlp_width, use_bias=config.mlp_bias)
        self.down = linear(config.mlp_width, config.width, use_bias=config.mlp_bias)
        self.activation = config.activation

    def __call__(self, inputs: Float[Array, "*batch width"]) -> Float[Array, "*batch width"]:
        """Returns the output, which is added to the residual stream."""
        return self.down(ACTIVATIONS[self.activation](self.gate(inputs)) * self.up(inputs))


class Block(nnx.Module):
    """A transformer block: attention and an MLP, each added to the residual stream.

    Args:
        config: The configuration of the model.
        layer: The configuration of this layer.
        score_mod: Makes a module that is the score_mod of this layer.
        implementation: The jflex backend.
        attention_config: Tile sizes and promises of its attention.
        options: `dtype`, `param_dtype` and `rngs`, as for `Decoder`.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: LayerConfig,
        *,
        score_mod: MakeScoreMod | None = None,
        implementation: str | tuple[str, ...] | None = None,
        attention_config: jflex.Config | None = None,
        **options: Any,
    ):
        normal = nnx.initializers.normal(config.initializer_range)
        norm_options = {"epsilon": config.norm_epsilon, "offset": config.norm_offset}
        norm = functools.partial(RMSNorm, config.width, **norm_options, **options)
        self.attention = FlexAttention(
            config.width,
            config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.attention_scale,
            rotary_base=layer.rotary_base,
            rotary_scaling=layer.rotary_scaling,
            rotary_dim=layer.rotary_dim,
            qk_norm=config.qk_norm,
            qk_norm_options=norm_options,
            use_bias=config.qkv_bias,
            out_bias=config.out_bias,
            kernel_init=normal,
            implementation=implementation,
            config=attention_config,
            **options,
        )
        self.mlp = MLP(config, functools.partial(nnx.Linear, kernel_init=normal, **options))
        self.attention_norm = norm()
        self.mlp_norm = norm()
        self.post_attention_norm = nnx.data(norm() if config.post_norms else None)
        self.post_mlp_norm = nnx.data(norm() if config.post_norms else None)
        self.score_mod = nnx.data(None if score_mod is None else score_mod(rngs=options["rngs"]))
        self.config = config
        self.layer = layer

    def __call__(
        self,
        stream: Float[Array, "B T width"],
        block_mask: jflex.BlockMask | None = None,
        positions: Int[Array, "*#B T"] | None = None,
        context: ContextParallel | None = None,
    ) -> Float[Array, "B T width"]:
        """Returns the residual stream after this block.

        Args:
            stream: The residual stream.
            block_mask: The mask. Default: causal within the layer's window, without skipping blocks.
            positions: Positions for the rotary embedding. Default: 0, 1, 2, ...
            context: How tokens are divided among devices. Default: they are not.
        """
        mask_mod = mods.mask_mod(self.layer.window) if block_mask is None else None
        attended = self.attention(
            self.attention_norm(stream),
            score_mod=mods.score_mod(self.config, self.score_mod),
            mask_mod=mask_mod,
            block_mask=block_mask,
            positions=positions,
            context=context,
        )
        return self._add_both(stream, attended)

    def decode(
        self, stream: Float[Array, "B T width"], cache: Cache, block_mask: jflex.BlockMask | None = None
    ) -> tuple[Float[Array, "B T width"], Cache]:
        """Appends tokens to each sequence. Returns their residual stream after this block, and the cache."""
        attended, cache = self.attention.decode(
            self.attention_norm(stream),
            cache,
            score_mod=mods.score_mod(self.config, self.score_mod),
            mask_mod=mods.mask_mod(self.layer.window) if block_mask is None else None,
            block_mask=block_mask,
        )
        return self._add_both(stream, attended), cache

    def decode_paged(
        self,
        stream: Float[Array, "N width"],
        cache: PagedCache,
        batch: PagedBatch,
        layer: int | Int[Array, ""],
        shared_prefix: SharedPrefix | None = None,
        streaming: Streaming | None = None,
    ) -> tuple[Float[Array, "N width"], PagedCache]:
        """Appends packed tokens to layer `layer` of the cache. Returns their residual stream after this block."""
        reads_all = shared_prefix is not None and self.layer.window is None  # the last token of a request sees all keys
        attended, cache = self.attention.decode_paged(
            self.attention_norm(stream),
            cache,
            batch,
            layer=layer,
            score_mod=mods.score_mod(self.config, self.score_mod),
            mask_mod=None if reads_all else mods.paged_mask(self.layer.window, streaming),
            shared_prefix=shared_prefix if reads_all else None,
            streaming=streaming,
        )
        return self._add_both(stream, attended), cache

    def _add_both(
        self, stream: Float[Array, "*batch width"], attended: Float[Array, "*batch width"]
    ) -> Float[Array, "*batch width"]:
        """Adds the outputs of attention and of the MLP to the residual stream."""
        if self.post_attention_norm is not None:
            attended = self.post_attention_norm(attended)
        stream = stream + attended
        added = self.mlp(self.mlp_norm(stream))
        if self.post_mlp_norm is not None:
            added = self.post_mlp_norm(added)
        return stream + added

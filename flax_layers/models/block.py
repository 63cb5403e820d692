"""A transformer block of the decoder of all families."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypedDict, Unpack

from flax import nnx
from flax.typing import Dtype
from jaxtyping import Array, Float, Int

import jflex
from flax_layers.attention.methods import Cache
from flax_layers.attention.streaming import Streaming
from flax_layers.context_parallel import ContextParallel
from flax_layers.models import mods
from flax_layers.models.config import LayerConfig, ModelConfig
from flax_layers.models.experts import MixtureOfExperts
from flax_layers.models.mlp import MLP
from flax_layers.nnx import DenseLatentCache, FlexAttention, MultiHeadLatentAttention, RMSNorm, SharedPrefix
from jflex.paged import LatentCache, PagedBatch, PagedCache

AnyCache = Cache | DenseLatentCache
"""The dense cache of a layer."""

Pages = PagedCache | LatentCache
"""The paged cache of all layers."""


class ModuleOptions(TypedDict):
    """Arguments of every module of a model."""

    dtype: Dtype
    param_dtype: Dtype
    rngs: nnx.Rngs


MakeScoreMod = Callable[..., nnx.Module]
"""Takes `rngs` and returns a callable module, such as `functools.partial(flax_layers.nnx.AlibiBias, num_heads)`."""


class Block(nnx.Module):
    """A transformer block: attention and an MLP or a mixture of experts, each added to the residual stream.

    All arguments but the configuration of the layer are as for `Decoder`.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: LayerConfig,
        *,
        score_mod: MakeScoreMod | None = None,
        implementation: str | tuple[str, ...] | None = None,
        attention_config: jflex.Config | None = None,
        **options: Unpack[ModuleOptions],
    ):
        norm = functools.partial(RMSNorm, config.width, **_norm_options(config), **options)
        make = _grouped_heads if config.latent is None else _latent
        # Each takes a cache of its own.
        self.attention: Any = make(config, layer, implementation=implementation, config=attention_config, **options)
        self.mlp = _mlp(config, layer, **options)
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
            stream: The residual stream before it.
            block_mask: The mask. Default: causal within the layer's window, without skipping blocks.
            positions: Positions for the rotary embedding. Default: 0, 1, 2, ...
            context: How tokens are divided among devices. Default: they are not.
        """
        options = {**self._mods(block_mask), **_present(context=context)}
        attended = self.attention(self.attention_norm(stream), positions=positions, **options)
        return self._add_both(stream, attended)

    def decode(
        self, stream: Float[Array, "B T width"], cache: AnyCache, block_mask: jflex.BlockMask | None = None
    ) -> tuple[Float[Array, "B T width"], AnyCache]:
        """Appends tokens to each sequence. Returns their residual stream after this block, and the cache."""
        attended, cache = self.attention.decode(self.attention_norm(stream), cache, **self._mods(block_mask))
        return self._add_both(stream, attended), cache

    def decode_paged(
        self,
        stream: Float[Array, "N width"],
        cache: Pages,
        batch: PagedBatch,
        layer: int | Int[Array, ""],
        shared_prefix: SharedPrefix | None = None,
        streaming: Streaming | None = None,
    ) -> tuple[Float[Array, "N width"], Pages]:
        """Appends packed tokens to layer `layer` of the cache. Returns their residual stream after this block."""
        reads_all = shared_prefix is not None and self.layer.window is None  # the last token of a request sees all keys
        attended, cache = self.attention.decode_paged(
            self.attention_norm(stream),
            cache,
            batch,
            layer=layer,
            score_mod=mods.score_mod(self.config, self.score_mod),
            mask_mod=None if reads_all else mods.paged_mask(self.layer.window, streaming),
            **_present(shared_prefix=shared_prefix if reads_all else None, streaming=streaming),
        )
        return self._add_both(stream, attended), cache

    def _mods(self, block_mask: jflex.BlockMask | None) -> dict[str, Any]:
        """The score_mod of a call, and its mask of one of its forms."""
        mask = {"mask_mod": mods.mask_mod(self.layer.window)} if block_mask is None else {"block_mask": block_mask}
        return {"score_mod": mods.score_mod(self.config, self.score_mod), **mask}

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


def _present(**options: object) -> dict[str, Any]:
    """Options but for those that are None. Latent attention lacks some; `Decoder` refuses them by name."""
    return {name: option for name, option in options.items() if option is not None}


def _norm_options(config: ModelConfig) -> dict[str, float]:
    return {"epsilon": config.norm_epsilon, "offset": config.norm_offset}


def _grouped_heads(model: ModelConfig, layer: LayerConfig, **options: Any) -> FlexAttention:
    return FlexAttention(
        model.width, model.num_heads, num_kv_heads=model.num_kv_heads, head_dim=model.head_dim,
        scale=model.attention_scale, rotary_base=layer.rotary_base, rotary_scaling=layer.rotary_scaling,
        rotary_dim=layer.rotary_dim, qk_norm=model.qk_norm, qk_norm_options=_norm_options(model),
        use_sinks=model.use_sinks, use_bias=model.qkv_bias, out_bias=model.out_bias,
        kernel_init=nnx.initializers.normal(model.initializer_range), **options,
    )  # fmt: skip


def _latent(model: ModelConfig, layer: LayerConfig, **options: Any) -> MultiHeadLatentAttention:
    assert model.latent is not None
    # Norms of latent vectors keep their epsilon of 1e-6, as in Transformers, whatever the epsilon of the model.
    return MultiHeadLatentAttention(
        model.width, model.num_heads, **dataclasses.asdict(model.latent), scale=model.attention_scale,
        rotary_base=layer.rotary_base, rotary_scaling=layer.rotary_scaling,
        kernel_init=nnx.initializers.normal(model.initializer_range), **options,
    )  # fmt: skip


def _mlp(config: ModelConfig, layer: LayerConfig, **options: Unpack[ModuleOptions]) -> MLP | MixtureOfExperts:
    normal = nnx.initializers.normal(config.initializer_range)
    linear = functools.partial(nnx.Linear, kernel_init=normal, **options)
    if layer.experts is None:
        linear = functools.partial(linear, use_bias=config.mlp_bias)
        return MLP(config.width, config.mlp_width, config.activation, linear)
    param_dtype, rngs = options["param_dtype"], options["rngs"]
    return MixtureOfExperts(
        config.width, layer.experts, config.activation, linear, kernel_init=normal, param_dtype=param_dtype, rngs=rngs
    )

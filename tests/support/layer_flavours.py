"""The attention layers of nnx and linen behind one interface, so that each test of a layer is written once."""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen
import jax
import jax.numpy as jnp
from flax import nnx

import flax_layers.linen
import flax_layers.nnx

HEADS = 4
SLOPES = jnp.linspace(0.1, 0.7, HEADS)


class NNXAlibi(nnx.Module):
    """A score_mod with parameters."""

    def __init__(self):
        self.slopes = nnx.Param(SLOPES)

    def __call__(self, score, b, h, q_idx, kv_idx):
        return score - self.slopes[h] * jnp.abs(q_idx - kv_idx).astype(score.dtype)


class LinenAlibi(flax.linen.Module):
    """A score_mod with parameters."""

    @flax.linen.compact
    def __call__(self, score, b, h, q_idx, kv_idx):
        slopes = self.param("slopes", lambda key: SLOPES + 0 * jax.random.uniform(key))  # traced under `jit`
        return score - slopes[h] * jnp.abs(q_idx - kv_idx).astype(score.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class LinenLayer:
    """A linen layer with its variables: a pytree that is called as an nnx layer is."""

    variables: Any
    module: flax.linen.Module = dataclasses.field(metadata={"static": True})

    def __call__(self, *args, **options):
        return self.module.apply(self.variables, *args, **options)

    def decode(self, *args, **options):
        return self.module.apply(self.variables, *args, method="decode", **options)

    def decode_paged(self, *args, **options):
        return self.module.apply(self.variables, *args, method="decode_paged", **options)

    def init_cache(self, *args, **options):
        return self.module.init_cache(*args, **options)

    def init_paged_cache(self, *args, **options):
        return self.module.init_paged_cache(*args, **options)


class NNX:
    """`flax_layers.nnx.FlexAttention`."""

    alibi = NNXAlibi

    def make(self, in_features: int, num_heads: int = HEADS, *, seed: Any = 0, **options):
        return flax_layers.nnx.FlexAttention(in_features, num_heads, rngs=nnx.Rngs(seed), **options)

    def stack(self, keys: jax.Array, in_features: int, options: Callable[[], dict]):
        """Layers with stacked parameters; `options` are made inside of `vmap`, modules among them, too."""
        return nnx.vmap(lambda key: self.make(in_features, seed=key, **options()))(keys)

    def params(self, layer) -> dict:
        return nnx.to_pure_dict(nnx.state(layer, nnx.Param))

    def split(self, layer):
        graph, state = nnx.split(layer)
        return lambda state: nnx.merge(graph, state), state

    def gradients(self, loss, layer) -> dict:
        return nnx.to_pure_dict(nnx.jit(nnx.grad(loss))(layer))


class Linen:
    """`flax_layers.linen.FlexAttention`."""

    alibi = LinenAlibi

    def make(self, in_features: int, num_heads: int = HEADS, *, seed: Any = 0, **options) -> LinenLayer:
        module = flax_layers.linen.FlexAttention(in_features, num_heads, **options)
        key = jax.random.key(seed) if isinstance(seed, int) else seed
        # Of one token and without a mask, whatever the BlockMask of the layer is made for.
        token = jnp.ones((1, in_features), options.get("param_dtype", jnp.float32))
        everything = lambda b, h, q_idx, kv_idx: kv_idx >= 0
        return LinenLayer(module.init(key, token, mask_mod=everything), module)

    def stack(self, keys: jax.Array, in_features: int, options: Callable[[], dict]) -> LinenLayer:
        return jax.vmap(lambda key: self.make(in_features, seed=key, **options()))(keys)

    def params(self, layer: LinenLayer) -> dict:
        return layer.variables["params"]

    def split(self, layer: LinenLayer):
        return lambda variables: LinenLayer(variables, layer.module), layer.variables

    def gradients(self, loss, layer: LinenLayer) -> dict:
        return self.params(jax.jit(jax.grad(loss))(layer))


FLAVOURS = {"nnx": NNX(), "linen": Linen()}

"""The `config` of layers and models reaches every call of attention."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import flax_layers.linen
import flax_layers.nnx
from flax_layers.generate import generate
from flax_layers.models import Decoder, LayerConfig, ModelConfig, from_pretrained, save_pretrained
from jflex import Config, UnsupportedError
from jflex.masks import causal
from jflex.paged import PagedBatch
from tests.support.layer_flavours import LinenLayer
from tests.support.rows import tiers

WIDTH, HEADS, TOKENS = 32, 4, 6
MODEL = ModelConfig(
    family="mistral", vocabulary=64, width=32, mlp_width=48, num_heads=4, num_kv_heads=2, head_dim=8,
    layers=(LayerConfig(window=5),) * 2, max_positions=64, initializer_range=0.2,
)  # fmt: skip
# `reference` refuses it, in every call that it gets to.
REFUSED = {"implementation": "reference", "config": Config(batch_invariant=True)}
OF_LATENTS = {"latent_dim": 16, "nope_head_dim": 8, "rope_head_dim": 8, "value_head_dim": 8}
INPUTS = np.random.default_rng(0).normal(size=(1, TOKENS, WIDTH)).astype(np.float32)
BATCH = PagedBatch(jnp.array([0, TOKENS]), jnp.array([TOKENS]), jnp.array([[1, 2]]))
CALLS = {
    "whole": lambda layer: layer(INPUTS),
    "dense": lambda layer: layer.decode(INPUTS, layer.init_cache(1, 16)),
    "paged": lambda layer: layer.decode_paged(INPUTS[0], layer.init_paged_cache(3, 4), BATCH),
}
LATENT_CALLS = CALLS | {
    "dense, up-projected": lambda layer: layer.decode(np.tile(INPUTS, (1, 20, 1)), layer.init_cache(1, 128)),
    "paged, up-projected": lambda layer: layer.decode_paged(
        INPUTS[0], layer.init_paged_cache(3, 4), BATCH, new_prompts=True
    ),
}


def made(flavour: str, name: str, how):
    """A layer; that of linen gets its parameters first."""
    sizes = OF_LATENTS if name == "MultiHeadLatentAttention" else {}
    if flavour == "nnx":
        make = getattr(flax_layers.nnx, name)
        return make(WIDTH, HEADS, **sizes, mask_mod=causal(), **how, rngs=nnx.Rngs(0))
    module = getattr(flax_layers.linen, name)(WIDTH, HEADS, **sizes, mask_mod=causal())
    return LinenLayer(module.init(jax.random.key(0), INPUTS), module.clone(**how))


ALL = [("FlexAttention", call) for call in CALLS] + [("MultiHeadLatentAttention", call) for call in LATENT_CALLS]


@tiers(default={"flavour": "nnx", "name": "FlexAttention-whole"}, in_turns=True)
@pytest.mark.parametrize(("name", "call"), ALL)
@pytest.mark.parametrize("flavour", ["nnx", "linen"])
def test_layers(flavour, name, call):
    with pytest.raises(UnsupportedError, match="as many keys as the longest request has"):
        jax.eval_shape(lambda: LATENT_CALLS[call](made(flavour, name, REFUSED)))


@pytest.mark.full
@pytest.mark.parametrize("cache", ["dense", "paged"])
def test_generation(cache, tmp_path):
    """Also of a model that is read from a folder, whose tokens it does not change."""
    plain = Decoder(MODEL, implementation="xla", rngs=nnx.Rngs(0))
    save_pretrained(plain, tmp_path / "model")
    how: dict[str, Any] = {"implementation": "xla", "attention_config": Config(batch_invariant=True)}
    invariant = from_pretrained(tmp_path / "model", **how)
    assert invariant.attention_config == how["attention_config"]
    results = [generate(x, [[1, 2, 3], [9] * 7], max_tokens=3, cache=cache).results() for x in (plain, invariant)]
    assert results[0] == results[1]
    refused = from_pretrained(tmp_path / "model", **{**how, "implementation": "reference"})
    with pytest.raises(UnsupportedError, match="as many keys as the longest request has"):
        generate(refused, [[1, 2, 3]], max_tokens=2, cache=cache).results()

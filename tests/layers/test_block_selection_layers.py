"""Layers that select blocks of keys: what they compute, that they are causal, and that they train."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import flax_layers.linen
import flax_layers.nnx
import jflex
from flax_layers.attention import core as attention_core
from flax_layers.attention.selection import BlockSelection
from tests.support.layer_flavours import FLAVOURS, NNX
from tests.support.rows import tiers

WIDTH, LENGTH, BLOCK = 32, 150, 16
CAUSAL = jflex.masks.causal()
SELECTIONS = {
    "moba": BlockSelection(3, block_size=BLOCK),
    "nsa": BlockSelection(5, block_size=BLOCK, local_blocks=2, initial_blocks=1),
}
flavours = pytest.mark.parametrize("flavour", FLAVOURS.values(), ids=FLAVOURS)
selections = pytest.mark.parametrize("selection", SELECTIONS.values(), ids=SELECTIONS)


def inputs(length=LENGTH, seed=0):
    return jax.random.normal(jax.random.key(seed), (2, length, WIDTH))


def made(flavour, **options):
    return flavour.make(WIDTH, **({"num_kv_heads": 2, "rotary_base": 10000.0, "implementation": "xla"} | options))


def chosen_by_hand(layer, x, selection):
    """Whether each query block selects each key block, [B, Hkv, R, C], in numpy: its own, and the best before it."""
    at = jnp.arange(x.shape[1]), x.shape[1]
    query = attention_core.rotated(layer, attention_core.query_heads(layer, x), *at)
    key = attention_core.project_kv(layer, x, *at).key
    query, key = np.asarray(query, np.float64), np.asarray(key, np.float64)
    B, T, Hq, D = query.shape
    Hkv, count = key.shape[2], -(-T // selection.block_size)
    chosen = np.zeros((B, Hkv, count, count), bool)
    for b, h, r in np.ndindex(B, Hkv, count):
        first = query[b, r * selection.block_size].reshape(Hkv, Hq // Hkv, D)[h].mean(0)
        means = [key[b, c * selection.block_size : (c + 1) * selection.block_size, h].mean(0) for c in range(count)]
        scores = np.stack(means) @ first
        always = {*range(max(0, r + 1 - selection.local_blocks), r + 1), *range(min(selection.initial_blocks, r + 1))}
        rest = sorted(set(range(r)) - always, key=lambda c, scores=scores: -scores[c])
        chosen[b, h, r, [*always, *rest[: selection.k - len(always)]]] = True
    return chosen


@pytest.mark.full
@selections
def test_outputs_and_gradients_are_those_of_the_dense_mask(selection):
    x, layer = inputs(), made(NNX(), block_mask=selection)
    chosen = chosen_by_hand(layer, x, selection)
    counts = chosen.sum(-1)
    assert (counts == np.minimum(selection.k, np.arange(counts.shape[-1]) + 1)).all()
    shown = jnp.asarray(chosen)

    def mask(b, h, q_idx, kv_idx):
        return shown[b, h // 2, q_idx // BLOCK, kv_idx // BLOCK] & (q_idx >= kv_idx)

    def loss(layer, **options):
        return (layer(x, **options) ** 2).sum()

    dense = lambda layer: loss(layer, mask_mod=mask)
    found, right = (nnx.jit(nnx.value_and_grad(f))(layer) for f in (loss, dense))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), found, right)


@pytest.mark.full
def test_all_blocks_are_causal_attention():
    """Also of sequences shorter than a block, of one token, and with leading axes."""
    layer = made(NNX(), block_mask=BlockSelection(100, block_size=BLOCK))
    both = nnx.jit(lambda layer, x: (layer(x), layer(x, mask_mod=CAUSAL)))
    for x in (inputs(), inputs(7), inputs(1), inputs()[None], inputs()[0]):
        np.testing.assert_allclose(*both(layer, x), rtol=1e-5, atol=1e-5)
    decoded, _ = layer.decode(inputs(32), layer.init_cache(2, 64), mask_mod=CAUSAL)
    np.testing.assert_allclose(decoded, layer(inputs(32), mask_mod=CAUSAL), rtol=1e-5, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("flax", ["nnx", "linen"])
def test_latent_attention_selects(flax):
    """With `k` blocks in all it is causal attention; with fewer it is not, and is causal nonetheless."""
    sizes = {"latent_dim": 16, "nope_head_dim": 8, "rope_head_dim": 4, "value_head_dim": 8, "implementation": "xla"}
    of_nnx = flax_layers.nnx.MultiHeadLatentAttention(WIDTH, 2, **sizes, rngs=nnx.Rngs(0))
    call = of_nnx
    if flax == "linen":
        module = flax_layers.linen.MultiHeadLatentAttention(WIDTH, 2, **sizes)
        variables = {"params": flax_layers.linen.params_from_nnx(of_nnx)}
        call = lambda x, **options: module.apply(variables, x, **options)
    x, causal = inputs(), call(inputs(), mask_mod=CAUSAL)
    every, few = (call(x, block_mask=BlockSelection(k, block_size=BLOCK)) for k in (10, 2))
    np.testing.assert_allclose(every, causal, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(few[:, :32], causal[:, :32], rtol=1e-5, atol=1e-5)
    assert np.abs(few - causal).max() > 1e-2
    later = call(x.at[:, 90:].set(0.0), block_mask=BlockSelection(2, block_size=BLOCK))
    np.testing.assert_allclose(later[:, :90], few[:, :90], rtol=1e-5, atol=1e-5)


@tiers(rest="full")
@flavours
def test_training_compiles_once_and_the_loss_falls(flavour):
    """Each step selects anew, of new inputs."""
    layer = made(flavour, block_mask=SELECTIONS["moba"])
    merge, state = flavour.split(layer)

    def loss(state, x):
        return ((merge(state)(x) - x) ** 2).mean()

    @jax.jit
    def step(state, x):
        found, gradients = jax.value_and_grad(loss)(state, x)
        return found, jax.tree.map(lambda p, g: p - 4.0 * g, state, gradients)

    losses = []
    for seed in range(20):
        found, state = step(state, inputs(seed=seed))
        losses.append(float(found))
    assert step._cache_size() == 1
    assert np.mean(losses[-3:]) < 0.75 * losses[0]

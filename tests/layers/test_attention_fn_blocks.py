"""Which blocks `flax_layers.attention_fn` skips where Flax passes `is_causal`."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

import jflex
from flax_layers import attention_fn
from tests.layers.test_attention_fn import B, D, T, arrays, assert_close, draw
from tests.support.layer_flavours import HEADS
from tests.support.rows import tiers

LONG = 512
FIRST_KEYS = jnp.arange(LONG)[None] < 200


def rings(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx) % (2 + h + b) != 1


def strided(b, h, q_idx, kv_idx):
    return kv_idx % 3 != 1


# What `attention_fn` takes, what Flax passes, the sparsity in percent, batch and heads of the lists.
BESIDE: dict[str, tuple[dict[str, Any], dict[str, Any], float, tuple[int, int]]] = {
    "nothing": ({}, {}, 37.5, (1, 1)),
    "mask_mod": ({"mask_mod": strided}, {}, 37.5, (1, 1)),
    "mask_mod of batch and heads": ({"mask_mod": rings}, {}, 37.5, (B, HEADS)),
    "mask_mod, mask": ({"mask_mod": rings}, {"mask": FIRST_KEYS}, 56.25, (B, HEADS)),
    "mask": ({}, {"mask": FIRST_KEYS}, 56.25, (1, 1)),
    "block_mask": ({"block_mask": (jflex.masks.sliding_window(100, 300), 128)}, {}, 56.25, (1, 1)),
    "block_mask, mask": ({"block_mask": (strided, 256)}, {"mask": FIRST_KEYS}, 50, (1, 1)),
    "block_mask of small blocks": ({"block_mask": (jflex.masks.sliding_window(0, 511), 64)}, {}, 87.5, (1, 1)),
}


def masks_of_calls(monkeypatch) -> list[Any]:
    """The BlockMask of each call that follows."""
    made, whole = [], jflex.flex_attention
    monkeypatch.setattr(jflex, "flex_attention", lambda *args, **rest: made.append(args[4]) or whole(*args, **rest))
    return made


def dense(mask_mod, mask=True) -> np.ndarray:
    """With `is_causal`."""
    shown = np.asarray(jflex.create_mask(mask_mod, B, HEADS, LONG, LONG))
    return shown & np.tri(LONG, dtype=bool) & np.asarray(mask)


@tiers(default={"name": ["nothing", "block_mask, mask"]})
@pytest.mark.parametrize("name", BESIDE)
def test_is_causal_skips_blocks(name, monkeypatch):
    """Beside each form of a mask: those above the diagonal; and those that a mask leaves empty, unless a mask_mod."""
    mods, handed, sparsity, batch_heads = BESIDE[name]
    mods, mask_mod = dict(mods), mods.get("mask_mod", jflex.noop_mask)
    if "block_mask" in mods:
        mask_mod, size = mods["block_mask"]
        mods["block_mask"] = jflex.create_block_mask(mask_mod, None, None, LONG, LONG, block_size=size)
    made, x = masks_of_calls(monkeypatch), draw(B, LONG, HEADS, D)
    found = attention_fn(**mods)(x, x, x, is_causal=True, **handed)
    [block_mask] = made
    assert (block_mask.sparsity(), block_mask.shape[:2]) == (sparsity, batch_heads)
    account = jflex.explain(x, x, x, block_mask=block_mask)
    assert (account.visited or 0) / (account.blocks or 1) == 1 - sparsity / 100
    expected = linen.dot_product_attention(x, x, x, mask=jnp.asarray(dense(mask_mod, **handed)))
    assert_close(found, expected)


@pytest.mark.full
def test_is_causal_beside_a_block_mask_of_one_block():
    query, key, value = arrays((B,))
    block_mask = jflex.create_block_mask(jflex.masks.sliding_window(3, 3), None, None, T, T)
    band = jnp.asarray(np.tri(T, dtype=bool) & ~np.tri(T, k=-4, dtype=bool))
    expected = linen.dot_product_attention(query, key, value, mask=band[None, None])
    assert_close(attention_fn(block_mask=block_mask)(query, key, value, is_causal=True), expected)


def test_the_blocks_of_is_causal_hold_the_tiles_of_the_user(monkeypatch):
    made = []
    monkeypatch.setattr(jflex, "flex_attention", lambda *args, **rest: made.append(args[4]) or args[0])
    x = draw(1, LONG, 1, D)
    attention_fn(config=jflex.Config(forward=jflex.Tiles(256, 64)))(x, x, x, is_causal=True)
    assert made[0].block_size == (256, 128)

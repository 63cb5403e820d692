"""Gemma-like layers: soft caps, and windows that alternate with full attention."""

import jax
import jax.numpy as jnp

import jflex
from jflex import masks, scores

WINDOW, CAP = 64, 50.0


def layers(number: int, length: int):
    """The masks of all layers: one BlockMask of a window and one of full attention, shared."""
    window = jflex.create_block_mask(masks.sliding_window(WINDOW - 1), None, None, length, length, block_size=64)
    full = jflex.create_block_mask(masks.causal(), None, None, length, length, block_size=64)
    return [window if layer % 2 == 0 else full for layer in range(number)]


def attend(query, key, value, block_mask):
    return jflex.flex_attention(query, key, value, scores.softcap(CAP), block_mask)


def dense(query, key, value, mask):
    """The same in plain JAX, which stores the scores."""
    key, value = (jnp.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in (key, value))
    s = jnp.einsum("bthd,bshd->bhts", query, key) / query.shape[-1] ** 0.5
    s = jnp.where(mask, CAP * jnp.tanh(s / CAP), -jnp.inf)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(s), value)


def main(length: int = 1024):
    query = jax.random.normal(jax.random.key(0), (1, length, 8, 32))
    key, value = jax.random.normal(jax.random.key(1), (2, 1, length, 4, 32))
    windows = masks.sliding_window(WINDOW - 1), masks.causal()
    for layer, block_mask in enumerate(layers(4, length)):
        mask = jflex.create_mask(windows[layer % 2], None, None, length, length)
        error = jnp.abs(attend(query, key, value, block_mask) - dense(query, key, value, mask)).max()
        print(f"layer {layer}: {block_mask.sparsity():.0f} % of the blocks skipped, largest error {error:.1e}")
        assert error < 1e-4


if __name__ == "__main__":
    main()

"""Latent attention (MLA): the cache has one small vector for each token, read as keys and values of all heads."""

import jax
import jax.numpy as jnp
from flax import nnx

from flax_layers.nnx import MultiHeadLatentAttention
from jflex.masks import causal

WIDTH, HEADS, LATENT, ROPE = 256, 16, 64, 16


def main(prompt: int = 100, tokens: int = 8):
    layer = MultiHeadLatentAttention(
        WIDTH, HEADS, latent_dim=LATENT, nope_head_dim=32, rope_head_dim=ROPE, value_head_dim=32,
        query_latent_dim=96, mask_mod=causal(), rngs=nnx.Rngs(0),
    )  # fmt: skip
    inputs = jax.random.normal(jax.random.key(0), (2, prompt + tokens, WIDTH))
    whole = layer(inputs)  # keys and values up-projected: how it trains

    step = nnx.jit(MultiHeadLatentAttention.decode, donate_argnames="cache")
    cache = layer.init_cache(2, max_length=prompt + tokens)
    _, cache = step(layer, inputs[:, :prompt], cache)
    for position in range(prompt, prompt + tokens):  # queries absorbed: attention in the latent space
        token, cache = step(layer, inputs[:, position : position + 1], cache)
        error = jnp.abs(token[:, 0] - whole[:, position]).max()
        assert error < 1e-4

    heads = HEADS * (32 + ROPE + 32)
    print(f"cached numbers of a token: {LATENT + ROPE}, with keys and values of all heads {heads}")
    print(f"largest difference of decoding and the whole sequence: {error:.1e}")


if __name__ == "__main__":
    main()

"""Block diffusion (arXiv:2503.09573): noised blocks attend to clean blocks before them, all trained in one pass."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jflex
from flax_layers.nnx import FlexAttention
from jflex import masks

ROWS, T, BLOCK, WIDTH, VOCABULARY = 8, 64, 8, 64, 16
MASKED = VOCABULARY  # the token of a masked position
BLOCKS = jflex.create_block_mask(masks.block_diffusion(T, BLOCK), None, None, 2 * T, 2 * T, block_size=16)
draw = lambda key: jnp.tile(jax.random.randint(key, (ROWS, 4), 0, VOCABULARY), (1, T // 4))  # a word, repeated


class Model(nnx.Module):
    def __init__(self, rngs):
        self.embed, self.place = nnx.Embed(VOCABULARY + 1, WIDTH, rngs=rngs), nnx.Embed(T, WIDTH, rngs=rngs)
        self.layers = nnx.List([FlexAttention(WIDTH, 4, block_mask=BLOCKS, rngs=rngs) for _ in range(2)])
        self.norm, self.head = nnx.RMSNorm(WIDTH, rngs=rngs), nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, noised, clean):
        x = self.embed(jnp.concatenate([noised, clean], axis=1)) + jnp.tile(self.place(jnp.arange(T)), (2, 1))
        for layer in self.layers:
            x = x + layer(x)
        return self.head(self.norm(x[:, :T]))


@nnx.jit
def train_step(model, optimizer, key):
    texts, noise, rate = jax.random.split(key, 3)
    tokens = draw(texts)
    hidden = jax.random.uniform(noise, tokens.shape) < jax.random.uniform(rate, (ROWS, 1))

    def loss(model):
        logits = model(jnp.where(hidden, MASKED, tokens), tokens)
        return (optax.softmax_cross_entropy_with_integer_labels(logits, tokens) * hidden).sum() / hidden.sum()

    value, gradients = nnx.value_and_grad(loss)(model)
    optimizer.update(model, gradients)
    return value


def main(steps: int = 400):
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)
    losses = [float(train_step(model, optimizer, key)) for key in jax.random.split(jax.random.key(1), steps)]
    text = jnp.where(jnp.arange(T) < BLOCK, draw(jax.random.key(2)), MASKED)  # one block is known
    for start in range(BLOCK, T, BLOCK):  # blocks one after the other, all tokens of a block at once
        guess = model(text, text).argmax(-1)
        text = text.at[:, start : start + BLOCK].set(guess[:, start : start + BLOCK])
    right = 100 * (text == draw(jax.random.key(2))).mean()
    print(f"loss {losses[0]:.2f} to {losses[-1]:.2f}; {right:.0f} % of the sampled tokens repeat the word")


if __name__ == "__main__":
    main()

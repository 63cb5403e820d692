"""Packed training: documents of any length share rows, and none attends to another."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jflex
from flax_layers.nnx import FlexAttention
from jflex import masks

ROWS, T, WIDTH, VOCABULARY = 4, 256, 64, 32


class Model(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.attention = FlexAttention(WIDTH, 4, num_kv_heads=2, rotary_base=10000.0, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs), nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, tokens, documents):
        block_mask = jflex.create_block_mask(masks.causal_document(documents), ROWS, None, T, T)
        x = self.embed(tokens)
        x = x + self.attention(self.norm(x), block_mask=block_mask)
        return self.embed.attend(x + self.down(nnx.gelu(self.up(x))))


def batch(key):
    """Documents that count up from a random token, each by a stride of its own."""
    lengths = jax.random.randint(key, (ROWS, 8), 10, 80)
    documents = jax.vmap(lambda n: masks.document_ids_from_lengths(n, T))(lengths)
    drawn = jax.random.randint(key, (2, ROWS, T), 1, VOCABULARY)
    start, stride = (jnp.take_along_axis(x, documents, axis=1) for x in drawn)
    return (start + stride * jnp.arange(T)) % VOCABULARY, documents


@nnx.jit
def train_step(model, optimizer, tokens, documents):
    def loss(model):
        same = documents[:, 1:] == documents[:, :-1]
        losses = optax.softmax_cross_entropy_with_integer_labels(model(tokens, documents)[:, :-1], tokens[:, 1:])
        return (losses * same).sum() / same.sum()

    value, gradients = nnx.value_and_grad(loss)(model)
    optimizer.update(model, gradients)
    return value


def main(steps: int = 200):
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)
    for step, key in enumerate(jax.random.split(jax.random.key(1), steps)):
        loss = float(train_step(model, optimizer, *batch(key)))
        if step % 50 == 49:
            print(f"step {step + 1:3d}  loss {loss:.3f}")


if __name__ == "__main__":
    main()

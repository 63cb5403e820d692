# %% [markdown]
# # A learned relative bias
#
# A head learns to look five tokens back. The bias is a table of one number for each distance; `flex_attention` reads it
# inside the kernel and computes its gradient in the same backward pass.

# %%
import jax
import jax.numpy as jnp
import optax

import jflex

T, D, BACK = 128, 16, 5


def attend(table, value):
    """Attention by distance alone: queries and keys are zeros, so the scores are the bias."""
    zeros = jnp.zeros((value.shape[0], T, 1, D))
    relative = lambda score, b, h, q_idx, kv_idx: score + table[q_idx - kv_idx]
    return jflex.flex_attention(zeros, zeros, value, relative, mask_mod=jflex.masks.causal())


# %% [markdown]
# The target of each token is the value five tokens before it.


# %%
def loss(table, value):
    return jnp.mean((attend(table, value) - jnp.roll(value, BACK, axis=1))[:, BACK:] ** 2)


def train(steps: int):
    table, optimizer = jnp.zeros(T), optax.adam(0.2)

    @jax.jit
    def step(table, state, key):
        value = jax.random.normal(key, (8, T, 1, D))
        error, gradient = jax.value_and_grad(loss)(table, value)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(table, updates), state, error

    state = optimizer.init(table)
    for key in jax.random.split(jax.random.key(0), steps):
        table, state, error = step(table, state, key)
    return table, float(error)


# %%
def main(steps: int = 150):
    table, error = train(steps)
    weights = jax.nn.softmax(table[:10])
    print(f"error {error:.3f}; distance with the largest weight: {int(weights.argmax())}")
    print("weights of distances 0 to 9:", " ".join(f"{w:.2f}" for w in weights))
    return table


if __name__ == "__main__":
    main()

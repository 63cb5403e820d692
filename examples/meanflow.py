"""MeanFlow on images of squares: the target of its loss contains a `jax.jvp` through attention (arXiv:2505.13447)."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jflex
from flax_layers.nnx import FlexAttention

CELLS, PIXELS, WIDTH = 8, 4, 64  # 8 x 8 patches of 2 x 2 pixels


class MeanVelocity(nnx.Module):
    def __init__(self, rngs):
        linear, near = lambda *sizes: nnx.Linear(*sizes, rngs=rngs), jflex.masks.neighborhood((CELLS, CELLS), (5, 5))
        how = {"mask_mod": near, "config": jflex.Config(forward_mode=True), "rngs": rngs}
        layer = lambda: nnx.List([FlexAttention(WIDTH, 4, **how), linear(WIDTH, 256), linear(256, WIDTH)])
        self.read, self.time, self.write = linear(PIXELS, WIDTH), linear(4, WIDTH), linear(WIDTH, PIXELS)
        self.place, self.layers = nnx.Embed(CELLS**2, WIDTH, rngs=rngs), nnx.List([layer(), layer()])

    def __call__(self, z, start, end):  # patches [B, CELLS**2, PIXELS], times [B]
        time = jnp.pi / 2 * jnp.stack([end, end - 1, end - start, end - start - 1], -1)  # cosines and sines
        time = self.time(jnp.cos(time))[:, None]
        x = self.read(z) + self.place.embedding[...] + time
        for attend, wide, narrow in self.layers:
            x = x + attend(jax.nn.standardize(x))
            x = x + narrow(nnx.gelu(wide(jax.nn.standardize(x) + time)))
        return self.write(jax.nn.standardize(x))


def images(key, count):
    inside = jnp.abs(jnp.arange(2 * CELLS) - jax.random.randint(key, (count, 2, 1), 3, 2 * CELLS - 3)) < 3
    pixels = 2.0 * (inside[:, 0, :, None] & inside[:, 1, None]) - 1.0
    return pixels.reshape(count, CELLS, 2, CELLS, 2).swapaxes(2, 3).reshape(count, CELLS**2, PIXELS)


def loss(model, keys, count=32):
    x, noise = images(keys[0], count), jax.random.normal(keys[1], (count, CELLS**2, PIXELS))
    start, end = jnp.sort(jax.random.uniform(keys[2], (2, count)), axis=0)
    start = jnp.where(jnp.arange(count) % 2, end, start)  # every other one learns the velocity at one time
    z, velocity, span = x + end[:, None, None] * (noise - x), noise - x, (end - start)[:, None, None]
    found, along = jax.jvp(model, (z, start, end), (velocity, jnp.zeros(count), jnp.ones(count)))
    return jnp.mean((found - jax.lax.stop_gradient(velocity - span * along)) ** 2)


def main(steps=200):
    model = MeanVelocity(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.chain(optax.clip_by_global_norm(1.0), optax.adam(2e-3)), wrt=nnx.Param)
    gradient, losses = nnx.jit(nnx.value_and_grad(loss)), []
    for keys in jax.random.split(jax.random.key(1), (steps, 3)):
        value, grads = gradient(model, keys)
        optimizer.update(model, grads)
        losses.append(float(value))
    early, late = (sum(part) / len(part) for part in (losses[:10], losses[-10:]))
    print(f"loss {early:.2f} at first, {late:.2f} after {steps} steps")


if __name__ == "__main__":
    main()

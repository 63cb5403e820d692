# %% [markdown]
# # A vision transformer with neighborhoods
#
# Each patch attends to the 15 x 15 patches around it. In row-major order these lie in 15 blocks of 64 patches. Along
# the Z-order curve of Morton a block is a square, and they lie in 9.

# %%
import jax
import jax.numpy as jnp
from flax import nnx

import jflex
from flax_layers.nnx import FlexAttention
from jflex import masks

WINDOW = (15, 15)


def neighborhood(canvas, order=None):
    patches, mod = canvas[0] * canvas[1], masks.neighborhood(canvas, WINDOW, order=order)
    return jflex.create_block_mask(mod, None, None, patches, patches, block_size=64)


# %% [markdown]
# The model reorders patches once, before the first layer, and restores them after the last.


# %%
class Model(nnx.Module):
    def __init__(self, canvas, width: int, layers: int, rngs):
        self.canvas, block_mask = canvas, neighborhood(canvas, masks.morton_order(canvas))
        self.layers = nnx.List([FlexAttention(width, 4, block_mask=block_mask, rngs=rngs) for _ in range(layers)])

    def __call__(self, patches):
        order = masks.morton_order(self.canvas)
        x = masks.reorder(patches, order)
        for layer in self.layers:
            x = x + layer(x)
        return masks.restore(x, order)


# %% [markdown]
# The receptive field of the patch in the middle grows by seven patches on each side in each layer.


# %%
def main(canvas=(64, 64), width: int = 16, layers: int = 2):
    skipped = [neighborhood(canvas, order).sparsity() for order in (None, masks.morton_order(canvas))]
    print("row-major {:.0f} %, Morton {:.0f} % of the blocks skipped".format(*skipped))
    model = Model(canvas, width, layers, nnx.Rngs(0))
    patches = jax.random.normal(jax.random.key(0), (1, canvas[0] * canvas[1], width))
    middle = canvas[1] * (canvas[0] // 2) + canvas[1] // 2
    gradient = jax.grad(lambda x: model(x)[0, middle].sum())(patches)
    field = (jnp.abs(gradient[0]).max(-1) > 0).reshape(canvas)
    print(f"receptive field of {layers} layers: {int(field.any(1).sum())} x {int(field.any(0).sum())} patches")
    return field


if __name__ == "__main__":
    main()

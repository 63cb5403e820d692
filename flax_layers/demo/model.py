"""A byte-level decoder with learnable ALiBi slopes: a small `flax_layers.models.Decoder`."""

import functools
import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int

import jflex
from flax_layers.models import Decoder, LayerConfig, ModelConfig
from flax_layers.models.mods import mask_mod
from flax_layers.nnx import AlibiBias

VOCABULARY = 256
LONGEST = 1 << 20

Packed = Int[Array | np.ndarray, "B T"]
"""Bytes, or their document ids."""


class Sizes(NamedTuple):
    """Sizes of the model."""

    width: int
    layers: int
    heads: int
    kv_heads: int


class ByteDecoder(Decoder):
    """Predicts each byte from the bytes before it in the same document. ALiBi with learned slopes encodes positions."""

    def __init__(
        self,
        sizes: Sizes,
        implementation: str | None = None,
        attention_config: jflex.Config | None = None,
        *,
        rngs: nnx.Rngs,
    ):
        width, heads, layers = sizes.width, sizes.heads, (LayerConfig(rotary_base=None),) * sizes.layers
        config = ModelConfig(
            vocabulary=VOCABULARY, width=width, mlp_width=2 * width, num_heads=heads, num_kv_heads=sizes.kv_heads,
            head_dim=width // heads, layers=layers, max_positions=LONGEST, qk_norm=True,
            initializer_range=width**-0.5, embedding_scale=width**0.5,
        )  # fmt: skip
        slopes = functools.partial(AlibiBias, sizes.heads)
        how: dict[str, Any] = {"implementation": implementation, "attention_config": attention_config}
        super().__init__(config, score_mod=slopes, **how, rngs=rngs)


def document_mask(documents: Packed) -> jflex.BlockMask:
    """The mask of the decoder: each byte attends to itself and to earlier bytes of its document, in all heads.

    Document ids may be traced: new document boundaries do not recompile.
    """
    rows, length = documents.shape
    return jflex.create_block_mask(mask_mod(None, jnp.asarray(documents)), rows, None, length, length)


def save_model(path: pathlib.Path, model: Decoder, sizes: Sizes) -> None:
    """Writes a model to a file that ends in `.npz`."""
    leaves = jax.tree.leaves_with_path(nnx.state(model))
    arrays = {jax.tree_util.keystr(key_path): np.asarray(array) for key_path, array in leaves}
    partial = path.with_name(f"partial-{path.name}")  # renamed when it is whole
    np.savez(partial, sizes=np.array(sizes), **arrays)  # pyright: ignore[reportArgumentType]
    partial.replace(path)


def load_model(
    path: pathlib.Path, implementation: str | None = None, attention_config: jflex.Config | None = None
) -> ByteDecoder:
    """Reads a model that `save_model` wrote. Raises ValueError for a file that holds another one."""
    with np.load(path) as file:
        arrays = dict(file)
    try:
        model = ByteDecoder(Sizes(*arrays["sizes"].tolist()), implementation, attention_config, rngs=nnx.Rngs(0))
        state = jax.tree.map_with_path(
            lambda key_path, known: jnp.asarray(arrays[jax.tree_util.keystr(key_path)], known.dtype), nnx.state(model)
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no model of the demo: {error}. Remove it, and run the demo again.") from error
    nnx.update(model, state)
    return model

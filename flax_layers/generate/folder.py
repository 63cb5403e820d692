"""Reads model, tokenizer and stop tokens from a checkpoint."""

import pathlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax.typing import Dtype
from jax.sharding import Mesh

import jflex
from flax_layers.models import Decoder, ModelConfig, Tokenizer, from_pretrained, fuse_projections, quantize_weights
from flax_layers.models.checkpoint.folders import read_optional_json, recover, remedy_of_missing


class Loaded(NamedTuple):
    """A checkpoint, ready for generation, with the tokens that end a text."""

    model: Decoder
    tokenizer: Tokenizer
    stop_tokens: tuple[int, ...]


def default_dtype() -> Dtype:
    """The default dtype of parameters and computation: bfloat16 on a GPU, float32 on a CPU."""
    return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16


def load(
    folder: str | pathlib.Path,
    dtype: Dtype | None = None,
    implementation: str | tuple[str, ...] | None = None,
    mesh: Mesh | None = None,
    attention_config: jflex.Config | None = None,
    weight_dtype: str | None = None,
) -> Loaded:
    """Reads model, tokenizer and stop tokens. On one device, the projections of the model are fused.

    Without a `dtype` of parameters and computation, it is `default_dtype()`; without a `mesh`, parameters are on JAX's
    default device. `attention_config` is as for `Decoder`. With a `weight_dtype`, projections are rounded to it by
    `quantize_weights`.

    Raises:
        FileNotFoundError: The folder, or a required file in it, does not exist.
        CheckpointError: A file cannot be read.
        ValueError: The mesh does not divide the parameters, or there are a mesh and a `weight_dtype`.
    """
    folder = pathlib.Path(folder)
    recover(folder)
    if not folder.is_dir():
        raise FileNotFoundError(
            f"`--model` must be the folder of a checkpoint, with `config.json`, `*.safetensors` and `tokenizer.json`. "
            f"There is no folder {folder}. {remedy_of_missing(folder)}"
        )
    tokenizer = Tokenizer(folder)  # first: a missing file raises before gigabytes are read
    options = {"implementation": implementation, "attention_config": attention_config}
    model = from_pretrained(folder, dtype=dtype or default_dtype(), mesh=mesh, **options)
    if mesh is None:
        fuse_projections(model)
    if weight_dtype is not None:
        quantize_weights(model, weight_dtype)
    return Loaded(model, tokenizer, stop_tokens(folder, model.config))


def stop_tokens(folder: pathlib.Path, config: ModelConfig) -> tuple[int, ...]:
    """The tokens that end a text: from `generation_config.json`, or from `config.json` if it has none."""
    known = read_optional_json(folder / "generation_config.json").get("eos_token_id")
    if known is None:
        return config.eos_token_ids
    return (known,) if isinstance(known, int) else tuple(known)

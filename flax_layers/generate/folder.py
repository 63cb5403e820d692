"""Reads model, tokenizer and stop tokens from the folder of a checkpoint."""

import pathlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax.typing import Dtype

from flax_layers.models import Decoder, ModelConfig, Tokenizer, from_pretrained
from flax_layers.models.folders import read_optional_json, recover


class Loaded(NamedTuple):
    """A model that text can be written with.

    Attributes:
        model: The model.
        tokenizer: Of the model.
        stop_tokens: End a text.
    """

    model: Decoder
    tokenizer: Tokenizer
    stop_tokens: tuple[int, ...]


def default_dtype() -> Dtype:
    """Of parameters and computation: bfloat16 on a GPU, float32 on a CPU."""
    return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16


def load(
    folder: str | pathlib.Path, dtype: Dtype | None = None, implementation: str | tuple[str, ...] | None = None
) -> Loaded:
    """Reads model, tokenizer and stop tokens.

    Args:
        folder: Of a checkpoint.
        dtype: Of parameters and computation. Default: `default_dtype()`.
        implementation: The backend of jflex.

    Returns:
        What was read.

    Raises:
        FileNotFoundError: The folder, or a file that belongs to it, does not exist.
        CheckpointError: It cannot be read.
    """
    folder = pathlib.Path(folder)
    recover(folder)
    if not folder.is_dir():
        raise FileNotFoundError(
            f"`--model` must be the folder of a checkpoint, with `config.json`, `*.safetensors` and `tokenizer.json`. "
            f"There is no folder {folder}. `transformers` and `flax_layers.models.save_pretrained` write one."
        )
    tokenizer = Tokenizer(folder)  # first: a missing file raises before gigabytes are read
    model = from_pretrained(folder, dtype=dtype or default_dtype(), implementation=implementation)
    return Loaded(model, tokenizer, stop_tokens(folder, model.config))


def stop_tokens(folder: pathlib.Path, config: ModelConfig) -> tuple[int, ...]:
    """The tokens that end a text: of `generation_config.json` if it names some, else of `config.json`.

    Args:
        folder: Of a checkpoint.
        config: Of the model.

    Returns:
        Their numbers.

    Raises:
        CheckpointError: `generation_config.json` cannot be read.
    """
    known = read_optional_json(folder / "generation_config.json").get("eos_token_id")
    if known is None:
        return config.eos_token_ids
    return (known,) if isinstance(known, int) else tuple(known)

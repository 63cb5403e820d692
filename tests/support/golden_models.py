"""The small checkpoints of `tests/goldens`, with what `transformers` computes from them; see its script."""

import functools
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from flax import nnx

from flax_layers.models import Decoder, from_pretrained

ROOT = pathlib.Path(__file__).parents[1] / "goldens"
NAMES = (
    "llama2", "llama3", "llama_linear", "mistral", "qwen2", "qwen3", "qwen3_yarn", "gemma2", "gemma3", "phi3",
    "deepseek_v2", "deepseek_v3", "ministral", "mixtral", "qwen3_moe", "gpt_oss",
)  # fmt: skip


def load(name: str, root: pathlib.Path = ROOT, **options) -> Decoder:
    """In float32, whatever the file has."""
    return from_pretrained(root / name, **({"dtype": jnp.float32, "implementation": "xla"} | options))


@functools.cache
def expected(name: str, root: pathlib.Path = ROOT) -> dict[str, np.ndarray]:
    with np.load(root / name / "expected.npz") as file:
        return dict(file)


def change_config(folder: pathlib.Path, **changes: Any) -> None:
    """Changes the `config.json` of a copy."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def add_head(folder: pathlib.Path) -> np.ndarray:
    """Adds an output projection, [out, in], to the files of a copy whose embeddings are tied."""
    path = folder / "model.safetensors"
    held: dict[str, Any] = {}
    for file in folder.glob("*.safetensors*"):
        held |= {} if file.suffix == ".json" else safetensors.numpy.load_file(file)
        file.unlink()
    embeddings = held["model.embed_tokens.weight"]
    held["lm_head.weight"] = embeddings[::-1] * np.asarray(0.5, embeddings.dtype)
    safetensors.numpy.save_file({name: np.ascontiguousarray(x) for name, x in held.items()}, path, {"format": "pt"})
    return held["lm_head.weight"]


def relative_error(found: jax.Array, expected: np.ndarray) -> float:
    return float(np.abs(np.asarray(found) - expected).max() / np.abs(expected).max())


# Compiled once for all tests.
@nnx.jit
def logits_of(model: Decoder, tokens, documents=None) -> jax.Array:
    return model(tokens, documents)


@nnx.jit
def decode(model: Decoder, tokens, caches):
    return model.decode(tokens, caches)

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
from jflex.paged import PagedBatch

ROOT = pathlib.Path(__file__).parents[1] / "goldens"
NAMES = (
    "llama2", "llama3", "llama_linear", "mistral", "qwen2", "qwen3", "qwen3_yarn", "gemma2", "gemma3", "phi3",
    "deepseek_v2", "deepseek_v3", "ministral", "mixtral", "qwen3_moe", "gpt_oss",
)  # fmt: skip
STEPS, PAGE = 32, 4


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


@nnx.jit
def decode_paged(model: Decoder, tokens, cache, batch):
    return model.decode_paged(tokens, cache, batch)


def greedy_from_dense(model: Decoder, tokens: np.ndarray, steps: int = STEPS) -> np.ndarray:
    """Tokens that follow, one after the other from a dense cache."""
    logits, caches = decode(model, tokens, model.init_caches(len(tokens), tokens.shape[1] + steps))
    found = [best(logits[:, -1])]
    for _ in range(steps - 1):
        logits, caches = decode(model, found[-1][:, None], caches)
        found.append(best(logits[:, -1]))
    return np.stack(found, axis=1)


def greedy_from_pages(model: Decoder, tokens: np.ndarray, steps: int = STEPS) -> np.ndarray:
    """Tokens that follow, one after the other from a paged cache, whose pages lie in no order."""
    rows, length = tokens.shape
    each = -(-(length + steps) // PAGE)
    table = jnp.asarray(1 + np.random.default_rng(0).permutation(rows * each).reshape(rows, each).astype(np.int32))
    cache = model.init_paged_cache(rows * each + 1, PAGE)
    logits, cache = decode_paged(model, tokens.reshape(-1), cache, _batch(rows, length, length, table))
    found = [best(logits.reshape(rows, length, -1)[:, -1])]
    for step in range(1, steps):
        logits, cache = decode_paged(model, found[-1], cache, _batch(rows, 1, length + step, table))
        found.append(best(logits))
    return np.stack(found, axis=1)


def best(logits: jax.Array) -> np.ndarray:
    return np.asarray(jnp.argmax(logits, axis=-1).astype(jnp.int32))


def _batch(rows: int, tokens: int, lengths: int, table: jax.Array) -> PagedBatch:
    indptr = jnp.arange(0, rows * tokens + 1, tokens, dtype=jnp.int32)
    return PagedBatch(indptr, jnp.full(rows, lengths, jnp.int32), table)

"""Text written by the model, from its cache: each byte costs one step, whatever has been written before."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Int32

from flax_layers.demo.texts import KINDS, Texts
from flax_layers.models import Decoder


def generate(
    model: Decoder,
    prompts: Sequence[bytes],
    count: int,
    *,
    cache: str = "dense",
    temperature: float = 0.0,
    seed: int = 0,
) -> list[bytes]:
    """Lets the model write on, in all texts at once.

    Two programs are compiled: one that reads the prompts, which are padded to the longest, and one for all steps.

    Args:
        model: The decoder.
        prompts: How the texts begin, at least one byte each.
        count: Bytes that are written to each.
        cache: ``"dense"`` or ``"paged"``.
        temperature: Divides the logits that bytes are drawn by; 0 takes the most probable byte.
        seed: The same seed draws the same bytes.

    Returns:
        The texts, prompts included.

    Raises:
        ValueError: A prompt is empty, there is none, or the cache is neither of the two.

    Example:
        >>> from flax_layers.demo.model import ByteDecoder, Sizes
        >>> model = ByteDecoder(Sizes(width=16, layers=1, heads=2, kv_heads=1), rngs=nnx.Rngs(0))
        >>> texts = generate(model, [b"def ", b"import "], count=3)
        >>> [len(text) for text in texts], texts[0][:4]
        ([7, 10], b'def ')
    """
    if not prompts or not all(prompts):
        raise ValueError(f"`prompts` must be at least one, of at least one byte each. Got {list(prompts)}.")
    if cache not in KINDS:
        raise ValueError(f"`cache` must be one of {', '.join(KINDS)}. Got {cache!r}.")
    texts = KINDS[cache].empty(model, len(prompts), max(map(len, prompts)) + count)
    graph, parameters = nnx.split(model)
    tokens, counts = _padded(prompts)
    keys = jax.random.split(jax.random.key(seed), max(count, 1))
    written = []
    for step in range(count):
        draw = (keys[step], jnp.float32(temperature))
        chosen, texts = _write_on(graph, parameters, texts, tokens, counts, *draw)
        written.append(chosen)
        tokens, counts = chosen[:, None], jnp.ones_like(counts)
    columns = np.asarray(jax.device_get(written), np.uint8).reshape(count, len(prompts))
    return [prompt + columns[:, row].tobytes() for row, prompt in enumerate(prompts)]


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _write_on(
    graph: nnx.GraphDef,
    parameters: Any,
    texts: Texts,
    tokens: Int[Array, "B T"],
    counts: Int32[Array, " B"],
    key: Array,
    temperature: Float[Array, ""],
) -> tuple[Int32[Array, " B"], Texts]:
    """Reads bytes, and chooses the next one of each text."""
    logits, texts = texts.read(nnx.merge(graph, parameters), tokens, counts)
    drawn = jax.random.categorical(key, logits / jnp.where(temperature > 0, temperature, 1.0))
    chosen = jnp.where(temperature > 0, drawn, jnp.argmax(logits, axis=-1))
    return chosen.astype(jnp.int32), texts


def _padded(prompts: Sequence[bytes]) -> tuple[Int32[Array, "B T"], Int32[Array, " B"]]:
    tokens = np.zeros((len(prompts), max(map(len, prompts))), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = np.frombuffer(prompt, np.uint8)
    return jnp.asarray(tokens), jnp.asarray([len(prompt) for prompt in prompts], jnp.int32)

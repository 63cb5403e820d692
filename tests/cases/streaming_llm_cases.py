"""StreamingLLM as its paper has it, in numpy float64: the kept keys are rotated anew for each query."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from flax_layers.attention import core as attention_core
from flax_layers.attention.streaming import Streaming
from flax_layers.models import Decoder, mods
from flax_layers.nnx import FlexAttention
from jflex.paged import PagedBatch, PagedCache


def rotated(heads: np.ndarray, positions: np.ndarray, layer: FlexAttention, size: int) -> np.ndarray:
    """Heads [N, H, D] at positions [N], in float64."""
    if layer.rotary_base is None:
        return heads
    turning = heads.shape[-1] if layer.rotary_dim is None else layer.rotary_dim
    frequencies = np.float64(layer.rotary_base) ** (-np.arange(0, turning, 2) / turning)
    magnitude = 1.0
    if layer.rotary_scaling is not None:
        magnitude = layer.rotary_scaling.magnitude
        frequencies = np.asarray(layer.rotary_scaling(jnp.asarray(frequencies, jnp.float32), size), np.float64)
    angles = np.multiply.outer(positions.astype(np.float64), frequencies)[:, None]
    cosine, sine = magnitude * np.cos(angles), magnitude * np.sin(angles)
    first, second, still = np.split(heads, [turning // 2, turning], axis=-1)
    return np.concatenate([first * cosine - second * sine, second * cosine + first * sine, still], axis=-1)


def attend(
    layer: FlexAttention, inputs, streaming: Streaming, score_mod=None, window: int | None = None, first: int = 0
) -> np.ndarray:
    """Each query over its own cache: sinks, then the window, at positions 0, 1, 2, ...; outputs from `first` on."""
    inputs = jnp.asarray(inputs)
    heads = attention_core.query_heads(layer, inputs), *attention_core.key_value_heads(layer, inputs)
    query, key, value = (np.asarray(x, np.float64) for x in heads)
    length, heads, scale = len(query), query.shape[1], layer.scale or query.shape[-1] ** -0.5
    shared = heads // key.shape[1]
    by_key = jax.vmap(lambda score, h, u, last: score_mod(score, 0, h, last, u), (0, None, 0, None))
    by_head = jax.vmap(by_key, (0, 0, None, None))
    changed = jax.jit(lambda scores, last: by_head(scores, jnp.arange(heads), jnp.arange(streaming.size), last))
    found = []
    for t in range(first, length):
        kept = [u for u in range(t + 1) if u < streaming.sinks or u > t - streaming.window]
        last, places = len(kept) - 1, np.arange(len(kept))
        keys = np.repeat(rotated(key[kept], places, layer, streaming.size), shared, axis=1)
        [asked] = rotated(query[t : t + 1], np.array([last]), layer, streaming.size)
        scores = scale * np.einsum("hd,uhd->hu", asked, keys)
        if score_mod is not None:
            padded = np.pad(scores, ((0, 0), (0, streaming.size - len(kept)))).astype(np.float32)
            scores = np.asarray(changed(padded, last))[:, : len(kept)]
        if window is not None:
            scores = np.where(places > last - window, scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True), dtype=np.float64)
        sink = 0 if layer.sinks is None else np.exp(np.asarray(layer.sinks)[:, None] - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True) + sink
        found.append(np.einsum("hu,uhd->hd", weights, np.repeat(value[kept], shared, axis=1)))
    joined = np.stack(found).reshape(length - first, -1).astype(np.float32)
    return np.asarray(layer.out(jnp.asarray(joined)), np.float64)


def logits(model: Decoder, tokens, streaming: Streaming) -> np.ndarray:
    """Logits of a whole text, one layer after the other; texts of up to 128 tokens compile once."""
    stream = model._embed(jnp.pad(jnp.asarray(tokens), (0, -len(tokens) % 128)))
    for block in model.blocks:
        score_mod = mods.score_mod(model.config, block.score_mod)
        normal = block.attention_norm(stream)
        attended = attend(block.attention, normal, streaming, score_mod, block.layer.window)
        stream = block._add_both(stream, jnp.asarray(attended, stream.dtype))
    return np.asarray(model.logits(model.norm(stream)))[: len(tokens)]


def decode(layer: FlexAttention, inputs, chunks: list[int], streaming: Streaming, page_size: int = 4, **options):
    """The outputs of `decode_paged` in chunks. Pages that no later query attends to become NaN and leave the table."""
    length, sinks = len(inputs), -(-streaming.sinks // page_size)
    cache = layer.init_paged_cache(2 + length // page_size, page_size)
    table = list(range(1, 2 + length // page_size))
    step = jax.jit(lambda cache, rows, batch: layer.decode_paged(rows, cache, batch, streaming=streaming, **options))
    outputs, done, dropped = [], 0, 0
    for count in chunks:
        pages = jnp.array([table + [0] * (1 + length // page_size - len(table))], jnp.int32)
        batch = PagedBatch(jnp.array([0, count]), jnp.array([done + count - dropped]), pages)
        rows, cache = step(cache, inputs[done : done + count], batch)
        outputs.append(np.asarray(rows))
        done += count
        end = max(sinks, (done - dropped - streaming.window + 1) // page_size)
        unseen = np.isin(np.arange(cache.num_pages), table[sinks:end])[:, None, None, None]
        cache = PagedCache(*(jnp.where(unseen, jnp.nan, x) for x in (cache.k, cache.v)))
        del table[sinks:end]
        dropped += (end - sinks) * page_size
    assert done == length
    return np.concatenate(outputs)

"""Accuracy of caches of eight bits beside bfloat16: ``python -m benchmarks numerics eight_bits``.

Keys and values are drawn in float32 and written to each cache; attention over it is compared with attention in float64
over the drawn arrays. Needles are keys that a query matches strongly, one each.
"""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jflex
from benchmarks.questions.question import Measured
from benchmarks.results.schema import Record
from benchmarks.run.jobs import Job, RunJob, run_job, run_jobs

DTYPES = ("float8_e4m3fn", "float8_e5m2", "int8")
SCALES = {"tensor": "one scale", "head": "a scale for each head", "token": "a scale for each token and head"}
MAGNITUDES = (1.0, 8.0)  # of the keys of each head
UNITS = {
    "SQNR of keys, the worse head": "dB",
    "SQNR of the output without a needle": "dB",
    "error of the output with a needle": "%",
    "1 - cosine of the output, the worst needle": "",
    "weight on the needle": "%",
    "error of that weight, the worst needle": "%",
}
_D, _LATENT, _ROPE = 128, 512, 64
_PAGE, _PLAIN = 64, 16
_SCORE = 14.0  # of a query and its needle; those of other keys have a mean of 0 and a deviation of _SCORE * D**-0.5


def eight_bits(length: int = 65536, needles: int = 16, run: RunJob = run_job, /) -> Measured:
    """Error of eight bits, and attention to a needle among 64 k keys."""
    answers, remarks = run_jobs([Job("the caches", __name__, "errors", {"length": length, "needles": needles})], run)
    return Measured(answers.get("the caches", []), remarks)


class Haystack(NamedTuple):
    """Drawn arrays in float32: N queries, the first of which have a needle each."""

    query: np.ndarray  # [N, H, D], of bfloat16 numbers
    key: np.ndarray  # [S, H, D]
    value: np.ndarray  # [S, H, Dv]
    places: np.ndarray  # [needles, H]


def haystack(length: int, needles: int, *, latent: bool = False) -> Haystack:
    """Draws it, by a fixed seed; the first columns of latent keys are the values."""
    rng = np.random.default_rng(0)
    normal = functools.partial(rng.standard_normal, dtype=np.float32)
    magnitudes = np.array(MAGNITUDES[:1] if latent else MAGNITUDES, np.float32)[:, None]
    heads, D = len(magnitudes), _LATENT + _ROPE if latent else _D
    key = normal((length, heads, D)) * magnitudes
    value = key[..., :_LATENT] if latent else normal((length, heads, D))
    places = np.stack([rng.choice(length, needles, replace=False) for _ in range(heads)], axis=1)
    needle = np.take_along_axis(key, places[..., None], axis=0)
    matching = np.float32(_SCORE * D**0.5) * needle / np.square(needle).sum(-1, keepdims=True)
    query = np.concatenate([matching, normal((_PLAIN, heads, D)) / magnitudes])
    return Haystack(query.astype(jnp.bfloat16).astype(np.float32), key, value, places)


def exact(x: Haystack) -> tuple[np.ndarray, np.ndarray]:
    """Out [N, H, D] and the weight of each needle [needles, H], in float64."""
    out, weights = np.empty((*x.query.shape[:2], x.value.shape[-1])), np.empty(x.places.shape)
    for h in range(x.query.shape[1]):
        query, key, value = (a[:, h].astype(np.float64) for a in (x.query, x.key, x.value))
        scores = query.shape[-1] ** -0.5 * query @ key.T
        p = np.exp(scores - scores.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        out[:, h], weights[:, h] = p @ value, p[np.arange(len(x.places)), x.places[:, h]]
    return out, weights


def errors(length: int, needles: int) -> list[Record]:
    """Distances of each cache from float64; in a process of its own."""
    records = []
    for kind, caches in (("keys", _caches), ("latent vectors", _latent_caches)):
        x = haystack(length, needles, latent=caches is _latent_caches)
        expected, weights = exact(x)
        records.append(Record.single(f"{kind}, float64: weight on the needle", 100 * float(weights.mean()), "%"))
        for name, keys, out, lse in caches(x):
            values = _distances(x, keys, np.asarray(out, np.float64), np.asarray(lse), expected, weights)
            measures = zip(UNITS.items(), map(float, values), strict=True)
            records += [Record.single(f"{kind}, {name}: {what}", value, unit) for (what, unit), value in measures]
    return records


def _distances(
    x: Haystack, keys: np.ndarray, out: np.ndarray, lse: np.ndarray, expected: np.ndarray, weights: np.ndarray
) -> tuple[float, ...]:
    """The measures of `UNITS`, for a cache that holds `keys`."""
    needles = len(x.places)
    needle = np.take_along_axis(keys, x.places[..., None], axis=0).astype(np.float64)
    scores = needle.shape[-1] ** -0.5 * (x.query[:needles] * needle).sum(-1)
    weight = np.exp(scores - lse[:needles])
    first, exact = out[:needles], expected[:needles]
    cosines = (first * exact).sum(-1) / (np.linalg.norm(first, axis=-1) * np.linalg.norm(exact, axis=-1))
    return (
        min(_sqnr(x.key[:, h], keys[:, h]) for h in range(keys.shape[1])),
        _sqnr(expected[needles:], out[needles:]),
        100 * np.linalg.norm(first - exact) / np.linalg.norm(exact),
        1 - cosines.min(),
        100 * weight.mean(),
        100 * np.abs(weight - weights).max(),
    )


def _sqnr(expected: np.ndarray, rounded: np.ndarray) -> float:
    """Signal to quantization noise ratio, in dB."""
    signal, noise = (np.square(a.astype(np.float64)).sum() for a in (expected, rounded - expected))
    return float(10 * np.log10(signal / noise))


def _caches(x: Haystack) -> Iterator[tuple[str, np.ndarray, Any, Any]]:
    """Name, keys, out and lse of each cache of keys and values."""
    query, key, value = jnp.asarray(x.query, jnp.bfloat16), jnp.asarray(x.key), jnp.asarray(x.value)
    rounded = key.astype(jnp.bfloat16), value.astype(jnp.bfloat16)
    out, lse = jflex.flex_attention(query[None], rounded[0][None], rounded[1][None], return_lse=True)
    yield "bfloat16, dense", np.asarray(rounded[0], np.float32), out[0], lse[0].T
    yield "bfloat16, paged", *_paged(query, *rounded, dtype=jnp.bfloat16)
    for dtype in DTYPES:
        largest = float(jnp.iinfo(dtype).max if dtype == "int8" else jnp.finfo(dtype).max)
        for kind, words in SCALES.items():
            axes, scales = None if kind == "tensor" else (0, 2), {}
            if kind != "token":  # scales that hold the largest magnitude
                bounds = (np.abs(a).max(axes) / np.float32(largest) for a in (x.key, x.value))
                scales = dict(zip(("k_scale", "v_scale"), bounds, strict=True))
            yield f"{dtype}, {words}, paged", *_paged(query, key, value, dtype=dtype, **scales)


def _latent_caches(x: Haystack) -> Iterator[tuple[str, np.ndarray, Any, Any]]:
    """Name, keys, out and lse of each cache of latent vectors, on pages."""
    query, length = jnp.asarray(x.query, jnp.bfloat16), len(x.key)
    table, slots = _table(length)
    in_order = lambda pages: np.asarray(pages[table[0]], np.float32).reshape(length, -1)
    for dtype, words in (("bfloat16", ""), ("float8_e4m3fn", ", a scale for each token and 128 columns")):
        rows = jnp.asarray(x.key[:, 0]).astype(jnp.bfloat16 if dtype == "bfloat16" else jnp.float32)
        cache = jflex.paged.LatentCache.create(1 + length // _PAGE, _PAGE, _LATENT, _ROPE, dtype=dtype)
        write = jax.jit(jflex.paged.write_latent, donate_argnums=0)
        cache = write(cache, rows[:, :_LATENT], rows[:, _LATENT:], slots)
        attend = functools.partial(jflex.mla_attention, scale=query.shape[-1] ** -0.5, return_lse=True)
        out, lse = jax.jit(attend)(query, cache, _batch(query, table, length))
        keys = in_order(cache.rows)
        if cache.scale is not None and cache.rope is not None:
            keys = np.concatenate([keys * np.repeat(in_order(cache.scale), 128, -1), in_order(cache.rope)], axis=-1)
        yield f"{dtype}{words}, paged", keys[:, None], out, lse


def _table(length: int) -> tuple[jax.Array, jax.Array]:
    """The page table of one sequence, in a random order, and its slots."""
    table = np.random.default_rng(1).permutation(np.arange(1, 1 + length // _PAGE)).astype(np.int32)
    slots = (table[:, None] * _PAGE + np.arange(_PAGE, dtype=np.int32)).reshape(-1)
    return jnp.asarray(table)[None], jnp.asarray(slots)


def _batch(query: jax.Array, table: jax.Array, length: int) -> jflex.paged.PagedBatch:
    return jflex.paged.PagedBatch(jnp.array([0, len(query)], jnp.int32), jnp.array([length], jnp.int32), table)


def _paged(query: jax.Array, key: jax.Array, value: jax.Array, **how: Any) -> tuple[np.ndarray, Any, Any]:
    """On pages in a random order: keys of the cache, out and lse."""
    length, heads, D = key.shape
    table, slots = _table(length)
    cache = _write(jflex.paged.PagedCache.create(1 + length // _PAGE, _PAGE, heads, D, **how), key, value, slots)
    out, lse = _attend(query, cache, _batch(query, table, length))
    keys = np.asarray(cache.k[table[0]], np.float32)
    if cache.k_scale is not None:
        scale = cache.k_scale[table[0]] if cache.k_scale.ndim == 3 else cache.k_scale
        keys = keys * np.asarray(scale)[..., None]
    return keys.reshape(-1, *keys.shape[-2:]), out, lse


_attend = jax.jit(functools.partial(jflex.paged_attention, return_lse=True))
_write = jax.jit(jflex.paged.write, donate_argnums=0)

"""Dropout of the attention weights: its checks, and the generator that says which weights are kept.

The generator is counter-based: whether a weight is kept is a function of the key and of its position alone. So both
passes agree, whatever the tiles, the implementation or the sharding, and nothing is stored between them.

From the key, Threefry-2x32 (Salmon et al. 2011, Parallel Random Numbers: As Easy as 1, 2, 3) makes two words for each
batch entry and head, outside of the kernels. With these, ``q_idx`` and ``kv_idx`` are mixed by the integer hash
lowbias32 (C. Wellons, Hash Prospector, 2018; of the form of the finalizer of MurmurHash3), into which the second word
enters halfway. Its last step is left out: it changes only low bits, and a threshold decides by the high ones.

Eight positions share a hash, up to its last multiplication: those whose indices differ in bits 3 and 4 of the key and
bit 3 of the query alone. A thread of a tensor core's accumulator holds all eight if its rows are queries, and four if
they are keys. Their numbers are the word times powers of one odd constant, as those of a multiplicative congruential
generator. Each number by itself is as uniform as the word, so the rate is exact to 2 ** -32; both of a pair are below a
threshold as often as two independent ones, but for a correlation of at most 5e-7 (counted over all words, at rates from
0.001 to 0.99); and the 256 patterns of all eight are as likely as independent ones, but for a total variation of 6e-6
(likewise, at rates from 0.05 to 0.9).

H200, jax 0.11.2, bf16, causal, 2 x 16384 tokens, 16 heads of size 128, TFLOP/s forward and backward, on the Hopper
kernels: 724 and 628 without dropout, 494 and 472 with it, 466 and 440 with a word for two positions (an earlier form
of the kernels). Threefry would take more than 60 instructions for each score; softmax takes about 10.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array, Int32, UInt32

from jflex._check.arguments import describe_array

KeptMod = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], ArrayLike]

# Odd numbers: the golden ratio, and constants of MurmurHash3, which spread neighboring positions over all bits.
_OF_QUERY, _OF_KEY, _OF_QUERY_AGAIN = np.uint32(0x9E3779B9), np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35)
_LOWBIAS32 = np.uint32(0x7FEB352D), np.uint32(0x846CA68B)
_SHARED_KEY_BITS, _SHARED_QUERY_BITS = (3, 4), (3,)  # in which positions that share a hash differ
_RATIO = 95872743  # of their numbers: the best of 74 that were tried, by the largest correlation of a pair


def check_dropout(rate: object, key: jax.Array | None) -> float:
    """Returns the rate as a float. A key without a rate is checked, and not used."""
    if isinstance(rate, bool | Tracer | jax.Array) or not isinstance(rate, int | float | np.number):
        raise TypeError(
            f"`dropout_rate` must be a Python number: it is part of the program. Got {type(rate).__name__}."
        )
    if not (math.isfinite(rate) and 0 <= rate < 1):
        raise ValueError(f"`dropout_rate` must be at least 0 and less than 1. Got {rate}.")
    if key is not None:
        _check_key(key)
    elif rate > 0:
        raise ValueError(
            f"`dropout_rate` is {rate}, and there is no `dropout_key`. Pass one, as `jax.random.key(0)`; a new one for "
            "each layer and step. For evaluation, leave the rate at 0."
        )
    return float(rate)


def _check_key(key: Any) -> None:
    rule = (
        "`dropout_key` must be one random key, as `jax.random.key(0)`, or uint32[2] from `jax.random.PRNGKey`; or keys "
        "[B, Hq], with axes of size 1 where weights are dropped alike"
    )
    if not (hasattr(key, "shape") and hasattr(key, "dtype")):
        raise TypeError(f"{rule}. Got {type(key).__name__}.")
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if not typed and key.dtype != jnp.uint32:
        raise TypeError(f"{rule}. Got {describe_array(key)}.")
    if len(_axes(key)) not in (0, 2) or (not typed and key.shape[-1:] != (2,)):
        raise ValueError(f"{rule}. Got {describe_array(key)}. Index it, or `jax.vmap` the call over keys.")


def _axes(key: jax.Array) -> tuple[int, ...]:
    """The shape of an array of keys."""
    return tuple(key.shape if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key.shape[:-1])


def kept_mod(rate: float, key: Any, batch: int | Int32[Array, " rows"], heads: int) -> KeptMod | None:
    """``(b, h, q_idx, kv_idx) -> bool``, True where a weight is kept; None for a rate of 0.

    It captures two words for each batch entry (or row) and head, so that a new key recompiles nothing.

    Args:
      batch: Batch entries, or packed sequences. Or the batch entry of each row: then ``b`` is the row.

    >>> kept = kept_mod(0.25, jax.random.key(0), 1, 1)
    >>> [bool(kept(0, 0, jnp.int32(5), jnp.int32(k))) for k in range(6)]
    [True, True, True, True, False, True]
    """
    if rate == 0:
        return None
    has_batch, has_heads = True, True
    if _axes(key):
        has_batch, has_heads = (n != 1 for n in _axes(key))
        seeds = _seeds_of_keys(key, batch, heads)
    elif isinstance(batch, int):  # at least one of each: a mod is traced even where there is nothing to read
        seeds = _seeds_of_batch(key, max(batch, 1), max(heads, 1))
    else:
        seeds = _seeds_of_rows(key, batch, heads)
    threshold = np.uint32(min(round(rate * 2**32), 2**32 - 1))

    def kept(b: jax.Array, h: jax.Array, q_idx: jax.Array, kv_idx: jax.Array) -> jax.Array:
        q, k = q_idx.astype(jnp.uint32), kv_idx.astype(jnp.uint32)
        sharers = [(k, bit) for bit in _SHARED_KEY_BITS] + [(q, bit) for bit in _SHARED_QUERY_BITS]
        q, k = _without(q, _SHARED_QUERY_BITS), _without(k, _SHARED_KEY_BITS)
        seed = lambda word: seeds[b if has_batch else 0, h if has_heads else 0, word]
        first, second = seed(0) + q * _OF_QUERY, seed(1) + q * _OF_QUERY_AGAIN
        word, factor = _mixed(first ^ (k * _OF_KEY), second), _LOWBIAS32[1]
        for i, (position, bit) in enumerate(sharers):
            power = np.uint32(pow(_RATIO, 2**i, 2**32))
            factor = factor * jnp.where(position & np.uint32(1 << bit) == 0, np.uint32(1), power)
        return word * factor >= threshold

    return kept


def _without(position: jax.Array, bits: tuple[int, ...]) -> jax.Array:
    """The position with zeros in these bits."""
    return position & ~np.uint32(sum(1 << bit for bit in bits))


def _mixed(x: jax.Array, second: jax.Array) -> jax.Array:
    x = x ^ (x >> np.uint32(16))
    x = x * _LOWBIAS32[0]
    return x ^ (x >> np.uint32(15)) ^ second


def _seeds(key: jax.Array, batch: int | Int32[Array, " rows"], heads: int) -> UInt32[Array, "rows heads 2"]:
    """Two words for each batch entry and head: the key data, with both indices folded in."""
    words = jax.random.key_data(key).reshape(-1, 2)
    wrapped = jax.random.wrap_key_data(words[0], impl="threefry2x32")
    for word in words[1:].reshape(-1):  # of generators with longer keys
        wrapped = jax.random.fold_in(wrapped, word)
    each = lambda b: jax.vmap(lambda h: jax.random.fold_in(jax.random.fold_in(wrapped, b), h))(_up_to(heads))
    rows = _up_to(batch) if isinstance(batch, int) else batch.astype(jnp.uint32)
    return jax.random.key_data(jax.vmap(each)(rows))


def _seeds_of_keys(keys: jax.Array, batch: int | Int32[Array, " rows"], heads: int) -> UInt32[Array, "#rows #heads 2"]:
    """Two words for each key: with an axis of size 1, batch entries or heads share the words of the first one."""
    entries, shape = batch if isinstance(batch, int) else None, _axes(keys)
    if shape[1] not in (1, heads) or (entries is not None and shape[0] not in (1, entries)):
        sizes = f"{'' if entries is None else f'batch {entries} and '}{heads} heads"
        raise ValueError(
            "`dropout_key` must be one key, or keys [B, Hq] with axes of that size or of size 1. Got keys "
            f"{list(shape)} for {sizes}."
        )
    seeds = _seeds_of_each(keys)
    return seeds if isinstance(batch, int) or shape[0] == 1 else seeds[batch]


_seeds_of_each = jax.jit(jax.vmap(jax.vmap(lambda key: _seeds(key, 1, 1)[0, 0])))
_seeds_of_batch = jax.jit(_seeds, static_argnums=(1, 2))
_seeds_of_rows = jax.jit(_seeds, static_argnums=2)


def _up_to(count: int) -> UInt32[Array, " count"]:
    return jnp.arange(count, dtype=jnp.uint32)

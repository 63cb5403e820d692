"""Does a step of decoding take time by the keys that are there, and not by what the cache has room for?"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jflex
from benchmarks.cpu.paged_scaling import grown
from benchmarks.results import Figure
from flax_layers.demo.model import ByteDecoder
from flax_layers.demo.model import Sizes as ModelSizes

TEXTS, PAGE = 4, 16


class Sizes(NamedTuple):
    """What is compared.

    Attributes:
      keys: Of each text: few, and many.
      capacity: Bytes that the cache has room for, of each text: little, and much.
      seconds: For one comparison.
      model: Sizes of the model.
    """

    keys: tuple[int, int] = (2048, 16384)
    capacity: tuple[int, int] = (2048, 32768)
    seconds: float = 30.0
    model: ModelSizes = ModelSizes(width=128, layers=2, heads=4, kv_heads=2)


SIZES = Sizes()
TITLE = (f"a step of the demo's model of 2 layers from its caches on `xla`, {TEXTS} texts, float32: "
         "by the bytes that are there and by those that there is room for")  # fmt: skip


def measure(sizes: Sizes = SIZES) -> list[Figure]:
    (few, many), (small, large) = sizes.keys, sizes.capacity
    model = ByteDecoder(sizes.model, "xla", rngs=nnx.Rngs(0))
    figures = []
    for kind, make in (("dense", _dense), ("paged", _paged)):
        call = functools.partial(make, model)
        figures += grown(f"{kind} cache, the same bytes, more room", call, (few, small), (few, large), 1, sizes.seconds)
        figures += grown(f"{kind} cache, more bytes, the same room", call, (few, large), (many, large), many // few,
                         sizes.seconds)  # fmt: skip
    return figures


def _dense(model: ByteDecoder, keys: int, capacity: int) -> Callable[[], Any]:
    """A step that makes the last of so many keys; the cache is donated, and taken back."""
    filled = [dataclasses.replace(cache, k=_normal(cache.k, 1), v=_normal(cache.v, 2))
              for cache in model.init_caches(TEXTS, capacity)]  # fmt: skip
    graph, state = nnx.split(model)

    @functools.partial(jax.jit, donate_argnums=1)
    def step(state: Any, caches: Any, lengths: Any) -> Any:
        tokens = jnp.zeros((TEXTS, 1), jnp.int32)
        caches = tuple(dataclasses.replace(cache, lengths=lengths) for cache in caches)
        return nnx.merge(graph, state).decode(tokens, caches)

    return _carried(step, state, tuple(filled), jnp.full(TEXTS, keys - 1, jnp.int32))


def _paged(model: ByteDecoder, keys: int, capacity: int) -> Callable[[], Any]:
    """Likewise, on pages at random places."""
    pages = capacity // PAGE
    table = np.random.default_rng(0).permutation(np.arange(1, TEXTS * pages + 1)).reshape(TEXTS, pages)
    cache = model.init_paged_cache(TEXTS * pages + 1, PAGE)
    cache = jflex.paged.PagedCache(_normal(cache.k, 1), _normal(cache.v, 2))
    batch = jflex.paged.PagedBatch(jnp.arange(TEXTS + 1, dtype=jnp.int32), jnp.full(TEXTS, keys, jnp.int32),
                                   jnp.asarray(table, jnp.int32))  # fmt: skip
    graph, state = nnx.split(model)

    @functools.partial(jax.jit, donate_argnums=1)
    def step(state: Any, cache: Any, batch: Any) -> Any:
        return nnx.merge(graph, state).decode_paged(jnp.zeros(TEXTS, jnp.int32), cache, batch)

    return _carried(step, state, cache, batch)


def _carried(step: Callable[..., Any], state: Any, cache: Any, lengths: Any) -> Callable[[], Any]:
    held = [cache]

    def call() -> Any:
        logits, held[0] = step(state, held[0], lengths)
        return logits

    return call


def _normal(like: jax.Array, number: int) -> jax.Array:
    return jax.random.normal(jax.random.key(number), like.shape, like.dtype)

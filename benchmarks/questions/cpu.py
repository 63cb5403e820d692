"""Questions to the CPU: ``python -m benchmarks cpu [question ...]``."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jflex
from benchmarks.peers.jax_peers import forward_and_backward
from benchmarks.questions import command, cpu_probes
from benchmarks.questions.command import Measured, Question
from benchmarks.questions.cpu_probes import dense_masked
from benchmarks.results.schema import Record
from benchmarks.run.timing import ratios, record, take_turns

SEQUENCES, PAGE = 4, 16  # of paged_scaling and demo_decode


class Sizes(NamedTuple):
    """What paged_scaling and demo_decode compare.

    Attributes:
      keys: Of each sequence: few, and many.
      capacity: Keys that a sequence's table and share of the cache hold: small, and large.
      seconds: For one comparison.
      model: Width, layers, heads and key heads of the demo's model.
    """

    keys: tuple[int, int] = (2048, 16384)
    capacity: tuple[int, int] = (2048, 32768)
    seconds: float = 30.0
    model: tuple[int, int, int, int] = (128, 2, 4, 2)


FULL = Sizes()


def _beside(
    baseline: str, attentions: dict[str, Callable[..., Any]], arrays: jax.Array, seconds: Sequence[float]
) -> dict[str, dict[str, list[float]]]:
    """Seconds of jflex and of a baseline, by pass and name."""
    found = {}
    for name, transform, count, limit in (
        ("forward", lambda f: f, 3, seconds[0]),
        ("forward and backward", forward_and_backward, 4, seconds[1]),
    ):
        order = sorted(attentions, key=lambda x: x != baseline)
        calls = {x: functools.partial(jax.jit(transform(attentions[x])), *arrays[:count]) for x in order}
        found[name] = take_turns(calls, limit)
    return found


def window() -> Measured:
    """How much faster is a sliding window than dense attention with the same mask?"""
    length, size = 8192, 256
    arrays = jax.random.normal(jax.random.key(0), (4, 1, length, 4, 64))
    mask_mod = lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx < size)
    block_mask = jflex.create_block_mask(mask_mod, None, None, length, length)

    def sparse(query: Any, key: Any, value: Any) -> Any:
        return jflex.flex_attention(query, key, value, block_mask=block_mask, implementation="xla")

    def dense(query: Any, key: Any, value: Any) -> Any:
        index = jnp.arange(length)
        return dense_masked(query, key, value, mask_mod(0, 0, index[:, None], index[None, :]))

    records = []
    for name, times in _beside("dense jnp", {"jflex": sparse, "dense jnp": dense}, arrays, (60, 90)).items():
        records += [record(f"{name}, {peer}", [t * 1e3 for t in values], "ms") for peer, values in times.items()]
        records.append(record(f"{name}, times faster", ratios(times["dense jnp"], times["jflex"]), "x", 3))
    return records, []


def noop() -> Measured:
    """What does plain attention cost blockwise, beside JAX's own?"""
    arrays = jax.random.normal(jax.random.key(0), (4, 1, 2048, 4, 64))
    attentions = {
        "jflex": functools.partial(jflex.flex_attention, implementation="xla"),
        "jax.nn": functools.partial(jax.nn.dot_product_attention, implementation="xla"),
    }
    records = []
    for name, times in _beside("jflex", attentions, arrays, (60, 60)).items():
        records += [record(f"{name}, {peer}", [t * 1e3 for t in values], "ms") for peer, values in times.items()]
        shares = ratios(times["jflex"], times["jax.nn"])
        records.append(record(f"{name}, time relative to jax.nn", shares, "x", 3))
    return records, []


def grown(
    name: str,
    make: Callable[[int, int], Callable[[], Any]],
    less: tuple[int, int],
    more: tuple[int, int],
    seconds: float,
) -> list[Record]:
    """Two times, and their growth over that of the visited keys.

    Args:
      name: What grows.
      make: From the keys and the capacity of each sequence, a call that returns arrays.
      less: Keys and capacity.
      more: Likewise.
      seconds: For all.
    """
    visited = more[0] // less[0]
    calls = {f"{keys} keys of {capacity}": make(keys, capacity) for keys, capacity in (more, less)}
    times = take_turns(calls, seconds)
    found = [record(f"{name}: {which}", [t * 1e3 for t in values], "ms") for which, values in times.items()]
    share = [ratio / visited for ratio in ratios(*times.values())]
    return [*found, record(f"{name}: growth of the time over that of visited keys", share, "x", 3)]


def paged_scaling(sizes: Sizes = FULL) -> Measured:
    """Does the time of paged attention follow the visited keys, and not the cache and the tables?"""
    (few, many), (small, large), seconds = sizes.keys, sizes.capacity, sizes.seconds
    same = grown("the same keys, larger cache and tables", _paged_call, (few, small), (few, large), seconds)
    more = grown("more keys, the same cache and tables", _paged_call, (few, large), (many, large), seconds)
    return same + more, []


def _page_table(capacity: int) -> np.ndarray:
    """Pages at random places; page 0 is reserved."""
    pages = capacity // PAGE
    return np.random.default_rng(0).permutation(np.arange(1, SEQUENCES * pages + 1)).reshape(SEQUENCES, pages)


def _one_token_each(keys: int, capacity: int) -> jflex.paged.PagedBatch:
    table, rows = _page_table(capacity), jnp.arange(SEQUENCES + 1, dtype=jnp.int32)
    return jflex.paged.PagedBatch(rows, jnp.full(SEQUENCES, keys, jnp.int32), jnp.asarray(table, jnp.int32))


def _paged_call(keys: int, capacity: int) -> Callable[[], Any]:
    """One step, whose cache and tables hold `capacity` keys of each request, of which there are `keys`."""
    shape = (SEQUENCES * (capacity // PAGE) + 1, PAGE, 2, 64)
    cache = jflex.paged.PagedCache(*(jax.random.normal(jax.random.key(number), shape) for number in (1, 2)))
    query = jax.random.normal(jax.random.key(0), (SEQUENCES, 8, 64))
    attend = jax.jit(functools.partial(jflex.paged_attention, implementation="xla"))
    return functools.partial(attend, query, cache, _one_token_each(keys, capacity))


def demo_decode(sizes: Sizes = FULL) -> Measured:
    """Does the time of a decoding step follow the keys that are there, and not the capacity of the cache?"""
    (few, many), (small, large), seconds = sizes.keys, sizes.capacity, sizes.seconds
    records = []
    for kind, make in (("dense", dense_step), ("paged", paged_step)):
        call = functools.partial(make, demo_model(sizes))
        records += grown(f"{kind} cache, the same bytes, more room", call, (few, small), (few, large), seconds)
        records += grown(f"{kind} cache, more bytes, the same room", call, (few, large), (many, large), seconds)
    return records, []


def demo_model(sizes: Sizes) -> Any:
    """The demo's decoder, with random parameters."""
    from flax import nnx

    from flax_layers.demo.model import ByteDecoder
    from flax_layers.demo.model import Sizes as ModelSizes

    width, layers, heads, kv_heads = sizes.model
    model_sizes = ModelSizes(width=width, layers=layers, heads=heads, kv_heads=kv_heads)
    return ByteDecoder(model_sizes, "xla", rngs=nnx.Rngs(0))


def dense_step(model: Any, keys: int, capacity: int) -> Callable[[], Any]:
    """A step that makes the last of so many keys; the cache is donated, and taken back."""
    from flax import nnx

    filled = tuple(
        dataclasses.replace(cache, k=_normal(cache.k, 1), v=_normal(cache.v, 2))
        for cache in model.init_caches(SEQUENCES, capacity)
    )
    graph, state = nnx.split(model)

    @functools.partial(jax.jit, donate_argnums=1)
    def step(state: Any, caches: Any, lengths: Any) -> Any:
        tokens = jnp.zeros((SEQUENCES, 1), jnp.int32)
        caches = tuple(dataclasses.replace(cache, lengths=lengths) for cache in caches)
        return nnx.merge(graph, state).decode(tokens, caches)

    return _carried(step, state, filled, jnp.full(SEQUENCES, keys - 1, jnp.int32))


def paged_step(model: Any, keys: int, capacity: int) -> Callable[[], Any]:
    """Likewise, on pages at random places."""
    from flax import nnx

    cache = model.init_paged_cache(SEQUENCES * (capacity // PAGE) + 1, PAGE)
    cache = jflex.paged.PagedCache(_normal(cache.k, 1), _normal(cache.v, 2))
    graph, state = nnx.split(model)

    @functools.partial(jax.jit, donate_argnums=1)
    def step(state: Any, cache: Any, batch: Any) -> Any:
        return nnx.merge(graph, state).decode_paged(jnp.zeros(SEQUENCES, jnp.int32), cache, batch)

    return _carried(step, state, cache, _one_token_each(keys, capacity))


def _carried(step: Callable[..., Any], state: Any, cache: Any, lengths: Any) -> Callable[[], Any]:
    held = [cache]

    def call() -> Any:
        logits, held[0] = step(state, held[0], lengths)
        return logits

    return call


def _normal(like: jax.Array, number: int) -> jax.Array:
    return jax.random.normal(jax.random.key(number), like.shape, like.dtype)


QUESTIONS = {
    "window": Question(
        "causal window of 256 keys; B 1, S 8192, H 4, D 64, float32; `xla` beside masked softmax attention in jnp",
        window,
    ),
    "noop": Question(
        "no mod, no mask; B 1, S 2048, H 4, D 64, float32; `xla` beside jax.nn.dot_product_attention (XLA)", noop
    ),
    **cpu_probes.QUESTIONS,
    "paged_scaling": Question(
        f"`jflex.paged_attention` on `xla`: {SEQUENCES} requests of one token, 8 heads over 2, D 64, float32, pages of "
        f"{PAGE} at random places, by keys and by the capacity of caches and tables",
        paged_scaling,
    ),
    "demo_decode": Question(
        f"a step of the demo's model of 2 layers from its caches on `xla`, {SEQUENCES} texts, float32: by the bytes "
        "that are there and by the capacity",
        demo_decode,
    ),
}


def main(words: Sequence[str] | None = None) -> None:
    """The command."""
    command.run("cpu", QUESTIONS, words, on_gpu=False)

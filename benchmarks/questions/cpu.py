"""Questions to the CPU: ``python -m benchmarks cpu [question ...]``."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pathlib
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jflex
from benchmarks.peers.jax_peers import causal_documents, forward_and_backward
from benchmarks.questions import command
from benchmarks.questions.command import Measured, Questions
from benchmarks.questions.probes import count_compilations
from benchmarks.results.schema import Record
from benchmarks.run.jax_runner import ratios, take_turns
from benchmarks.run.jobs import Job, run_job

QUESTIONS = Questions()
SEQUENCES, PAGE = 4, 16  # of paged_scaling and demo_decode
_STATUS = pathlib.Path("/proc/self/status")
_CLEAR = pathlib.Path("/proc/self/clear_refs")
# glibc would keep freed arrays for later ones, so that a peak would depend on what was freed before; with this it
# gives each array of more than 64 kB back at once.
_VARIABLES = {"MALLOC_MMAP_THRESHOLD_": "65536"}
_STEPS, _LENGTH, _DOCUMENTS = 100, 512, 6  # of documents_compile


def in_fresh_process(function: str, module: str = __name__, **arguments: Any) -> Any:
    """What a function of this module, or of another, gives there."""
    return run_job(Job(function, module, function, arguments, _VARIABLES, seconds=1800.0))


def _milliseconds(name: str, times: dict[str, list[float]]) -> list[Record]:
    return [Record.of(f"{name}{which}", [t * 1e3 for t in values], "ms") for which, values in times.items()]


# Time beside other attentions.


def _beside(
    attentions: dict[str, Callable[..., Any]], arrays: jax.Array, seconds: tuple[float, float]
) -> Iterator[tuple[str, dict[str, list[float]]]]:
    """The name of a pass, and seconds of two attentions."""
    passes = {"forward": (lambda f: f, 3), "forward and backward": (forward_and_backward, 4)}
    for (name, (transform, count)), limit in zip(passes.items(), seconds, strict=True):
        calls = {x: functools.partial(jax.jit(transform(f)), *arrays[:count]) for x, f in attentions.items()}
        yield name, take_turns(calls, limit)


@QUESTIONS.of(
    "causal window of 256 keys; B 1, S 8192, H 4, D 64, float32; `xla` beside masked softmax attention in jnp"
)
def window() -> Measured:
    """How much faster is a sliding window than dense attention with the same mask?"""
    length, size = 8192, 256
    arrays = jax.random.normal(jax.random.key(0), (4, 1, length, 4, 64))
    mask_mod = lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx < size)
    block_mask = jflex.create_block_mask(mask_mod, None, None, length, length)

    def dense(query: Any, key: Any, value: Any) -> Any:
        index = jnp.arange(length)
        return _dense_masked(query, key, value, mask_mod(0, 0, index[:, None], index[None, :]))

    sparse = functools.partial(jflex.flex_attention, block_mask=block_mask, implementation="xla")
    records = []
    for name, times in _beside({"dense jnp": dense, "jflex": sparse}, arrays, (60, 90)):
        records += _milliseconds(f"{name}, ", times)
        records.append(Record.of(f"{name}, times faster", ratios(times["dense jnp"], times["jflex"]), "x", 3))
    return records, []


@QUESTIONS.of("no mod, no mask; B 1, S 2048, H 4, D 64, float32; `xla` beside jax.nn.dot_product_attention (XLA)")
def noop() -> Measured:
    """What does plain attention cost blockwise, beside JAX's own?"""
    arrays = jax.random.normal(jax.random.key(0), (4, 1, 2048, 4, 64))
    functions = {"jflex": jflex.flex_attention, "jax.nn": jax.nn.dot_product_attention}
    attentions = {name: functools.partial(f, implementation="xla") for name, f in functions.items()}
    records = []
    for name, times in _beside(attentions, arrays, (60, 60)):
        records += _milliseconds(f"{name}, ", times)
        records.append(Record.of(f"{name}, time relative to jax.nn", ratios(times["jflex"], times["jax.nn"]), "x", 3))
    return records, []


def _dense_masked(query: Any, key: Any, value: Any, visible: Any) -> Any:
    """Softmax attention in plain jnp: all scores, then the mask."""
    scores = jnp.einsum("bthd,bshd->bhts", query, key) * query.shape[-1] ** -0.5
    weights = jax.nn.softmax(jnp.where(visible[None, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhts,bshd->bthd", weights, value)


# Time by the keys that are there, and by the capacity of the cache.


# keys of each sequence, few and many; keys that its table and share of the cache hold; seconds for one comparison
_KEYS, _CAPACITY, _SECONDS = (2048, 16384), (2048, 32768), 30.0
_MODEL = (128, 2, 4, 2)  # width, layers, heads and key heads of the demo's model


def _grown(name: str, make: Callable[[int, int], Any], less: Any, more: Any, seconds: float) -> list[Record]:
    """Two times, and their growth over that of the visited keys.

    Args:
      name: What grows.
      make: From the keys and the capacity of each sequence, a call that returns arrays.
      less: Keys and capacity.
      more: Likewise.
      seconds: For all.
    """
    times = take_turns({f"{keys} keys of {capacity}": make(keys, capacity) for keys, capacity in (more, less)}, seconds)
    share = [ratio / (more[0] // less[0]) for ratio in ratios(*times.values())]
    growth = Record.of(f"{name}: growth of the time over that of visited keys", share, "x", 3)
    return [*_milliseconds(f"{name}: ", times), growth]


@QUESTIONS.of(
    f"`jflex.paged_attention` on `xla`: {SEQUENCES} requests of one token, 8 heads over 2, D 64, float32, pages of "
    f"{PAGE} at random places, by keys and by the capacity of caches and tables"
)
def paged_scaling(keys: Any = _KEYS, capacity: Any = _CAPACITY, seconds: float = _SECONDS) -> Measured:
    """Does the time of paged attention follow the visited keys, and not the cache and the tables?"""
    (few, many), (small, large) = keys, capacity
    same = _grown("the same keys, larger cache and tables", _paged_call, (few, small), (few, large), seconds)
    more = _grown("more keys, the same cache and tables", _paged_call, (few, large), (many, large), seconds)
    return same + more, []


def _one_token_each(keys: int, capacity: int) -> jflex.paged.PagedBatch:
    """With pages at random places; page 0 is reserved."""
    pages = capacity // PAGE
    table = np.random.default_rng(0).permutation(np.arange(1, SEQUENCES * pages + 1)).reshape(SEQUENCES, pages)
    rows = jnp.arange(SEQUENCES + 1, dtype=jnp.int32)
    return jflex.paged.PagedBatch(rows, jnp.full(SEQUENCES, keys, jnp.int32), jnp.asarray(table, jnp.int32))


def _paged_call(keys: int, capacity: int) -> Callable[[], Any]:
    """One step, whose cache and tables hold `capacity` keys of each request, of which there are `keys`."""
    shape = (SEQUENCES * (capacity // PAGE) + 1, PAGE, 2, 64)
    cache = jflex.paged.PagedCache(*(jax.random.normal(jax.random.key(number), shape) for number in (1, 2)))
    query = jax.random.normal(jax.random.key(0), (SEQUENCES, 8, 64))
    attend = jax.jit(functools.partial(jflex.paged_attention, implementation="xla"))
    return functools.partial(attend, query, cache, _one_token_each(keys, capacity))


@QUESTIONS.of(
    f"a step of the demo's model of 2 layers from its caches on `xla`, {SEQUENCES} texts, float32: by the bytes "
    "that are there and by the capacity"
)
def demo_decode() -> Measured:
    """Does the time of a decoding step follow the keys that are there, and not the capacity of the cache?"""
    (few, many), (small, large) = _KEYS, _CAPACITY
    records = []
    for kind, make in (("dense", dense_step), ("paged", paged_step)):
        call = functools.partial(make, demo_model(*_MODEL))
        records += _grown(f"{kind} cache, the same bytes, more room", call, (few, small), (few, large), _SECONDS)
        records += _grown(f"{kind} cache, more bytes, the same room", call, (few, large), (many, large), _SECONDS)
    return records, []


def demo_model(width: int, layers: int, heads: int, kv_heads: int) -> Any:
    """The demo's decoder, with random parameters."""
    from flax import nnx

    from flax_layers.demo import model

    model_sizes = model.Sizes(width=width, layers=layers, heads=heads, kv_heads=kv_heads)
    return model.ByteDecoder(model_sizes, "xla", rngs=nnx.Rngs(0))


def dense_step(model: Any, keys: int, capacity: int) -> Callable[[], Any]:
    """A step that makes the last of so many keys."""
    filled = tuple(
        dataclasses.replace(cache, k=_normal(cache.k, 1), v=_normal(cache.v, 2))
        for cache in model.init_caches(SEQUENCES, capacity)
    )

    def decode(model: Any, caches: Any, lengths: Any) -> Any:
        caches = tuple(dataclasses.replace(cache, lengths=lengths) for cache in caches)
        return model.decode(jnp.zeros((SEQUENCES, 1), jnp.int32), caches)

    return _step(model, decode, filled, jnp.full(SEQUENCES, keys - 1, jnp.int32))


def paged_step(model: Any, keys: int, capacity: int) -> Callable[[], Any]:
    """Likewise, on pages at random places."""
    cache = model.init_paged_cache(SEQUENCES * (capacity // PAGE) + 1, PAGE)
    cache = jflex.paged.PagedCache(_normal(cache.k, 1), _normal(cache.v, 2))
    decode = lambda model, cache, batch: model.decode_paged(jnp.zeros(SEQUENCES, jnp.int32), cache, batch)
    return _step(model, decode, cache, _one_token_each(keys, capacity))


def _step(model: Any, decode: Callable[..., Any], cache: Any, lengths: Any) -> Callable[[], Any]:
    """A jitted step; the cache is donated, and taken back."""
    from flax import nnx

    graph, state = nnx.split(model)
    step = jax.jit(lambda state, cache, lengths: decode(nnx.merge(graph, state), cache, lengths), donate_argnums=1)
    held = [cache]

    def call() -> Any:
        logits, held[0] = step(state, held[0], lengths)
        return logits

    return call


def _normal(like: jax.Array, number: int) -> jax.Array:
    return jax.random.normal(jax.random.key(number), like.shape, like.dtype)


# Memory, in fresh processes.


class PeakAbove:
    """Peak memory of this process above that of the moment at which this was made, in MB.

    Linux tells the present and the peak memory of a program, and can forget the peak. Elsewhere `getrusage` gives the
    peak since the start: less than the truth if an earlier peak was higher. (On Linux it would count the process from
    which this one was started.)
    """

    def __init__(self) -> None:
        if _CLEAR.exists():
            _CLEAR.write_text("5")  # forgets the peak
        self._baseline = _status("VmRSS") if _STATUS.exists() else _peak()

    def megabytes(self) -> float:
        """Up to now."""
        return (_peak() - self._baseline) / 1e6


def _status(field: str) -> int:
    [line] = [line for line in _STATUS.read_text().splitlines() if line.startswith(field + ":")]
    return int(line.split()[1]) * 1024


def _peak() -> int:
    if _STATUS.exists():
        return _status("VmHWM")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _medians(runs: Sequence[dict[str, float]], names: dict[str, tuple[str, str]]) -> list[Record]:
    """A record of each field of the runs, by its name and unit."""
    return [Record.of(name, [run[field] for run in runs], unit, 3) for field, (name, unit) in names.items()]


@QUESTIONS.of(
    "memory of create_block_mask, 12 packed causal documents, blocks of 128; fresh processes, above the baseline"
)
def mask_memory() -> Measured:
    """How much memory does `create_block_mask` take for packed documents, compilation included?"""
    records, names = [], {"megabytes": ("peak", "MB"), "seconds": ("first call", "s"), "sparsity": ("sparsity", "%")}
    for S in (8192, 32768):
        runs = [in_fresh_process("probe_mask", length=S) for _ in range(3)]
        records += _medians(runs, {field: (f"{name} at S {S}", unit) for field, (name, unit) in names.items()})
    return records, []


def probe_mask(length: int) -> dict[str, float]:
    """One mask, in a process that has computed nothing with jflex yet."""
    documents = jax.block_until_ready(jnp.arange(length, dtype=jnp.int32) * 12 // length)
    peak, started = PeakAbove(), time.perf_counter()
    block_mask = jax.block_until_ready(causal_documents(documents))
    seconds, megabytes = time.perf_counter() - started, peak.megabytes()
    return {"megabytes": megabytes, "seconds": seconds, "sparsity": float(block_mask.sparsity())}


@QUESTIONS.of("memory of `xla` forward and backward, causal documents of 1024 tokens; B 1, H 4, D 64, float32")
def training_memory() -> Measured:
    """Does the memory of forward and backward grow linearly in the length?"""
    records, peaks = [], {}
    for S in (4096, 8192, 16384):
        runs = [in_fresh_process("probe_training", length=S) for _ in range(3)]
        [peak] = _medians(runs, {"megabytes": (f"peak above the inputs at S {S}", "MB")})
        records.append(peak)
        peaks[S] = peak.value.median
        for name, dense in (("jflex", False), ("dense jnp", True)):
            planned = in_fresh_process("planned_training", length=S, dense=dense)
            records.append(Record.single(f"planned by XLA at S {S}, {name}", planned, "MB"))
    for (a, before), (b, after) in itertools.pairwise(peaks.items()):
        records.append(Record.single(f"growth of the peak from S {a} to {b}", round(after / before, 2), "x"))
    return records, []


def probe_training(length: int) -> dict[str, float]:
    """The peak of one call above the memory after it had been compiled."""
    compiled, arguments = _compiled_training(length, dense=False)
    jax.block_until_ready(arguments)
    peak = PeakAbove()
    jax.block_until_ready(compiled(*arguments))
    return {"megabytes": peak.megabytes()}


def planned_training(length: int, dense: bool) -> float:
    """What XLA plans to hold besides the inputs: temporaries and results, in MB."""
    plan = _compiled_training(length, dense)[0].memory_analysis()
    return round((plan.temp_size_in_bytes + plan.output_size_in_bytes) / 1e6, 1)


def _compiled_training(length: int, dense: bool) -> tuple[Any, tuple[Any, ...]]:
    documents = jnp.arange(length, dtype=jnp.int32) // 1024
    blockwise = functools.partial(jflex.flex_attention, block_mask=causal_documents(documents), implementation="xla")

    def masked(query: Any, key: Any, value: Any) -> Any:
        index = jnp.arange(length)
        return _dense_masked(query, key, value, (index[:, None] >= index) & (documents[:, None] == documents))

    arguments = tuple(jax.random.normal(jax.random.key(0), (1, length, 4, 64)) for _ in range(4))
    both = jax.jit(forward_and_backward(masked if dense else blockwise))
    return both.lower(*arguments).compile(), arguments


# Compilations.


@QUESTIONS.of(
    f"programs compiled in {_STEPS} training steps, each with new document boundaries; B 1, S {_LENGTH}, H 2, D 16"
)
def documents_compile() -> Measured:
    """Does training compile once, when every step packs other documents?"""
    records = []
    for inside, made in ((True, "inside the jitted step"), (False, "outside, before each step")):
        first, rest = _train_on_documents(inside)
        records.append(Record.single(f"mask made {made}: compiled in step 1", first, ""))
        records.append(Record.single(f"mask made {made}: compiled in steps 2 to {_STEPS}", rest, ""))
    return records, []


def _train_on_documents(inside: bool) -> tuple[int, int]:
    """Programs compiled in the first step and in all others."""
    generator = np.random.default_rng(0)
    parameters = {name: jnp.asarray(generator.normal(size=(32, 32)) / 6, jnp.float32) for name in "qkv"}
    tokens = jnp.asarray(generator.normal(size=(1, _LENGTH, 32)), jnp.float32)
    mask_of = lambda lengths: causal_documents(jflex.masks.document_ids_from_lengths(lengths, _LENGTH))
    step = jax.jit(lambda p, x, mask: _trained(p, x, mask_of(mask) if inside else mask))
    compiled, loss = [], float("nan")
    for _ in range(_STEPS):
        cuts = np.sort(generator.choice(np.arange(1, _LENGTH), _DOCUMENTS - 1, replace=False))
        lengths = np.diff(cuts, prepend=0, append=_LENGTH).astype(np.int32)
        with count_compilations() as count:
            parameters, loss = step(parameters, tokens, lengths if inside else mask_of(lengths))
            jax.block_until_ready(loss)
        compiled.append(count[0])
    if not np.isfinite(loss):
        raise RuntimeError(f"The loss became {loss}: this did not train.")
    return compiled[0], sum(compiled[1:])


def _trained(parameters: Any, tokens: Any, block_mask: Any) -> Any:
    """The parameters after a step, and the loss."""

    def loss_of(parameters: Any) -> Any:
        shape = (1, _LENGTH, 2, 16)
        query, key, value = (jnp.einsum("btc,cd->btd", tokens, parameters[n]).reshape(shape) for n in "qkv")
        out = jflex.flex_attention(query, key, value, block_mask=block_mask, implementation="xla")
        return jnp.mean((out.reshape(tokens.shape) - tokens) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(parameters)
    return jax.tree.map(lambda p, g: p - 0.1 * g, parameters, gradients), loss


@QUESTIONS.of("eager calls of `xla` with ALiBi and a causal BlockMask; B 1, S 512, H 4, D 64; each in a fresh process")
def first_call() -> Measured:
    """How long is the first call in a fresh process, and does a second one with a fresh lambda compile again?"""
    runs = [in_fresh_process("eager_calls", "benchmarks.questions.probes") for _ in range(5)]
    seconds, compiled = ([run[name] for run in runs] for name in ("seconds", "compiled"))
    counts = _medians(compiled, {name: (f"programs compiled in {name}", "") for name in compiled[0]})
    return _medians(seconds, {name: (name, "s") for name in seconds[0]}) + counts, []


def main(words: Sequence[str] | None = None) -> None:
    """The command."""
    command.run("cpu", QUESTIONS, words, on_gpu=False)

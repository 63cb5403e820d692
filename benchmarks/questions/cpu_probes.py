"""Questions to the CPU about memory, compilations and first calls, mostly answered in fresh processes.

Importing this imports neither JAX nor jflex, so that a probe may time that.
"""

from __future__ import annotations

import functools
import itertools
import pathlib
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.questions.command import Measured, Question
from benchmarks.results.schema import Record
from benchmarks.run.jobs import Job, run_job

_STATUS = pathlib.Path("/proc/self/status")
_CLEAR = pathlib.Path("/proc/self/clear_refs")
# glibc would keep freed arrays for later ones, so that a peak would depend on what was freed before; with this it
# gives each array of more than 64 kB back at once.
_VARIABLES = {"MALLOC_MMAP_THRESHOLD_": "65536"}
_COMPILED = "/jax/core/compile/backend_compile_duration"
_STEPS, _LENGTH, _DOCUMENTS = 100, 512, 6  # of documents_compile


def _in_fresh_process(function: str, **arguments: Any) -> Any:
    return run_job(Job(function, __name__, function, arguments, _VARIABLES, seconds=1800.0))


def _medians(runs: list[dict[str, float]], names: dict[str, tuple[str, str]], digits: int = 3) -> list[Record]:
    """A record of each field of the runs, by its name and unit."""
    from benchmarks.run.timing import record

    return [record(name, [run[field] for run in runs], unit, digits) for field, (name, unit) in names.items()]


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


@contextmanager
def count_compilations() -> Iterator[list[int]]:
    """Counts the programs that XLA compiles inside of the block, in the list's one element.

    >>> import jax, jax.numpy as jnp
    >>> with count_compilations() as count:
    ...     three = jax.jit(lambda x: x * 3.25)(jnp.float32(3))
    >>> count[0] > 0
    True
    """
    import jax

    count, open_ = [0], [True]

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        del duration_secs, kwargs
        if open_ and event == _COMPILED:
            count[0] += 1

    jax.monitoring.register_event_duration_secs_listener(listen)  # JAX has no public way to remove one
    try:
        yield count
    finally:
        open_.clear()


def mask_memory() -> Measured:
    """How much memory does `create_block_mask` take for packed documents, compilation included?"""
    records = []
    for S in (8192, 32768):
        runs = [_in_fresh_process("probe_mask", length=S) for _ in range(3)]
        names = {"megabytes": ("peak", "MB"), "seconds": ("first call", "s"), "sparsity": ("sparsity", "%")}
        records += _medians(runs, {field: (f"{name} at S {S}", unit) for field, (name, unit) in names.items()})
    return records, []


def probe_mask(length: int) -> dict[str, float]:
    """One mask, in a process that has computed nothing with jflex yet."""
    import jax
    import jax.numpy as jnp

    import jflex
    from jflex.masks import causal, document

    documents = jnp.arange(length, dtype=jnp.int32) * 12 // length
    jax.block_until_ready(documents)
    peak, started = PeakAbove(), time.perf_counter()
    mask_mod = jflex.and_masks(causal(), document(documents))
    block_mask = jflex.create_block_mask(mask_mod, None, None, length, length)
    jax.block_until_ready(block_mask)
    seconds, megabytes = time.perf_counter() - started, peak.megabytes()
    return {"megabytes": megabytes, "seconds": seconds, "sparsity": float(block_mask.sparsity())}


def training_memory() -> Measured:
    """Does the memory of forward and backward grow linearly in the length?"""
    records, peaks, lengths = [], [], (4096, 8192, 16384)
    for S in lengths:
        runs = [_in_fresh_process("probe_training", length=S) for _ in range(3)]
        peaks += _medians(runs, {"megabytes": (f"peak above the inputs at S {S}", "MB")})
        records.append(peaks[-1])
        for name, dense in (("jflex", False), ("dense jnp", True)):
            planned = _in_fresh_process("planned_training", length=S, dense=dense)
            records.append(Record.single(f"planned by XLA at S {S}, {name}", planned, "MB"))
    for (a, before), (b, after) in itertools.pairwise(zip(lengths, peaks, strict=True)):
        growth = round(after.value.median / before.value.median, 2)
        records.append(Record.single(f"growth of the peak from S {a} to {b}", growth, "x"))
    return records, []


def probe_training(length: int) -> dict[str, float]:
    """The peak of one call above the memory after it had been compiled."""
    import jax

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
    import jax
    import jax.numpy as jnp

    import jflex
    from benchmarks.peers.jax_peers import forward_and_backward
    from jflex.masks import causal, document

    documents = jnp.arange(length, dtype=jnp.int32) // 1024
    mask_mod = jflex.and_masks(causal(), document(documents))
    block_mask = jflex.create_block_mask(mask_mod, None, None, length, length)

    def blockwise(query: Any, key: Any, value: Any) -> Any:
        return jflex.flex_attention(query, key, value, block_mask=block_mask, implementation="xla")

    def masked(query: Any, key: Any, value: Any) -> Any:
        index = jnp.arange(length)
        visible = (index[:, None] >= index) & (documents[:, None] == documents)
        return dense_masked(query, key, value, visible)

    arguments = tuple(jax.random.normal(jax.random.key(0), (1, length, 4, 64)) for _ in range(4))
    both = jax.jit(forward_and_backward(masked if dense else blockwise))
    return both.lower(*arguments).compile(), arguments


def dense_masked(query: Any, key: Any, value: Any, visible: Any) -> Any:
    """Softmax attention in plain jnp: all scores, then the mask."""
    import jax
    import jax.numpy as jnp

    scores = jnp.einsum("bthd,bshd->bhts", query, key) * query.shape[-1] ** -0.5
    weights = jax.nn.softmax(jnp.where(visible[None, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhts,bshd->bthd", weights, value)


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
    import jax
    import jax.numpy as jnp
    import numpy as np

    generator = np.random.default_rng(0)
    parameters = {name: jnp.asarray(generator.normal(size=(32, 32)) / 6, jnp.float32) for name in "qkv"}
    tokens = jnp.asarray(generator.normal(size=(1, _LENGTH, 32)), jnp.float32)
    step = jax.jit(functools.partial(_step, inside=inside))
    compiled, loss = [], float("nan")
    for _ in range(_STEPS):
        cuts = np.sort(generator.choice(np.arange(1, _LENGTH), _DOCUMENTS - 1, replace=False))
        lengths = np.diff(cuts, prepend=0, append=_LENGTH).astype(np.int32)
        with count_compilations() as count:
            parameters, loss = step(parameters, tokens, lengths if inside else _document_mask(lengths))
            jax.block_until_ready(loss)
        compiled.append(count[0])
    if not np.isfinite(loss):
        raise RuntimeError(f"The loss became {loss}: this did not train.")
    return compiled[0], sum(compiled[1:])


def _document_mask(lengths: Any) -> Any:
    import jflex
    from jflex.masks import causal, document, document_ids_from_lengths

    documents = document_ids_from_lengths(lengths, _LENGTH)
    return jflex.create_block_mask(jflex.and_masks(causal(), document(documents)), None, None, _LENGTH, _LENGTH)


def _step(parameters: Any, tokens: Any, mask: Any, *, inside: bool) -> Any:
    import jax
    import jax.numpy as jnp

    import jflex

    block_mask = _document_mask(mask) if inside else mask

    def loss_of(parameters: Any) -> Any:
        shape = (1, _LENGTH, 2, 16)
        query, key, value = (jnp.einsum("btc,cd->btd", tokens, parameters[n]).reshape(shape) for n in "qkv")
        out = jflex.flex_attention(query, key, value, block_mask=block_mask, implementation="xla")
        return jnp.mean((out.reshape(tokens.shape) - tokens) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(parameters)
    return jax.tree.map(lambda p, g: p - 0.1 * g, parameters, gradients), loss


def first_call() -> Measured:
    """How long is the first call in a fresh process, and does a second one with a fresh lambda compile again?"""
    runs = [_in_fresh_process("probe_first_call") for _ in range(5)]
    seconds = _medians([run["seconds"] for run in runs], {x: (x, "s") for x in runs[0]["seconds"]})
    compiled = [run["compiled"] for run in runs]
    return seconds + _medians(compiled, {x: (f"programs compiled in {x}", "") for x in compiled[0]}, 4), []


def probe_first_call() -> dict[str, dict[str, float]]:
    """The calls of one process: seconds, and programs compiled in the second calls."""
    import jax
    import jax.numpy as jnp

    jax.block_until_ready(jnp.ones(3) + 1)
    ready = time.perf_counter()
    import jflex

    seconds = {"import jflex, JAX being there": time.perf_counter() - ready}
    query, compiled = jax.random.normal(jax.random.key(0), (1, 512, 4, 64)), {}

    def alibi() -> Callable[..., Any]:
        slopes = 2.0 ** -jnp.arange(1.0, 5.0)
        return lambda score, b, h, q_idx, kv_idx: score - slopes[h] * (q_idx - kv_idx).astype(jnp.float32)

    def timed(name: str, function: Callable[[], Any]) -> Any:
        jax.block_until_ready(query)
        started = time.perf_counter()
        with count_compilations() as count:
            result = jax.block_until_ready(function())
        seconds[name] = time.perf_counter() - started
        if "second" in name:
            compiled[name] = count[0]
        return result

    def make_mask() -> Any:
        return jflex.create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, 512, 512)

    attend = lambda q, block_mask, mod: jflex.flex_attention(q, q, q, mod, block_mask, implementation="xla")
    loss = lambda q, block_mask, mod: attend(q, block_mask, mod).sum()
    block_mask = timed("create_block_mask, first call", make_mask)
    timed("forward, first call", lambda: attend(query, block_mask, alibi()))
    timed("gradient, first call", lambda: jax.grad(loss)(query, block_mask, alibi()))
    again = timed("create_block_mask, second call with a fresh lambda", make_mask)
    mods = [alibi(), alibi()]
    timed("forward, second call with a fresh lambda", lambda: attend(query, again, mods[0]))
    timed("gradient, second call with a fresh lambda", lambda: jax.grad(loss)(query, again, mods[1]))
    return {"seconds": seconds, "compiled": compiled}


QUESTIONS = {
    "mask_memory": Question(
        "memory of create_block_mask, 12 packed causal documents, blocks of 128; fresh processes, above the baseline",
        mask_memory,
    ),
    "training_memory": Question(
        "memory of `xla` forward and backward, causal documents of 1024 tokens; B 1, H 4, D 64, float32",
        training_memory,
    ),
    "documents_compile": Question(
        f"programs compiled in {_STEPS} training steps, each with new document boundaries; B 1, S {_LENGTH}, H 2, D 16",
        documents_compile,
    ),
    "first_call": Question(
        "eager calls of `xla` with ALiBi and a causal BlockMask; B 1, S 512, H 4, D 64; each in a fresh process",
        first_call,
    ),
}

"""Time of JAX functions: of their kernels on a GPU, or of the wall, in turns."""

from __future__ import annotations

import pathlib
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.results.schema import Record, Summary
from benchmarks.run.check_outputs import MAX_SAMPLES
from benchmarks.run.device_time import (
    COLD_BYTES,
    PROFILER,
    QUEUED,
    WALL,
    WARM_SECONDS,
    Span,
    busy_per_call,
    wall_seconds,
)

QUEUE = "wall time of a queue of calls"
_EVICT = "evict_l2_cache"
_PROFILER_ERRORS = (RuntimeError, ValueError, OSError, AttributeError)

_STEADY = 0.1  # Measuring ends when the quartiles of the ratio lie within this share of its median,
_ENOUGH = 9  # and there are so many rounds,
_LONGEST = 31  # or so many at most, or the time is over.


class Timing(NamedTuple):
    """Seconds of each repetition, and how they were found: `PROFILER`, `QUEUE` or `WALL`."""

    seconds: list[float]
    method: str


def device_seconds(call: Callable[[], Any], runs: int = 10, *, warmup: int = 2) -> list[float]:
    """Device time of the kernels of each of `runs` calls, the L2 cold before each; wall time on a CPU.

    Args:
      call: Returns arrays; all that it starts on the device is counted, but not the gaps between.
      runs: Repetitions.
      warmup: Calls before, at least.
    """
    return timed(call, runs, warmup=warmup).seconds


def timed(call: Callable[[], Any], runs: int = 10, *, warmup: int = 2) -> Timing:
    """`device_seconds` with its method: a GPU whose profiler fails is timed by the wall, over a queue of calls."""
    on_gpu = jax.default_backend() == "gpu"
    deadline = time.perf_counter() + WARM_SECONDS * on_gpu
    while warmup > 0 or time.perf_counter() < deadline:
        jax.block_until_ready(call())
        warmup -= 1
    if not on_gpu:
        return Timing(wall_seconds(call, jax.block_until_ready, runs), WALL)
    try:
        return Timing(_profiled_seconds(call, runs), PROFILER)
    except _PROFILER_ERRORS as error:
        return Timing(queue_seconds(call, runs), f"{QUEUE}: {str(error).splitlines()[0][:200]}")


def queue_seconds(call: Callable[[], Any], runs: int = 10) -> list[float]:
    """Wall time of a call within a queue of ten, launches included; the caches are as the call before left them."""
    jax.block_until_ready(call())
    return wall_seconds(call, jax.block_until_ready, runs, QUEUED)


def evict_l2_cache(buffer: jax.Array) -> jax.Array:
    """Reads and writes all of a buffer; its name marks its kernels in the profile."""
    return jax.lax.population_count(buffer)


def _profiled_seconds(call: Callable[[], Any], runs: int) -> list[float]:
    evict = jax.jit(evict_l2_cache, donate_argnums=0)
    buffer = evict(jnp.zeros(COLD_BYTES // 4, jnp.uint32))
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = options.python_tracer_level = 0
    options.enable_hlo_proto = False
    with tempfile.TemporaryDirectory() as folder:
        jax.block_until_ready(buffer)
        with jax.profiler.trace(folder, profiler_options=options):
            for _ in range(runs):
                buffer = evict(buffer)
                result = call()
            jax.block_until_ready((buffer, result))
        [path] = pathlib.Path(folder).rglob("*.xplane.pb")
        profile = jax.profiler.ProfileData.from_file(str(path))
    return busy_per_call(gpu_spans(profile), runs)


def gpu_spans(profile: Any) -> list[Span]:
    """What the streams of the first GPU did, in a `jax.profiler.ProfileData`."""
    spans = []
    # Python 3.12 warns of the type of `event.stats` when it is first made; as an error, that would end the process.
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        for plane in profile.planes:
            if plane.name.startswith("/device:GPU:0"):
                for line in plane.lines:
                    if line.name.startswith("Stream"):
                        spans += [_span(event) for event in line.events]
    return spans


def _span(event: Any) -> Span:
    separator = "popcnt" in event.name or any(_EVICT in str(value) for _, value in event.stats)
    return Span(event.start_ns * 1e-9, event.duration_ns * 1e-9, separator)


def take_turns(peers: dict[str, Callable[[], Any]], seconds: float) -> dict[str, list[float]]:
    """Seconds that each peer takes, in rounds.

    Args:
      peers: Two functions without arguments that return arrays; jitted ones.
      seconds: No round is begun after so much time, but three are made in any case.
    """
    for call in peers.values():
        jax.block_until_ready(call())
    times: dict[str, list[float]] = {name: [] for name in peers}
    first, second = peers
    deadline = time.perf_counter() + seconds
    while True:
        for name, call in peers.items():
            started = time.perf_counter()
            jax.block_until_ready(call())
            times[name].append(time.perf_counter() - started)
        rounds = len(times[first])
        ratio = Summary.of(ratios(times[first], times[second]))
        steady = rounds >= _ENOUGH and ratio.high - ratio.low < _STEADY * ratio.median
        if steady or rounds >= _LONGEST or (rounds >= 3 and time.perf_counter() > deadline):
            return times


def ratios(numerator: Sequence[float], denominator: Sequence[float]) -> list[float]:
    """The ratio of each round."""
    return [a / b for a, b in zip(numerator, denominator, strict=True)]


def record(name: str, values: Sequence[float], unit: str, digits: int = 4) -> Record:
    """Median and quartiles of repetitions, to so many significant digits."""
    summary = Summary.of(values)
    short = lambda x: float(f"{x:.{digits}g}")
    median, low, high = (short(x) for x in summary[:3])
    return Record(name, Summary(median, low, high, summary.runs), unit)


def samples(arrays: Any) -> list[list[float]]:
    """Up to about `MAX_SAMPLES` elements of each array, for `benchmarks.run.check_outputs`."""
    found = []
    for x in jax.tree.leaves(arrays):
        step = (x.size // MAX_SAMPLES) | 1  # odd, so that not all are of one column
        found.append(np.asarray(x.reshape(-1)[::step], np.float64).round(7).tolist())
    return found

"""Times a call that runs on several devices: by the kernels of each in one profile, and by the wall."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.run.jax_runner import evict_l2_cache, gpu_spans, profile_of
from benchmarks.run.timing import (
    COLD_BYTES,
    PROFILER,
    WALL,
    Call,
    Communication,
    busy_seconds,
    communication_of,
    failures,
    first_line,
    spans_per_call,
)


class Times(NamedTuple):
    """Times of the repetitions of a call.

    Attributes:
      seconds: On the device that worked longest; wall time without a profile.
      wall: From the call until all devices are done.
      communication: Of the device whose communication is exposed most; empty without a profile.
      method: How `seconds` were found.
    """

    seconds: list[float]
    wall: list[float]
    communication: list[Communication]
    method: str


def measure(call: Call, devices: Sequence[Any], runs: int) -> Times:
    """Times a call that was made before. Each repetition begins when all devices are idle, with a cold L2."""
    if devices[0].platform != "gpu":
        wall = _walls(call, devices, runs)
        return Times(wall, wall, [], WALL)
    wall = []
    profile = profile_of(lambda: wall.extend(_walls(call, devices, runs)))
    try:
        # Numbers of planes are those of JAX's local devices.
        groups = [spans_per_call(gpu_spans(profile, device.local_hardware_id), runs) for device in devices]
    except failures() as error:
        return Times(wall, wall, [], f"{WALL}: {first_line(error)}")
    each = list(zip(*groups, strict=True))
    seconds = [max(map(busy_seconds, spans)) for spans in each]
    sent = [max(map(communication_of, spans), key=lambda x: x.exposed) for spans in each]
    return Times(seconds, wall, sent, PROFILER)


def _walls(call: Call, devices: Sequence[Any], runs: int) -> list[float]:
    mesh = jax.make_mesh((len(devices),), ("all",), devices=devices)
    sharding = jax.NamedSharding(mesh, jax.P("all"))
    evict = jax.jit(evict_l2_cache, donate_argnums=0)
    size = COLD_BYTES // 4 if devices[0].platform == "gpu" else 1
    buffer, seconds = jnp.zeros((len(devices), size), jnp.uint32, device=sharding), []
    for _ in range(runs):
        buffer = jax.block_until_ready(evict(buffer))
        started = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - started)
    return seconds

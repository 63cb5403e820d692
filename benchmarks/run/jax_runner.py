"""Compiles and times the JAX peers, and other JAX functions."""

import functools
import gc
import pathlib
import re
import tempfile
import time
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import roofline
from benchmarks.peers.jax import attention as jax_attention
from benchmarks.peers.jax import served
from benchmarks.problems import Problem
from benchmarks.run import timing
from benchmarks.run.check_outputs import MAX_SAMPLES
from benchmarks.run.library_runner import LibraryRunner
from benchmarks.run.timing import COLD_BYTES, Call, Communication, Span, Timer

_EVICT = "evict_l2_cache"
_SENT = re.compile("nccl|p2p", re.IGNORECASE)  # in names of kernels and copies
_COLLECTIVE = re.compile("all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter")  # XLA's instructions


def evict_l2_cache(buffer: jax.Array) -> jax.Array:
    """Reads and writes all of a buffer; its name marks its kernels in the profile."""
    return jax.lax.population_count(buffer)


def _profiled_seconds(call: Call, runs: int) -> list[float]:
    evict, buffer = jax.jit(evict_l2_cache, donate_argnums=0), jnp.zeros(COLD_BYTES // 4, jnp.uint32)
    buffer = jax.block_until_ready(evict(buffer))

    def run() -> Any:
        nonlocal buffer
        result = None
        for _ in range(runs):
            buffer = evict(buffer)
            result = call()
        return buffer, result

    return timing.busy_per_call(gpu_spans(profile_of(run)), runs)


def profile_of(run: Call) -> Any:
    """A `jax.profiler.ProfileData` of a function's work on the devices."""
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = options.python_tracer_level = 0
    options.enable_hlo_proto = False
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            jax.block_until_ready(run())
        [path] = pathlib.Path(folder).rglob("*.xplane.pb")
        return jax.profiler.ProfileData.from_file(str(path))


def gpu_spans(profile: Any, device: int = 0) -> list[Span]:
    """Kernels and copies on the streams of a GPU, in a `jax.profiler.ProfileData`."""
    plane_name = re.compile(rf"/device:GPU:{device}(\D|$)")
    # Python 3.12 warns of the type of `event.stats` when it is first made; as an error, that would end the process.
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        lines = [line for plane in profile.planes if plane_name.match(plane.name) for line in plane.lines]
        return [_span(event) for line in lines if line.name.startswith("Stream") for event in line.events]


def _span(event: Any) -> Span:
    stats = [(str(name), str(value)) for name, value in event.stats]
    separator = "popcnt" in event.name or any(_EVICT in value for _, value in stats)
    sent = _SENT.search(event.name) or any(name == "hlo_op" and _COLLECTIVE.search(value) for name, value in stats)
    in_graph = any(name == "cuda_graph_id" for name, _ in stats)
    return Span(event.start_ns * 1e-9, event.duration_ns * 1e-9, separator, bool(sent), in_graph)


def timer() -> Timer:
    """Times calls on JAX's default device."""
    return Timer(jax.block_until_ready, _profiled_seconds if jax.default_backend() == "gpu" else None)


class Times(NamedTuple):
    """Times of the repetitions of a call on several devices."""

    seconds: list[float]  # on the device that worked longest; wall time without a profile
    wall: list[float]  # from the call until all devices are done
    communication: list[Communication]  # of the device whose communication is exposed most; empty without a profile
    method: str  # how `seconds` were found


def time_devices(call: Call, devices: Sequence[Any], runs: int) -> Times:
    """Times a call that was made before. Each repetition begins when all devices are idle, with a cold L2."""
    on_gpu = devices[0].platform == "gpu"
    sharding = jax.NamedSharding(jax.make_mesh((len(devices),), ("all",), devices=devices), jax.P("all"))
    evict = jax.jit(evict_l2_cache, donate_argnums=0)
    buffer = jnp.zeros((len(devices), COLD_BYTES // 4 if on_gpu else 1), jnp.uint32, device=sharding)
    wall: list[float] = []

    def run() -> None:
        nonlocal buffer
        for _ in range(runs):
            buffer = jax.block_until_ready(evict(buffer))
            started = time.perf_counter()
            jax.block_until_ready(call())
            wall.append(time.perf_counter() - started)

    if not on_gpu:
        run()
        return Times(wall, wall, [], timing.WALL)
    profile = profile_of(run)
    try:
        # Numbers of planes are those of JAX's local devices.
        groups = [timing.spans_per_call(gpu_spans(profile, device.local_hardware_id), runs) for device in devices]
    except timing.failures() as error:
        return Times(wall, wall, [], f"{timing.WALL}: {timing.first_line(error)}")
    each = list(zip(*groups, strict=True))
    sent = [max(map(Communication.from_spans, spans), key=lambda x: x.exposed) for spans in each]
    return Times([max(map(timing.busy_seconds, spans)) for spans in each], wall, sent, timing.PROFILER)


def samples(arrays: Any) -> list[list[float]]:
    """Up to about `MAX_SAMPLES` elements of each array, for `benchmarks.run.check_outputs`."""
    step = lambda x: (x.size // MAX_SAMPLES) | 1  # odd, so that not all are of one column
    return [np.asarray(x.reshape(-1)[:: step(x)], np.float64).round(7).tolist() for x in jax.tree.leaves(arrays)]


class JaxRunner(LibraryRunner):
    """Runs peers on JAX's default device."""

    def __init__(self) -> None:
        super().__init__()
        self.timer = timer()

    samples = staticmethod(samples)

    def start(self, problem: Problem) -> dict[str, Any]:
        """Draws the arrays, makes the BlockMask and counts the work."""
        self._problem = problem
        self._mods, self._captured = jax_attention.mods_of(problem)
        if problem.served:
            return {}
        block_mask, visited = jax_attention.block_mask_of(problem, self._mods(self._captured))
        self._inputs = jax_attention.inputs_of(problem, self._captured, block_mask)
        work = roofline.work(problem, visited, [x.shape for x in self._captured.values()])
        return {"work": work, "backends": jax_attention.backends_of(problem, self._mods, self._inputs)}

    def _programs(self, peer: str, directions: Sequence[str]) -> dict[str, tuple[Any, tuple[Any, ...]]]:
        """Jitted functions and their arguments; that of the backward gives ``(out, pull)``."""
        if self._problem.served:
            function, inputs = served.served_program(peer, self._problem, self._mods, self._captured)
            return {"forward": (jax.jit(function), inputs)}
        attend = jax_attention.ATTENTION[peer](self._problem, self._mods)
        functions = {"forward": attend, "backward": jax_attention.with_residuals(attend, self._problem)}
        programs = {x: (jax.jit(functions[x]), self._inputs) for x in directions if x in functions}
        if "jvp" in directions:
            tangents = [jax.tree.map(jnp.flip, x) for x in self._inputs[:4]]
            pushed = jax_attention.with_tangents(peer, self._problem, self._mods)
            programs["jvp"] = jax.jit(pushed), (tangents, *self._inputs)
        return programs

    def build(self, peer: str, directions: Sequence[str]) -> dict[str, Call]:
        """The forward is one program; so is the backward, from the residuals that `jax.vjp` keeps."""
        calls: dict[str, Call] = {}
        for direction, (function, inputs) in self._programs(peer, directions).items():
            if direction == "backward":
                out, pull = function(*inputs)
                function, inputs = _pull(), (pull, jax.random.normal(jax.random.key(1), out.shape, out.dtype))
            calls[direction] = functools.partial(function, *inputs)
        return calls

    def fill_caches(self, peer: str, directions: Sequence[str]) -> None:
        for direction, (function, inputs) in self._programs(peer, directions).items():
            function.lower(*inputs).compile()
            if direction == "backward":
                out, pull = jax.eval_shape(function, *inputs)
                _pull().lower(pull, out).compile()

    def gemm_and_copy(self, side: int, count: int) -> tuple[Call, Call]:
        first, second = jax.random.normal(jax.random.key(0), (2, side, side), jnp.bfloat16)
        copied = jnp.arange(count, dtype=jnp.uint32)
        return functools.partial(jax.jit(jnp.matmul), first, second), functools.partial(jax.jit(jnp.invert), copied)

    def forget(self) -> None:
        for name in ("_problem", "_inputs", "_mods", "_captured"):
            vars(self).pop(name, None)
        gc.collect()


def _pull() -> Any:
    return jax.jit(lambda pull, cotangent: pull(cotangent))

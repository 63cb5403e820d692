"""The first call on a GPU, beside torch: ``python -m benchmarks gpu first_call``.

Importing this imports neither JAX nor torch, so that a process may time that.
"""

import tempfile
import time
from collections.abc import Callable
from typing import Any

from benchmarks.questions.question import Measured
from benchmarks.results.schema import Record
from benchmarks.run.jobs import SHARED_GPU, Job, RunJob, run_job, run_jobs

_TORCH = "torch FlexAttention"
_CACHES = (", filling JAX's persistent cache", ", reading JAX's persistent cache")


def first_call(
    length: int = 4096,
    heads: int = 16,
    head_size: int = 64,
    implementation: str = "triton",
    other: str = "official_triton",
    run: RunJob = run_job,
    /,
) -> Measured:
    """Seconds from a fresh process to the first result of forward and backward.

    The `other` implementation has a cache of its own, that of Triton, beside JAX's: two processes fill and read both.
    """
    # Once before, so that no process is the one that reads JAX or torch from the disk.
    run_jobs([Job(x, __name__, f"{x}_imported", {}) for x in ("jax", "torch")], run)
    shape = {"length": length, "heads": heads, "head_size": head_size}
    with tempfile.TemporaryDirectory() as folder:
        job = lambda label, function, arguments, variables=SHARED_GPU: Job(
            label, __name__, function, shape | arguments, variables
        )
        cached = {"implementation": implementation, "cache": f"{folder}/jax"}
        both = {"implementation": other, "cache": f"{folder}/other"}
        triton = {"TRITON_CACHE_DIR": f"{folder}/kernels"}
        inductor = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
        jobs = [
            job("jflex", "jax_first_call", {**cached, "cache": None}),
            *(job(f"jflex{x}", "jax_first_call", cached) for x in _CACHES),
            *(job(f"jflex {other}{x}", "jax_first_call", both, triton) for x in _CACHES),
            job(f"{_TORCH}, empty caches", "torch_first_call", {}, SHARED_GPU | inductor),
            job(f"{_TORCH}, reading its caches", "torch_first_call", {}, SHARED_GPU | inductor),
        ]
        started_now = lambda job: job._replace(arguments={**job.arguments, "started": time.time()})
        answers, remarks = run_jobs(jobs, lambda job: run(started_now(job)), at_once=1)
    remarks += [f"{label}: {answer.pop('cache')}" for label, answer in answers.items() if "cache" in answer]
    records = [Record.single(f"{label}: {x}", s, "s") for label, answer in answers.items() for x, s in answer.items()]
    # Seconds from the arrays of a process to its first result.
    steps = ("trace and lower", "compile", "run")
    seconds = {label: sum(x.get(step, 0.0) for step in steps) for label, x in answers.items()}
    for kind in _CACHES:
        if (first := seconds.get(f"jflex {other}{kind}")) and (second := seconds.get(f"jflex{kind}")):
            name = f"trace, lower, compile and run, {other} over {implementation}{kind}"
            records.append(Record.single(name, first / second, "x"))
    return Measured(records, remarks)


class Stopwatch:
    """Seconds of each step of a process, since its start."""

    def __init__(self, started: float) -> None:
        self._started = self._last = started
        self._steps: dict[str, float] = {}
        self.mark("start of Python")

    def mark(self, name: str) -> None:
        """The end of a step."""
        now = time.time()
        self._steps[name], self._last = now - self._last, now

    def seconds(self, again: Callable[[], Any]) -> dict[str, float]:
        """In all, of each step, and of a second call."""
        total, started = self._last - self._started, time.perf_counter()
        again()
        return {"in all": total, **self._steps, "second call": time.perf_counter() - started}


def jax_imported() -> None:
    """Nothing but the import and the start on the GPU, so that the files have been read once."""
    import jax.numpy as jnp

    import jflex  # noqa: F401

    jnp.zeros(1).block_until_ready()


def jax_first_call(
    started: float, length: int, heads: int, head_size: int, implementation: str, cache: str | None
) -> dict[str, Any]:
    """Seconds of each step from the start of the process, and what the persistent cache did."""
    watch = Stopwatch(started)
    import jax
    import jax.numpy as jnp
    import numpy as np

    import jflex
    from benchmarks.peers.jax.attention import forward_and_backward

    def both(block_mask: jflex.BlockMask, *arrays: jax.Array) -> object:
        attend = lambda q, k, v: jflex.flex_attention(q, k, v, block_mask=block_mask, implementation=implementation)
        return forward_and_backward(attend)(*arrays)

    watch.mark("import")
    events = _use_cache(cache)
    pattern = np.random.default_rng(0).normal(size=(4, 1, length, heads, head_size)).astype(jnp.bfloat16)
    arrays = jax.block_until_ready([jax.device_put(x) for x in pattern])
    watch.mark("start of the GPU and inputs")
    block_mask = jax.block_until_ready(jflex.create_block_mask(jflex.masks.causal(), None, None, length, length))
    watch.mark("create_block_mask")
    lowered = jax.jit(both).lower(block_mask, *arrays)
    watch.mark("trace and lower")
    compiled = lowered.compile()
    watch.mark("compile")
    run = lambda: jax.block_until_ready(compiled(block_mask, *arrays))
    run()
    watch.mark("run")
    seconds = watch.seconds(run)
    return seconds if cache is None else seconds | {"cache": f"{events['hits']} hits, {events['misses']} misses"}


def _use_cache(folder: str | None) -> dict[str, int]:
    """Points JAX to its persistent cache, for programs however small, and counts what it does."""
    import jax

    events = {"hits": 0, "misses": 0}
    if folder is None:
        return events
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

    def listen(event: str, **_: Any) -> None:
        name = event.removeprefix("/jax/compilation_cache/cache_")
        if name in events:
            events[name] += 1

    jax.monitoring.register_event_listener(listen)
    return events


def torch_imported() -> None:
    """Nothing but the import and the start on the GPU, so that the files have been read once."""
    import torch
    from torch.nn.attention.flex_attention import flex_attention  # noqa: F401

    torch.zeros(1, device="cuda").item()


def torch_first_call(started: float, length: int, heads: int, head_size: int) -> dict[str, float]:
    """Seconds of each step from the start of the process to the first result of causal forward and backward."""
    watch = Stopwatch(started)
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    watch.mark("import")
    shape = (1, heads, length, head_size)
    *inputs, cotangent = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    torch.cuda.synchronize()
    watch.mark("start of the GPU and inputs")
    causal = lambda b, h, q_idx, kv_idx: q_idx >= kv_idx
    block_mask = create_block_mask(causal, None, None, length, length, device="cuda")
    torch.cuda.synchronize()
    watch.mark("create_block_mask")
    compiled = torch.compile(flex_attention, dynamic=False)
    leaves = [x.requires_grad_() for x in inputs]

    def both() -> None:
        torch.autograd.grad(compiled(*leaves, block_mask=block_mask), leaves, cotangent)
        torch.cuda.synchronize()

    both()
    watch.mark("trace, lower, compile and run")
    return watch.seconds(both)

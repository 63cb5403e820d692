"""The first call on a GPU, beside torch: ``python -m benchmarks gpu first_call``.

Importing this imports neither JAX nor torch, so that a process may time that.
"""

import tempfile
import time

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
    shape = {"length": length, "heads": heads, "head_size": head_size}
    with tempfile.TemporaryDirectory() as folder:

        def job(label: str, arguments: dict[str, str | None], caches: str) -> Job:
            """Calls jflex if there are arguments, and torch otherwise."""
            names = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
            variables = SHARED_GPU | {name: f"{folder}/{caches}/{name}" for name in names}
            function = "jax_first_call" if arguments else "torch_first_call"
            return Job(label, __name__, function, shape | arguments, variables)

        alone = {"implementation": implementation, "cache": None}
        cached = {"implementation": implementation, "cache": f"{folder}/jax"}
        both = {"implementation": other, "cache": f"{folder}/other"}
        jobs = [
            job("jflex", alone, "jflex"),
            *(job(f"jflex{x}", cached, "jflex") for x in _CACHES),
            *(job(f"jflex {other}{x}", both, "other") for x in _CACHES),
            job(f"{_TORCH}, empty caches", {}, "torch"),
            job(f"{_TORCH}, reading its caches", {}, "torch"),
        ]
        started_now = lambda job: job._replace(arguments={**job.arguments, "started": time.time()})
        run_now = lambda job: run(started_now(job))
        # Each library once before, so that no process is the one that reads it from the disk.
        run_jobs([job("jflex", alone, "before"), job(_TORCH, {}, "before")], run_now, at_once=1)
        answers, remarks = run_jobs(jobs, run_now, at_once=1)
    records = []
    for label, steps in answers.items():
        total = sum(seconds for step, seconds in steps.items() if step != "second call")
        records += [Record.single(f"{label}: {x}", s, "s") for x, s in {"in all": total, **steps}.items()]
    result = ("trace and lower", "compile", "run")  # steps from the arrays of a process to its first result
    seconds = {label: sum(steps.get(x, 0.0) for x in result) for label, steps in answers.items()}
    for kind in _CACHES:
        if (first := seconds.get(f"jflex {other}{kind}")) and (second := seconds.get(f"jflex{kind}")):
            name = f"trace, lower, compile and run, {other} over {implementation}{kind}"
            records.append(Record.single(name, first / second, "x"))
    return Measured(records, remarks)


class Stopwatch(dict[str, float]):
    """Seconds of each step of a process, since its start."""

    def __init__(self, started: float) -> None:
        self._last = started
        self.mark("start of Python")

    def mark(self, name: str) -> None:
        """The end of a step."""
        now = time.time()
        self[name], self._last = now - self._last, now


def jax_first_call(
    started: float, length: int, heads: int, head_size: int, implementation: str, cache: str | None
) -> dict[str, float]:
    """Seconds of each step from the start of the process."""
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
    if cache is not None:
        use_cache(cache)
    pattern = np.random.default_rng(0).normal(size=(4, 1, length, heads, head_size)).astype(jnp.bfloat16)
    arrays = jax.block_until_ready([jax.device_put(x) for x in pattern])
    watch.mark("start of the GPU and inputs")
    block_mask = jax.block_until_ready(jflex.create_block_mask(jflex.masks.causal(), None, None, length, length))
    watch.mark("create_block_mask")
    lowered = jax.jit(both).lower(block_mask, *arrays)
    watch.mark("trace and lower")
    compiled = lowered.compile()
    watch.mark("compile")
    for name in ("run", "second call"):
        jax.block_until_ready(compiled(block_mask, *arrays))
        watch.mark(name)
    return dict(watch)


def use_cache(folder: str) -> None:
    """Points JAX to its persistent cache, for programs however small."""
    import jax

    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


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
    for name in ("trace, lower, compile and run", "second call"):
        torch.autograd.grad(compiled(*leaves, block_mask=block_mask), leaves, cotangent)
        torch.cuda.synchronize()
        watch.mark(name)
    return dict(watch)

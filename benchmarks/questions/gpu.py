"""The first call on a GPU, beside torch: ``python -m benchmarks gpu first_call``."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping

from benchmarks.questions.question import Measured
from benchmarks.results.schema import Record
from benchmarks.run.jobs import SHARED_GPU, Job, RunJob, run_job, run_jobs

_PROBES = "benchmarks.questions.probes"
_TORCH = "torch FlexAttention"
_FILLING, _READING = ", filling JAX's persistent cache", ", reading JAX's persistent cache"


def first_call(
    length: int = 4096,
    heads: int = 16,
    head_size: int = 64,
    implementation: str = "triton",
    run: RunJob = run_job,
    other: str = "official_triton",
) -> Measured:
    """Seconds from a fresh process to the first result of forward and backward.

    The `other` implementation has a cache of its own, that of Triton, beside JAX's: two processes fill and read both.
    """
    # Once before, so that no process is the one that reads JAX or torch from the disk.
    run_jobs([Job("JAX", _PROBES, "jax_imported", {}), Job("torch", _PROBES, "torch_imported", {})], run)
    shape = {"length": length, "heads": heads, "head_size": head_size}
    with tempfile.TemporaryDirectory() as folder:
        cached = {**shape, "implementation": implementation, "cache": f"{folder}/jax"}
        both = {**shape, "implementation": other, "cache": f"{folder}/other"}
        triton = {"TRITON_CACHE_DIR": f"{folder}/kernels"}
        inductor = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
        inductor = {**SHARED_GPU, **inductor}
        jobs = [
            Job("jflex", _PROBES, "jax_first_call", {**cached, "cache": None}),
            *(Job(f"jflex{x}", _PROBES, "jax_first_call", cached) for x in (_FILLING, _READING)),
            *(Job(f"jflex {other}{x}", _PROBES, "jax_first_call", both, triton) for x in (_FILLING, _READING)),
            Job(f"{_TORCH}, empty caches", _PROBES, "torch_first_call", shape, inductor),
            Job(f"{_TORCH}, reading its caches", _PROBES, "torch_first_call", shape, inductor),
        ]
        started_now = lambda job: job._replace(arguments={**job.arguments, "started": time.time()})
        answers, remarks = run_jobs(jobs, lambda job: run(started_now(job)), at_once=1)
    ratios = [
        Record.single(f"trace, lower, compile and run, {other} over {implementation}{kind}", round(a / b, 3), "x")
        for kind in (_FILLING, _READING)
        if (a := _to_a_result(answers, f"jflex {other}{kind}")) and (b := _to_a_result(answers, f"jflex{kind}"))
    ]
    remarks += [f"{label}: {answer.pop('cache')}" for label, answer in answers.items() if "cache" in answer]
    records = [
        Record.single(f"{label}: {name}", round(x, 3), "s")
        for label, answer in answers.items()
        for name, x in answer.items()
    ]
    return Measured([*records, *ratios], remarks)


def _to_a_result(answers: Mapping[str, Mapping[str, float]], label: str) -> float:
    """Seconds from the arrays of a process to its first result; 0 if the process failed."""
    return sum(answers[label][step] for step in ("trace and lower", "compile", "run")) if label in answers else 0.0

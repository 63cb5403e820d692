"""Questions to a GPU besides speed: ``python -m benchmarks gpu [question ...]``."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.questions import command
from benchmarks.questions.command import Measured, Questions
from benchmarks.results.schema import Record
from benchmarks.run.jobs import SHARED_GPU, Job, RunJob, run_job, run_jobs

_PROBES = "benchmarks.questions.probes"
_JFLEX, _TORCH = "jflex triton", "torch FlexAttention"
_FILLING, _READING = ", filling JAX's persistent cache", ", reading JAX's persistent cache"
QUESTIONS = Questions()


@QUESTIONS.of(
    "memory of forward and backward above the inputs, 12 packed causal documents; B 1, H 16, D 64, bfloat16; each "
    "in a fresh process"
)
def memory(
    lengths: Sequence[int] = (8192, 16384, 32768, 65536),
    heads: int = 16,
    head_size: int = 64,
    implementation: str = "triton",
    run: RunJob = run_job,
) -> Measured:
    """Does the memory of forward and backward grow linearly in the length, and how does it compare to torch's?"""
    label = lambda peer, length: f"{peer} at S {length}"
    jobs = []
    one_thread = {**SHARED_GPU, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    for S in lengths:
        shape: dict[str, Any] = {"length": S, "heads": heads, "head_size": head_size}
        ours = {**shape, "implementation": implementation}
        jobs.append(Job(label(_JFLEX, S), _PROBES, "jax_memory", ours))
        jobs.append(Job(label(_TORCH, S), _PROBES, "torch_memory", shape, one_thread))
    found, remarks = run_jobs(jobs, run)

    def series(peer: str, name: str) -> dict[int, float]:
        each = {S: found.get(label(peer, S), {}).get(name) for S in lengths}
        return {S: size for S, size in each.items() if size is not None}

    every = {
        f"planned by XLA, {_JFLEX}": series(_JFLEX, "planned"),
        f"peak of the allocator, {_JFLEX}": series(_JFLEX, "peak"),
        f"peak of the allocator, {_TORCH}": series(_TORCH, "peak"),
    }
    first, last = lengths[0], lengths[-1]
    sizes_of = {f"{name}, S {S}": x for name, one in every.items() for S, x in one.items()}
    results = {f"the results alone, out and three gradients, S {last}": 4 * last * heads * head_size * 2}
    lists = {f"lists of the BlockMask, an input, S {S}": x for S, x in series(_JFLEX, "block_mask").items()}
    records = [Record.single(name, round(x / 1e6, 1), "MB") for name, x in (sizes_of | results | lists).items()]
    for name, one in every.items():
        for S in (S for S in one if first in one and first != S):
            growth = round((one[S] / S) / (one[first] / first), 3)
            records.append(Record.single(f"bytes per token relative to S {first}, {name}, S {S}", growth, "x"))
    if covered := [S for S, hidden in series(_JFLEX, "covered").items() if hidden]:
        remarks.append(f"The peak of the preparation was above that of the run, at S {covered}: the run's is less.")
    return records, remarks


@QUESTIONS.of(
    "memory of forward and backward above the inputs: up to a million tokens in 64 packed causal documents, each in a "
    "window of 4096; B 1, H 8, D 128, bfloat16; each in a fresh process"
)
def million_memory(
    lengths: Sequence[int] = (262144, 524288, 1048576),
    heads: int = 8,
    head_size: int = 128,
    documents: int = 64,
    window: int = 4096,
    implementation: str | None = None,
    run: RunJob = run_job,
) -> Measured:
    """Does the memory of a million tokens grow linearly in the length?"""
    shape = {"heads": heads, "head_size": head_size, "documents": documents, "window": window}
    shape |= {"implementation": implementation}
    jobs = [Job(f"S {S}", _PROBES, "jax_memory", {"length": S, **shape}) for S in lengths]
    found, remarks = run_jobs(jobs, run)
    names = {"planned": "planned by XLA", "peak": "peak of the allocator", "block_mask": "lists of the BlockMask"}
    sizes = {
        (name, S): found[f"S {S}"][key]
        for key, name in names.items()
        for S in lengths
        if found.get(f"S {S}", {}).get(key) is not None
    }
    records = [Record.single(f"{name}, S {S}", round(x / 1e6, 1), "MB") for (name, S), x in sizes.items()]
    first = lengths[0]
    for (name, S), x in sizes.items():
        if first != S and (name, first) in sizes:
            growth = round((x / S) / (sizes[name, first] / first), 3)
            records.append(Record.single(f"bytes per token relative to S {first}, {name}, S {S}", growth, "x"))
    return records, remarks


@QUESTIONS.of(
    "from a fresh process to the first result of causal forward and backward; B 1, H 16, S 4096, D 64, bfloat16"
)
def first_call(
    length: int = 4096,
    heads: int = 16,
    head_size: int = 64,
    implementation: str = "triton",
    run: RunJob = run_job,
    other: str = "official_triton",
) -> Measured:
    """How long is it from a fresh process to the first result of forward and backward?

    The `other` implementation has a cache of its own, that of Triton, beside JAX's: two processes fill and read both.
    """
    # Once before, so that no process is the one that reads JAX or torch from the disk.
    run_jobs([Job("JAX", _PROBES, "jax_imported", {}), Job("torch", _PROBES, "torch_imported", {})], run)
    shape = {"length": length, "heads": heads, "head_size": head_size}
    ours, others = {**shape, "implementation": implementation}, {**shape, "implementation": other}
    with tempfile.TemporaryDirectory() as folder:
        cached = {**ours, "cache": f"{folder}/jax"}
        inductor = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
        inductor = {**SHARED_GPU, **inductor}
        both, triton = {**others, "cache": f"{folder}/other"}, {"TRITON_CACHE_DIR": f"{folder}/kernels"}
        jobs = [
            Job("jflex", _PROBES, "jax_first_call", {**ours, "cache": None}),
            Job(f"jflex{_FILLING}", _PROBES, "jax_first_call", cached),
            Job(f"jflex{_READING}", _PROBES, "jax_first_call", cached),
            Job(f"jflex {other}{_FILLING}", _PROBES, "jax_first_call", both, triton),
            Job(f"jflex {other}{_READING}", _PROBES, "jax_first_call", both, triton),
            Job(f"{_TORCH}, empty caches", _PROBES, "torch_first_call", shape, inductor),
            Job(f"{_TORCH}, reading its caches", _PROBES, "torch_first_call", shape, inductor),
        ]
        started_now = lambda job: job._replace(arguments={**job.arguments, "started": time.time()})
        found, remarks = run_jobs(jobs, lambda job: run(started_now(job)), at_once=1)
    ratios = [
        Record.single(f"trace, lower, compile and run, {other} over {implementation}{kind}", round(a / b, 3), "x")
        for kind in (_FILLING, _READING)
        if (a := _to_a_result(found, f"jflex {other}{kind}")) and (b := _to_a_result(found, f"jflex{kind}"))
    ]
    remarks += [f"{label}: {answer.pop('cache')}" for label, answer in found.items() if "cache" in answer]
    records = [
        Record.single(f"{label}: {name}", round(x, 3), "s")
        for label, answer in found.items()
        for name, x in answer.items()
    ]
    return [*records, *ratios], remarks


def _to_a_result(found: Mapping[str, Mapping[str, Any]], label: str) -> float:
    """Seconds from the arrays of a process to its first result; 0 if the process failed."""
    return sum(found[label][step] for step in ("trace and lower", "compile", "run")) if label in found else 0.0


def main(words: Sequence[str] | None = None) -> None:
    """The command."""
    command.run("gpu", QUESTIONS, words, on_gpu=True)

"""Questions to a GPU besides speed: ``python -m benchmarks gpu [question ...]``."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks.questions import command
from benchmarks.questions.command import Measured, Question
from benchmarks.results.schema import Record, Summary
from benchmarks.run.jobs import SHARED_GPU, Job, RunJob, run_job, run_jobs

_PROBES = "benchmarks.questions.gpu_probes"
_JFLEX, _TORCH = "jflex triton", "torch FlexAttention"


class MemorySizes(NamedTuple):
    """What `memory` measures."""

    lengths: tuple[int, ...] = (8192, 16384, 32768, 65536)
    heads: int = 16
    head_size: int = 64
    implementation: str = "triton"


class MaskSizes(NamedTuple):
    """What `block_mask` measures."""

    length: int = 131072
    runs: int = 11


class CallSizes(NamedTuple):
    """What `first_call` measures."""

    length: int = 4096
    heads: int = 16
    head_size: int = 64
    implementation: str = "triton"


_MEMORY, _MASK, _CALL = MemorySizes(), MaskSizes(), CallSizes()


def memory(sizes: MemorySizes = _MEMORY, run: RunJob = run_job) -> Measured:
    """Does the memory of forward and backward grow linearly in the length, and how does it compare to torch's?"""
    label = lambda peer, length: f"{peer} at S {length}"
    jobs = []
    for peer in (_JFLEX, _TORCH):
        for S in sizes.lengths:
            shape: dict[str, Any] = {"length": S, "heads": sizes.heads, "head_size": sizes.head_size}
            if peer == _TORCH:
                variables = {**SHARED_GPU, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
                jobs.append(Job(label(peer, S), _PROBES, "torch_memory", shape, variables))
            else:
                shape["implementation"] = sizes.implementation
                jobs.append(Job(label(peer, S), _PROBES, "jax_memory", shape))
    found, remarks = run_jobs(jobs, run)

    def series(peer: str, name: str) -> dict[int, float]:
        each = {S: (found.get(label(peer, S)) or {}).get(name) for S in sizes.lengths}
        return {S: size for S, size in each.items() if size is not None}

    every = {
        f"planned by XLA, {_JFLEX}": series(_JFLEX, "planned"),
        f"peak of the allocator, {_JFLEX}": series(_JFLEX, "peak"),
        f"peak of the allocator, {_TORCH}": series(_TORCH, "peak"),
    }
    records = [
        Record.single(f"{name}, S {S}", round(x / 1e6, 1), "MB") for name, one in every.items() for S, x in one.items()
    ]
    records += _memory_details(sizes, every, series(_JFLEX, "block_mask"))
    if covered := [S for S in sizes.lengths if (found.get(label(_JFLEX, S)) or {}).get("covered")]:
        remarks.append(f"The peak of the preparation was above that of the run, at S {covered}: the run's is less.")
    return records, remarks


def _memory_details(sizes: MemorySizes, every: dict[str, dict[int, float]], lists: dict[int, float]) -> list[Record]:
    """The results' and the BlockMask's own bytes, and the growth per token."""
    first, last = sizes.lengths[0], sizes.lengths[-1]
    results = 4 * last * sizes.heads * sizes.head_size * 2
    name = f"of which the results themselves, out and three gradients, S {last}"
    records = [Record.single(name, results / 1e6, "MB")]
    records += [Record.single(f"lists of the BlockMask, an input, S {S}", x / 1e6, "MB") for S, x in lists.items()]
    for name, one in every.items():
        for S in (S for S in one if first in one and first != S):
            growth = round((one[S] / S) / (one[first] / first), 3)
            records.append(Record.single(f"bytes per token relative to S {first}, {name}, S {S}", growth, "x"))
    return records


def block_mask(sizes: MaskSizes = _MASK, run: RunJob = run_job) -> Measured:
    """What does it cost to make a BlockMask of a long sequence on the device?"""
    jobs, masks = [], ("documents", "causal")
    for mask in masks:
        shape = {"length": sizes.length, "mask": mask, "runs": sizes.runs}
        jobs.append(Job(f"jflex, {mask}", _PROBES, "jax_block_mask", shape))
    for mask in masks:
        for compiled in (True, False):
            shape = {"length": sizes.length, "mask": mask, "runs": sizes.runs, "compiled": compiled}
            label = f"torch {'compiled' if compiled else 'eager'}, {mask}"
            jobs.append(Job(label, _PROBES, "torch_block_mask", shape))
    found, remarks = run_jobs(jobs, run)
    records = []
    for label, answer in found.items():
        for kind, name in (("wall", "time"), ("device", "time of the kernels alone")):
            if answer.get(kind):
                records.append(_milliseconds(f"{name}, {label}", answer[kind]))
        for kind, name in (("peak", "peak of the allocator"), ("planned", "planned by XLA")):
            if answer.get(kind) is not None:
                records.append(Record.single(f"{name}, {label}", round(answer[kind] / 1e6, 2), "MB"))
        records.append(Record.single(f"sparsity, {label}", round(answer["sparsity"], 2), "%"))
        if answer.get("covered"):
            remarks.append(f"{label}: the peak of the preparation was above that of the run, so the run's is less.")
    return records, remarks


def _milliseconds(name: str, seconds: Sequence[float]) -> Record:
    summary = Summary.of([1e3 * x for x in seconds])
    median, low, high = (float(f"{x:.4g}") for x in summary[:3])
    return Record(name, Summary(median, low, high, summary.runs), "ms")


def first_call(sizes: CallSizes = _CALL, run: RunJob = run_job) -> Measured:
    """How long is it from a fresh process to the first result of forward and backward?"""
    # Once before, so that no process is the one that reads JAX or torch from the disk.
    run_jobs([Job("JAX", _PROBES, "jax_imported", {}), Job("torch", _PROBES, "torch_imported", {})], run)
    shape = {"length": sizes.length, "heads": sizes.heads, "head_size": sizes.head_size}
    ours = {**shape, "implementation": sizes.implementation}
    with tempfile.TemporaryDirectory() as folder:
        cached = {**ours, "cache": f"{folder}/jax"}
        inductor = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
        inductor = {**SHARED_GPU, **inductor}
        jobs = [
            Job("jflex", _PROBES, "jax_first_call", {**ours, "cache": None}),
            Job("jflex, filling JAX's persistent cache", _PROBES, "jax_first_call", cached),
            Job("jflex, reading JAX's persistent cache", _PROBES, "jax_first_call", cached),
            Job(f"{_TORCH}, empty caches", _PROBES, "torch_first_call", shape, inductor),
            Job(f"{_TORCH}, reading its caches", _PROBES, "torch_first_call", shape, inductor),
        ]
        started_now = lambda job: job._replace(arguments={**job.arguments, "started": time.time()})
        found, remarks = run_jobs(jobs, lambda job: run(started_now(job)), at_once=1)
    records = []
    for label, answer in found.items():
        steps = {name: x for name, x in answer.items() if name != "cache"}
        records += [Record.single(f"{label}: {name}", round(x, 3), "s") for name, x in steps.items()]
        if "cache" in answer:
            remarks.append(f"{label}: {answer['cache']}")
    return records, remarks


QUESTIONS = {
    "memory": Question(
        "memory of forward and backward above the inputs, 12 packed causal documents; B 1, H 16, D 64, bfloat16; each "
        "in a fresh process",
        memory,
    ),
    "block_mask": Question(
        "create_block_mask, S 131072, blocks of 128, jitted and compiled before; documents: 12 packed causal ones",
        block_mask,
    ),
    "first_call": Question(
        "from a fresh process to the first result of causal forward and backward; B 1, H 16, S 4096, D 64, bfloat16",
        first_call,
    ),
}


def main(words: Sequence[str] | None = None) -> None:
    """The command."""
    command.run("gpu", QUESTIONS, words, on_gpu=True)

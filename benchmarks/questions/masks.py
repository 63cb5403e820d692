"""Making BlockMasks of long sequences, on a CPU or a GPU: ``python -m benchmarks masks``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from benchmarks.environment import gpu_facts
from benchmarks.questions import command
from benchmarks.questions.command import Measured, Questions
from benchmarks.results.schema import Record
from benchmarks.run.jobs import Job, RunJob, run_job

QUESTIONS = Questions()
LENGTHS = (4096, 16384, 131072, 1048576)
KINDS = ("documents", "window", "causal")
_RUNS = 5
_FIELDS = {
    "eager": "s, eagerly, first call with compilation",
    "eager_again": "ms, eagerly, later calls",
    "jit": "s, inside jit, first call with compilation",
    "jit_again": "ms, inside jit, later calls",
    "tables": "MB, index tables, made eagerly",
    "tables_of_jit": "MB, index tables, made inside jit",
    "peak": "MB, peak of the allocator inside jit",
}


@QUESTIONS.of(
    "create_block_mask, blocks of 128, one mask for all heads: 64 causal documents, their ids traced inside jit; a "
    "causal window of 4096; causal; each in fresh processes"
)
def long_masks(lengths: Sequence[int] = LENGTHS, run: RunJob = run_job) -> Measured:
    """How long does it take to make the BlockMask of a long sequence, and how many bytes are its tables?"""
    records = []
    for length in lengths:
        for kind in KINDS:
            shape = {"length": length, "kind": kind}
            found = [run(Job(kind, __name__, "probe", shape)) for _ in range(3)]
            for field, label in _FIELDS.items():
                unit, _, name = label.partition(", ")
                values = [answer[field] for answer in found if answer[field] is not None]
                if values:
                    records.append(Record.of(f"{name}, {kind}, S {length}", values, unit, 3))
    return records, []


def probe(length: int, kind: str) -> dict[str, Any]:
    """One mask, in a process that has computed nothing with jflex yet."""
    import jax
    import jax.numpy as jnp

    import jflex

    # What JAX compiles for itself at the start is not counted.
    ids = jax.block_until_ready(jnp.arange(length, dtype=jnp.int32) * 64 // length)

    def make(ids: jax.Array) -> jflex.BlockMask:
        mods = {
            "documents": lambda b, h, q_idx, kv_idx: (ids[q_idx] == ids[kv_idx]) & (q_idx >= kv_idx),
            "window": lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx < 4096),
            "causal": lambda b, h, q_idx, kv_idx: q_idx >= kv_idx,
        }
        return jflex.create_block_mask(mods[kind], None, None, length, length)

    eager, eager_again, made = _times(make, ids)
    jax.clear_caches()
    jit, jit_again, of_jit = _times(jax.jit(make), ids)
    stats = jax.devices()[0].memory_stats()
    size = lambda mask: sum(x.nbytes for x in mask.lists) / 1e6
    return {
        "eager": eager, "eager_again": 1e3 * eager_again, "jit": jit, "jit_again": 1e3 * jit_again,
        "tables": size(made), "tables_of_jit": size(of_jit),
        "peak": stats["peak_bytes_in_use"] / 1e6 if stats else None,
    }  # fmt: skip


def _times(make: Any, ids: Any) -> tuple[float, float, Any]:
    """Seconds of the first call, the median of later ones, and the mask."""
    import jax

    seconds, mask = [], None
    for _ in range(1 + _RUNS):
        started = time.perf_counter()
        mask = jax.block_until_ready(make(ids))
        seconds.append(time.perf_counter() - started)
    return seconds[0], sorted(seconds[1:])[_RUNS // 2], mask


def main(words: Sequence[str] | None = None) -> None:
    """The command."""
    command.run("masks", QUESTIONS, words, on_gpu=bool(gpu_facts()))

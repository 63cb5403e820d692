"""How much memory does `create_block_mask` take for packed documents, compilation included?"""

from __future__ import annotations

from typing import Any

from benchmarks.children import in_fresh_process
from benchmarks.results import Figure
from benchmarks.timing import figure

TITLE = "memory of create_block_mask, 12 packed causal documents, blocks of 128; fresh processes, above the baseline"
LENGTHS = (8192, 32768)


def measure() -> list[Figure]:
    figures = []
    for length in LENGTHS:
        runs = [in_fresh_process(__name__, "probe", length=length) for _ in range(3)]
        bar = {"at_most": 300.0} if length == 32768 else {}
        figures.append(figure(f"peak at S {length}", [run["megabytes"] for run in runs], "MB", 3, **bar))
        figures.append(figure(f"first call at S {length}", [run["seconds"] for run in runs], "s", 3))
        figures.append(figure(f"sparsity at S {length}", [run["sparsity"] for run in runs], "%", 3))
    return figures


def probe(length: int) -> dict[str, Any]:
    """One mask, in a process that has computed nothing with jflex yet."""
    import time

    import jax
    import jax.numpy as jnp

    import jflex
    from benchmarks.memory import PeakAbove
    from jflex.masks import causal, document

    documents = jnp.arange(length, dtype=jnp.int32) * 12 // length
    jax.block_until_ready(documents)
    peak, started = PeakAbove(), time.perf_counter()
    mask_mod = jflex.and_masks(causal(), document(documents))
    block_mask = jflex.create_block_mask(mask_mod, None, None, length, length)
    jax.block_until_ready(block_mask)
    seconds, megabytes = time.perf_counter() - started, peak.megabytes()
    return {"megabytes": megabytes, "seconds": seconds, "sparsity": float(block_mask.sparsity())}

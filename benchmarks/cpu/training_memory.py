"""Does the memory of forward and backward grow linearly in the length?"""

from __future__ import annotations

import itertools
from typing import Any

from benchmarks.children import in_fresh_process
from benchmarks.results import Figure
from benchmarks.timing import figure

TITLE = "memory of `xla` forward and backward, causal documents of 1024 tokens; B 1, H 4, D 64, float32"
LENGTHS = (4096, 8192, 16384)


def measure() -> list[Figure]:
    figures, peaks = [], []
    for length in LENGTHS:
        runs = [in_fresh_process(__name__, "probe", length=length) for _ in range(3)]
        peaks.append(figure(f"peak above the inputs at S {length}", [run["megabytes"] for run in runs], "MB", 3))
        figures.append(peaks[-1])
        planned = {name: in_fresh_process(__name__, "planned", length=length, dense=name != "jflex")
                   for name in ("jflex", "dense jnp")}  # fmt: skip
        figures += [Figure(f"planned by XLA at S {length}, {name}", x, "MB") for name, x in planned.items()]
    growth = [b.value / a.value for a, b in itertools.pairwise(peaks)]
    figures += [Figure(f"growth of the peak from S {a} to {b}", round(x, 2), "x", at_most=2.2)
                for (a, b), x in zip(itertools.pairwise(LENGTHS), growth, strict=True)]  # fmt: skip
    return figures


def probe(length: int) -> dict[str, Any]:
    """The peak of one call above what there was after it had been compiled."""
    import jax

    from benchmarks.memory import PeakAbove

    compiled, arguments = _compiled(length, dense=False)
    jax.block_until_ready(arguments)
    peak = PeakAbove()
    jax.block_until_ready(compiled(*arguments))
    return {"megabytes": peak.megabytes()}


def planned(length: int, dense: bool) -> float:
    """What XLA plans to hold besides the inputs: temporaries and results, in MB."""
    plan = _compiled(length, dense)[0].memory_analysis()
    return round((plan.temp_size_in_bytes + plan.output_size_in_bytes) / 1e6, 1)


def _compiled(length: int, dense: bool) -> tuple[Any, tuple[Any, ...]]:
    import jax
    import jax.numpy as jnp

    import jflex
    from benchmarks.baselines import dense_masked, forward_and_backward
    from jflex.masks import causal, document

    documents = jnp.arange(length, dtype=jnp.int32) // 1024
    mask_mod = jflex.and_masks(causal(), document(documents))
    block_mask = jflex.create_block_mask(mask_mod, None, None, length, length)

    def blockwise(query, key, value):
        return jflex.flex_attention(query, key, value, block_mask=block_mask, implementation="xla")

    def masked(query, key, value):
        index = jnp.arange(length)
        visible = (index[:, None] >= index) & (documents[:, None] == documents)
        return dense_masked(query, key, value, visible)

    arguments = tuple(jax.random.normal(jax.random.key(0), (1, length, 4, 64)) for _ in range(4))
    both = jax.jit(forward_and_backward(masked if dense else blockwise))
    return both.lower(*arguments).compile(), arguments

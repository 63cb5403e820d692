"""What does it cost to make a BlockMask of a long sequence on the device?"""

from __future__ import annotations

import statistics
from typing import Any, NamedTuple

from benchmarks.gpu.asking import Ask, Question, answers, ask
from benchmarks.results import Figure

TITLE = "create_block_mask, S 131072, blocks of 128, jitted and compiled before; documents: 12 packed causal ones"
DOCUMENTS = 12
MASKS = ("documents", "causal")


class Sizes(NamedTuple):
    """What is asked."""

    length: int = 131072
    runs: int = 11


FULL = Sizes()


def measure(sizes: Sizes = FULL, ask_one: Ask = ask) -> tuple[list[Figure], list[str]]:
    found, remarks = answers(_questions(sizes), ask_one)
    figures = []
    for label, answer in found.items():
        own = label.startswith("jflex")
        for kind, name in (("wall", "time"), ("device", "time of the kernels alone")):
            if answer.get(kind):
                bar = {"at_most": 100.0} if own and kind == "wall" else {}
                figures.append(_figure(f"{name}, {label}", [1e3 * x for x in answer[kind]], "ms", bar))
        for kind, name in (("peak", "peak of the allocator"), ("planned", "planned by XLA")):
            if answer.get(kind) is not None:
                bar = {"at_most": 1000.0} if own else {}
                figures.append(Figure(f"{name}, {label}", round(answer[kind] / 1e6, 2), "MB", **bar))
        figures.append(Figure(f"sparsity, {label}", round(answer["sparsity"], 2), "%"))
        if answer.get("covered"):
            remarks.append(f"{label}: above the peak of the run was that of the preparation, so the run's is less.")
    return figures, remarks


def _figure(name: str, values: list[float], unit: str, bar: dict[str, float]) -> Figure:
    low, median, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    short = lambda x: float(f"{x:.4g}")
    return Figure(name, short(median), unit, short(low), short(high), len(values), **bar)


def _questions(sizes: Sizes) -> list[Question]:
    S, runs = sizes
    questions = [Question(f"jflex, {mask}", __name__, "probe", {"length": S, "mask": mask, "runs": runs})
                 for mask in MASKS]  # fmt: skip
    for mask in MASKS:
        for compiled in (True, False):
            label = f"torch {'compiled' if compiled else 'eager'}, {mask}"
            arguments = {"length": S, "mask": mask, "compiled": compiled, "runs": runs}
            questions.append(Question(label, "benchmarks.gpu.torch_probes", "block_mask", arguments))
    return questions


def probe(length: int, mask: str, runs: int) -> dict[str, Any]:
    """Seconds, bytes and sparsity of one mask; the peak is None on a CPU."""
    import time

    import jax
    import jax.numpy as jnp

    import jflex
    from benchmarks.gpu.asking import alone
    from jflex.masks import causal, document

    ids = jax.block_until_ready(jnp.arange(length, dtype=jnp.int32) * DOCUMENTS // length)

    def build(ids):
        mask_mod = causal() if mask == "causal" else jflex.and_masks(causal(), document(ids))
        return jflex.create_block_mask(mask_mod, None, None, length, length)

    compiled = jax.jit(build).lower(ids).compile()
    device = jax.devices()[0]
    before = device.memory_stats()
    made = jax.block_until_ready(compiled(ids))
    after = device.memory_stats()
    plan = compiled.memory_analysis()
    with alone():
        wall = []
        for _ in range(runs):
            started = time.perf_counter()
            jax.block_until_ready(compiled(ids))
            wall.append(time.perf_counter() - started)
        kernels = None
        if device.platform == "gpu":
            from benchmarks.timing import device_seconds

            kernels = device_seconds(lambda: compiled(ids), runs)
    return {
        "wall": wall,
        "device": kernels,
        "planned": plan.temp_size_in_bytes + plan.output_size_in_bytes,
        "peak": after["peak_bytes_in_use"] - before["bytes_in_use"] if after else None,
        "covered": bool(after) and after["peak_bytes_in_use"] <= before["peak_bytes_in_use"],
        "sparsity": made.sparsity(),
    }

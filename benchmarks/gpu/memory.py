"""Does the memory of forward and backward grow linearly in the length, and how does it compare to torch's?"""

from __future__ import annotations

from typing import Any, NamedTuple

from benchmarks.gpu.asking import Ask, Question, answers, ask
from benchmarks.results import Figure

TITLE = (
    "memory of forward and backward above the inputs, 12 packed causal documents; B 1, H 16, D 64, bfloat16; each in a "
    "fresh process"
)
DOCUMENTS = 12
_JFLEX, _TORCH = "jflex triton", "torch FlexAttention"


class Sizes(NamedTuple):
    """What is asked."""

    lengths: tuple[int, ...] = (8192, 16384, 32768, 65536)
    heads: int = 16
    head_size: int = 64
    implementation: str = "triton"


FULL = Sizes()


def measure(sizes: Sizes = FULL, ask_one: Ask = ask) -> tuple[list[Figure], list[str]]:
    questions = [_question(peer, length, sizes) for peer in (_JFLEX, _TORCH) for length in sizes.lengths]
    found, remarks = answers(questions, ask_one)
    series = {
        "planned by XLA, jflex triton": _series(found, _JFLEX, sizes, "planned"),
        "peak of the allocator, jflex triton": _series(found, _JFLEX, sizes, "peak"),
        "peak of the allocator, torch FlexAttention": _series(found, _TORCH, sizes, "peak"),
    }
    figures = [
        Figure(f"{name}, S {length}", round(size / 1e6, 1), "MB")
        for name, values in series.items()
        for length, size in values.items()
    ]
    first, last = sizes.lengths[0], sizes.lengths[-1]
    results = 4 * last * sizes.heads * sizes.head_size * 2
    figures.append(Figure(f"of which the results themselves, out and three gradients, S {last}", results / 1e6, "MB"))
    lists = _series(found, _JFLEX, sizes, "block_mask")
    figures += [Figure(f"lists of the BlockMask, an input, S {length}", x / 1e6, "MB") for length, x in lists.items()]
    for name, values in series.items():
        bar = {"at_most": 1.1} if "jflex" in name else {}
        figures += [
            Figure(
                f"bytes per token relative to S {first}, {name}, S {length}", _growth(values, first, length), "x", **bar
            )
            for length in values
            if length != first and first in values
        ]
    covered = [x for x in sizes.lengths if (found.get(_label(_JFLEX, x)) or {}).get("covered")]
    if covered:
        remarks.append(f"Above the peak of the run was that of the preparation, at S {covered}: the run's is less.")
    return figures, remarks


def _growth(values: dict[int, int], first: int, length: int) -> float:
    return round((values[length] / length) / (values[first] / first), 3)


def _series(found: dict[str, Any], peer: str, sizes: Sizes, name: str) -> dict[int, int]:
    each = {length: (found.get(_label(peer, length)) or {}).get(name) for length in sizes.lengths}
    return {length: size for length, size in each.items() if size is not None}


def _label(peer: str, length: int) -> str:
    return f"{peer} at S {length}"


def _question(peer: str, length: int, sizes: Sizes) -> Question:
    arguments = {"length": length, "heads": sizes.heads, "head_size": sizes.head_size}
    if peer == _TORCH:
        return Question(_label(peer, length), "benchmarks.gpu.torch_probes", "memory", arguments,
                        {"TORCHINDUCTOR_COMPILE_THREADS": "1"})  # fmt: skip
    return Question(_label(peer, length), __name__, "probe", arguments | {"implementation": sizes.implementation})


def probe(length: int, heads: int, head_size: int, implementation: str) -> dict[str, Any]:
    """Bytes above the inputs: what XLA plans, and the peak of the allocator in one call (None on a CPU)."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import jflex
    from benchmarks.baselines import forward_and_backward
    from jflex.masks import causal, document

    documents = jnp.arange(length, dtype=jnp.int32) * DOCUMENTS // length
    mask_mod = jflex.and_masks(causal(), document(documents))
    block_mask = jax.block_until_ready(jflex.create_block_mask(mask_mod, None, None, length, length))

    def both(block_mask, query, key, value, cotangent):
        attend = lambda q, k, v: jflex.flex_attention(q, k, v, block_mask=block_mask, implementation=implementation)
        return forward_and_backward(attend)(query, key, value, cotangent)

    # Copied from the host: random numbers made on the device would leave a peak of their own.
    pattern = np.random.default_rng(0).normal(size=1 << 16).astype(jnp.bfloat16)
    arrays = [jax.device_put(np.resize(np.roll(pattern, i), (1, length, heads, head_size))) for i in range(4)]
    compiled = jax.jit(both).lower(block_mask, *arrays).compile()
    jax.block_until_ready(arrays)
    before = jax.devices()[0].memory_stats()
    jax.block_until_ready(compiled(block_mask, *arrays))
    after = jax.devices()[0].memory_stats()
    plan = compiled.memory_analysis()
    return {
        "planned": plan.temp_size_in_bytes + plan.output_size_in_bytes,
        "peak": after["peak_bytes_in_use"] - before["bytes_in_use"] if after else None,
        "covered": bool(after) and after["peak_bytes_in_use"] <= before["peak_bytes_in_use"],
        "block_mask": sum(x.nbytes for x in jax.tree.leaves(block_mask.lists)),
    }

"""How long is it from a fresh process to the first result of forward and backward?"""

from __future__ import annotations

import tempfile
import time
from typing import Any, NamedTuple

from benchmarks.gpu.asking import Ask, Question, answers, ask
from benchmarks.results import Figure

TITLE = "from a fresh process to the first result of causal forward and backward; B 1, H 16, S 4096, D 64, bfloat16"
_TORCH = "benchmarks.gpu.torch_probes"


class Sizes(NamedTuple):
    """What is asked."""

    length: int = 4096
    heads: int = 16
    head_size: int = 64
    implementation: str = "triton"


FULL = Sizes()


def measure(sizes: Sizes = FULL, ask_one: Ask = ask) -> tuple[list[Figure], list[str]]:
    # Once before, so that no process is the one that reads JAX or torch from the disk.
    answers([Question("JAX", __name__, "imported", {}), Question("torch", _TORCH, "imported", {})], ask_one)
    with tempfile.TemporaryDirectory() as folder:
        found, remarks = answers(_questions(sizes, folder), lambda question: ask_one(_started_now(question)), at_once=1)
    figures = []
    for label, answer in found.items():
        figures += [Figure(f"{label}: {name}", round(x, 3), "s") for name, x in answer.items() if name != "cache"]
        if "cache" in answer:
            remarks.append(f"{label}: {answer['cache']}")
    return figures, remarks


def _questions(sizes: Sizes, folder: str) -> list[Question]:
    shape = {"length": sizes.length, "heads": sizes.heads, "head_size": sizes.head_size}
    ours = shape | {"implementation": sizes.implementation}
    inductor = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
    return [
        Question("jflex", __name__, "probe", ours | {"cache": None}),
        Question("jflex, filling JAX's persistent cache", __name__, "probe", ours | {"cache": f"{folder}/jax"}),
        Question("jflex, reading JAX's persistent cache", __name__, "probe", ours | {"cache": f"{folder}/jax"}),
        Question("torch FlexAttention, empty caches", _TORCH, "first_call", shape, inductor),
        Question("torch FlexAttention, reading its caches", _TORCH, "first_call", shape, inductor),
    ]


def _started_now(question: Question) -> Question:
    return question._replace(arguments=question.arguments | {"started": time.time()})


def imported() -> float:
    """Nothing but the import and the start on the GPU, so that the files have been read once."""
    import jax.numpy as jnp

    import jflex

    return float(jnp.zeros(1)[0]) + 0.0 * callable(jflex.flex_attention)


def probe(
    started: float, length: int, heads: int, head_size: int, implementation: str, cache: str | None
) -> dict[str, Any]:
    """Seconds of each step from the start of the process, and what the persistent cache did."""
    marks = [("start of Python", started, time.time())]

    def mark(name: str) -> None:
        marks.append((name, marks[-1][2], time.time()))

    import jax
    import jax.numpy as jnp
    import numpy as np

    import jflex
    from benchmarks.baselines import forward_and_backward
    from jflex.masks import causal

    mark("import")
    events = _use_cache(jax, cache)
    pattern = np.random.default_rng(0).normal(size=(4, 1, length, heads, head_size)).astype(jnp.bfloat16)
    arrays = jax.block_until_ready([jax.device_put(x) for x in pattern])
    mark("start of the GPU and inputs")
    block_mask = jflex.create_block_mask(causal(), None, None, length, length)
    jax.block_until_ready(block_mask)
    mark("create_block_mask")

    def both(block_mask, query, key, value, cotangent):
        attend = lambda q, k, v: jflex.flex_attention(q, k, v, block_mask=block_mask, implementation=implementation)
        return forward_and_backward(attend)(query, key, value, cotangent)

    lowered = jax.jit(both).lower(block_mask, *arrays)
    mark("trace and lower")
    compiled = lowered.compile()
    mark("compile")
    jax.block_until_ready(compiled(block_mask, *arrays))
    mark("run")
    total = marks[-1][2] - started
    again = time.perf_counter()
    jax.block_until_ready(compiled(block_mask, *arrays))
    seconds = {"in all": total} | {name: end - begin for name, begin, end in marks}
    seconds["second call"] = time.perf_counter() - again
    return seconds if cache is None else seconds | {"cache": f"{events['hits']} hits, {events['misses']} misses"}


def _use_cache(jax: Any, folder: str | None) -> dict[str, int]:
    """Points JAX to its persistent cache, for programs however small, and counts what it does."""
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

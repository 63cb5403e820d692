"""How long does the first call take in a fresh process, and does a second one with a fresh lambda compile again?"""

from __future__ import annotations

from typing import Any

from benchmarks.children import in_fresh_process
from benchmarks.results import Figure
from benchmarks.timing import figure

TITLE = "eager calls of `xla` with ALiBi and a causal BlockMask; B 1, S 512, H 4, D 64; each in a fresh process"
PROCESSES = 5


def measure() -> list[Figure]:
    runs = [in_fresh_process(__name__, "probe") for _ in range(PROCESSES)]
    seconds = [figure(name, [run["seconds"][name] for run in runs], "s", 3) for name in runs[0]["seconds"]]
    compiled = [figure(name, [run["compiled"][name] for run in runs], "", at_most=0.0) for name in runs[0]["compiled"]]
    return seconds + compiled


def probe() -> dict[str, Any]:
    """The calls of one process."""
    import time

    started = time.perf_counter()
    import jax
    import jax.numpy as jnp

    jax.block_until_ready(jnp.ones(3) + 1)
    ready = time.perf_counter()
    import jflex

    seconds = {"import jflex, JAX being there": time.perf_counter() - ready}
    del started
    from benchmarks.compilations import counted

    query = jax.random.normal(jax.random.key(0), (1, 512, 4, 64))
    compiled = {}

    def alibi():
        slopes = 2.0 ** -jnp.arange(1.0, 5.0)
        return lambda score, b, h, q_idx, kv_idx: score - slopes[h] * (q_idx - kv_idx).astype(jnp.float32)

    def timed(name: str, function) -> Any:
        jax.block_until_ready(query)
        started = time.perf_counter()
        with counted() as count:
            result = jax.block_until_ready(function())
        seconds[name] = time.perf_counter() - started
        compiled[name] = count.programs
        return result

    def make_mask():
        return jflex.create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, 512, 512)

    attend = lambda q, block_mask, mod: jflex.flex_attention(q, q, q, mod, block_mask, implementation="xla")
    loss = lambda q, block_mask, mod: attend(q, block_mask, mod).sum()
    block_mask = timed("create_block_mask, first call", make_mask)
    timed("forward, first call", lambda: attend(query, block_mask, alibi()))
    timed("gradient, first call", lambda: jax.grad(loss)(query, block_mask, alibi()))
    again = ("create_block_mask, second call with a fresh lambda", "forward, second call with a fresh lambda",
             "gradient, second call with a fresh lambda")  # fmt: skip
    block_mask = timed(again[0], make_mask)
    mods = [alibi(), alibi()]
    timed(again[1], lambda: attend(query, block_mask, mods[0]))
    timed(again[2], lambda: jax.grad(loss)(query, block_mask, mods[1]))
    return {"seconds": seconds, "compiled": {f"programs compiled in {name}": compiled[name] for name in again}}

"""Probes of `benchmarks.questions.gpu`, each called in a process of its own.

Importing this imports neither JAX nor torch, so that a probe may time that.
"""

from __future__ import annotations

import time
from typing import Any

from benchmarks.run.jobs import exclusive

DOCUMENTS = 12


def jax_memory(length: int, heads: int, head_size: int, implementation: str) -> dict[str, Any]:
    """Bytes above the inputs: what XLA plans, and the peak of the allocator in one call (None on a CPU)."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import jflex
    from benchmarks.peers.jax_peers import forward_and_backward
    from jflex.masks import causal, document

    documents = jnp.arange(length, dtype=jnp.int32) * DOCUMENTS // length
    mask_mod = jflex.and_masks(causal(), document(documents))
    block_mask = jax.block_until_ready(jflex.create_block_mask(mask_mod, None, None, length, length))

    def both(block_mask: Any, query: Any, key: Any, value: Any, cotangent: Any) -> Any:
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
    plan: Any = compiled.memory_analysis()
    return {
        "planned": plan.temp_size_in_bytes + plan.output_size_in_bytes,
        "peak": after["peak_bytes_in_use"] - before["bytes_in_use"] if after else None,
        "covered": bool(after) and after["peak_bytes_in_use"] <= before["peak_bytes_in_use"],
        "block_mask": sum(x.nbytes for x in jax.tree.leaves(block_mask.lists)),
    }


def jax_block_mask(length: int, mask: str, runs: int) -> dict[str, Any]:
    """Seconds, bytes and sparsity of one mask; the peak is None on a CPU."""
    import jax
    import jax.numpy as jnp

    import jflex
    from jflex.masks import causal, document

    ids = jax.block_until_ready(jnp.arange(length, dtype=jnp.int32) * DOCUMENTS // length)

    def build(ids: Any) -> Any:
        mask_mod = causal() if mask == "causal" else jflex.and_masks(causal(), document(ids))
        return jflex.create_block_mask(mask_mod, None, None, length, length)

    compiled = jax.jit(build).lower(ids).compile()
    device = jax.devices()[0]
    before = device.memory_stats()
    made = jax.block_until_ready(compiled(ids))
    after = device.memory_stats()
    plan: Any = compiled.memory_analysis()
    with exclusive():
        wall = []
        for _ in range(runs):
            started = time.perf_counter()
            jax.block_until_ready(compiled(ids))
            wall.append(time.perf_counter() - started)
        kernels = None
        if device.platform == "gpu":
            from benchmarks.run.timing import device_seconds

            kernels = device_seconds(lambda: compiled(ids), runs)
    return {
        "wall": wall,
        "device": kernels,
        "planned": plan.temp_size_in_bytes + plan.output_size_in_bytes,
        "peak": after["peak_bytes_in_use"] - before["bytes_in_use"] if after else None,
        "covered": bool(after) and after["peak_bytes_in_use"] <= before["peak_bytes_in_use"],
        "sparsity": made.sparsity(),
    }


def jax_imported() -> float:
    """Nothing but the import and the start on the GPU, so that the files have been read once."""
    import jax.numpy as jnp

    import jflex

    return float(jnp.zeros(1)[0]) + 0.0 * callable(jflex.flex_attention)


def jax_first_call(
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
    from benchmarks.peers.jax_peers import forward_and_backward
    from jflex.masks import causal

    mark("import")
    events = _use_cache(jax, cache)
    pattern = np.random.default_rng(0).normal(size=(4, 1, length, heads, head_size)).astype(jnp.bfloat16)
    arrays = jax.block_until_ready([jax.device_put(x) for x in pattern])
    mark("start of the GPU and inputs")
    block_mask = jflex.create_block_mask(causal(), None, None, length, length)
    jax.block_until_ready(block_mask)
    mark("create_block_mask")

    def both(block_mask: Any, query: Any, key: Any, value: Any, cotangent: Any) -> Any:
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


def torch_memory(length: int, heads: int, head_size: int) -> dict[str, Any]:
    """The allocator's peak in forward and backward above the inputs, in bytes, after it has been compiled."""
    import torch

    query, key, value, cotangent = (
        torch.randn(1, heads, length, head_size, device="cuda", dtype=torch.bfloat16) for _ in range(4)
    )
    both = _forward_and_backward(_causal_documents(length), query, key, value, cotangent)
    both()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    both()
    torch.cuda.synchronize()
    return {"peak": torch.cuda.max_memory_allocated() - before}


def _causal_documents(length: int) -> Any:
    import torch
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(_documents_mod(length), None, None, length, length, device=torch.device("cuda"))


def _documents_mod(length: int) -> Any:
    import torch

    ids = torch.arange(length, device="cuda", dtype=torch.int32) * DOCUMENTS // length
    return lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (ids[q_idx] == ids[kv_idx])


def _causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def _forward_and_backward(block_mask: Any, query: Any, key: Any, value: Any, cotangent: Any) -> Any:
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)
    leaves = [x.requires_grad_() for x in (query, key, value)]

    def both() -> Any:
        out = compiled(query, key, value, block_mask=block_mask)
        return out, torch.autograd.grad(out, leaves, cotangent)

    return both


def torch_block_mask(length: int, mask: str, compiled: bool, runs: int) -> dict[str, Any]:
    """Seconds and peak bytes of `create_block_mask`, after a first call."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask

    mask_mod = _causal if mask == "causal" else _documents_mod(length)
    create = torch.compile(create_block_mask) if compiled else create_block_mask

    def build() -> Any:
        return create(mask_mod, None, None, length, length, device="cuda")

    if compiled:
        build()
    with exclusive():
        made = build()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before, seconds = torch.cuda.memory_allocated(), []
        for _ in range(runs):
            started = time.perf_counter()
            build()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
        peak = torch.cuda.max_memory_allocated() - before
        torch.cuda.empty_cache()  # of which the next process may need tens of GB
    return {"wall": seconds, "peak": peak, "sparsity": float(made.sparsity())}


def torch_imported() -> float:
    """Nothing but the import and the start on the GPU, so that the files have been read once."""
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    return float(torch.zeros(1, device="cuda").item()) + 0.0 * callable(flex_attention)


def torch_first_call(started: float, length: int, heads: int, head_size: int) -> dict[str, float]:
    """Seconds of each step from the start of the process to the first result of causal forward and backward."""
    marks = [("start of Python", started, time.time())]

    def mark(name: str) -> None:
        marks.append((name, marks[-1][2], time.time()))

    import torch
    from torch.nn.attention.flex_attention import create_block_mask

    mark("import")
    shape = (1, heads, length, head_size)
    query, key, value, cotangent = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    torch.cuda.synchronize()
    mark("start of the GPU and inputs")
    mask = create_block_mask(_causal, None, None, length, length, device="cuda")
    torch.cuda.synchronize()
    mark("create_block_mask")
    both = _forward_and_backward(mask, query, key, value, cotangent)
    both()
    torch.cuda.synchronize()
    mark("trace, lower, compile and run")
    seconds = {name: end - begin for name, begin, end in marks}
    total = marks[-1][2] - started
    again = time.perf_counter()
    both()
    torch.cuda.synchronize()
    return {"in all": total} | seconds | {"second call": time.perf_counter() - again}

"""Functions that `benchmarks.questions` calls in processes of their own, one for each measurement.

Importing this imports neither JAX nor torch, so that a probe may time that.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

DOCUMENTS = 12


class Stopwatch:
    """Seconds of each step of a process, since its start."""

    def __init__(self, started: float) -> None:
        self._started = self._last = started
        self._steps: dict[str, float] = {}
        self.mark("start of Python")

    def mark(self, name: str) -> None:
        """The end of a step."""
        now = time.time()
        self._steps[name], self._last = now - self._last, now

    def seconds(self, again: Callable[[], Any]) -> dict[str, float]:
        """In all, of each step, and of a second call."""
        total, started = self._last - self._started, time.perf_counter()
        again()
        return {"in all": total, **self._steps, "second call": time.perf_counter() - started}


# JAX.


def _jflex_forward_and_backward(implementation: str | None) -> Callable[..., Any]:
    import jflex
    from benchmarks.peers.jax_peers import forward_and_backward

    def both(block_mask: Any, query: Any, key: Any, value: Any, cotangent: Any) -> Any:
        attend = lambda q, k, v: jflex.flex_attention(q, k, v, block_mask=block_mask, implementation=implementation)
        return forward_and_backward(attend)(query, key, value, cotangent)

    return both


def _run_with_memory(compiled: Any, *arguments: Any) -> tuple[Any, dict[str, Any]]:
    """The results of a program, and bytes above its inputs: as XLA plans, and the allocator's peak (None on a CPU)."""
    import jax

    device, plan = jax.devices()[0], compiled.memory_analysis()
    before = device.memory_stats()
    results = jax.block_until_ready(compiled(*arguments))
    after = device.memory_stats()
    return results, {
        "planned": plan.temp_size_in_bytes + plan.output_size_in_bytes,
        "peak": after["peak_bytes_in_use"] - before["bytes_in_use"] if after else None,
        "covered": bool(after) and after["peak_bytes_in_use"] <= before["peak_bytes_in_use"],
    }


def jax_memory(
    length: int, heads: int, head_size: int, implementation: str | None, documents: int = DOCUMENTS, window: int = 0
) -> dict[str, Any]:
    """Bytes of forward and backward above the inputs, and of the BlockMask; `window` 0: whole documents."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from benchmarks.peers.jax_peers import causal_documents

    block_mask = causal_documents(jnp.arange(length, dtype=jnp.int32) * documents // length, window)
    jax.block_until_ready(block_mask.lists)
    # Copied from the host: random numbers made on the device would leave a peak of their own.
    pattern = np.random.default_rng(0).normal(size=1 << 16).astype(jnp.bfloat16)
    arrays = [jax.device_put(np.resize(np.roll(pattern, i), (1, length, heads, head_size))) for i in range(4)]
    compiled = jax.jit(_jflex_forward_and_backward(implementation)).lower(block_mask, *arrays).compile()
    jax.block_until_ready(arrays)
    _, memory = _run_with_memory(compiled, block_mask, *arrays)
    return {**memory, "block_mask": sum(x.nbytes for x in jax.tree.leaves(block_mask.lists))}


def jax_imported() -> None:
    """Nothing but the import and the start on the GPU, so that the files have been read once."""
    import jax.numpy as jnp

    import jflex  # noqa: F401

    jnp.zeros(1).block_until_ready()


def jax_first_call(
    started: float, length: int, heads: int, head_size: int, implementation: str, cache: str | None
) -> dict[str, Any]:
    """Seconds of each step from the start of the process, and what the persistent cache did."""
    watch = Stopwatch(started)
    import jax
    import jax.numpy as jnp
    import numpy as np

    import jflex
    from jflex.masks import causal

    both = _jflex_forward_and_backward(implementation)
    watch.mark("import")
    events = _use_cache(cache)
    pattern = np.random.default_rng(0).normal(size=(4, 1, length, heads, head_size)).astype(jnp.bfloat16)
    arrays = jax.block_until_ready([jax.device_put(x) for x in pattern])
    watch.mark("start of the GPU and inputs")
    block_mask = jax.block_until_ready(jflex.create_block_mask(causal(), None, None, length, length))
    watch.mark("create_block_mask")
    lowered = jax.jit(both).lower(block_mask, *arrays)
    watch.mark("trace and lower")
    compiled = lowered.compile()
    watch.mark("compile")
    run = lambda: jax.block_until_ready(compiled(block_mask, *arrays))
    run()
    watch.mark("run")
    seconds = watch.seconds(run)
    return seconds if cache is None else seconds | {"cache": f"{events['hits']} hits, {events['misses']} misses"}


def _use_cache(folder: str | None) -> dict[str, int]:
    """Points JAX to its persistent cache, for programs however small, and counts what it does."""
    import jax

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


# torch.


def _torch_mask_mod(mask: str, length: int) -> Callable[..., Any]:
    import torch

    if mask == "causal":
        return lambda b, h, q_idx, kv_idx: q_idx >= kv_idx
    ids = torch.arange(length, device="cuda", dtype=torch.int32) * DOCUMENTS // length
    return lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (ids[q_idx] == ids[kv_idx])


def _torch_forward_and_backward(mask: str, length: int, heads: int, head_size: int, mark: Callable[..., Any]) -> Any:
    """A compiled call; what is made before it is marked."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    shape = (1, heads, length, head_size)
    *inputs, cotangent = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    torch.cuda.synchronize()
    mark("start of the GPU and inputs")
    block_mask = create_block_mask(_torch_mask_mod(mask, length), None, None, length, length, device="cuda")
    torch.cuda.synchronize()
    mark("create_block_mask")
    compiled = torch.compile(flex_attention, dynamic=False)
    leaves = [x.requires_grad_() for x in inputs]

    def both() -> None:
        torch.autograd.grad(compiled(*leaves, block_mask=block_mask), leaves, cotangent)
        torch.cuda.synchronize()

    return both


def _torch_peak(call: Callable[[], Any]) -> tuple[Any, int]:
    """The result of a call, and the allocator's peak in it, in bytes."""
    import torch

    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    return result, torch.cuda.max_memory_allocated() - before


def torch_memory(length: int, heads: int, head_size: int) -> dict[str, Any]:
    """The allocator's peak in forward and backward above the inputs, after they have been compiled."""
    both = _torch_forward_and_backward("documents", length, heads, head_size, lambda name: None)
    both()
    return {"peak": _torch_peak(both)[1]}


def torch_imported() -> None:
    """Nothing but the import and the start on the GPU, so that the files have been read once."""
    import torch
    from torch.nn.attention.flex_attention import flex_attention  # noqa: F401

    torch.zeros(1, device="cuda").item()


def torch_first_call(started: float, length: int, heads: int, head_size: int) -> dict[str, float]:
    """Seconds of each step from the start of the process to the first result of causal forward and backward."""
    watch = Stopwatch(started)
    import torch.nn.attention.flex_attention  # noqa: F401

    watch.mark("import")
    both = _torch_forward_and_backward("causal", length, heads, head_size, watch.mark)
    both()
    watch.mark("trace, lower, compile and run")
    return watch.seconds(both)

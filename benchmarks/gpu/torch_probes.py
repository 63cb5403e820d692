"""What torch FlexAttention is asked, each in a process of its own; nothing here loads JAX."""

from __future__ import annotations

import time
from typing import Any

DOCUMENTS = 12


def memory(length: int, heads: int, head_size: int) -> dict[str, Any]:
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


def block_mask(length: int, mask: str, compiled: bool, runs: int) -> dict[str, Any]:
    """Seconds and peak bytes of `create_block_mask`, after a first call."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask

    from benchmarks.gpu.asking import alone

    mask_mod = _causal if mask == "causal" else _documents_mod(length)
    create = torch.compile(create_block_mask) if compiled else create_block_mask

    def build() -> Any:
        return create(mask_mod, None, None, length, length, device="cuda")

    if compiled:
        build()
    with alone():
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


def imported() -> float:
    """Nothing but the import and the start on the GPU, so that the files have been read once."""
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    return float(torch.zeros(1, device="cuda").item()) + 0.0 * callable(flex_attention)


def first_call(started: float, length: int, heads: int, head_size: int) -> dict[str, float]:
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

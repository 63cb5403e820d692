"""The torch peers where queries continue sequences. Loads torch, and not JAX."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import flex_attention

from benchmarks.problems import Problem
from benchmarks.requests import requests_of

_WORKSPACE_BYTES = 128 * 2**20  # what FlashInfer asks for


def flex_decode(problem: Problem, device: str, *, blocks: bool) -> Callable[..., Any]:
    """FlexAttention with its decode kernel forced.

    Args:
      problem: Of one token.
      device: ``"cuda"``; elsewhere nothing is compiled, and the kernel not forced.
      blocks: With the causal BlockMask of the last position, which hides nothing; without a BlockMask otherwise.
    """
    last = problem.S - problem.T
    block_mask = None
    if blocks:
        block_mask = flex_attention.create_block_mask(
            lambda b, h, q_idx, kv_idx: q_idx + last >= kv_idx, None, None, problem.T, problem.S, device=device
        )
    options = {"block_mask": block_mask, "enable_gqa": problem.Hq != problem.Hkv}
    if device != "cuda":
        return functools.partial(flex_attention.flex_attention, **options)
    compiled = torch.compile(flex_attention.flex_attention, dynamic=False)
    return functools.partial(compiled, **options, kernel_options={"BACKEND": "TRITON_DECODE"})


def flashinfer_decode(problem: Problem, device: str) -> Callable[..., Any]:
    """FlashInfer's batch decode over pages at random places.

    Raises:
      ImportError: It is not installed.
    """
    import flashinfer  # type: ignore

    keys = requests_of(problem).keys
    counts = torch.as_tensor(-(-keys // problem.page), dtype=torch.int32)
    indptr = torch.cat([torch.zeros(1, dtype=torch.int32), counts.cumsum(0, dtype=torch.int32)])
    pages = int(indptr[-1])
    dtype = getattr(torch, problem.dtype)
    draw = functools.partial(torch.randn, device=device, dtype=dtype)
    query = draw(problem.B, problem.Hq, problem.D)
    cache = tuple(draw(pages, problem.page, problem.Hkv, problem.D) for _ in range(2))
    workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    last = torch.as_tensor((keys - 1) % problem.page + 1, dtype=torch.int32)
    wrapper.plan(indptr.to(device), torch.randperm(pages, dtype=torch.int32, device=device), last.to(device),
                 problem.Hq, problem.Hkv, problem.D, problem.page, q_data_type=dtype, kv_data_type=dtype)  # fmt: skip
    return lambda: wrapper.run(query, cache)

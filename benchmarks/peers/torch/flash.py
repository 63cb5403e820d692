"""FlashAttention-4: CuTe kernels, which know some masks and the soft cap without a mod. Imports torch, and not JAX."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.peers.torch.pages import Pages
from benchmarks.problems import Problem
from benchmarks.variants import CAP, WINDOW, document_offsets


def arranged(problem: Problem, arrays: Sequence[Tensor]) -> list[Tensor]:
    """Arrays [B, H, length, D] in the order of FlashAttention, [B, length, H, D], or packed [B * length, H, D]."""
    packed = document_offsets(problem) is not None
    rows = [x.detach().transpose(1, 2).contiguous() for x in arrays]
    return [x.flatten(0, 1) if packed else x for x in rows]


def _options(problem: Problem) -> dict[str, Any]:
    """Names of the mask and the soft cap; a window counts keys before the query's own."""
    window = (min(WINDOW, problem.S // 2) - 1, 0) if problem.variant == "sliding_window" else (None, None)
    causal = problem.variant not in ("noop", "sliding_window")
    return {"causal": causal, "window_size": window, "softcap": CAP if problem.variant == "softcap" else 0.0}


def dense(problem: Problem, device: str) -> Callable[..., Tensor]:
    """``(query, key, value) -> out`` of `arranged` arrays, of sequences of varied lengths if there are documents."""
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func  # type: ignore

    options, offsets = _options(problem), document_offsets(problem)
    if offsets is None:
        return lambda *arrays: _out(flash_attn_func(*arrays, **options))
    options |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), torch.as_tensor(offsets, device=device))
    options |= dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), int(np.diff(offsets).max()))
    return lambda *arrays: _out(flash_attn_varlen_func(*arrays, **options))


def paged(problem: Problem, pages: Pages) -> Callable[[], Tensor]:
    """The queries over the pages: packed if their numbers vary, or else as [B, T, Hq, D], which are balanced better."""
    from flash_attn.cute import flash_attn_varlen_func  # type: ignore

    query, requests, put = pages.query, pages.requests, pages.put
    options = _options(problem) | {"page_table": put(pages.table), "seqused_k": put(requests.keys)}
    if problem.lengths == "mixed":
        options |= {"cu_seqlens_q": put(requests.indptr), "max_seqlen_q": problem.T}
    else:
        query = query.unflatten(0, (problem.B, problem.T))
    return lambda: _out(flash_attn_varlen_func(query, pages.keys, pages.values, **options)).reshape(pages.query.shape)


def _out(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result  # with its lse, in some versions

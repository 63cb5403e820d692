"""Queries and a cache in pages for the torch peers, and FlashInfer over it. Imports torch, and not JAX."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.problems import Problem, Requests, page_table, requests_of

_WORKSPACE_BYTES = 384 * 2**20  # for partial results of splits; FlashInfer recommends 128 MiB, BatchAttention takes 384
_QK_HEAD_DIM = 192  # of a head before absorption: 128 and 64 rotated, in DeepSeek-V2 and V3


class Pages(NamedTuple):
    """Packed queries [tokens, Hq, D], and keys and values [pages, page, Hkv, D or Dv]."""

    query: Tensor
    keys: Tensor
    values: Tensor  # of latent vectors, the first columns of the keys
    table: np.ndarray  # pages of each sequence, int32 [B, most pages]
    requests: Requests

    def put(self, array: np.ndarray) -> Tensor:
        """An array of integers on the device of the cache, int32."""
        return torch.as_tensor(array, dtype=torch.int32, device=self.keys.device)

    @property
    def workspace(self) -> Tensor:
        """Memory for a wrapper of FlashInfer."""
        return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=self.keys.device)

    def plan(self, rows: np.ndarray, table: np.ndarray, keys: np.ndarray) -> list[Tensor]:
        """Offsets of the queries of sequences, offsets of their pages, the pages, and numbers of keys."""
        counts = -(-keys // self.keys.shape[1])
        indices = np.concatenate([pages[:count] for pages, count in zip(table, counts, strict=True)])
        return [self.put(x) for x in (rows, np.append(0, np.cumsum(counts)), indices, keys)]


def pages_of(problem: Problem, device: str) -> Pages:
    """Draws queries and a cache; sequences share the pages of a prefix."""
    requests, table = requests_of(problem), page_table(problem, problem.prefix)
    draw = functools.partial(torch.randn, device=device, dtype=getattr(torch, problem.dtype))
    query = draw(int(requests.queries.sum()), problem.Hq, problem.D)
    keys = draw(int(table.max()) + 1, problem.page, problem.Hkv, problem.D)
    values = keys[..., : problem.value_size] if problem.keys == "latent" else torch.randn_like(keys)
    return Pages(query, keys, values, table, requests)


def flashinfer(peer: str, problem: Problem, pages: Pages) -> Callable[[], Tensor]:
    """FlashInfer's wrapper for a problem, planned; ``"flashinfer"`` leaves the backend to it."""
    plan = pages.plan(pages.requests.indptr, pages.table, pages.requests.keys)
    backend = "fa2" if peer == "flashinfer-fa2" else "auto"
    if peer == "flashinfer-batch":
        return _batch_attention(problem, pages, plan)
    if problem.keys == "latent":
        return _latents(problem, pages, plan, backend)
    if problem.prefix:
        return _cascade(problem, pages, backend)
    run = _wrapper(problem, pages, plan, backend, decoding=problem.T == 1).run
    return functools.partial(run, pages.query, (pages.keys, pages.values), out=torch.empty_like(pages.query))


def _wrapper(problem: Problem, pages: Pages, plan: list[Tensor], backend: str, *, decoding: bool = False) -> Any:
    """For prompts, or for decoding one token by tensor cores, which leaves no choice of a backend."""
    import flashinfer  # type: ignore

    rows, *places, keys = plan
    places.append((keys - 1) % problem.page + 1)
    sizes = (problem.Hq, problem.Hkv, problem.D, problem.page)
    dtypes = {"q_data_type": pages.keys.dtype, "kv_data_type": pages.keys.dtype}
    if decoding:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(pages.workspace, "NHD", use_tensor_cores=True)
        wrapper.plan(*places, *sizes, **dtypes)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(pages.workspace, "NHD", backend=backend)
        wrapper.plan(rows, *places, *sizes, causal=problem.variant != "noop", **dtypes)
    return wrapper


def _batch_attention(problem: Problem, pages: Pages, plan: list[Tensor]) -> Callable[[], Tensor]:
    """One persistent kernel for prompts and decoding."""
    from flashinfer import BatchAttention  # type: ignore

    wrapper, sizes = BatchAttention("NHD", str(pages.keys.device)), (problem.Hq, problem.Hkv, problem.D, problem.D)
    wrapper.plan(*plan, *sizes, problem.page, causal=problem.variant != "noop")  # bfloat16, by default
    return lambda: wrapper.run(pages.query, (pages.keys, pages.values))[0]


def _latents(problem: Problem, pages: Pages, plan: list[Tensor], backend: str) -> Callable[[], Tensor]:
    from flashinfer.mla import BatchMLAPagedAttentionWrapper  # type: ignore

    wrapper, size = BatchMLAPagedAttentionWrapper(pages.workspace, backend=backend), problem.value_size
    sizes, dtype = (problem.Hq, size, problem.D - size, problem.page), pages.keys.dtype
    wrapper.plan(*plan, *sizes, problem.variant != "noop", _QK_HEAD_DIM**-0.5, dtype, dtype)
    halves = [x[..., part] for x in (pages.query, pages.keys[:, :, 0]) for part in (slice(size), slice(size, None))]
    return functools.partial(wrapper.run, *halves, out=torch.empty_like(halves[0]))


def _cascade(problem: Problem, pages: Pages, backend: str) -> Callable[[], Tensor]:
    """Attention over each suffix and over the prefix, and their merge, as in `MultiLevelCascadeAttentionWrapper`."""
    from flashinfer import merge_state_in_place  # type: ignore

    query, requests, shared = pages.query, pages.requests, problem.prefix // problem.page
    plans = (
        pages.plan(requests.indptr, pages.table[:, shared:], requests.keys - problem.prefix),
        pages.plan(np.array([0, len(query)]), pages.table[:1], np.array([problem.prefix])),
    )
    wrappers = [_wrapper(problem, pages, plan, backend) for plan in plans]
    states = [(torch.empty_like(query), torch.empty(query.shape[:2], device=query.device)) for _ in plans]

    def attend() -> Tensor:
        for wrapper, (out, lse) in zip(wrappers, states, strict=True):
            wrapper.run(query, (pages.keys, pages.values), out=out, lse=lse, return_lse=True)
        merge_state_in_place(*states[0], *states[1])
        return states[0][0]

    return attend

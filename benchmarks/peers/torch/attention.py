"""The torch peers, from a problem's mods to a callable. Imports torch, and not JAX."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, flex_attention, sdpa_kernel

from benchmarks.peers.torch import flash
from benchmarks.peers.torch.pages import Pages, flashinfer
from benchmarks.problems import Problem
from benchmarks.variants import LARGE, VARIANTS, Mods, Operations

OPERATIONS = Operations(torch.tanh, lambda x: x.to(torch.float32), torch.clamp)
_MAX_EAGER = 2**28  # elements that `create_block_mask` may hold
_SDPA = {
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
    "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION,
}


class BoundProblem(NamedTuple):
    """A problem with its mods and their captured arrays on a device."""

    problem: Problem
    mods: Mods
    captured: dict[str, torch.Tensor]
    device: str


def bind(problem: Problem, device: str) -> BoundProblem:
    """Makes the mods of a problem without pages, on ``"cuda"`` or ``"cpu"``; on the latter nothing is compiled."""
    variant, dtype = VARIANTS[problem.variant], getattr(torch, problem.dtype)
    captured = {
        name: torch.as_tensor(array).to(device, dtype if name in LARGE else torch.float32)
        for name, array in variant.captured(problem).items()
    }
    indices = {name: torch.as_tensor(array, device=device) for name, array in variant.indices(problem).items()}
    return BoundProblem(problem, variant.make(problem, {**indices, **captured}, OPERATIONS), captured, device)


def attention(peer: str, bound: BoundProblem) -> Callable[..., Any]:
    """A peer's ``(query, key, value) -> out`` of `arranged` arrays; an `ImportError` if it is not installed."""
    if peer in _SDPA:
        return _sdpa(bound, _SDPA[peer])
    if peer == "fa4":
        return flash.dense(bound.problem, bound.device)
    if peer.startswith("torch-decode"):
        return _flex_decode(bound.problem, bound.device, blocks=peer == "torch-decode-mask")
    return _flex(bound)


def arranged(peer: str, problem: Problem, arrays: list[torch.Tensor]) -> list[torch.Tensor]:
    """Query, key and value [B, H, length, D] in the order of axes that a peer's users have."""
    return flash.arranged(problem, arrays) if peer == "fa4" else arrays


def paged_attention(peer: str, problem: Problem, pages: Pages) -> Callable[[], torch.Tensor]:
    """A peer's call over pages; an `ImportError` if it is not installed."""
    return flash.paged(problem, pages) if peer == "fa4" else flashinfer(peer, problem, pages)


def _compiled_flex(device: str) -> Callable[..., Any]:
    attend = flex_attention.flex_attention
    return torch.compile(attend, dynamic=False) if device == "cuda" else attend


def _flex(bound: BoundProblem) -> Callable[..., Any]:
    problem, (mask, score) = bound.problem, bound.mods
    block_mask = None
    if problem.form == "everywhere":
        score = _with_mask(bound.mods)
    elif mask is not None:
        block_mask = _block_mask(mask, problem, bound.device)
    options = {"score_mod": score, "block_mask": block_mask, "enable_gqa": problem.Hq != problem.Hkv}
    return functools.partial(_compiled_flex(bound.device), **options)


def _sdpa(bound: BoundProblem, backend: SDPBackend) -> Callable[..., Any]:
    problem = bound.problem
    if problem.variant == "softcap":
        raise NotImplementedError("there is no soft capping.")
    options: dict[str, Any] = {"is_causal": problem.variant == "causal", "enable_gqa": problem.Hq != problem.Hkv}
    options |= {} if problem.variant in ("noop", "causal") else {"attn_mask": _materialized(bound)}

    def attend(query: Any, key: Any, value: Any) -> Any:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(query, key, value, **options)

    return attend


def _flex_decode(problem: Problem, device: str, *, blocks: bool) -> Callable[..., Any]:
    """FlexAttention of one token with its decode kernel forced, on a GPU.

    With `blocks` it has the causal BlockMask of the last position, which masks nothing; otherwise no BlockMask.
    """
    causal = lambda b, h, q_idx, kv_idx: q_idx + problem.S - problem.T >= kv_idx
    create = flex_attention.create_block_mask
    block_mask = create(causal, None, None, problem.T, problem.S, device=device) if blocks else None
    options: dict[str, Any] = {"block_mask": block_mask, "enable_gqa": problem.Hq != problem.Hkv}
    options |= {"kernel_options": {"BACKEND": "TRITON_DECODE"}} if device == "cuda" else {}
    return functools.partial(_compiled_flex(device), **options)


def _block_mask(mask: Callable[..., Any], problem: Problem, device: str) -> Any:
    create = flex_attention.create_block_mask
    if device == "cuda" and problem.T * problem.S > _MAX_EAGER:
        create = torch.compile(create)
    block_mask = create(mask, None, None, problem.T, problem.S, device=device)
    if problem.form == "split":
        return block_mask
    dense = block_mask.to_dense()
    order = torch.argsort(dense, dim=-1, descending=True, stable=True).to(torch.int32)
    return flex_attention.BlockMask.from_kv_blocks(
        dense.sum(-1).to(torch.int32), order, mask_mod=mask, seq_lengths=(problem.T, problem.S)
    )


def _with_mask(mods: Mods) -> Callable[..., Any]:
    """The mask as a score_mod, which is how torch takes one without a BlockMask."""
    mask, score = mods
    assert mask is not None

    def score_mod(value: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        kept = value if score is None else score(value, b, h, q_idx, kv_idx)
        return torch.where(mask(b, h, q_idx, kv_idx), kept, -float("inf"))

    return score_mod


def _materialized(bound: BoundProblem) -> Any:
    """The mask or the bias as one array."""
    problem, (mask, score), captured, device = bound
    if "bias" in captured:
        return captured["bias"][None].expand(problem.B, -1, -1, -1)
    assert mask is not None
    q_idx, kv_idx = torch.arange(problem.T, device=device)[:, None], torch.arange(problem.S, device=device)
    visible = mask(0, 0, q_idx, kv_idx)
    if score is None:
        return visible
    dtype = getattr(torch, problem.dtype)
    heads = [score(torch.zeros((), device=device), 0, h, q_idx, kv_idx) for h in range(problem.Hq)]
    # Of four axes: cuDNN's takes the first of three for the batch.
    return torch.stack([torch.where(visible, x, -float("inf")).to(dtype) for x in heads])[None]

"""The results of torch's peers for the numerics question, in a process of their own; nothing here loads JAX."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.gpu.numerics_cases import CAP, INPUTS, RESULTS, Case, errors, load, slopes

_ERRORS = (RuntimeError, ValueError, TypeError, NotImplementedError, AttributeError)
_BACKENDS = {"flash": "FLASH_ATTENTION", "cuDNN": "CUDNN_ATTENTION", "mem-efficient": "EFFICIENT_ATTENTION"}


def probe(peer: str, cases: Sequence[Sequence[Any]], paths: Sequence[str]) -> dict[str, Any]:
    """Errors of each result by the case's name, or a sentence where it could not run."""
    return {Case(*case).name: _errors(peer, Case(*case), path) for case, path in zip(cases, paths, strict=True)}


def _errors(peer: str, case: Case, path: str) -> dict[str, Any] | str:
    arrays, dtype, device = load(path), getattr(torch, case.dtype), _device()
    inputs = [torch.from_numpy(arrays[name]).to(device, dtype).transpose(1, 2).contiguous() for name in INPUTS]
    leaves = [x.requires_grad_() for x in inputs[:3]]
    try:
        out = _flex(case, *leaves) if peer == "torch FlexAttention" else _sdpa(peer, case, *leaves)
        tensors = (out, *torch.autograd.grad(out, leaves, inputs[3]))
    except _ERRORS as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200] if str(error).strip() else ''}"
    results = [x.detach().transpose(1, 2).float().cpu().numpy() for x in tensors]
    found = errors(arrays, dict(zip(RESULTS, results, strict=True)))
    return {name: tuple(each) for name, each in found.items()}


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _flex(case: Case, query: Any, key: Any, value: Any) -> Any:
    slope = torch.tensor(slopes(case.H), dtype=torch.float32, device=_device())
    mods = {
        "alibi": lambda score, b, h, q_idx, kv_idx: score + slope[h] * (kv_idx - q_idx),
        "softcap": lambda score, b, h, q_idx, kv_idx: CAP * torch.tanh(score / CAP),
    }
    block_mask = None
    if case.variant != "noop":
        visible = lambda b, h, q_idx, kv_idx: q_idx >= kv_idx
        block_mask = create_block_mask(visible, None, None, case.S, case.S, device=_device())
    torch.compiler.reset()  # each case compiles anew, and none counts as a recompilation of the one before
    attend = torch.compile(flex_attention, dynamic=False) if _device() == "cuda" else flex_attention
    return attend(query, key, value, score_mod=mods.get(case.variant), block_mask=block_mask)


def _sdpa(peer: str, case: Case, query: Any, key: Any, value: Any) -> Any:
    if case.variant == "softcap":
        raise NotImplementedError("there is no soft capping.")
    bias = None
    if case.variant == "alibi":
        places = torch.arange(case.S, device=_device(), dtype=torch.float32)
        distance = places - places[:, None]
        bias = torch.tensor(slopes(case.H), device=_device(), dtype=torch.float32)[:, None, None] * distance
        bias = torch.where(distance > 0, -torch.inf, bias).to(query.dtype)[None]
    with sdpa_kernel(getattr(SDPBackend, _BACKENDS[peer.removeprefix("torch SDPA ")])):
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=bias, is_causal=case.variant == "causal"
        )

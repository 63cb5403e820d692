"""The results of JAX's peers for the numerics question, in a process of their own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import jflex
from benchmarks.baselines import forward_and_backward
from benchmarks.gpu.numerics_cases import CAP, INPUTS, RESULTS, Case, errors, load, slopes
from jflex.masks import causal
from jflex.scores import alibi, softcap

_ERRORS = (RuntimeError, ValueError, TypeError, NotImplementedError)


def probe(peer: str, cases: Sequence[Sequence[Any]], paths: Sequence[str]) -> dict[str, Any]:
    """Errors of each result by the case's name, or a sentence where it could not run."""
    return {Case(*case).name: _errors(peer, Case(*case), path) for case, path in zip(cases, paths, strict=True)}


def _errors(peer: str, case: Case, path: str) -> dict[str, Any] | str:
    arrays = load(path)
    inputs = [jnp.asarray(arrays[name]).astype(case.dtype) for name in INPUTS]
    try:
        out, gradients = jax.jit(forward_and_backward(_attention(peer, case)))(*inputs)
        results = jax.device_get((out, *gradients))
    except _ERRORS as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200] if str(error).strip() else ''}"
    found = errors(arrays, dict(zip(RESULTS, results, strict=True)))
    return {name: tuple(each) for name, each in found.items()}


def _attention(peer: str, case: Case) -> Callable[..., Any]:
    return _jax_nn(case, peer.removeprefix("jax.nn ")) if peer.startswith("jax.nn") else _jflex(case, peer)


def _jflex(case: Case, peer: str) -> Callable[..., Any]:
    mods = {"alibi": lambda: alibi(slopes(case.H)), "softcap": lambda: softcap(CAP)}
    score_mod = mods[case.variant]() if case.variant in mods else None
    block_mask = None
    if case.variant != "noop":
        block_mask = jflex.create_block_mask(causal(), None, None, case.S, case.S)
    return lambda q, k, v: jflex.flex_attention(
        q, k, v, score_mod, block_mask, implementation=peer.removeprefix("jflex ")
    )


def _jax_nn(case: Case, implementation: str) -> Callable[..., Any]:
    bias = None
    if case.variant == "softcap":
        raise NotImplementedError("there is no soft capping.")
    if case.variant == "alibi":
        places = jnp.arange(case.S, dtype=jnp.float32)
        distance = places[None] - places[:, None]
        bias = (jnp.asarray(slopes(case.H), jnp.float32)[:, None, None] * distance[None])[None]
        bias = bias.astype(case.dtype) if implementation == "cudnn" else bias  # cuDNN's is of the dtype of the query
    return functools.partial(
        jax.nn.dot_product_attention, bias=bias, is_causal=case.variant != "noop", implementation=implementation
    )

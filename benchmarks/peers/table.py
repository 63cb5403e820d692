"""The implementations that are measured, and the problems that each can compute. Imports neither JAX nor torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from benchmarks.problems import Problem
from benchmarks.suites import SUITES

_MAX_SCORES = 8 * 2**30  # bytes of float32 scores that a dense peer may materialize
_MAX_MASK = 2**31  # bytes of a materialized mask
_DECODED, _TILED_ROWS = 16, 8  # of the Mosaic GPU kernel for few queries: queries, and what pages are a multiple of
Refuses = Callable[[Problem], str | None]


class Peer(NamedTuple):
    """One implementation.

    Each library, ``"jax"``, ``"torch"`` or ``"mosaic"``, has a process of its own: a kernel that hangs or faults ends
    its process, and those of `jflex-mosaic` must not end that of the other JAX peers.
    """

    name: str  # for the command line and the results
    title: str  # for tables
    library: str
    refuses: Refuses  # why it is not measured at a problem; None if it is
    selects: bool = False  # whether it takes keys that are selected, though it is not jflex


def _none(problem: Problem) -> str | None:
    return None


def _only(*variants: str) -> Refuses:
    def refuses(problem: Problem) -> str | None:
        if problem.page:
            return "has no pages"
        if problem.form != "split":
            return "has no BlockMask"
        return None if problem.variant in variants else f"has no {problem.variant}"

    return refuses


def _full_length(problem: Problem) -> str | None:
    return "is measured only with T == S" if problem.served else None


def _serving(problem: Problem) -> str | None:
    return None if problem.served else "is measured with decoding"


def _kernels(problem: Problem) -> str | None:
    return "has no indexer: it is plain JAX" if problem.keys == "indexer" else None


def _mosaic(problem: Problem) -> str | None:
    if problem.selects_keys:
        return "has no selected keys"
    if not problem.served or problem.keys == "latent":
        return None
    if problem.keys or problem.prefix or problem.T > _DECODED:
        return "is measured with few queries, against keys in 16 bits that are loaded as they are"
    return f"has no pages of {problem.page}" if problem.page % _TILED_ROWS else None


def _even(problem: Problem) -> str | None:
    return "is not measured with lengths" if problem.lengths else None


def _decoding(problem: Problem) -> str | None:
    plain = problem.T == 1 and problem.variant == "noop" and not (problem.page or problem.lengths)
    return None if plain else "is measured with one token against contiguous keys of one length"


def _paged(problem: Problem) -> str | None:
    if problem.keys:
        return f"has no {problem.keys} keys"
    return None if problem.page and problem.T == 1 and not problem.prefix else "is measured with one token and pages"


def _rolling(problem: Problem) -> str | None:
    return None if problem.keys == "rolling" else "is measured with the rolling cache of StreamingLLM"


def _raw(problem: Problem) -> str | None:
    return _full_length(problem) if problem.keys == "raw" else "is measured with raw keys"


def _shared(problem: Problem) -> str | None:
    return None if problem.prefix else "is measured with shared prefixes"


def _latents(problem: Problem) -> str | None:
    return _dense(problem) if problem.keys in ("latent", "indexer") else "is measured with latent vectors"


def _dense(problem: Problem) -> str | None:
    scores = 4 * problem.B * problem.Hq * problem.T * problem.S
    return f"would hold {scores / 2**30:.0f} GiB of scores" if scores > _MAX_SCORES else None


def _materialized(problem: Problem) -> str | None:
    mask = 2 * problem.T * problem.S * (problem.Hq if problem.variant in ("alibi", "pair_bias") else 1)
    if problem.differentiated and problem.variant != "pair_bias":
        return "has no such gradient"
    plain = problem.variant in ("noop", "causal")
    return f"would hold a mask of {mask / 2**30:.0f} GiB" if not plain and mask > _MAX_MASK else None


def _plain_softmax(problem: Problem) -> str | None:
    missing = problem.weights or problem.stats or (problem.selected and "selection of blocks")
    missing = missing or (problem.keys.startswith("raw") and f"{problem.keys} keys")
    return f"has no {missing}" if missing else None


def _all(*refusals: Refuses) -> Refuses:
    return lambda problem: next((reason for refuses in refusals if (reason := refuses(problem)) is not None), None)


_CAUSAL = _only("noop", "causal")
_JAX_NN = _only("noop", "causal", "sliding_window", "pair_bias")
_FLASH = _only("noop", "causal", "softcap", "sliding_window")
_MASKED = _only("noop", "causal", "alibi", "pair_bias", "sliding_window", "prefix_lm", "document_mask")
_ALL = (
    Peer("jflex", "jflex", "jax", _none),
    Peer("jflex-mosaic", "jflex mosaic_gpu", "mosaic", _mosaic),
    Peer("jflex-triton", "jflex triton", "jax", _kernels),
    Peer("jflex-official", "jflex official_triton", "jax", _kernels),
    Peer("jflex-xla", "jflex xla", "jax", _full_length),
    Peer("torch-flex", "torch FlexAttention", "torch", _full_length),
    Peer("jax-cudnn", "jax.nn cuDNN", "jax", _JAX_NN),
    Peer("jax-xla", "jax.nn XLA", "jax", _all(_JAX_NN, _dense)),
    Peer("jax-xla-latents", "jax.nn XLA, contiguous latents", "jax", _latents, selects=True),
    Peer("sdpa-cudnn", "torch SDPA cuDNN", "torch", _all(_CAUSAL, _even)),
    Peer("sdpa-flash", "torch SDPA flash", "torch", _all(_CAUSAL, _even)),
    Peer("sdpa-efficient", "torch SDPA mem-efficient", "torch", _all(_MASKED, _materialized, _full_length)),
    Peer("tokamax", "tokamax Mosaic GPU", "jax", _all(_CAUSAL, _full_length)),
    Peer("fa4", "FlashAttention-4 CuTe", "torch", _all(_FLASH, _full_length)),
    Peer("torch-decode-mask", "torch FlexAttention TRITON_DECODE, BlockMask", "torch", _decoding),
    Peer("torch-decode", "torch FlexAttention TRITON_DECODE", "torch", _decoding),
    Peer("jflex-invariant", "jflex, batch invariant", "jax", _serving),
    Peer("jflex-rotating", "jflex, rotated by XLA before", "jax", _raw),
    Peer("jflex-raw-keys", "jflex, raw keys rotated as loaded", "jax", _rolling),
    Peer("jflex-rerotating", "jflex, all keys rotated by XLA before", "jax", _rolling),
    Peer("jflex-contiguous", "jflex, contiguous", "jax", _paged),
    Peer("jflex-joined", "jflex, both levels in one call", "jax", _shared),
    Peer("jflex-flat", "jflex, without cascade", "jax", _shared),
    Peer("jflex-copies", "jflex, without cascade or sharing", "jax", _shared),
    Peer("flashinfer", "FlashInfer", "torch", _paged),
)
PEERS = {peer.name: peer for peer in _ALL}


def peers_of(suite: str, names: Sequence[str] = ()) -> tuple[Peer, ...]:
    """The named ones, or those of the suite."""
    return tuple(PEERS[name] for name in (names or SUITES[suite].peers))


def by_library(problem: Problem, peers: Sequence[Peer]) -> dict[str, list[str]]:
    """Names of the peers that a problem is measured with, by library."""
    names: dict[str, list[str]] = {}
    for peer in peers:
        any_kind = peer.selects or peer.name.startswith("jflex")
        refuses = peer.refuses if any_kind else _all(_plain_softmax, peer.refuses)
        if refuses(problem) is None:
            names.setdefault(peer.library, []).append(peer.name)
    return names

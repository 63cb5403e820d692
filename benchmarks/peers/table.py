"""The implementations that are measured, and the problems that each can compute. Imports neither JAX nor torch."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from benchmarks.problems import Problem
from benchmarks.suites import SUITES

_MAX_SCORES = 8 * 2**30  # bytes of float32 scores that a dense peer may materialize
_MAX_MASK = 2**31  # bytes of a materialized mask
_TILED_ROWS = 8  # Mosaic GPU's kernels over pages take multiples of it
Computes = Callable[[Problem], object]


class Peer(NamedTuple):
    """One implementation.

    Each library, ``"jax"``, ``"torch"`` or ``"mosaic"``, has a process of its own: a kernel that hangs or faults ends
    its process, and those of `jflex-mosaic` must not end that of the other JAX peers.
    """

    name: str  # for the command line and the results
    title: str  # for tables
    library: str
    computes: Computes  # whether it is measured at a problem
    selects: bool = False  # whether it takes keys that are selected, though it is not jflex


def _all(*conditions: Computes) -> Computes:
    return lambda problem: all(computes(problem) for computes in conditions)


def _either(*conditions: Computes) -> Computes:
    return lambda problem: any(computes(problem) for computes in conditions)


def _only(*variants: str) -> Computes:
    """Variants that a peer without pages and BlockMask knows."""
    return lambda problem: not problem.page and problem.form == "split" and problem.variant in variants


def _mosaic(problem: Problem) -> bool:
    """All with as many queries as keys; few queries and prompts against keys in 16 bits that are loaded as they are."""
    if problem.selects_keys or not problem.served or problem.keys == "latent":
        return not problem.selects_keys
    return not (problem.keys or problem.prefix) and problem.page % _TILED_ROWS == 0


def _materialized(problem: Problem) -> bool:
    """No gradient of slopes; a mask or a bias that fits."""
    mask = 2 * problem.T * problem.S * (problem.Hq if problem.variant in ("alibi", "pair_bias") else 1)
    has_gradient = not problem.differentiated or problem.variant == "pair_bias"
    return has_gradient and (problem.variant in ("noop", "causal") or mask <= _MAX_MASK)


_any = lambda x: True
_plain_softmax = lambda x: not (x.weights or x.stats or x.selected or x.keys.startswith("raw"))
_dense = lambda x: 4 * x.B * x.Hq * x.T * x.S <= _MAX_SCORES
_full_length = lambda x: not x.served
_kernels = lambda x: x.keys != "indexer"  # which is plain JAX
_even = lambda x: not x.lengths
_rolling = lambda x: x.keys == "rolling"
_raw = lambda x: x.keys == "raw" and not x.served
_shared = lambda x: x.prefix
_decoding = lambda x: x.T == 1 and x.variant == "noop" and not (x.page or x.lengths)
_paged = lambda x: x.page and not (x.keys or x.prefix) and x.variant in ("noop", "causal")
_decoding_pages = lambda x: _paged(x) and x.T == 1
_mixed = lambda x: _paged(x) and x.lengths == "mixed"
_prefix_or_latents = lambda x: (x.prefix and not x.keys) or x.keys == "latent"
_latents = lambda x: x.keys in ("latent", "indexer") and _dense(x)
_CAUSAL = _only("noop", "causal")
_JAX_NN = _only("noop", "causal", "sliding_window", "pair_bias")
_FLASH = _only("noop", "causal", "softcap", "sliding_window", "document_mask", "corpus_mask")
_FLASHINFER = _either(_paged, _prefix_or_latents)
_MASKED = _only("noop", "causal", "alibi", "pair_bias", "sliding_window", "prefix_lm", "document_mask")
_ALL = (
    Peer("jflex", "jflex", "jax", _any),
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
    Peer("fa4-jax", "fa4-jax CuTe", "jax", _all(_only("noop", "causal", "document_mask"), _full_length)),
    Peer("tokamax", "tokamax Mosaic GPU", "jax", _all(_CAUSAL, _full_length)),
    Peer("fa4", "FlashAttention-4 CuTe", "torch", _either(_all(_FLASH, _full_length), _paged)),
    Peer("torch-decode-mask", "torch FlexAttention TRITON_DECODE, BlockMask", "torch", _decoding),
    Peer("torch-decode", "torch FlexAttention TRITON_DECODE", "torch", _decoding),
    Peer("jflex-invariant", "jflex, batch invariant", "jax", lambda x: x.served),
    Peer("jflex-rotating", "jflex, rotated by XLA before", "jax", _raw),
    Peer("jflex-raw-keys", "jflex, raw keys rotated as loaded", "jax", _rolling),
    Peer("jflex-rerotating", "jflex, all keys rotated by XLA before", "jax", _rolling),
    Peer("jflex-contiguous", "jflex, contiguous", "jax", _decoding_pages),
    Peer("jflex-joined", "jflex, both levels in one call", "jax", _shared),
    Peer("jflex-flat", "jflex, without cascade", "jax", _shared),
    Peer("jflex-copies", "jflex, without cascade or sharing", "jax", _shared),
    Peer("flashinfer", "FlashInfer", "torch", _FLASHINFER),
    Peer("flashinfer-fa2", "FlashInfer fa2", "torch", _all(_FLASHINFER, lambda x: not _decoding_pages(x))),
    Peer("flashinfer-batch", "FlashInfer BatchAttention", "torch", _mixed),
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
        if peer.computes(problem) and (any_kind or _plain_softmax(problem)):
            names.setdefault(peer.library, []).append(peer.name)
    return names

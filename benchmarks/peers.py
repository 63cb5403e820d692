"""Who is measured, and what each can compute. Loads neither JAX nor torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from benchmarks.problems import Problem

_LARGEST_SCORES = 8 * 2**30  # bytes of float32 scores that a peer that holds all of them may take
_LARGEST_MASK = 2**31  # bytes of an itemised mask


class Peer(NamedTuple):
    """One implementation.

    Attributes:
      name: For the command line and the results.
      title: For tables.
      library: ``"jax"``, ``"torch"`` or ``"mosaic"``; each has a process of its own. A kernel that hangs or faults
        ends its process, and Mosaic GPU's must not end that of the other JAX peers.
      refuses: Why it is not asked for a problem; None if it is.
    """

    name: str
    title: str
    library: str
    refuses: Callable[[Problem], str | None]


def _anything(problem: Problem) -> str | None:
    return None


def _only(*variants: str) -> Callable[[Problem], str | None]:
    def refuses(problem: Problem) -> str | None:
        if problem.page:
            return "has no pages"
        if problem.form != "split":
            return "has no BlockMask"
        return None if problem.variant in variants else f"has no {problem.variant}"

    return refuses


def _trained(problem: Problem) -> str | None:
    return "is asked for as many queries as keys" if problem.served else None


def _even(problem: Problem) -> str | None:
    return "is not asked for lengths" if problem.lengths else None


def _decoding(problem: Problem) -> str | None:
    plain = problem.T == 1 and problem.variant == "noop" and not (problem.page or problem.lengths)
    return None if plain else "is asked for one token against contiguous keys of one length"


def _paged(problem: Problem) -> str | None:
    return None if problem.page and problem.T == 1 and not problem.prefix else "is asked for one token and pages"


def _shared(problem: Problem) -> str | None:
    return None if problem.prefix else "is asked for shared prefixes"


def _addressed(problem: Problem) -> str | None:
    """Triton's kernels address an array by 31 bits."""
    elements = problem.B * problem.S * problem.Hkv * problem.D
    return f"would have {elements / 2**30:.1f} * 2**30 elements in an array" if elements >= 2**31 else None


def _dense(problem: Problem) -> str | None:
    scores = 4 * problem.B * problem.Hq * problem.T * problem.S
    return f"would hold {scores / 2**30:.0f} GiB of scores" if scores > _LARGEST_SCORES else None


def _both(*questions: Callable[[Problem], str | None]) -> Callable[[Problem], str | None]:
    return lambda problem: next((reason for ask in questions if (reason := ask(problem)) is not None), None)


def _itemised(problem: Problem) -> str | None:
    mask = 2 * problem.T * problem.S * (problem.Hq if problem.variant in ("alibi", "pair_bias") else 1)
    if problem.differentiated and problem.variant != "pair_bias":
        return "has no such gradient"
    plain = problem.variant in ("noop", "causal")
    return f"would hold a mask of {mask / 2**30:.0f} GiB" if not plain and mask > _LARGEST_MASK else None


_MASKS = ("sliding_window", "prefix_lm", "document_mask")
_OPTIONS = ("noop", "causal", "softcap", "sliding_window")
_ITEMISED = ("noop", "causal", "alibi", "pair_bias", *_MASKS)
PEERS = {peer.name: peer for peer in (
    Peer("jflex", "jflex", "jax", _anything),
    Peer("jflex-mosaic", "jflex mosaic_gpu", "mosaic", _trained),
    Peer("jflex-triton", "jflex triton", "jax", _trained),
    Peer("torch-flex", "torch FlexAttention", "torch", _trained),
    Peer("jax-cudnn", "jax.nn cuDNN", "jax", _only("noop", "causal", "sliding_window", "pair_bias")),
    Peer("jax-xla", "jax.nn XLA", "jax", _both(_only("noop", "causal", "sliding_window", "pair_bias"), _dense)),
    Peer("sdpa-cudnn", "torch SDPA cuDNN", "torch", _both(_only("noop", "causal"), _even)),
    Peer("sdpa-flash", "torch SDPA flash", "torch", _both(_only("noop", "causal"), _even)),
    Peer("sdpa-efficient", "torch SDPA mem-efficient", "torch", _both(_only(*_ITEMISED), _itemised, _trained)),
    Peer("tokamax", "tokamax Mosaic GPU", "jax", _both(_only("noop", "causal"), _trained)),
    Peer("fa4", "FlashAttention-4 CuTe", "torch", _both(_only(*_OPTIONS), _trained)),
    Peer("torch-decode-mask", "torch FlexAttention TRITON_DECODE, BlockMask", "torch", _decoding),
    Peer("torch-decode", "torch FlexAttention TRITON_DECODE", "torch", _decoding),
    Peer("jflex-contiguous", "jflex, contiguous", "jax", _paged),
    Peer("jflex-flat", "jflex, without cascade", "jax", _shared),
    Peer("jflex-copies", "jflex, without cascade or sharing", "jax", _both(_shared, _addressed)),
    Peer("flashinfer", "FlashInfer", "torch", _paged),
)}  # fmt: skip
FIRST = "jflex"  # the one that the others are compared with: as a user who names no implementation gets it
FIRST_OF = {"hopper": "jflex-mosaic"}  # where it is another
OF_SUITE = {
    "main": ("jflex", "torch-flex", "jax-cudnn", "tokamax"),
    "hopper": ("jflex-mosaic", "jflex-triton", "jax-cudnn", "torch-flex", "sdpa-cudnn", "fa4", "tokamax"),
    "hopper_short": ("jflex", "jflex-mosaic", "jflex-triton"),
    "paper": ("jflex", "torch-flex", "jax-cudnn", "sdpa-flash", "sdpa-efficient"),
    "grid": ("jflex", "torch-flex"),
    "blocks": ("jflex", "torch-flex"),
    "heads": ("jflex", "torch-flex", "jax-cudnn"),
    "captured": ("jflex", "torch-flex", "jax-cudnn"),
    "pair_bias": ("jflex", "torch-flex", "jax-cudnn", "jax-xla", "sdpa-efficient"),
    "decode": ("jflex", "jax-cudnn", "sdpa-cudnn", "sdpa-flash", "torch-decode-mask", "torch-decode"),
    "paged": ("jflex", "jflex-contiguous", "flashinfer"),
    "mixed": ("jflex",),
    "cascade": ("jflex", "jflex-flat", "jflex-copies"),
    "quick": ("jflex", "torch-flex", "jax-cudnn"),
    "tiny": ("jflex", "torch-flex", "jax-xla"),
    "short": ("jflex", "torch-flex", "jax-cudnn", "jax-xla", "sdpa-cudnn", "sdpa-flash", "sdpa-efficient", "tokamax"),
}


def peers_of(suite: str, named: Sequence[str] = ()) -> tuple[Peer, ...]:
    """Those that are named, or those that the suite is measured with."""
    return tuple(PEERS[name] for name in (named or OF_SUITE[suite]))


def asked(problem: Problem, peers: Sequence[Peer]) -> dict[str, list[str]]:
    """Names of the peers that a problem is measured with, by library."""
    willing = [peer for peer in peers if peer.refuses(problem) is None]
    libraries = dict.fromkeys(peer.library for peer in willing)
    return {library: [peer.name for peer in willing if peer.library == library] for library in libraries}

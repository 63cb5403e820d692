"""Whether peers computed the same: a wrong result has no time. Loads neither JAX nor torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

SAMPLES = 1024  # elements of an array that are compared
_ALIKE = 0.05  # of the norm; bfloat16 arrays that went other ways differ by 0.01
_TRUSTED = ("jflex-triton", "jax-cudnn", "jax-xla")  # The first that is there is what others are compared with.
_JUDGED = ("jflex", "jflex-mosaic")

# By peer, by direction, of each array that a call gives: `SAMPLES` of its elements, at most.
Samples = Mapping[str, Mapping[str, Sequence[Sequence[float]]]]


def doubts(samples: Samples) -> dict[str, dict[str, str]]:
    """Why the result of a peer cannot be right, by direction.

    >>> doubts({"jflex": {"forward": [[1.0, 2.0]]}, "jax-cudnn": {"forward": [[1.0, 2.5]]}})
    {'jflex': {'forward': 'array 0 differs from that of jax-cudnn, by 0.19 of its norm'}}
    """
    found: dict[str, dict[str, str]] = {}
    for peer in _JUDGED:
        for direction, arrays in samples.get(peer, {}).items():
            trusted = next((name for name in _TRUSTED if direction in samples.get(name, {})), None)
            reason = _unlike(arrays, samples[trusted][direction], trusted) if trusted else _infinite(arrays)
            if reason is not None:
                found.setdefault(peer, {})[direction] = reason
    return found


def _infinite(arrays: Sequence[Sequence[float]]) -> str | None:
    numbers = (i for i, array in enumerate(arrays) if not all(map(math.isfinite, array)))
    return next((f"array {i} is not finite" for i in numbers), None)


def _unlike(arrays: Sequence[Sequence[float]], others: Sequence[Sequence[float]], name: str) -> str | None:
    if (reason := _infinite(arrays)) is not None:
        return reason
    for i, (array, other) in enumerate(zip(arrays, others, strict=True)):
        error = math.dist(array, other) / max(math.hypot(*other), 1e-30)
        if error > _ALIKE:
            return f"array {i} differs from that of {name}, by {error:.2g} of its norm"
    return None

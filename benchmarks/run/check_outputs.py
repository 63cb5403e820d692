"""Compares what implementations computed: a wrong result has no time. Imports neither JAX nor torch."""

import math
from collections.abc import Mapping, Sequence

MAX_SAMPLES = 4096  # elements of an array that are compared
TOLERANCE = 0.05  # of the norm; bfloat16 arrays computed in different orders differ by 0.01
SERVED_TOLERANCE = 0.02  # of the norm, for outputs alone; rounding to bfloat16 makes them differ by a fifth of this
_BASELINES = (  # the first that is there
    "jax-xla-latents", "jflex-triton", "jax-cudnn", "jax-xla", "jflex-contiguous", "jflex-flat", "jflex-rotating",
    "jflex-rerotating", "fa4-jax",
)  # fmt: skip
_JUDGED = ("jflex", "jflex-mosaic", "jflex-raw-keys", "jflex-joined")

Samples = Sequence[Sequence[float]]  # of each array that a call returns, `MAX_SAMPLES` elements at most


def mismatch(samples: Samples, expected: Samples | None, baseline: str, tolerance: float = TOLERANCE) -> str | None:
    """The reason why results cannot be right; None if they may be.

    Without expected ones, those of the implementation `baseline`, only finiteness is checked.
    """
    for i, array in enumerate(samples):
        if not all(map(math.isfinite, array)):
            return f"array {i} is not finite"
    if expected is None:
        return None
    if [len(x) for x in samples] != [len(x) for x in expected]:
        return f"its arrays have other sizes than those of {baseline}"
    for i, (array, other) in enumerate(zip(samples, expected, strict=True)):
        error = math.dist(array, other) / max(math.hypot(*other), 1e-30)
        if not error <= tolerance:
            return f"array {i} differs from that of {baseline}, by {error:.2g} of its norm"
    return None


def mismatches(samples: Mapping[str, Mapping[str, Samples]], tolerance: float = TOLERANCE) -> dict[str, dict[str, str]]:
    """Reasons why results cannot be right, by peer and direction.

    Results must be finite for every peer, and for jflex close to the results of the first baseline that has any.
    """
    reasons: dict[str, dict[str, str]] = {}
    for peer, directions in samples.items():
        for direction, arrays in directions.items():
            if (reason := mismatch(arrays, None, "")) is not None:
                reasons.setdefault(peer, {})[direction] = reason
    for peer in _JUDGED:
        for direction, arrays in samples.get(peer, {}).items():
            others = (name for name in _BASELINES if direction in samples.get(name, {}))
            finite = [name for name in others if direction not in reasons.get(name, {})]
            if not finite or direction in reasons.get(peer, {}):
                continue
            if (reason := mismatch(arrays, samples[finite[0]][direction], finite[0], tolerance)) is not None:
                reasons.setdefault(peer, {})[direction] = reason
    return reasons

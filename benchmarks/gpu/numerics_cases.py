"""The cases of the numerics question: arrays drawn from a seed, and attention in numpy float64, forward and backward.

Nothing here loads JAX or torch.
"""

from __future__ import annotations

import pathlib
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import ml_dtypes
import numpy as np

VARIANTS = ("noop", "causal", "alibi", "softcap")  # all but noop are causal, too
CAP = 50.0
INPUTS = ("query", "key", "value", "cotangent")
RESULTS = ("out", "query_gradient", "key_gradient", "value_gradient")


class Case(NamedTuple):
    """One variant at one shape and precision."""

    variant: str
    dtype: str
    D: int
    S: int
    H: int

    @property
    def name(self) -> str:
        """In words."""
        return f"{self.variant}, {self.dtype}, D {self.D}"


class Errors(NamedTuple):
    """Of a result against the exact one: root of the mean square, the largest, and the mean square's of the exact."""

    rmse: float
    largest: float
    size: float


def slopes(heads: int) -> np.ndarray:
    """ALiBi's slopes for a power of two."""
    return 2.0 ** (-8 * np.arange(1, heads + 1) / heads)


def prepare(cases: list[Case], folder: pathlib.Path) -> list[str]:
    """Writes each case, inputs and exact results in float64, to a file of its own; returns the paths."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda each: _prepare(each[1], folder / f"{each[0]}.npz"), enumerate(cases)))


def _prepare(case: Case, path: pathlib.Path) -> str:
    generator = np.random.default_rng(0)
    dtype = np.dtype(getattr(ml_dtypes, case.dtype, case.dtype))
    drawn = {name: generator.normal(size=(1, case.S, case.H, case.D)).astype(dtype) for name in INPUTS}
    exact = dict(zip(RESULTS, _exact(case, **{name: x.astype(np.float64) for name, x in drawn.items()}), strict=True))
    # 16-bit numbers are held exactly by float32, which every peer can read.
    np.savez(path, **{name: x.astype(np.float32) for name, x in drawn.items()}, **exact)
    return str(path)


def _exact(case: Case, query, key, value, cotangent) -> tuple[np.ndarray, ...]:
    results = tuple(np.empty_like(query) for _ in RESULTS)
    for h in range(case.H):
        arrays = (x[0, :, h] for x in (query, key, value, cotangent))
        for whole, part in zip(results, _exact_head(case, h, *arrays), strict=True):
            whole[0, :, h] = part
    return results


def _exact_head(case: Case, h: int, query, key, value, cotangent) -> tuple[np.ndarray, ...]:
    scale = case.D**-0.5
    scores = scale * (query @ key.T)
    slope = 1.0
    places = np.arange(case.S)
    distance = places - places[:, None]  # kv_idx - q_idx
    if case.variant == "alibi":
        scores += slopes(case.H)[h] * distance
    if case.variant == "softcap":
        bent = np.tanh(scores / CAP)
        scores, slope = CAP * bent, 1 - bent**2
    if case.variant != "noop":
        scores[distance > 0] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out = weights @ value
    pulled = scale * slope * weights * (cotangent @ value.T - (out * cotangent).sum(-1, keepdims=True))
    return out, pulled @ key, pulled.T @ query, weights.T @ cotangent


def load(path: str) -> dict[str, np.ndarray]:
    """Inputs in float32 and exact results of a case."""
    with np.load(path) as arrays:
        return dict(arrays)


def errors(exact: dict[str, np.ndarray], results: dict[str, np.ndarray]) -> dict[str, Errors]:
    """How far results are from the exact ones, by name."""
    found = {}
    for name, result in results.items():
        off = np.asarray(result, np.float64) - exact[name]
        rms = lambda x: float(np.sqrt(np.mean(np.square(x))))
        found[name] = Errors(rms(off), float(np.abs(off).max()), rms(exact[name]))
    return found

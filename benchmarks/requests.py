"""The queries and keys of each sequence of a problem. Imports neither JAX nor torch."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from benchmarks.problems import Problem


class Requests(NamedTuple):
    """Queries and keys of each sequence, int32; the queries are the last positions of the keys."""

    queries: np.ndarray
    keys: np.ndarray

    @property
    def indptr(self) -> np.ndarray:
        """Offsets of the packed queries; int32, one longer."""
        return np.concatenate([[0], np.cumsum(self.queries)]).astype(np.int32)


def _even_keys(problem: Problem) -> np.ndarray:
    """A quarter of the cache."""
    return np.full(problem.B, problem.S // 4)


def _uniform_keys(problem: Problem) -> np.ndarray:
    """Drawn by a fixed seed from 1 to twice the mean, as many in all as even ones."""
    shares, total = np.random.default_rng(0).uniform(0.0, 1.0, problem.B), problem.B * (problem.S // 4)
    keys = np.clip(np.floor(shares / shares.sum() * total), 1, problem.S).astype(int)
    keys[np.argmin(keys)] += total - keys.sum()
    return keys


def _skewed_keys(problem: Problem) -> np.ndarray:
    """One in eight is S long, the others are short and alike; as many in all as even ones, but for a remainder."""
    long = max(1, problem.B // 8)
    short = (problem.B * (problem.S // 4) - long * problem.S) // (problem.B - long)
    return np.random.default_rng(0).permutation([problem.S] * long + [max(1, short)] * (problem.B - long))


def _mixed_keys(problem: Problem) -> np.ndarray:
    """The first has T queries at the end of S keys, the others one after half as many."""
    return np.array([problem.S] + [problem.S // 2] * (problem.B - 1))


LENGTHS = {"even": _even_keys, "uniform": _uniform_keys, "skewed": _skewed_keys, "mixed": _mixed_keys}


def requests_of(problem: Problem) -> Requests:
    """Lengths of a problem: T queries at the end of S keys each, unless its `lengths` say otherwise.

    >>> requests_of(Problem(3, 8, 64, 2, 2, 16, "causal", lengths="mixed"))
    Requests(queries=array([8, 1, 1], dtype=int32), keys=array([64, 32, 32], dtype=int32))
    """
    queries = np.full(problem.B, problem.T)
    if problem.lengths == "mixed":
        queries[1:] = 1
    keys = LENGTHS[problem.lengths](problem) if problem.lengths else np.full(problem.B, problem.S)
    return Requests(queries.astype(np.int32), keys.astype(np.int32))

"""Attention variants: their mods, written once for JAX and torch, and the arrays that they capture.

A mod is made of operators alone, which both libraries have; the few functions that they name differently are passed in.
jflex has its neighborhoods ready, in any order; torch's are written here, as in the paper.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from benchmarks.problems import Problem

WINDOW = 1024  # keys, the query's own among them
PREFIX = 2048
LONG_WINDOW = 4096  # of texts in long sequences
CAP = 50.0
DOCUMENTS = 12
TEXT = 16384  # tokens of a text of a long sequence, in the mean
KERNEL = 13  # side of a neighborhood
TILE = (8, 16)  # of the tiled one: as many places as a block has
# Bytes of a top module of CPython 3.11's library, as a share of the longest: the middles of 20 quantiles.
CORPUS = (
    0.0010, 0.0105, 0.0177, 0.0250, 0.0277, 0.0329, 0.0385, 0.0460, 0.0514, 0.0642,
    0.0860, 0.0953, 0.1071, 0.1228, 0.1325, 0.1613, 0.2059, 0.2640, 0.3741, 0.4739,
)  # fmt: skip
LARGE = ("bias",)  # arrays as large as scores, which are held in the dtype of the query; small ones in float32


class Operations(NamedTuple):
    """Functions that JAX and torch name differently."""

    tanh: Callable[[Any], Any]
    floating: Callable[[Any], Any]  # an integer as float32
    clip: Callable[[Any, int, int], Any]  # an integer between two others
    # (order, canvas, kernel, tile) -> a neighborhood mask, in one of `ORDERS`; None: it is written by hand.
    neighborhood: Callable[[str, tuple[int, int], tuple[int, int], tuple[int, int]], Callable[..., Any]] | None = None


class Mods(NamedTuple):
    """Mods of one problem; None where there is none."""

    mask: Callable[..., Any] | None = None
    score: Callable[..., Any] | None = None


Arrays = Mapping[str, Any]
Make = Callable[[Problem, Arrays, Operations], Mods]
Draw = Callable[[Problem], dict[str, np.ndarray]]


class Variant(NamedTuple):
    """Constructor of mods, and the arrays that they capture."""

    make: Make  # from the problem, its captured arrays in the library's own type, and the library's operations
    captured: Draw = lambda problem: {}  # by the score_mod, in float64
    indices: Draw = lambda problem: {}  # integers that the mask_mod captures


def _causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def _window(problem: Problem, size: int) -> Callable[..., Any]:
    window = min(size, problem.S // 2)
    return lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx < window)


def _alibi(problem: Problem, arrays: Arrays, operations: Operations) -> Mods:
    slopes = arrays["slopes"]
    return Mods(_causal, lambda score, b, h, q_idx, kv_idx: score + slopes[h] * operations.floating(kv_idx - q_idx))


def _relative_bias(problem: Problem, arrays: Arrays, operations: Operations) -> Mods:
    return Mods(_causal, lambda score, b, h, q_idx, kv_idx: score + operations.floating(kv_idx - q_idx))


def _prefix_lm(problem: Problem, arrays: Arrays, operations: Operations) -> Mods:
    prefix = min(PREFIX, problem.S // 2)
    return Mods(lambda b, h, q_idx, kv_idx: (kv_idx < prefix) | (q_idx >= kv_idx))


def _softcap(problem: Problem, arrays: Arrays, operations: Operations) -> Mods:
    return Mods(_causal, lambda score, b, h, q_idx, kv_idx: CAP * operations.tanh(score / CAP))


def _document_mask(problem: Problem, arrays: Arrays, operations: Operations) -> Mods:
    ids = arrays["document"]
    return Mods(lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (ids[q_idx] == ids[kv_idx]))


def _windows_in_texts(problem: Problem, arrays: Arrays, operations: Operations) -> Mods:
    ids, near = arrays["text"], _window(problem, LONG_WINDOW)
    return Mods(lambda b, h, q_idx, kv_idx: near(b, h, q_idx, kv_idx) & (ids[q_idx] == ids[kv_idx]))


def _relative_table(problem: Problem, arrays: Arrays, operations: Operations) -> Mods:
    table, last = arrays["table"], problem.S - 1
    return Mods(None, lambda score, b, h, q_idx, kv_idx: score + operations.floating(table[h, q_idx - kv_idx + last]))


def _pair_bias(problem: Problem, arrays: Arrays, operations: Operations) -> Mods:
    bias = arrays["bias"]
    return Mods(None, lambda score, b, h, q_idx, kv_idx: score + operations.floating(bias[h, q_idx, kv_idx]))


def _neighborhood(order: str) -> Make:
    """Keys near the query on a square canvas, whose places come in one of `ORDERS`.

    The kernel is moved inside at a border (Hassani et al. 2022, arXiv:2204.07143).
    """

    def make(problem: Problem, arrays: Arrays, operations: Operations) -> Mods:
        side = math.isqrt(problem.S)
        reach = min(KERNEL, side - 1 + side % 2) // 2
        if operations.neighborhood is not None:
            return Mods(operations.neighborhood(order, (side, side), (2 * reach + 1, 2 * reach + 1), TILE))
        cell = ORDERS[order]

        def near(query: Any, key: Any) -> Any:
            offset = operations.clip(query, reach, side - 1 - reach) - key
            return (offset <= reach) & (offset >= -reach)

        def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            (q_row, q_column), (kv_row, kv_column) = cell(q_idx, side), cell(kv_idx, side)
            return near(q_row, kv_row) & near(q_column, kv_column)

        return Mods(mask)

    return make


def _by_tiles(index: Any, side: int) -> tuple[Any, Any]:
    height, width = TILE
    tile, inside = index // (height * width), index % (height * width)
    return tile // (side // width) * height + inside // width, tile % (side // width) * width + inside % width


def _by_morton(index: Any, side: int) -> tuple[Any, Any]:
    """The row has the odd bits of the index, the column the even ones."""
    row = column = index & 0
    for bit in range(side.bit_length() - 1):
        column = column | (((index >> (2 * bit)) & 1) << bit)
        row = row | (((index >> (2 * bit + 1)) & 1) << bit)
    return row, column


ORDERS = {
    "rows": lambda index, side: (index // side, index % side),
    "tiles": _by_tiles,
    "morton": _by_morton,
}


def _slopes(problem: Problem) -> dict[str, np.ndarray]:
    """Slopes of ALiBi (Press et al. 2022, arXiv:2108.12409) for a power of two."""
    return {"slopes": 2.0 ** (-8 * np.arange(1, problem.Hq + 1) / problem.Hq)}


def _documents(name: str, length: int | None = None) -> Draw:
    """The document of every position: `DOCUMENTS`, or as many as have this length in the mean.

    Lengths lie between a third of the mean and five thirds, by a fixed seed, before they are scaled to the whole.
    """

    def ids(problem: Problem) -> dict[str, np.ndarray]:
        count = DOCUMENTS if length is None else max(1, problem.S // length)
        shares = np.random.default_rng(0).uniform(1 / 3, 5 / 3, count)
        ends = np.round(np.cumsum(shares) / shares.sum() * problem.S).astype(int)
        return {name: np.searchsorted(ends, np.arange(problem.S), side="right").astype(np.int32)}

    return ids


def _corpus(problem: Problem) -> dict[str, np.ndarray]:
    """The document of every position, in a random order: one of S / 4 tokens, the others shorter by `CORPUS`."""
    longest, generator = problem.S // 4, np.random.default_rng(0)
    lengths = np.maximum(1, np.round(longest * generator.choice(CORPUS, problem.S))).astype(int)
    others = lengths[np.cumsum(lengths) <= problem.S - longest]
    ends = np.cumsum(generator.permutation([longest, *others]))
    return {"document": np.searchsorted(ends, np.arange(problem.S), side="right").astype(np.int32)}


def _normal(name: str, seed: int, shape: Callable[[Problem], tuple[int, ...]]) -> Draw:
    return lambda problem: {name: np.random.default_rng(seed).normal(size=shape(problem))}


VARIANTS = {
    "noop": Variant(lambda problem, arrays, operations: Mods()),
    "causal": Variant(lambda problem, arrays, operations: Mods(_causal)),
    "alibi": Variant(_alibi, _slopes),
    "relative_bias": Variant(_relative_bias),
    "sliding_window": Variant(lambda problem, arrays, operations: Mods(_window(problem, WINDOW))),
    "prefix_lm": Variant(_prefix_lm),
    "softcap": Variant(_softcap),
    "document_mask": Variant(_document_mask, indices=_documents("document")),
    "corpus_mask": Variant(_document_mask, indices=_corpus),
    "windows_in_texts": Variant(_windows_in_texts, indices=_documents("text", TEXT)),
    "relative_table": Variant(_relative_table, _normal("table", 1, lambda x: (x.Hq, x.T + x.S - 1))),
    "pair_bias": Variant(_pair_bias, _normal("bias", 2, lambda x: (x.Hq, x.T, x.S))),
    "neighborhood": Variant(_neighborhood("rows")),
    "neighborhood_tiled": Variant(_neighborhood("tiles")),
    "neighborhood_morton": Variant(_neighborhood("morton")),
}


def document_offsets(problem: Problem) -> np.ndarray | None:
    """Offsets of the documents in the packed rows of the batch, int32 [documents + 1]; None without documents."""
    ids = VARIANTS[problem.variant].indices(problem).get("document")
    if ids is None:
        return None
    starts = np.concatenate([[0], np.flatnonzero(np.diff(ids)) + 1])
    rows = np.arange(problem.B)[:, None] * problem.S
    return np.append((rows + starts).reshape(-1), problem.B * problem.S).astype(np.int32)

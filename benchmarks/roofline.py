"""FLOPs and bytes of an attention, and the share of the machine's rates that it reaches.

FLOPs are counted over the blocks of 128 x 128 that the BlockMask visits, the same number for every peer: two GEMMs,
with two FLOPs for each of D (or Dv) elements, per element of a visited block; the backward as its five GEMMs, which
are 2.5 forwards where D = Dv, and the jvp as the forward and five GEMMs. Of packed causal documents the share of these
elements that is visible is counted too: in 16384 tokens of 12 documents 0.81. Bytes are the least that must move: every
array once, and of keys those attended to.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.problems import EIGHT_BITS, Problem, requests_of
from benchmarks.variants import VARIANTS

_ITEM = 2  # bytes of bfloat16 and float16
_POSITION = 4  # bytes of a selected position


class Work(NamedTuple):
    """FLOPs and bytes of a problem: of all heads and the batch, for each direction alone."""

    forward_flops: float
    backward_flops: float
    forward_bytes: float  # query, key, value and captured scores read; out and lse written
    backward_bytes: float  # all of these and the cotangent read; the gradients written
    visible: float = 1.0  # the share of the counted elements that the mask shows; 1 where it is not counted

    @property
    def jvp_flops(self) -> float:
        """The forward, and of the tangent the GEMMs of S, dQ K and Q dK over D, and of P dV and T V over Dv."""
        return self.forward_flops + self.backward_flops

    @property
    def jvp_bytes(self) -> float:
        """Inputs and outputs of the forward, and as many of their tangents."""
        return 2 * self.forward_bytes


def visited_elements(visited: np.ndarray, lengths: tuple[int, int], block: tuple[int, int] = (128, 128)) -> int:
    """Elements in visited blocks [query blocks, key blocks], of which the last may be cut short."""
    rows, columns = (
        np.minimum(size, length - np.arange(count) * size)
        for size, length, count in zip(block, lengths, visited.shape, strict=True)
    )
    return int(rows @ visited.astype(np.int64) @ columns)


def visible_elements(problem: Problem) -> int | None:
    """Elements that a mask of packed causal documents shows, its triangles; None for other variants."""
    if problem.variant not in ("document_mask", "corpus_mask"):
        return None
    lengths = np.unique(VARIANTS[problem.variant].indices(problem)["document"], return_counts=True)[1]
    return int(lengths @ (lengths + 1)) // 2


def work(problem: Problem, visited: int, captured: Sequence[tuple[int, ...]] = ()) -> Work:
    """The work of a problem that visits so many elements of a head's scores and captures arrays of such shapes."""
    heads, D, Dv = problem.B * problem.Hq, problem.D, problem.value_size
    rows, keys, out = heads * problem.T * D, problem.B * problem.Hkv * problem.S * D, heads * problem.T * Dv
    values, of_key = problem.B * problem.Hkv * problem.S * Dv, 1 if problem.keys in EIGHT_BITS else _ITEM
    lse, extra = 4 * heads * problem.T, _ITEM * sum(map(math.prod, captured))
    forward = of_key * (rows + keys) + _ITEM * (values + out) + lse + extra
    gradients = _ITEM * (rows + keys + values) + extra * problem.differentiated
    gemms = (D + Dv, 3 * D + 2 * Dv)  # of the backward: scores, dQ, dK over D; dP, dV over Dv
    forward_flops, backward_flops = (2.0 * size * heads * visited for size in gemms)
    shown = visible_elements(problem)
    moved = forward, forward + _ITEM * out + gradients
    return Work(forward_flops, backward_flops, *moved, 1.0 if shown is None else shown / visited)


def served_work(problem: Problem) -> Work:
    """The work of a problem whose queries continue sequences: over visible elements, not over blocks.

    Keys and values that sequences share count once, whether or not a peer loads them once. Of keys that are not
    selected, nothing counts. An indexer makes a product with each key for each head, reads queries, keys and float32
    weights of heads, and writes positions.
    """
    item = 4 if problem.dtype == "float32" else _ITEM
    requests = requests_of(problem)
    queries, keys = requests.queries.astype(np.int64), requests.keys.astype(np.int64)
    rows, distinct = int(queries.sum()), int(keys.sum()) - (problem.B - 1) * problem.prefix
    positions = _POSITION * rows * problem.selected
    if problem.keys == "indexer":
        heads = rows * problem.Hq
        moved = item * (heads + distinct) * problem.D + 4 * heads + positions
        return Work(2.0 * problem.D * heads * problem.S, 0.0, float(moved), 0.0)
    masked = queries * (queries - 1) // 2 if problem.variant == "causal" else 0 * queries
    visible = int((queries * keys - masked).sum())
    if problem.selected:
        chosen = np.minimum(keys, problem.selected)
        visible, distinct = int((queries * chosen).sum()), int(np.minimum(keys, queries * chosen).sum())
    both = problem.D + problem.value_size
    of_key = problem.D if problem.keys == "latent" else both
    of_token = both + 2 * 4 if problem.keys in EIGHT_BITS else item * of_key  # scales are float32
    moved = item * rows * problem.Hq * both + distinct * problem.Hkv * of_token + positions
    return Work(2.0 * both * problem.Hq * visible, 0.0, float(moved), 0.0)


def share(flops: float, moved: float, seconds: float, rates: Iterable[Mapping[str, float]]) -> float | None:
    """The share of the roof that is reached, of compute or bandwidth, whichever bounds; None if no rate is known.

    The best rates of the libraries in the same run count.

    >>> share(2e12, 1e9, 4.0, [{"matmul_flops": 1e12, "copy_bytes": 1e9}])
    0.5
    """
    known = list(rates)
    if not known:
        return None
    best = {name: max(rate[name] for rate in known) for name in ("matmul_flops", "copy_bytes")}
    return max(flops / best["matmul_flops"], moved / best["copy_bytes"]) / seconds

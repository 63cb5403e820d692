"""Ready scores that are made of more than an addition, each beside numpy and its derivatives: rows of `cases.py`."""

from __future__ import annotations

import jax
import numpy as np
from scipy import special

from jflex import scores
from tests.cases.score_pairs import ScorePair, plain
from tests.support.oracle import Score

_FREQUENCIES = 10000.0 ** (-np.arange(0, 16, 2) / 16)


def _embedded(position):
    """Sinusoidal embeddings, [..., 16]."""
    angles = position[..., None] * _FREQUENCIES
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=-1)


sandwich = plain(  # by the product of the embeddings, as in the paper's code
    scores.sandwich(4, 200, dimension=16),
    lambda s, b, h, q, k: s + (_embedded(q) * _embedded(k)).sum(-1) / np.array([2, 4, 6, 8])[h],
)
relu_activation = plain(
    scores.activation(jax.nn.relu),
    lambda s, *_: np.log1p(np.maximum(s, 0)),
    lambda s, *_: (s > 0) / (1 + np.maximum(s, 0)),
)
gelu_activation = plain(
    scores.activation(lambda s: jax.nn.gelu(s, approximate=False), offset=0.5),
    lambda s, *_: np.log(s * special.ndtr(s) + 0.5),
    lambda s, *_: (special.ndtr(s) + s * np.exp(-s * s / 2) / np.sqrt(2 * np.pi)) / (s * special.ndtr(s) + 0.5),
)
spatial_bias = ScorePair(
    lambda c: scores.spatial_bias(c["table"], c["distances"]),
    Score(
        lambda s, b, h, q, k, c: s + c["table"][h, c["distances"][b, q, k]],
        None,
        lambda s, b, h, q, k, c: {"table": [(1.0, (h, c["distances"][b, q, k]))]},
    ),
    lambda rng, n: {
        "table": rng.normal(size=(n.Hq, 6)).astype(np.float32),
        "distances": rng.integers(0, 6, (n.B, n.T, n.S)).astype(np.int32),
    },
)
spatial_bias_of_one_graph = ScorePair(
    lambda c: scores.spatial_bias(c["table"], c["distances"]),
    Score(
        lambda s, b, h, q, k, c: s + c["table"][h, c["distances"][q, k]],
        None,
        lambda s, b, h, q, k, c: {"table": [(1.0, (h, c["distances"][q, k]))]},
    ),
    lambda rng, n: {
        "table": rng.normal(size=(n.Hq, 6)).astype(np.float32),
        "distances": rng.integers(0, 6, (n.T, n.S)).astype(np.int32),
    },
)


def _paths(b, h, q, k, c):
    """Types of the edges of each path, positions in it, and what each edge adds to the mean: 0 past the end."""
    edges = c["edges"][b, q, k]
    share = (edges >= 0) / np.maximum((edges >= 0).sum(-1, keepdims=True), 1)
    return edges, np.arange(edges.shape[-1]), share


def _mean_of_edges(s, b, h, q, k, c):
    edges, n, share = _paths(b, h, q, k, c)
    return s + (c["table"][h[..., None], n, edges] * share).sum(-1)


def _mean_of_edges_by_table(s, b, h, q, k, c):
    edges, n, share = _paths(b, h, q, k, c)
    return {"table": [(share[..., i], (h, i, np.maximum(edges[..., i], 0))) for i in n]}


def _edges(rng, n):
    lengths = rng.integers(0, 4, (n.B, n.T, n.S, 1))
    edges = np.where(np.arange(3) < lengths, rng.integers(0, 5, (n.B, n.T, n.S, 3)), -1)
    return {"table": rng.normal(size=(n.Hq, 3, 5)).astype(np.float32), "edges": edges.astype(np.int32)}


edge_bias = ScorePair(
    lambda c: scores.edge_bias(c["table"], c["edges"]), Score(_mean_of_edges, None, _mean_of_edges_by_table), _edges
)

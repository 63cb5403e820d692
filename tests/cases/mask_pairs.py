"""Mask mods, each in JAX and in numpy: the rows of `cases.py`. Where both are the same operators on integers, once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class MaskPair:
    """A mask mod twice.

    Attributes:
      jax: ``c -> mod``, for a dict of captured JAX arrays.
      exact: ``(b, h, q, k, c) -> bool`` in numpy.
      captures: ``(rng, sizes) -> {name: array}``.
    """

    jax: Callable[..., Any]
    exact: Callable[..., Any]
    captures: Callable[..., dict[str, Any]] = lambda rng, n: {}


def same(mod: Callable[..., Any], captures: Callable[..., dict[str, Any]] = lambda rng, n: {}) -> MaskPair:
    """A mask of operators alone: ``(b, h, q, k, c) -> bool``."""
    return MaskPair(lambda c: lambda b, h, q, k: mod(b, h, q, k, c), mod, captures)


everything = MaskPair(lambda c: lambda b, h, q, k: True, lambda b, h, q, k, c: True)
causal = same(lambda b, h, q, k, c: q >= k)
hidden_key = same(lambda b, h, q, k, c: (q >= k) & (k != 20))
strictly_causal = same(lambda b, h, q, k, c: q > k)
window = same(lambda b, h, q, k, c: (q >= k) & (q - k < 40))
both_sides = same(lambda b, h, q, k, c: (q - k < 20) & (k - q < 30))
both_sides_by_head = same(lambda b, h, q, k, c: (q - k < 20 + h) & (k - q < 30 - h - h))
prefix = same(lambda b, h, q, k, c: (k < 30) | (q >= k))
first_half_only = same(lambda b, h, q, k, c: q < 64)
odd_keys = same(lambda b, h, q, k, c: k % 2 == 1)
window_by_head = same(lambda b, h, q, k, c: (q >= k) & (q - k < 16 * (h + 1)))
random_elements = same(lambda b, h, q, k, c: (q * 7 + k * 13 + h * 5) % 11 < 4)
offset_by_batch = same(
    lambda b, h, q, k, c: q + c["offset"][b] >= k, lambda rng, n: {"offset": np.arange(n.B, dtype=np.int32) * 40}
)
padding = same(
    lambda b, h, q, k, c: (q < c["length"][b]) & (k < c["length"][b]),
    lambda rng, n: {"length": np.linspace(n.S // 2, n.S, n.B).astype(np.int32)},
)


def _documents(rng, n):
    return {"document": np.sort(rng.integers(0, 4, (n.B, max(n.T, n.S))), axis=1).astype(np.int32)}


_same_document = lambda b, h, q, k, c: (c["document"][b, q] == c["document"][b, k]) & (q >= k)
documents = same(_same_document, _documents)
unsorted_documents = same(
    _same_document, lambda rng, n: {"document": rng.integers(0, 3, (n.B, max(n.T, n.S))).astype(np.int32)}
)
one_document_row = same(
    lambda b, h, q, k, c: (c["row"][q] == c["row"][k]) & (c["row"][k] >= 0),
    lambda rng, n: {"row": (rng.integers(-1, 3, max(n.T, n.S))).astype(np.int32)},
)
neighborhood = MaskPair(  # 5 x 5 around the query, on a grid of 16 columns; window shifted inwards at the borders
    lambda c: (
        lambda b, h, q, k: (
            (jnp.abs(jnp.clip(q // 16, 2, 5) - k // 16) <= 2) & (jnp.abs(jnp.clip(q % 16, 2, 13) - k % 16) <= 2)
        )
    ),
    lambda b, h, q, k, c: (
        (abs(np.minimum(np.maximum(np.floor(q / 16), 2), 5) - np.floor(k / 16)) < 2.5)
        & (abs(np.minimum(np.maximum(np.mod(q, 16), 2), 13) - np.mod(k, 16)) < 2.5)
    ),
)
table = same(lambda b, h, q, k, c: c["seen"][q, k], lambda rng, n: {"seen": rng.random((n.T, n.S)) < 0.3})


def scattered(block: int) -> MaskPair:
    """Empty, mixed and full blocks in no order, so that few of a row are in sequence."""

    def visible(b, h, q, k, c):
        kind = c["kind"][q // block, k // block]
        return (kind == 2) | ((kind == 1) & ((q + k) % 3 == 0))

    def kinds(rng, n):
        return {"kind": rng.integers(0, 3, (-(-n.T // block), -(-n.S // block))).astype(np.int32)}

    return same(visible, kinds)

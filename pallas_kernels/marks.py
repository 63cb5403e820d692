"""Marks of rows whose sums are not finite: they show where masked NaN reached a sum.

A weight of 0 times NaN is NaN: one key that no query may attend to would reach every output of its tile, and a page
that one request leaves to another would carry it on. To clear every tile before its MMA costs on every tile. But a sum
never loses a NaN. So kernels mark the rows whose sums are not finite, and a second launch, the *repair*, computes their
tiles again with cleared operands (`pallas_kernels.triton.containment`). It reads the marks, and exits at once where
there are none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp


def mark(*sums: jax.Array) -> jax.Array:
    """Float32 [rows]: NaN where sums [rows, columns] are not finite, else 0."""
    zeros = [jnp.sum(x.astype(jnp.float32) * 0.0, axis=1) for x in sums]
    return sum(zeros[1:], start=zeros[0])


class Repairs(NamedTuple):
    """How the backward pass of one backend is repaired by the kernels of another.

    Attributes:
      query: ``(dQ, marks of queries) -> dQ``; marks are float32 [B, Hq, T], or [B, Hq, 1] for all of a head.
      key_value: ``(dK and dV, marks of keys) -> dK and dV``; marks are float32 [B, Hkv, S].
    """

    query: Callable[[jax.Array, jax.Array], jax.Array]
    key_value: Callable[[tuple[jax.Array, jax.Array], jax.Array], tuple[jax.Array, jax.Array]]

"""Consecutive runs of different lengths, as packed sequences and pages of requests have them."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int32


def run_of(position: Int32[Array, " N"], indptr: Int32[Array, " R_and_1"]) -> Int32[Array, " N"]:
    """The run of each position, where run r goes from ``indptr[r]`` to ``indptr[r + 1]``; R behind the last one.

    Unrolled, the search is one kernel of a GPU. As a loop, the default of JAX, each of its steps is several.

    >>> run_of(jnp.arange(5, dtype=jnp.int32), jnp.array([0, 2, 2, 4])).tolist()
    [0, 0, 2, 2, 3]
    """
    return jnp.searchsorted(indptr[1:], position, side="right", method="scan_unrolled").astype(jnp.int32)

"""Operands of the tangent kernels, and what surrounds these: sinks and the entropy.

With P the weights, Z what dropout keeps, and T = P * dS (0 where P is 0)::

    ds = scale * (dQ K^T + Q dK^T),   dS = the tangent of the score mod,   dlse = rowsum(T),
    dO = (Z * T) V + (Z * P) dV - dlse * O,   dH = -rowsum(T * (S - lse)) - dlse * H

A sink adds ``exp(sink - lse) * dsink`` to dlse, and to the row sum of the entropy that times ``sink - lse``. Without a
softmax, T is dS, the scores are the weights, and there is no dlse.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, cast

import jax
import jax.numpy as jnp

from pallas_kernels.spec import Operands
from pallas_kernels.types import A


class Moved(NamedTuple, Generic[A]):
    """Operands of a tangent kernel beside those of the forward one: tangents, None without, and rows."""

    query: A | None  # like the query
    key: A | None  # like the key
    value: A | None  # like the value
    out: A  # of the forward pass
    lse: A  # float32 [B, Hq, T]
    d_lse: A | None  # the part of the sinks in the tangent of the lse, float32 [B, Hq, T]; None without


class Pushed(NamedTuple, Generic[A]):
    """Results of a tangent kernel."""

    out: A  # the tangent, like the output
    lse: A  # the tangent, float32 [B, Hq, T], with the part of the sinks
    logs: A | None  # rowsum(T * (S - lse)), float32 [B, Hq, T], without the part of the sinks; None without entropy


def with_tangents(arrays: Operands[A], tangents: Sequence[A | None]) -> Operands[A]:
    """The operands, with tangents of the captured arrays of the score mod after these, as its tangent numbers them.

    Where an array has no tangent there is None, which no kernel reads.
    """
    score = cast("tuple[A, ...]", (*arrays.captured.score, *tangents))
    return arrays._replace(captured=arrays.captured._replace(score=score))


def of_sinks(sinks: jax.Array, d_sinks: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The parts of the sinks in the tangents of the lse and of the entropy's row sum, [B, Hq, T]."""
    sinks, lse = sinks[None, :, None], jnp.where(lse == -jnp.inf, jnp.inf, lse)
    moved = jnp.exp(sinks - lse) * d_sinks[None, :, None]
    return moved, jnp.where(moved == 0, 0.0, moved * (sinks - lse))

"""What the backward passes share: what is wanted and found, statistics of rows, and the way through the score mod."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.program.build import Derivative
from pallas_kernels.program.cotangents import scatter
from pallas_kernels.program.ir import Node
from pallas_kernels.score_tile import ScoreTile
from pallas_kernels.spec import LOG2_E, Arrays, AttentionSpec


class Requested(NamedTuple):
    """Which gradients are computed: `derivative` says of which loads of the score mod, None without one."""

    query: bool
    key_or_value: bool
    derivative: Derivative | None


class Found(NamedTuple):
    """The gradients; None where none is wanted, in `score_operands` also where an array is not read."""

    query: jax.Array | None
    key: jax.Array | None
    value: jax.Array | None
    score_operands: tuple[jax.Array | None, ...]


class Rows(NamedTuple):
    """Per query: cotangent of the output (in the spec's layout), lse and delta, both [B, Hq, T]."""

    d_out: Any
    lse: Any
    delta: Any


def row_statistics(spec: AttentionSpec, saved: tuple[Any, Any], d_saved: tuple[Any, Any]) -> Rows:
    """dO, lse and delta."""
    (out, lse), (d_out, d_lse) = saved, d_saved
    delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1)
    delta = delta.swapaxes(1, 2) if spec.layout == "BTNH" else delta
    delta = delta if d_lse is None else delta - d_lse
    return Rows(d_out, lse, delta)


def shift_of(lse: jax.Array) -> jax.Array:
    """What is subtracted from scores in base 2; inf for an empty row, so that its weights are 0."""
    return jnp.where(lse == -jnp.inf, jnp.inf, lse * LOG2_E)


def through_mod(derivative: Derivative | None, tile: ScoreTile, d_s: jax.Array) -> tuple[jax.Array, Any]:
    """Cotangents of the raw scores, and a function that gives those of a load, all of the size of a tile.

    Args:
      derivative: Of the score mod; None without one.
      tile: The tile of scores, as its kernel computed it: what is visible, and the evaluation of the mod.
      d_s: Cotangents of the modified scores.
    """
    if derivative is None:
        return d_s, None
    assert tile.score is not None  # it is the derivative of a mod
    evaluation = tile.score.child({derivative.cotangent: d_s})
    # The derivative of a mod may be NaN where nothing is seen, and 0 times that too.
    d_load = lambda load: tile.clear(evaluation.tile(derivative.d_loads[load]))
    return tile.clear(evaluation.tile(derivative.d_score)), d_load


def collect(
    spec: AttentionSpec,
    derivative: Derivative | None,
    arrays: Arrays,
    loads: Sequence[Node],
    cotangents: Sequence[jax.Array],
    gradients: dict[int, list[jax.Array]],
) -> None:
    """Adds gradients of captured arrays, from cotangents of what was loaded by row or column, to those of each."""
    if derivative is None:
        return  # no load is wanted
    for load, cotangent in zip(loads, cotangents, strict=True):
        gradients[load.value].append(scatter(spec, derivative, arrays.score_operands, load, cotangent))


def total(parts: list[jax.Array]) -> jax.Array | None:
    """The sum of the gradients of an array; None of none."""
    return functools.reduce(lambda x, y: x.astype(jnp.float32) + y.astype(jnp.float32), parts) if parts else None


def sum_batch(spec: AttentionSpec, x: jax.Array) -> jax.Array:
    """The gradient of a key or value that the batch shares."""
    return x.sum(axis=0, keepdims=True) if spec.Bkv < spec.B else x

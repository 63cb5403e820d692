"""Backward pass through Triton: a kernel for dQ, a kernel for dK and dV, and the gradients of captured arrays.

With P the probabilities and dO the cotangent of the output (Dao 2023, arXiv:2307.08691, section 3.1.2)::

    dV = P^T dO,   dS = P * (dO V^T - delta),   delta = rowsum(dO * O) - dlse,   dQ = dS' K,   dK = dS'^T Q

where dS' is dS pulled back through the score mod. With dropout, of which Z holds 0 or the scale, ``dV = (Z * P)^T dO``
and ``dS = P * (Z * (dO V^T) - delta)``. A cotangent dH of the entropy H adds ``-dH log P`` to dP and ``dH * H`` to
delta. One kernel walks the keys of a tile of queries for dQ, one the queries of a tile of keys for dK and dV; each
recomputes P from the lse.

So there are seven GEMMs where five would do, if the dK/dV kernel added dQ to global memory. On an H200 that took 33 ms
at head size 128 (causal, S 16384, B 2, H 16) instead of 15 for both kernels: Pallas adds by element, with ordered
atomics.
"""

from __future__ import annotations

from typing import NamedTuple

import jax

from pallas_kernels.config import Tiles
from pallas_kernels.gradients import (
    Entropy,
    Gradients,
    KernelStatics,
    RequestedGradients,
    collect,
    row_statistics,
    sum_batch,
    sum_gradients,
)
from pallas_kernels.program.cotangents import group_loads
from pallas_kernels.spec import AttentionSpec, Operands
from pallas_kernels.triton.backward import captured as backward_captured
from pallas_kernels.triton.backward import dkv as backward_dkv
from pallas_kernels.triton.backward import dq as backward_dq
from pallas_kernels.triton.plan.plan import fitted


class BackwardTiles(NamedTuple):
    """Tiles of the two kernels."""

    dkv: Tiles
    dq: Tiles


def backward(
    spec: AttentionSpec,
    tiles: BackwardTiles,
    arrays: Operands[jax.Array],
    requested: RequestedGradients,
    saved: tuple[jax.Array, jax.Array],
    d_saved: tuple[jax.Array, jax.Array | None],
    entropy: Entropy | None = None,
) -> Gradients:
    """Computes the requested gradients.

    `saved` are output and lse of the forward pass, and `d_saved` their cotangents; None for an lse without one.
    """
    rows, derivative = row_statistics(spec, saved, d_saved, entropy), requested.derivative
    groups = group_loads(spec, derivative)
    statics = KernelStatics(spec, tiles.dq, derivative, groups)
    cotangents_of = lambda loads: [] if derivative is None else [derivative.d_loads[load] for load in loads]
    gradients = {i: [] for i in range(len(arrays.captured.score))}
    d_query = d_key = d_value = None
    if requested.query or groups.rows or groups.stores or groups.atomics:
        written = (*groups.stores, *groups.atomics)
        fitting = fitted(spec, "dq", tiles.dq, cotangents_of((*groups.rows, *written)))
        result = backward_dq.dq(statics._replace(tiles=fitting), arrays, rows)
        d_query = result.query if requested.query else None
        collect(spec, derivative, arrays, groups.rows, result.rows, gradients)
        for load, x in zip(written, result.tiles, strict=True):
            gradients[load.value].append(x)
    for axes, loads in groups.repeated:
        summed = backward_captured.captured(statics, arrays, rows, (axes, loads))
        for load, x in zip(loads, summed, strict=True):
            gradients[load.value].append(x)
    if requested.key_or_value or groups.columns:
        fitting = fitted(spec, "dkv", tiles.dkv, cotangents_of(groups.columns))
        result = backward_dkv.dkv(statics._replace(tiles=fitting), arrays, rows)
        if requested.key_or_value:
            d_key, d_value = sum_batch(spec, result.key), sum_batch(spec, result.value)
        collect(spec, derivative, arrays, groups.columns, result.columns, gradients)
    return Gradients(d_query, d_key, d_value, tuple(map(sum_gradients, gradients.values())))

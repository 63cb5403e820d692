"""Backward pass: what both kernels need, the two kernels, and the gradients of captured arrays.

With P the probabilities and dO the cotangent of the output (Dao 2023, arXiv:2307.08691, section 3.1.2)::

    dV = P^T dO,   dS = P * (dO V^T - delta),   delta = rowsum(dO * O) - dlse,   dQ = dS' K,   dK = dS'^T Q

where dS' is dS pulled back through the score mod. One kernel walks the keys of a tile of queries for dQ, one the
queries of a tile of keys for dK and dV; each computes P again from the lse.

So there are seven products where five would do, if dQ were added to global memory by the kernel for dK and dV. On an
H200 that took 33 ms at head size 128 (causal, S 16384, B 2, H 16) and 42 at 64 (B 4), instead of 15 for both kernels:
Pallas adds by element, each addition ordered before the next. Floor: seven products at 817 TFLOP/s and two exponentials
for each score, one after the other, are 406 TFLOP/s at head size 64 and 479 at 128 (counted as five); 390 and 393 are
reached without a mod.
"""

from __future__ import annotations

from typing import NamedTuple

import jax

from pallas_kernels.gradients import Found, Plan, collect, row_statistics, sum_batch, total
from pallas_kernels.program.cotangents import group_loads
from pallas_kernels.spec import Arrays, Setting, Tiles
from pallas_kernels.triton.backward import captured as backward_captured
from pallas_kernels.triton.backward import dkv as backward_dkv
from pallas_kernels.triton.backward import dq as backward_dq


class BackwardTiles(NamedTuple):
    """Tiles of the two kernels."""

    dkv: Tiles
    dq: Tiles


def backward(
    setting: Setting,
    tiles: BackwardTiles,
    arrays: Arrays,
    plan: Plan,
    saved: tuple[jax.Array, jax.Array],
    d_saved: tuple[jax.Array, jax.Array | None],
) -> Found:
    """Computes the gradients that the plan names.

    Args:
      setting: The setting.
      tiles: Of the kernels.
      arrays: The inputs of the forward pass.
      plan: What is wanted.
      saved: Output and lse of the forward pass.
      d_saved: Their cotangents; that of lse may be None.
    """
    rows = row_statistics(setting, saved, d_saved)
    groups = group_loads(setting, plan.derivative)
    gradients = {i: [] for i in range(len(arrays.score_operands))}
    d_query = d_key = d_value = None
    if plan.query or groups.rows or groups.stores or groups.atomics:
        found = backward_dq.dq(setting, tiles.dq, arrays, rows, plan.derivative, groups)
        d_query = found.query if plan.query else None
        collect(setting, plan.derivative, arrays, groups.rows, found.rows, gradients)
        for load, x in zip((*groups.stores, *groups.atomics), found.tiles, strict=True):
            gradients[load.value].append(x)
    for axes, loads in groups.repeated:
        assert plan.derivative is not None  # what loads
        found_captured = backward_captured.captured(setting, tiles.dq, arrays, rows, plan.derivative, (axes, loads))
        for load, x in zip(loads, found_captured, strict=True):
            gradients[load.value].append(x)
    if plan.key_or_value or groups.columns:
        found = backward_dkv.dkv(setting, tiles.dkv, arrays, rows, plan.derivative, groups)
        d_key, d_value = (
            (sum_batch(setting, x) for x in (found.key, found.value)) if plan.key_or_value else (None, None)
        )
        collect(setting, plan.derivative, arrays, groups.columns, found.columns, gradients)
    captured = tuple(map(total, gradients.values()))
    return Found(d_query, d_key, d_value, captured)

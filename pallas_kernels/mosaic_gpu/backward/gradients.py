"""Backward pass for Hopper: its kernels, and the gradients of captured arrays.

With P the probabilities and dO the cotangent of the output (Dao 2023, arXiv:2307.08691, section 3.1.2)::

    dV = P^T dO,   dS = P * (dO V^T - delta),   delta = rowsum(dO * O) - dlse,   dQ = dS' K,   dK = dS'^T Q

where dS' is dS pulled back through the score mod. One pass computes all of it with five GEMMs; tiles of keys add to dQ
in no fixed order, so its last bits may differ between runs. Or two kernels recompute P and dO V^T each, one for dK and
dV, one for dQ: seven GEMMs, and the same bits in each run. Most head sizes of more than 128 take two kernels.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.config import Tiles
from pallas_kernels.gradients import (
    Gradients,
    Repairs,
    RequestedGradients,
    RowOperands,
    collect,
    row_statistics,
    sum_batch,
    sum_gradients,
)
from pallas_kernels.mosaic_gpu.backward.captured import captured
from pallas_kernels.mosaic_gpu.backward.captured_work import CapturedWork
from pallas_kernels.mosaic_gpu.backward.dkv import dkv
from pallas_kernels.mosaic_gpu.backward.dq import dq
from pallas_kernels.mosaic_gpu.backward.plan import BackwardTiles, unsupported_groups
from pallas_kernels.mosaic_gpu.backward.stream import BackwardStatic
from pallas_kernels.mosaic_gpu.launch import cut_rows, pad_operands, pad_rows
from pallas_kernels.mosaic_gpu.score import scores
from pallas_kernels.program.cotangents import LoadGroups, group_loads
from pallas_kernels.spec import AttentionSpec, Operands


def backward(
    spec: AttentionSpec,
    tiles: BackwardTiles,
    arrays: Operands[jax.Array],
    requested: RequestedGradients,
    saved: tuple[jax.Array, jax.Array],
    d_saved: tuple[jax.Array, jax.Array | None],
    repairs: Repairs,
) -> Gradients:
    """Computes the requested gradients: the sum over `PASSES` that apply. Without tiles for dQ, one pass computes all.

    `saved` are output and lse of the forward pass, and `d_saved` their cotangents; None for an lse without one.
    """
    rows = row_statistics(spec, saved, d_saved)
    if spec.normalize == "none":  # the kernels add -delta to dP
        rows = rows._replace(delta=jnp.zeros_like(rows.delta))
    groups = group_loads(spec, requested.derivative)
    padded, arrays = pad_operands(spec, arrays)
    rows = rows._replace(d_out=pad_rows(padded, rows.d_out, padded.Dv))
    assert unsupported_groups(padded, groups) is None  # the plan has checked
    call = BackwardCall(padded, spec, tiles, arrays, rows, requested, groups, repairs)
    results = [stage.compute(call) for stage in PASSES if stage.applies(call)]
    computed = lambda name: next((x for result in results if (x := getattr(result, name)) is not None), None)
    parts = [[x for result in results for x in result.operands[i]] for i in range(len(arrays.captured.score))]
    return Gradients(computed("query"), computed("key"), computed("value"), tuple(map(sum_gradients, parts)))


class BackwardCall(NamedTuple):
    """Inputs of all passes."""

    spec: AttentionSpec  # the call with padded head sizes
    unpadded: AttentionSpec
    tiles: BackwardTiles
    arrays: Operands[jax.Array]  # the operands of the forward pass, padded
    rows: RowOperands[jax.Array]  # dO [B, T, Hq, Dv] or [B, Hq, T, Dv], padded; lse and delta [B, Hq, T]
    requested: RequestedGradients  # the requested gradients, with the derivative of the score mod
    groups: LoadGroups  # loads of captured arrays with requested gradients
    repairs: Repairs  # recomputes marked rows

    def static(self, tiles: Tiles) -> BackwardStatic:
        """Statics of a launch with these tiles."""
        captured = scores.CapturedShapes.from_operands(self.arrays)
        return BackwardStatic(self.spec, tiles, self.requested.derivative, self.groups, captured)

    @property
    def captured_computes_query(self) -> bool:
        """True if the kernel for shared captured arrays adds to dQ."""
        return self.sums_captured and self.tiles.dq is None and self.requested.query

    @property
    def sums_captured(self) -> bool:
        """True if a kernel sums the gradients of captured arrays that batch or heads share."""
        return self.tiles.captured is not None and bool(self.groups.repeated)

    @property
    def one_pass(self) -> bool:
        """True if the kernel for dK and dV adds to dQ."""
        return self.tiles.dq is None and self.requested.query and not self.captured_computes_query

    def query_from_sums(self, sums: jax.Array) -> jax.Array:
        """Gives dQ in the layout and dtype of the query, from sums [B, Hq, T, D]."""
        x = (sums[..., : self.unpadded.D] * self.unpadded.scale).astype(self.arrays.query.dtype)
        return x.swapaxes(1, 2) if self.spec.layout == "BTNH" else x


class PassGradients(NamedTuple):
    """Gradients that one pass computes; for each captured array the terms of its sum."""

    operands: defaultdict[int, list[jax.Array]]
    query: jax.Array | None = None
    key: jax.Array | None = None
    value: jax.Array | None = None


class BackwardPass(NamedTuple):
    """A kernel of the backward pass: whether a call needs it, and the gradients that it computes."""

    applies: Callable[[BackwardCall], bool]
    compute: Callable[[BackwardCall], PassGradients]


def _captured_pass(call: BackwardCall) -> PassGradients:
    """Gradients of captured arrays that batch or heads share, and dQ unless it has a kernel of its own."""
    spec, operands, d_query = call.spec, defaultdict(list), None
    assert call.tiles.captured is not None  # the pass applies
    for n, group in enumerate(call.groups.repeated):
        work = CapturedWork.from_group(spec, call.tiles.captured, group)
        with_query = call.captured_computes_query and n == 0
        outputs = captured(call.static(work.tiles), work, call.arrays, call.rows, with_query=with_query)
        for load, x in zip(work.loads, outputs.loads, strict=True):
            operands[load.value].append(x)
        if outputs.query is not None:
            d_query = call.query_from_sums(outputs.query)
            if spec.needs_marks:
                d_query = call.repairs.query(d_query, _marks_of_rows(outputs.query))
    return PassGradients(operands, d_query)


def _needs_dq(call: BackwardCall) -> bool:
    groups = call.groups
    return bool(groups.rows or groups.stores or (call.requested.query and call.tiles.dq is not None))


def _dq_pass(call: BackwardCall) -> PassGradients:
    """Computes dQ, and gradients of captured arrays that are read by query, or by query and key."""
    spec, groups, derivative = call.spec, call.groups, call.requested.derivative
    operands, d_query = defaultdict(list), None
    assert call.tiles.dq is not None, "cotangents of loads by query are computed by the kernel for dQ"
    outputs = dq(call.static(call.tiles.dq), call.arrays, call.rows)
    if call.requested.query:
        d_query = cut_rows(spec, outputs.query, call.unpadded.T, call.unpadded.D)
        if outputs.marks is not None:
            d_query = call.repairs.query(d_query, outputs.marks)
    collect(spec, derivative, call.arrays, groups.rows, outputs.rows, operands)
    for i, load in enumerate(groups.stores):
        operands[load.value].append(outputs.stores[i])
    return PassGradients(operands, d_query)


def _dkv_pass(call: BackwardCall) -> PassGradients:
    """Computes dK and dV, gradients of captured arrays that are read by key, and in one pass dQ."""
    spec, unpadded, groups, derivative = call.spec, call.unpadded, call.groups, call.requested.derivative
    operands, d_query, d_key, d_value = defaultdict(list), None, None, None
    outputs = dkv(call.static(call.tiles.dkv), call.arrays, call.rows, one_pass=call.one_pass)
    marks = sum_gradients(outputs.marks)
    if outputs.query is not None:
        d_query = call.query_from_sums(outputs.query)
        if marks is not None:
            d_query = call.repairs.query(d_query, _marks_of_queries(spec, marks))
    if call.requested.key_or_value:
        sums = (outputs.key, unpadded.S, unpadded.D), (outputs.value, unpadded.S, unpadded.Dv)
        d_key, d_value = (cut_rows(spec, *x) for x in sums)
        if marks is not None:
            d_key, d_value = call.repairs.key_value((d_key, d_value), marks)
        d_key, d_value = sum_batch(spec, d_key), sum_batch(spec, d_value)
    collect(spec, derivative, call.arrays, groups.columns, outputs.columns, operands)
    return PassGradients(operands, d_query, d_key, d_value)


PASSES = (
    BackwardPass(lambda call: call.sums_captured, _captured_pass),
    BackwardPass(_needs_dq, _dq_pass),
    BackwardPass(lambda call: bool(call.requested.key_or_value or call.groups.columns or call.one_pass), _dkv_pass),
)


def _marks_of_rows(x: jax.Array) -> jax.Array:
    """Marks of rows [..., D], float32 [...]: NaN where one is not finite."""
    return jnp.where(jnp.all(jnp.isfinite(x), axis=-1), jnp.float32(0), jnp.float32(jnp.nan))


def _marks_of_queries(spec: AttentionSpec, marks: jax.Array) -> jax.Array:
    """Marks of query heads [B, Hq, 1], to whose dQ a marked key added, from marks of keys [B, Hkv, S]."""
    return jnp.repeat(jnp.sum(marks, axis=2, keepdims=True), spec.group, axis=1)

"""The tangent of blockwise attention in plain JAX: one pass over the blocks, with the lse of the forward pass."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jflex.backends.base import Gradients, Inputs, Saved, SavedCotangents
from jflex.backends.xla.block_scores import dropped, einsum, kept_weights, modified, raw_scores, scaled_query, scaled_up
from jflex.backends.xla.blockwise import QUERIES_FIRST, Column, Unit, Walk
from jflex.backends.xla.containment import masked_product
from pallas_kernels.spec import AttentionSpec


class _Sums(NamedTuple):
    """Sums over the keys of each row, with ``T = P * dS``."""

    out: jax.Array  # T V + P dV
    lse: jax.Array  # T
    logs: jax.Array  # T * (S - lse)


def tangent(spec: AttentionSpec, inputs: Inputs, saved: Saved, tangents: Gradients) -> SavedCotangents:
    """Pushes tangents of some inputs forward to out, lse and entropy.

    ``dO = T V + P dV - rowsum(T) * O``, and the tangent of the lse is ``rowsum(T)``. Where P is 0, so is T: a masked
    score may have an infinite tangent.
    """
    from pallas_kernels.tangents import of_sinks

    sums = _summed(spec, inputs, saved, tangents)
    d_lse, d_entropy = sums.lse, None
    logs = sums.logs
    if inputs.sinks is not None and tangents.sinks is not None:
        d_lse, logs = map(jnp.add, (d_lse, logs), of_sinks(inputs.sinks, tangents.sinks, saved.lse))
    if saved.entropy is not None:
        d_entropy = (-logs - d_lse * saved.entropy).astype(saved.entropy.dtype)
    out = sums.out
    if spec.normalize == "softmax":
        of_rows = d_lse if spec.layout == "BNTH" else d_lse.swapaxes(1, 2)
        out = out - of_rows[..., None] * saved.out.astype(out.dtype)
    return SavedCotangents(out.astype(saved.out.dtype), d_lse.astype(saved.lse.dtype), d_entropy)


def _summed(spec: AttentionSpec, inputs: Inputs, saved: Saved, tangents: Gradients) -> _Sums:
    walk = Walk.from_inputs(spec, inputs, QUERIES_FIRST)
    spec, dtype = walk.spec, spec.exact
    queries = jax.tree.map(lambda x: walk.padded(x, spec.layout), (inputs.query, tangents.query))
    lse = jnp.where(saved.lse == -jnp.inf, jnp.inf, saved.lse)  # exp(s - inf) is 0
    lses = walk.padded(lse.astype(dtype), "BNTH")

    def row(sums: _Sums, unit: Unit) -> _Sums:
        q, dq = jax.tree.map(lambda x: walk.queries(x, unit, spec.layout), queries)
        lse = walk.queries(lses, unit, "BNTH")[..., None]
        step = lambda carry, column: _block(walk, inputs, tangents, unit, column, (q, dq, lse), carry)
        rows = jnp.zeros(q.shape[:-1], dtype)
        new = walk.over_columns(unit, _Sums(jnp.zeros((*rows.shape, spec.Dv), dtype), rows, rows), step)
        set_rows = lambda x, block, layout: walk.set_queries(x, block, unit, layout)
        out = set_rows(sums.out, scaled_up(new.out, spec), spec.layout)
        return _Sums(out, set_rows(sums.lse, new.lse, "BNTH"), set_rows(sums.logs, new.logs, "BNTH"))

    rows = jnp.zeros(lses.shape, dtype)
    sums = walk.over_units(_Sums(jnp.zeros((*queries[0].shape[:3], spec.Dv), dtype), rows, rows), row)
    return _Sums(walk.cropped(sums.out, spec.layout), walk.cropped(sums.lse, "BNTH"), walk.cropped(sums.logs, "BNTH"))


def _block(
    walk: Walk, inputs: Inputs, tangents: Gradients, unit: Unit, column: Column,
    rows: tuple[jax.Array, jax.Array | None, jax.Array], sums: _Sums,
) -> _Sums:  # fmt: skip
    spec, (q, dq, lse) = walk.spec, rows
    of_keys = lambda x: None if x is None else walk.keys(x, unit, column)
    k, v, dk, dv = map(of_keys, (inputs.key, inputs.value, tangents.key, tangents.value))
    chosen = lambda new, x: x if new is None else new

    def scores(moved: tuple) -> jax.Array:
        captured = tuple(map(chosen, moved[2], inputs.captured.score))
        raw = raw_scores(
            walk.named("bkgqd,bksd->bkgqs"), scaled_query(chosen(moved[0], q), spec), chosen(moved[1], k), spec
        )
        replaced = inputs._replace(captured=inputs.captured._replace(score=captured))
        return modified(walk, replaced, raw, unit, column.number)

    moving = lambda x, dx: None if dx is None else x
    captured = tuple(map(moving, inputs.captured.score, tangents.score_operands))
    s, ds = jax.jvp(scores, ((moving(q, dq), moving(k, dk), captured),), ((dq, dk, tangents.score_operands),))

    def weights(visible: jax.Array | None) -> tuple[jax.Array, jax.Array, jax.Array]:
        clear = lambda x: x if visible is None else jnp.where(visible, x, 0.0)
        if spec.normalize == "none":
            return clear(s), clear(ds), jnp.zeros_like(s)
        p = clear(jnp.exp(s - lse))
        t = jnp.where(p == 0, 0.0, p * ds)
        return p, t, jnp.where(p == 0, 0.0, t * (s - lse))

    p, t, logs = walk.masked(unit, column, weights)
    kept, visible = kept_weights(walk, inputs, unit, column.number), walk.visible_if_partial(unit, column)
    gemm = lambda p, v: einsum(walk.named("bkgqs,bksd->bkgqd"), p, v, spec)
    pv_dot = lambda p, v: masked_product(gemm, dropped(p, kept).astype(spec.dtype), v, visible)
    out = sums.out + pv_dot(t, v)
    out = out if dv is None else out + pv_dot(p, dv)
    if spec.normalize == "none":
        return sums._replace(out=out)
    return _Sums(out, sums.lse + jnp.sum(t, axis=-1), sums.logs + jnp.sum(logs, axis=-1))

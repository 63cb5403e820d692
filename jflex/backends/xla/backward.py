"""The backward pass of blockwise attention in plain JAX: a row of blocks after another."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from jflex.backends.base import Gradients, Inputs, Saved, SavedCotangents
from jflex.backends.xla import softmax
from jflex.backends.xla.block_scores import dropped, einsum, kept_weights, modified, raw_scores, scaled_query, scaled_up
from jflex.backends.xla.blockwise import KEYS_FIRST, Column, Unit, Walk
from jflex.backends.xla.captured import CapturedGradients
from jflex.backends.xla.containment import all_finite, cleared, masked_product
from jflex.backends.xla.loads import split_loads
from pallas_kernels.plan import GradientRequest
from pallas_kernels.spec import AttentionSpec


class _Rows(NamedTuple):
    """Arrays of the queries of one unit, in the layouts of the GEMMs of the backward pass."""

    unit: Unit
    q: jax.Array
    q_columns: jax.Array  # scaled
    d_out: jax.Array
    d_out_columns: jax.Array
    lse: jax.Array
    delta: jax.Array
    d_entropy: jax.Array | None


_Carry: TypeAlias = tuple[jax.Array, dict[str, Any]]  # dQ, and accumulators: arrays, lists of arrays or None


class Backward:
    """The arrays of one backward pass."""

    def __init__(
        self, spec: AttentionSpec, inputs: Inputs, saved: Saved, d_saved: SavedCotangents, requested: GradientRequest
    ) -> None:
        self.walk, self.inputs, self.requested = Walk.from_inputs(spec, inputs, KEYS_FIRST), inputs, requested
        self.spec = spec = self.walk.spec
        self.query, self.d_out = (self.walk.padded(x, spec.layout) for x in (inputs.query, d_saved.out))
        delta = jnp.sum(saved.out.astype(spec.exact) * d_saved.out.astype(spec.exact), axis=-1)
        delta = delta if spec.layout == "BNTH" else delta.swapaxes(1, 2)
        vectors = softmax.row_vectors(delta, saved, d_saved)
        self.vectors = jax.tree.map(lambda x: self.walk.padded(x, "BNTH"), vectors)
        self.is_clean = self.walk.is_partial is False or all_finite(d_saved.out)
        loaded = None if spec.score_mod is None else split_loads(spec.score_mod)
        self.captured = None if loaded is None else CapturedGradients(self.walk, loaded, inputs.captured.score)

    def run(self) -> Gradients:
        """All requested gradients."""
        spec, walk, requested = self.spec, self.walk, self.requested
        dtype = spec.exact
        grads = {
            "query": jnp.zeros(self.query.shape, dtype) if requested.query else None,
            "key": walk.zero_keys(spec.D, dtype) if requested.key else None,
            "value": walk.zero_keys(spec.Dv, dtype) if requested.value else None,
            "operands": [
                jnp.zeros(x.size, jnp.float32) if want else None
                for x, want in zip(self.inputs.captured.score, requested.score_operands, strict=True)
            ],
        }

        def row(grads, unit):
            rows = self._rows(unit)
            step = lambda carry, column: self._block(rows, carry, column)
            d_q, grads = walk.over_columns(unit, (jnp.zeros(rows.q_columns.shape, dtype), grads), step)
            if requested.query:
                d_q = jnp.einsum(walk.named("bkdgq->bkgqd"), d_q)
                grads = grads | {"query": walk.set_queries(grads["query"], d_q, unit, spec.layout)}
            return grads

        grads = walk.over_units(grads, row)
        d_query = walk.cropped(grads["query"], spec.layout) if requested.query else None
        joined = lambda x: None if x is None else walk.joined_keys(x)
        operands = tuple(
            None if g is None else g.reshape(x.shape)
            for g, x in zip(grads["operands"], self.inputs.captured.score, strict=True)
        )
        d_value = None if grads["value"] is None else scaled_up(grads["value"], spec)
        return Gradients(d_query, joined(grads["key"]), joined(d_value), operands)

    def _rows(self, unit: Unit) -> _Rows:
        spec, walk = self.spec, self.walk
        q, d_out = (walk.queries(x, unit, spec.layout) for x in (self.query, self.d_out))
        over_keys = lambda x: jnp.expand_dims(walk.queries(x, unit, "BNTH"), walk.axes.index("s"))
        columns = lambda x: jnp.einsum(walk.named("bkgqd->bkdgq"), x)
        vectors = jax.tree.map(over_keys, self.vectors)
        return _Rows(unit, self._contained(q), columns(scaled_query(q, spec)), d_out, columns(d_out), *vectors)

    def _contained(self, x: jax.Array) -> jax.Array:
        """Queries or keys for products with dS: a masked one may be NaN, while its dS is 0; a visible NaN is in dS."""
        return x if self.walk.is_partial is False else cleared(x)

    def _block(self, rows: _Rows, carry: _Carry, column: Column) -> _Carry:
        spec, walk, unit = self.spec, self.walk, rows.unit
        d_q, grads = carry
        k, v = (walk.keys(x, unit, column) for x in (self.inputs.key, self.inputs.value))
        gemm = lambda axes, a, b: einsum(walk.named(axes), a, b, spec)
        raw = raw_scores(walk.named("bksd,bkdgq->bksgq"), k, rows.q_columns, spec)
        is_softmax = spec.normalize == "softmax"
        s = modified(walk, self.inputs, raw, unit, column.number)
        kept = kept_weights(walk, self.inputs, unit, column.number)
        d_p = scaled_up(dropped(gemm("bksd,bkdgq->bksgq", v, rows.d_out_columns), kept), spec)

        def weights(visible: jax.Array | None) -> tuple[jax.Array, jax.Array]:  # P and dS
            clear = lambda x: x if visible is None else jnp.where(visible, x, 0.0)
            p = jnp.exp(s - rows.lse) if is_softmax else s
            if not is_softmax:
                return clear(p), clear(d_p)
            if rows.d_entropy is None:
                return clear(p), clear(p * (d_p - rows.delta))
            of_entropy = rows.d_entropy * jnp.where(p == 0, 0.0, s - rows.lse)  # dH/dP is ``-log P``, up to a number
            return clear(p), clear(p * (d_p - of_entropy - rows.delta))  # that delta takes away

        p, d_s = walk.masked(unit, column, weights)
        is_visible, operands = walk.visible_if_partial(unit, column), grads["operands"]
        if self.captured is not None:
            visible = None if is_visible is None else is_visible()
            raw_d_s, operands = self.captured.through_mod(unit, column.number, raw, d_s, visible, operands)
            clear = lambda visible: raw_d_s if visible is None else jnp.where(visible, raw_d_s, 0.0)
            d_s = walk.masked(unit, column, clear)  # where masked, a derivative may be NaN
        d_s = (d_s * spec.scale).astype(spec.dtype)
        p = dropped(p, kept).astype(spec.dtype)
        d_key, d_value = grads["key"], grads["value"]
        over_queries = functools.partial(gemm, "bksgq,bkgqd->bksd")
        if d_key is not None:
            d_key = walk.add_keys(d_key, over_queries(d_s, rows.q), unit, column.number)
        if d_value is not None:
            d_v = masked_product(over_queries, p, rows.d_out, is_visible, self.is_clean)
            d_value = walk.add_keys(d_value, d_v, unit, column.number)
        if self.requested.query:
            d_q = d_q + gemm("bksd,bksgq->bkdgq", self._contained(k), d_s)
        return d_q, grads | {"key": d_key, "value": d_value, "operands": operands}

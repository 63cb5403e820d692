"""The backward pass of blockwise attention in plain JAX: a row of blocks after another."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from jflex.backends.base import Gradients, Inputs, Saved, SavedCotangents
from jflex.backends.xla import softmax
from jflex.backends.xla.block_scores import einsum, exact, modified, scaled
from jflex.backends.xla.blockwise import KEYS_FIRST, Column, Unit, Walk
from jflex.backends.xla.captured import CapturedGradients
from jflex.backends.xla.containment import cleared, masked_product
from jflex.backends.xla.dropout import dropped, kept_weights, scaled_up
from jflex.backends.xla.heads import join_heads, join_key_heads, padded_query, split_heads
from jflex.block_mask.lists import block_count
from pallas_kernels.plan import GradientRequest
from pallas_kernels.spec import AttentionSpec


class _Rows(NamedTuple):
    """What the backward pass reads of the queries of one unit, in the layouts of its GEMMs."""

    unit: Unit
    q: jax.Array
    q_columns: jax.Array
    d_out: jax.Array
    d_out_columns: jax.Array
    lse: jax.Array
    delta: jax.Array
    d_entropy: jax.Array | None

    @classmethod
    def of(cls, walk: Walk, unit: Unit, query: jax.Array, d_out: jax.Array, vectors: softmax.RowVectors) -> _Rows:
        """Slices them; the arrays are [B, Hkv, group, T, ...]."""
        q, d_out, lse, delta = (walk.queries(x, unit) for x in (query, d_out, vectors.lse, vectors.delta))
        d_entropy = None if vectors.d_entropy is None else walk.queries(vectors.d_entropy, unit)[:, :, None]
        columns = lambda x: jnp.einsum("bkgqd->bkdgq", x)
        return cls(unit, q, columns(q), d_out, columns(d_out), lse[:, :, None], delta[:, :, None], d_entropy)


_Carry: TypeAlias = tuple[jax.Array, dict[str, Any]]  # dQ, and accumulators: arrays, lists of arrays or None


class Backward:
    """The arrays of one backward pass."""

    def __init__(
        self, spec: AttentionSpec, inputs: Inputs, saved: Saved, d_saved: SavedCotangents, requested: GradientRequest
    ) -> None:
        self.walk, self.inputs, self.requested = Walk.of(spec, inputs, KEYS_FIRST), inputs, requested
        self.spec = self.walk.spec
        self.query = padded_query(self.walk, inputs.query)
        out, d_out = (split_heads(x, spec) for x in (saved.out, d_saved.out))
        delta = jnp.sum(out.astype(exact(spec)) * d_out.astype(exact(spec)), axis=-1)
        vectors = softmax.row_vectors(delta, saved, d_saved)
        rows = self.walk.rows * self.walk.size[0]
        pad = lambda x, fill=0.0: jnp.pad(
            x, [(0, 0)] * 3 + [(0, rows - spec.T)] + [(0, 0)] * (x.ndim - 4), constant_values=fill
        )
        d_entropy = None if vectors.d_entropy is None else pad(vectors.d_entropy)
        self.d_out, delta = pad(d_out), pad(vectors.delta)
        self.vectors = softmax.RowVectors(pad(vectors.lse, jnp.inf), delta, d_entropy)
        self.captured = None if spec.score_mod is None else CapturedGradients.of(self.walk, inputs.score_operands)

    def run(self) -> Gradients:
        """All requested gradients."""
        spec, walk, wanted = self.spec, self.walk, self.requested
        dtype = exact(spec)
        keys = (spec.B, spec.Hkv, block_count(spec.S, walk.size[1]) * walk.size[1])
        grads = {
            "key": jnp.zeros((*keys, spec.D), dtype) if wanted.key else None,
            "value": jnp.zeros((*keys, spec.Dv), dtype) if wanted.value else None,
            "operands": [
                jnp.zeros(x.size, jnp.float32) if want else None
                for x, want in zip(self.inputs.score_operands, wanted.score_operands, strict=True)
            ],
        }

        def row(grads, number):
            unit = walk.unit(number)
            rows = _Rows.of(walk, unit, self.query, self.d_out, self.vectors)
            step = lambda carry, column, is_partial: self._block(rows, carry, column, is_partial)
            d_q, grads = walk.over_columns(unit, (jnp.zeros(rows.q_columns.shape, dtype), grads), step)
            return grads, jnp.einsum("bkdgq->bkgqd", d_q)

        grads, d_query = lax.scan(row, grads, jnp.arange(walk.units, dtype=jnp.int32))
        d_query = join_heads(walk.assemble(d_query), spec) if wanted.query else None
        joined = lambda x: None if x is None else join_key_heads(x, spec)
        operands = tuple(
            None if g is None else g.reshape(x.shape)
            for g, x in zip(grads["operands"], self.inputs.score_operands, strict=True)
        )
        d_value = None if grads["value"] is None else scaled_up(grads["value"], spec)
        return Gradients(d_query, joined(grads["key"]), joined(d_value), operands)

    def _block(self, rows: _Rows, carry: _Carry, at: Column, is_partial: bool) -> _Carry:
        spec, walk, unit, column = self.spec, self.walk, rows.unit, at.number
        d_q, grads = carry
        k, v = (walk.keys(x, unit, at, is_partial=is_partial) for x in (self.inputs.key, self.inputs.value))
        visible = walk.visible(unit, column) if is_partial else None
        clear = lambda x, other=0.0: x if visible is None else jnp.where(visible, x, other)
        raw = scaled(einsum("bksd,bkdgq->bksgq", k, rows.q_columns, spec), spec)
        is_softmax = spec.normalize == "softmax"
        s = clear(modified(walk, self.inputs, raw, unit, column), -jnp.inf if is_softmax else 0.0)
        p = clear(jnp.exp(s - rows.lse)) if is_softmax else s
        kept = kept_weights(walk, self.inputs, unit, column)
        d_p = scaled_up(dropped(einsum("bksd,bkdgq->bksgq", v, rows.d_out_columns, spec), kept), spec)
        if rows.d_entropy is not None:  # dH/dP is ``-log P``, up to a number that delta takes away
            d_p = d_p - rows.d_entropy * jnp.where(p == 0, 0.0, s - rows.lse)
        d_s = clear(p * (d_p - rows.delta) if is_softmax else d_p)
        operands = grads["operands"]
        if self.captured is not None:
            d_s, operands = self.captured.through_mod(unit, column, raw, d_s, visible, operands)
        d_s = clear(d_s)
        d_s = (d_s * spec.scale).astype(spec.dtype)
        p = dropped(p, kept).astype(spec.dtype)
        d_key, d_value = grads["key"], grads["value"]
        # A masked q or k may be NaN, while its dS is 0; a visible NaN has made dS NaN.
        contained = cleared if is_partial else lambda x: x
        over_queries = lambda a, b: einsum("bksgq,bkgqd->bksd", a, b, spec)
        if d_key is not None:
            d_key = walk.add_keys(d_key, over_queries(d_s, contained(rows.q)), unit, column)
        if d_value is not None:
            d_value = walk.add_keys(d_value, masked_product(over_queries, p, rows.d_out, visible), unit, column)
        if self.requested.query:
            d_q = d_q + einsum("bksd,bksgq->bkdgq", contained(k), d_s, spec)
        return d_q, {"key": d_key, "value": d_value, "operands": operands}

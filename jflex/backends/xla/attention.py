"""Blockwise attention in plain JAX, for CPUs and TPUs: linear memory, and empty blocks are skipped."""

from __future__ import annotations

import math
from typing import ClassVar

import jax
import jax.numpy as jnp

from jflex.backends.base import Backend, Gradients, Inputs, PagedInputs, Plan, Saved, SavedCotangents
from jflex.backends.eight_bits import widened
from jflex.backends.results import fold_sinks
from jflex.backends.xla import paged, softmax
from jflex.backends.xla.backward import Backward
from jflex.backends.xla.block_scores import dropped, einsum, kept_weights, modified, raw_scores, scaled_query, scaled_up
from jflex.backends.xla.blockwise import QUERIES_FIRST, Column, Unit, Walk
from jflex.backends.xla.containment import all_finite, all_of_batch, masked_product
from jflex.backends.xla.loads import split_loads
from jflex.backends.xla.tangent import tangent
from pallas_kernels.plan import GradientRequest, Refusal
from pallas_kernels.spec import AttentionSpec

_MAX_ELEMENTS = 1 << 31


class Xla(Backend):
    """Runs everywhere, with any mod that `jax.vmap` can run."""

    name: ClassVar[str] = "xla"

    def plan(self, spec: AttentionSpec, requested: GradientRequest | None) -> Plan | Refusal:
        """The blocks of the mask, or fixed ones, in both passes."""
        reason = _limit(spec, requested)
        if reason is not None:
            return Refusal(reason)
        if spec.paging is not None:
            return Plan(lambda: "pages, one request after another")
        return Plan(lambda: _blocks_of(spec))

    def forward(self, spec: AttentionSpec, inputs: Inputs | PagedInputs) -> Saved:
        """Online softmax over the blocks of each row (Milakov and Gimelshein 2018, arXiv:1805.02867)."""
        if isinstance(inputs, PagedInputs):
            return paged.attend(spec, inputs)
        inputs = inputs if spec.qk_dtype is None else widened(inputs)
        walk = Walk.from_inputs(spec, inputs, QUERIES_FIRST)
        spec, dtype = walk.spec, spec.exact
        query, is_softmax = walk.padded(inputs.query, spec.layout), spec.normalize == "softmax"

        def row(saved: Saved, unit: Unit) -> Saved:
            q = scaled_query(walk.queries(query, unit, spec.layout), spec)

            def step(state: softmax.SoftmaxState, column: Column) -> softmax.SoftmaxState:
                k, v = (walk.keys(x, unit, column) for x in (inputs.key, inputs.value))
                s = raw_scores(walk.named("bkgqd,bksd->bkgqs"), q, k, spec)
                s = modified(walk, inputs, s, unit, column.number)

                def clear(visible: jax.Array | None) -> tuple[jax.Array, jax.Array]:
                    """The scores, and whether NaN of masked values cannot reach the output."""
                    if visible is None:
                        return s, jnp.bool_(True)
                    return jnp.where(visible, s, -jnp.inf if is_softmax else 0.0), all_finite(v)

                weights, is_clean = walk.masked(unit, column, clear)
                is_clean = all_of_batch(is_clean)
                kept = kept_weights(walk, inputs, unit, column.number)
                gemm = lambda p, v: einsum(walk.named("bkgqs,bksd->bkgqd"), p, v, spec)
                visible = walk.visible_if_partial(unit, column)
                pv_dot = lambda p: masked_product(gemm, dropped(p, kept).astype(spec.dtype), v, visible, is_clean)
                if is_softmax:
                    return softmax.update(state, weights, pv_dot)
                return state._replace(out=state.out + pv_dot(weights))

            state = walk.over_columns(unit, softmax.start(spec, q.shape[:-1], dtype), step)
            state = state._replace(out=scaled_up(state.out, spec))
            new = softmax.finish(spec, state) if is_softmax else Saved(state.out, jnp.zeros(q.shape[:-1], dtype))
            out = walk.set_queries(saved.out, new.out, unit, spec.layout)
            set_rows = lambda x, block: walk.set_queries(x, block, unit, "BNTH")
            return jax.tree.map(set_rows, saved._replace(out=None), new._replace(out=None))._replace(out=out)

        length = walk.rows * walk.size[0]
        out = jnp.zeros((*query.shape[:3], spec.Dv), dtype)
        of_rows = jnp.zeros((spec.B, spec.Hq, length), jnp.float32)
        saved = Saved(out, of_rows, **dict.fromkeys(spec.stats, of_rows))
        saved = walk.over_units(saved, row)
        out = walk.cropped(saved.out, spec.layout)
        saved = jax.tree.map(lambda x: walk.cropped(x, "BNTH"), saved._replace(out=None))._replace(out=out)
        saved = fold_sinks(spec, saved, inputs.sinks)
        return saved._replace(out=saved.out.astype(spec.dtype))

    def backward(
        self, spec: AttentionSpec, inputs: Inputs, saved: Saved, d_saved: SavedCotangents, requested: GradientRequest
    ) -> Gradients:
        """One pass over the rows: each row computes its dQ, and adds to dK, dV and gradients of captures in place."""
        return Backward(spec, inputs, saved, d_saved, requested).run()

    def plan_tangent(self, spec: AttentionSpec, requested: GradientRequest) -> Plan | Refusal:
        """The blocks of the forward pass, along any input."""
        return Plan(lambda: _blocks_of(spec))

    def tangent(self, spec: AttentionSpec, inputs: Inputs, saved: Saved, tangents: Gradients) -> SavedCotangents:
        """One pass over the rows, with the weights that the lse gives."""
        return tangent(spec, inputs, saved, tangents)


def _blocks_of(spec: AttentionSpec) -> str:
    size = spec.block_size
    return "dense blocks, no mask lists" if size is None else f"{size[0]} x {size[1]}, the blocks of the mask"


def _limit(spec: AttentionSpec, requested: GradientRequest | None) -> str | None:
    """The gradients and promises of a `Config` that this backend does not have, or None."""
    operands = () if requested is None or spec.score_mod is None else spec.score_mod.operands
    for (shape, dtype), is_requested in zip(operands, requested.score_operands if requested else (), strict=True):
        if is_requested and math.prod(shape) >= _MAX_ELEMENTS:
            return (
                f"the gradient of a captured array of {dtype}{list(shape)}, with 2 ** 31 elements or more, would be "
                "added at positions that 32 bits do not hold"
            )
    if spec.platform == "cpu":
        return None
    if spec.config.batch_invariant:
        return f"on a {spec.platform}, XLA chooses its GEMMs by the sizes of the batch, so it is not batch invariant"
    if spec.config.deterministic and requested is not None and spec.score_mod is not None:
        whole = split_loads(spec.score_mod).whole
        if any(requested.score_operands[number] for number in whole):
            return (
                "a score reads many elements of a captured array, or at an index that uses the score: its gradient is "
                "added in no fixed order, which `Config(deterministic=True)` excludes"
            )
    return None

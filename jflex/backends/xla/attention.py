"""Blockwise attention in plain JAX, for CPUs and TPUs: linear memory, and empty blocks are skipped."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import jaxpr_as_fun

from jflex._call.eight_bits import widened
from jflex._call.sinks import fold_sinks
from jflex.backends.base import Backend, Gradients, Inputs, PagedInputs, Plan, Saved, SavedCotangents
from jflex.backends.xla import paged, softmax
from jflex.backends.xla.blockwise import (
    INDEX_OF_AXIS,
    KEYS_FIRST,
    QUERIES_FIRST,
    Column,
    Unit,
    Walk,
    evaluate,
    over_block,
)
from jflex.backends.xla.containment import cleared, masked_product
from jflex.backends.xla.dropout import dropped, kept_weights, scaled_up
from jflex.backends.xla.loads import Load, LoadedMod, split_loads
from jflex.block_mask.lists import block_count
from jflex.mods.batchable import Factored, batchable, factored
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
        size = spec.block_size
        if size is not None:
            return Plan(lambda: f"{size[0]} x {size[1]}, the blocks of the mask")
        return Plan(lambda: "dense blocks, no mask lists")

    def not_preferred(self, spec: AttentionSpec, requested: GradientRequest | None) -> str | None:
        """It is the last in the order."""
        del spec, requested
        return None

    def forward(self, spec: AttentionSpec, inputs: Inputs | PagedInputs) -> Saved:
        """Online softmax over the blocks of each row (Milakov and Gimelshein 2018, arXiv:1805.02867)."""
        if isinstance(inputs, PagedInputs):
            return paged.attend(spec, inputs)
        inputs = inputs._replace(query=widened(spec, inputs.query), key=widened(spec, inputs.key))
        walk = Walk.of(spec, inputs, QUERIES_FIRST)
        spec, query = walk.spec, _padded_query(walk, inputs.query)

        def row(number: jax.Array) -> Saved:
            unit = walk.unit(number)
            q = walk.queries(query, unit)

            def step(state, column, is_partial):
                keys = lambda x: walk.keys(x, unit, column, is_partial=is_partial)
                s = _scaled(_einsum("bkgqd,bksd->bkgqs", q, keys(inputs.key), spec), spec)
                s = _modified(walk, inputs, s, unit, column.number)
                visible = walk.visible(unit, column.number) if is_partial else None
                s = s if visible is None else jnp.where(visible, s, -jnp.inf)
                kept = kept_weights(walk, inputs, unit, column.number)
                return _accumulate(state, s, keys(inputs.value), visible, kept, spec)

            shape, exact = q.shape[:-1], _exact(spec)
            state = walk.over_columns(unit, softmax.start(spec, shape, exact), step)
            state = state._replace(out=scaled_up(state.out, spec))
            if spec.normalize == "none":
                return Saved(state.out, jnp.zeros(shape, exact))
            return softmax.finish(spec, state)

        saved = jax.tree.map(walk.assemble, lax.map(row, jnp.arange(walk.units, dtype=jnp.int32)))
        of_rows = lambda x: x.reshape(spec.B, spec.Hq, spec.T).astype(jnp.float32)
        saved = jax.tree.map(of_rows, saved._replace(out=None))._replace(out=_join_heads(saved.out, spec))
        saved = fold_sinks(spec, saved, inputs.sinks)
        return saved._replace(out=saved.out.astype(spec.dtype))

    def backward(
        self,
        spec: AttentionSpec,
        inputs: Inputs,
        saved: Saved,
        d_saved: SavedCotangents,
        requested: GradientRequest,
    ) -> Gradients:
        """One pass over the rows: each row computes its dQ, and adds to dK, dV and gradients of captures in place."""
        return _Backward(spec, inputs, saved, d_saved, requested).run()


def _limit(spec: AttentionSpec, requested: GradientRequest | None) -> str | None:
    """Which gradients, and what of the promises of a `Config`, this backend does not have, or None."""
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


class _Backward:
    """The arrays of one backward pass."""

    def __init__(
        self, spec: AttentionSpec, inputs: Inputs, saved: Saved, d_saved: SavedCotangents, requested: GradientRequest
    ) -> None:
        self.walk, self.inputs, self.requested = Walk.of(spec, inputs, KEYS_FIRST), inputs, requested
        self.spec = self.walk.spec
        self.query = _padded_query(self.walk, inputs.query)
        exact = _exact(spec)
        out, d_out = (_split_heads(x, spec) for x in (saved.out, d_saved.out))
        delta = jnp.sum(out.astype(exact) * d_out.astype(exact), axis=-1)
        vectors = softmax.row_vectors(delta, saved, d_saved)
        rows = self.walk.rows * self.walk.size[0]
        pad = lambda x, fill=0.0: jnp.pad(
            x, [(0, 0)] * 3 + [(0, rows - spec.T)] + [(0, 0)] * (x.ndim - 4), constant_values=fill
        )
        d_entropy = None if vectors.d_entropy is None else pad(vectors.d_entropy)
        self.d_out, delta = pad(d_out), pad(vectors.delta)
        self.vectors = softmax.RowVectors(pad(vectors.lse, jnp.inf), delta, d_entropy)
        self.loaded = split_loads(spec.score_mod) if spec.score_mod is not None else None

    def run(self) -> Gradients:
        """All requested gradients."""
        spec, walk, wanted = self.spec, self.walk, self.requested
        exact = _exact(spec)
        keys = (spec.B, spec.Hkv, block_count(spec.S, walk.size[1]) * walk.size[1])
        grads = {
            "key": jnp.zeros((*keys, spec.D), exact) if wanted.key else None,
            "value": jnp.zeros((*keys, spec.Dv), exact) if wanted.value else None,
            "operands": [
                jnp.zeros(x.size, jnp.float32) if want else None
                for x, want in zip(self.inputs.score_operands, wanted.score_operands, strict=True)
            ],
        }

        def row(grads, number):
            unit = walk.unit(number)
            rows = _Rows.of(walk, unit, self.query, self.d_out, self.vectors)
            step = lambda carry, column, is_partial: self._block(rows, carry, column, is_partial)
            d_q, grads = walk.over_columns(unit, (jnp.zeros(rows.q_columns.shape, exact), grads), step)
            return grads, jnp.einsum("bkdgq->bkgqd", d_q)

        grads, d_query = lax.scan(row, grads, jnp.arange(walk.units, dtype=jnp.int32))
        d_query = _join_heads(walk.assemble(d_query), spec) if wanted.query else None
        joined = lambda x: None if x is None else _join_key_heads(x, spec)
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
        raw = _scaled(_einsum("bksd,bkdgq->bksgq", k, rows.q_columns, spec), spec)
        is_softmax = spec.normalize == "softmax"
        s = clear(_modified(walk, self.inputs, raw, unit, column), -jnp.inf if is_softmax else 0.0)
        p = clear(jnp.exp(s - rows.lse)) if is_softmax else s
        kept = kept_weights(walk, self.inputs, unit, column)
        d_p = scaled_up(dropped(_einsum("bksd,bkdgq->bksgq", v, rows.d_out_columns, spec), kept), spec)
        if rows.d_entropy is not None:  # dH/dP is ``-log P``, up to a number that delta takes away
            d_p = d_p - rows.d_entropy * jnp.where(p == 0, 0.0, s - rows.lse)
        d_s = clear(p * (d_p - rows.delta) if is_softmax else d_p)
        d_s, operands = self._through_mod(unit, column, raw, d_s, visible, grads["operands"])
        d_s = clear(d_s)
        d_s = (d_s * spec.scale).astype(spec.dtype)
        p = dropped(p, kept).astype(spec.dtype)
        d_key, d_value = grads["key"], grads["value"]
        # A masked q or k may be NaN, while its dS is 0; a visible NaN has made dS NaN.
        contained = cleared if is_partial else lambda x: x
        over_queries = lambda a, b: _einsum("bksgq,bkgqd->bksd", a, b, spec)
        if d_key is not None:
            d_key = walk.add_keys(d_key, over_queries(d_s, contained(rows.q)), unit, column)
        if d_value is not None:
            d_value = walk.add_keys(d_value, masked_product(over_queries, p, rows.d_out, visible), unit, column)
        if self.requested.query:
            d_q = d_q + _einsum("bksd,bksgq->bkdgq", contained(k), d_s, spec)
        return d_q, {"key": d_key, "value": d_value, "operands": operands}

    def _through_mod(self, unit, column, raw, d_s, visible, grads) -> tuple[jax.Array, list[jax.Array | None]]:
        """Cotangents of the raw scores, and of the captured arrays added to `grads`."""
        if self.loaded is None:
            return d_s, grads
        loaded, operands, indices = self.loaded, self.inputs.score_operands, self.walk.indices(unit, column)

        def pull(score, cotangent, *scalars):
            values = loaded.values(operands, score, *scalars)
            _, vjp = jax.vjp(lambda s, xs: loaded.rest(xs, operands, s, *scalars), score, values)
            d_score, d_values = vjp(cotangent)
            return [d_score, *d_values]

        exact = raw.dtype
        raw, d_s = raw.astype(jnp.float32), d_s.astype(jnp.float32)
        d_score, *d_loads = _over_block(pull, (raw, d_s), indices, self.walk.axes)
        grads = list(grads)
        for load, cotangent in zip(loaded.loads, d_loads, strict=True):
            if grads[load.operand] is not None:
                cotangent = _summed(cotangent, load, self.walk.axes, visible)
                grads[load.operand] = _scatter(
                    loaded, load, operands, indices, cotangent, grads[load.operand], self.walk.axes,
                    ordered=self.spec.config.deterministic and self.spec.platform != "cpu",
                )  # fmt: skip
        for number in loaded.whole:
            if grads[number] is not None:
                grads[number] = grads[number] + self._of_whole(loaded.traced, number, raw, d_s, indices, visible)
        return d_score.rest.astype(exact), grads

    def _of_whole(self, mod, number, raw, d_s, indices, visible) -> jax.Array:
        """Flat gradient of an operand of which the mod reads many values at once, or at an index that uses the score.

        A mod may be NaN where masked, and so is 0 times its derivative: there it is evaluated at a visible position.
        """
        operands, axes = self.inputs.score_operands, self.walk.axes
        places = (raw, *over_block(lambda *scalars: scalars, (), indices, axes))
        if visible is not None:
            seen = jnp.argmax(jnp.broadcast_to(visible, raw.shape))
            places = tuple(jnp.where(visible, x, x.reshape(-1)[seen]) for x in places)

        def whole(x: jax.Array) -> jax.Array:
            of_scalars = functools.partial(mod, [*operands[:number], x, *operands[number + 1 :]])
            return functools.reduce(lambda f, _: jax.vmap(f), axes, of_scalars)(*places)

        pull = lambda x, cotangent: jax.vjp(whole, x)[1](cotangent)
        [gradient] = jaxpr_as_fun(batchable(jax.make_jaxpr(pull)(operands[number], d_s)))(operands[number], d_s)
        gradient = gradient.astype(jnp.float32).reshape(-1)
        return gradient if visible is None else jnp.where(jnp.any(visible), gradient, 0.0)


def _over_block(
    function: Callable[..., Sequence[jax.Array]], blocks: Sequence[jax.Array], indices: Sequence[jax.Array], axes: str
) -> list[Factored]:
    """`over_block` of a function of several results, each `factored`; factors are not broadcast over the block."""
    depends: list[frozenset[int]] = []

    def pairs(*args):
        found = factored(function, *args)
        depends[:] = [x.depends for x in found]
        return [(x.scale, x.rest) for x in found]

    found = over_block(pairs, blocks, indices, axes)
    first = len(blocks)

    def own_size(rest: jax.Array, depends: frozenset[int]) -> jax.Array:
        if depends & set(range(first)):
            return rest
        varies = lambda axis: first + INDEX_OF_AXIS[axis] in depends
        return rest[tuple(slice(None) if varies(axis) else slice(0, 1) for axis in axes)]

    return [
        Factored(scale, rest if scale is None else own_size(rest, own), own)
        for (scale, rest), own in zip(found, depends, strict=True)
    ]


def _summed(cotangent: Factored, load: Load, axes: str, visible: jax.Array | None) -> jax.Array:
    """The cotangent of a load, summed over the axes of a block on which the load does not depend."""
    scale, rest, _ = cotangent
    if visible is not None:  # a mod may give NaN where masked
        of_elements = rest if scale is None else scale
        seen = jnp.broadcast_to(visible, of_elements.shape[: len(axes)])
        shared = tuple(i for i in range(len(axes)) if rest.shape[i] < seen.shape[i])
        of_rest = jnp.expand_dims(jnp.any(seen, axis=shared, keepdims=True), tuple(range(len(axes), rest.ndim)))
        rest = jnp.where(of_rest, rest, jnp.zeros_like(rest))
        scale = None if scale is None else jnp.where(seen, scale, jnp.zeros_like(scale))
    kept = [axis for axis in axes if INDEX_OF_AXIS[axis] in load.axes]
    if scale is None:
        return jnp.sum(rest.astype(jnp.float32), axis=tuple(i for i, axis in enumerate(axes) if axis not in kept))
    own = "".join(axis for i, axis in enumerate(axes) if rest.shape[i] == scale.shape[i])
    rest = rest.reshape(*(n for n, m in zip(rest.shape, scale.shape, strict=False) if n == m), *rest.shape[len(axes) :])
    more = "".join(chr(ord("A") + i) for i in range(rest.ndim - len(own)))
    return jnp.einsum(
        f"{axes},{own}{more}->{''.join(kept)}{more}", scale, rest.astype(jnp.float32), precision="highest",
        preferred_element_type=jnp.float32,
    )  # fmt: skip


def _scatter(
    loaded: LoadedMod,
    load: Load,
    operands: Sequence[jax.Array],
    indices: Sequence[jax.Array],
    cotangent: jax.Array,
    gradient: jax.Array,
    axes: str,
    *,
    ordered: bool,
) -> jax.Array:
    """Adds the summed cotangent of a load to the flat gradient of its operand."""
    place = lambda *scalars: loaded.positions(load, operands, jnp.float32(0), *scalars)
    for index in [INDEX_OF_AXIS[axis] for axis in reversed(axes)]:
        if index in load.axes:
            place = jax.vmap(place, in_axes=tuple(0 if a == index else None for a in range(4)))
    at = [x if a in load.axes else x.reshape(-1)[0] for a, x in enumerate(indices)]
    positions = place(*at).reshape(-1)
    positions = jnp.where(positions < 0, gradient.size, positions)
    if ordered:
        from pallas_kernels.ordered_add import ordered_add

        return ordered_add(gradient, positions, cotangent.reshape(-1))
    return gradient.at[positions].add(cotangent.reshape(-1), mode="drop")


def _exact(spec: AttentionSpec) -> jnp.dtype:
    """The dtype of scores and accumulators."""
    return jnp.dtype(spec.exact)


def _einsum(axes: str, a: jax.Array, b: jax.Array, spec: AttentionSpec) -> jax.Array:
    exact = _exact(spec)
    if spec.platform == "cpu":  # XLA's CPU lacks some 16-bit GEMMs with float32 results ("UNIMPLEMENTED")
        a, b = a.astype(exact), b.astype(exact)
    return jnp.einsum(axes, a, b, precision=spec.precision, preferred_element_type=exact)


def _scaled(scores: jax.Array, spec: AttentionSpec) -> jax.Array:
    return scores * jnp.asarray(spec.scale, scores.dtype)


def _modified(walk: Walk, inputs: Inputs, raw: jax.Array, unit: Unit, column: jax.Array) -> jax.Array:
    if walk.spec.score_mod is None:
        return raw
    indices = walk.indices(unit, column)
    return evaluate(walk.spec.score_mod, inputs.score_operands, raw.astype(jnp.float32), indices, walk.axes).astype(
        raw.dtype
    )


def _accumulate(
    state: softmax.SoftmaxState, s: jax.Array, v: jax.Array, visible: jax.Array | None, kept: jax.Array | None,
    spec: AttentionSpec,
) -> softmax.SoftmaxState:  # fmt: skip
    """One step of the online softmax; dropout concerns the output alone."""
    gemm = lambda p, v: _einsum("bkgqs,bksd->bkgqd", p, v, spec)
    pv_dot = lambda p: masked_product(gemm, dropped(p, kept).astype(spec.dtype), v, visible)
    if spec.normalize == "none":
        p = s if visible is None else jnp.where(visible, s, 0.0)
        return state._replace(out=state.out + pv_dot(p))
    return softmax.update(state, s, pv_dot)


def _padded_query(walk: Walk, query: jax.Array) -> jax.Array:
    """[B, Hkv, group, T, D], padded to whole blocks with zeros."""
    rows = walk.rows * walk.size[0] - walk.spec.T
    return jnp.pad(_split_heads(query, walk.spec), ((0, 0), (0, 0), (0, 0), (0, rows), (0, 0)))


def _split_heads(x: jax.Array, p: AttentionSpec) -> jax.Array:
    """[B, T, Hq, D] or [B, Hq, T, D] as [B, Hkv, group, T, D]."""
    x = x if p.layout == "BNTH" else x.swapaxes(1, 2)
    return x.reshape(p.B, p.Hkv, p.group, p.T, x.shape[-1])


def _join_heads(x: jax.Array, p: AttentionSpec) -> jax.Array:
    """The reverse of `_split_heads`."""
    x = x.reshape(p.B, p.Hq, p.T, x.shape[-1])
    return x if p.layout == "BNTH" else x.swapaxes(1, 2)


def _join_key_heads(x: jax.Array, p: AttentionSpec) -> jax.Array:
    """[B, Hkv, S (padded), D] in the layout of the call, summed over a shared batch."""
    x = x[:, :, : p.S]
    x = x.sum(axis=0, keepdims=True) if p.Bkv < p.B else x
    return x if p.layout == "BNTH" else x.swapaxes(1, 2)

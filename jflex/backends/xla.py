"""Blockwise attention in plain JAX: linear memory, empty blocks are never computed. What CPUs and TPUs run."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jflex.backends.base import Backend, Gradients, Inputs, Saved, SavedCotangents, Wanted
from jflex.backends.blockwise import INDEX_OF_AXIS, KEYS_FIRST, QUERIES_FIRST, Unit, Walk, evaluate, over_block
from jflex.block_lists import block_count
from jflex.loads import LoadedMod, split_loads
from jflex.problem import Problem


class Xla(Backend):
    """Runs everywhere, with any mod that `jax.vmap` can run."""

    name: ClassVar[str] = "xla"

    def unsupported(self, problem: Problem) -> str | None:
        """Runs everything."""
        del problem
        return None

    def describe(self, problem: Problem, *, forward_alone: bool = False) -> str:
        """The blocks of the mask, or fixed ones, in both passes."""
        del forward_alone
        if problem.blocks is not None:
            return f"{problem.blocks.size[0]} x {problem.blocks.size[1]}, the blocks of the mask"
        return "dense blocks, no mask lists"

    def forward(self, problem: Problem, inputs: Inputs) -> Saved:
        """Online softmax over the blocks of each row (Milakov and Gimelshein 2018, arXiv:1805.02867)."""
        walk = Walk.of(problem, inputs, QUERIES_FIRST)
        problem, query = walk.problem, _padded_query(walk, inputs.query)

        def row(number: jax.Array) -> tuple[jax.Array, jax.Array]:
            unit = walk.unit(number)
            q = walk.queries(query, unit)

            def step(state, column, is_partial):
                keys = lambda x: walk.keys(x, unit, column, is_partial=is_partial)
                s = _scaled(_einsum("bkgqd,bksd->bkgqs", q, keys(inputs.key), problem), problem)
                s = _modified(walk, inputs, s, unit, column)
                if is_partial:
                    s = jnp.where(walk.visible(unit, column), s, -jnp.inf)
                return _accumulate(state, s, keys(inputs.value), problem)

            shape, exact = q.shape[:-1], _exact(problem)
            start = (jnp.full(shape, -jnp.inf, exact), jnp.zeros(shape, exact), jnp.zeros((*shape, problem.Dv), exact))
            top, total, out = walk.over_columns(unit, start, step)
            return _finish(top, total, out)

        out, lse = map(walk.assemble, lax.map(row, jnp.arange(walk.units, dtype=jnp.int32)))
        lse = lse.reshape(problem.B, problem.Hq, problem.T).astype(jnp.float32)
        return Saved(_join_heads(out, problem).astype(problem.dtype), lse)

    def backward(
        self, problem: Problem, inputs: Inputs, saved: Saved, d_saved: SavedCotangents, wanted: Wanted
    ) -> Gradients:
        """One pass over the rows: dQ is a row's own, dK, dV and the gradients of captures are added up in place."""
        return _Backward(problem, inputs, saved, d_saved, wanted).run()


class _Rows(NamedTuple):
    """What the backward pass needs of the queries of one unit, in the orders in which it is multiplied."""

    unit: Unit
    q: jax.Array
    q_columns: jax.Array
    d_out: jax.Array
    d_out_columns: jax.Array
    lse: jax.Array
    delta: jax.Array

    @classmethod
    def of(cls, walk: Walk, unit: Unit, query: jax.Array, d_out: jax.Array, lse: jax.Array, delta: jax.Array) -> _Rows:
        """Slices them; the arrays are [B, Hkv, group, T, ...]."""
        q, d_out, lse, delta = (walk.queries(x, unit) for x in (query, d_out, lse, delta))
        columns = lambda x: jnp.einsum("bkgqd->bkdgq", x)
        return cls(unit, q, columns(q), d_out, columns(d_out), lse[:, :, None], delta[:, :, None])


class _Backward:
    """The arrays of one backward pass."""

    def __init__(
        self, problem: Problem, inputs: Inputs, saved: Saved, d_saved: SavedCotangents, wanted: Wanted
    ) -> None:
        self.walk, self.inputs, self.wanted = Walk.of(problem, inputs, KEYS_FIRST), inputs, wanted
        self.problem = self.walk.problem
        self.query = _padded_query(self.walk, inputs.query)
        exact = _exact(problem)
        out, d_out = (_split_heads(x, problem) for x in (saved.out, d_saved.out))
        delta = jnp.sum(out.astype(exact) * d_out.astype(exact), axis=-1)
        lse = saved.lse.reshape(delta.shape).astype(exact)
        if d_saved.lse is not None:
            delta = delta - d_saved.lse.reshape(delta.shape).astype(exact)
        lse = jnp.where(lse == -jnp.inf, jnp.inf, lse)  # a row that sees nothing: exp(s - inf) is 0
        rows = self.walk.rows * self.walk.size[0]
        pad = lambda x, fill=0.0: jnp.pad(
            x, [(0, 0)] * 3 + [(0, rows - problem.T)] + [(0, 0)] * (x.ndim - 4), constant_values=fill
        )
        self.d_out, self.delta, self.lse = pad(d_out), pad(delta), pad(lse, jnp.inf)
        self.loaded = split_loads(problem.score) if problem.score is not None else None

    def run(self) -> Gradients:
        """All wanted gradients."""
        problem, walk, wanted = self.problem, self.walk, self.wanted
        exact = _exact(problem)
        keys = (problem.B, problem.Hkv, block_count(problem.S, walk.size[1]) * walk.size[1])
        grads = {
            "key": jnp.zeros((*keys, problem.D), exact) if wanted.key else None,
            "value": jnp.zeros((*keys, problem.Dv), exact) if wanted.value else None,
            "operands": [
                jnp.zeros(x.size, jnp.float32) if want else None
                for x, want in zip(self.inputs.score_operands, wanted.score_operands, strict=True)
            ],
        }

        def row(grads, number):
            unit = walk.unit(number)
            rows = _Rows.of(walk, unit, self.query, self.d_out, self.lse, self.delta)
            step = lambda carry, column, is_partial: self._block(rows, carry, column, is_partial)
            d_q, grads = walk.over_columns(unit, (jnp.zeros(rows.q_columns.shape, exact), grads), step)
            return grads, jnp.einsum("bkdgq->bkgqd", d_q)

        grads, d_query = lax.scan(row, grads, jnp.arange(walk.units, dtype=jnp.int32))
        d_query = _join_heads(walk.assemble(d_query), problem) if wanted.query else None
        joined = lambda x: None if x is None else _join_key_heads(x, problem)
        operands = tuple(
            None if g is None else g.reshape(x.shape)
            for g, x in zip(grads["operands"], self.inputs.score_operands, strict=True)
        )
        return Gradients(d_query, joined(grads["key"]), joined(grads["value"]), operands)

    def _block(self, rows: _Rows, carry: Any, column: jax.Array, is_partial: bool) -> Any:
        problem, walk, unit = self.problem, self.walk, rows.unit
        d_q, grads = carry
        k, v = (walk.keys(x, unit, column, is_partial=is_partial) for x in (self.inputs.key, self.inputs.value))
        visible = walk.visible(unit, column) if is_partial else None
        clear = lambda x, other=0.0: x if visible is None else jnp.where(visible, x, other)
        raw = _scaled(_einsum("bksd,bkdgq->bksgq", k, rows.q_columns, problem), problem)
        s = clear(_modified(walk, self.inputs, raw, unit, column), -jnp.inf)
        p = jnp.exp(s - rows.lse)
        d_p = _einsum("bksd,bkdgq->bksgq", v, rows.d_out_columns, problem)
        d_s = clear(p * (d_p - rows.delta))
        d_s, operands = self._through_mod(unit, column, raw, d_s, visible, grads["operands"])
        d_s = clear(d_s)
        d_s = (d_s * problem.scale).astype(problem.dtype)
        p = p.astype(problem.dtype)
        d_key, d_value = grads["key"], grads["value"]
        if d_key is not None:
            d_key = walk.add_keys(d_key, _einsum("bksgq,bkgqd->bksd", d_s, rows.q, problem), unit, column)
        if d_value is not None:
            d_value = walk.add_keys(d_value, _einsum("bksgq,bkgqd->bksd", p, rows.d_out, problem), unit, column)
        if self.wanted.query:
            d_q = d_q + _einsum("bksd,bksgq->bkdgq", k, d_s, problem)
        return d_q, {"key": d_key, "value": d_value, "operands": operands}

    def _through_mod(self, unit, column, raw, d_s, visible, grads) -> tuple[jax.Array, list[jax.Array | None]]:
        """Cotangents of the raw scores, and of the captured arrays added to `grads`."""
        if self.loaded is None:
            return d_s, grads
        loaded, operands, indices = self.loaded, self.inputs.score_operands, self.walk.indices(unit, column)

        def pull(score, cotangent, *scalars):
            values = loaded.values(operands, score, *scalars)
            _, vjp = jax.vjp(lambda s, xs: loaded.rest(xs, operands, s, *scalars), score, values)
            return vjp(cotangent)

        exact = raw.dtype
        raw, d_s = raw.astype(jnp.float32), d_s.astype(jnp.float32)
        d_score, d_loads = over_block(pull, (raw, d_s), indices, self.walk.axes)
        grads = list(grads)
        for load, cotangent in zip(loaded.loads, d_loads, strict=True):
            if grads[load.operand] is not None:
                if visible is not None:  # a mod may give NaN where nothing is seen
                    own_axes = tuple(range(visible.ndim, cotangent.ndim))
                    cotangent = jnp.where(jnp.expand_dims(visible, own_axes), cotangent, jnp.zeros_like(cotangent))
                grads[load.operand] = _scatter(
                    loaded, load, operands, indices, cotangent, grads[load.operand], self.walk.axes
                )
        for number in loaded.whole:
            if grads[number] is not None:
                grads[number] = grads[number] + self._of_whole(loaded.traced, number, raw, d_s, indices, visible)
        return d_score.astype(exact), grads

    def _of_whole(self, mod, number, raw, d_s, indices, visible) -> jax.Array:
        """Gradient, flat, of an operand of which the mod reads much at once, or by the score.

        A mod may be NaN where nothing is seen, and so is 0 times its derivative: there it is evaluated at a place that
        is seen.
        """
        operands, axes = self.inputs.score_operands, self.walk.axes
        places = (raw, *over_block(lambda *scalars: scalars, (), indices, axes))
        if visible is not None:
            seen = jnp.argmax(jnp.broadcast_to(visible, raw.shape))
            places = tuple(jnp.where(visible, x, x.reshape(-1)[seen]) for x in places)

        def whole(x: jax.Array) -> jax.Array:
            of_scalars = functools.partial(mod, [*operands[:number], x, *operands[number + 1 :]])
            return functools.reduce(lambda f, _: jax.vmap(f), axes, of_scalars)(*places)

        [gradient] = jax.vjp(whole, operands[number])[1](d_s)
        gradient = gradient.astype(jnp.float32).reshape(-1)
        return gradient if visible is None else jnp.where(jnp.any(visible), gradient, 0.0)


def _scatter(
    loaded: LoadedMod,
    load: Any,
    operands: Sequence[jax.Array],
    indices: Sequence[jax.Array],
    cotangent: jax.Array,
    gradient: jax.Array,
    axes: str,
) -> jax.Array:
    """Adds the cotangent of a load, one for each element of a block, to the flat gradient of its operand."""
    summed = tuple(number for number, axis in enumerate(axes) if INDEX_OF_AXIS[axis] not in load.axes)
    cotangent = jnp.sum(cotangent.astype(jnp.float32), axis=summed)
    place = lambda *scalars: loaded.positions(load, operands, jnp.float32(0), *scalars)
    for index in [INDEX_OF_AXIS[axis] for axis in reversed(axes)]:
        if index in load.axes:
            place = jax.vmap(place, in_axes=tuple(0 if a == index else None for a in range(4)))
    at = [x if a in load.axes else x.reshape(-1)[0] for a, x in enumerate(indices)]
    positions = place(*at).reshape(-1)
    positions = jnp.where(positions < 0, gradient.size, positions)
    return gradient.at[positions].add(cotangent.reshape(-1), mode="drop")


def _exact(problem: Problem) -> Any:
    """The dtype of scores and sums."""
    return jnp.dtype(problem.exact)


def _einsum(axes: str, a: jax.Array, b: jax.Array, problem: Problem) -> jax.Array:
    exact = _exact(problem)
    if problem.platform == "cpu":  # XLA's CPU lacks some products of 16-bit numbers into float32 ("UNIMPLEMENTED")
        a, b = a.astype(exact), b.astype(exact)
    return jnp.einsum(axes, a, b, precision=problem.precision, preferred_element_type=exact)


def _scaled(products: jax.Array, problem: Problem) -> jax.Array:
    return products * jnp.asarray(problem.scale, products.dtype)


def _modified(walk: Walk, inputs: Inputs, raw: jax.Array, unit: Unit, column: jax.Array) -> jax.Array:
    if walk.problem.score is None:
        return raw
    indices = walk.indices(unit, column)
    return evaluate(walk.problem.score, inputs.score_operands, raw.astype(jnp.float32), indices, walk.axes).astype(
        raw.dtype
    )


def _accumulate(state: tuple[jax.Array, ...], s: jax.Array, v: jax.Array, problem: Problem) -> tuple[jax.Array, ...]:
    """One step of the online softmax."""
    top, total, out = state
    new_top = jnp.maximum(top, jnp.max(s, axis=-1))
    shift = jnp.where(new_top == -jnp.inf, 0.0, new_top)
    p = jnp.exp(s - shift[..., None])
    keep = jnp.exp(top - shift)
    out = out * keep[..., None] + _einsum("bkgqs,bksd->bkgqd", p.astype(problem.dtype), v, problem)
    return new_top, total * keep + jnp.sum(p, axis=-1), out


def _finish(top: jax.Array, total: jax.Array, out: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Output and lse; 0 and -inf for rows that see nothing."""
    empty = top == -jnp.inf
    safe = jnp.where(empty, 1.0, total)
    return out / safe[..., None], jnp.where(empty, -jnp.inf, top + jnp.log(safe))


def _padded_query(walk: Walk, query: jax.Array) -> jax.Array:
    """[B, Hkv, group, T, D], padded to whole blocks with zeros."""
    rows = walk.rows * walk.size[0] - walk.problem.T
    return jnp.pad(_split_heads(query, walk.problem), ((0, 0), (0, 0), (0, 0), (0, rows), (0, 0)))


def _split_heads(x: jax.Array, p: Problem) -> jax.Array:
    """[B, T, Hq, D] or [B, Hq, T, D] as [B, Hkv, group, T, D]."""
    x = x if p.layout == "BNTH" else x.swapaxes(1, 2)
    return x.reshape(p.B, p.Hkv, p.group, p.T, x.shape[-1])


def _join_heads(x: jax.Array, p: Problem) -> jax.Array:
    """The reverse of `_split_heads`."""
    x = x.reshape(p.B, p.Hq, p.T, x.shape[-1])
    return x if p.layout == "BNTH" else x.swapaxes(1, 2)


def _join_key_heads(x: jax.Array, p: Problem) -> jax.Array:
    """[B, Hkv, S (padded), D] in the layout of the call, summed over a shared batch."""
    x = x[:, :, : p.S]
    x = x.sum(axis=0, keepdims=True) if p.Bkv < p.B else x
    return x if p.layout == "BNTH" else x.swapaxes(1, 2)

"""One tile of scores: QK^T, score mod, mask, softmax weights. The same for every kernel, in both orientations."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.program.build import Program
from pallas_kernels.program.evaluate import Evaluation, OfMultiple, Product, Space, remainder
from pallas_kernels.program.ir import Axes, Node
from pallas_kernels.softmax import LEAST_EXPONENT, ScoreTile
from pallas_kernels.spec import LN_2, LOG2_E, AttentionSpec, Operands
from pallas_kernels.triton.head_chunks import Columns, qk_dot
from pallas_kernels.triton.launch import Runner, runner_of
from pallas_kernels.types import Index, Ref


def weights(spec: AttentionSpec, s: jax.Array, log2_scale: float, row_max_log2: jax.Array) -> jax.Array:
    """``2 ** (log2_scale * s - row_max_log2)``."""
    return runner_of(spec).exp2_of_multiple(s, log2_scale, row_max_log2)


class TileSpace(Space):
    """Values as Triton holds them, as arrays of two axes or none.

    Shapes: uniform ``()``, row ``(Bq, 1)``, column ``(1, Bk)``, tile ``(Bq, Bk)``; or transposed.
    """

    def __init__(
        self, refs: Sequence[Ref], block_q: int, block_kv: int, *, transposed: bool, approximate: bool, runner: Runner
    ) -> None:
        self.refs, self.approximate = refs, approximate
        self.runner = runner
        shapes = {Axes.UNIFORM: (), Axes.ROW: (block_q, 1), Axes.COLUMN: (1, block_kv), Axes.TILE: (block_q, block_kv)}
        self.shapes = {kind: shape[::-1] if transposed else shape for kind, shape in shapes.items()}

    def spread(self, x: jax.Array, kind: str, to: str) -> jax.Array:
        """Broadcasts along the axes that are new."""
        return x if kind == to else jnp.broadcast_to(x, self.shapes[to])

    def load(self, node: Node, indices: Sequence[jax.Array]) -> jax.Array:
        """Gathers elements; the program has made sure that the indices are in range."""
        ref = self.refs[node.value]
        x = self.runner.load(ref.at[tuple(indices)]) if indices else ref[...]
        return x != 0 if node.dtype == np.bool_ else x

    def multiply_add(self, a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
        """One FMA instruction."""
        return self.runner.multiply_add(a, b, c)

    def substitutes(self, kind: str) -> Mapping[str, Callable[..., jax.Array]]:
        """An exact remainder; the SFU's tanh (relative error 2 ** -11), where the inputs are no more exact."""
        exact: dict[str, Callable[..., jax.Array]] = {"rem": remainder}
        has_tanh = self._has_sfu(kind) and not self.runner.is_interpreter
        return {**exact, "tanh": functools.partial(_approximate_tanh, self.runner)} if has_tanh else exact

    def substitutes_of_multiples(self, kind: str) -> Mapping[str, OfMultiple]:
        """The logistic by two SFU functions, under the same rule."""
        logistic = functools.partial(_logistic, self.runner)
        return {"logistic": OfMultiple(-LOG2_E, logistic)} if self._has_sfu(kind) else {}

    def _has_sfu(self, kind: str) -> bool:
        return self.approximate and kind != Axes.UNIFORM  # inline PTX takes no scalars


def _approximate_tanh(runner: Runner, x: jax.Array, **_: object) -> jax.Array:
    return runner.element("tanh", x) if x.dtype == jnp.float32 else jnp.tanh(x)


def _logistic(runner: Runner, exponent: jax.Array) -> jax.Array:
    """``1 / (1 + 2 ** exponent)``, with a relative error of 2 ** -21, for weights near 0 too; 0 below 2 ** -126.

    The rounding of the exponent adds 2 ** -24 for each unit of the argument, as a rounding of the score would. A tanh
    would take one SFU function, not two, but has an absolute error of 2 ** -12, and a weight of sigmoid attention may
    be 2 ** -14 for all keys.
    """
    return runner.element("logistic", exponent)


def evaluation(
    program: Program,
    refs: Sequence[Ref],
    tile: tuple[int, int],
    indices: Mapping[str, jax.Array],
    *,
    transposed: bool = False,
    approximate: bool = False,
    runner: Runner,
) -> Evaluation:
    """Starts to evaluate a program, from the indices that are loop-invariant, for tiles of (Bq, Bk), or transposed.

    `approximate` says that approximate SFU functions may be used: the inputs have 16 bits.
    """
    space = TileSpace(refs, *tile, transposed=transposed, approximate=approximate, runner=runner)
    return Evaluation(space, {n: indices[n.value] for n in program.arguments if n.value in indices})


def indices_of(first: Index, count: int, length: int, axis: int, *, may_end: bool) -> jax.Array:
    """Indices of `count` queries or keys from `first` on, along an axis of a tile; clamped to those that exist."""
    index = first + lax.broadcasted_iota(jnp.int32, (count, 1) if axis == 0 else (1, count), axis)
    return jnp.minimum(index, length - 1) if may_end else index


class Scores(NamedTuple):
    """Scores of a program: statics, and the loop-invariant values of the mods."""

    spec: AttentionSpec
    tile: tuple[int, int]  # queries and keys of a tile, (Bq, Bk)
    transposed: bool  # whether tiles are (keys, queries)
    score: Evaluation | None  # the score mod, with its loop-invariant values
    mask: Evaluation | None  # the mask mod, with its loop-invariant values
    dropout: Evaluation | None  # the mod of dropout, with its loop-invariant values
    walked: str  # ``"q"`` or ``"k"``: the axis of the mainloop
    end: Index | None = None  # where that axis ends, known at run time; None for the end of its array

    @property
    def loop(self) -> tuple[int, int]:
        """Size of a tile along the axis of the mainloop, and length of that axis."""
        return (self.tile[0], self.spec.T) if self.walked == "q" else (self.tile[1], self.spec.S)

    @property
    def log2_scale(self) -> float:
        """The positive factor that turns the scores of a tile into exponents of base 2.

        Without a score mod, tiles hold QK^T itself, up to the sign of the scale.
        """
        return LOG2_E * (abs(self.spec.scale) if self.score is None else 1.0)


def prepare(
    spec: AttentionSpec,
    arrays: Operands[Ref],
    tile: tuple[int, int],  # queries and keys of a tile, (Bq, Bk)
    b: jax.Array,
    h: jax.Array,  # query head; where rows belong to several heads, that of each, [Bq, 1]
    *,
    q_first: Index | None = None,  # the first query, if the mainloop goes over keys
    k_first: Index | None = None,  # the first key, if it goes over queries; then tiles are transposed
    q: jax.Array | None = None,  # the indices of the queries, [Bq, 1], if they are not contiguous
    # where the axis of the mainloop ends, at or before the end of its array, if known only at run time: what lies
    # beyond is masked in partial tiles
    end: Index | None = None,
    nodes: Sequence[Node] | None = None,  # of the score mod to prepare, by default of its program alone
) -> Scores:
    """Prologue: evaluates the loop-invariant values of the mods (uniform, and along the axis that stays fixed)."""
    transposed = k_first is not None
    fixed = {"b": b, "h": h}
    if q is not None:
        fixed["q"] = q
    elif k_first is not None:
        fixed["k"] = indices_of(k_first, tile[1], spec.S, 0, may_end=spec.S % tile[1] != 0)
    else:
        assert q_first is not None  # one of the three is given
        fixed["q"] = indices_of(q_first, tile[0], spec.T, 0, may_end=spec.T % tile[0] != 0)
    fixed_axes = (Axes.UNIFORM, Axes.COLUMN if transposed else Axes.ROW)
    approximate = arrays.query.dtype.itemsize <= 2

    def evaluate_fixed(program: Program | None, refs: Sequence[Ref], nodes: Sequence[Node] | None) -> Evaluation | None:
        if program is None:
            return None
        evaluation_ = evaluation(
            program, refs, tile, fixed, transposed=transposed, approximate=approximate, runner=runner_of(spec)
        )
        evaluation_.prepare(nodes or program.nodes, fixed_axes)
        return evaluation_

    score = evaluate_fixed(spec.programs.score, arrays.captured.score, nodes)
    mask = evaluate_fixed(spec.programs.mask, arrays.captured.mask, None)
    dropout = evaluate_fixed(spec.programs.dropout, arrays.captured.dropout, None)
    return Scores(spec, tile, transposed, score, mask, dropout, "q" if transposed else "k", end)


def compute(
    scores: Scores,
    q: Columns,
    k: Columns,
    first: Index,  # first index along the axis of the mainloop
    # whether the mask, and the ends of the sequences, matter; a traced boolean decides on the mask alone
    is_partial: bool | jax.Array,
    # ``(q, k) -> QK^T``, where queries or keys have scales; tiles are not transposed then
    product: Callable[[Columns, Columns], jax.Array] | None = None,
) -> ScoreTile:
    """Computes the scores of a tile of queries [Bq, D] and keys [Bk, D]."""
    spec = scores.spec
    # S = QK^T: [Bq, Bk], or [Bk, Bq] where tiles are transposed
    raw = product(q, k) if product is not None else qk_dot(spec, k, q) if scores.transposed else qk_dot(spec, q, k)
    score = None
    if scores.score is None:
        s = raw if spec.scale > 0 else -raw
    else:
        assert spec.programs.score is not None  # what `prepare` began to evaluate
        # S = score_mod(scale * QK^T)
        scaled = Product(raw, jnp.full((), spec.scale, jnp.float32))
        score = scores.score.child(
            walked_index(scores, spec.programs.score, first), {spec.programs.score.argument("score"): scaled}
        )
        s = score.tile(spec.programs.score.output)
    visible = None if is_partial is False else _visible(scores, first, is_partial)
    s = s if visible is None else jnp.where(visible, s, -jnp.inf)
    return ScoreTile(s, visible, score, _kept(scores, first))


def linear_weights(scores: Scores, tile: ScoreTile) -> jax.Array:
    """The weights of a tile without a softmax: its scores, with zeros where masked."""
    return tile.clear(tile.s * abs(scores.spec.scale) if scores.score is None else tile.s)


def probabilities(scores: Scores, tile: ScoreTile, lse_log2: jax.Array) -> jax.Array:
    """The weights of a tile in the backward pass, before dropout.

    The lse of its queries is in base 2, [Bq, 1], or [1, Bq] where tiles are transposed.
    """
    if scores.spec.normalize == "none":
        return linear_weights(scores, tile)
    return weights(scores.spec, tile.s, scores.log2_scale, lse_log2)  # P = exp2(S - lse)


def scores_vjp(scores: Scores, tile: ScoreTile, p: jax.Array, d_p: jax.Array, delta: jax.Array) -> jax.Array:
    """The cotangents of the modified scores, from weights and cotangents of weights; `delta` as `lse_log2` above."""
    return tile.clear(d_p) if scores.spec.normalize == "none" else p * (d_p - delta)  # dS = P * (dP - delta)


def entropy_vjp(
    scores: Scores, tile: ScoreTile, d_p: jax.Array, lse_log2: jax.Array, d_entropy: jax.Array | None
) -> jax.Array:
    """Adds the cotangents of the entropy of the queries of a tile, [Bq] or None, to dP of the output."""
    if d_entropy is None:
        return d_p
    d_entropy = d_entropy[None, :] if scores.transposed else d_entropy[:, None]
    exponent = jnp.maximum(tile.s * scores.log2_scale - lse_log2, LEAST_EXPONENT)
    return d_p - (d_entropy * LN_2) * exponent  # dP -= dH * log P


def walked_index(scores: Scores, program: Program, first: Index) -> dict[Node, jax.Array]:
    """The indices along the axis of the mainloop, from `first` on, as the value of a program's argument."""
    count, length = scores.loop
    may_end = scores.spec.walk_passes_end(scores.walked, count)
    return {program.argument(scores.walked): indices_of(first, count, length, 1, may_end=may_end)}


def _kept(scores: Scores, first: Index) -> jax.Array | None:
    """True for the weights of a tile that dropout keeps; None without dropout."""
    if scores.dropout is None:
        return None
    program = scores.spec.programs.dropout
    assert program is not None  # what `prepare` began to evaluate
    indices = walked_index(scores, program, first)
    return scores.dropout.child({**indices, **_masked_keys(scores, program, first)}).tile(program.output)


def _masked_keys(scores: Scores, program: Program, first: Index) -> dict[Node, jax.Array]:
    """The values of ``kv_idx & constant`` in a walk over keys, unclamped, as a sum of a part of `first` and the rest.

    `first` is a multiple of the tile size, a power of two. So compilers see which keys have the same value, and hash it
    once for them.
    """
    result = {}
    if scores.walked == "q":
        return result
    keys = lax.broadcasted_iota(jnp.uint32, (1, scores.tile[1]), 1)
    for node in program.nodes:
        if node.op == "and" and node.dtype == "uint32" and node.inputs[1].op == "literal":
            index, mask = node.inputs[0], int(node.inputs[1].value)
            if index.op == "convert_element_type" and index.inputs[0] is program.argument("k"):
                upper = np.uint32(mask & (-scores.tile[1] & 0xFFFFFFFF))
                result[node] = (jnp.asarray(first).astype(jnp.uint32) & upper) + (keys & np.uint32(mask))
    return result


def _visible(scores: Scores, first: Index, is_partial: bool | jax.Array) -> jax.Array | None:
    """The mask of a partial tile: that of the mask mod, and padding along the axis of the mainloop.

    Padding along the other axis needs no mask: it has rows of its own, which are never stored.
    """
    spec, visible = scores.spec, None
    if scores.mask is not None:
        assert spec.programs.mask is not None  # what `prepare` began to evaluate
        mask = scores.mask.child(walked_index(scores, spec.programs.mask, first))
        visible = mask.tile(spec.programs.mask.output)
        if is_partial is not True:
            visible = visible | ~is_partial
    tile, length = scores.loop
    if scores.end is not None or spec.walk_passes_end(scores.walked, tile):
        length = length if scores.end is None else scores.end
        shape = scores.tile[::-1] if scores.transposed else scores.tile
        exists = first + jax.lax.broadcasted_iota(jnp.int32, shape, 1) < length
        visible = exists if visible is None else visible & exists
    return visible

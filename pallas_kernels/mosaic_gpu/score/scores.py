"""One tile of scores: applies score mod and mask to the QK^T accumulator, for every kernel and both orientations."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plg

from pallas_kernels.mosaic_gpu import inline_ptx, selections, smem
from pallas_kernels.mosaic_gpu.score import bias_tiles
from pallas_kernels.mosaic_gpu.score.tile import COLUMN, ROW, TILE, TileSpace, evaluation, indices_of
from pallas_kernels.mosaic_gpu.score.visible_range import VisibleRange, visible_range
from pallas_kernels.program import intervals, patterns
from pallas_kernels.program.build import Program
from pallas_kernels.program.evaluate import Evaluation, Product
from pallas_kernels.program.ir import Axes, Node
from pallas_kernels.softmax import ScoreTile
from pallas_kernels.spec import LOG2_E, AttentionSpec, Operands
from pallas_kernels.types import Index, Ref


class CapturedShapes(NamedTuple):
    """Shapes of the captured arrays of the mods; in a kernel they are flattened to one dimension."""

    score: tuple[tuple[int, ...], ...]
    mask: tuple[tuple[int, ...], ...]
    dropout: tuple[tuple[int, ...], ...]

    @classmethod
    def from_operands(cls, arrays: Operands[jax.Array]) -> CapturedShapes:
        """The shapes of captured arrays that are not flattened yet; None is not read."""
        groups = arrays.captured.score, arrays.captured.mask, arrays.captured.dropout
        return cls(*(tuple(() if x is None else x.shape for x in group) for group in groups))


class LoopAxis(NamedTuple):
    """The axis of the mainloop: its name, the tile size along it, its length, and whether tiles may pass its end."""

    axis: str
    count: int
    length: int
    passes_end: bool


class Scores(NamedTuple):
    """Scores of a consumer warp group: statics, and the values of the mods that the prologue evaluates."""

    spec: AttentionSpec
    tile: tuple[int, int]  # queries and keys of a tile
    transposed: bool  # whether tiles are (keys, queries), and the mainloop goes over queries
    score: Evaluation | None  # the score mod, with its loop-invariant values
    mask: Evaluation | None  # the mask mod, with its loop-invariant values
    dropout: Evaluation | None  # the weights that dropout keeps, with loop-invariant values
    fixed: jax.Array  # the first index along the axis that the mainloop does not go along
    pairs: bool  # whether logistics of the score mod are computed in pairs in tiles where nothing is masked
    visible: VisibleRange | None  # None if the mask has no limits
    passes_end: bool  # whether tiles of the mainloop may pass the end

    @property
    def loop(self) -> LoopAxis:
        """The axis of the mainloop."""
        if self.transposed:
            return LoopAxis("q", self.tile[0], self.spec.T, self.passes_end)
        return LoopAxis("k", self.tile[1], self.spec.S, self.passes_end)

    @property
    def log2_scale(self) -> float:
        """The positive factor that turns the scores of a tile into exponents of base 2.

        Without a score mod, tiles hold the QK^T accumulator itself, up to the sign of the scale. With a mod that adds a
        term to the score, they hold the accumulator plus that term over the scale. With a mod that multiplies last,
        they hold its other factor.
        """
        if self.score is None or patterns.addend(self.spec.programs.score, self.spec.scale) is not None:
            return LOG2_E * abs(self.spec.scale)
        multiple = patterns.multiple(self.spec.programs.score)
        return LOG2_E * (1.0 if multiple is None else multiple.factor)


def prepare(
    spec: AttentionSpec,
    arrays: Operands[Ref],
    captured: CapturedShapes,
    tile: tuple[int, int],  # queries and keys of a warp group
    b: jax.Array,
    h: jax.Array,  # query head; [rows] where rows belong to several heads
    *,
    q_first: jax.Array | None = None,  # the first query, if the mainloop goes over keys
    k_first: jax.Array | None = None,  # the first key, if it goes over queries; then tiles are transposed
    # the indices of the queries, [rows], if they are not contiguous; they lie within `tile` from `q_first` on
    q: jax.Array | None = None,
    may_end: bool,  # whether these queries or keys may reach past the end
    nodes: Sequence[Node] | None = None,  # nodes of the score mod to prepare; None for the nodes of its program
    walked: int | None = None,  # keys or queries of a step of the mainloop; None for a tile
) -> Scores:
    """Prologue: evaluates the loop-invariant values of the mods (uniform, and along the axis that stays fixed)."""
    transposed, first = k_first is not None, q_first if k_first is None else k_first
    assert first is not None  # one of them is given
    fixed = {"b": b, "h": h}
    if transposed:
        fixed["k"] = indices_of(first, tile[1], spec.S, ROW, may_end=may_end)
    else:
        fixed["q"] = indices_of(first, tile[0], spec.T, ROW, may_end=may_end) if q is None else q
    kinds = (Axes.UNIFORM, Axes.COLUMN if transposed else Axes.ROW)
    passes_end = spec.walk_passes_end("q" if transposed else "k", walked or tile[0 if transposed else 1])

    def evaluate_fixed(
        program: Program | None,
        refs: Sequence[Ref],
        shapes: Sequence[tuple[int, ...]],
        requested: Sequence[Node] | None,
    ) -> Evaluation | None:
        if program is None:
            return None
        prepared = evaluation(program, refs, shapes, tile, fixed, transposed=transposed, may_end=passes_end)
        prepared.prepare(program.nodes if requested is None else requested, kinds)
        return prepared

    visible = visible_range(spec, arrays.captured.mask, captured.mask, fixed, first, transposed=transposed)
    score = evaluate_fixed(spec.programs.score, arrays.captured.score, captured.score, nodes)
    mask = evaluate_fixed(spec.programs.mask, arrays.captured.mask, captured.mask, None if visible is None else [])
    dropout = evaluate_fixed(spec.programs.dropout, arrays.captured.dropout, captured.dropout, None)
    # A pair shares its NaN, which may come from a padding key: it has rows of its own in a transposed tile.
    pairs = patterns.is_linear_in(spec.programs.score, "logistic") and not (transposed and may_end)
    return Scores(spec, tile, transposed, score, mask, dropout, first, pairs, visible, passes_end)


class Prefetched(NamedTuple):
    """Values of the mods that were loaded while the GEMMs of their tile run."""

    score: Evaluation | None  # the score mod, evaluated so far; None if nothing was prefetched
    mask: Evaluation | None


NOT_PREFETCHED = Prefetched(None, None)


def prefetch(scores: Scores, first: Index, is_partial: bool) -> Prefetched:
    """Prefetches the loads of mods along the loop axis, from `first` on, while the wgmma instructions run.

    Not where a mod also loads tile values: those need the registers.
    """
    spec, axis = scores.spec, scores.loop.axis

    def prefetched(prepared: Evaluation | None, program: Program | None) -> Evaluation | None:
        kinds = {load.kind for load in program.loads} if program is not None else set()
        if prepared is None or program is None or axis not in kinds or Axes.TILE in kinds:
            return None
        loaded = _at(scores, prepared, program, first)
        loaded.prepare(program.loads, (axis,))
        return loaded

    return Prefetched(
        prefetched(scores.score, spec.programs.score),
        prefetched(scores.mask, spec.programs.mask) if is_partial and scores.visible is None else None,
    )


def _at(scores: Scores, prepared: Evaluation, program: Program, first: Index) -> Evaluation:
    """The evaluation of a program at a tile."""
    index = {program.argument(scores.loop.axis): _walked(scores, first)}
    return prepared.child(
        {**index, **_distances(scores, prepared, program, first), **_runs(scores, prepared, program, first)}
    )


def modify(
    scores: Scores,
    raw: jax.Array,  # the QK^T accumulator, float32 [queries, keys], or transposed
    first: Index,  # first index along the axis of the mainloop
    is_partial: bool,  # whether the mask, and the ends of the sequences, matter
    prefetched: Prefetched = NOT_PREFETCHED,  # from `prefetch` of this tile
    bias: Sequence[Ref] = (),  # its bias tiles, in shared memory
    *,
    # whether to apply the mask clause by clause, which is faster where there are spare registers. Beside the
    # accumulators of the backward kernels it spills up to 184 bytes more
    by_clause: bool = False,
) -> ScoreTile:
    """Applies score mod and mask to a tile."""
    spec, score = scores.spec, None
    if scores.score is None:
        s = raw if spec.scale > 0 else -raw
    else:
        assert spec.programs.score is not None  # `prepare` began to evaluate it
        scaled = Product(raw, jnp.full((), spec.scale, jnp.float32))
        score = prefetched.score or _at(scores, scores.score, spec.programs.score, first)
        tiles = zip(bias_tiles.bias_loads(spec, transposed=scores.transposed) if bias else (), bias, strict=True)
        loaded = {bias_load.load: smem.load(ref, TILE) for bias_load, ref in tiles}
        score = score.child(loaded, {spec.programs.score.argument("score"): scaled})
        if scores.pairs and not is_partial:
            score = _with_pairs(score, spec.programs.score)
        added, multiple = patterns.addend(spec.programs.score, spec.scale), patterns.multiple(spec.programs.score)
        if added is not None:
            s = _added(spec, score, raw, added)
        else:
            s = score.tile(spec.programs.score.output if multiple is None else multiple.term)
    if not is_partial:
        return ScoreTile(s, None, score)
    mask = Mask.at(scores, first, prefetched)
    if scores.visible is not None:
        s = _within_limits(scores, s, first, scores.visible)
    else:
        s = mask.apply(s) if by_clause else mask.apply_at_once(s)
    return ScoreTile(s, mask.visible(), score)


def _within_limits(scores: Scores, s: jax.Array, first: Index, visible: VisibleRange) -> jax.Array:
    """Scores, with -inf outside of the limits of the rows, or where they are masked if there are none."""
    apply = lambda s: Mask.at(scores, first, NOT_PREFETCHED).apply_at_once(s)
    s = selections.keep_between(s, *(x - first for x in visible.rows))
    return s if visible.is_mask else lax.cond(visible.tile.begin < 0, apply, lambda s: s, s)


def mask_from(end: Index, first: Index, s: jax.Array) -> jax.Array:
    """Scores [queries, keys] of the tile of keys from `first` on, with -inf from the key `end` on."""
    keys = s.shape[1]

    def cut(s: jax.Array) -> jax.Array:
        exists = first + plg.broadcasted_iota(jnp.int32, (keys,), 0, layout=COLUMN) < end
        return selections.mask_scores(TILE, s, [lax.broadcast_in_dim(exists, s.shape, (1,))])

    return lax.cond(first + keys <= end, lambda s: s, cut, s)


def kept(scores: Scores, first: Index) -> jax.Array | None:
    """The weights that dropout keeps, bool, in the tile from `first` on; None without dropout."""
    if scores.dropout is None:
        return None
    program = scores.spec.programs.dropout
    assert program is not None  # `prepare` began to evaluate it
    return _at(scores, scores.dropout, program, first).tile(program.output)


def drop(scores: Scores, first: Index, p: jax.Array) -> jax.Array:
    """The weights of the tile from `first` on, with zeros where dropout drops them."""
    if scores.dropout is None:
        return p
    program = scores.spec.programs.dropout
    assert program is not None  # `prepare` began to evaluate it
    assert program.output.op == "ge"  # of a word and a threshold: `jflex` makes it
    number, least = program.output.inputs
    assert least.op == "literal"
    words = _at(scores, scores.dropout, program, first).tile(number)
    return selections.keep_from(TILE, p, words, int(least.value))


def linear_weights(scores: Scores, tile: ScoreTile) -> jax.Array:
    """The weights of a tile without a softmax: its scores, with zeros where masked."""
    factor = scores.log2_scale / LOG2_E
    return tile.clear(tile.s if factor == 1.0 else tile.s * factor)


def weights(scores: Scores, tile: ScoreTile, lse_log2: jax.Array) -> jax.Array:
    """The weights of a tile in the backward pass, from the lse of its queries in base 2, of tile shape."""
    if scores.spec.normalize == "none":
        return linear_weights(scores, tile)
    return inline_ptx.weights(TILE, tile.s, scores.log2_scale, lse_log2)


def scores_vjp(scores: Scores, tile: ScoreTile, p: jax.Array, d_p: jax.Array) -> jax.Array:
    """The cotangents of the modified scores, from weights and ``dP - delta``; delta is 0 without a softmax."""
    return tile.clear(d_p) if scores.spec.normalize == "none" else p * d_p


def _added(spec: AttentionSpec, score: Evaluation, raw: jax.Array, added: patterns.Addend) -> jax.Array:
    """The scores over the scale: one FMA for each element, besides the instructions of the term itself."""
    factor = jnp.float32(added.sign / spec.scale)
    if added.factor is not None:
        factor = factor * score(added.factor)
    return raw + score.tile(added.term) * factor


def _distances(scores: Scores, prepared: Evaluation, program: Program, first: Index) -> dict[Node, jax.Array]:
    """Distances between query and key: one addition for each element, of a constant to a row value."""
    walked, fixed = ("q", "k") if scores.transposed else ("k", "q")
    rows, columns = scores.tile[::-1] if scores.transposed else scores.tile
    result = {}
    for distance in patterns.distances(program, walked, fixed):
        other = prepared(distance.other) * distance.other_sign + jnp.float32(distance.walked_sign) * jnp.float32(first)
        number = plg.broadcasted_iota(jnp.float32, (rows, inline_ptx.TILE_COLUMNS), 1, layout=TILE)
        start = lax.broadcast_in_dim(other, number.shape, (0,)) + number * distance.walked_sign
        result[distance.node] = inline_ptx.continue_columns(TILE, start, columns, distance.walked_sign)
    return result


def _with_pairs(score: Evaluation, program: Program) -> Evaluation:
    """Computes the logistics of a score mod in pairs, but none that its derivative alone has."""
    paired = Evaluation(_space(score).with_pairs(), score.values, score.products)
    for node in (x for x in program.nodes if x.op == "logistic"):
        paired(node)
    return Evaluation(score.space, paired.values, paired.products)


def _space(prepared: Evaluation) -> TileSpace:
    assert isinstance(prepared.space, TileSpace)  # `prepare` made it
    return prepared.space


def _runs(scores: Scores, prepared: Evaluation, program: Program, first: Index) -> dict[Node, jax.Array]:
    """Contiguous loads along the loop axis: each thread loads its pairs at constant offsets from one address.

    H200, jax 0.11.2, bf16, S 16384, a mask of equal documents: 0.625 ms became 0.575.
    """
    loop = scores.loop
    if loop.passes_end:
        return {}
    space = _space(prepared)
    runs = patterns.runs(program, loop.axis, space.operand_shapes)
    return {run: space.load_run(run, [prepared(x) for x in run.inputs[:-1]], first, loop.count) for run in runs}


def _walked(scores: Scores, first: Index, *, clamped: bool = True) -> jax.Array:
    _, count, length, passes_end = scores.loop
    return indices_of(first, count, length, COLUMN, may_end=clamped and passes_end)


class Mask(NamedTuple):
    """The mask of a partial tile: the conjunction of the clauses of the mask mod, and padding along the loop axis.

    Padding along the other axis needs no mask: it has rows of its own, which are never stored.
    """

    scores: Scores  # statics and loop-invariant values
    first: Index  # First index along the axis of the mainloop
    evaluation: Evaluation | None  # of the mask mod at this tile; None without one

    @classmethod
    def at(cls, scores: Scores, first: Index, prefetched: Prefetched) -> Mask:
        """The mask at a tile, of which some loads may have been prefetched."""
        if scores.mask is None:
            return cls(scores, first, None)
        assert scores.spec.programs.mask is not None  # `prepare` began to evaluate it
        prepared = scores.mask if scores.visible is None else scores.mask.child({})  # then nothing is loop-invariant
        return cls(scores, first, prefetched.mask or _at(scores, prepared, scores.spec.programs.mask, first))

    def apply_at_once(self, s: jax.Array) -> jax.Array:
        """Scores, with -inf where they are masked by any clause."""
        ordered, others = patterns.clauses(self.scores.spec.programs.mask)
        conjuncts = self._conjuncts([*ordered, *others])
        return selections.mask_scores(TILE, s, conjuncts) if conjuncts else s

    def apply(self, s: jax.Array) -> jax.Array:
        """Scores, with -inf where they are masked.

        Clauses that compare indices (causal, a window) are skipped one by one where they mask nothing of the tile.
        H200, jax 0.11.2, bf16, S 16384, 16 heads, 12 documents of about equal length under a causal mask: 0.595 ms
        instead of 0.604 at head size 64 (B 4), 0.418 instead of 0.443 at 128 (B 2); with code for all clauses beside
        code for all but these 0.681 and 0.460.
        """
        ordered, others = patterns.clauses(self.scores.spec.programs.mask)
        conjuncts = self._conjuncts(others)
        s = selections.mask_scores(TILE, s, conjuncts) if conjuncts else s
        for clause in ordered:
            apply = lambda s, clause=clause: selections.mask_scores(TILE, s, self._values([clause]))
            s = lax.cond(self._may_mask(clause), apply, lambda s: s, s)
        return s

    def visible(self) -> jax.Array | None:
        """True where not masked; None if nothing is masked."""
        ordered, others = patterns.clauses(self.scores.spec.programs.mask)
        result = self._conjuncts([*ordered, *others])
        return functools.reduce(jnp.logical_and, result) if result else None

    def _conjuncts(self, clauses: list[Node]) -> list[jax.Array]:
        """The value of each of these clauses, and which indices along the loop axis are not padding."""
        loop, result = self.scores.loop, self._values(clauses)
        if loop.passes_end:
            shape = self.scores.tile[::-1] if self.scores.transposed else self.scores.tile
            exists = _walked(self.scores, self.first, clamped=False) < loop.length
            result.append(lax.broadcast_in_dim(exists, shape, (1,)))
        return result

    def _values(self, clauses: list[Node]) -> list[jax.Array]:
        if self.evaluation is None:
            return []
        branch = self.evaluation.child({})  # values computed in a branch must not outlive it
        return [branch.tile(clause) for clause in clauses]

    def _may_mask(self, clause: Node) -> jax.Array:
        """True if a clause may mask any of the tile."""
        scores = self.scores
        assert scores.mask is not None  # whose clause it is
        firsts = (self.first, scores.fixed) if scores.transposed else (scores.fixed, self.first)
        q, k = (intervals.Span(at, at + (count - 1)) for at, count in zip(firsts, scores.tile, strict=True))
        return ~intervals.IntervalAnalysis(scores.mask.child({}), {"q": q, "k": k}).visibility(clause, ()).all

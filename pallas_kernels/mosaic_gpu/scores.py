"""One tile of scores: mod and mask, from the products. The same for every kernel, in both orientations."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plg

from pallas_kernels.mosaic_gpu import bias_tiles as planes
from pallas_kernels.mosaic_gpu import inline_ptx
from pallas_kernels.mosaic_gpu.tile import COLUMN, ROW, TILE, evaluation, numbers
from pallas_kernels.program import intervals, patterns
from pallas_kernels.program.evaluate import Evaluation, Product
from pallas_kernels.score_tile import ScoreTile
from pallas_kernels.spec import LOG2_E, Arrays, AttentionSpec


class Captured(NamedTuple):
    """Shapes of the arrays that the mods capture; in a kernel they have one dimension."""

    score: tuple[tuple[int, ...], ...]
    mask: tuple[tuple[int, ...], ...]


class Walk(NamedTuple):
    """An axis that a loop goes along: its name, how much of it a tile takes, its length, and whether tiles pass it."""

    axis: str
    count: int
    length: int
    passes_end: bool


class Scores(NamedTuple):
    """How a warp group computes scores: statics, and what is known of the mods ahead of the loop.

    Attributes:
      spec: The spec.
      tile: Queries and keys.
      transposed: Whether tiles are (keys, queries), and the loop goes over queries.
      score: The score mod, evaluated so far.
      mask: The mask, evaluated so far.
      fixed: The first index along the axis that the loop does not go along.
    """

    spec: AttentionSpec
    tile: tuple[int, int]
    transposed: bool
    score: Evaluation | None
    mask: Evaluation | None
    fixed: Any

    @property
    def walk(self) -> Walk:
        """The axis that the loop goes along."""
        if self.transposed:
            return Walk("q", self.tile[0], self.spec.T, self.spec.walk_passes_end("q", self.tile[0]))
        return Walk("k", self.tile[1], self.spec.S, self.spec.walk_passes_end("k", self.tile[1]))

    @property
    def unit(self) -> float:
        """What the scores of a tile are to be multiplied by for weights in base 2; positive.

        Without a mod they are the products themselves, up to the sign of the scale; with one that adds something to
        the score they are the products and that much over the scale; with one that multiplies last, what it multiplies.
        """
        if self.score is None or patterns.addend(self.spec.programs.score, self.spec.scale) is not None:
            return LOG2_E * abs(self.spec.scale)
        multiple = patterns.multiple(self.spec.programs.score)
        return LOG2_E * (1.0 if multiple is None else multiple.factor)


def prepare(
    spec: AttentionSpec,
    arrays: Arrays,
    captured: Captured,
    tile: tuple[int, int],
    b: Any,
    h: Any,
    *,
    q_first: Any = None,
    k_first: Any = None,
    may_end: bool,
    nodes: Any = None,
) -> Scores:
    """Evaluates what of the mods does not depend on the axis of the loop.

    Args:
      spec: The spec.
      arrays: The refs.
      captured: Shapes of what the mods capture.
      tile: Queries and keys of a warp group.
      b: Batch.
      h: Query head.
      q_first: The first query, if the loop goes over keys.
      k_first: The first key, if it goes over queries; then tiles are transposed.
      may_end: Whether these queries or keys may reach past the end.
      nodes: Nodes to prepare for the score mod, if they are more than those of its program.
    """
    transposed = k_first is not None
    fixed = {"b": b, "h": h}
    if transposed:
        fixed["k"] = numbers(k_first, tile[1], spec.S, ROW, may_end=may_end)
    else:
        fixed["q"] = numbers(q_first, tile[0], spec.T, ROW, may_end=may_end)
    kinds = ("", "k" if transposed else "q")

    def prepared(program: Any, refs: Any, shapes: Any, wanted: Any) -> Evaluation | None:
        if program is None:
            return None
        passes_end = spec.walk_passes_end("q" if transposed else "k", tile[0] if transposed else tile[1])
        known = evaluation(program, refs, shapes, tile, fixed, transposed=transposed, may_end=passes_end)
        known.prepare(wanted or program.nodes, kinds)
        return known

    score = prepared(spec.programs.score, arrays.score_operands, captured.score, nodes)
    mask = prepared(spec.programs.mask, arrays.mask_operands, captured.mask, None)
    return Scores(spec, tile, transposed, score, mask, k_first if transposed else q_first)


class Begun(NamedTuple):
    """What of a tile was loaded ahead of its products.

    Attributes:
      score: The score mod, evaluated so far; None if nothing was.
      mask: The mask, likewise.
    """

    score: Evaluation | None
    mask: Evaluation | None


NOTHING = Begun(None, None)


def begin(scores: Scores, first: Any, is_partial: bool) -> Begun:
    """Loads what mods want for each index along the axis of the loop, from `first` on, while products run.

    Not where they load elements of the tile too: those take the registers.
    """
    spec, axis = scores.spec, scores.walk.axis

    def begun(known: Evaluation | None, program: Any) -> Evaluation | None:
        kinds = {load.kind for load in program.loads} if known is not None else set()
        if axis not in kinds or "qk" in kinds:
            return None
        ahead = _at(scores, known, program, first)
        ahead.prepare(program.loads, (axis,))
        return ahead

    return Begun(
        begun(scores.score, spec.programs.score), begun(scores.mask, spec.programs.mask) if is_partial else None
    )


def _at(scores: Scores, known: Any, program: Any, first: Any) -> Evaluation:
    """The evaluation of a program for a tile."""
    index = {program.argument(scores.walk.axis): _walked(scores, first)}
    return known.child({**index, **_distances(scores, known, program, first), **_runs(scores, known, program, first)})


def modify(
    scores: Scores,
    raw: jax.Array,
    first: Any,
    is_partial: bool,
    begun: Begun = NOTHING,
    brought: Sequence[Any] = (),
    *,
    by_clause: bool = False,
) -> ScoreTile:
    """Scores of a tile.

    Args:
      scores: What is known ahead of the loop.
      raw: The products of queries and keys, float32.
      first: First index along the axis of the loop.
      is_partial: Whether the mask, and the ends of the sequences, matter.
      begun: What `begin` gave for it.
      brought: Its elements of `planes`, in shared memory.
      by_clause: Whether to hide clause by clause of the mask, which is faster where registers are left: beside the sums
        of the backward kernels it stores up to 184 bytes more of them away.
    """
    spec, score = scores.spec, None
    if scores.score is None:
        s = raw if spec.scale > 0 else -raw
    else:
        assert spec.programs.score is not None  # what `prepare` began to evaluate
        scaled = Product(raw, jnp.full((), spec.scale, jnp.float32))
        score = begun.score or _at(scores, scores.score, spec.programs.score, first)
        elements = zip(planes.planes_of(spec, transposed=scores.transposed) if brought else (), brought, strict=True)
        load: Any = plg.load  # jax < 0.11: wants an index
        given = {plane.load: load(ref, layout=TILE) for plane, ref in elements}
        score = score.child(given, {spec.programs.score.argument("score"): scaled})
        added, multiple = patterns.addend(spec.programs.score, spec.scale), patterns.multiple(spec.programs.score)
        if added is not None:
            s = _added(spec, score, raw, added)
        else:
            s = score.tile(spec.programs.score.output if multiple is None else multiple.term)
    if not is_partial:
        return ScoreTile(s, None, score)
    mask = Mask.at(scores, first, begun)
    visible = mask.visible()
    if by_clause:
        return ScoreTile(mask.hide(s), visible, score)
    return ScoreTile(s if visible is None else jnp.where(visible, s, -jnp.inf), visible, score)


def _added(spec: AttentionSpec, score: Evaluation, raw: jax.Array, added: patterns.Addend) -> jax.Array:
    """The scores over the scale: one multiply-add for each element, and what the term itself takes."""
    factor = jnp.float32(added.sign / spec.scale)
    if added.factor is not None:
        factor = factor * score(added.factor)
    return raw + score.tile(added.term) * factor


def _distances(scores: Scores, known: Evaluation, program: Any, first: Any) -> dict[Any, jax.Array]:
    """Distances between query and key: one addition for each element, of a constant to what a row has."""
    walked, fixed = ("q", "k") if scores.transposed else ("k", "q")
    rows, columns = scores.tile[::-1] if scores.transposed else scores.tile
    found = {}
    for distance in patterns.distances(program, walked, fixed):
        other = known(distance.other) * distance.other_sign + jnp.float32(distance.walked_sign) * jnp.float32(first)
        number = plg.broadcasted_iota(jnp.float32, (rows, inline_ptx.TILE_COLUMNS), 1, layout=TILE)
        start = lax.broadcast_in_dim(other, number.shape, (0,)) + number * distance.walked_sign
        found[distance.node] = inline_ptx.continue_columns(TILE, start, columns, distance.walked_sign)
    return found


def _runs(scores: Scores, known: Evaluation, program: Any, first: Any) -> dict[Any, jax.Array]:
    """Loads of elements that follow each other along the loop: each thread loads its pairs from one address on.

    H200, jax 0.11.2, bf16, S 16384, a mask of equal documents: 0.625 ms became 0.575.
    """
    walk = scores.walk
    if walk.passes_end:
        return {}
    space: Any = known.space
    runs = patterns.runs(program, walk.axis, space.operand_shapes)
    return {run: space.load_run(run, [known(x) for x in run.inputs[:-1]], first, walk.count) for run in runs}


def _walked(scores: Scores, first: Any, *, clamped: bool = True) -> jax.Array:
    _, count, length, passes_end = scores.walk
    return numbers(first, count, length, COLUMN, may_end=clamped and passes_end)


class Mask(NamedTuple):
    """What is seen of a partial tile: what every clause of the mask shows, of what exists along the axis of the loop.

    Along the other axis nothing need be hidden: what does not exist there is a row of its own, which is never stored.

    Attributes:
      scores: What is known ahead of the loop.
      first: First index along the axis of the loop.
      evaluation: Of the mask at this tile; None without a mask.
    """

    scores: Scores
    first: Any
    evaluation: Evaluation | None

    @classmethod
    def at(cls, scores: Scores, first: Any, begun: Begun) -> Mask:
        """At a tile, of which the mask may have been begun."""
        if scores.mask is None:
            return cls(scores, first, None)
        assert scores.spec.programs.mask is not None  # what `prepare` began to evaluate
        return cls(scores, first, begun.mask or _at(scores, scores.mask, scores.spec.programs.mask, first))

    def hide(self, s: jax.Array) -> jax.Array:
        """Scores, with -inf where nothing is seen.

        Clauses that compare indices (causal, a window) are skipped where they cut nothing off the tile, one by one.
        H200, jax 0.11.2, bf16, S 16384, 16 heads, 12 documents of about equal length under a causal mask: 0.595 ms
        instead of 0.604 at head size 64 (B 4), 0.418 instead of 0.443 at 128 (B 2); with code for all clauses beside
        code for all but these 0.681 and 0.460.
        """
        ordered, others = patterns.clauses(self.scores.spec.programs.mask)
        shown = self._shown_by(others)
        s = inline_ptx.hidden(TILE, s, shown) if shown else s
        for clause in ordered:
            hide = lambda s, clause=clause: inline_ptx.hidden(TILE, s, self._values([clause]))
            s = lax.cond(self._cuts(clause), hide, lambda s: s, s)
        return s

    def visible(self) -> jax.Array | None:
        """What is seen; None if that is everything."""
        ordered, others = patterns.clauses(self.scores.spec.programs.mask)
        found = self._shown_by([*ordered, *others])
        return functools.reduce(jnp.logical_and, found) if found else None

    def _shown_by(self, clauses: list[Any]) -> list[jax.Array]:
        """What each of these clauses shows, and what exists along the axis of the loop."""
        walk, found = self.scores.walk, self._values(clauses)
        if walk.passes_end:
            shape = self.scores.tile[::-1] if self.scores.transposed else self.scores.tile
            exists = _walked(self.scores, self.first, clamped=False) < walk.length
            found.append(lax.broadcast_in_dim(exists, shape, (1,)))
        return found

    def _values(self, clauses: list[Any]) -> list[jax.Array]:
        if self.evaluation is None:
            return []
        here = self.evaluation.child({})  # what is computed in a branch ends with it
        return [here.tile(clause) for clause in clauses]

    def _cuts(self, clause: Any) -> jax.Array:
        """Whether a clause may hide any of the tile."""
        scores = self.scores
        assert scores.mask is not None  # whose clause it is
        firsts = (self.first, scores.fixed) if scores.transposed else (scores.fixed, self.first)
        q, k = (intervals.Span(at, at + (count - 1)) for at, count in zip(firsts, scores.tile, strict=True))
        return ~intervals.visibility_of(clause, scores.mask.child({}), q, k).all

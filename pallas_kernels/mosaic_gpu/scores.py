"""One tile of scores: mod and mask, from the products. The same for every kernel, in both orientations."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plg

from pallas_kernels.evaluate import Evaluation, Product
from pallas_kernels.mosaic_gpu import forms, inline
from pallas_kernels.mosaic_gpu.tile import COLUMN, ROW, TILE, evaluation, numbers
from pallas_kernels.score_tile import ScoreTile
from pallas_kernels.setting import LOG2_E, Arrays, Setting


class Captured(NamedTuple):
    """Shapes of the arrays that the mods capture; in a kernel they have one dimension."""

    score: tuple[tuple[int, ...], ...]
    mask: tuple[tuple[int, ...], ...]


class Scores(NamedTuple):
    """How a warp group computes scores: statics, and what is known of the mods ahead of the loop.

    Attributes:
      setting: The setting.
      tile: Queries and keys.
      transposed: Whether tiles are (keys, queries), and the loop goes over queries.
      score: The score mod, evaluated so far.
      mask: The mask, evaluated so far.
    """

    setting: Setting
    tile: tuple[int, int]
    transposed: bool
    score: Evaluation | None
    mask: Evaluation | None

    @property
    def unit(self) -> float:
        """What the scores of a tile are to be multiplied by for weights in base 2; positive.

        Without a mod they are the products themselves, up to the sign of the scale; with one that adds something to
        the score they are the products and that much over the scale; with one that multiplies last, what it multiplies.
        """
        if self.score is None or forms.addend(self.setting.score, self.setting.scale) is not None:
            return LOG2_E * abs(self.setting.scale)
        multiple = forms.multiple(self.setting.score)
        return LOG2_E * (1.0 if multiple is None else multiple.factor)


def prepare(
    setting: Setting,
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
      setting: The setting.
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
        fixed["k"] = numbers(k_first, tile[1], setting.S, ROW, may_end=may_end)
    else:
        fixed["q"] = numbers(q_first, tile[0], setting.T, ROW, may_end=may_end)
    kinds = ("", "k" if transposed else "q")

    def prepared(program: Any, refs: Any, shapes: Any, wanted: Any) -> Evaluation | None:
        if program is None:
            return None
        known = evaluation(program, refs, shapes, tile, fixed, transposed=transposed)
        known.prepare(wanted or program.nodes, kinds)
        return known

    score = prepared(setting.score, arrays.score_operands, captured.score, nodes)
    mask = prepared(setting.mask, arrays.mask_operands, captured.mask, None)
    return Scores(setting, tile, transposed, score, mask)


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
    setting, axis = scores.setting, "q" if scores.transposed else "k"

    def begun(known: Evaluation | None, program: Any) -> Evaluation | None:
        kinds = {load.kind for load in program.loads} if known is not None else set()
        if axis not in kinds or "qk" in kinds:
            return None
        ahead = _at(scores, known, program, first)
        ahead.prepare(program.loads, (axis,))
        return ahead

    return Begun(begun(scores.score, setting.score), begun(scores.mask, setting.mask) if is_partial else None)


def _at(scores: Scores, known: Any, program: Any, first: Any) -> Evaluation:
    """The evaluation of a program for a tile."""
    index = {program.argument("q" if scores.transposed else "k"): _walked(scores, first)}
    return known.child({**index, **_distances(scores, known, program, first)})


def modify(scores: Scores, raw: jax.Array, first: Any, is_partial: bool, begun: Begun = NOTHING) -> ScoreTile:
    """Scores of a tile.

    Args:
      scores: What is known ahead of the loop.
      raw: The products of queries and keys, float32.
      first: First index along the axis of the loop.
      is_partial: Whether the mask, and the ends of the sequences, matter.
      begun: What `begin` gave for it.
    """
    setting, score = scores.setting, None
    if scores.score is None:
        s = raw if setting.scale > 0 else -raw
    else:
        assert setting.score is not None  # what `prepare` began to evaluate
        scaled = Product(raw, jnp.full((), setting.scale, jnp.float32))
        score = begun.score or _at(scores, scores.score, setting.score, first)
        score = score.child({}, {setting.score.argument("score"): scaled})
        added, multiple = forms.addend(setting.score, setting.scale), forms.multiple(setting.score)
        if added is not None:
            s = _added(setting, score, raw, added)
        else:
            s = score.tile(setting.score.output if multiple is None else multiple.term)
    visible = _visibility(scores, first, begun) if is_partial else None
    return ScoreTile(s if visible is None else jnp.where(visible, s, -jnp.inf), visible, score)


def _added(setting: Setting, score: Evaluation, raw: jax.Array, added: forms.Addend) -> jax.Array:
    """The scores over the scale: one multiply-add for each element, and what the term itself takes."""
    factor = jnp.float32(added.sign / setting.scale)
    if added.factor is not None:
        factor = factor * score(added.factor)
    return raw + score.tile(added.term) * factor


def _distances(scores: Scores, known: Evaluation, program: Any, first: Any) -> dict[Any, jax.Array]:
    """Distances between query and key: one addition for each element, of a constant to what a row has."""
    walked, fixed = ("q", "k") if scores.transposed else ("k", "q")
    rows, columns = scores.tile[::-1] if scores.transposed else scores.tile
    found = {}
    for distance in forms.distances(program, walked, fixed):
        other = known(distance.other) * distance.other_sign + jnp.float32(distance.walked_sign) * jnp.float32(first)
        number = plg.broadcasted_iota(jnp.float32, (rows, inline.TILE_COLUMNS), 1, layout=TILE)
        start = jax.lax.broadcast_in_dim(other, number.shape, (0,)) + number * distance.walked_sign
        found[distance.node] = inline.continue_columns(TILE, start, columns, distance.walked_sign)
    return found


def _walked(scores: Scores, first: Any, *, clamped: bool = True) -> jax.Array:
    setting = scores.setting
    axis, count, length = ("q", scores.tile[0], setting.T) if scores.transposed else ("k", scores.tile[1], setting.S)
    return numbers(first, count, length, COLUMN, may_end=clamped and setting.walk_passes_end(axis, count))


def _visibility(scores: Scores, first: Any, begun: Begun) -> jax.Array | None:
    """What a partial tile shows: the mask, and what exists along the axis of the loop.

    Along the other axis nothing need be hidden: what does not exist there is a row of its own, which is never stored.
    """
    setting, visible = scores.setting, None
    if scores.mask is not None:
        assert setting.mask is not None  # what `prepare` began to evaluate
        mask = begun.mask or _at(scores, scores.mask, setting.mask, first)
        visible = mask.tile(setting.mask.output)
    axis, count, length = ("q", scores.tile[0], setting.T) if scores.transposed else ("k", scores.tile[1], setting.S)
    if setting.walk_passes_end(axis, count):
        shape = scores.tile[::-1] if scores.transposed else scores.tile
        exists = jax.lax.broadcast_in_dim(_walked(scores, first, clamped=False) < length, shape, (1,))
        visible = exists if visible is None else visible & exists
    return visible

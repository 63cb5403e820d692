"""What the kernels that compute outputs share: the online softmax over tiles of keys, and its repair.

See `containment` for what is repaired.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from pallas_kernels import softmax
from pallas_kernels.marks import mark, may_hide
from pallas_kernels.score_tile import ScoreTile
from pallas_kernels.triton.containment import Attended, cleared
from pallas_kernels.triton.head_chunks import Columns, times, zero_rows
from pallas_kernels.triton.scores import Scores
from pallas_kernels.triton.tile import weights


class Tile(NamedTuple):
    """A tile of keys: its scores, and its values [Bk, Dv]."""

    scores: ScoreTile
    values: Columns


class Attention(NamedTuple):
    """Attention of the rows of a tile over the keys that it visits.

    Attributes:
      known: What is known of the mods ahead of the loop.
      rows: How many.
      walk: ``(state, step) -> state``: folds ``step(state, *place)`` over tiles of keys.
      tile_at: ``(*place) -> Tile``.
      may_be_empty: Whether a row may have seen nothing after a tile.
    """

    known: Scores
    rows: int
    walk: Callable[..., Any]
    tile_at: Callable[..., Tile]
    may_be_empty: bool = True

    def attend(self) -> tuple[Columns, jax.Array]:
        """Output [rows, Dv], in chunks of columns, and lse [rows] (natural log), NaN where the output must be repaired.

        Zeros and -inf for rows that see nothing.
        """

        def step(state: softmax.SoftmaxState, *place: Any) -> softmax.SoftmaxState:
            return self._fold(state, *self.tile_at(*place))

        out, lse = softmax.finish(self.walk(self._start, step), self.known.unit)
        return out, lse + mark(*out) if may_hide(self.known.spec) else lse

    def repair(self) -> tuple[Columns, jax.Array, Attended]:
        """The same from values that are cleared, lse as it is, and which rows must keep what `attend` gave."""

        def step(state: tuple[softmax.SoftmaxState, Attended], *place: Any) -> Any:
            tile, values = self.tile_at(*place)
            return self._fold(state[0], tile, cleared(values)), state[1].to(values, tile.visible)

        state, attended = self.walk((self._start, Attended.none(self.rows)), step)
        return *softmax.finish(state, self.known.unit), attended

    @property
    def _start(self) -> softmax.SoftmaxState:
        return softmax.start(self.rows, zero_rows(self.rows, self.known.spec.Dv))

    def _fold(self, state: softmax.SoftmaxState, tile: ScoreTile, values: Columns) -> softmax.SoftmaxState:
        spec, unit = self.known.spec, self.known.unit
        return softmax.update(
            state,
            tile.s,
            unit=unit,
            weigh=lambda s, shift: weights(spec, s, unit, shift),
            times_values=lambda p: times(spec, p, values),
            may_hide=self.may_be_empty,
        )

"""What the forward, decoding and paged kernels share: online softmax over tiles of keys, and its repair.

See `containment` for what is repaired.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from pallas_kernels import softmax
from pallas_kernels.softmax import ScoreTile, mark
from pallas_kernels.spec import LN_2, AttentionSpec
from pallas_kernels.triton.containment import Attended, cleared
from pallas_kernels.triton.head_chunks import Columns, powers_of_two, pv_dot, zero_values
from pallas_kernels.triton.scores import Scores, linear_weights
from pallas_kernels.triton.tile import weights
from pallas_kernels.types import Index, S


class Tile(NamedTuple):
    """A tile of keys.

    Attributes:
      scores: Its scores, [rows, Bk].
      values: Its values, [Bk, Dv].
      scales: What equal shares of their columns are to be multiplied by: scalars, or [Bk] each; None for 1.
    """

    scores: ScoreTile
    values: Columns
    scales: tuple[jax.Array, ...] | None = None

    def product(self, spec: AttentionSpec, p: jax.Array) -> Columns:
        """The PV GEMM, float32, of the weights before dropout, which scales multiply in float32.

        float16 holds no small weights, nor large ones without a softmax: where the values are float16 and have scales,
        each row of the tile is divided by a power of two, near its largest weight. What is 2 ** 38 times smaller than
        that becomes 0.
        """
        p, values, scales = self.scores.drop(p), self.values, self.scales
        if scales is None:
            return pv_dot(spec, p, values)
        if values[0].dtype != jnp.float16:
            return pv_dot(spec, p * _along_keys(scales[0]), values)
        largest = functools.reduce(jnp.maximum, scales)
        smaller, factor = powers_of_two(jnp.max(jnp.abs(p * _along_keys(largest)), axis=1))
        share, made = len(values) // len(scales), []
        for number, scale in enumerate(scales):
            columns = values[number * share : (number + 1) * share]
            made += [x * factor for x in pv_dot(spec, p * _along_keys(scale) * smaller, columns)]
        return tuple(made)

    def cleared(self) -> Tile:
        """With 0 for values that are NaN or infinite, also by their scale."""
        if self.scales is None:
            return self._replace(values=cleared(self.values))
        values = tuple(
            jnp.where(jnp.abs(x) < jnp.inf, held, jnp.zeros_like(held))
            for x, held in zip(self.scaled_values, self.values, strict=True)
        )
        return Tile(self.scores, values, cleared(self.scales))

    @property
    def scaled_values(self) -> Columns:
        """The values times their scales, in float32."""
        if self.scales is None:
            return self.values
        share = len(self.values) // len(self.scales)
        scales = [scale[:, None] if scale.ndim else scale for scale in self.scales for _ in range(share)]
        return tuple(x.astype(jnp.float32) * scale for x, scale in zip(self.values, scales, strict=True))


def _along_keys(scale: jax.Array) -> jax.Array:
    return scale[None, :] if scale.ndim else scale


class Walk(Protocol):
    """A mainloop: folds ``step(state, *key)`` over tiles of keys."""

    def __call__(self, state: S, step: Callable[..., S], /) -> S: ...  # noqa: D102


RowVectors = tuple[jax.Array, ...]  # lse and ``spec.stats`` of the rows of a tile, [rows] each


class Attention(NamedTuple):
    """Attention of the rows of a tile over the keys that it visits.

    Attributes:
      prepared: Statics and loop-invariant values of the mods.
      rows: How many.
      walk: The mainloop, ``(state, step) -> state``: folds ``step(state, *key)`` over tiles of keys.
      tile_at: ``(*key) -> Tile``.
      may_be_empty: Whether a row may still be fully masked after a tile.
      sink: The logit of the sink of the head, a scalar; None without.
    """

    prepared: Scores
    rows: int
    walk: Walk
    tile_at: Callable[..., Tile]
    may_be_empty: bool = True
    sink: jax.Array | None = None

    def attend(self) -> tuple[Columns, RowVectors]:
        """Output [rows, Dv], in chunks of columns, lse (natural log) and ``spec.stats``, [rows] each.

        Zeros and an lse of -inf for fully masked rows. The lse is NaN where the output must be repaired.
        """
        state = self.state()
        out, lse = self._finish(state)
        return out, (lse + mark(*out) if self.prepared.spec.needs_marks else lse, *self._stats(state))

    def repair(self) -> tuple[Columns, RowVectors, Attended]:
        """The same from cleared values, with the lse as it is, and which rows must keep the output of `attend`."""
        state, attended = self.repaired_state(Attended.none(self.rows))
        out, lse = self._finish(state)
        return out, (lse, *self._stats(state)), attended

    def state(self) -> softmax.SoftmaxState:
        """The state after all keys of the walk."""

        def step(state: softmax.SoftmaxState, *key: Index) -> softmax.SoftmaxState:
            return self._fold(state, self.tile_at(*key))

        return self.walk(self._start, step)

    def repaired_state(self, attended: Attended) -> tuple[softmax.SoftmaxState, Attended]:
        """The same from cleared values, and which rows must keep their output, with those that had to before."""

        def step(state: tuple[softmax.SoftmaxState, Attended], *key: Index) -> tuple[softmax.SoftmaxState, Attended]:
            tile = self.tile_at(*key)
            return self._fold(state[0], tile.cleared()), state[1].to(tile.scaled_values, tile.scores.visible)

        return self.walk((self._start, attended), step)

    @property
    def _start(self) -> softmax.SoftmaxState:
        spec = self.prepared.spec
        zeros = zero_values(spec, self.rows)
        return softmax.start(self.rows, zeros, entropy="entropy" in spec.stats)

    def _finish(self, state: softmax.SoftmaxState) -> tuple[Columns, jax.Array]:
        spec = self.prepared.spec
        if spec.normalize == "none":
            return tuple(x * spec.kept_scale for x in state.out), jnp.zeros((self.rows,), jnp.float32)
        return softmax.finish(self._with_sink(state), self.prepared.log2_scale, self.prepared.spec.kept_scale)

    def _with_sink(self, state: softmax.SoftmaxState) -> softmax.SoftmaxState:
        return state if self.sink is None else softmax.with_sink(state, self.sink, self.prepared.log2_scale)

    def _stats(self, state: softmax.SoftmaxState) -> tuple[jax.Array, ...]:
        """Those of the state after all keys; the max is the natural score, and without the sink."""
        values = {
            "max": lambda: state.row_max * (self.prepared.log2_scale * LN_2),
            "entropy": lambda: softmax.entropy(self._with_sink(state)),
        }
        return tuple(values[name]() for name in self.prepared.spec.stats)

    def _fold(self, state: softmax.SoftmaxState, tile: Tile) -> softmax.SoftmaxState:
        spec, log2_scale = self.prepared.spec, self.prepared.log2_scale
        product = lambda p: tile.product(spec, p)
        if spec.normalize == "none":
            return softmax.add_weights(state, product, linear_weights(self.prepared, tile.scores))
        return softmax.update(
            state,
            tile.scores.s,
            log2_scale=log2_scale,
            exp2=lambda s, row_max_log2: weights(spec, s, log2_scale, row_max_log2),
            pv_dot=product,
            may_be_empty=self.may_be_empty,
            exact=spec.config.batch_invariant,
        )

"""A step of the forward kernel: a tile of keys, and the values of the one before (see `forward_sm90`)."""

from __future__ import annotations

import enum
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plg

from pallas_kernels.marks import mark
from pallas_kernels.mosaic_gpu import inline_ptx, scores
from pallas_kernels.mosaic_gpu.cost import fits_beside_product, leaves_registers, takes_special_functions
from pallas_kernels.mosaic_gpu.pipeline import Ring, Turns
from pallas_kernels.mosaic_gpu.tile import ROW, TILE
from pallas_kernels.program import patterns as forms
from pallas_kernels.spec import LN_2, LOG2_E, AttentionSpec


class State(NamedTuple):
    """Of the rows of a warp group, after some of the keys.

    Attributes:
      out: Sums of weights times values, but for the last tile's.
      top: The largest score so far, in base 2; 0 where scores are bounded.
      total: Sums of the weights, each over every eighth column.
      p: Weights of the last tile, in the dtype of the values.
      stage: Of the ring, with the next keys and the values of the last tile.
    """

    out: jax.Array
    top: jax.Array
    total: jax.Array
    p: jax.Array
    stage: jax.Array


class Step(NamedTuple):
    """What all steps over the keys of a tile of queries share.

    Attributes:
      known: How scores are computed, and what is known of the mods.
      queries: Those of the warp group, in shared memory.
      ring: Keys and values, and tiles of `planes`.
      turns: With the other warp group.
      rows: Of these tiles, those of the warp group.
    """

    known: scores.Scores
    queries: Any
    ring: Ring
    turns: Turns
    rows: Any

    @property
    def bounded(self) -> bool:
        """Whether weights need not be made smaller by the largest score."""
        return is_bounded(self.known.spec, self.queries.dtype)

    @property
    def by_exponentials(self) -> bool:
        """Whether turns are taken at the exponentials, before which the largest score is known."""
        return scarce(self.known.spec) is Scarce.EXPONENTIALS and not self.bounded

    def __call__(self, state: State, first: Any, is_partial: bool) -> State:
        """Takes in the tile of keys from `first` on, and the values of the one before.

        Both products are started together: the tensor cores go from one to the other without a pause. While they run,
        the next stage is waited for. Before the first tile nothing came: the values that lie with it are multiplied by
        weights of zero.
        """
        known = self.known
        out, s, top, shift = self._products(state, first, is_partial)
        self.ring.release(state.stage)
        exponent, total = s * known.unit, state.total
        if not self.bounded:
            exponent = exponent - _over_columns(shift, s.shape)
            keep = inline_ptx.exp2(ROW, state.top - shift)
            total, out = total * _over_columns(keep, total.shape), out * _over_columns(keep, out.shape)
        p = inline_ptx.exp2(TILE, exponent)
        total = total + inline_ptx.sum_columns(TILE, p)
        if self.by_exponentials:
            total = self.turns.end_after(TILE, total)
        return State(out, top, total, p.astype(state.p.dtype), state.stage + 1)

    def _products(self, state: State, first: Any, is_partial: bool) -> tuple[jax.Array, ...]:
        """The output with the values of the tile before; scores of this one, the largest so far, what to subtract."""
        (keys, values, *brought), spec = self.ring.stage(state.stage), self.known.spec
        by_products = scarce(spec) is Scarce.PRODUCTS

        def products(sums: Any, raw: Any) -> tuple[jax.Array, ...]:
            if by_products:
                self.turns.take()
            plg.wgmma(raw, self.queries, keys.T)
            plg.wgmma(sums, state.p, values)
            if by_products:
                self.turns.end()
            begun = scores.begin(self.known, first, is_partial)
            self.ring.wait(state.stage + 1)
            # The product with the values may still run, unless a mod wants the registers of the weights.
            loaded = plg.wgmma_accumulator_load(raw, wait_n=int(fits_beside_product(spec.programs.score)))
            by_clause = leaves_registers(spec.programs.score)
            elements = [tile.at[self.rows] for tile in brought]
            s = scores.modify(self.known, loaded, first, is_partial, begun, elements, by_clause=by_clause).s
            return self._shifted(s, state.top)

        def start(refs: Any) -> None:
            raw = plg.WGMMAAccumulatorRef(self.known.tile, jnp.float32)
            for ref, x in zip(refs[1:], pl.run_scoped(functools.partial(products, refs[0]), raw), strict=True):
                ref[...] = x

        tile, row = _zeros(self.known.tile, TILE), _zeros(self.known.tile[:1], ROW)
        run: Any = pl.run_state(start)
        return run((plg.WGMMAAccumulatorRef.init(state.out), tile, row, row))

    def _shifted(self, s: jax.Array, before: jax.Array) -> tuple[jax.Array, ...]:
        """Scores, the largest so far, and what to subtract in the exponent."""
        spec = self.known.spec
        if self.bounded:
            return s, before, before
        top = jnp.maximum(before, jnp.max(s, axis=1) * self.known.unit)
        may_hide = spec.programs.mask is not None or spec.programs.score is not None
        shift = jnp.where(top == -jnp.inf, 0.0, top) if may_hide else top
        return s, top, self.turns.take_before(ROW, shift) if self.by_exponentials else shift


class Scarce(enum.Enum):
    """What the two warp groups take turns at."""

    PRODUCTS = enum.auto()
    EXPONENTIALS = enum.auto()
    NEITHER = enum.auto()


def scarce(spec: AttentionSpec) -> Scarce:
    """What takes longest in a tile, so that turns are taken at it.

    One exponential for each score, 16 a cycle and multiprocessor, takes as long as the products at head size 64. H200,
    jax 0.11.2, bf16, S 16384, TFLOP/s with turns at the products and at the exponentials: 451 and 501 at head size 64,
    716 and 658 at 128 (no mod, earlier forms of the kernel), 617 and 646 at 96 (causal).

    A mod with functions of that unit keeps it busy by itself: a soft cap under a causal mask gives 380 at head size 64
    without turns, 358 with turns at the products, 359 with turns at both functions; 646, 624 and 622 at 128.
    """
    if takes_special_functions(spec.programs.score):
        return Scarce.NEITHER
    return Scarce.PRODUCTS if spec.D + spec.Dv > 192 else Scarce.EXPONENTIALS


MOST_EXPONENT = 80  # sums of 2 ** 80 times values fit into float32 while the values sum up to less than 2 ** 48


def is_bounded(spec: AttentionSpec, dtype: Any) -> bool:
    """Whether scores are so small, whatever the products, that the running maximum is not needed (a soft cap).

    It saves a fifth of the instructions of a tile: 595 became 624 TFLOP/s at head size 128 (as `scarce`). Weights are
    then as large as the exponential of the bound, which float16 does not hold.
    """
    size = forms.bound(spec.programs.score)
    return size is not None and size * LOG2_E <= MOST_EXPONENT and jnp.dtype(dtype) == jnp.bfloat16


def start(spec: AttentionSpec, rows: int, keys: int, dtype: Any, stage: Any) -> State:
    """Before all keys, of which the first lie in the given stage."""
    least = 0.0 if is_bounded(spec, dtype) else -jnp.inf
    top = plg.layout_cast(jnp.full((rows,), least, jnp.float32), ROW)
    total, p = _zeros((rows, inline_ptx.TILE_COLUMNS), TILE), plg.layout_cast(jnp.zeros((rows, keys), dtype), TILE)
    return State(_zeros((rows, spec.Dv), TILE), top, total, p, stage)


def finish(ring: Ring, state: State, *, marks: bool) -> tuple[jax.Array, jax.Array]:
    """Output and lse (natural log), with the values of the last tile; zeros and -inf for rows that saw nothing.

    With `marks` the lse is NaN where the output is not finite.
    """
    values = ring.stage(state.stage)[1]
    add: Any = pl.run_state(lambda ref: plg.wgmma(ref, state.p, values))
    out, total = add(plg.WGMMAAccumulatorRef.init(state.out)), jnp.sum(state.total, axis=1)
    empty = total == 0.0
    total = jnp.where(empty, 1.0, total)
    lse = jnp.where(empty, -jnp.inf, state.top * LN_2 + jnp.log(total))
    out = jnp.where(_over_columns(empty, out.shape), 0.0, out)  # where no tile is visited, values were never filled
    return out * _over_columns(1.0 / total, out.shape), lse + mark(out) if marks else lse


def _over_columns(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return lax.broadcast_in_dim(x, shape, (0,))


def _zeros(shape: tuple[int, ...], layout: Any) -> jax.Array:
    return plg.layout_cast(jnp.zeros(shape, jnp.float32), layout)

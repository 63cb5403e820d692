"""A step of the forward kernel: a tile of keys, and the values of the one before (see `forward_sm90`)."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plg

from pallas_kernels.mosaic_gpu import inline, scores
from pallas_kernels.mosaic_gpu.arithmetic import fits_beside_product
from pallas_kernels.mosaic_gpu.pipeline import Ring, Turns
from pallas_kernels.mosaic_gpu.tile import ROW, TILE
from pallas_kernels.setting import LN_2, Setting


class State(NamedTuple):
    """Of the rows of a warp group, after some of the keys.

    Attributes:
      out: Sums of weights times values, but for the last tile's.
      top: The largest score so far, in base 2.
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
      ring: Keys and values.
      turns: With the other warp group.
    """

    known: scores.Scores
    queries: Any
    ring: Ring
    turns: Turns

    def __call__(self, state: State, first: Any, is_partial: bool) -> State:
        """Takes in the tile of keys from `first` on, and the values of the one before.

        Both products are started together: the tensor cores go from one to the other without a pause. While they run,
        the next stage is waited for. Before the first tile nothing came: the values that lie with it are multiplied by
        weights of zero.
        """
        known, setting = self.known, self.known.setting
        out, s, top, shift = self._products(state, first, is_partial)
        self.ring.release(state.stage)
        p = inline.exp2(TILE, s * known.unit - _over_columns(shift, s.shape))
        keep = inline.exp2(ROW, state.top - shift)
        total = state.total * _over_columns(keep, state.total.shape) + inline.sum_columns(TILE, p)
        if not bound_by_products(setting):
            total = self.turns.end_after(TILE, total)
        return State(out * _over_columns(keep, out.shape), top, total, p.astype(state.p.dtype), state.stage + 1)

    def _products(self, state: State, first: Any, is_partial: bool) -> tuple[jax.Array, ...]:
        """The output with the values of the tile before; scores of this one, the largest so far, what to subtract."""
        (keys, values), by_products = self.ring.stage(state.stage), bound_by_products(self.known.setting)

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
            loaded = plg.wgmma_accumulator_load(raw, wait_n=int(fits_beside_product(self.known.setting.score)))
            return self._shifted(scores.modify(self.known, loaded, first, is_partial, begun).s, state.top)

        def start(refs: Any) -> None:
            raw = plg.WGMMAAccumulatorRef(self.known.tile, jnp.float32)
            for ref, x in zip(refs[1:], pl.run_scoped(functools.partial(products, refs[0]), raw), strict=True):
                ref[...] = x

        tile, row = _zeros(self.known.tile, TILE), _zeros(self.known.tile[:1], ROW)
        run: Any = pl.run_state(start)
        return run((plg.WGMMAAccumulatorRef.init(state.out), tile, row, row))

    def _shifted(self, s: jax.Array, before: jax.Array) -> tuple[jax.Array, ...]:
        """Scores, the largest so far, and what to subtract in the exponent."""
        setting = self.known.setting
        top = jnp.maximum(before, jnp.max(s, axis=1) * self.known.unit)
        may_hide = setting.mask is not None or setting.score is not None
        shift = jnp.where(top == -jnp.inf, 0.0, top) if may_hide else top
        return s, top, shift if bound_by_products(setting) else self.turns.take_before(ROW, shift)


def bound_by_products(setting: Setting) -> bool:
    """Whether the products of a tile take longer than its exponentials, so that turns are taken at the former.

    One exponential for each score, 16 a cycle and multiprocessor, takes as long as the products at head size 64. There
    the change from turns at the products to turns at the exponentials alone took 451 to 501 TFLOP/s (H200, jax 0.11.2,
    bf16, S 16384, no mod). At 128, 658 with turns at the exponentials became 716 with turns at the products and values
    in the stage of the next keys.
    """
    return setting.D + setting.Dv > 128


def start(rows: int, keys: int, size: int, dtype: Any, stage: Any) -> State:
    """Before all keys, of which the first lie in the given stage."""
    top = plg.layout_cast(jnp.full((rows,), -jnp.inf, jnp.float32), ROW)
    total, p = _zeros((rows, inline.TILE_COLUMNS), TILE), plg.layout_cast(jnp.zeros((rows, keys), dtype), TILE)
    return State(_zeros((rows, size), TILE), top, total, p, stage)


def finish(ring: Ring, state: State) -> tuple[jax.Array, jax.Array]:
    """Output and lse (natural log), with the values of the last tile; zeros and -inf for rows that saw nothing."""
    values = ring.stage(state.stage)[1]
    add: Any = pl.run_state(lambda ref: plg.wgmma(ref, state.p, values))
    out, total = add(plg.WGMMAAccumulatorRef.init(state.out)), jnp.sum(state.total, axis=1)
    empty = total == 0.0
    total = jnp.where(empty, 1.0, total)
    lse = jnp.where(empty, -jnp.inf, state.top * LN_2 + jnp.log(total))
    out = jnp.where(_over_columns(empty, out.shape), 0.0, out)  # where no tile is visited, values were never filled
    return out * _over_columns(1.0 / total, out.shape), lse


def _over_columns(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return lax.broadcast_in_dim(x, shape, (0,))


def _zeros(shape: tuple[int, ...], layout: Any) -> jax.Array:
    return plg.layout_cast(jnp.zeros(shape, jnp.float32), layout)

"""Forward kernel.

One program computes a tile of queries of one head: it walks the listed blocks of keys, partial ones with the mask and
full ones without, and keeps the query, the running softmax and the output in registers (Dong et al. 2024,
arXiv:2412.05496, section 4; Dao 2023, arXiv:2307.08691, algorithm 1). The grid is (tiles of queries, query heads,
batch).

Floor on an H200: products at 817 TFLOP/s as measured; one exponential for each score at 16 a cycle and multiprocessor,
1070 TFLOP/s at head size 64 and 2140 at 128. One after the other that is 463 and 591, and 450 and 501 to 553 are
reached without a mod: Triton lets a program wait for its products before it takes exponents, and only the other program
of the multiprocessor fills the time. To do better, one program must do both at once, which Triton cannot say.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import blocks, softmax
from pallas_kernels.setting import Arrays, Setting, Tiles
from pallas_kernels.triton import scores
from pallas_kernels.triton.columns import load_keys, load_queries, store_rows, store_vector, times, zero_rows
from pallas_kernels.triton.launch import launch
from pallas_kernels.triton.tile import weights


def forward(setting: Setting, tiles: Tiles, arrays: Arrays) -> tuple[jax.Array, jax.Array]:
    """Computes out, in the layout and dtype of the query, and lse, float32 [B, Hq, T]."""
    order = blocks.row_order(setting, tiles, arrays)
    outputs = [
        jax.ShapeDtypeStruct(setting.rows_shape(setting.Dv), arrays.query.dtype),
        jax.ShapeDtypeStruct((setting.B, setting.Hq, setting.T), jnp.float32),
    ]
    out, lse = launch(
        functools.partial(_kernel, setting, tiles),
        (arrays, order),
        outputs,
        name="jflex_forward",
        grid=(pl.cdiv(setting.T, tiles.block_q), setting.Hq, setting.B),
        tiles=tiles,
        interpret=setting.interpret,
    )
    return out, lse


def _kernel(setting: Setting, tiles: Tiles, arrays: Arrays, order: Any, out: Any, lse: Any) -> None:
    nth, h, b = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    here = b, h, tile = b, h, blocks.row_at(setting, order, b, h, nth, pl.num_programs(0))
    rows_end, keys_end = setting.T % tiles.block_q != 0, setting.walk_passes_end("k", tiles.block_kv)
    first = tile * tiles.block_q
    q = load_queries(setting, arrays.query, b, h, first, tiles.block_q, may_end=rows_end)
    known = scores.prepare(setting, arrays, tiles[:2], b, h, q_first=first)
    may_hide = setting.mask is not None or setting.score is not None

    def step(state: softmax.SoftmaxState, key: Any, is_partial: bool) -> softmax.SoftmaxState:
        may_end = is_partial and keys_end
        k = load_keys(setting, arrays.key, b, h, key, tiles.block_kv, may_end=may_end)
        tile = scores.compute(known, q, k, key, is_partial)
        v = load_keys(setting, arrays.value, b, h, key, tiles.block_kv, may_end=may_end)
        return softmax.update(
            state,
            tile.s,
            unit=known.unit,
            weigh=lambda s, shift: weights(setting, s, known.unit, shift),
            times_values=lambda p: times(setting, p, v),
            may_hide=may_hide,
        )

    state = blocks.over_keys(
        setting, tiles, arrays, here, softmax.start(tiles.block_q, zero_rows(tiles.block_q, setting.Dv)), step
    )
    rows, row_lse = softmax.finish(state, known.unit)
    store_rows(setting, out, b, h, first, rows, setting.T, may_end=rows_end)
    store_vector(lse, (b, h), first, row_lse, setting.T, may_end=rows_end)

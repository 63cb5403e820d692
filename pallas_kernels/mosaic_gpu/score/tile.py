"""Evaluation of mods on the tile of a consumer warp group, in the layout of wgmma accumulators."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plg
from jax.typing import DTypeLike

from pallas_kernels.mosaic_gpu import inline_ptx
from pallas_kernels.program import patterns
from pallas_kernels.program.build import Program
from pallas_kernels.program.evaluate import Evaluation, OfMultiple, Space
from pallas_kernels.program.ir import Axes, Node
from pallas_kernels.spec import LOG2_E
from pallas_kernels.types import Accumulator, Index, Ref, RegisterLayout

TILE = plg.Layout.WGMMA  # accumulators, 64 rows to a warp group
ROW = TILE.reduce(1)  # one value for each row: what a sum over the columns of a tile leaves
COLUMN = TILE.reduce(0)  # one value for each column

# Primitives that are computed by CUDA's device library, by their names in MLIR: Pallas has no lowering for them.
LIBRARY = {
    "acos": "acos", "acosh": "acosh", "asin": "asin", "asinh": "asinh", "atan": "atan", "atanh": "atanh",
    "cbrt": "cbrt", "ceil": "ceil", "cosh": "cosh", "expm1": "expm1", "floor": "floor", "log1p": "log1p",
    "pow": "powf", "sinh": "sinh", "tan": "tan",
}  # fmt: skip


class TileSpace(Space):
    """Values as a warp group holds them: uniform values, and row, column and tile values spread over its threads.

    Captured arrays are flattened to one dimension.
    """

    def __init__(
        self,
        refs: Sequence[Ref],
        shapes: Sequence[tuple[int, ...]],
        tile: tuple[int, int],
        *,
        transposed: bool,
        may_end: bool,
    ) -> None:
        block_q, block_kv = tile
        self.refs, self.operand_shapes, self.transposed, self.may_end = refs, shapes, transposed, may_end
        self.pairs = False
        self.shapes = {
            Axes.ROW: (block_q,),
            Axes.COLUMN: (block_kv,),
            Axes.TILE: (block_kv, block_q) if transposed else tile,
        }
        self.layouts = {
            Axes.ROW: COLUMN if transposed else ROW,
            Axes.COLUMN: ROW if transposed else COLUMN,
            Axes.TILE: TILE,
        }

    def literal(self, node: Node) -> jax.Array:
        """A constant of the kernel."""
        return jnp.full((), node.value.item(), node.dtype)

    def spread(self, x: jax.Array, kind: str, to: str) -> jax.Array:
        """Broadcasts along the axes that are new; a thread holds a repeated value once."""
        if kind == to:
            return x
        if kind == Axes.UNIFORM:
            return plg.layout_cast(lax.broadcast_in_dim(x, self.shapes[to], ()), self.layouts[to])
        return lax.broadcast_in_dim(x, self.shapes[to], (int((kind == Axes.COLUMN) != self.transposed),))

    def load(self, node: Node, indices: Sequence[jax.Array]) -> jax.Array:
        """Gathers elements; the program has made sure that the indices are in range."""
        ref, at = self.refs[node.value], self._place(node, indices)
        step = None
        if node.kind == Axes.TILE and not self.may_end:
            step = patterns.step(node, "q" if self.transposed else "k", self.operand_shapes[node.value])
        if node.kind == Axes.UNIFORM:
            x = ref[at]
        elif step is not None:
            x = inline_ptx.load_strided(ref, at, ref.dtype, step)
        else:
            x = inline_ptx.load_elements(ref, at, self.layouts[node.kind], ref.dtype)
        return _boolean(x) if node.dtype == np.bool_ else x

    def load_run(self, node: Node, indices: Sequence[jax.Array], first: Index, count: int) -> jax.Array:
        """Loads contiguous elements, at the given indices and from `first` on, which is even."""
        source = self.refs[node.value].at[pl.ds(self._place(node, [*indices, first]), count)]
        layout: RegisterLayout = self.layouts[node.kind]
        x = plg.load(source, layout=layout, optimized=False)  # pyright: ignore[reportCallIssue]  (jax < 0.11: an index)
        return _boolean(x) if node.dtype == np.bool_ else x

    def _place(self, node: Node, indices: Sequence[Index]) -> jax.Array:
        """The offset of an element in the flattened array."""
        at = jnp.int32(0)
        for index, size in zip(indices, self.operand_shapes[node.value], strict=True):
            at = at * jnp.int32(size) + index
        return at

    def substitutes(self, kind: str) -> Mapping[str, Callable[..., jax.Array]]:
        """Primitives without a lowering for Mosaic GPU, and the SFU's tanh: its inputs are no more exact than that.

        Division of integers hides their range. LLVM of JAX 0.12 narrows them to 16 bits where that is small, as in
        ``x % 7 % 5``, has no instruction then (``Cannot select: v2i16 smul_lohi``), and ends the process.
        """
        layout = plg.Layout.WG_SPLAT(()) if kind == Axes.UNIFORM else self.layouts[kind]
        result = {
            name: functools.partial(_without_parameters, functools.partial(inline_ptx.from_library, mlir, layout))
            for name, mlir in LIBRARY.items()
        }
        if kind != Axes.UNIFORM:
            result["tanh"] = functools.partial(_without_parameters, functools.partial(inline_ptx.tanh, layout))
            result |= {name: functools.partial(_divided, divide, layout) for name, divide in _DIVISIONS.items()}
        return result

    def substitutes_of_multiples(self, kind: str) -> Mapping[str, OfMultiple]:
        """The logistic by SFU functions, for its inputs have 16 bits: two for each element, or three for a pair.

        A pair shares its NaN. So only tiles without hidden elements have pairs, and both elements are of one query.
        It has small errors where values are below 2 ** -63 (see `patterns.is_linear_in`).
        """
        if kind == Axes.UNIFORM:
            return {}
        if kind == Axes.TILE and self.pairs:
            logistic = functools.partial(inline_ptx.logistic_of_pairs, of_rows=self.transposed)
        else:
            logistic = functools.partial(inline_ptx.logistic, self.layouts[kind])
        return {"logistic": OfMultiple(-LOG2_E, logistic)}

    def with_pairs(self) -> TileSpace:
        """For tiles in which nothing is masked."""
        space = copy.copy(self)
        space.pairs = True
        return space


_DIVISIONS = {"div": lax.div, "rem": lax.rem}


def _divided(divide: Callable[..., jax.Array], layout: RegisterLayout, x: jax.Array, y: jax.Array) -> jax.Array:
    is_word = jnp.issubdtype(x.dtype, jnp.integer) and x.dtype.itemsize == 4
    return divide(inline_ptx.hide_range(layout, x) if is_word else x, y)


def _boolean(x: jax.Array) -> jax.Array:
    return x.astype(jnp.int32) != 0


def _without_parameters(function: Callable[..., jax.Array], *args: jax.Array, **_: object) -> jax.Array:
    return function(*args)


def evaluation(
    program: Program,
    refs: Sequence[Ref],
    shapes: Sequence[tuple[int, ...]],
    tile: tuple[int, int],
    indices: Mapping[str, jax.Array],
    *,
    transposed: bool,
    may_end: bool,
) -> Evaluation:
    """Starts to evaluate a program.

    Args:
      refs: The captured arrays of the mod, flattened.
      shapes: Of the captured arrays.
      tile: Queries and keys.
      indices: The loop-invariant ones of ``b``, ``h``, ``q``, ``k``.
      transposed: Whether tiles are (keys, queries).
      may_end: Whether tiles pass the end of the axis of their columns, where the last index is repeated.
    """
    space = TileSpace(refs, shapes, tile, transposed=transposed, may_end=may_end)
    return Evaluation(space, {n: indices[n.value] for n in program.arguments if n.value in indices})


def accumulator(rows: int, columns: int) -> plg.WGMMAAccumulatorRef:
    """Declares a float32 wgmma accumulator of a warp group."""
    return plg.WGMMAAccumulatorRef((rows, columns), jnp.float32)


def accumulate(out: jax.Array, gemm: Callable[[Accumulator], None]) -> jax.Array:
    """Adds the GEMM that `gemm` issues on an accumulator to `out`, and waits for it."""
    run = cast("Callable[[object], jax.Array]", pl.run_state(gemm))
    return run(plg.WGMMAAccumulatorRef.init(out))


def row_vector(rows: int, value: float = 0.0) -> jax.Array:
    """A float32 row value, [rows], of one number."""
    return plg.layout_cast(jnp.full((rows,), value, jnp.float32), ROW)


def zero_tile(rows: int, columns: int, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """Zeros [rows, columns] in the layout of wgmma accumulators."""
    return plg.layout_cast(jnp.zeros((rows, columns), dtype), TILE)


def over_columns(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Row values, repeated along rows."""
    return lax.broadcast_in_dim(x, shape, (0,))


def indices_of(first: Index, count: int, length: int, layout: RegisterLayout, *, may_end: bool) -> jax.Array:
    """Indices of `count` queries or keys from `first` on, clamped to the last one, so that loads stay in range."""
    index = first + plg.broadcasted_iota(jnp.int32, (count,), 0, layout=layout)
    return jnp.minimum(index, length - 1) if may_end else index

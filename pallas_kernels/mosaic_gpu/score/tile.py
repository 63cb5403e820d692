"""Mods on the tile of a consumer warp group, in the layout of wgmma accumulators: evaluation, support, cost."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plg
from jax.typing import DTypeLike

from pallas_kernels.mosaic_gpu import inline_ptx
from pallas_kernels.plan import Refusal
from pallas_kernels.program import patterns
from pallas_kernels.program.build import Derivative, Program
from pallas_kernels.program.evaluate import Evaluation, OfMultiple, Space
from pallas_kernels.program.ir import Axes, Node
from pallas_kernels.spec import LOG2_E, AttentionSpec
from pallas_kernels.types import Accumulator, Index, Ref, RegisterLayout

TILE = plg.Layout.WGMMA  # accumulators, 64 rows to a warp group
ROW = TILE.reduce(1)  # one value for each row, as a sum over the columns of a tile leaves
COLUMN = TILE.reduce(0)  # one value for each column

# Primitives that are computed by CUDA's device library, by their names in MLIR: Pallas has no lowering for them.
LIBRARY = {
    "acos": "acos", "acosh": "acosh", "asin": "asin", "asinh": "asinh", "atan": "atan", "atanh": "atanh",
    "cbrt": "cbrt", "ceil": "ceil", "cosh": "cosh", "expm1": "expm1", "floor": "floor", "log1p": "log1p",
    "pow": "powf", "sinh": "sinh", "tan": "tan",
}  # fmt: skip
# Lowered by Pallas for register arrays, or by `LIBRARY`.
_KNOWN = frozenset({
    "input", "literal", "load", "call", "stop_gradient",
    "abs", "add", "and", "atan2", "bitcast_convert_type", "convert_element_type", "cos", "div", "eq", "erf", "exp",
    "exp2", "ge", "gt", "integer_pow", "is_finite", "le", "log", "log2", "logistic", "lt", "max", "min", "mul", "ne",
    "neg", "not", "one_minus_square", "or", "rem", "round", "rsqrt", "select_n", "shift_left",
    "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sqrt", "square", "sub", "tanh", "xor",
    *LIBRARY,
})  # fmt: skip
_DTYPES = frozenset({"bool", "int32", "uint32", "float32", "bfloat16", "float16"})
_LOADED = _DTYPES | {"int8", "int16", "uint8", "uint16"}
MAX_LIGHT_VALUES = 24  # tile values of a mod: with more it needs the registers of a large tile
# Tile values while a wgmma still runs: a mod with 20 spills 948 bytes beside one, and 468 without it.
MAX_VALUES_BESIDE_GEMM = 16
MAX_DERIVATIVE_VALUES = 32  # tile values of a derivative: with more a tile of 64 x 64 does not fit beside it either
MAX_MASK_VALUES = 96  # of a mask, in the backward kernels: a fold and a draw of a key have 246, and spill 11 kB at D 64
VALUES_PER_CALL = 16  # values that a function of CUDA's device library holds
# Primitives of the SFU (MUFU instructions); mods that call a library are too large for it to matter.
_SPECIAL = frozenset({"div", "exp", "exp2", "log", "log2", "logistic", "rsqrt", "sqrt", "tanh"})
_PERIODIC = frozenset({"sin", "cos", "tan"})
_CALLS = frozenset({"atan2", "cos", "sin", *LIBRARY})


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
    """Starts to evaluate a program with captured arrays of these shapes, flattened, and loop-invariant indices.

    `may_end` says that tiles pass the end of the axis of their columns, where the last index is repeated.
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


# --- supported mods, and their cost on each element: registers, and the special-function unit (SFU)


def unsupported_primitive(nodes: Iterable[Node]) -> str | None:
    """The first primitive or dtype of a program without a lowering, as part of a sentence, or None."""
    for node in nodes:
        if node.op not in _KNOWN:
            return f"primitive `{node.op}` has no lowering for Mosaic GPU"
        if node.op == "rem" and node.dtype.kind not in "iu":
            return "primitive `rem` has a lowering for Mosaic GPU for integers alone"
        if str(node.dtype) not in (_LOADED if node.op == "load" else _DTYPES):
            return f"it computes in {node.dtype}, for which Mosaic GPU has no arithmetic"
    return None


def limit_of_mods(spec: AttentionSpec) -> Refusal | None:
    """The mod of a call, with its tile programs, that the kernels do not support, or None."""
    for mod, program in ((spec.score_mod, spec.programs.score), (spec.mask_mod, spec.programs.mask)):
        missing = None if program is None else unsupported_primitive(program.nodes)
        if missing is not None:
            assert mod is not None
            return Refusal(f"cannot run in its kernels: {missing}", mod.role)
    missing = None if spec.programs.dropout is None else unsupported_primitive(spec.programs.dropout.nodes)
    return None if missing is None else Refusal(f"its kernels cannot drop weights: {missing}")


def is_heavy(program: Program | None) -> bool:
    """True if a mod has so many tile values that a large tile would spill.

    Functions that reduce their argument to a period always do: a sine spills 2280 bytes with 128 keys, and none with
    64, where a gelu or a softplus spills none with either (compiled for sm_90a, head size 64).
    """
    return is_periodic(program) or (program is not None and tile_values(program.nodes) > MAX_LIGHT_VALUES)


def is_periodic(program: Program | None) -> bool:
    """True if a mod calls, on each element, a function that reduces its argument to a period."""
    return program is not None and any(x.kind == Axes.TILE and x.op in _PERIODIC for x in program.nodes)


def fits_beside_gemm(program: Program | None) -> bool:
    """True if a mod can be evaluated while a wgmma in flight holds registers."""
    return program is None or tile_values(program.nodes) <= MAX_VALUES_BESIDE_GEMM


def has_spare_registers(program: Program | None) -> bool:
    """True if a mod leaves registers for more than one code path of a mask: it is light and loads no tile values."""
    return fits_beside_gemm(program) and (program is None or all(load.kind != Axes.TILE for load in program.loads))


def uses_sfu(program: Program | None) -> bool:
    """True if a mod that is not too large uses the SFU on each element, as softmax does.

    A larger one spills 2608 bytes where nothing keeps the assembler from starting on it early, 468 otherwise.
    """
    return (
        program is not None
        and fits_beside_gemm(program)
        and any(node.kind == Axes.TILE and node.op in _SPECIAL for node in program.nodes)
    )


def exceeds_registers(derivative: Derivative) -> bool:
    """True if a derivative has so many tile values that it spills in every tile of the backward kernels.

    Compiled for sm_90a, one of three functions of the score, a sine among them, spills 3228 bytes.
    """
    return tile_values(derivative.nodes) > MAX_DERIVATIVE_VALUES


def mask_exceeds_registers(program: Program | None) -> bool:
    """True if a mask has so many tile values that it spills in every tile of the backward kernels."""
    return program is not None and tile_values(program.nodes) > MAX_MASK_VALUES


def tile_values(nodes: Iterable[Node]) -> int:
    """Tile values that registers hold at once, at most."""
    return sum(VALUES_PER_CALL if node.op in _CALLS else 1 for node in nodes if node.kind == Axes.TILE)

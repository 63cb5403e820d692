"""Tiles in a Triton kernel: loading and storing rows, products, and mods evaluated on a tile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.evaluate import Evaluation, Space
from pallas_kernels.mods import Program
from pallas_kernels.nodes import Node
from pallas_kernels.setting import Setting

SMALLEST_DOT = 16  # rows, columns and depth of a product


def padded(size: int) -> int:
    """The power of two that holds a head size, as Triton's tiles must be."""
    return max(SMALLEST_DOT, 1 << (size - 1).bit_length())


def load_rows(
    setting: Setting, ref: Any, b: Any, h: Any, first: Any, rows: int, length: int, *, may_end: bool
) -> jax.Array:
    """Loads ``[rows, padded size]`` of an array in the layout of the setting; zeros outside of it.

    Args:
      setting: The setting.
      ref: [B, length, heads, size] or [B, heads, length, size].
      b: Batch.
      h: Head.
      first: First row.
      rows: How many.
      length: Of the array.
      may_end: Whether the rows may reach past the end.
    """
    at, mask = _place(setting, ref, b, h, first, rows, length, may_end)
    return plgpu.load(ref.at[at]) if mask is None else plgpu.load(ref.at[at], mask=mask, other=0.0)


def store_rows(
    setting: Setting, ref: Any, b: Any, h: Any, first: Any, x: jax.Array, length: int, *, may_end: bool
) -> None:
    """Stores what `load_rows` would load."""
    at, mask = _place(setting, ref, b, h, first, x.shape[0], length, may_end)
    plgpu.store(ref.at[at], x.astype(ref.dtype), mask=mask)


def _place(
    setting: Setting, ref: Any, b: Any, h: Any, first: Any, rows: int, length: int, may_end: bool
) -> tuple[Any, Any]:
    size = ref.shape[3]
    width = padded(size)
    if not may_end and width == size:
        row, column, mask = pl.ds(first, rows), pl.ds(0, size), None
    else:
        row = first + lax.broadcasted_iota(jnp.int32, (rows, width), 0)
        column = lax.broadcasted_iota(jnp.int32, (rows, width), 1)
        mask = column < size
        if may_end:
            mask &= row < length
    b, h = (
        jnp.full((), x, jnp.int32) if isinstance(x, int) else x for x in (b, h)
    )  # the interpreter takes no plain int
    return ((b, row, h, column) if setting.layout == "BTNH" else (b, h, row, column)), mask


def load_vector(
    ref: Any, at: tuple[Any, ...], first: Any, rows: int, length: int, other: float, *, may_end: bool
) -> jax.Array:
    """Loads ``[rows]`` of the last axis of an array."""
    if not may_end:
        return plgpu.load(ref.at[(*at, pl.ds(first, rows))])
    index = first + lax.broadcasted_iota(jnp.int32, (rows,), 0)
    return plgpu.load(ref.at[(*at, index)], mask=index < length, other=other)


def store_vector(ref: Any, at: tuple[Any, ...], first: Any, x: jax.Array, length: int, *, may_end: bool) -> None:
    """Stores what `load_vector` would load."""
    if not may_end:
        plgpu.store(ref.at[(*at, pl.ds(first, x.shape[0]))], x)
    else:
        index = first + lax.broadcasted_iota(jnp.int32, x.shape, 0)
        plgpu.store(ref.at[(*at, index)], x, mask=index < length)


def product(setting: Setting, a: jax.Array, b: jax.Array, *, over: tuple[int, int]) -> jax.Array:
    """Sums over axis ``over[0]`` of `a` and ``over[1]`` of `b`, in float32."""
    dimensions = (((over[0],), (over[1],)), ((), ()))
    return lax.dot_general(a, b, dimensions, precision=setting.precision, preferred_element_type=jnp.float32)


def weights(setting: Setting, s: jax.Array, unit: float, shift: jax.Array) -> jax.Array:
    """``2 ** (unit * s - shift)``, by one multiply-add and one exponential of the hardware (relative error 2 ** -22).

    Written in assembly, because XLA's Triton rounds product and difference apart, and its exponential guards numbers
    below 2 ** -126, which here become 0: together seven instructions of the hardware for each score.
    """
    if setting.interpret:
        return jnp.exp2(s * unit - shift)
    factor = np.float32(unit).view(np.uint32)
    asm = f"{{ fma.rn.f32 $0, $1, 0f{factor:08X}, $2; ex2.approx.ftz.f32 $0, $0; }}"
    [p] = plgpu.elementwise_inline_asm(
        asm,
        args=[s, jnp.broadcast_to(-shift, s.shape)],
        constraints="=f,f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(s.shape, jnp.float32)],
    )
    return p


class TileSpace(Space):
    """Values as Triton holds them: ``()``, ``(Bq, 1)``, ``(1, Bk)``, ``(Bq, Bk)``, or transposed."""

    def __init__(
        self, refs: Sequence[Any], block_q: int, block_kv: int, *, transposed: bool, approximate: bool
    ) -> None:
        self.refs, self.approximate = refs, approximate
        shapes = {"": (), "q": (block_q, 1), "k": (1, block_kv), "qk": (block_q, block_kv)}
        self.shapes = {kind: shape[::-1] if transposed else shape for kind, shape in shapes.items()}

    def literal(self, node: Node) -> jax.Array:
        """A constant of the kernel."""
        return jnp.full((), node.value.item(), node.dtype)

    def spread(self, x: jax.Array, kind: str, to: str) -> jax.Array:
        """Repeats along the axes that are new."""
        return x if kind == to else jnp.broadcast_to(x, self.shapes[to])

    def load(self, node: Node, indices: Sequence[jax.Array]) -> jax.Array:
        """Loads by element; the program has made sure that the indices are in range."""
        ref = self.refs[node.value]
        x = plgpu.load(ref.at[tuple(indices)]) if indices else ref[...]
        return x != 0 if node.dtype == np.bool_ else x

    def substitutes(self) -> Mapping[str, Callable[..., jax.Array]]:
        """The hardware's tanh (relative error 2 ** -11), where the inputs are no more exact than that."""
        return {"tanh": _approximate_tanh} if self.approximate else {}


def _approximate_tanh(x: jax.Array, **_: Any) -> jax.Array:
    return plgpu.approx_tanh(x) if x.dtype == jnp.float32 else jnp.tanh(x)


def evaluation(
    program: Program,
    refs: Sequence[Any],
    tile: tuple[int, int],
    indices: Mapping[str, Any],
    *,
    transposed: bool = False,
    approximate: bool = False,
) -> Evaluation:
    """Starts to evaluate a program.

    Args:
      program: Of a mod.
      refs: What it captures.
      tile: Queries and keys.
      indices: Those of ``b``, ``h``, ``q``, ``k`` that are known ahead of the loop.
      transposed: Whether tiles are held as (keys, queries).
      approximate: Whether fast functions of the hardware may be used.
    """
    space = TileSpace(refs, *tile, transposed=transposed, approximate=approximate)
    return Evaluation(space, {n: indices[n.value] for n in program.arguments if n.value in indices})


def q_indices(first: Any, tile: tuple[int, int], length: int, *, transposed: bool = False) -> jax.Array:
    """Query numbers of a tile, of kind ``"q"``; past the end the last one, so that nothing is read out of range."""
    return _indices(first, tile[0], length, 0 if not transposed else 1)


def k_indices(first: Any, tile: tuple[int, int], length: int, *, transposed: bool = False) -> jax.Array:
    """Key numbers of a tile, of kind ``"k"``."""
    return _indices(first, tile[1], length, 1 if not transposed else 0)


def _indices(first: Any, count: int, length: int, axis: int) -> jax.Array:
    index = first + lax.broadcasted_iota(jnp.int32, (count, 1) if axis == 0 else (1, count), axis)
    return jnp.minimum(index, length - 1) if length % count else index


def argument(program: Program, name: str) -> Node:
    """The node of an argument."""
    return next(node for node in program.arguments if node.value == name)

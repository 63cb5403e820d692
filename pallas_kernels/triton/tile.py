"""Evaluation of mods, and softmax weights, on a tile of a Triton kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.program.build import Program
from pallas_kernels.program.evaluate import Evaluation, OfMultiple, Space
from pallas_kernels.program.ir import Axes, Node
from pallas_kernels.program.rules import elementwise
from pallas_kernels.spec import LOG2_E, AttentionSpec
from pallas_kernels.triton.launch import Runner, runner_of
from pallas_kernels.types import Index, Ref


def weights(spec: AttentionSpec, s: jax.Array, log2_scale: float, row_max_log2: jax.Array) -> jax.Array:
    """``2 ** (log2_scale * s - row_max_log2)``."""
    return runner_of(spec).exp2_of_multiple(s, log2_scale, row_max_log2)


class TileSpace(Space):
    """Values as Triton holds them, as arrays of two axes or none.

    Shapes: uniform ``()``, row ``(Bq, 1)``, column ``(1, Bk)``, tile ``(Bq, Bk)``; or transposed.
    """

    def __init__(
        self, refs: Sequence[Ref], block_q: int, block_kv: int, *, transposed: bool, approximate: bool, runner: Runner
    ) -> None:
        self.refs, self.approximate = refs, approximate
        self.runner = runner
        shapes = {
            Axes.UNIFORM: (),
            Axes.ROW: (block_q, 1),
            Axes.COLUMN: (1, block_kv),
            Axes.TILE: (block_q, block_kv),
        }
        self.shapes = {kind: shape[::-1] if transposed else shape for kind, shape in shapes.items()}

    def literal(self, node: Node) -> jax.Array:
        """A constant of the kernel."""
        return jnp.full((), node.value.item(), node.dtype)

    def spread(self, x: jax.Array, kind: str, to: str) -> jax.Array:
        """Broadcasts along the axes that are new."""
        return x if kind == to else jnp.broadcast_to(x, self.shapes[to])

    def load(self, node: Node, indices: Sequence[jax.Array]) -> jax.Array:
        """Gathers elements; the program has made sure that the indices are in range."""
        ref = self.refs[node.value]
        x = self.runner.load(ref.at[tuple(indices)]) if indices else ref[...]
        return x != 0 if node.dtype == np.bool_ else x

    def multiply_add(self, a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
        """One FMA instruction."""
        return self.runner.multiply_add(a, b, c)

    def substitutes(self, kind: str) -> Mapping[str, Callable[..., jax.Array]]:
        """An exact remainder; the SFU's tanh (relative error 2 ** -11), where the inputs are no more exact."""
        exact: dict[str, Callable[..., jax.Array]] = {"rem": elementwise.remainder}
        has_tanh = self._has_sfu(kind) and not self.runner.is_interpreter
        return {**exact, "tanh": functools.partial(_approximate_tanh, self.runner)} if has_tanh else exact

    def substitutes_of_multiples(self, kind: str) -> Mapping[str, OfMultiple]:
        """The logistic by two SFU functions, under the same rule."""
        logistic = functools.partial(_logistic, self.runner)
        return {"logistic": OfMultiple(-LOG2_E, logistic)} if self._has_sfu(kind) else {}

    def _has_sfu(self, kind: str) -> bool:
        return self.approximate and kind != Axes.UNIFORM  # inline PTX takes no scalars


def _approximate_tanh(runner: Runner, x: jax.Array, **_: object) -> jax.Array:
    return runner.element("tanh", x) if x.dtype == jnp.float32 else jnp.tanh(x)


def _logistic(runner: Runner, exponent: jax.Array) -> jax.Array:
    """``1 / (1 + 2 ** exponent)``, with a relative error of 2 ** -21, for weights near 0 too; 0 below 2 ** -126.

    The rounding of the exponent adds 2 ** -24 for each unit of the argument, as a rounding of the score would. A tanh
    would take one SFU function, not two, but has an absolute error of 2 ** -12, and a weight of sigmoid attention may
    be 2 ** -14 for all keys.
    """
    if runner.is_interpreter:
        return 1.0 / (1.0 + jnp.exp2(exponent))
    return runner.element("logistic", exponent)


def evaluation(
    program: Program,
    refs: Sequence[Ref],
    tile: tuple[int, int],
    indices: Mapping[str, jax.Array],
    *,
    transposed: bool = False,
    approximate: bool = False,
    runner: Runner,
) -> Evaluation:
    """Starts to evaluate a program.

    Args:
      tile: Queries and keys of a tile, (Bq, Bk).
      indices: Those of ``b``, ``h``, ``q``, ``k`` that are loop-invariant.
      transposed: Whether tiles are held as (keys, queries).
      approximate: Whether approximate SFU functions may be used: the inputs have 16 bits.
    """
    space = TileSpace(refs, *tile, transposed=transposed, approximate=approximate, runner=runner)
    return Evaluation(space, {n: indices[n.value] for n in program.arguments if n.value in indices})


def q_indices(
    first: Index, tile: tuple[int, int], length: int, *, transposed: bool = False, may_end: bool
) -> jax.Array:
    """Query indices of a tile, row values; clamped to the last one, so that nothing is read out of range."""
    return _indices(first, tile[0], length, 0 if not transposed else 1, may_end)


def k_indices(
    first: Index, tile: tuple[int, int], length: int, *, transposed: bool = False, may_end: bool
) -> jax.Array:
    """Key indices of a tile, column values; clamped likewise."""
    return _indices(first, tile[1], length, 1 if not transposed else 0, may_end)


def _indices(first: Index, count: int, length: int, axis: int, may_end: bool) -> jax.Array:
    index = first + lax.broadcasted_iota(jnp.int32, (count, 1) if axis == 0 else (1, count), axis)
    return jnp.minimum(index, length - 1) if may_end else index

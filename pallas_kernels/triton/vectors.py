"""Key and value mods on the tiles that a Triton kernel loads."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.program.evaluate import Evaluation
from pallas_kernels.program.ir import Axes
from pallas_kernels.program.vectors.vectors import Chunk, VectorProgram
from pallas_kernels.spec import AttentionSpec
from pallas_kernels.triton.head_chunks import Columns
from pallas_kernels.triton.launch import Runner, runner_of
from pallas_kernels.triton.scores import TileSpace
from pallas_kernels.types import Ref

Load = Callable[[jax.Array], jax.Array]  # from lanes [keys, lanes] to what the tile of keys holds there


class PreparedVectors(NamedTuple):
    """A vector mod with its loop-invariant values."""

    program: VectorProgram
    evaluations: tuple[Evaluation, ...]  # for each of its lane programs

    def tile(self, key: jax.Array, load: Load) -> Columns:
        """Applies the mod to a tile of keys at positions int32 [keys, 1], in range; returns chunks of lanes."""
        columns: dict[Chunk, jax.Array] = {}
        for program, prologue in zip(self.program.lane_programs, self.evaluations, strict=True):
            evaluation = prologue.child({program.argument("q"): key})
            pairs: tuple[jax.Array, ...] = ()
            for node in program.vector_loads:
                lane, parity = node.inputs[1], program.place_in_pair(node)
                if parity is None:
                    evaluation.values[node] = load(evaluation.space.spread(evaluation(lane), lane.kind, node.kind))
                else:
                    pairs = pairs or _even_and_odd(load, key.shape[0], program.width)
                    evaluation.values[node] = pairs[parity]
            columns.update((chunk, evaluation.tile(output)) for chunk, output in program.outputs)
        return tuple(columns[chunk] for chunk in self.program.chunks)


def _even_and_odd(load: Load, keys: int, width: int) -> tuple[jax.Array, ...]:
    """Even and odd lanes by one load, whose rows are contiguous."""
    whole = load(lax.broadcasted_iota(jnp.int32, (keys, 2 * width), 1))
    return tuple(jnp.unstack(whole.reshape(keys, width, 2), axis=2))


def prepare(
    spec: AttentionSpec, program: VectorProgram, refs: Sequence[Ref], block_kv: int, b: jax.Array, h: jax.Array
) -> PreparedVectors:
    """Prologue: evaluates what depends on the lane alone."""
    evaluations = []
    for of_width in program.lane_programs:
        tile, approximate = (block_kv, of_width.width), spec.dtype != "float32"
        space = _VectorSpace(refs, *tile, transposed=False, approximate=approximate, runner=runner_of(spec))
        lane = lax.broadcasted_iota(jnp.int32, (1, of_width.width), 1)
        values = {of_width.argument(name): x for name, x in (("b", b), ("h", h), ("k", lane))}
        evaluation = Evaluation(space, values)
        evaluation.prepare(of_width.nodes, (Axes.UNIFORM, Axes.COLUMN))
        evaluations.append(evaluation)
    return PreparedVectors(program, tuple(evaluations))


class _VectorSpace(TileSpace):
    """Tiles of keys and lanes."""

    def substitutes(self, kind: str) -> Mapping[str, Callable[..., jax.Array]]:
        """The SFU's sine and cosine too, for vectors of 16 bits."""
        if not self._has_sfu(kind) or self.runner.is_interpreter:
            return super().substitutes(kind)
        angles = {name: functools.partial(_of_angle, self.runner, name) for name in ("sin", "cos")}
        return {**super().substitutes(kind), **angles}


_TWO_PI = 2 * np.pi
_TWO_PI_HIGH = np.float32(_TWO_PI)
_TWO_PI_LOW = np.float32(_TWO_PI - float(_TWO_PI_HIGH))
_ROUND = np.float32(1.5 * 2**23)  # a number of magnitude up to 2 ** 22 loses its fraction, if this is added


def _of_angle(runner: Runner, name: str, x: jax.Array, **_: object) -> jax.Array:
    """Sine or cosine, with an absolute error of 2 ** -20.5 up to 2 ** 22 turns (PTX ISA, section on `sin.approx`).

    Of the angle between -pi and pi, by Cody and Waite's reduction: its FMAs round relative to the small result.
    """
    fma = lambda a, factor, c: runner.multiply_add(a, jnp.full_like(x, factor), c)
    turns = fma(x, np.float32(1 / _TWO_PI), jnp.full_like(x, _ROUND)) - _ROUND
    return runner.element(name, fma(turns, -_TWO_PI_LOW, fma(turns, -_TWO_PI_HIGH, x)))

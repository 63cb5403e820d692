"""Tile programs of mods on a CPU: tracing, and values as dense arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.program.build import IndexRanges, trace_program
from pallas_kernels.program.evaluate import ArraySpace

INDEX = jax.ShapeDtypeStruct((), jnp.int32)


def program_of(mod: Any, operands: Sequence[Any], sizes: IndexRanges, *, role: str = "score") -> Any:
    """The program of ``(score, b, h, q_idx, kv_idx, *operands)``, or of a mask; operands have a shape and a dtype."""
    scalars = [INDEX] * 4 if role == "mask" else [jax.ShapeDtypeStruct((), jnp.float32), *[INDEX] * 4]
    jaxpr = jax.make_jaxpr(mod)(*scalars, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands))
    return trace_program(jaxpr, [(x.shape, str(jnp.dtype(x.dtype))) for x in operands], sizes)


class DenseSpace(ArraySpace):
    """Values as arrays.

    Args:
      shapes: Of the values of each kind: of nothing, rows, columns, tiles; those of nothing are scalars.
      operands: The captured arrays.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], operands: Sequence[Any] = ()):
        super().__init__(operands, shapes)

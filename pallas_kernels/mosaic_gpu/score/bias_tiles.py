"""Bias tiles: captured arrays that are indexed by query and key (a pair bias), loaded by TMA into shared memory.

With plain global loads each thread touches 16 bytes of a row at a time. H200, jax 0.11.2, bf16, B 4, S 4096, 16 heads,
a bias of 16 bits for each head, D 64, us with plain loads and with TMA: forward 1480 and 704, backward 2784 and 2012.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.config import Tiles
from pallas_kernels.mosaic_gpu import smem
from pallas_kernels.mosaic_gpu.score.tile import evaluation
from pallas_kernels.mosaic_gpu.smem import Ring
from pallas_kernels.program.build import Program
from pallas_kernels.program.evaluate import Evaluation
from pallas_kernels.program.ir import Node
from pallas_kernels.spec import AttentionSpec
from pallas_kernels.types import Index, Ref, S

MAX_HEAD_SIZE = 192  # up to which shared memory may hold bias tiles too
MAX_BYTES_PER_SCORE = 4  # of bias tiles in shared memory
_SWIZZLE = 128  # bytes: the TMA swizzle of bias tiles


class BiasLoad(NamedTuple):
    """A load whose last two indices are the query and the key, and whose leading indices are uniform over a tile."""

    load: Node
    shape: tuple[int, int, int]  # of the array, with its leading axes flattened into one: [leading, queries, keys]

    @classmethod
    def from_load(cls, load: Node, shape: tuple[int, ...]) -> BiasLoad:
        """From the shape of the array, [..., queries, keys]."""
        return cls(load, (math.prod(shape[:-2]), shape[-2], shape[-1]))

    def source(self, operands: Sequence[jax.Array]) -> jax.Array:
        """The array as [leading, queries, keys], for TMA."""
        return operands[self.load.value].reshape(self.shape)

    def leading(self, prepared: Evaluation, sizes: tuple[int, ...]) -> jax.Array:
        """The index along the flattened leading axis, from the uniform values of the mod and the sizes of the axes."""
        offset = jnp.int32(0)
        for index, size in zip(self.load.inputs[:-2], sizes[:-2], strict=True):
            offset = offset * jnp.int32(size) + prepared(index)
        return offset


def reads_by_query_and_key(program: Program, load: Node) -> bool:
    """True if the last two indices of a load are the query and the key, and the others are uniform over a tile."""
    q_and_k = (program.argument("q"), program.argument("k"))
    return load.inputs[-2:] == q_and_k and not any(index.kind for index in load.inputs[:-2])


def bias_loads(spec: AttentionSpec, *, transposed: bool = False) -> tuple[BiasLoad, ...]:
    """The loads of the score mod that TMA can do, as many as fit into `MAX_BYTES_PER_SCORE`.

    Transposed score tiles, (keys, queries), read bias tiles transposed, which Mosaic GPU supports for 16 bits only.
    """
    if spec.programs.score is None or not spec.score_shapes or max(spec.D, spec.Dv) > MAX_HEAD_SIZE:
        return ()
    chosen, room = [], MAX_BYTES_PER_SCORE
    for load in spec.programs.score.loads:
        shape, size = spec.score_shapes[load.value], load.dtype.itemsize
        fits = size == 2 or (size == 4 and not transposed)
        is_bias = reads_by_query_and_key(spec.programs.score, load)
        if is_bias and fits and size <= room and _is_tiled(shape, size):
            chosen.append(BiasLoad.from_load(load, shape))
            room -= size
    return tuple(chosen)


def _is_tiled(shape: tuple[int, ...], itemsize: int) -> bool:
    """True if an array consists of whole tiles of 8 rows by one swizzle, as Mosaic GPU requires for such TMA copies."""
    return shape[-2] % 8 == 0 and shape[-1] * itemsize % _SWIZZLE == 0


def declare(spec: AttentionSpec, tiles: Tiles, stages: int, *, transposed: bool = False) -> tuple[Ref, ...]:
    """Shared memory for the bias tiles, [stages, queries, keys] each."""
    shape = (stages, tiles.block_q, tiles.block_kv)
    return tuple(smem.tiled(shape, bias.load.dtype) for bias in bias_loads(spec, transposed=transposed))


def with_bias_ring(
    make: Callable[[Ring | None], S], spec: AttentionSpec, tiles: Tiles, *, transposed: bool = False
) -> S:
    """The scratch of a kernel: ``make(ring)`` with a bias ring of as many stages as fit, else ``make(None)``."""
    for stages in range(tiles.num_stages, 0, -1):
        declared = declare(spec, tiles, stages, transposed=transposed)
        if not declared:
            break
        chosen = make(Ring.from_tiles(declared, tiles.num_warps // 4))
        if smem.bytes_of(jax.tree.leaves(chosen)) <= smem.LIMIT:
            return chosen
    return make(None)


class BiasTiles(NamedTuple):
    """The sources of the bias tiles of a kernel, in global memory."""

    spec: AttentionSpec
    tiles: Tiles
    operands: Sequence[Ref]  # captured arrays of the score mod, each flattened to one dimension
    loads: Sequence[BiasLoad]  # the loads that TMA does
    refs: Sequence[Ref]  # their arrays, [leading, queries, keys] each

    def sources_of_head(self, b: jax.Array, h: jax.Array) -> Callable[[Index, Index], list[Ref]]:
        """Returns ``(q_first, k_first) -> TMA sources``; TMA fills with zeros past the end."""
        if not self.loads:
            return lambda q_first, k_first: []
        assert self.spec.programs.score is not None  # whose loads they are
        tile, indices = (self.tiles.block_q, self.tiles.block_kv), {"b": b, "h": h}
        mod, sizes = self.spec.programs.score, self.spec.score_shapes
        prepared = evaluation(mod, self.operands, sizes, tile, indices, transposed=False, may_end=False)
        leading = [bias.leading(prepared, sizes[bias.load.value]) for bias in self.loads]
        return lambda q_first, k_first: [
            ref.at[offset, pl.ds(q_first, tile[0]), pl.ds(k_first, tile[1])]
            for ref, offset in zip(self.refs, leading, strict=True)
        ]

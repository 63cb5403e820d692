"""Elements of captured arrays that are read at the query and the key (a pair bias), brought by the copy engine.

Threads that read such elements by themselves touch 16 bytes of a row at a time. H200, jax 0.11.2, bf16, B 4, S 4096,
16 heads, a bias of 16 bits for each head, no mask, us so and by the copy engine: forward 1480 and 704 at head size 64,
1708 and 1167 at 128; backward 2784 and 2012, 3860 and 2553.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.config import Tiles
from pallas_kernels.mosaic_gpu import smem as memory
from pallas_kernels.mosaic_gpu.pipeline import Ring
from pallas_kernels.mosaic_gpu.tile import evaluation
from pallas_kernels.program.evaluate import Evaluation
from pallas_kernels.program.ir import Node
from pallas_kernels.spec import AttentionSpec

WIDEST = 192  # head size up to which shared memory may hold tiles of them too
MOST = 4  # bytes of them for each score
_SWIZZLE = 128  # bytes: that of their tiles


class Plane(NamedTuple):
    """A load whose last two indices are the query and the key, and whose others are the same for all of a tile.

    Attributes:
      load: The load.
      shape: Of the array, its leading axes taken as one.
    """

    load: Node
    shape: tuple[int, int, int]

    def of(self, operands: Sequence[jax.Array]) -> jax.Array:
        """The array, with three axes."""
        return operands[self.load.value].reshape(self.shape)

    def leading(self, known: Evaluation, sizes: tuple[int, ...]) -> Any:
        """The index along the first of these axes, by what is known of the mod, and the sizes of the array's own."""
        at = jnp.int32(0)
        for index, size in zip(self.load.inputs[:-2], sizes[:-2], strict=True):
            at = at * jnp.int32(size) + known(index)
        return at


def planes_of(spec: AttentionSpec, *, transposed: bool = False) -> tuple[Plane, ...]:
    """The loads of the score mod that the copy engine can bring, as many as there is room for.

    Tiles of (keys, queries) read them transposed, which Mosaic GPU does with 16 bits alone.
    """
    if spec.programs.score is None or not spec.score_shapes or max(spec.D, spec.Dv) > WIDEST:
        return ()
    here, found, room = (spec.programs.score.argument("q"), spec.programs.score.argument("k")), [], MOST
    for load in spec.programs.score.loads:
        shape, size = spec.score_shapes[load.value], load.dtype.itemsize
        is_plane = load.inputs[-2:] == here and not any(index.kind for index in load.inputs[:-2])
        fits = size == 2 or (size == 4 and not transposed)
        if is_plane and fits and size <= room and _is_tiled(shape, size):
            found.append(Plane(load, (math.prod(shape[:-2]), *shape[-2:])))
            room -= size
    return tuple(found)


def _is_tiled(shape: tuple[int, ...], itemsize: int) -> bool:
    """Whether an array consists of whole tiles of 8 rows and a swizzle, as Mosaic GPU wants it for such copies."""
    return shape[-2] % 8 == 0 and shape[-1] * itemsize % _SWIZZLE == 0


def declare(spec: AttentionSpec, tiles: Tiles, stages: int, *, transposed: bool = False) -> tuple[Any, ...]:
    """Shared memory for tiles of them, [stages, queries, keys]."""
    shape = (stages, tiles.block_q, tiles.block_kv)
    return tuple(memory.tiled(shape, plane.load.dtype) for plane in planes_of(spec, transposed=transposed))


def beside(make: Callable[[Ring | None], Any], spec: AttentionSpec, tiles: Tiles, *, transposed: bool = False) -> Any:
    """What a kernel declares with a ring of them that has as many stages as fit, or with None."""
    for stages in range(tiles.num_stages, 0, -1):
        declared = declare(spec, tiles, stages, transposed=transposed)
        if not declared:
            break
        found = make(Ring.of(declared, tiles.num_warps // 4))
        if memory.bytes_of(jax.tree.leaves(found)) <= memory.LIMIT:
            return found
    return make(None)


class Brought(NamedTuple):
    """The arrays in global memory, for a kernel.

    Attributes:
      spec: The spec.
      tiles: Of the kernel.
      operands: What the score mod captures, each as one dimension.
      planes: Which loads.
      refs: Their arrays.
    """

    spec: AttentionSpec
    tiles: Tiles
    operands: Sequence[Any]
    planes: Sequence[Plane]
    refs: Sequence[Any]

    def of_head(self, b: Any, h: Any) -> Callable[[Any, Any], list[Any]]:
        """Their tiles by first query and first key; what lies past the end comes as zeros."""
        if not self.planes:
            return lambda q_first, k_first: []
        assert self.spec.programs.score is not None  # whose loads they are
        tile, indices = (self.tiles.block_q, self.tiles.block_kv), {"b": b, "h": h}
        mod, sizes = self.spec.programs.score, self.spec.score_shapes
        known = evaluation(mod, self.operands, sizes, tile, indices, transposed=False, may_end=False)
        leading = [plane.leading(known, sizes[plane.load.value]) for plane in self.planes]
        return lambda q_first, k_first: [
            ref.at[at, pl.ds(q_first, tile[0]), pl.ds(k_first, tile[1])]
            for ref, at in zip(self.refs, leading, strict=True)
        ]

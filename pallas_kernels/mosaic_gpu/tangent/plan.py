"""Plan of the tangent kernel for Hopper."""

from __future__ import annotations

import functools
import itertools

import jax

from pallas_kernels.config import Tiles
from pallas_kernels.mosaic_gpu import smem
from pallas_kernels.mosaic_gpu.plan.limits import limit_of_arrays
from pallas_kernels.mosaic_gpu.score.tile import is_heavy, limit_of_mods, tile_values, unsupported_primitive
from pallas_kernels.mosaic_gpu.tangent import kernel
from pallas_kernels.mosaic_gpu.tangent.step import slots
from pallas_kernels.plan import GradientRequest, Refusal, TangentPlan, TileChoice, tangent_of, with_programs
from pallas_kernels.program.tangents import Tangent
from pallas_kernels.spec import AttentionSpec

MAX_STAGES = 5  # slots in the ring of keys
MAX_VALUES = 96  # tile values of a mod and its tangent
# Up to which registers hold tiles of 128 keys: with 68 values (a gelu and a softplus) these spill 1116 bytes.
MAX_VALUES_WIDE, MAX_HEAD_SIZE_WIDE = 32, 128


@functools.lru_cache(maxsize=256)
def plan(spec: AttentionSpec, requested: GradientRequest) -> TangentPlan | Refusal:
    """Plans the tangent of a dense call without lengths; the machine is one that has the kernel."""
    reason = limit_of_arrays(spec)
    traced = with_programs(spec) if reason is None else Refusal(reason)
    if isinstance(traced, Refusal):
        return traced
    tangent, limit = tangent_of(traced, requested), limit_of_mods(traced)
    if limit is not None:
        return limit
    if isinstance(tangent, Refusal):
        return tangent
    if tangent is not None and (missing := unsupported_primitive(tangent.nodes)) is not None:
        return Refusal(f"its kernel has no tangent of the score mod: {missing}", "score")
    if tangent is not None and tile_values(tangent.nodes) > MAX_VALUES:
        return Refusal("the tangent of the score mod computes more on each element than registers hold", "score")
    return TangentPlan(traced, requested, tangent, TileChoice(_tiles(traced, requested, tangent), "rule"))


def _tiles(spec: AttentionSpec, requested: GradientRequest, tangent: Tangent | None) -> Tiles:
    """Two consumer warp groups of 64 queries, and the widest tiles of keys and most slots that fit."""
    blocks = spec.block_size or (128, 128)
    pairs = blocks[0] % 128 == 0 and spec.T > 64
    many = tangent is not None and tile_values(tangent.nodes) > MAX_VALUES_WIDE
    heavy = many or is_heavy(spec.programs.mask) or spec.dropout is not None
    wide = max(spec.D, spec.Dv) <= MAX_HEAD_SIZE_WIDE and blocks[1] % 128 == 0 and not heavy
    counts = range(MAX_STAGES, slots(requested)[0] - 1, -1)
    sizes = itertools.product((2, 1) if pairs else (1,), (128, 64) if wide else (64,), counts)
    choices = (Tiles(64 * groups, block_kv, 4 * groups, stages) for groups, block_kv, stages in sizes)
    size = lambda tiles: smem.bytes_of(jax.tree.leaves(kernel.declare(spec, tiles, requested)))
    return next(tiles for tiles in choices if size(tiles) <= smem.LIMIT)  # with one group, 64 keys fit up to 256

"""Whether the decoding kernel for Hopper runs a call, dense or over pages, and how it packs queries into tiles."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from pallas_kernels.mosaic_gpu import smem
from pallas_kernels.mosaic_gpu.decode import kernel
from pallas_kernels.mosaic_gpu.decode.sizes import Packing, stages_of
from pallas_kernels.mosaic_gpu.plan.limits import MAX_HEAD_SIZE, limit_of_captured
from pallas_kernels.mosaic_gpu.plan.support import limit_of_mods
from pallas_kernels.mosaic_gpu.work_items import TILE_KEYS, TILED_ROWS, limit_of_pages
from pallas_kernels.plan import Refusal, with_programs
from pallas_kernels.spec import AttentionSpec

_STEP = 16  # columns of a head: K of a wgmma


@dataclasses.dataclass(frozen=True)
class DecodePlan:
    """How a call runs.

    Attributes:
      spec: The call, with its tile programs.
      packing: How queries are packed into tiles.
    """

    spec: AttentionSpec
    packing: Packing

    @property
    def rows(self) -> int:
        """Rows of a partial result."""
        return self.packing.rows

    @property
    def queries(self) -> int:
        """Queries of a tile."""
        return self.packing.queries

    def describe(self) -> str:
        """Kernel and tiles, for `jflex.explain`."""
        name = "decode" if self.spec.paging is None else "paged"
        tile = f"{smem.WARP_GROUP_ROWS} x {TILE_KEYS}"
        return f"{name} {tile} (8 warps that compute, {stages_of(self.spec)} stages, {self.packing.group} heads)"


@functools.lru_cache(maxsize=256)
def plan(spec: AttentionSpec) -> DecodePlan | Refusal:
    """Plans a paged or a dense call on a machine that `limits.limit_of_machine` does not refuse."""
    reason = _limit(spec) or limit_of_captured(spec)
    if reason is not None:
        return Refusal(reason)
    made = with_programs(spec.replace(heads_in_rows=True))
    if isinstance(made, Refusal):
        return made
    missing = limit_of_mods(made)
    if missing is not None:
        return missing
    needed = smem.bytes_of(jax.tree.leaves(kernel.declare(made, jnp.dtype(spec.dtype))))
    if needed > smem.LIMIT:
        return Refusal(f"its tiles need {needed} bytes of shared memory, and a CTA has {smem.LIMIT}")
    return DecodePlan(made, Packing.of(made))


def _limit(spec: AttentionSpec) -> str | None:
    if spec.dtype not in ("bfloat16", "float16"):
        return f"its kernels compute in bfloat16 or float16, not {spec.dtype}"
    if spec.paging is not None and spec.paging.dtype is not None:
        return f"its kernel for pages takes no eight bits, and these have {spec.paging.dtype}"
    if spec.qk_dtype is not None:
        return f"its kernel for few queries takes no eight bits, and query and key are {spec.qk_dtype}"
    if spec.key_mod is not None or spec.value_mod is not None:
        return "its kernel for pages loads keys and values by TMA, and so applies no `key_mod` or `value_mod`"
    if max(spec.D, spec.Dv) > MAX_HEAD_SIZE or spec.D % _STEP or spec.Dv % _STEP:
        return (
            f"its kernel for few queries takes head sizes that are a multiple of {_STEP} up to {MAX_HEAD_SIZE}, not "
            f"{spec.D} and {spec.Dv}"
        )
    if spec.group > smem.WARP_GROUP_ROWS:
        return f"its tiles hold {smem.WARP_GROUP_ROWS} query heads of a key head, not {spec.group}"
    if spec.dropout is not None or spec.normalize != "softmax" or spec.stats:
        return "its kernel for few queries has neither dropout, statistics of rows nor weights without a softmax"
    if spec.config.batch_invariant:
        return "its kernel for few queries divides keys by the number of SMs, and so is not batch invariant"
    if spec.config.decode is not None or spec.config.forward is not None:
        return f"`config` sets tiles, and its kernel for few queries has one: 64 rows by {TILE_KEYS} keys"
    return limit_of_pages(spec) if spec.paging is not None else _limit_of_dense(spec)


def _limit_of_dense(spec: AttentionSpec) -> str | None:
    if spec.blocks is not None:
        return "its kernel for few queries takes no lists of blocks (a `mask_mod` alone bounds the keys it visits)"
    if spec.S % TILED_ROWS:
        return f"TMA loads {TILED_ROWS} keys at once, and S is {spec.S}"
    return None

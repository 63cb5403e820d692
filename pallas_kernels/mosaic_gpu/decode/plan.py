"""The plan of the decoding kernel for Hopper, dense or over pages: limits, and the packing of queries into tiles."""

from __future__ import annotations

import functools

import jax.numpy as jnp

from pallas_kernels.mosaic_gpu import smem
from pallas_kernels.mosaic_gpu.decode import kernel
from pallas_kernels.mosaic_gpu.decode.sizes import Packing, stages_of
from pallas_kernels.mosaic_gpu.plan.limits import MAX_HEAD_SIZE, limit_of_captured
from pallas_kernels.mosaic_gpu.split_kv import SplitKvPlan, limit_of_kernel
from pallas_kernels.mosaic_gpu.work_items import TILE_KEYS, TILED_ROWS, limit_of_pages
from pallas_kernels.plan import Refusal, with_programs
from pallas_kernels.spec import AttentionSpec

_STEP = 16  # columns of a head: K of a wgmma


@functools.lru_cache(maxsize=256)
def plan(spec: AttentionSpec) -> SplitKvPlan | Refusal:
    """Plans a paged or a dense call on a machine that `limits.limit_of_machine` does not refuse."""
    reason = limit_of_call(spec) or (limit_of_pages(spec) if spec.paging is not None else _limit_of_dense(spec))
    if reason is None and spec.group > smem.WARP_GROUP_ROWS:
        reason = f"its tiles hold {smem.WARP_GROUP_ROWS} query heads of a key head, not {spec.group}"
    traced = with_programs(spec.replace(heads_in_rows=True)) if reason is None else Refusal(reason)
    if isinstance(traced, Refusal):
        return traced
    refusal = limit_of_kernel(traced, lambda: kernel.declare(traced, jnp.dtype(spec.dtype)))
    if refusal is not None:
        return refusal
    name, packing = "decode" if spec.paging is None else "paged", Packing.from_spec(traced)
    sizes = f"8 warps that compute, {stages_of(traced)} stages, {packing.group} heads"
    description = f"{name} {smem.WARP_GROUP_ROWS} x {TILE_KEYS} ({sizes})"
    return SplitKvPlan(traced, packing, description, kernel.attend)


def limit_of_call(spec: AttentionSpec) -> str | None:
    """The limit of a kernel for few queries, or for prompts over pages, whatever the mods."""
    if spec.dtype not in ("bfloat16", "float16"):
        return f"its kernels compute in bfloat16 or float16, not {spec.dtype}"
    if spec.paging is not None and spec.paging.dtype is not None:
        return f"its kernels for pages take no eight bits, and these have {spec.paging.dtype}"
    if spec.qk_dtype is not None:
        return f"its kernel for few queries takes no eight bits, and query and key are {spec.qk_dtype}"
    if spec.key_mod is not None or spec.value_mod is not None:
        return "its kernels for pages load keys and values by TMA, and so apply no `key_mod` or `value_mod`"
    if max(spec.D, spec.Dv) > MAX_HEAD_SIZE or spec.D % _STEP or spec.Dv % _STEP:
        return (
            f"its kernels for few queries and pages take head sizes that are a multiple of {_STEP} up to "
            f"{MAX_HEAD_SIZE}, not {spec.D} and {spec.Dv}"
        )
    if spec.dropout is not None or spec.normalize != "softmax" or spec.stats:
        missing = "neither dropout, statistics of rows nor weights without a softmax"
        return f"its kernels for few queries and pages have {missing}"
    if spec.config.batch_invariant:
        return "its kernels for few queries and pages divide keys by the number of SMs, and so are not batch invariant"
    if spec.config.decode is not None or spec.config.forward is not None:
        tiles = f"64 rows by {TILE_KEYS} keys, or 128 by 128 or 64 for prompts"
        return f"`config` sets tiles, and its kernels for few queries and pages have their own: {tiles}"
    return limit_of_captured(spec)


def _limit_of_dense(spec: AttentionSpec) -> str | None:
    if spec.blocks is not None:
        return "its kernel for few queries takes no lists of blocks (a `mask_mod` alone bounds the keys it visits)"
    if spec.S % TILED_ROWS:
        return f"TMA loads {TILED_ROWS} keys at once, and S is {spec.S}"
    return None

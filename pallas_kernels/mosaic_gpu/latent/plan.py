"""The plan of the latent kernel for Hopper: limits, and groups of heads."""

from __future__ import annotations

import functools

import jax.numpy as jnp

from pallas_kernels.mosaic_gpu import smem
from pallas_kernels.mosaic_gpu.latent import kernel
from pallas_kernels.mosaic_gpu.latent.sizes import Heads
from pallas_kernels.mosaic_gpu.plan.limits import limit_of_captured
from pallas_kernels.mosaic_gpu.split_kv import SplitKvPlan, limit_of_kernel
from pallas_kernels.mosaic_gpu.work_items import TILE_KEYS, limit_of_pages
from pallas_kernels.plan import Refusal, with_programs
from pallas_kernels.spec import AttentionSpec

MAX_HALF = 256  # columns of the output that a consumer warp group holds: half of its registers
_STEP = 16  # columns of a half, and rotated columns: K of a wgmma


@functools.lru_cache(maxsize=256)
def plan(spec: AttentionSpec) -> SplitKvPlan | Refusal:
    """Plans a paged call on a machine that `limits.limit_of_machine` does not refuse."""
    reason = _limit(spec) or limit_of_captured(spec)
    if reason is not None:
        return Refusal(reason)
    heads = Heads.from_count(spec.Hq)
    traced = with_programs(spec.replace(heads_in_rows=True, Hkv=heads.groups))
    if isinstance(traced, Refusal):
        return traced
    refusal = limit_of_kernel(traced, lambda: kernel.declare(traced, heads, jnp.dtype(spec.dtype)))
    if refusal is not None:
        return refusal
    sizes = f"8 warps that compute, 2 stages, {heads.count} heads"
    return SplitKvPlan(traced, heads, f"latent {smem.WARP_GROUP_ROWS} x {TILE_KEYS} ({sizes})", kernel.attend)


def _limit(spec: AttentionSpec) -> str | None:
    assert spec.paging is not None  # the call is paged
    half, rope = spec.Dv // 2, spec.D - spec.Dv
    if spec.dtype not in ("bfloat16", "float16"):
        return f"its kernels compute in bfloat16 or float16, not {spec.dtype}"
    if half > MAX_HALF or spec.Dv % (2 * _STEP) or rope % _STEP:
        return (
            f"its kernel takes latent sizes that are a multiple of {2 * _STEP} up to {2 * MAX_HALF} and rotated keys "
            f"of a multiple of {_STEP} columns, not {spec.Dv} and {rope}"
        )
    if spec.dropout is not None or spec.normalize != "softmax" or spec.stats:
        return "its kernel for pages has neither dropout, statistics of rows nor weights without a softmax"
    if spec.config.decode is not None or spec.config.forward is not None:
        return "`config` sets tiles, and its kernel for pages has one: 64 rows by 64 keys"
    return limit_of_pages(spec)

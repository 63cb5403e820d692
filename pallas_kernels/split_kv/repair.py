"""Repair of Hopper kernels: Triton kernels recompute the rows that they marked (`pallas_kernels.softmax`)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax

from pallas_kernels.config import Tiles
from pallas_kernels.gradients import KernelStatics, Repairs, row_statistics
from pallas_kernels.plan import Refusal
from pallas_kernels.program.build import Derivative
from pallas_kernels.spec import AttentionSpec, Operands
from pallas_kernels.split_kv import decode as decode_kernel
from pallas_kernels.split_kv import paged as paged_kernel
from pallas_kernels.split_kv import plan as paged_plan
from pallas_kernels.split_kv.work import UNLIMITED, PagedOperands
from pallas_kernels.triton.backward import dkv, dq
from pallas_kernels.triton.containment import MAX_TILE
from pallas_kernels.triton.plan import plan as triton_plan
from pallas_kernels.triton.plan.limits import limit_of_compiler

TILES = Tiles(MAX_TILE, MAX_TILE, 4, 1)  # they divide the blocks that the Hopper kernels take


def limit_of_split_kv(spec: AttentionSpec, *, needs_marks: bool) -> Refusal | None:
    """Why Triton cannot do its part of a Hopper kernel with split-KV: to merge, and to repair what has marks."""
    missing = limit_of_compiler(spec, spec.device.compiler)
    if missing is None and needs_marks:
        plan = triton_plan.plan(spec, None) if spec.paging is None else paged_plan.plan(spec)
        missing = plan.sentence(spec) if isinstance(plan, Refusal) else None
    if missing is None:
        return None
    return Refusal(f"the kernels of Triton merge its partial results and repair them, and {missing}")


def backward(
    spec: AttentionSpec,
    arrays: Operands,
    derivative: Derivative | None,
    saved: tuple[jax.Array, jax.Array],
    d_saved: tuple[jax.Array, jax.Array | None],
) -> Repairs:
    """Repairs of gradients, from output and lse of the forward pass and their cotangents."""
    statics, rows = KernelStatics(spec, TILES, derivative), row_statistics(spec, saved, d_saved)
    partial = functools.partial
    return Repairs(partial(dq.repair, statics, arrays, rows), partial(dkv.repair, statics, arrays, rows))


def decode(
    spec: AttentionSpec, arrays: Operands, lengths: jax.Array | None, result: Sequence[jax.Array]
) -> Sequence[jax.Array]:
    """Out and lse of few queries, recomputed where the lse is NaN; the spec is without a plan."""
    plan = triton_plan.plan(spec, None)
    assert not isinstance(plan, Refusal), plan  # `limit_of_split_kv` was asked
    return decode_kernel.repair(plan.spec, plan.forward.tiles, arrays, lengths, result)


def paged(spec: AttentionSpec, arrays: PagedOperands[jax.Array], result: list[jax.Array]) -> list[jax.Array]:
    """Out and lse of a paged call, recomputed where the lse is NaN; the spec is without a plan."""
    plan = paged_plan.plan(spec)
    assert not isinstance(plan, Refusal), plan  # `limit_of_split_kv` was asked
    # All requests in one launch: marks are rare, and each launch that finds none takes 2 us.
    work = dataclasses.replace(plan.launches[0], max_queries=UNLIMITED)
    return paged_kernel.repair(plan.spec, (work,), arrays, result)

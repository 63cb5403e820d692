"""Adapter of the Hopper kernels with split-KV: pages of latent vectors, pages of keys and values, few dense queries.

The Triton kernels plan their work items where lengths are known on the device alone, merge their partial results, and
recompute what masked NaN reached.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax
import numpy as np

from jflex.backends.base import Inputs, PagedInputs, Plan, Saved
from jflex.backends.gpu import triton
from jflex.backends.gpu.official_triton import triton_here
from jflex.backends.gpu.operands import operands_of
from jflex.backends.results import fold_sinks
from pallas_kernels.plan import Refusal
from pallas_kernels.spec import AttentionSpec

if TYPE_CHECKING:
    from pallas_kernels.mosaic_gpu.decode.plan import DecodePlan
    from pallas_kernels.mosaic_gpu.latent.plan import LatentPlan
    from pallas_kernels.triton.paged.work import PagedOperands, Work

# --- plans


@functools.lru_cache(maxsize=256)
def plan_paged(spec: AttentionSpec) -> Plan | Refusal:
    """The plan of a paged call."""
    from pallas_kernels.mosaic_gpu.decode import plan as decode_plan
    from pallas_kernels.mosaic_gpu.latent import plan as latent_plan

    own = (latent_plan if spec.values_in_keys else decode_plan).plan(spec)
    if isinstance(own, Refusal):
        return own
    refusal, work = _limit_of_triton(spec, own.spec), _work(own)
    count = functools.partial(triton.count_splits_for_hopper, own.spec, work)
    return refusal or Plan(own.describe, (own, work), count_splits=count)


@functools.lru_cache(maxsize=256)
def plan_decode(spec: AttentionSpec) -> Plan | Refusal:
    """The plan of a dense call with few queries."""
    from pallas_kernels.mosaic_gpu.decode.plan import plan

    own = plan(spec)
    if isinstance(own, Refusal):
        return own
    return _limit_of_triton(spec, own.spec) or Plan(own.describe, (own, _work(own)))


def _limit_of_triton(spec: AttentionSpec, own: AttentionSpec) -> Refusal | None:
    """Why the kernels of Triton cannot do their part of a call."""
    others = triton_here(spec)
    missing = others.limit_of_compiler(spec)
    if missing is None and own.needs_marks:
        repairs = others.plan(spec, None)
        missing = repairs.sentence(spec) if isinstance(repairs, Refusal) else None
    if missing is None:
        return None
    return Refusal(f"the kernels of Triton merge its partial results and repair them, and {missing}")


def _work(own: LatentPlan | DecodePlan) -> Work:
    from pallas_kernels.mosaic_gpu.work_items import TILE_KEYS

    return triton.work_for_hopper(own.rows, TILE_KEYS, own.queries)


# --- pages


def attend_paged(spec: AttentionSpec, inputs: PagedInputs) -> Saved:
    """Runs the kernel of a paged call that `plan_paged` supports."""
    plan = plan_paged(spec)
    assert isinstance(plan, Plan), plan
    own, work = plan.kernels
    arrays = triton.paged_operands(inputs)
    extents = arrays.indptr, arrays.lengths
    items, sizes = triton.items_for_hopper(own.spec, work, extents, arrays.captured.mask)
    run = _attend_latent if spec.values_in_keys else _attend_pages
    result = triton.merge_for_hopper(own.spec, work, extents, run(own, arrays, items, sizes))
    return Saved(*(triton.repair_paged(spec, arrays, result) if own.spec.needs_marks else result))


def _attend_latent(
    own: LatentPlan, arrays: PagedOperands[jax.Array], items: jax.Array, sizes: tuple[int, int]
) -> list[jax.Array]:
    from pallas_kernels.mosaic_gpu import split_kv
    from pallas_kernels.mosaic_gpu.latent import kernel

    rows = arrays.key.reshape(*arrays.key.shape[:2], -1)
    operands = kernel.LatentOperands(arrays.query, rows, arrays.table, arrays.first_page, items, arrays.captured)
    return kernel.attend(own.spec, own.heads, split_kv.Sizes(*sizes), operands)


def _attend_pages(
    own: DecodePlan, arrays: PagedOperands[jax.Array], items: jax.Array, sizes: tuple[int, int]
) -> list[jax.Array]:
    from pallas_kernels.mosaic_gpu import split_kv
    from pallas_kernels.mosaic_gpu.decode import kernel

    pages = arrays.table, arrays.first_page
    operands = kernel.DecodeOperands(arrays.query, arrays.key, arrays.value, *pages, items, arrays.captured)
    return kernel.attend(own.spec, own.packing, split_kv.Sizes(*sizes), operands)


# --- few queries against contiguous keys


def decode(spec: AttentionSpec, inputs: Inputs) -> Saved:
    """Runs the kernel of a dense call that `plan_decode` supports: each batch entry is a request with T queries."""
    from pallas_kernels.mosaic_gpu import split_kv
    from pallas_kernels.mosaic_gpu.decode import kernel

    plan = plan_decode(spec)
    assert isinstance(plan, Plan), plan
    (own, work), arrays = plan.kernels, operands_of(inputs)
    packed = own.spec.replace(T=spec.B * spec.T)  # to the plan and the merge
    indptr, lengths = np.arange(spec.B + 1, dtype=np.int32) * spec.T, inputs.kv_lengths
    extents = indptr, np.full(spec.B, spec.S, np.int32) if lengths is None else lengths
    items, sizes = triton.items_for_hopper(packed, work, extents, arrays.captured.mask, per_request=spec.T)
    query = _packed(spec, arrays.query)
    operands = kernel.DecodeOperands(query, arrays.key, arrays.value, None, None, items, arrays.captured)
    found = kernel.attend(own.spec, own.packing, split_kv.Sizes(*sizes), operands)
    out, lse = triton.merge_for_hopper(packed, work, extents, found)
    by_batch = lambda x: x.reshape(spec.B, spec.T, *x.shape[1:])
    out, lse = by_batch(out), by_batch(lse).swapaxes(1, 2)
    result = [out if spec.layout == "BTNH" else out.swapaxes(1, 2), lse]
    if own.spec.needs_marks:
        result = triton.repair_decoded(spec, arrays, lengths, result)
    return fold_sinks(spec, Saved(*result), inputs.sinks)


def _packed(spec: AttentionSpec, query: jax.Array) -> jax.Array:
    """Queries [N, Hq, D], those of a batch entry side by side."""
    tokens_first = query if spec.layout == "BTNH" else query.swapaxes(1, 2)
    return tokens_first.reshape(spec.B * spec.T, *tokens_first.shape[2:])

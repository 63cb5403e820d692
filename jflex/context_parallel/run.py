"""Runs a checked context parallel call: divides it among the devices, and runs a strategy on each."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int32

from jflex._call.dispatch import Requested, check_supported
from jflex._call.vector_mods import VectorMods
from jflex._jax.shard import Span, shard_of
from jflex.backends.base import Inputs, Saved
from jflex.backends.vector_mods import TokenPositions, modified_inputs, used_keys
from jflex.block_mask.lists import BlockLists
from jflex.context_parallel.call import ContextCall, divided
from jflex.context_parallel.exchange import attend_exchanged, attend_gathered
from jflex.context_parallel.prepare import Checked
from jflex.context_parallel.ring import attend_in_ring
from jflex.entry import run as run_dense
from pallas_kernels.spec import AttentionSpec, Blocks


def run(checked: Checked, implementation: Requested) -> Saved:
    """Runs a checked call on each device."""
    context, spec = checked.context, checked.call.spec
    placement, strategy = context.placement, context.strategy
    if spec.is_empty:  # zeros, which need no device
        local = spec if placement.mesh is not None else spec.replace(T=spec.T // placement.shards)
        return run_dense(checked.call._replace(spec=local, vectors=VectorMods()), implementation)
    check_supported(implementation, device_spec(context, checked.call.inputs, checked.blocks()))
    call, block_mask = checked.masked()
    tables = divided(block_mask, strategy, placement.shards, None if context.order is None else np.array(context.order))
    known = tuple(map(tuple, tables.sees.tolist())) if isinstance(tables.sees, np.ndarray) else None
    context = dataclasses.replace(context, spec=call.spec, implementation=implementation, sees=known)
    query, key, value = _modified(checked)
    inputs = call.inputs._replace(query=query, key=key, value=value, lists=tables.lists)
    sees = None if tables.sees is None else jnp.asarray(tables.sees)
    if placement.mesh is None:
        # Inside of the caller's `jax.shard_map`: the tables of one device, with the axis that `_specs` divides.
        local = lambda x: jax.lax.dynamic_slice_in_dim(x, placement.shard(), 1)
        if inputs.lists is not None and strategy != "ulysses":
            inputs = inputs._replace(lists=BlockLists(*map(local, inputs.lists)))
        return _on_device(context, inputs, None if sees is None else local(sees))
    return _on_mesh(context, inputs, sees)


def device_spec(context: ContextCall, inputs: Inputs, blocks: Blocks | None) -> AttentionSpec:
    """The call of the first device; `blocks` are those of the whole mask, which need not be made yet."""
    spec, placement, n = context.spec, context.placement, context.placement.shards
    B, Hq, Hkv = spec.B // placement.batch_shards, spec.Hq // placement.head_shards, spec.Hkv // placement.head_shards
    T, S = spec.T // n, spec.S // n if context.strategy == "ring" else spec.S
    zero = jnp.int32(0)
    where = context.rows_of(lambda _: zero)
    if context.strategy == "ulysses":
        T, Hq, Hkv = spec.T, Hq // n, Hkv // n
        where = where._replace(head=zero)
    else:
        where = where._replace(queries=context.span(spec.T, zero))
    if context.strategy == "ring":
        where = where._replace(keys=context.span(spec.S, zero))
        inputs = inputs._replace(sinks=None)
    one = lambda length, heads, size, batch: jax.ShapeDtypeStruct(
        (batch, length, heads, size) if spec.layout == "BTNH" else (batch, heads, length, size), jnp.dtype(spec.dtype)
    )
    keys = B if spec.Bkv == spec.B else spec.Bkv
    lists: BlockLists | None = None
    if blocks is not None:
        leading = B if blocks.batch == spec.B else 1, Hq if blocks.heads == spec.Hq else 1
        table: Any = jax.ShapeDtypeStruct((*leading, 1), jnp.int32)
        lists = BlockLists(*[table] * len(BlockLists._fields))
    arrays: Any = one(T, Hq, spec.D, B), one(S, Hkv, spec.D, keys), one(S, Hkv, spec.Dv, keys)
    local = inputs._replace(query=arrays[0], key=arrays[1], value=arrays[2], lists=lists)
    return shard_of(spec.replace(blocks=blocks), local, where).spec


def _modified(checked: Checked) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Query, key and value as the vector mods make them; keys beyond the lengths are zeros."""
    call, lengths, context = checked.call, checked.kv_lengths, checked.context
    spec, vectors = call.spec, call.vectors
    if lengths is None and vectors[:3] == (None, None, None):
        return checked.arrays
    positions = TokenPositions(positions_of(context, spec.T), positions_of(context, spec.S))
    query, key, value = modified_inputs(vectors[:3], checked.arrays, spec.layout, spec.Bkv, lengths, positions)
    if lengths is None:
        return query, key, value
    used = used_keys(key, spec.layout, lengths, positions.keys)
    clear = lambda x: jnp.where(used, x, jnp.zeros_like(x))  # NaN would survive a weight of 0
    return query, clear(key), clear(value)


def positions_of(context: ContextCall, length: int) -> Int32[Array, " n"] | None:
    """The positions of the tokens of an array of the caller; None where these count from 0."""
    placement = context.placement
    if placement.mesh is None:
        indices = jnp.arange(length // placement.shards, dtype=jnp.int32)
        return context.span(length, placement.shard()).position(indices)
    if context.order is None:
        return None
    starts = context.starts(length).reshape(-1)
    return Span(jnp.asarray(starts), length // starts.size).position(jnp.arange(length, dtype=jnp.int32))


@functools.partial(jax.jit, static_argnums=0)
def _on_mesh(call: ContextCall, inputs: Inputs, sees: jax.Array | None) -> Saved:
    """Runs the program of one device on each; under `jax.jit`, without which JAX maps no `jax.custom_vjp`."""
    placement = call.placement
    specs = _specs(call, inputs), None if sees is None else PartitionSpec(placement.axis)
    body = functools.partial(_on_device, call)
    out: Any = placement.rows(call.spec.layout)
    row: Any = placement.rows("BNTH")
    saved = Saved(out, row, **dict.fromkeys(call.spec.stats, row))
    return placement.mapped(body, specs, saved, inputs, sees)


def _specs(call: ContextCall, inputs: Inputs) -> Any:
    """Division of the inputs among the devices: `Inputs` of shardings."""
    spec, placement, whole = call.spec, call.placement, PartitionSpec()
    keys = placement.rows(spec.layout, batch=spec.Bkv == spec.B)
    lists: BlockLists | None = None
    if inputs.lists is not None and spec.blocks is not None:
        leading = {"all_gather": (placement.axis,), "ring": (placement.axis, None), "ulysses": ()}[call.strategy]
        batch = placement.batch if spec.blocks.batch == spec.B and placement.batch else None
        heads = placement.heads if spec.blocks.heads == spec.Hq and placement.heads else None
        of_lists: Any = PartitionSpec(*leading, batch, heads)
        lists = BlockLists(*[of_lists] * len(inputs.lists))
    specs: Any = jax.tree.map(lambda _: whole, inputs._replace(lists=None))
    sinks = None if inputs.sinks is None else PartitionSpec(placement.heads or None)
    return specs._replace(query=placement.rows(spec.layout), key=keys, value=keys, lists=lists, sinks=sinks)


def _on_device(call: ContextCall, inputs: Inputs, sees: jax.Array | None) -> Saved:
    """The program of one device."""
    where = call.rows_of(lambda names: jax.lax.axis_index(names).astype(jnp.int32))
    if call.strategy == "all_gather":
        return attend_gathered(call, inputs, where)
    if call.strategy == "ulysses":
        return attend_exchanged(call, inputs, where)
    lists = None if inputs.lists is None else BlockLists(*(x[0] for x in inputs.lists))
    return attend_in_ring(call, inputs._replace(lists=lists), where, None if sees is None else sees[0])

"""Strategies that exchange arrays once: an all-gather of keys and values, and all-to-alls between tokens and heads.

All-gather: after Llama 3 (Grattafiori et al. 2024, arXiv:2407.21783, section 3.3.2). Queries stay where they are; the
transpose of the all-gather sums the gradients of keys and values over the devices and leaves each its own: a
reduce-scatter. All-to-all: after DeepSpeed Ulysses (Jacobs et al. 2023, arXiv:2309.14509).
"""

from __future__ import annotations

import jax
import numpy as np

from jflex._jax.shard import Where, shard_of
from jflex.backends.base import Inputs, Saved
from jflex.block_mask.lists import BlockLists
from jflex.context_parallel.call import CALLER, ContextCall
from jflex.context_parallel.order import chunks_in_order
from jflex.entry import Call, run


def attend_gathered(call: ContextCall, inputs: Inputs, where: Where) -> Saved:
    """The attention of one device over all keys, inside of its program; `inputs` are local."""
    spec = call.spec
    axis = 1 if spec.layout == "BTNH" else 2
    key, value = (_gathered(call, x, axis) for x in (inputs.key, inputs.value))
    where = where._replace(queries=call.span(spec.T, call.placement.shard()))
    lists = None if inputs.lists is None else BlockLists(*(x[0] for x in inputs.lists))
    shard = shard_of(spec, inputs._replace(key=key, value=value, lists=lists), where)
    return run(Call(shard.spec, shard.inputs, caller=CALLER), call.implementation)


def _gathered(call: ContextCall, x: jax.Array, axis: int) -> jax.Array:
    """The whole of an array, in the natural order of its tokens."""
    whole = jax.lax.all_gather(x, call.placement.axis, axis=axis, tiled=True)
    return whole if call.order is None else chunks_in_order(whole, np.argsort(call.order), axis)


def attend_exchanged(call: ContextCall, inputs: Inputs, where: Where) -> Saved:
    """The attention of one device to all tokens of some heads, inside of its program; `inputs` are local."""
    placement, layout = call.placement, call.spec.layout
    length, heads = (1, 2) if layout == "BTNH" else (2, 1)
    query, key, value = (_to_heads(call, x, length, heads) for x in (inputs.query, inputs.key, inputs.value))
    first = placement.shard() * query.shape[heads]
    take = lambda x, axis: jax.lax.dynamic_slice_in_dim(x, first, query.shape[heads], axis)
    sinks = None if inputs.sinks is None else take(inputs.sinks, 0)
    lists = inputs.lists
    if lists is not None and lists[0].shape[1] > 1:
        lists = BlockLists(*(take(x, 1) for x in lists))
    local = inputs._replace(query=query, key=key, value=value, lists=lists, sinks=sinks)
    where = where._replace(head=first if where.head is None else where.head + first)
    shard = shard_of(call.spec, local, where)
    saved = run(Call(shard.spec, shard.inputs, caller=CALLER), call.implementation)
    rows = jax.tree.map(lambda x: _to_tokens(call, x, 2, 1), saved[1:])
    return Saved(_to_tokens(call, saved.out, length, heads), *rows)


def _to_heads(call: ContextCall, x: jax.Array, length: int, heads: int) -> jax.Array:
    """All tokens of some heads, in their natural order, from some tokens of all heads."""
    x = jax.lax.all_to_all(x, call.placement.axis, split_axis=heads, concat_axis=length, tiled=True)
    return x if call.order is None else chunks_in_order(x, np.argsort(call.order), length)


def _to_tokens(call: ContextCall, x: jax.Array, length: int, heads: int) -> jax.Array:
    """The inverse of `_to_heads`."""
    x = x if call.order is None else chunks_in_order(x, np.array(call.order), length)
    return jax.lax.all_to_all(x, call.placement.axis, split_axis=length, concat_axis=heads, tiled=True)

"""Context parallel attention by all-to-all: each device gets all tokens of some of the heads.

After DeepSpeed Ulysses (Jacobs et al. 2023, arXiv:2309.14509).
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


def attend_exchanged(call: ContextCall, inputs: Inputs, where: Where) -> Saved:
    """The attention of one device, inside of its program; `inputs` are local."""
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

"""Context parallel attention by all-gather of keys and values: queries stay where they are.

After Llama 3 (Grattafiori et al. 2024, arXiv:2407.21783, section 3.3.2). The transpose of the all-gather sums the
gradients of keys and values over the devices and leaves each its own: a reduce-scatter.
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
    """The attention of one device, inside of its program; `inputs` are local."""
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

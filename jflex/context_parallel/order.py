"""Orders of tokens that give every device the same share of a mask: zigzag, and one from the blocks of a BlockMask.

An order is a permutation of chunks, equal parts of the sequence: the arrays hold chunk ``order[i]`` in slot ``i``, and
each device holds an equal run of slots. Zigzag is that of Llama 3 (Grattafiori et al. 2024, arXiv:2407.21783, section
3.3.2); the other is the rule of the longest processing time first (Graham 1969, Bounds on Multiprocessing Timing
Anomalies), with as many chunks for each device.
"""

from __future__ import annotations

import heapq
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array, Float64, Int, Int32, Shaped

from jflex._check.arguments import checked_positive
from jflex.block_mask.drawing import is_concrete
from jflex.block_mask.mask import BlockMask

Order = Int32[np.ndarray, " chunks"]


def zigzag_order(shards: int) -> Order:
    """The order in which causal attention is balanced: each device gets one of the first chunks and one of the last.

    Args:
      shards: Devices along the axis of the tokens.

    Returns:
      A permutation of ``2 * shards`` chunks; device ``i`` holds chunks ``i`` and ``2 * shards - 1 - i``.

    Raises:
      TypeError: `shards` is not an integer.
      ValueError: It is not positive.

    >>> zigzag_order(4).tolist()
    [0, 7, 1, 6, 2, 5, 3, 4]
    """
    first = np.arange(checked_positive(shards, "shards"), dtype=np.int32)
    return np.stack([first, 2 * first.size - 1 - first], axis=1).reshape(-1).astype(np.int32)


def balanced_order(block_mask: BlockMask, shards: int, *, chunk_blocks: int = 1, partial_cost: float = 1.0) -> Order:
    """An order that gives every device about the same number of blocks of a mask to visit.

    Chunks are assigned by falling cost, each to the device with the least cost so far that still lacks chunks; every
    device gets as many. Its chunks then ascend. A model of costs, not a measurement: a block costs the same wherever it
    is, and communication nothing.

    Args:
      block_mask: The mask, of tokens in their natural order.
      shards: Devices along the axis of the tokens.
      chunk_blocks: Query blocks in a chunk. Larger chunks keep neighbors together.
      partial_cost: The cost of a partial block, in full ones.

    Raises:
      TypeError: `block_mask` is not a BlockMask, or is traced; or a number is of a wrong type.
      ValueError: The query blocks cannot be divided into chunks, or the chunks among the devices.

    >>> import jflex
    >>> causal = jflex.create_block_mask(jflex.masks.causal(), None, None, 1024, 1024)
    >>> order = balanced_order(causal, 4)
    >>> order.tolist(), device_costs(causal, 4, order).tolist()
    ([0, 7, 1, 6, 2, 5, 3, 4], [9.0, 9.0, 9.0, 9.0])
    """
    costs = chunk_costs(block_mask, shards, chunk_blocks, partial_cost)
    room = costs.size // shards
    loads = [(0.0, shard) for shard in range(shards)]
    chunks: list[list[int]] = [[] for _ in range(shards)]
    for chunk in np.argsort(-costs, kind="stable").tolist():
        load, shard = heapq.heappop(loads)
        chunks[shard].append(chunk)
        if len(chunks[shard]) < room:
            heapq.heappush(loads, (load + float(costs[chunk]), shard))
    return np.array([chunk for chunks_of_shard in sorted(map(sorted, chunks)) for chunk in chunks_of_shard], np.int32)


def device_costs(
    block_mask: BlockMask, shards: int, order: Int[ArrayLike, " chunks"] | None = None, *, partial_cost: float = 1.0
) -> Float64[np.ndarray, " shards"]:
    """Number of blocks of a mask that each device visits, for all batch entries and heads of the mask.

    Args:
      block_mask: As in `balanced_order`, and so `shards` and `partial_cost`.
      order: The order of the tokens; None for the natural one.

    Returns:
      The cost of each device, in full blocks.

    Raises:
      TypeError: An argument is of a wrong type, or the mask is traced.
      ValueError: The order is no permutation, or does not divide the query blocks.

    >>> import jflex
    >>> causal = jflex.create_block_mask(jflex.masks.causal(), None, None, 1024, 1024)
    >>> device_costs(causal, 4).tolist()  # the last device has five times the work of the first
    [3.0, 7.0, 11.0, 15.0]
    """
    costs = costs_in_order(chunk_costs(block_mask, shards, 1, partial_cost), shards, order)
    return costs.reshape(shards, -1).sum(1)


def costs_in_order(costs: np.ndarray, shards: int, order: ArrayLike | None) -> np.ndarray:
    """The costs of query blocks in the order of the tokens, None for the natural one."""
    if order is None:
        return costs
    chunks = checked_order(order, shards, None)
    if costs.size % chunks.size:
        raise ValueError(
            f"`order` must divide the {costs.size} query blocks of the mask into chunks of whole blocks. Got "
            f"{chunks.size} chunks."
        )
    return costs.reshape(chunks.size, -1)[chunks].reshape(-1)


def chunk_costs(block_mask: Any, shards: int, chunk_blocks: int, partial_cost: float) -> np.ndarray:
    """The cost of each chunk of a mask, in the natural order; checks the arguments."""
    shards, chunk_blocks = checked_positive(shards, "shards"), checked_positive(chunk_blocks, "chunk_blocks")
    if not isinstance(block_mask, BlockMask) or not is_concrete(block_mask.lists):
        got = "a traced one" if isinstance(block_mask, BlockMask) else type(block_mask).__name__
        raise TypeError(f"`block_mask` must be a `BlockMask` whose lists are known, outside of `jit`. Got {got}.")
    partial, full = (np.asarray(x).sum((0, 1)) for x in (block_mask.kv_num_blocks, block_mask.full_kv_num_blocks))
    rows = full + float(partial_cost) * partial
    if rows.size % (shards * chunk_blocks):
        raise ValueError(
            f"`block_mask` has {rows.size} query blocks, which must be a multiple of {shards} devices x {chunk_blocks} "
            f"blocks in a chunk. Pad the sequence to a multiple of {shards * chunk_blocks * block_mask.block_size[0]} "
            "tokens."
        )
    return rows.reshape(-1, chunk_blocks).sum(1)


def reorder(x: Shaped[ArrayLike, "*axes"], order: Int[ArrayLike, " chunks"], axis: int = 1) -> Shaped[Array, "*axes"]:
    """Brings the tokens of an array from their natural order into another one.

    Once for each batch, before the first layer: tokens, labels and positions. What acts on each token alone does not
    notice the order.

    Args:
      order: A permutation of chunks, as from `zigzag_order` or `balanced_order`.

    Returns:
      An array of the same shape, with chunk ``order[i]`` in slot ``i``.

    Raises:
      TypeError: The order is not of integers, or is traced.
      ValueError: It is no permutation, or its length does not divide that of the axis.

    >>> reorder(jnp.arange(8)[None], zigzag_order(2)).tolist()
    [[0, 1, 6, 7, 2, 3, 4, 5]]
    """
    return _permuted(jnp.asarray(x), checked_order(order, 1, jnp.shape(x)[axis]), axis)


def restore(x: Shaped[ArrayLike, "*axes"], order: Int[ArrayLike, " chunks"], axis: int = 1) -> Shaped[Array, "*axes"]:
    """Brings the tokens of an array back into their natural order: the inverse of `reorder`.

    Raises:
      TypeError: The order is not of integers, or is traced.
      ValueError: It is no permutation, or its length does not divide that of the axis.

    >>> restore(reorder(jnp.arange(8)[None], zigzag_order(2)), zigzag_order(2)).tolist()
    [[0, 1, 2, 3, 4, 5, 6, 7]]
    """
    return _permuted(jnp.asarray(x), np.argsort(checked_order(order, 1, jnp.shape(x)[axis])), axis)


def positions(order: Int[ArrayLike, " chunks"], length: int) -> Int32[np.ndarray, " length"]:
    """The position of each token of a reordered sequence: for rotary embeddings, and other uses of positions.

    Raises:
      TypeError: The order is not of integers, or is traced.
      ValueError: It is no permutation, or its length does not divide `length`.

    >>> positions(zigzag_order(2), 8).tolist()
    [0, 1, 6, 7, 2, 3, 4, 5]
    """
    chunks = checked_order(order, 1, checked_positive(length, "length"))
    return np.arange(length, dtype=np.int32).reshape(chunks.size, -1)[chunks].reshape(-1)


def checked_order(order: ArrayLike, shards: int, length: int | None) -> Order:
    """A permutation of chunks that divides a sequence of `length` tokens, if known, and is divided by `shards`."""
    rule = "`order` must be a permutation of chunks, integers from 0 on with one axis"
    if isinstance(order, Tracer):
        raise TypeError(f"{rule}, known while tracing. Got a traced array. Pass one of numpy.")
    chunks = np.asarray(order)
    got = f"Got {chunks.dtype}[{','.join(map(str, chunks.shape))}]"
    if not np.issubdtype(chunks.dtype, np.integer):
        raise TypeError(f"{rule}. {got}. Make one with `jflex.context_parallel.zigzag_order`.")
    if chunks.ndim != 1 or not chunks.size or not np.array_equal(np.sort(chunks), np.arange(chunks.size)):
        shown = f": {chunks.tolist()}" if chunks.size <= 16 else ""
        raise ValueError(f"{rule}, each once. {got}{shown}.")
    if chunks.size % shards:
        raise ValueError(f"`order` must hold as many chunks for each of {shards} devices. Got {chunks.size} chunks.")
    if length is not None and length % chunks.size:
        raise ValueError(
            f"`order` has {chunks.size} chunks, which do not divide the {length} tokens. Pad these to "
            f"{-(-length // chunks.size) * chunks.size}, and mask the padding."
        )
    return chunks.astype(np.int32)


def _permuted(x: jax.Array, chunks: np.ndarray, axis: int) -> jax.Array:
    """Permutes the chunks of an axis; the result is sharded like `x`, where types say how."""
    permute = lambda x: chunks_in_order(x, chunks, axis % x.ndim)
    sharding = jax.typeof(x).sharding
    if not sharding.mesh.explicit_axes:
        return permute(x)
    permute_any: Any = jax.sharding.auto_axes(permute, out_sharding=sharding)
    return permute_any(x)


def chunks_in_order(x: jax.Array, order: Order, axis: int) -> jax.Array:
    """Takes the chunks of an axis in another order."""
    divided = x.reshape(*x.shape[:axis], len(order), x.shape[axis] // len(order), *x.shape[axis + 1 :])
    return jnp.take(divided, order, axis=axis, unique_indices=True, mode="clip").reshape(x.shape)

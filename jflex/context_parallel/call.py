"""A checked context parallel call, and its mask divided among the devices."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer, eval_context
from jaxtyping import Array, Bool, Int8, Int32

from jflex._jax.primitive import no_mesh
from jflex._jax.shard import Span
from jflex.block_mask.drawing import is_concrete
from jflex.block_mask.lists import BlockLists
from jflex.block_mask.mask import BlockMask, create_block_mask
from jflex.block_mask.tables import block_lists
from jflex.context_parallel.order import Order
from jflex.context_parallel.placement import Placement
from jflex.mods.dependence import uses_index
from jflex.mods.trace import trace_mask_mod
from jflex.mods.types import MaskMod
from pallas_kernels.spec import AttentionSpec

CALLER = "context_parallel_attention"  # in messages
Strategy = Literal["all_gather", "ring", "ulysses"]
STRATEGIES: tuple[Strategy, ...] = ("all_gather", "ring", "ulysses")
# Blocks of masks that the call makes: 128 as by default, or less where chunks are no multiple of it. Below 16 kernels
# have no tiles that divide a block; then the mask is evaluated everywhere.
_LARGEST_BLOCK, _LEAST_BLOCK = 128, 16


class Tables(NamedTuple):
    """The block lists of the devices.

    Attributes:
      lists: Each with leading axes: of devices for all-gather; of devices, and of those whose keys they visit, for the
        ring; none for Ulysses. None without a BlockMask.
      sees: For the ring: whether the queries of a device (row) attend to keys of another (column). A numpy array if the
        mask is known while tracing; None without a BlockMask.
    """

    lists: BlockLists | None = None
    sees: Bool[Array, "shards shards"] | np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class ContextCall:
    """The static part of a checked call: hashable, and equal if it computes the same.

    Attributes:
      spec: The call of all devices.
      placement: The mesh.
      strategy: How queries meet keys.
      order: The order of the tokens, or None.
      implementation: As in `flex_attention`.
      sees: As in `Tables`, if the mask is known while tracing; else None.
    """

    spec: AttentionSpec
    placement: Placement
    strategy: Strategy
    order: tuple[int, ...] | None
    implementation: str | tuple[str, ...] | None
    sees: tuple[tuple[bool, ...], ...] | None = None

    def starts(self, length: int) -> np.ndarray:
        """The first position of each chunk of each device, [shards, chunks of a device]."""
        chunks = np.arange(self.placement.shards) if self.order is None else np.array(self.order)
        return (chunks * (length // chunks.size)).astype(np.int32).reshape(self.placement.shards, -1)

    def span(self, length: int, shard: Int32[Array, ""]) -> Span:
        """The positions of the tokens of a device; `length` of the whole sequence."""
        starts = self.starts(length)
        return Span(jnp.asarray(starts)[shard], length // starts.size)


def own_block_mask(mask_mod: MaskMod, sizes: tuple[int, int, int, int], chunk: tuple[int, int]) -> BlockMask | None:
    """The BlockMask of a mask_mod, in blocks that divide the chunks; None if these are too odd.

    Args:
      mask_mod: The mask.
      sizes: ``(B, Hq, T, S)`` of the whole call.
      chunk: Queries and keys in a chunk.
    """
    blocks = tuple(math.gcd(size, _LARGEST_BLOCK) for size in chunk)
    if min(blocks) < _LEAST_BLOCK:
        return None
    traced, operands = trace_mask_mod(mask_mod)
    batch, heads = (n if uses_index(traced, index) else None for n, index in zip(sizes, ("b", "h"), strict=False))
    known = not any(isinstance(x, Tracer) for x in operands)
    with _as_known(known):
        return create_block_mask(mask_mod, batch, heads, *sizes[2:], block_size=(blocks[0], blocks[1]))


def check_block_size(block_mask: BlockMask, chunk: tuple[int, int]) -> None:
    """Raises ValueError unless the blocks of a mask divide the chunks."""
    if any(size % block for size, block in zip(chunk, block_mask.block_size, strict=True)):
        fitting = tuple(math.gcd(size, block) for size, block in zip(chunk, block_mask.block_size, strict=True))
        raise ValueError(
            f"`block_mask` has blocks of {block_mask.block_size}, which must divide the chunks of {chunk} queries and "
            f"keys. Make it with `create_block_mask(..., block_size={fitting})`, or pad the sequence to longer chunks."
        )


def divided(block_mask: BlockMask | None, strategy: Strategy, shards: int, order: Order | None) -> Tables:
    """The lists of a mask of tokens in their natural order, divided among the devices."""
    if block_mask is None:
        return Tables()
    if strategy == "ulysses":
        return Tables(block_mask.lists)
    known = is_concrete(block_mask.lists)
    with _as_known(known):
        states = block_mask.states()
        B, H, R, C = states.shape
        pairs = _in_order(_in_order(states, 2, order), 3, order if strategy == "ring" else None)
        pairs = jnp.moveaxis(pairs.reshape(B, H, shards, R // shards, C), 2, 0)
        follow_mod = block_mask.lists_follow_mod
        if strategy == "all_gather":
            return Tables(_listed(pairs, follow_mod))
        pairs = jnp.moveaxis(pairs.reshape(*pairs.shape[:4], shards, C // shards), 4, 1)
        sees = jnp.any(pairs > 0, axis=(2, 3, 4, 5))
        return Tables(_listed(pairs, follow_mod), np.asarray(sees) if known else sees)


def _listed(states: Int8[Array, "*devices B H R C"], follow_mod: bool) -> BlockLists:
    leading, (B, H) = states.shape[:-4], states.shape[-4:-2]
    lists = block_lists(states.reshape(-1, H, *states.shape[-2:]), follow_mod=follow_mod)
    return BlockLists(*(x.reshape(*leading, B, H, *x.shape[2:]) for x in lists))


def _in_order(states: Int8[Array, "B H R C"], axis: int, order: Order | None) -> Int8[Array, "B H R C"]:
    if order is None:
        return states
    size = states.shape[axis] // order.size
    return jnp.take(states, (order[:, None] * size + np.arange(size)).reshape(-1), axis=axis)


def _as_known(known: bool) -> Any:
    """Computes at once what is known, also while tracing; outside of the mesh of an enclosing `jax.shard_map`."""
    stack = contextlib.ExitStack()
    if known:
        stack.enter_context(eval_context())
        stack.enter_context(no_mesh())
    return stack

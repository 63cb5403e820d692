"""A checked context parallel call, and its mask divided among the devices."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int8, Int32

from jflex._jax.shard import Span, Where
from jflex._mesh import as_known
from jflex.block_mask.drawing import is_concrete
from jflex.block_mask.lists import BlockLists, block_lists
from jflex.block_mask.mask import BlockMask
from jflex.context_parallel.order import Order, chunks_in_order
from jflex.context_parallel.placement import Placement
from pallas_kernels.spec import AttentionSpec

CALLER = "context_parallel_attention"  # in messages
Strategy = Literal["all_gather", "ring", "ulysses"]
STRATEGIES: tuple[Strategy, ...] = ("all_gather", "ring", "ulysses")


class Tables(NamedTuple):
    """The block lists of the devices."""

    # each with leading axes: of devices for all-gather; of devices, and of those whose keys they visit, for the ring;
    # none for Ulysses. None without a BlockMask
    lists: BlockLists | None = None
    # for the ring: whether the queries of a device (row) attend to keys of another (column). A numpy array if the mask
    # is known while tracing; None without a BlockMask
    sees: Bool[Array, "shards shards"] | np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class ContextCall:
    """The static part of a checked call: hashable, and equal if it computes the same; `sees` is known while tracing."""

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

    def rows_of(self, number: Callable[[tuple[str, ...]], jax.Array]) -> Where:
        """First batch entry and head of a device, from its number along axes of the mesh."""
        placement, spec = self.placement, self.spec
        first = lambda names, n, size: number(names) * (size // n) if n > 1 else None
        return Where(
            first(placement.batch, placement.batch_shards, spec.B),
            first(placement.heads, placement.head_shards, spec.Hq),
        )

    def span(self, length: int, shard: Int32[Array, ""]) -> Span:
        """The positions of the tokens of a device; `length` of the whole sequence."""
        starts = self.starts(length)
        return Span(jnp.asarray(starts)[shard], length // starts.size)


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
    with as_known(known):
        states = block_mask.states()
        B, H, R, C = states.shape
        pairs = _in_order(_in_order(states, 2, order), 3, order if strategy == "ring" else None)
        pairs = jnp.moveaxis(pairs.reshape(B, H, shards, R // shards, C), 2, 0)
        follow_mod = block_mask.lists_follow_mod
        if strategy == "all_gather":
            return Tables(_listed(pairs, follow_mod, max(R, C)))
        pairs = jnp.moveaxis(pairs.reshape(*pairs.shape[:4], shards, C // shards), 4, 1)
        sees = jnp.any(pairs > 0, axis=(2, 3, 4, 5))
        return Tables(_listed(pairs, follow_mod, max(R, C)), np.asarray(sees) if known else sees)


def _listed(states: Int8[Array, "*devices B H R C"], follow_mod: bool, whole: int) -> BlockLists:
    leading, (B, H) = states.shape[:-4], states.shape[-4:-2]
    lists = block_lists(states.reshape(-1, H, *states.shape[-2:]), follow_mod=follow_mod, whole=whole)
    return BlockLists(*(x.reshape(*leading, B, H, *x.shape[2:]) for x in lists))


def _in_order(states: Int8[Array, "B H R C"], axis: int, order: Order | None) -> Int8[Array, "B H R C"]:
    return states if order is None else chunks_in_order(states, order, axis)

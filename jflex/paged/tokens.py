"""The packed tokens of a batch: their requests, their positions, and the slots of their keys."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from jflex._check.arguments import checked_size
from jflex.block_mask.lists import run_of
from jflex.paged.batch import PagedBatch, check_fields
from jflex.paged.cache import checked_page_size
from jflex.paged.trees import Trees
from jflex.types import AnyArray


def token_requests(batch: PagedBatch, num_tokens: int) -> Int32[Array, " N"]:
    """The request of every packed query; -1 for padding after the last request.

    >>> batch = PagedBatch(jnp.array([0, 2, 2, 3]), jnp.array([2, 0, 1]), jnp.ones((3, 1), jnp.int32))
    >>> token_requests(batch, 4).tolist()
    [0, 0, 2, -1]
    """
    check_fields(batch)
    tokens = jnp.arange(checked_size(num_tokens, "num_tokens"), dtype=jnp.int32)
    request = run_of(tokens, jnp.asarray(batch.qo_indptr))
    return jnp.where(request < batch.requests, request, -1)


def token_positions(batch: PagedBatch, num_tokens: int) -> Int32[Array, " N"]:
    """The position of every packed query within its request: ``q_idx`` of mods, and the one for rotary embeddings.

    That of a node of a tree counts its ancestors, not the rows before it.

    Returns:
      Positions; -1 for padding after the last request.

    >>> batch = PagedBatch(jnp.array([0, 2, 3]), jnp.array([2, 8]), jnp.array([[1, 0], [2, 3]]))
    >>> token_positions(batch, 4).tolist()
    [0, 1, 7, -1]
    """
    request = token_requests(batch, num_tokens)
    rows = _token_rows(batch, request)
    if batch.ancestors is None or not batch.requests:
        return rows
    trees = Trees.from_ancestors(batch.ancestors, batch.kv_lengths, batch.qo_indptr)
    return jnp.where(request < 0, -1, trees.position(request, rows))


def _token_rows(batch: PagedBatch, request: Int32[Array, " N"]) -> Int32[Array, " N"]:
    """Position of the key of every packed query in its request; -1 for padding."""
    if not batch.requests:
        return request
    last = jnp.asarray(batch.kv_lengths) - jnp.asarray(batch.qo_indptr)[1:]
    return jnp.where(request < 0, -1, last[request] + jnp.arange(request.shape[0], dtype=jnp.int32))


def token_slots(batch: PagedBatch, num_tokens: int, page_size: int) -> Int32[Array, " N"]:
    """The slot of every packed query's own key: where `jflex.paged.write` must put the tokens of this step.

    Args:
      batch: The batch, its `kv_lengths` counting the tokens of this step.

    Returns:
      Slots; -1, which `write` drops, for padding and for tokens without a page.

    >>> batch = PagedBatch(jnp.array([0, 2, 3]), jnp.array([2, 8]), jnp.array([[1, 0], [2, 3]]))
    >>> token_slots(batch, 4, page_size=4).tolist()
    [4, 5, 15, -1]
    """
    request = token_requests(batch, num_tokens)
    return _slots(jnp.asarray(batch.page_table), request, _token_rows(batch, request), checked_page_size(page_size))


def slots_of_tokens(
    batch: PagedBatch, request: Int32[Array, " N"], positions: Int32[Array, "N K"], page_size: int
) -> Int32[Array, "N K"]:
    """The slots of keys at some positions of the request of each packed query; -1 as in `slots_of`, and for padding.

    >>> batch = PagedBatch(jnp.array([0, 1]), jnp.array([8]), jnp.array([[7, 2]]))
    >>> slots_of_tokens(batch, token_requests(batch, 2), jnp.array([[0, 5, 9], [0, 5, 9]]), page_size=4).tolist()
    [[28, 9, -1], [-1, -1, -1]]
    """
    owner = jnp.broadcast_to(request[:, None], positions.shape)
    return _slots(jnp.asarray(batch.page_table), owner, positions, checked_page_size(page_size))


def slots_of(
    page_table: Int32[AnyArray, "*R max_pages"], positions: Int32[AnyArray, "*R N"], page_size: int
) -> Int32[Array, "*R N"]:
    """The slots of tokens: ``page_table[p // page_size] * page_size + p % page_size`` for a position ``p``.

    Args:
      page_table: The pages of one request, [max_pages], or of several, [R, max_pages].
      positions: Positions of tokens in that request, [N], or in each of several, [R, N].

    Returns:
      Slots; -1 where a position is negative or beyond the table, or its entry is not a page of tokens (0 or negative).

    Raises:
      ValueError: The shapes do not match, or a page holds fewer than 1 or more than 256 tokens.

    >>> slots_of(jnp.array([7, 2, 0]), jnp.array([0, 3, 4, 9, -1]), page_size=4).tolist()
    [28, 31, 8, -1, -1]
    """
    page_table, positions = jnp.asarray(page_table), jnp.asarray(positions)
    if page_table.ndim not in (1, 2) or page_table.shape[:-1] != positions.shape[:-1]:
        raise ValueError(
            "`page_table` and `positions` must be [max_pages] and [N], or [R, max_pages] and [R, N]. Got "
            f"{page_table.shape} and {positions.shape}. Index the table with the request, or `jax.vmap` over others."
        )
    page_size = checked_page_size(page_size)
    if page_table.ndim == 1:
        return _slots(page_table[None], jnp.zeros_like(positions), positions, page_size)
    request = jax.lax.broadcasted_iota(jnp.int32, positions.shape, 0)
    return _slots(page_table, request, positions, page_size)


def _slots(
    page_table: Int32[Array, "R max_pages"], request: Int32[Array, "*N"], positions: Int32[Array, "*N"], page_size: int
) -> Int32[Array, "*N"]:
    if not page_table.size:
        return jnp.full(positions.shape, -1, jnp.int32)
    column, last = positions // page_size, page_table.shape[1] - 1
    inside = (request >= 0) & (positions >= 0) & (column <= last)
    # Clamped here: the checks of `mode="fill"` are a kernel of their own.
    at = jnp.maximum(request, 0), jnp.clip(column, 0, last)
    pages = page_table.at[at].get(mode="promise_in_bounds")
    return jnp.where(inside & (pages > 0), pages * page_size + positions % page_size, -1)

"""Which tokens of a packed batch belong to which request, and on which pages the keys of a request stand."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from jflex.paged.sizes import checked_page_size


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class PagedBatch:
    """R requests, their queries packed in one axis and their keys on pages: a pytree of int32 arrays.

    The queries of request ``r`` are the rows ``qo_indptr[r]`` up to ``qo_indptr[r + 1]`` of N packed ones; rows from
    ``qo_indptr[R]`` on are padding. They are the last tokens of the request: row ``i`` of its ``q_len`` has the
    position ``kv_length - q_len + i``, and its own key is among the ``kv_length`` keys.

    The key at position ``p`` of request ``r`` stands on page ``page_table[r, p // page_size]`` at the offset
    ``p % page_size``. Entries past the pages that ``kv_lengths[r]`` needs are ignored; put 0 there, the reserved page.

    Attributes:
      qo_indptr: Where the queries of each request begin, ascending from 0, and where the last ones end.
      kv_lengths: Keys of each request, those of its queries included.
      page_table: Pages of each request, in order.

    >>> batch = PagedBatch(  # a prompt of three tokens, a request that has just ended, one token after four others
    ...     jnp.array([0, 3, 3, 4]), jnp.array([3, 0, 5]), jnp.array([[1, 2, 0], [0, 0, 0], [3, 4, 5]]))
    >>> batch.requests, batch.max_pages
    (3, 3)
    >>> token_positions(batch, 5).tolist()  # the fifth row is padding
    [0, 1, 2, 4, -1]
    """

    qo_indptr: Int32[Array, " R_and_1"]
    kv_lengths: Int32[Array, " R"]
    page_table: Int32[Array, "R max_pages"]

    @property
    def requests(self) -> int:
        """R."""
        return self.kv_lengths.shape[0]

    @property
    def max_pages(self) -> int:
        """Pages that a request can have at most: the width of the table."""
        return self.page_table.shape[1]


def token_requests(batch: PagedBatch, num_tokens: int) -> Int32[Array, " N"]:
    """The request of every packed query; -1 for padding behind the last request.

    Args:
      batch: The batch.
      num_tokens: N, the number of packed rows.

    Returns:
      Numbers of requests.

    >>> batch = PagedBatch(jnp.array([0, 2, 2, 3]), jnp.array([2, 0, 1]), jnp.ones((3, 1), jnp.int32))
    >>> token_requests(batch, 4).tolist()
    [0, 0, 2, -1]
    """
    tokens = jnp.arange(num_tokens, dtype=jnp.int32)
    ends = jnp.asarray(batch.qo_indptr)[1:]
    request = jnp.searchsorted(ends, tokens, side="right").astype(jnp.int32)
    return jnp.where(request < batch.requests, request, -1)


def token_positions(batch: PagedBatch, num_tokens: int) -> Int32[Array, " N"]:
    """The position of every packed query within its request: what mods see as ``q_idx``, and a rotary embedding needs.

    Args:
      batch: The batch.
      num_tokens: N, the number of packed rows.

    Returns:
      Positions; -1 for padding behind the last request.

    >>> batch = PagedBatch(jnp.array([0, 2, 3]), jnp.array([2, 8]), jnp.array([[1, 0], [2, 3]]))
    >>> token_positions(batch, 4).tolist()
    [0, 1, 7, -1]
    """
    if not batch.requests:
        return jnp.full(num_tokens, -1, jnp.int32)
    request = token_requests(batch, num_tokens)
    last = jnp.asarray(batch.kv_lengths) - jnp.asarray(batch.qo_indptr)[1:]
    return jnp.where(request < 0, -1, last[request] + jnp.arange(num_tokens, dtype=jnp.int32))


def token_slots(batch: PagedBatch, num_tokens: int, page_size: int) -> Int32[Array, " N"]:
    """The slot of every packed query's own key: where `jflex.paged.write` must put the tokens of this step.

    Args:
      batch: The batch, its `kv_lengths` counting the tokens of this step.
      num_tokens: N, the number of packed rows.
      page_size: That of the cache.

    Returns:
      Slots; -1, which `write` drops, for padding and for tokens without a page.

    >>> batch = PagedBatch(jnp.array([0, 2, 3]), jnp.array([2, 8]), jnp.array([[1, 0], [2, 3]]))
    >>> token_slots(batch, 4, page_size=4).tolist()
    [4, 5, 15, -1]
    """
    if not batch.requests:
        return jnp.full(num_tokens, -1, jnp.int32)
    request, positions = token_requests(batch, num_tokens), token_positions(batch, num_tokens)
    return _slots(jnp.asarray(batch.page_table), request, positions, checked_page_size(page_size))


def slots_of(
    page_table: Int32[Array, "*R max_pages"], positions: Int32[Array, "*R N"], page_size: int
) -> Int32[Array, "*R N"]:
    """The slots of tokens: ``page_table[p // page_size] * page_size + p % page_size`` for a position ``p``.

    Args:
      page_table: The pages of one request, [max_pages], or of several, [R, max_pages].
      positions: Positions of tokens in that request, [N], or in each of several, [R, N].
      page_size: Tokens in a page.

    Returns:
      Slots; -1 where a position is negative or beyond the table, or its entry is not a page of tokens (0 or negative).

    Raises:
      ValueError: The shapes do not fit, or a page holds fewer than 1 or more than 256 tokens.

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
    column = jnp.where(positions < 0, page_table.shape[1], positions // page_size)
    inside = (request >= 0) & (column < page_table.shape[1])
    pages = page_table.at[request, column].get(mode="fill", fill_value=-1, wrap_negative_indices=False)
    return jnp.where(inside & (pages > 0), pages * page_size + positions % page_size, -1)

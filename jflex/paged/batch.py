"""The batch of a paged call: the packed tokens of each request, and the pages of its keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, SupportsIndex

import jax
import jax.numpy as jnp
from jax.experimental import checkify
from jaxtyping import Array, Int32

from jflex._check.arguments import check_int32, checked_size, describe_array, known_values
from jflex.block_mask.runs import run_of
from jflex.paged.cache import check_cache
from jflex.paged.checks import Rule, check_rules, indptr_rules, length_rules, table_rule
from jflex.paged.store import PageStore, checked_page_size
from jflex.paged.trees import Trees, check_ancestors, tree_rules
from jflex.types import AnyArray

_FIELDS = ("qo_indptr", "kv_lengths", "page_table", "ancestors")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class PagedBatch:
    """R requests, their queries packed in one axis and their keys on pages: a pytree of int32 arrays.

    The queries of request ``r`` are the rows ``qo_indptr[r]`` up to ``qo_indptr[r + 1]`` of N packed ones; rows from
    ``qo_indptr[R]`` on are padding. They are the last tokens of the request: row ``i`` of its ``q_len`` has the
    position ``kv_length - q_len + i``, and its own key is among the ``kv_length`` keys.

    The key at position ``p`` of request ``r`` is on page ``page_table[r, p // page_size]`` at offset ``p % page_size``.
    Entries past the pages that ``kv_lengths[r]`` needs are ignored; put 0 there, the reserved page.

    With `ancestors`, the queries of some requests are the nodes of a tree, a different one for each request: a known
    token and drafted continuations of it, to be verified in one call (SpecInfer, https://arxiv.org/abs/2305.09781).
    Node ``i`` is at row ``kv_length - q_len + i``. Its position is its depth in the tree, plus the rows before the
    tree. It attends to those rows, to its ancestors and to itself, as far as the mask_mod lets it; mods see positions,
    of nodes as queries and as keys.

    Attributes:
      qo_indptr: Where the queries of each request begin, ascending from 0, and where the last ones end.
      kv_lengths: Keys of each request, those of its queries included.
      page_table: Pages of each request, in order.
      ancestors: For each node of a request's tree the word of `jflex.masks.tree_bits`, padded with 0; all are 0 where
        the queries are consecutive tokens. None: they are for all requests.

    >>> batch = PagedBatch(  # a prompt of three tokens, a request that has just ended, one token after four others
    ...     jnp.array([0, 3, 3, 4]), jnp.array([3, 0, 5]), jnp.array([[1, 2, 0], [0, 0, 0], [3, 4, 5]]))
    >>> batch.requests, batch.max_pages
    (3, 3)
    >>> token_positions(batch, 5).tolist()  # the fifth row is padding
    [0, 1, 2, 4, -1]
    >>> from jflex.masks import tree_bits
    >>> words = jnp.zeros((3, 4), jnp.int32).at[0, :3].set(tree_bits([-1, 0, 0]))  # two children of the first token
    >>> token_positions(dataclasses.replace(batch, ancestors=words), 5).tolist()
    [0, 1, 1, 4, -1]
    """

    qo_indptr: Int32[AnyArray, " R_and_1"]
    kv_lengths: Int32[AnyArray, " R"]
    page_table: Int32[AnyArray, "R max_pages"]
    ancestors: Int32[AnyArray, "R nodes"] | None = None

    @property
    def requests(self) -> int:
        """R."""
        return self.kv_lengths.shape[0]

    @property
    def max_pages(self) -> int:
        """Maximum pages of a request: the width of the table."""
        return self.page_table.shape[1]


def token_requests(batch: PagedBatch, num_tokens: int) -> Int32[Array, " N"]:
    """The request of every packed query; -1 for padding after the last request.

    Args:
      num_tokens: N, the number of packed rows.

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

    Args:
      num_tokens: N, the number of packed rows.

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
      num_tokens: N, the number of packed rows.
      page_size: Page size of the cache.

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
      page_size: Tokens in a page.

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


def check_batch(batch: PagedBatch, cache: PageStore, num_tokens: int) -> None:
    """Raises unless a batch is valid for a cache and for the number of packed queries.

    Dtypes and shapes are always checked. Values are checked if known: those of numpy arrays and of JAX arrays outside
    ``jit``, whose values the check waits for; in the page table only the entries that a request uses. Tracers pass: see
    `debug_check_batch`. Not detected are a page of another request or a free one (`PagePool.check_table` detects it),
    and mostly a page size other than the table was made for.

    Valid are requests without keys or queries, requests with more queries than keys, whose first queries have negative
    positions, and a batch without requests.

    Args:
      cache: The cache that its pages are in.
      num_tokens: N, the number of packed rows.

    Raises:
      TypeError: `batch` or `cache` has another type, or a field is not an int32 array.
      ValueError: Shapes do not match; `qo_indptr` does not begin with 0, descends, or ends beyond N; a length is
        negative, or beyond the table or the cache; a used page is the reserved one, or outside of the cache.

    >>> from jflex.paged import PagedCache
    >>> cache = PagedCache.create(8, 16, 2, 64, dtype=jnp.float32)
    >>> check_batch(PagedBatch(jnp.array([0, 1]), jnp.array([40]), jnp.array([[3, 1, 7]])), cache, 1)
    >>> check_batch(PagedBatch(jnp.array([0, 1]), jnp.array([40]), jnp.array([[3, 1, 8]])), cache, 1)
    Traceback (most recent call last):
    ValueError: `page_table` must hold pages within 1 and 7, the last page of the cache; page 0 is reserved. Request 0
    uses 3 entries, and entry 2 is 8. Take pages from the `PagePool` of this cache.
    """
    num_tokens = _check_shapes(batch, cache, num_tokens)
    values = (getattr(batch, name) for name in _FIELDS)
    fields = [known_values(x) for x in values]
    check_rules(_rules(fields, batch.max_pages, cache, num_tokens))


def debug_check_batch(batch: PagedBatch, cache: PageStore, num_tokens: int) -> None:
    """Checks the traced values of a batch inside of ``jit``, with the rules of `check_batch`: for debugging.

    It stages `jax.experimental.checkify.check`, so the function that calls it must be transformed by ``checkify``,
    outside of its ``jit``; without that, JAX refuses to compile it. The error comes back as a value; ``throw`` raises
    it. The checks take time, and a `scan` carries their outcome along.

    Args:
      cache: The cache that its pages are in.
      num_tokens: N, the number of packed rows.

    Raises:
      TypeError: As `check_batch`, at once.
      ValueError: Shapes do not fit.

    >>> from jflex.paged import PagedCache
    >>> cache = PagedCache.create(8, 16, 2, 64, dtype=jnp.float32)
    >>> @jax.jit
    ... def step(batch):
    ...     debug_check_batch(batch, cache, num_tokens=1)
    ...     return batch.kv_lengths + 1
    >>> batch = PagedBatch(jnp.array([0, 1]), jnp.array([40]), jnp.array([[3, 1, 8]]))
    >>> error, lengths = checkify.checkify(step)(batch)
    >>> print(error.get())
    `page_table` must hold pages within 1 and 7, the last page of the cache; ...
    """
    num_tokens = _check_shapes(batch, cache, num_tokens)
    fields = [None if x is None else jnp.asarray(x) for x in (getattr(batch, name) for name in _FIELDS)]
    for rule in _rules(fields, batch.max_pages, cache, num_tokens):
        if rule.fault.size:
            first = jnp.argmax(rule.fault)
            values: dict[str, Any] = {name: jnp.ravel(x)[first] for name, x in rule.values.items()}
            checkify.check(~jnp.any(rule.fault), rule.message, **values)


def _rules(fields: Sequence[AnyArray | None], max_pages: int, cache: PageStore, num_tokens: int) -> Iterator[Rule]:
    """The rules on values, in numpy or in JAX; those on a field that is None are left out."""
    qo_indptr, kv_lengths, page_table, ancestors = fields
    if qo_indptr is not None:
        yield from indptr_rules(qo_indptr, num_tokens)
        if ancestors is not None:
            yield from tree_rules(qo_indptr, ancestors)
    if kv_lengths is not None:
        yield from length_rules(kv_lengths, max_pages, cache.num_pages, cache.page_size)
        if page_table is not None:
            yield table_rule(kv_lengths, page_table, cache.num_pages, cache.page_size)


def _check_shapes(batch: object, cache: object, num_tokens: SupportsIndex) -> int:
    check_cache(cache)
    check_fields(batch)
    return checked_size(num_tokens, "num_tokens")


def check_fields(batch: object) -> None:
    """Raises unless the fields of a batch are int32 arrays whose shapes fit."""
    if not isinstance(batch, PagedBatch):
        raise TypeError(
            f"`batch` must be a `PagedBatch`. Got {type(batch).__name__}. Make one with `PagedBatch(qo_indptr, "
            "kv_lengths, page_table)`."
        )
    fields = {name: getattr(batch, name) for name in _FIELDS[:3]}
    for name, x in fields.items():
        check_int32(f"batch.{name}", x, "pages" if name == "page_table" else "counts")
    qo_indptr, kv_lengths, page_table = fields.values()
    right_ranks = (qo_indptr.ndim, kv_lengths.ndim, page_table.ndim) == (1, 1, 2)
    if not right_ranks or not qo_indptr.shape[0] - 1 == kv_lengths.shape[0] == page_table.shape[0]:
        got = ", ".join(f"{name}: {describe_array(x)}" for name, x in fields.items())
        raise ValueError(
            f"`batch` must have `qo_indptr` [R + 1], `kv_lengths` [R] and `page_table` [R, max_pages]. Got {got}. "
            "Requests without queries or keys need an entry in all three."
        )
    if batch.ancestors is not None:
        check_ancestors(batch.ancestors, batch.requests)


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

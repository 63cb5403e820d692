"""The batch of a paged call: the packed tokens of each request, and the pages of its keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify
from jaxtyping import Int32

from jflex._check.arguments import check_int32, checked_size, describe_array, known_values
from jflex.masks.drafts import MAX_NODES
from jflex.paged.cache import PageStore, check_cache
from jflex.types import AnyArray

_MAX_INT32 = 2**31 - 1
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

    >>> from jflex.paged import token_positions
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


def check_batch(batch: PagedBatch, cache: PageStore, num_tokens: int) -> None:
    """Raises unless a batch is valid for a cache and for N, the number of packed queries.

    Dtypes and shapes are always checked. Values are checked if known: those of numpy arrays and of JAX arrays outside
    ``jit``, whose values the check waits for; in the page table only the entries that a request uses. Tracers pass: see
    `debug_check_batch`. Not detected are a page of another request or a free one (`PagePool.check_table` detects it),
    and mostly a page size other than the table was made for.

    Valid are requests without keys or queries, requests with more queries than keys, whose first queries have negative
    positions, and a batch without requests.

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
    fields = [known_values(getattr(batch, name)) for name in _FIELDS]
    check_rules(_rules(fields, batch.max_pages, cache, num_tokens))


def debug_check_batch(batch: PagedBatch, cache: PageStore, num_tokens: int) -> None:
    """Checks the traced values of a batch inside of ``jit``, with the rules of `check_batch`: for debugging.

    It stages `jax.experimental.checkify.check`, so the function that calls it must be transformed by ``checkify``,
    outside of its ``jit``; without that, JAX refuses to compile it. The error comes back as a value; ``throw`` raises
    it. The checks take time, and a `scan` carries their outcome along.

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


def check_ancestors(ancestors: AnyArray, requests: int) -> None:
    """Raises unless the words of a batch have the right type and shape.

    >>> check_ancestors(jnp.zeros((2, 40), jnp.int32), requests=2)
    Traceback (most recent call last):
    ValueError: `batch.ancestors` must be [R, nodes], the words of at most 32 nodes for each of 2 requests. Got
    int32[2,40]. Pad the words of `jflex.masks.tree_bits` with 0.
    """
    check_int32("batch.ancestors", ancestors, "words")
    if ancestors.ndim != 2 or ancestors.shape[0] != requests or not 1 <= ancestors.shape[1] <= MAX_NODES:
        raise ValueError(
            f"`batch.ancestors` must be [R, nodes], the words of at most {MAX_NODES} nodes for each of {requests} "
            f"requests. Got {describe_array(ancestors)}. Pad the words of `jflex.masks.tree_bits` with 0."
        )


class Rule(NamedTuple):
    """Faults of a rule, the message for one of them, and the values in it, arrays of one shape."""

    fault: AnyArray
    message: str
    values: dict[str, AnyArray]


def check_rules(rules: Iterable[Rule]) -> None:
    """Raises ValueError for the first rule that known values break.

    >>> check_rules(indptr_rules(np.array([0, 3, 1]), num_tokens=8))
    Traceback (most recent call last):
    ValueError: `qo_indptr` must ascend. Request 1 has its queries from 3 to 1. Take the cumulative sum of the query
    counts.
    """
    for rule in rules:
        fault = np.asarray(rule.fault)
        if fault.any():
            first = int(fault.argmax())
            values = {name: int(np.asarray(x).reshape(-1)[first]) for name, x in rule.values.items()}
            raise ValueError(rule.message.format(**values))


def indptr_rules(qo_indptr: AnyArray, num_tokens: int) -> Iterator[Rule]:
    """The rules on where queries begin, an array of numpy or of JAX.

    >>> [rule.fault.tolist() for rule in indptr_rules(np.array([0, 3, 1]), num_tokens=8)]
    [[False], [False, True], [False]]
    """
    first, last, begins, ends = qo_indptr[:1], qo_indptr[-1:], qo_indptr[:-1], qo_indptr[1:]
    yield Rule(
        first != 0,
        "`qo_indptr` must begin with 0, where the queries of the first request begin. It begins with {first}. "
        "Prepend a 0 to the cumulative sums of the query counts.",
        {"first": first},
    )
    yield Rule(
        ends < begins,
        "`qo_indptr` must ascend. Request {request} has its queries from {begin} to {end}. Take the cumulative sum of "
        "the query counts.",
        {"request": _iota_like(begins), "begin": begins, "end": ends},
    )
    yield Rule(
        last > num_tokens,
        f"`qo_indptr` must end at N, the number of packed queries, or before. It ends at {{last}}, and there are "
        f"{num_tokens} queries. Pack the queries of all requests.",
        {"last": last},
    )


def length_rules(kv_lengths: AnyArray, max_pages: int, num_pages: int, page_size: int) -> Iterator[Rule]:
    """The rules on lengths, for a table of `max_pages` columns and a cache of pages.

    >>> [rule.fault.tolist() for rule in length_rules(np.array([48, 49]), max_pages=3, num_pages=8, page_size=16)]
    [[False, False], [False, True], [False, False]]
    """
    request = _iota_like(kv_lengths)
    values = {"request": request, "length": kv_lengths}
    yield Rule(
        kv_lengths < 0,
        "`kv_lengths` must not be negative. Request {request} has {length} keys. Give a request that has ended 0 keys.",
        values,
    )
    usable = num_pages - 1
    yield Rule(
        kv_lengths > min(max_pages * page_size, _MAX_INT32),
        f"`page_table` is too narrow: its {max_pages} entries of {page_size} tokens hold {max_pages * page_size} keys. "
        "Request {request} has {length}. Make the table wider, or the cache with the page size that the table is for.",
        values,
    )
    yield Rule(
        kv_lengths > usable * page_size,
        f"`kv_lengths` must fit in the cache, whose {usable} pages of {page_size} tokens (page 0 is reserved) hold "
        f"{usable * page_size} keys. Request {{request}} has {{length}}. Make a cache with more pages.",
        values,
    )


def table_rule(kv_lengths: AnyArray, page_table: AnyArray, num_pages: int, page_size: int) -> Rule:
    """The rule on the entries that requests of these lengths use.

    >>> table_rule(np.array([17]), np.array([[3, 8, 9]]), num_pages=8, page_size=16).fault.tolist()
    [[False, True, False]]
    """
    numpy = np if isinstance(page_table, np.ndarray) else jnp
    used = kv_lengths // page_size + (kv_lengths % page_size > 0).astype(numpy.int32)
    entry = numpy.arange(page_table.shape[1], dtype=numpy.int32)
    request = numpy.broadcast_to(_iota_like(kv_lengths)[:, None], page_table.shape)
    entries = numpy.broadcast_to(entry[None], page_table.shape)
    fault = (entries < used[:, None]) & ((page_table < 1) | (page_table >= num_pages))
    return Rule(
        fault,
        f"`page_table` must hold pages within 1 and {num_pages - 1}, the last page of the cache; page 0 is "
        "reserved. Request {request} uses {used} entries, and entry {entry} is {page}. Take pages from the `PagePool` "
        "of this cache.",
        {
            "request": request,
            "used": numpy.broadcast_to(used[:, None], page_table.shape),
            "entry": entries,
            "page": page_table,
        },
    )


def _iota_like(x: AnyArray) -> AnyArray:
    return (np if isinstance(x, np.ndarray) else jnp).arange(x.shape[0], dtype=np.int32)


def tree_rules(qo_indptr: AnyArray, ancestors: AnyArray) -> Iterator[Rule]:
    """The rules on trees: a word for each query, and none for others; a node is its own ancestor, and no later one is.

    >>> words = np.array([[1, 3, 0], [1, 5, 0]], np.int32)
    >>> [rule.fault.tolist() for rule in tree_rules(np.array([0, 2, 4]), words)]
    [[False, False], [[False, False, False], [False, True, False]]]
    """
    numpy = np if isinstance(ancestors, np.ndarray) else jnp
    begins, ends = qo_indptr[:-1], qo_indptr[1:]
    request = numpy.broadcast_to(numpy.arange(ancestors.shape[0], dtype=np.int32)[:, None], ancestors.shape)
    node = numpy.broadcast_to(numpy.arange(ancestors.shape[1], dtype=np.int32)[None], ancestors.shape)
    words, queries = (ancestors != 0).sum(axis=1).astype(np.int32), ends - begins
    yield Rule(
        (words > 0) & (words != queries),
        "`ancestors` must hold one word for each query of a request, or none. Request {request} has {queries} queries "
        "and {words} words that are not 0. Make them with `jflex.masks.tree_bits`.",
        {"request": request[:, 0], "queries": queries, "words": words},
    )
    exists = (node < queries[:, None]) & (words > 0)[:, None]
    last = numpy.where(node == MAX_NODES - 1, -1, 1)  # bit 31 is the sign, which a shift repeats
    fault = exists & ((ancestors >> node) != last)
    yield Rule(
        fault,
        "`ancestors` must have the bit of the node itself, and no bits of nodes after it. Node {node} of request "
        "{request} has the word {word}. Make them with `jflex.masks.tree_bits`.",
        {"request": request, "node": node, "word": ancestors},
    )

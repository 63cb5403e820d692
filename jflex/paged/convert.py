"""The FlexAttention paper's paged attention: converts a BlockMask and mods from logical positions to physical slots.

All pages, taken as one sequence of slots, are keys and values that the requests share, [1, P * page_size, Hkv, D].
Plain `flex_attention` runs on them: the converted BlockMask visits the pages of each request only, and the converted
mods map a slot to its logical position in the request.

Slots that hold no token of a request are masked: their contents, even NaN, have no effect, as under any mask of
`flex_attention`. Only with ``Config(contain_nan=False)`` must all slots of visited pages be finite; `clear_unused`
makes them so.

After FlexAttention (Dong et al., 2024, https://arxiv.org/abs/2412.05496, section 5.1).
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from jflex._check.arguments import largest_value
from jflex.backends.lengths import bounded_states
from jflex.block_mask.lists import EMPTY, BlockLists, lists_from_states
from jflex.block_mask.mask import BlockMask
from jflex.mods.array_sizes import CallSizes, requirements_of, without
from jflex.mods.compose import noop_mask
from jflex.mods.dependence import uses_index
from jflex.mods.reindex import ReindexedMod
from jflex.mods.trace import check_call_sizes, trace_mask_mod
from jflex.mods.types import MaskMod, ScoreMod
from jflex.paged.cache import check_cache, checked_pages
from jflex.paged.inverse import SlotMap, slot_map
from jflex.paged.write import Cache
from jflex.types import AnyArray


def convert_block_mask(
    block_mask: BlockMask,
    page_table: Int32[AnyArray, "B max_pages"],
    *,
    page_size: int,
    num_pages: int,
    kv_lengths: Int32[AnyArray, " B"] | None = None,
) -> BlockMask:
    """Converts a BlockMask for logical positions to one over all slots of a paged cache.

    A block of keys must be a page, so a backend supports the page sizes that it supports as block sizes: ``"xla"`` and
    ``"reference"`` all, ``"triton"`` multiples of 16. `convert_mask_mod` without a BlockMask takes any page size, but
    visits all slots. Blocks without a page or beyond `kv_lengths` are left out; so the counts are those of `block_mask`
    if every block that it lists has a page and keys.

    Pure, and made to run under ``jit``, where new tables and lengths compile nothing. Time and memory grow with B times
    the query blocks times P. If that is too much, or page sizes are not multiples of 16, use `jflex.paged_attention`,
    which looks pages up as it walks. Lists ascend by physical page, which sets the order of summation: the last bits of
    results depend on where pages are.

    Args:
      block_mask: For logical positions, of block size ``(any, page_size)`` and batch 1 or B.
      page_table: The pages of each request. Requests may share pages. Entries of 0 or below are no page. A request must
        not list a page twice, because its inverse would be ambiguous: in a traced table that does, the first entry
        counts.
      num_pages: P of the cache.
      kv_lengths: Keys of each request. Keys beyond are masked, and table entries for them are ignored. None: as many as
        `block_mask` has and the table has pages for. Do not pass them to `flex_attention` as well, where lengths would
        count slots.

    Returns:
      A BlockMask for B requests (1 for none) and ``P * page_size`` keys, with a mask_mod that masks all slots that do
      not belong to a request. Query indices are unchanged.

    Raises:
      TypeError: `block_mask` is not a BlockMask; `page_table` or `kv_lengths` are not int32; a size is not an integer.
      ValueError: The shapes do not match; the key blocks are not pages; the table is too narrow for the keys of
        `block_mask`; a mask for one batch entry uses ``b``; or, if values are known, a page is outside of the cache or
        listed twice in a row, or a length is negative or beyond the table.

    References:
      Dong et al. 2024, Flex Attention: A Programming Model for Generating Optimized Attention Kernels,
      arXiv:2412.05496, section 5.1 and figure 5.

    >>> import jflex
    >>> causal = jflex.create_block_mask(lambda b, h, q, kv: q + 32 >= kv, None, None, 16, 48, block_size=16)
    >>> table = jnp.array([[5, 2, 7], [5, 3, 1]])  # the first page is shared
    >>> paged = convert_block_mask(causal, table, page_size=16, num_pages=8)
    >>> paged.shape, paged.to_dense()[:, 0, 0].tolist()
    ((2, 1, 16, 128), [[0, 0, 1, 0, 0, 1, 0, 1], [0, 1, 0, 1, 0, 1, 0, 0]])
    >>> query, pages = jnp.ones((2, 16, 4, 32)), jnp.ones((8, 16, 2, 32))
    >>> slots = pages.reshape(1, 8 * 16, 2, 32)
    >>> jflex.flex_attention(query, slots, slots, block_mask=paged).shape
    (2, 16, 4, 32)
    """
    num_pages, page_size = checked_pages(num_pages, page_size)
    slots = slot_map(page_table, kv_lengths, num_pages, page_size)
    _check_block_mask(block_mask, page_table.shape, page_size)
    lengths = jnp.minimum(slots.lengths, block_mask.seq_lengths[1])
    slots = dataclasses.replace(slots, lengths=lengths)
    mask_mod = _of_slots(noop_mask if block_mask.mask_mod is None else block_mask.mask_mod, slots)
    traced, operands = trace_mask_mod(mask_mod)
    if block_mask.traced is not None:
        traced = dataclasses.replace(traced, source=block_mask.traced.source)
    states = block_mask.states() if page_table.shape[0] else jnp.zeros((1, *block_mask.states().shape[1:]), jnp.int8)
    states = bounded_states(states, lengths, page_size)
    block = jnp.where(slots.starts < 0, states.shape[-1], slots.starts // page_size)
    # A table can have more entries than the mask has blocks. One more, empty, serves for all beyond.
    states = jnp.pad(states, ((0, 0), (0, 0), (0, 0), (0, 1)), constant_values=EMPTY)
    states = jax.vmap(functools.partial(jnp.take, axis=-1, mode="clip"))(states, block)  # to the columns of pages
    lengths = block_mask.seq_lengths[0], num_pages * page_size
    lists, follow_mod = BlockLists(*lists_from_states(states)), block_mask.lists_follow_mod
    return BlockMask(*lists, operands, traced, lengths, block_mask.block_size, follow_mod)


def convert_mask_mod(
    mask_mod: MaskMod,
    page_table: Int32[AnyArray, "B max_pages"],
    *,
    page_size: int,
    num_pages: int,
    kv_lengths: Int32[Array, " B"] | None = None,
) -> MaskMod:
    """Converts a mask_mod for logical positions to one over all slots of a paged cache.

    It is for `flex_attention` without a BlockMask, of any page size, and for `create_block_mask` over slots. A slot of
    the request is mapped to its logical position for `mask_mod`; other slots are masked.

    Args:
      mask_mod: ``(b, h, q_idx, kv_idx) -> bool``, ``b`` being the row of the table; `jflex.noop_mask` for none.
      page_table: The pages of each request; see `convert_block_mask`. Pages may have 1 to 256 tokens.
      kv_lengths: Keys of each request; None: all that the table has pages for. Without it the unused slots of a partly
        filled page are visible unless `mask_mod` masks their positions.

    Returns:
      A mask_mod whose ``kv_idx`` is a slot.

    Raises:
      TypeError: `mask_mod` cannot be called; `page_table` or `kv_lengths` are not int32 arrays; a size is not an
        integer.
      ValueError: The shapes do not match, or a mod was made for other sizes; or, if values are known, a page is
        outside of the cache or listed twice in a row, or a length is negative or beyond the table.

    >>> import jflex
    >>> table, lengths = jnp.array([[3, 1]]), jnp.array([3])
    >>> mod = convert_mask_mod(jflex.noop_mask, table, page_size=2, num_pages=4, kv_lengths=lengths)
    >>> jflex.create_mask(mod, 1, None, 1, 8)[0, 0, 0].astype(int).tolist()  # slots 6, 7, 2 hold the positions 0, 1, 2
    [0, 0, 1, 0, 0, 0, 1, 1]
    """
    _check_mod("mask_mod", mask_mod, "(b, h, q_idx, kv_idx) -> bool")
    slots = slot_map(page_table, kv_lengths, num_pages, page_size)
    check_call_sizes(None, mask_mod, _call_sizes(page_table, kv_lengths))
    return _of_slots(mask_mod, slots)


def convert_score_mod(
    score_mod: ScoreMod,
    page_table: Int32[AnyArray, "B max_pages"],
    *,
    page_size: int,
    num_pages: int,
    kv_lengths: Int32[Array, " B"] | None = None,
) -> ScoreMod:
    """Converts a score_mod for logical positions to one over all slots of a paged cache.

    Use it with a converted BlockMask or mask_mod: it sets the scores of slots that do not belong to the request to
    ``-inf``, but only a mask keeps NaN in their keys and values out.

    Args:
      score_mod: ``(score, b, h, q_idx, kv_idx) -> score``, ``b`` being the row of the table. Arrays that it reads by
        ``kv_idx`` are read by logical position, and receive gradients.
      page_table: As in `convert_mask_mod`, and so the other arguments and errors.

    Returns:
      A score_mod whose ``kv_idx`` is a slot.

    >>> distance = lambda score, b, h, q_idx, kv_idx: score - (q_idx - kv_idx).astype(jnp.float32)
    >>> mod = convert_score_mod(distance, jnp.array([[3, 1]]), page_size=2, num_pages=4)
    >>> [float(mod(jnp.float32(0), 0, 0, jnp.int32(3), jnp.int32(slot))) for slot in (6, 2, 4)]
    [-3.0, -1.0, -inf]
    """
    _check_mod("score_mod", score_mod, "(score, b, h, q_idx, kv_idx) -> score")
    slots = slot_map(page_table, kv_lengths, num_pages, page_size)
    check_call_sizes(score_mod, None, _call_sizes(page_table, kv_lengths))
    return _of_slots(score_mod, slots)


def clear_unused(
    cache: Cache, page_table: Int32[AnyArray, "B max_pages"], kv_lengths: Int32[AnyArray, " B"] | None = None
) -> Cache:
    """The cache with zeros in every slot that holds no token of these requests, so that NaN there cannot spread.

    It reads and writes the whole cache. The result is for these requests alone: others lose their tokens.

    Args:
      page_table: The pages of each request; see `convert_block_mask`.
      kv_lengths: Keys of each request; None: all that the table has pages for.

    Raises:
      TypeError: `cache` is not a paged cache; `page_table` or `kv_lengths` are not int32 arrays.
      ValueError: The shapes do not match; or, if values are known, a page is outside of the cache or listed twice in a
        row, or a length is negative or beyond the table.

    >>> from jflex.paged import PagedCache
    >>> cache = PagedCache(*jnp.full((2, 4, 2, 1, 1), jnp.nan).at[:, 3].set(1))
    >>> clear_unused(cache, jnp.array([[3, 0]]), jnp.array([1])).k.ravel().tolist()
    [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0]
    """
    check_cache(cache)
    slots = slot_map(page_table, kv_lengths, cache.num_pages, cache.page_size)
    tokens = slots.lengths[:, None] - slots.starts  # how many of a page's slots hold a token of the request
    tokens = jnp.max(jnp.where(slots.starts < 0, 0, tokens), axis=0, initial=0)
    used = jnp.arange(cache.page_size, dtype=jnp.int32)[None] < tokens[:, None]
    of_tokens = lambda x: used.reshape(*used.shape, *[1] * (x.ndim - used.ndim - (cache.layers is not None)))
    return cache.map_tokens(lambda x: jnp.where(jnp.broadcast_to(of_tokens(x), x.shape), x, jnp.zeros((), x.dtype)))


def _of_slots(mod: MaskMod | ScoreMod, slots: SlotMap) -> ReindexedMod:
    return ReindexedMod(mod, slots.positions, without(requirements_of(mod), "kv_idx"))


def _check_block_mask(block_mask: object, table_shape: tuple[int, ...], page_size: int) -> None:
    if not isinstance(block_mask, BlockMask):
        hint = " A mask_mod is converted by `convert_mask_mod`." if callable(block_mask) else ""
        raise TypeError(f"`block_mask` must be a `BlockMask`. Got {type(block_mask).__name__}.{hint}")
    if block_mask.block_size[1] != page_size:
        raise ValueError(
            f"`block_mask` must have blocks of `page_size` keys, {page_size}. It has {block_mask.block_size[1]}. Make "
            f"it with `create_block_mask(..., block_size=({block_mask.block_size[0]}, {page_size}))`."
        )
    requests, max_pages = table_shape
    batch, _, _, kv_length = block_mask.shape
    if batch not in (1, requests):
        raise ValueError(
            f"`block_mask` must have batch 1 or that of `page_table`, {requests}. It has {batch}. Make it with "
            f"`create_block_mask(mask_mod, B={requests}, ...)`."
        )
    if batch == 1 != requests and block_mask.traced is not None and uses_index(block_mask.traced, "b"):
        raise ValueError(
            f"`block_mask` has batch 1 and `page_table` {requests} requests, but its mask_mod "
            f"{block_mask.traced.source} uses `b`. Make it with `create_block_mask(mask_mod, B={requests}, ...)`."
        )
    if kv_length > max_pages * page_size:
        raise ValueError(
            f"`page_table` is too narrow: its {max_pages} entries of {page_size} tokens do not hold the {kv_length} "
            "keys of `block_mask`. Make the table wider, with 0 where there is no page, or crop the mask with "
            "`with_lengths`."
        )


def _call_sizes(page_table: AnyArray, kv_lengths: AnyArray | None) -> CallSizes:
    """The batch entries, rows of the table, and the logical keys, which a call over slots does not tell."""
    keys = None if kv_lengths is None else largest_value(kv_lengths)
    return CallSizes(page_table.shape[0], keys=keys, caller="a page table")


def _check_mod(name: str, mod: object, signature: str) -> None:
    if not callable(mod):
        hint = " A BlockMask is converted by `convert_block_mask`." if isinstance(mod, BlockMask) else ""
        raise TypeError(f"`{name}` must be a function {signature}. Got {type(mod).__name__}.{hint}")

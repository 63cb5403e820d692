"""`paged_attention`: packed, ragged queries over a paged cache, with any mod."""

from __future__ import annotations

import functools
from typing import Any, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Int32

from jflex._check.arguments import check_is_array, describe_array, is_eight_bits, known_values
from jflex.backends.vector_mods import modified_rows
from jflex.entry import PagedCall, Pages, check_packed, finish_packed, prepare_paged, run_paged
from jflex.mods.array_sizes import CallSizes
from jflex.mods.reindex import Positions, reindexed
from jflex.mods.types import ScoreMod
from jflex.options import Options, PackedOutput, PackedPair, Settings, checked, takes
from jflex.paged.batch import PagedBatch, check_batch
from jflex.paged.cache import PagedCache, PageStore, checked_layer
from jflex.paged.eight_bits import WRITTEN
from jflex.paged.tokens import token_positions, token_requests
from jflex.paged.trees import Trees
from jflex.states.state import AttentionState
from jflex.states.stats import AttentionStats, Stat
from jflex.types import AnyArray, ArrayOrShape


# fmt: off
@overload
def paged_attention(
    q: AnyArray, cache: PagedCache, batch: PagedBatch, *, layer: int | AnyArray | None = None,
    **options: Unpack[PackedOutput],
) -> Array: ...
@overload
def paged_attention(
    q: AnyArray, cache: PagedCache, batch: PagedBatch, *, layer: int | AnyArray | None = None,
    **options: Unpack[PackedPair],
) -> tuple[Array, Any]: ...
# fmt: on
@takes(Options)
def paged_attention(
    q: Float[AnyArray, "N Hq D"],
    cache: PagedCache,
    batch: PagedBatch,
    *,
    score_mod: ScoreMod | None = None,
    layer: int | Int[AnyArray, ""] | None = None,
    return_lse: bool = False,
    return_stats: tuple[Stat, ...] = (),
    **options: Unpack[Options],
) -> Float[Array, "N Hq Dv"] | tuple[Float[Array, "N Hq Dv"], Float[Array, "N Hq"] | AttentionStats]:
    """Attention over a paged KV cache: prefill chunks and decoding steps in one call, without padding.

    The queries of a request are its last tokens, and mods see logical, absolute positions: ``b`` is the request,
    ``q_idx`` of its i-th query is ``kv_length - q_len + i``, ``kv_idx`` counts the keys of the request. So mods written
    for training work unchanged. No mask is implied: pass a causal one for a prefill. Trees of drafted tokens are in
    ``batch.ancestors``, a different one for each request.

    The result does not depend on physical pages: it is the same to the last bit wherever they are. Slots at or beyond a
    request's length have no effect, even if they hold NaN. A request without keys gives zeros and an lse of ``-inf``,
    and so do padding rows. How keys are split among CTAs of a GPU depends on the whole batch, and so do the last bits.

    Lengths, tables and `qo_indptr` are data: other values do not recompile anything. Outside of ``jit`` they are
    checked. Inside they are not (`jflex.paged.debug_check_batch` does): pages and lengths are clamped, so that nothing
    is read out of range. There is no derivative, except on ``"reference"``.

    Args:
      q: Packed queries, in the dtype of the cache; over eight bits in bfloat16, float16 or float32. Query head ``h``
        attends to key head ``h // (Hq // Hkv)``.
      cache: Keys and values, those of these queries included: `jflex.paged.write` them first.
      score_mod: ``(score, b, h, q_idx, kv_idx) -> score``, on scalars, as in `flex_attention`.
      layer: Which layer of a stacked cache, a Python int or traced; no copy of it is made.
      return_lse: Also return the float32 logsumexp (natural log) of the scores over the visible keys.
      return_stats: As in `flex_attention`; padding rows have the statistics of a row that attends to no key.
      **options: The keywords of `jflex.options.Options`. Tiles that a comparison of positions in `mask_mod` masks fully
        (causal, a window) are not read. `key_mod` and `value_mod` are applied as keys and values are loaded, at the
        request, key head and absolute position; the cache stays as it is. So raw keys can be rotated where they are
        read (`jflex.rope`), at positions that differ between calls. They are evaluated for each tile of queries: in
        prefill, and for what never changes, it is cheaper before `write` (`jflex.apply_vector_mod`). With
        `output_mod`, padding rows stay zeros. A dense call over the whole sequences drops the same weights, if its
        batch entries are the requests.

    Returns:
      The output in the dtype of `q`, or a pair of it and the lse: the fields of an `AttentionState`; or a pair of it
      and the `AttentionStats`, [N, Hq].

    Raises:
      TypeError: An argument has a wrong type, or a mod takes or returns something else than it must.
      ValueError: Shapes disagree, a mod was made for other sizes, or a known value is out of range.
      UnsupportedError: No requested backend supports this call, or a derivative is requested.

    References:
      Kwon et al. 2023, Efficient Memory Management for Large Language Model Serving with PagedAttention,
      arXiv:2309.06180, section 4; Dong et al. 2024, arXiv:2412.05496, section 5.1; Ye et al. 2025, FlashInfer,
      arXiv:2501.01005, section 3.

    >>> import jflex
    >>> cache = jflex.paged.PagedCache.create(8, 16, 2, 64, dtype=jnp.float32)
    >>> batch = jflex.paged.PagedBatch(  # a chunk of three queries of a request with 20 keys, one query of another
    ...     jnp.array([0, 3, 4]), jnp.array([20, 33]), jnp.array([[5, 2, 0], [1, 7, 3]]))
    >>> q = jnp.ones((4, 8, 64))
    >>> causal = lambda b, h, q_idx, kv_idx: q_idx >= kv_idx
    >>> jflex.paged_attention(q, cache, batch, mask_mod=causal).shape
    (4, 8, 64)
    """
    settings = checked(score_mod=score_mod, return_lse=return_lse, return_stats=return_stats, **options)
    call = with_modified_query(prepare(q, cache, batch, settings, layer=layer), settings, batch)
    return results_of(call, run_paged(call, settings.implementation), settings, batch)


def with_modified_query(call: PagedCall, settings: Settings, batch: PagedBatch) -> PagedCall:
    """The call with the query as its vector mod makes it."""
    if settings.query_mod is None:
        return call
    return call._replace(query=modified_rows(settings.query_mod, call.query, *indices_of(batch, call.spec.T)))


def results_of(call: PagedCall, state: AttentionState, settings: Settings, batch: PagedBatch) -> Any:
    """The result of a call, from the state over all keys."""
    return finish_packed(settings, state, call.query.dtype, functools.partial(indices_of, batch, call.spec.T))


def prepare(
    q: ArrayOrShape, cache: PagedCache, batch: PagedBatch, settings: Settings, layer: int | AnyArray | None = None
) -> PagedCall:
    """Checks every argument of `paged_attention`; q, keys and values may be shapes."""
    q = jnp.asarray(q) if isinstance(q, np.ndarray) else q
    check_queries(q, cache)
    check_batch(batch, cache, q.shape[0])
    pages = pages_of(cache, batch, checked_layer(cache, layer))
    check_packed(settings, q, cache.v.shape[-1], call_sizes(batch, q.shape[1]), cache.num_kv_heads)
    return prepare_paged("paged_attention", q, pages, of_packed(settings, batch, q.shape[1]))


def indices_of(batch: PagedBatch, num_tokens: int) -> tuple[Int32[Array, " N"], Int32[Array, " N"]]:
    """The request and the position of each packed query, for vector mods; -1 for padding."""
    return token_requests(batch, num_tokens), token_positions(batch, num_tokens)


def call_sizes(batch: PagedBatch, heads: int) -> CallSizes:
    """The ranges of the indices of mods: positions up to those of the longest request with queries, if it is known."""
    lengths, indptr = known_values(batch.kv_lengths), known_values(batch.qo_indptr)
    longest = None  # a table may hold more
    if lengths is not None and indptr is not None:
        longest = int(np.where(np.diff(indptr) > 0, lengths, 0).max(initial=0))
    return CallSizes(batch.requests, heads, longest, longest)


def pages_of(cache: PageStore, batch: PagedBatch, layer: jax.Array | None) -> Pages:
    """The pages of a layer, without a copy."""
    first = jnp.zeros((1,), jnp.int32)
    if layer is not None:
        assert cache.layers is not None  # checked by `checked_layer`
        first = (jnp.clip(layer, 0, cache.layers - 1) * cache.num_pages).reshape(1)
    k_scale, v_scale = cache.scales
    return Pages(
        cache.keys, cache.values, cache.num_pages, first, batch.qo_indptr, batch.kv_lengths, batch.page_table,
        key_scale=k_scale, value_scale=v_scale, rope_key=cache.rope_keys,
    )  # fmt: skip


def of_packed(settings: Settings, batch: PagedBatch, heads: int) -> Settings:
    """The settings with mods on indices of packed queries: the last query of a request is in the row of its last key.

    With trees, rows of keys and queries are first mapped to the positions of nodes.
    """
    kept = settings.kept(batch.requests, heads)
    score, mask, key, value = settings.score_mod, settings.mask_mod, settings.key_mod, settings.value_mod
    if batch.ancestors is not None and batch.requests:
        trees = Trees.from_ancestors(batch.ancestors, batch.kv_lengths, batch.qo_indptr)
        score, kept = (reindexed(mod, trees.positions) for mod in (score, kept))
        key, value = (reindexed(mod, trees.key_positions) for mod in (key, value))
        mask = trees.of_mask(mask) if mask is None or callable(mask) else mask

    def rows(b: jax.Array, h: jax.Array, n: jax.Array, kv_idx: jax.Array) -> Positions:
        lengths, indptr = jnp.asarray(batch.kv_lengths), jnp.asarray(batch.qo_indptr)
        if not lengths.size:  # no requests: the mod is traced, but there is nothing to read
            return Positions(b, h, n, kv_idx)
        return Positions(b, h, n + (lengths[b] - indptr[b + 1]), kv_idx)

    score, mask, kept = (reindexed(mod, rows) for mod in (score, mask, kept))
    return settings._replace(score_mod=score, mask_mod=mask, key_mod=key, value_mod=value, kept_mod=kept)


def check_queries(q: ArrayOrShape, cache: object) -> None:
    """Raises unless packed queries fit a cache."""
    if not isinstance(cache, PagedCache):
        raise TypeError(
            f"`cache` must be a `PagedCache`. Got {type(cache).__name__}. Make one with `PagedCache.create(...)`."
        )
    check_is_array(q, "q")
    got = f"Got q: {describe_array(q)}, cache.k: {describe_array(cache.k)}, cache.v: {describe_array(cache.v)}."
    if len(q.shape) != 3:
        raise ValueError(
            f"`q` must have three axes, [N, Hq, D]: the queries of all requests, packed. {got} Reshape [B, T, Hq, D] "
            "to [B * T, Hq, D], with `qo_indptr` in steps of T."
        )
    if is_eight_bits(cache.k.dtype):
        if str(q.dtype) not in WRITTEN:
            raise TypeError(
                f"`q` must be one of {', '.join(WRITTEN)}: the cache holds {cache.k.dtype} with scales. {got} Cast `q`."
            )
    elif q.dtype != cache.k.dtype or q.dtype != cache.v.dtype:
        raise TypeError(f"`q` and `cache` must have one dtype. {got} Cast `q`.")
    heads = cache.num_kv_heads
    if q.shape[2] != cache.k.shape[-1]:
        raise ValueError(f"`q` must have the head size of the cache's keys, {cache.k.shape[-1]}. {got}")
    if q.shape[1] == 0 or q.shape[1] % heads:
        raise ValueError(
            f"`q` must have a multiple of the cache's {heads} heads: grouped-query attention gives each key head an "
            f"equal share of the query heads. {got}"
        )

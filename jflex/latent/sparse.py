"""`sparse_mla_attention`: latent attention over the keys that each query selects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Int32

from jflex._check.arguments import check_int32, describe_array
from jflex.backends.eight_bits import dequantized_latents
from jflex.entry import PagedCall, Pages, prepare_paged, run_paged
from jflex.latent.attention import checked_latent
from jflex.mods.compose import noop_mask
from jflex.mods.reindex import Positions, reindexed
from jflex.mods.types import ScoreMod
from jflex.options import LatentOptions, LatentOutput, LatentPair, Settings, checked, takes
from jflex.paged.attention import results_of
from jflex.paged.batch import PagedBatch
from jflex.paged.cache import checked_layer
from jflex.paged.latent import LatentCache
from jflex.paged.tokens import slots_of_tokens, token_positions, token_requests
from jflex.types import AnyArray, ArrayOrShape

COPIED_PAGE = 64  # tokens of a page of copied rows: what kernels load at once
COPIED_BYTES = 1 << 28  # the most that is copied
COPIED_HEADS = 32  # with fewer, rows are read where they are


# fmt: off
@overload
def sparse_mla_attention(
    q: AnyArray, cache: LatentCache, batch: PagedBatch, indices: AnyArray, **options: Unpack[LatentOutput]
) -> Array: ...
@overload
def sparse_mla_attention(
    q: AnyArray, cache: LatentCache, batch: PagedBatch, indices: AnyArray, **options: Unpack[LatentPair]
) -> tuple[Array, Array]: ...
# fmt: on
@takes(LatentOptions)
def sparse_mla_attention(
    q: Float[AnyArray, "N Hq W"],
    cache: LatentCache,
    batch: PagedBatch,
    indices: Int32[AnyArray, "N K"],
    *,
    qk_head_dim: int | None = None,
    score_mod: ScoreMod | None = None,
    layer: int | Int[AnyArray, ""] | None = None,
    return_lse: bool = False,
    **options: Unpack[LatentOptions],
) -> Float[Array, "N Hq latent"] | tuple[Float[Array, "N Hq latent"], Float[Array, "N Hq"]]:
    """Latent attention of each query over the keys that it selects, and no others (DeepSeek-V3.2).

    It is `mla_attention`, but query ``n`` attends only to the keys at the positions ``indices[n]`` of its request, and
    reads no others: to the kernel, each query is a request. From 32 heads on, selected rows are copied into pages of
    their own, up to 256 MiB of them, in bfloat16 if the cache has eight bits; otherwise, and in a batch-invariant call,
    they are read where they are, as pages of one token. With all keys selected, the result equals that of
    `mla_attention`.

    A selected position counts as often as it is selected. One below 0, or at or beyond the keys of the request, is
    dropped and never read. What is selected is data, and has no gradient. No mask is implied: select no keys after the
    query, as `select_keys` does, or pass a causal mask, which sees absolute positions.

    Args:
      q: Absorbed, packed queries, as in `mla_attention`.
      indices: Positions of keys within the request of each query, in any order; -1 for none.
      qk_head_dim: As in `mla_attention`.
      score_mod: ``(score, b, h, q_idx, kv_idx) -> score``, at the request and at absolute positions.
      layer: Which layer of a stacked cache, a Python int or traced.
      return_lse: Also return the float32 logsumexp (natural log) of the scores over the selected, visible keys.
      **options: The keywords of `jflex.options.LatentOptions`, as in `mla_attention`.

    Returns:
      The output in latent space, in the dtype of `q`, or a pair of it and the lse. A query that selects no key gives
      zeros and an lse of ``-inf``.

    Raises:
      TypeError: As `mla_attention`; or `indices` are not int32.
      ValueError: As `mla_attention`; or there is not one row of indices for each query, or the batch has trees.
      UnsupportedError: No requested backend supports this call, or a derivative is requested.

    References:
      DeepSeek-AI 2025, DeepSeek-V3.2-Exp: Boosting Long-Context Efficiency with DeepSeek Sparse Attention.

    >>> import jflex
    >>> cache = jflex.paged.LatentCache.create(8, 16, 64, 16, dtype=jnp.float32)
    >>> batch = jflex.paged.PagedBatch(jnp.array([0, 1, 2]), jnp.array([20, 33]), jnp.array([[5, 2, 0], [1, 7, 3]]))
    >>> chosen = jnp.array([[0, 19, 3, -1], [32, 7, 8, 9]])
    >>> sparse_mla_attention(jnp.ones((2, 8, 80)), cache, batch, chosen, qk_head_dim=48).shape
    (2, 8, 64)
    """
    settings = checked(score_mod=score_mod, return_lse=return_lse, **options)
    call = prepare(q, cache, batch, indices, settings, qk_head_dim=qk_head_dim, layer=layer)
    return results_of(call, run_paged(call, settings.implementation), settings, batch)


def prepare(
    q: ArrayOrShape,
    cache: LatentCache,
    batch: PagedBatch,
    indices: Int32[AnyArray, "N K"],
    settings: Settings,
    *,
    qk_head_dim: int | None = None,
    layer: int | AnyArray | None = None,
) -> PagedCall:
    """Checks every argument of `sparse_mla_attention`; q and the rows of the cache may be shapes."""
    q = jnp.asarray(q) if isinstance(q, np.ndarray) else q
    settings = checked_latent("sparse_mla_attention", q, cache, batch, settings, qk_head_dim)
    if batch.ancestors is not None:
        raise ValueError(
            "`batch.ancestors` must be None: a tree hides keys by their rows, and `indices` are positions. Got trees. "
            "Call `mla_attention`, or select the keys of a branch and leave the trees out."
        )
    check_int32("indices", indices, "positions")
    if indices.ndim != 2 or indices.shape[0] != q.shape[0]:
        raise ValueError(
            f"`indices` must be [N, K], a row for each of the {q.shape[0]} queries. Got {describe_array(indices)}. Pad "
            "rows with -1."
        )
    chosen, layer = _Chosen(batch, jnp.asarray(indices), cache.page_size), checked_layer(cache, layer)
    batch_invariant = settings.config is not None and settings.config.batch_invariant
    if _is_copied(q, cache, indices.shape[1]) and not batch_invariant:
        pages = chosen.copied_pages(cache, layer, hides_zeros=settings.mask_mod is None)
    else:
        pages = chosen.pages(cache, layer)
    score = reindexed(settings.score_mod, chosen.positions)
    mask = reindexed(noop_mask if settings.mask_mod is None else settings.mask_mod, chosen.positions_if_selected)
    return prepare_paged("sparse_mla_attention", q, pages, settings._replace(score_mod=score, mask_mod=mask))


def _is_copied(q: ArrayOrShape, cache: LatentCache, selected: int) -> bool:
    """True if selected rows are copied first, so that the Hopper kernel loads 64 of them by TMA.

    H100, jax 0.11.2, bf16, one query, the best 2048 of 65,536 keys, us with a copy and in place: 128 heads 190 and 223,
    16 heads 177 and 108. From 32 on, where nothing was measured, the Hopper kernel is selected. Eight bits are
    dequantized as they are copied, for that kernel takes none.
    """
    queries, heads, width = q.shape
    size = queries * _in_pages(selected) * width * (2 if cache.scale is not None else cache.rows.dtype.itemsize)
    return heads >= COPIED_HEADS and 0 < size <= COPIED_BYTES and (cache.scale is None or q.dtype == jnp.bfloat16)


def _in_pages(selected: int) -> int:
    """Rows of the pages of a query."""
    return -(-selected // COPIED_PAGE) * COPIED_PAGE


class _Chosen:
    """The selected keys as pages, of as many requests as there are queries."""

    def __init__(self, batch: PagedBatch, indices: Int32[Array, "N K"], page_size: int) -> None:
        if not indices.shape[1]:
            indices = jnp.full((indices.shape[0], 1), -1, jnp.int32)
        self.queries = indices.shape[0]
        request = token_requests(batch, self.queries)
        lengths = jnp.asarray(batch.kv_lengths)
        length = lengths[request] if lengths.size else jnp.zeros_like(request)
        slots = slots_of_tokens(batch, request, indices, page_size)
        exists = (indices >= 0) & (indices < length[:, None]) & (request[:, None] >= 0) & (slots >= 0)
        self.slots = jnp.where(exists, slots, 0)
        self.lengths = jnp.where(request >= 0, indices.shape[1], 0)  # none of padding
        # Mods are traced even where there are no queries or keys.
        of_mods = lambda x: x if self.queries else jnp.zeros((1, *x.shape[1:]), x.dtype)
        self.request, self.position = map(of_mods, (jnp.maximum(request, 0), token_positions(batch, self.queries)))
        self.exists, self.indices = map(of_mods, (exists, jnp.where(exists, indices, 0)))

    def positions(self, n: jax.Array, h: jax.Array, _: jax.Array, j: jax.Array) -> Positions:
        """Positions for the mod of the user; the query of request ``n`` is packed query ``n``."""
        return Positions(self.request[n], h, self.position[n], self.indices[n, j])

    def positions_if_selected(self, n: jax.Array, h: jax.Array, i: jax.Array, j: jax.Array) -> Positions:
        """These positions, and whether there is one: for a mask, which a call always has."""
        return self.positions(n, h, i, j)._replace(exists=self.exists[n, j])

    def copied_pages(self, cache: LatentCache, layer: jax.Array | None, *, hides_zeros: bool) -> Pages:
        """The selected rows in pages of their own, with zeros for positions that select nothing."""
        queries, selected = self.slots.shape
        slots = self.slots if layer is None else self.slots + layer * (cache.num_pages * cache.page_size)
        beyond = cache.rows.size // cache.rows.shape[-1]
        slots = jnp.where(self.exists, slots, beyond)
        slots = jnp.pad(slots, ((0, 0), (0, _in_pages(selected) - selected)), constant_values=beyond)
        shape = (slots.size // COPIED_PAGE, COPIED_PAGE, 1, cache.latent_size + cache.rope_size)

        def copied(rows: jax.Array, *of_eight_bits: jax.Array) -> jax.Array:
            copies = [_gathered(x, slots) for x in (rows, *of_eight_bits)]
            if of_eight_bits:
                scale, rope = copies[1:]
                copies = [dequantized_latents(copies[0][..., None, :], scale, rope[..., None, :], jnp.bfloat16)]
            return copies[0].reshape(shape)

        rows = _computed(copied, *(x for x in (cache.rows, cache.scale, cache.rope) if x is not None))
        table = np.arange(shape[0], dtype=np.int32).reshape(queries, -1)
        paged = self._paged(rows, shape[0], jnp.zeros((1,), jnp.int32), table, cache.latent_size)
        return paged._replace(hides_zeros=hides_zeros)

    def pages(self, cache: LatentCache, layer: jax.Array | None) -> Pages:
        """The cache in pages of one token, without a copy."""
        tokens = cache.num_pages * cache.page_size
        reshaped = lambda x, *shape: None if x is None else _computed(lambda x: x.reshape(-1, *shape, x.shape[-1]), x)
        rows, scale, rope = reshaped(cache.rows, 1, 1), reshaped(cache.scale, 1), reshaped(cache.rope, 1, 1)
        first = jnp.zeros((1,), jnp.int32) if layer is None else (layer * tokens).reshape(1)
        paged = self._paged(rows, tokens, first, self.slots, cache.latent_size)
        return paged._replace(key_scale=scale, rope_key=rope)

    def _paged(self, rows: Any, count: int, first: jax.Array, table: AnyArray, latent_size: int) -> Pages:
        """Pages of as many requests as there are queries."""
        indptr = np.arange(self.queries + 1, dtype=np.int32)
        return Pages(rows, rows, count, first, indptr, self.lengths, table, latent_size)


def _gathered(x: jax.Array, slots: jax.Array) -> jax.Array:
    """The rows of the last axis at slots, zeros beyond the last one; small numbers are moved 32 bits at a time.

    H100, jax 0.11.2, 65,536 rows of 576 columns in bfloat16: 67 us one by one, 56 in pairs, 56 by a Triton kernel.
    """
    rows, count = x.reshape(-1, x.shape[-1]), max(1, 4 // x.dtype.itemsize)
    in_words = count > 1 and rows.shape[-1] % count == 0
    if in_words:
        rows = jax.lax.bitcast_convert_type(rows.reshape(len(rows), -1, count), jnp.uint32)
    gathered = rows.at[slots].get(mode="fill", fill_value=0)
    return jax.lax.bitcast_convert_type(gathered, x.dtype).reshape(*slots.shape, -1) if in_words else gathered


def _computed(function: Callable[..., Any], *arrays: Any) -> Any:
    """A function of arrays; of shapes, the shape of its result."""
    return jax.eval_shape(function, *arrays) if isinstance(arrays[0], jax.ShapeDtypeStruct) else function(*arrays)

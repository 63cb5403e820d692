"""`mla_attention`: multi-head latent attention over a paged cache of latent vectors, in the absorbed form."""

from __future__ import annotations

from typing import Unpack, overload

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jflex._check.arguments import check_is_array, check_scale, checked_positive, describe_array
from jflex.entry import PagedCall, check_packed, prepare_paged, run_paged
from jflex.mods.types import ScoreMod
from jflex.options import LatentOptions, LatentOutput, LatentPair, Settings, checked, takes
from jflex.paged.attention import call_sizes, of_packed, pages_of, results_of
from jflex.paged.batch import PagedBatch, check_batch
from jflex.paged.cache import checked_layer
from jflex.paged.eight_bits import QUERIES
from jflex.paged.latent import LatentCache, check_latent_cache
from jflex.types import AnyArray, ArrayOrShape


# fmt: off
@overload
def mla_attention(
    q: AnyArray, cache: LatentCache, batch: PagedBatch, **options: Unpack[LatentOutput]
) -> Array: ...
@overload
def mla_attention(
    q: AnyArray, cache: LatentCache, batch: PagedBatch, **options: Unpack[LatentPair]
) -> tuple[Array, Array]: ...
# fmt: on
@takes(LatentOptions)
def mla_attention(
    q: Float[AnyArray, "N Hq W"],
    cache: LatentCache,
    batch: PagedBatch,
    *,
    qk_head_dim: int | None = None,
    score_mod: ScoreMod | None = None,
    layer: int | Int[AnyArray, ""] | None = None,
    return_lse: bool = False,
    **options: Unpack[LatentOptions],
) -> Float[Array, "N Hq latent"] | tuple[Float[Array, "N Hq latent"], Float[Array, "N Hq"]]:
    """Multi-head latent attention (MLA) of packed, ragged queries over a paged cache of latent vectors.

    It is `paged_attention` with one key head, whose values are the first columns of its keys: a tile of the cache is
    read once for both, by all query heads. Positions, masks, lengths, tables and padding mean what they mean there.

    Queries are *absorbed*: the up-projection of keys is multiplied into the query, and that of values is left to the
    caller. With ``w_uk`` [Hq, nope, latent] and ``w_uv`` [Hq, latent, v]::

        q = concatenate([einsum("nhd,hdc->nhc", q_nope, w_uk), q_rope], axis=-1)
        out = einsum("nhc,hcv->nhv", mla_attention(q, cache, batch, ...), w_uv)

    This equals attention over up-projected keys and values (`flex_attention` with head sizes ``nope + rope`` and ``v``)
    but for rounding. It reads fewer bytes and takes more operations: 2 * (576 + 512) for each score of DeepSeek-V3,
    where the other form takes 2 * (192 + 128). So it is the form of decoding, and the other that of prefill and
    training.

    Args:
      q: Absorbed, packed queries, in the dtype of the cache: latent columns, then the rotated ones. For a cache of
        eight bits, bfloat16 or float32.
      cache: The latent vectors, those of these queries included: `jflex.paged.write_latent` them first.
      qk_head_dim: Head size of queries before they are absorbed, ``nope + rope`` (192 in DeepSeek-V2 and V3): scores
        are scaled by ``qk_head_dim ** -0.5``. The size of a row of the cache has nothing to do with it.
      score_mod: ``(score, b, h, q_idx, kv_idx) -> score``, as in `paged_attention`.
      layer: Which layer of a stacked cache, a Python int or traced; no copy of it is made.
      return_lse: Also return the float32 logsumexp (natural log) of the scores over the visible keys.
      **options: The keywords of `jflex.options.LatentOptions`. No mask is implied. `scale` stands in place of
        `qk_head_dim`, where a model has a factor of its own (YaRN).

    Returns:
      The output in latent space, in the dtype of `q`, or a pair of it and the lse: the fields of an `AttentionState`. A
      request without keys gives zeros and an lse of ``-inf``, and so do padding rows.

    Raises:
      TypeError: An argument has a wrong type, or a mod takes or returns something else than it must.
      ValueError: Neither or both of `qk_head_dim` and `scale` are given, shapes disagree, a mod was made for
        other sizes, or a known value is out of range.
      UnsupportedError: No requested backend supports this call, or a derivative is requested.

    References:
      DeepSeek-AI 2024, DeepSeek-V2, arXiv:2405.04434, section 2.1.

    >>> import jflex
    >>> cache = jflex.paged.LatentCache.create(8, 16, 64, 16, dtype=jnp.float32)
    >>> batch = jflex.paged.PagedBatch(jnp.array([0, 1, 2]), jnp.array([20, 33]), jnp.array([[5, 2, 0], [1, 7, 3]]))
    >>> mla_attention(jnp.ones((2, 8, 80)), cache, batch, qk_head_dim=48).shape
    (2, 8, 64)
    """
    settings = checked(score_mod=score_mod, return_lse=return_lse, **options)
    call = prepare(q, cache, batch, settings, qk_head_dim=qk_head_dim, layer=layer)
    return results_of(call, run_paged(call, settings.implementation), settings, batch)


def prepare(
    q: ArrayOrShape,
    cache: LatentCache,
    batch: PagedBatch,
    settings: Settings,
    *,
    qk_head_dim: int | None = None,
    layer: int | AnyArray | None = None,
) -> PagedCall:
    """Checks every argument of `mla_attention`; q and the rows of the cache may be shapes."""
    q = jnp.asarray(q) if isinstance(q, np.ndarray) else q
    settings = checked_latent("mla_attention", q, cache, batch, settings, qk_head_dim)
    pages = pages_of(cache, batch, checked_layer(cache, layer))._replace(latent_size=cache.latent_size)
    return prepare_paged("mla_attention", q, pages, of_packed(settings, batch, q.shape[1]))


def checked_latent(
    caller: str, q: ArrayOrShape, cache: LatentCache, batch: PagedBatch, settings: Settings, qk_head_dim: int | None
) -> Settings:
    """Checks what `mla_attention` and `sparse_mla_attention` have in common; the settings with the scale of scores."""
    check_latent_cache(cache)
    check_is_array(q, "q")
    got = f"Got q: {describe_array(q)}, cache.rows: {describe_array(cache.rows)}."
    if len(q.shape) != 3 or q.shape[1] == 0:
        raise ValueError(
            f"`q` must have three axes, [N, Hq, {cache.row_size}]: the queries of all requests, packed. {got} "
            "Reshape [B, T, Hq, W] to [B * T, Hq, W], with `qo_indptr` in steps of T."
        )
    if cache.scale is not None:
        if str(q.dtype) not in QUERIES:
            raise TypeError(
                f"`q` must be one of {', '.join(QUERIES)}: the cache holds {cache.rows.dtype} with scales, and "
                f"products with them may be out of the range of float16. {got} Cast `q`."
            )
    elif q.dtype != cache.rows.dtype:
        raise TypeError(f"`q` and `cache` must have one dtype. {got} Cast `q`.")
    if q.shape[2] != cache.row_size:
        raise ValueError(
            f"`q` must have the columns of a row of the cache, {cache.latent_size} latent ones and {cache.rope_size} "
            f"rotated ones. {got} Multiply the up-projection of the keys into the query first."
        )
    settings = settings._replace(scale=_scale_of(caller, qk_head_dim, settings.scale))
    check_batch(batch, cache, q.shape[0])
    check_packed(settings, q, cache.latent_size, call_sizes(batch, q.shape[1]), 1)
    return settings


def _scale_of(caller: str, qk_head_dim: int | None, scale: float | None) -> float:
    """The factor of the scores."""
    if (qk_head_dim is None) == (scale is None):
        raise ValueError(
            f"`{caller}` takes one of `qk_head_dim` and `scale`: the size of a latent row does not tell how scores "
            f"are scaled. Got qk_head_dim={qk_head_dim!r}, scale={scale!r}. Pass the head size of queries before they "
            "are absorbed, nope + rope, as `qk_head_dim` (192 for DeepSeek-V3)."
        )
    if qk_head_dim is None:
        return check_scale(scale, 1)
    return checked_positive(qk_head_dim, "qk_head_dim") ** -0.5

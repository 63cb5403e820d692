"""Checks that calls of latent attention share."""

from __future__ import annotations

from jflex._check.arguments import check_scale, checked_positive, checked_sinks, describe_array
from jflex.mods.array_sizes import CallSizes
from jflex.mods.trace import check_call_sizes
from jflex.options import Settings
from jflex.paged.attention import longest_request
from jflex.paged.batch import PagedBatch, check_batch
from jflex.paged.eight_bits import QUERIES
from jflex.paged.latent import LatentCache, check_latent_cache
from jflex.types import ArrayOrShape


def checked_call(
    caller: str, q: ArrayOrShape, cache: LatentCache, batch: PagedBatch, settings: Settings, qk_head_dim: int | None
) -> float:
    """Checks what `mla_attention` and `sparse_mla_attention` have in common, and returns the factor of the scores."""
    check_latent_cache(cache)
    _check_absorbed(q, cache)
    scale = _scale_of(caller, qk_head_dim, settings.scale)
    check_batch(batch, cache, q.shape[0])
    longest = longest_request(batch)
    sizes = CallSizes(batch.requests, q.shape[1], longest, longest)
    check_call_sizes(settings.score_mod, settings.mask_mod, sizes)
    if settings.sinks is not None:
        checked_sinks(settings.sinks, q.shape[1])
    return scale


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


def _check_absorbed(q: ArrayOrShape, cache: LatentCache) -> None:
    """Raises unless absorbed queries fit a cache."""
    if not (hasattr(q, "shape") and hasattr(q, "dtype")):
        raise TypeError(f"`q` must be an array. Got {type(q).__name__}.")
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

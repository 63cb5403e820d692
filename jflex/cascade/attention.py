"""Cascade attention: keys that several sequences share are read once for all of them.

Queries attend to each level of keys separately, for example to a shared prefix and to their own suffixes; the states
are merged. That is exact for any mod, because positions are absolute, whatever the level of a key.

After Ye et al. 2025, FlashInfer, arXiv:2501.01005, section 3.1.2 (composable formats), and Juravsky et al. 2024,
Hydragen, arXiv:2402.05099.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from jflex._check.arguments import check_int32, describe_array, known_values
from jflex.backends.vector_mods import modified_rows
from jflex.cascade.level import CascadeLevel
from jflex.entry import PagedCall, check_packed, finish_packed, prepare_paged, run_paged
from jflex.mods.array_sizes import CallSizes, last_plus_one
from jflex.mods.reindex import Positions, reindexed
from jflex.mods.types import ScoreMod
from jflex.options import Options, PackedOutput, PackedPair, Settings, checked, takes
from jflex.paged.attention import check_queries, pages_of
from jflex.paged.batch import check_batch, check_rules, indptr_rules
from jflex.paged.cache import checked_layer
from jflex.states.merging import merge_all
from jflex.states.state import AttentionState
from jflex.states.stats import AttentionStats, Stat
from jflex.types import AnyArray


# fmt: off
@overload
def cascade_attention(
    q: AnyArray, levels: Sequence[CascadeLevel], *, positions: AnyArray | None = None, requests: AnyArray | None = None,
    **options: Unpack[PackedOutput],
) -> Array: ...
@overload
def cascade_attention(
    q: AnyArray, levels: Sequence[CascadeLevel], *, positions: AnyArray | None = None, requests: AnyArray | None = None,
    **options: Unpack[PackedPair],
) -> tuple[Array, Any]: ...
# fmt: on
@takes(Options)
def cascade_attention(
    q: Float[AnyArray, "N Hq D"],
    levels: Sequence[CascadeLevel],
    *,
    positions: Int32[AnyArray, " N"] | None = None,
    requests: Int32[AnyArray, " N"] | None = None,
    score_mod: ScoreMod | None = None,
    return_lse: bool = False,
    return_stats: tuple[Stat, ...] = (),
    **options: Unpack[Options],
) -> Float[Array, "N Hq Dv"] | tuple[Float[Array, "N Hq Dv"], Float[Array, "N Hq"] | AttentionStats]:
    """Attention over levels of keys, each shared by groups of queries, merged exactly.

    The result is that of attention over all keys at once, for every mod: mods get absolute positions. If queries lie
    within a shared level (seven tokens of two sequences over the pages of both, say), a causal mask applies there, too.
    It pays if many queries share long keys, which are then read once for all instead of once for each.

    For each query, a key must belong to one level only; on two levels it counts twice. Levels are computed one after
    another, each by its own kernels; the partial outputs are kept in float32. There is no derivative, except on
    ``"reference"``.

    Args:
      q: Packed queries. Those of a group must be neighbors.
      levels: The keys, in any order; an empty sequence gives zeros and an lse of ``-inf``.
      positions: Absolute position of each query, ``q_idx`` of mods; `jflex.paged.token_positions` computes them.
        Required with a mod, and with dropout.
      requests: Request of each query, ``b`` of mods; `jflex.paged.token_requests` computes them. 0 for None.
      score_mod: ``(score, b, h, q_idx, kv_idx) -> score``, on scalars.
      return_lse: Also return the float32 logsumexp (natural log) over all visible keys.
      return_stats: As in `flex_attention`, over the keys of all levels.
      **options: The keywords of `jflex.options.Options`, as in `paged_attention`, at absolute positions. `query_mod`,
        `output_mod` and `sinks` enter once for all levels; rows of a negative request stay zeros. With `requests`,
        `key_mod` and `value_mod` must not use ``b``. With ``normalize="none"``, the outputs of levels add up. Dropped
        weights depend on `requests` and on absolute positions, not on the levels.

    Returns:
      The output in the dtype of `q`, or a pair of it and the lse, or a pair of it and the `AttentionStats`, [N, Hq].

    Raises:
      TypeError: An argument has a wrong type.
      ValueError: Shapes disagree, `positions` are missing, a mod was made for other sizes, or a known value is
        out of range.
      UnsupportedError: No requested backend supports this call, a derivative is requested, or a `key_mod` or a
        `value_mod` uses the request of a key.

    References:
      Ye et al. 2025, FlashInfer, arXiv:2501.01005, section 3.1.2.

    >>> import jflex
    >>> q, prefix = jnp.ones((3, 4, 16)), jnp.ones((1, 32, 2, 16))  # three sequences, one query each, one prefix
    >>> suffix = jnp.ones((3, 8, 2, 16))
    >>> shared = CascadeLevel.dense(prefix, prefix, qo_indptr=jnp.array([0, 3]))
    >>> own = CascadeLevel.dense(
    ...     suffix, suffix, qo_indptr=jnp.arange(4), lengths=jnp.array([8, 1, 5]), start=32)
    >>> cascade_attention(q, [shared, own]).shape
    (3, 4, 16)
    """
    settings = checked(score_mod=score_mod, return_lse=return_lse, return_stats=return_stats, **options)
    call = prepare(q, levels, settings, positions=positions, requests=requests)
    query = None
    if settings.query_mod is not None:
        query = modified_rows(settings.query_mod, jnp.asarray(q), *call.rows)
    used = (level if query is None else level._replace(query=query) for level in call.levels if level is not None)
    states = [run_paged(level, settings.implementation) for level in used]
    empty = lambda: AttentionState.empty(call.out_shape, normalize=settings.normalize, stats=settings.return_stats)
    return finish_packed(settings, merge_all(states) if states else empty(), call.dtype, lambda: call.rows)


class CascadeCall(NamedTuple):
    """A checked call."""

    out_shape: tuple[int, int, int]
    dtype: DTypeLike
    levels: tuple[PagedCall | None, ...]  # a level without queries or without room for keys is None
    rows: tuple[jax.Array, jax.Array]  # the request and the position of each query


def prepare(
    q: Any,
    levels: Sequence[CascadeLevel],
    settings: Settings,
    *,
    positions: Int32[AnyArray, " N"] | None = None,
    requests: Int32[AnyArray, " N"] | None = None,
) -> CascadeCall:
    """Checks every argument of `cascade_attention`; q, keys and values may be shapes."""
    q = jnp.asarray(q) if isinstance(q, np.ndarray) else q
    levels = _checked_levels(levels)
    for level in levels:
        check_queries(q, level.cache)
        if not level.is_dense:
            check_batch(level.groups, level.cache, q.shape[0])
        elif (indptr := known_values(level.groups.qo_indptr)) is not None:
            check_rules(indptr_rules(indptr, q.shape[0]))
    has_mods = settings.vectors.any or settings.score_mod is not None or settings.mask_mod is not None
    positions, requests = _checked_rows(q, positions, requests, settings)
    value_size = levels[0].cache.v.shape[-1] if levels else q.shape[2]
    kv_heads = levels[0].cache.num_kv_heads if levels else None
    sizes = _sizes(q, levels, positions, requests) if has_mods else CallSizes()
    check_packed(settings, q, value_size, sizes, kv_heads)
    if requests is not None:
        settings.vectors.refuse_batch(q.shape[2], value_size, q.dtype, "cascade_attention")
    settings = settings._replace(kept_mod=settings.kept(1 if requests is None else requests, q.shape[1]))
    several = sum(_has_work(level, q.shape[0]) for level in levels) > 1

    def prepared(level: CascadeLevel) -> PagedCall | None:
        if not _has_work(level, q.shape[0]):
            return None
        pages = pages_of(level.cache, level.groups, checked_layer(level.cache, level.layer))
        of_level = _of_level(settings, level, positions, requests)
        return prepare_paged("cascade_attention", q, pages, of_level, is_partial=several)

    rows = jnp.zeros_like(positions) if requests is None else requests, positions
    return CascadeCall((*q.shape[:2], value_size), q.dtype, tuple(map(prepared, levels)), rows)


def _sizes(q: jax.Array, levels: Sequence[CascadeLevel], positions: jax.Array, requests: jax.Array | None) -> CallSizes:
    """The ranges of the indices of mods; for keys, the maximum over levels where it is known."""
    keys = [
        int(np.where(lengths > 0, start + lengths, 0).max(initial=0))
        for start, lengths in ((known_values(level.start), known_values(level.groups.kv_lengths)) for level in levels)
        if start is not None and lengths is not None
    ]
    return CallSizes(
        1 if requests is None else last_plus_one(known_values(requests)),
        q.shape[1],
        last_plus_one(known_values(positions)),
        max(keys, default=None),
        all_batch=requests is None,
    )


def _has_work(level: CascadeLevel, num_tokens: int) -> bool:
    """True if a level has queries, groups and room for keys; without, mods have nothing to read."""
    return 0 not in (num_tokens, level.groups.requests, level.groups.max_pages * level.cache.page_size)


def _of_level(settings: Settings, level: CascadeLevel, positions: jax.Array, requests: jax.Array | None) -> Settings:
    """The settings with mods on groups, indices of packed queries, and indices of the keys of a group.

    Dropout has words of its own for each row, if there are `requests`: then ``b`` of its mod is the row.
    """

    def absolute(g: jax.Array, h: jax.Array, n: jax.Array, j: jax.Array) -> Positions:
        b = jnp.zeros_like(n) if requests is None else requests[n]
        return Positions(b, h, positions[n], level.start[g] + j)

    by_row = lambda g, h, n, j: absolute(g, h, n, j)._replace(b=jnp.zeros_like(n) if requests is None else n)
    of_keys = lambda g, h, j, kv_idx: Positions(jnp.zeros_like(j), h, level.start[g] + j, kv_idx)
    return settings._replace(
        score_mod=reindexed(settings.score_mod, absolute),
        mask_mod=reindexed(settings.mask_mod, absolute),
        key_mod=reindexed(settings.key_mod, of_keys),
        value_mod=reindexed(settings.value_mod, of_keys),
        kept_mod=reindexed(settings.kept_mod, by_row),
    )


def _checked_levels(levels: object) -> tuple[CascadeLevel, ...]:
    if isinstance(levels, CascadeLevel) or not isinstance(levels, Sequence):
        raise TypeError(f"`levels` must be a sequence of `CascadeLevel`. Got {type(levels).__name__}.")
    for number, level in enumerate(levels):
        if not isinstance(level, CascadeLevel):
            raise TypeError(
                f"`levels` must be a sequence of `CascadeLevel`. Element {number} is of type {type(level).__name__}. "
                "Make one with `CascadeLevel.dense` or `CascadeLevel.paged`."
            )
    sizes = {level.cache.v.shape[-1] for level in levels}
    if len(sizes) > 1:
        raise ValueError(f"`levels` must have values of one head size, to be merged. Got {sorted(sizes)}.")
    return tuple(levels)


def _checked_rows(
    q: Any, positions: AnyArray | None, requests: AnyArray | None, settings: Settings
) -> tuple[jax.Array, jax.Array | None]:
    mods = settings.score_mod, settings.mask_mod, settings.query_mod, settings.output_mod
    if positions is None and (settings.dropout_rate or any(mod is not None for mod in mods)):
        raise ValueError(
            "`positions` must be passed with a `score_mod`, a `mask_mod`, a vector mod or a `dropout_rate`: the "
            "absolute position of each query, int32 [N]. `jflex.paged.token_positions(batch, N)` computes them."
        )
    for name, x in (("positions", positions), ("requests", requests)):
        if x is not None:
            check_int32(name, x, "positions" if name == "positions" else "counts")
            if x.shape != q.shape[:1]:
                raise ValueError(f"`{name}` must have one number for each of the {q.shape[0]} queries. Got "
                                 f"{describe_array(x)}.")  # fmt: skip
    positions = jnp.zeros(q.shape[:1], jnp.int32) if positions is None else jnp.asarray(positions)
    return positions, None if requests is None else jnp.asarray(requests)

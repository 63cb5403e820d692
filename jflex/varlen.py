"""Attention over packed sequences of any lengths, `flex_attention_varlen`.

To a backend the packed tokens are one batch entry, with a mask that keeps sequences apart; to mods they are a batch:
``b`` is the sequence, ``q_idx`` and ``kv_idx`` are positions within it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int32

from jflex._call.vector_mods import VectorMods
from jflex._check.arguments import check_is_array, describe_array, device_of, known_values
from jflex.backends.base import Saved
from jflex.backends.vector_mods import modified_rows
from jflex.block_mask.varlen_mask import (
    DEFAULT_BLOCK,
    PackedTokens,
    VarlenBlockMask,
    check_callable,
    checked_boundaries,
    packed_sizes,
    varlen_block_mask,
)
from jflex.entry import Call, check_packed, run
from jflex.entry import prepare as prepare_dense
from jflex.mods.dependence import uses_index
from jflex.mods.reindex import reindexed
from jflex.mods.trace import trace_mask_mod
from jflex.mods.types import ScoreMod
from jflex.options import Options, PackedOutput, PackedPair, Settings, checked, takes
from jflex.states.stats import AttentionStats, Stat
from jflex.types import AnyArray, ArrayOrShape


# fmt: off
@overload
def flex_attention_varlen(
    q: AnyArray, k: AnyArray, v: AnyArray, *, cu_seqlens_q: AnyArray, cu_seqlens_k: AnyArray,
    block_mask: VarlenBlockMask | None = None, **options: Unpack[PackedOutput],
) -> Array: ...
@overload
def flex_attention_varlen(
    q: AnyArray, k: AnyArray, v: AnyArray, *, cu_seqlens_q: AnyArray, cu_seqlens_k: AnyArray,
    block_mask: VarlenBlockMask | None = None, **options: Unpack[PackedPair],
) -> tuple[Array, Any]: ...
# fmt: on
@takes(Options)
def flex_attention_varlen(
    q: Float[AnyArray, "N Hq D"],
    k: Float[AnyArray, "M Hkv D"],
    v: Float[AnyArray, "M Hkv Dv"],
    *,
    cu_seqlens_q: Int32[AnyArray, " R_and_1"],
    cu_seqlens_k: Int32[AnyArray, " R_and_1"],
    score_mod: ScoreMod | None = None,
    block_mask: VarlenBlockMask | None = None,
    return_lse: bool = False,
    return_stats: tuple[Stat, ...] = (),
    **options: Unpack[Options],
) -> Float[Array, "N Hq Dv"] | tuple[Float[Array, "N Hq Dv"], Float[Array, "N Hq"] | AttentionStats]:
    """Attention over packed sequences of any lengths, forward and backward, as if each were computed alone.

    Sequence ``r`` has the queries ``cu_seqlens_q[r]`` to ``cu_seqlens_q[r + 1]``, and its keys likewise; either may be
    empty. Mods get ``b = r``, and ``q_idx`` and ``kv_idx`` count from 0 within the sequence. Nothing else differs from
    `flex_attention`.

    The boundaries are data: one program serves all of them. Tokens after the last boundary are padding. They neither
    attend nor are attended to: out is 0, lse ``-inf``, their gradients 0; their contents, even NaN, have no effect.
    Traced boundaries are not checked; if they do not ascend, results are undefined. Checking others waits for their
    values.

    Args:
      q: The queries of all sequences, concatenated.
      cu_seqlens_q: Where the queries of each sequence begin, and where the last ones end: int32, from 0 to at most N.
      cu_seqlens_k: The same for the keys, from 0 to at most M. Pass the same array for self-attention.
      score_mod: ``(score, b, h, q_idx, kv_idx) -> score``, on scalars, as in `flex_attention`.
      block_mask: From `varlen_block_mask`, for the same boundaries and packed lengths; it alone defines the mask. Its
        boundaries must equal those of the call; traced ones are not compared. Without one, each call makes one of the
        `mask_mod`.
      return_lse: Also return the float32 logsumexp (natural log) of the scores over the visible keys.
      return_stats: As in `flex_attention`; padding tokens have the statistics of a row that attends to no key.
      **options: The keywords of `jflex.options.Options`, at the sequence ``b`` and positions within it. Padding tokens
        never get to vector mods, and have no sinks. What is dropped does not depend on the packing.

    Returns:
      The output in the dtype of `q`, or a pair of it and the lse: the fields of an `AttentionState`; or a pair of it
      and the `AttentionStats`, [N, Hq].

    Raises:
      TypeError: An argument has a wrong type.
      ValueError: Shapes disagree, known boundaries do not ascend or reach beyond the tokens, a mod was made for
        other sizes, or `block_mask` is for other boundaries.
      UnsupportedError: No requested backend supports this call; the message gives the reason of each.

    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 300, 4, 32))
    >>> boundaries = jnp.array([0, 100, 100, 290], jnp.int32)  # of 100, 0 and 190 tokens, and padding
    >>> causal = lambda b, h, q_idx, kv_idx: q_idx >= kv_idx
    >>> out = flex_attention_varlen(q, k, v, cu_seqlens_q=boundaries, cu_seqlens_k=boundaries, mask_mod=causal)
    >>> out.shape, bool((out[100] == v[100]).all()), float(jnp.abs(out[290:]).max())
    ((300, 4, 32), True, 0.0)

    For a model of many layers, make the mask once:

    >>> mask = varlen_block_mask(boundaries, boundaries, 300, 300, mask_mod=causal)
    >>> again = flex_attention_varlen(q, k, v, cu_seqlens_q=boundaries, cu_seqlens_k=boundaries, block_mask=mask)
    >>> bool(jnp.allclose(again, out, atol=1e-5))
    True
    """
    settings = checked(score_mod=score_mod, return_lse=return_lse, return_stats=return_stats, **options)
    call, q_ends, kv_ends = prepare(
        q, k, v, settings, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, block_mask=block_mask
    )
    exists = settings.vectors.any and q_ends.size > 1
    tokens = PackedTokens.from_boundaries(q_ends, kv_ends, (q.shape[0], k.shape[0])) if exists else None
    modified = _Modified(settings.vectors, tokens, q_ends, kv_ends)
    q, k, v = modified.inputs(*map(jnp.asarray, (q, k, v)))
    # NaN in padding would survive a weight of 0, in the GEMMs of the block that the last boundary cuts.
    q, k, v = (_without_padding(x, ends)[None] for x, ends in ((q, q_ends), (k, kv_ends), (v, kv_ends)))
    saved = run(call._replace(inputs=call.inputs._replace(query=q, key=k, value=v)), settings.implementation)
    out = modified.output(saved.out[0], None if settings.normalize == "none" else saved.lse[0].T)
    out = _without_padding(out, q_ends)  # without a mod already 0 there, and lse -inf; their cotangents need not be
    if not (settings.return_lse or settings.return_stats):
        return out
    rows = lambda x, fill: _without_padding(x[0].T, q_ends, fill)
    row_max = None if saved.max is None else rows(saved.max, -jnp.inf)
    entropy = None if saved.entropy is None else rows(saved.entropy, 0)
    return settings.results(Saved(out, rows(saved.lse, -jnp.inf), row_max, entropy))


class PackedCall(NamedTuple):
    """A checked call of packed sequences; `call` is one batch entry, with shapes of query, key and value."""

    call: Call
    q_ends: jax.Array
    kv_ends: jax.Array


def prepare(
    q: ArrayOrShape,
    k: ArrayOrShape,
    v: ArrayOrShape,
    settings: Settings,
    *,
    cu_seqlens_q: AnyArray,
    cu_seqlens_k: AnyArray,
    block_mask: VarlenBlockMask | None = None,
) -> PackedCall:
    """Checks every argument of `flex_attention_varlen`, and makes the mask if there is none; q, k, v may be shapes."""
    score_mod, mask_mod = settings.score_mod, settings.mask_mod
    for name, x, axes in (("q", q, "[N, Hq, D]"), ("k", k, "[M, Hkv, D]"), ("v", v, "[M, Hkv, Dv]")):
        check_is_array(x, name)
        if len(x.shape) != 3:
            raise ValueError(
                f"`{name}` must have three axes, {axes}, its tokens packed. Got {describe_array(x)}. A batch of "
                "sequences of one length goes to `flex_attention`."
            )
    lengths, heads = (q.shape[0], k.shape[0]), q.shape[1]
    q_ends, kv_ends = checked_boundaries(cu_seqlens_q, cu_seqlens_k, lengths)
    check_callable(score_mod, "score_mod", "(score, b, h, q_idx, kv_idx) -> score")
    check_packed(settings, q, v.shape[2], packed_sizes(q_ends, kv_ends, heads, "a call"), k.shape[1])
    if block_mask is None:
        H, block_size = None, _own_block_size(settings.config)
        if mask_mod is not None:
            check_callable(mask_mod, "mask_mod", "(b, h, q_idx, kv_idx) -> bool")
            H = heads if uses_index(trace_mask_mod(mask_mod)[0], "h") else None
        block_mask = varlen_block_mask(q_ends, kv_ends, *lengths, mask_mod=mask_mod, H=H, block_size=block_size)
    else:
        _check_mask(block_mask, mask_mod, q_ends, kv_ends, lengths)
    kept = settings.kept(q_ends.size - 1, heads)
    if score_mod is not None or kept is not None:
        tokens = PackedTokens.from_boundaries(q_ends, kv_ends, lengths)
        score_mod, kept = (reindexed(mod, tokens.positions) if tokens.sequences else None for mod in (score_mod, kept))
    rate = 0.0 if kept is None else settings.dropout_rate
    dense = settings._replace(query_mod=None, key_mod=None, value_mod=None, output_mod=None)
    dense = dense._replace(score_mod=score_mod, mask_mod=None, kept_mod=kept, dropout_rate=rate)
    call = prepare_dense(_batch_of_one(q), _batch_of_one(k), _batch_of_one(v), dense, block_mask=block_mask)
    return PackedCall(call._replace(caller="flex_attention_varlen"), q_ends, kv_ends)


class _Modified(NamedTuple):
    """The vector mods of packed tokens, and where these are; no tokens without mods, or where there is no sequence.

    The mods get no padding, which may be NaN: a zero cotangent times the derivative of NaN would be NaN, in the
    gradients of captured arrays.
    """

    vectors: VectorMods
    tokens: PackedTokens | None
    q_ends: jax.Array
    kv_ends: jax.Array

    def inputs(self, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The packed arrays, as the mods make them; padding is arbitrary but finite."""
        if self.tokens is None:
            return q, k, v
        queries = self.tokens.q_sequence, self.tokens.q_position, self.q_ends
        keys = self.tokens.kv_sequence, self.tokens.kv_position, self.kv_ends
        arrays = ((self.vectors.query, q, queries), (self.vectors.key, k, keys), (self.vectors.value, v, keys))
        q, k, v = (x if mod is None else self._rows(mod, x, *where) for mod, x, where in arrays)
        return q, k, v

    def output(self, out: jax.Array, lse: jax.Array | None) -> jax.Array:
        """The packed output, as the mod makes it."""
        if self.tokens is None or self.vectors.output is None:
            return out
        pair = out, None if lse is None else _without_padding(lse, self.q_ends)
        return self._rows(self.vectors.output, pair, self.tokens.q_sequence, self.tokens.q_position, self.q_ends)

    def _rows(
        self, mod: Callable[..., ArrayLike] | None, x: Any, sequence: jax.Array, position: jax.Array, ends: jax.Array
    ) -> jax.Array:
        assert self.tokens is not None
        first, lse = x if isinstance(x, tuple) else (x, None)
        first, count = _without_padding(first, ends, 1), first.shape[0]
        sequence = jnp.clip(sequence, 0, self.tokens.sequences - 1)  # of padding: any
        rows = (first, lse) if isinstance(x, tuple) else first
        return modified_rows(mod, rows, sequence[:count], position[:count])


def _batch_of_one(x: ArrayOrShape) -> jax.ShapeDtypeStruct:
    """The shape of ``x[None]``, on the device of `x`."""
    device = device_of(x)
    sharding = None if device is None else jax.sharding.SingleDeviceSharding(device)
    dtype = jax.dtypes.canonicalize_dtype(x.dtype) if isinstance(x, np.ndarray) else x.dtype
    return jax.ShapeDtypeStruct((1, *x.shape), dtype, sharding=sharding)


def _without_padding(x: jax.Array, ends: Int32[Array, " R_and_1"], fill: float = 0) -> jax.Array:
    """Overwrites padding, the tokens after the last boundary, and clears their cotangents."""
    known = known_values(ends)
    if known is not None and known[-1] == x.shape[0]:
        return x
    inside = lax.broadcasted_iota(jnp.int32, x.shape, 0) < ends[-1]
    return jnp.where(inside, x, jnp.full_like(x, fill))


def _own_block_size(config: object) -> tuple[int, int]:
    """Block size of a mask made for one call: no smaller than the user's tiles."""
    tiles = [getattr(config, name, None) for name in ("forward", "dkv", "dq", "decode")]
    sizes = [(tile.block_q, tile.block_kv) for tile in tiles if tile is not None]
    return max([DEFAULT_BLOCK, *(q for q, _ in sizes)]), max([DEFAULT_BLOCK, *(kv for _, kv in sizes)])


def _check_mask(
    block_mask: object, mask_mod: object, q_ends: jax.Array, kv_ends: jax.Array, lengths: tuple[int, int]
) -> None:
    remedy = "Make it with `varlen_block_mask(cu_seqlens_q, cu_seqlens_k, {}, {}, mask_mod=...)`.".format(*lengths)
    if not isinstance(block_mask, VarlenBlockMask):
        raise TypeError(
            f"`block_mask` must be a `VarlenBlockMask`, which keeps sequences apart. Got {type(block_mask).__name__}. "
            f"{remedy}"
        )
    if mask_mod is not None:
        raise ValueError(
            "`block_mask` and `mask_mod` cannot both be given: the mask was made with its own mask_mod. Combine them: "
            "varlen_block_mask(..., mask_mod=and_masks(f, g))."
        )
    if block_mask.seq_lengths != lengths:
        raise ValueError(
            "`block_mask` is for {} packed queries and {} keys, the call has {} and {}. ".format(
                *block_mask.seq_lengths, *lengths
            )
            + remedy
        )
    for name, ends in (("cu_seqlens_q", q_ends), ("cu_seqlens_k", kv_ends)):
        made_for, known = known_values(getattr(block_mask, name)), known_values(ends)
        if made_for is not None and known is not None and not np.array_equal(made_for, known):
            raise ValueError(
                f"`block_mask` was made for other boundaries: its `{name}` is {made_for.tolist()}, that of the call "
                f"{known.tolist()}. {remedy}"
            )

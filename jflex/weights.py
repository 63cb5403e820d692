"""`attention_weights`: the weights of chosen queries as a dense array, for looking at."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Int32

from jflex._check.arguments import describe_array, known_values
from jflex._mesh import match_manual_axes, partitioned_by_xla
from jflex.backends.base import Inputs
from jflex.backends.dense_scores import contained_scores, modified, softmax
from jflex.backends.lengths import bounded_inputs, with_lengths_as_mask
from jflex.block_mask.dense import elements_at
from jflex.block_mask.lists import PARTIAL, block_count, states_from_lists
from jflex.block_mask.mask import BlockMask
from jflex.entry import prepare, with_modified_inputs
from jflex.mods.compose import noop_mask
from jflex.mods.signature import answers_keywords
from jflex.mods.trace import trace_mask_mod
from jflex.mods.types import MaskMod, ScoreMod, VectorMod
from jflex.options import Settings
from jflex.types import AnyArray, Key, Query, Weights
from pallas_kernels.spec import AttentionSpec

MOST_WEIGHTS = 1 << 24
"""How many weights a call without `rows` returns at most: 64 MiB."""

_ELEMENTS_PER_STEP = 1 << 22  # scores, or elements of the block of keys, in float32
_LEAST_KEYS = 128  # in a block: fewer make the loop long


@answers_keywords
def attention_weights(
    query: Query,
    key: Key,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    *,
    mask_mod: MaskMod | None = None,
    query_mod: VectorMod | None = None,
    key_mod: VectorMod | None = None,
    kv_lengths: Int32[AnyArray, " B"] | None = None,
    sinks: Float[AnyArray, " _Hq"] | None = None,
    scale: float | None = None,
    layout: str = "BTNH",
    rows: Int[AnyArray, " R"] | Sequence[int] | None = None,
) -> Weights:
    """The softmax weights of chosen queries, which kernels never store: for plots, statistics and debugging.

    Each row is the softmax over the visible keys, 0 where masked, and all 0 for a query that attends to no key. Summed
    over the keys with `value`, it gives that query's output of `flex_attention`. Arguments mean the same as there:
    `q_idx` is the index of the query in `query`, whatever its place in `rows`.

    This is plain JAX, not a kernel: it runs on every platform, under `jax.jit` and `jax.vmap`, and JAX differentiates
    it, also with respect to captured arrays. Scores are computed in float32 at the highest precision (in float64 from
    float64), a block of keys at a time; blocks that a `block_mask` does not list are computed too. Memory grows with
    R * S, not with T * S.

    Args:
      query: In `layout`.
      key: In `layout`, or with batch size 1, shared by all of the batch.
      block_mask: Made for all T queries.
      sinks: With them, the weights of a row are less than 1 together.
      rows: Indices of the R queries, integers in any order, negative ones from the end. They may be traced; then those
        out of range are clamped. None for all queries, if the result has at most 2**24 weights.

    Returns:
      float32 [B, Hq, R, S] in both layouts.

    Raises:
      TypeError: As `flex_attention`; or `rows` are not integers.
      ValueError: As `flex_attention`; or `rows` are not one-dimensional, are out of range, or are None and the result
        would be larger.

    >>> import jax.numpy as jnp, jflex
    >>> q = k = jnp.zeros((1, 6, 1, 8))
    >>> mod, mask = jflex.scores.alibi(jnp.ones(1)), jflex.masks.sliding_window(2)
    >>> weights = jflex.attention_weights(q, k, mod, mask_mod=mask, rows=[1, -1])
    >>> for row in weights[0, 0].tolist():
    ...     print([round(x, 2) for x in row])
    [0.27, 0.73, 0.0, 0.0, 0.0, 0.0]
    [0.0, 0.0, 0.0, 0.09, 0.24, 0.67]

    All rows in characters, each relative to its greatest weight:

    >>> weights = jflex.attention_weights(q, k, mod, mask_mod=mask)[0, 0]
    >>> for row in weights / weights.max(axis=-1, keepdims=True):
    ...     print("".join("·░▒▓█"[round(4 * x)] for x in row.tolist()))
    █·····
    ░█····
    ░░█···
    ·░░█··
    ··░░█·
    ···░░█
    """
    settings = Settings(score_mod, mask_mod, query_mod, key_mod, sinks=sinks, scale=scale)
    call = prepare(
        query, key, None, settings, block_mask=block_mask, kv_lengths=kv_lengths, layout=layout, has_value=False
    )
    spec, inputs = with_modified_inputs(call)[:2]
    chosen = _checked_rows(rows, spec)
    if spec.is_empty or not chosen.size:
        return jnp.zeros((spec.B, spec.Hq, chosen.size, spec.S), jnp.float32)
    per_key = spec.B * spec.Hq * max(chosen.size, spec.D)
    size = min(spec.S, max(_LEAST_KEYS, _ELEMENTS_PER_STEP // per_key))
    compute = functools.partial(_weights, spec, size=size)
    compute = partitioned_by_xla(compute, lambda: _out_sharding(spec, inputs))
    return compute(*match_manual_axes((inputs, chosen)))


def _out_sharding(spec: AttentionSpec, inputs: Inputs) -> PartitionSpec:
    """Batch and heads as those of `query`, in a mesh with explicit axes."""
    axes = jax.typeof(inputs.query).sharding.spec
    batch, heads = axes[0], axes[2 if spec.layout == "BTNH" else 1]
    return PartitionSpec(batch, heads, None, None)


def _checked_rows(rows: AnyArray | Sequence[int] | None, spec: AttentionSpec) -> Int32[Array, " R"]:
    """The rows, from 0 to T - 1; all of them for None."""
    T = spec.T
    if rows is None:
        _check_all_rows(spec)
        return jnp.arange(T, dtype=jnp.int32)
    rule = "`rows` must be an integer array [R] or a sequence of integers, the indices of queries"
    if isinstance(rows, Sequence) and all(isinstance(x, int | np.integer) for x in rows):
        rows = np.asarray(rows, None if len(rows) else np.int32)
    if not isinstance(rows, jax.Array | np.ndarray):
        element = f" of {type(rows[0]).__name__}" if isinstance(rows, list | tuple) else ""
        raise TypeError(f"{rule}. Got {type(rows).__name__}{element}; pass `jnp.asarray(rows, jnp.int32)`.")
    if not jnp.issubdtype(rows.dtype, jnp.integer):
        hint = "pass `np.flatnonzero(rows)`" if rows.dtype == bool else "cast it with `.astype(jnp.int32)`"
        raise TypeError(f"{rule}. Got {describe_array(rows)}; {hint}.")
    if rows.ndim != 1:
        hint = "For one query, pass `rows[None]`." if rows.ndim == 0 else "Pass `rows.reshape(-1)`."
        raise ValueError(f"{rule}. Got {describe_array(rows)}. {hint}")
    known = known_values(rows)
    if known is not None and (outside := (known < -T) | (known >= T)).any():
        raise ValueError(
            f"`rows` must lie between 0 and T - 1, or between -T and -1 from the end, for the {T} queries. Got "
            f"{known[outside][0]} at index {int(np.argmax(outside))}. Leave it out, or clamp with `jnp.clip(rows, 0, "
            f"{T} - 1)`."
        )
    rows = jnp.asarray(rows)
    rows = jnp.where(rows < 0, rows + T, rows) if jnp.issubdtype(rows.dtype, jnp.signedinteger) else rows
    return jnp.clip(rows, 0, max(T - 1, 0)).astype(jnp.int32)


def _check_all_rows(spec: AttentionSpec) -> None:
    sizes = (spec.B, spec.Hq, spec.T, spec.S)
    if math.prod(sizes) > MOST_WEIGHTS:
        raise ValueError(
            f"`rows` must be given where the weights of all queries, [B, Hq, T, S] = {list(sizes)}, are more than "
            f"{MOST_WEIGHTS} numbers; these are {math.prod(sizes)}. Pass the indices of the queries to look at, "
            "`rows=jnp.array([0, 100])`."
        )


@jax.jit(static_argnames=("spec", "size"))
def _weights(spec: AttentionSpec, inputs: Inputs, rows: Int32[Array, " R"], size: int) -> jax.Array:
    """The weights of some rows; scores are computed for `size` keys at a time, and again in a backward pass."""
    if spec.kv_lengths:
        spec, inputs = with_lengths_as_mask(spec, None), bounded_inputs(spec, inputs, None)
    exact, by_heads = jnp.dtype(spec.exact), lambda x: x if spec.layout == "BNTH" else x.swapaxes(1, 2)
    query = by_heads(inputs.query)[:, :, rows].astype(exact)
    query = query.reshape(spec.B, spec.Hkv, spec.group * rows.size, spec.D)  # the group shares a key head

    visible_at = _visibility(spec, inputs, rows)

    @jax.checkpoint
    def block(kv_idx: Int32[Array, " K"]) -> jax.Array:
        key = jnp.take(inputs.key, kv_idx, axis=1 if spec.layout == "BTNH" else 2)
        key = jnp.broadcast_to(by_heads(key).astype(exact), (spec.B, spec.Hkv, size, spec.D))
        score = contained_scores(query, key).reshape(spec.B, spec.Hq, rows.size, size)
        score = score * jnp.asarray(spec.scale, exact)
        visible = visible_at(kv_idx)
        if spec.score_mod is not None:
            b, h = (jax.lax.broadcasted_iota(jnp.int32, score.shape, axis) for axis in range(2))
            q_kv = (jnp.broadcast_to(x, score.shape) for x in (rows[:, None], kv_idx))
            raw = score.astype(jnp.float32)
            score = modified(spec.score_mod, inputs.captured.score, raw, (b, h, *q_kv), visible).astype(exact)
        return jnp.where(visible, score, -jnp.inf)

    count = block_count(spec.S, size)
    kv_idx = jnp.minimum(jnp.arange(count * size, dtype=jnp.int32), spec.S - 1)
    score = jax.lax.map(block, kv_idx.reshape(count, size))
    score = jnp.moveaxis(score, 0, 3).reshape(spec.B, spec.Hq, rows.size, count * size)[..., : spec.S]
    return softmax(score, jnp.bool_(True), inputs.sinks)[0].astype(jnp.float32)


def _visibility(
    spec: AttentionSpec, inputs: Inputs, rows: Int32[Array, " R"]
) -> Callable[[Int32[Array, " K"]], Bool[Array, "#B #Hq #R #K"]]:
    """Tells which of some keys the rows attend to."""
    if spec.mask_mod is None and spec.blocks is None:
        return lambda _: jnp.ones((1, 1, 1, 1), jnp.bool_)
    lengths, size = (spec.T, spec.S), spec.block_size
    if inputs.lists is None or size is None:
        states, size = jnp.full((spec.B, spec.Hq, 1, 1), PARTIAL, jnp.int8), lengths
    else:
        states = states_from_lists(inputs.lists)
    mask = spec.mask_mod or trace_mask_mod(noop_mask)[0]
    return lambda kv_idx: elements_at(mask, inputs.captured.mask, states, (rows, kv_idx), lengths, size)

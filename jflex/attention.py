"""`flex_attention`: validate, build the AttentionSpec, select a backend, run."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from jflex import backends
from jflex._call.checks import (
    check_arrays,
    check_block_mask,
    check_config,
    check_lse,
    check_normalize,
    check_scale,
    checked_sinks,
    current_device,
    current_precision,
    warn_of_layout,
)
from jflex._call.dispatch import Implementation, select_forward, warn_of_new_numbers
from jflex._call.dropout import KeptMod, check_dropout, kept_mod
from jflex._call.kv_lengths import check_kv_lengths, known_keys, warn_of_alignment
from jflex._call.sinks import fold_sinks
from jflex._call.vector_mods import VectorMods, modified_inputs, modified_output
from jflex._jax import custom_vjp
from jflex._jax.manual_axes import match_manual_axes
from jflex._jax.partitioning import refuse_divided_tokens
from jflex.backends.base import Inputs, Saved
from jflex.block_mask.lists import BlockLists
from jflex.block_mask.mask import BlockMask
from jflex.config import Config
from jflex.mods.array_sizes import CallSizes, check_requirements
from jflex.mods.signature import answers_keywords
from jflex.mods.trace import TracedMod, mod_requirements, trace_mask_mod, trace_score_mod
from jflex.mods.types import MaskMod, OutputMod, ScoreMod, VectorMod
from jflex.states.stats import AttentionStats, Stat, check_stats, select_stats, stats_of_no_keys
from jflex.types import AnyArray, Key, Lse, Out, Query, Value
from pallas_kernels.spec import AttentionSpec, Blocks, Captured, Dense, Device, Dropout, Mods, Numerics, Sizes


# Return types, by `return_lse` and `return_stats`.
# fmt: off
@overload
def flex_attention(
    query: AnyArray, key: AnyArray, value: AnyArray, score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None, *, mask_mod: MaskMod | None = None,
    query_mod: VectorMod | None = None, key_mod: VectorMod | None = None, value_mod: VectorMod | None = None,
    output_mod: OutputMod | None = None, kv_lengths: AnyArray | None = None,
    normalize: Literal["softmax", "none"] = "softmax",
    sinks: AnyArray | None = None, scale: float | None = None, layout: str = "BTNH",
    return_lse: Literal[False] = False, return_stats: tuple[()] = (), dropout_rate: float = 0.0,
    dropout_key: AnyArray | None = None, implementation: Implementation = None, config: Config | None = None,
) -> Array: ...
@overload
def flex_attention(
    query: AnyArray, key: AnyArray, value: AnyArray, score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None, *, mask_mod: MaskMod | None = None,
    query_mod: VectorMod | None = None, key_mod: VectorMod | None = None, value_mod: VectorMod | None = None,
    output_mod: OutputMod | None = None, kv_lengths: AnyArray | None = None,
    normalize: Literal["softmax", "none"] = "softmax",
    sinks: AnyArray | None = None, scale: float | None = None, layout: str = "BTNH",
    return_lse: Literal[True], return_stats: tuple[()] = (), dropout_rate: float = 0.0,
    dropout_key: AnyArray | None = None, implementation: Implementation = None, config: Config | None = None,
) -> tuple[Array, Array]: ...
@overload
def flex_attention(
    query: AnyArray, key: AnyArray, value: AnyArray, score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None, *, mask_mod: MaskMod | None = None,
    query_mod: VectorMod | None = None, key_mod: VectorMod | None = None, value_mod: VectorMod | None = None,
    output_mod: OutputMod | None = None, kv_lengths: AnyArray | None = None,
    normalize: Literal["softmax", "none"] = "softmax",
    sinks: AnyArray | None = None, scale: float | None = None, layout: str = "BTNH",
    return_lse: bool, return_stats: tuple[()] = (), dropout_rate: float = 0.0,
    dropout_key: AnyArray | None = None, implementation: Implementation = None, config: Config | None = None,
) -> Array | tuple[Array, Array]: ...
@overload
def flex_attention(
    query: AnyArray, key: AnyArray, value: AnyArray, score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None, *, mask_mod: MaskMod | None = None,
    query_mod: VectorMod | None = None, key_mod: VectorMod | None = None, value_mod: VectorMod | None = None,
    output_mod: OutputMod | None = None, kv_lengths: AnyArray | None = None,
    normalize: Literal["softmax", "none"] = "softmax",
    sinks: AnyArray | None = None, scale: float | None = None, layout: str = "BTNH",
    return_lse: Literal[False] = False, return_stats: tuple[Stat, ...], dropout_rate: float = 0.0,
    dropout_key: AnyArray | None = None, implementation: Implementation = None, config: Config | None = None,
) -> tuple[Array, AttentionStats]: ...
# fmt: on
@answers_keywords
def flex_attention(
    query: Query,
    key: Key,
    value: Value,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    *,
    mask_mod: MaskMod | None = None,
    query_mod: VectorMod | None = None,
    key_mod: VectorMod | None = None,
    value_mod: VectorMod | None = None,
    output_mod: OutputMod | None = None,
    kv_lengths: Int32[AnyArray, " B"] | None = None,
    normalize: Literal["softmax", "none"] = "softmax",
    sinks: Float[AnyArray, " _Hq"] | None = None,
    scale: float | None = None,
    layout: str = "BTNH",
    return_lse: bool = False,
    return_stats: tuple[Stat, ...] = (),
    dropout_rate: float = 0.0,
    dropout_key: AnyArray | None = None,
    implementation: Implementation = None,
    config: Config | None = None,
) -> Out | tuple[Out, Lse] | tuple[Out, AttentionStats]:
    """Attention whose scores and sparsity are ordinary JAX functions, fused into one kernel.

    Each score is ``scale * <query, key>`` in float32, passed through `score_mod`; masked keys do not enter the softmax,
    and blocks that a `block_mask` does not list are never read. Query head ``h`` attends to key head
    ``h // (Hq // Hkv)``. A query that attends to no key gives zeros, an lse of ``-inf`` and zero gradients.

    Gradients flow from output, lse and entropy into query, key, value and every floating-point array that `score_mod`
    or a vector mod captures. Mods are traced: they may close over arrays and tracers, and new values of captured arrays
    recompile nothing.

    Args:
      query: In `layout`. Query and key may be ``float8_e4m3fn`` or ``float8_e5m2``, for inference: there are no
        gradients then. `scale` or a `score_mod` holds what descales them.
      key: In `layout` and the dtype of `query`; `key` and `value` may have batch size 1, shared by all of the batch.
      value: In `layout` and the dtype of `query`; bfloat16 or float16 beside a query of eight bits.
      score_mod: ``(score, b, h, q_idx, kv_idx) -> score``, on scalars: a float32 and four int32. ``h`` is the query
        head. An array that it indexes by one of these must be long enough; `jnp.minimum` clamps an index on purpose.
      block_mask: Which blocks of keys a block of queries visits, from `create_block_mask`.
      mask_mod: ``(b, h, q_idx, kv_idx) -> bool``, on scalars, in place of a BlockMask: no block is skipped.
      query_mod: ``(query[D], b, h, q_idx) -> [D]``, on each query before its products with keys: a rotation, say
        (`jflex.rope`). A vector mod sees one vector, in float32 (float64 of a float64 array), and int32 scalars; it
        must return the same size and dtype, which is then rounded once to the dtype of the array. Here these mods are
        not fused into the kernel: the modified arrays are stored.
      key_mod: ``(key[D], b, h_kv, kv_idx) -> [D]``, likewise on each key; ``h_kv`` is the key head. Keys and values of
        batch size 1 stay shared, unless a mod uses ``b``: then each batch entry gets its own.
      value_mod: ``(value[Dv], b, h_kv, kv_idx) -> [Dv]``, likewise on each value.
      output_mod: ``(out[Dv], lse, b, h, q_idx) -> [Dv]``, on each output before it is returned. ``lse`` is that of the
        query; with ``normalize="none"`` it is None. A query that attends to no key comes as zeros and an lse of
        ``-inf``. The lse that is returned is the unmodified one.
      kv_lengths: How many keys each batch entry has, int32 [B] of 0 to S. Keys at or beyond the length are masked,
        whatever the mask says, and not read where possible; their contents, even NaN, affect neither output nor
        gradients. Lengths are data: one program serves all of them. Traced lengths are not checked but clamped to 0
        and S; checking others waits for their values.
      normalize: ``"none"`` takes what `score_mod` returns as the weights themselves, 0 where masked: sigmoid attention
        with `jflex.scores.sigmoid`, say. There is no lse then, and there are no sinks.
      sinks: A natural logit for each query head, which enters the denominator of its softmax and has no value: learned
        ones get gradients. See `with_sinks`; the lse includes them, so states that are to be merged must have none.
      scale: Multiplies the raw scores; ``D ** -0.5`` for None.
      layout: ``"BTNH"``, or ``"BNTH"`` for [B, Hq, T, D], [B, Hkv, S, D], [B, Hkv, S, Dv].
      return_lse: Also return the float32 logsumexp (natural log) of the scores over the visible keys.
      return_stats: Also return these statistics of each row, computed in the kernel: of ``"lse"``, ``"max"`` (the
        largest score, without a gradient) and ``"entropy"`` (of the weights, in nats). See `AttentionStats`. Not
        together with `return_lse`.
      dropout_rate: Probability that a weight is dropped after the softmax; the others are multiplied by ``1 / (1 -
        dropout_rate)``. A Python number, at least 0 and less than 1, part of the program. The lse is that without
        dropout.
      dropout_key: A random key, for a rate above 0; a new one recompiles nothing. What it drops depends on it and on
        ``b, h, q_idx, kv_idx`` alone, not on tiles, implementation or sharding. Keys [B, Hq] are for a batch entry and
        a head each; of an axis of size 1, all drop the same weights. Not used at a rate of 0.
      implementation: ``"mosaic_gpu"``, ``"triton"``, ``"official_triton"``, ``"xla"`` or ``"reference"``, or a sequence
        of names: the first that supports the call runs. It never falls back to a backend that is not named, with one
        exception: ``"mosaic_gpu"`` has ``"triton"`` compute gradients that its own kernels cannot. None
        selects, for each pass, the first of ``jflex.ORDER`` that supports the call and is not known to be slower than a
        later one; it warns on a GPU if that is ``"xla"``.
      config: Tile sizes, None for the tuned ones. ``deterministic=True`` fixes the summation order; without it, the
        gradient of the query may differ in its last bits between runs of ``"mosaic_gpu"``.

    Returns:
      The output in `layout` and the dtype of `value`, or a pair of it and the lse, which is [B, Hq, T] in both layouts,
      or a pair of it and the `AttentionStats`.

    Raises:
      TypeError: An argument has a wrong type, or a mod takes or returns something else than it must.
      ValueError: Shapes disagree, a mod was made for other sizes, or a value is out of range.
      UnsupportedError: No requested backend supports this call; the message gives the reason of each. Or a gradient
        is requested beside a query of eight bits.

    References:
      Dong et al. 2024, Flex Attention: A Programming Model for Generating Optimized Attention Kernels,
      arXiv:2412.05496.

    >>> import jax, jax.numpy as jnp, jflex
    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 256, 4, 32))
    >>> slopes = 2.0 ** -jnp.arange(1.0, 5.0)
    >>> alibi = lambda score, b, h, q_idx, kv_idx: score - slopes[h] * jnp.abs(q_idx - kv_idx).astype(jnp.float32)
    >>> causal = jflex.create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, 256, 256)
    >>> jflex.flex_attention(q, k, v, alibi, causal).shape
    (1, 256, 4, 32)

    Decode one token of each of two sequences, with 7 and 200 keys in the cache:

    >>> token, cache = jax.random.normal(jax.random.key(1), (2, 1, 4, 32)), jnp.ones((2, 256, 4, 32))
    >>> jflex.flex_attention(token, cache, cache, kv_lengths=jnp.array([7, 200], jnp.int32)).shape
    (2, 1, 4, 32)

    Rotary embedding, and a learned gate on each output:

    >>> rope, gates = jflex.rope(10000.0), jnp.ones((4, 32))
    >>> gated = lambda out, lse, b, h, q_idx: out * jax.nn.sigmoid(gates[h])
    >>> jflex.flex_attention(q, k, v, query_mod=rope, key_mod=rope, output_mod=gated).shape
    (1, 256, 4, 32)

    The largest score of each head, and the mean entropy of its rows:

    >>> out, stats = jflex.flex_attention(q, k, v, block_mask=causal, return_stats=("max", "entropy"))
    >>> stats.max.max(axis=(0, 2)).shape, stats.entropy.mean(axis=(0, 2)).shape, stats.lse
    ((4,), (4,), None)
    """
    check_lse(return_lse, normalize)
    stats = () if return_stats == () else check_stats(return_stats, return_lse, normalize)
    call = prepare(
        query, key, value, score_mod, block_mask, mask_mod=mask_mod, query_mod=query_mod, key_mod=key_mod,
        value_mod=value_mod, output_mod=output_mod, kv_lengths=kv_lengths, normalize=normalize,
        sinks=sinks, scale=scale, layout=layout, dropout_rate=dropout_rate, dropout_key=dropout_key,
        config=config, return_stats=stats,
    )  # fmt: skip
    saved = attend("flex_attention", with_modified_inputs(call), implementation)
    out, lse = saved.out, saved.lse
    if output_mod is not None:
        out = modified_output(output_mod, out, lse if normalize == "softmax" else None, layout)
    return (out, select_stats(saved, stats)) if stats else (out, lse) if return_lse else out


class Call(NamedTuple):
    """A checked call.

    Attributes:
      spec: Its static part.
      inputs: The arrays. Query, key and value are not yet modified.
      vectors: The vector mods.
    """

    spec: AttentionSpec
    inputs: Inputs
    vectors: VectorMods = VectorMods()


def prepare(
    query: Any,
    key: Any,
    value: Any,
    score_mod: ScoreMod | None,
    block_mask: BlockMask | None,
    *,
    mask_mod: MaskMod | None,
    kv_lengths: Any,
    normalize: Literal["softmax", "none"],
    sinks: Any,
    scale: float | None,
    layout: str,
    dropout_rate: float,
    dropout_key: Any,
    config: Config | None,
    query_mod: VectorMod | None = None,
    key_mod: VectorMod | None = None,
    value_mod: VectorMod | None = None,
    output_mod: OutputMod | None = None,
    has_value: bool = True,
    return_stats: tuple[Stat, ...] = (),
) -> Call:
    """Checks every argument of `flex_attention`; nothing is computed, and query, key and value may be shapes.

    Where the call has no value (`jflex.attention_weights`), `key` stands in its place.
    """
    query, key, value = (jnp.asarray(x) if isinstance(x, np.ndarray) else x for x in (query, key, value))
    check_arrays(query, key, value, layout, has_value=has_value, may_have_eight_bits=has_value)
    warn_of_layout(query, key, layout)
    value = value if has_value else key
    sizes = _sizes(query, key, value, layout)
    B, T, S, Hq = sizes[:4]
    scale = check_scale(scale, sizes.D)
    dropout_rate = check_dropout(dropout_rate, dropout_key)
    check_block_mask(block_mask, mask_mod, B, Hq, T, S)
    kv_lengths = check_kv_lengths(kv_lengths, B, S)
    check_normalize(normalize, sinks)
    sinks = None if sinks is None else checked_sinks(sinks, Hq)
    vectors = VectorMods(query_mod, key_mod, value_mod, output_mod)
    call_sizes = CallSizes(B, Hq, T, known_keys(kv_lengths, S))
    if any(mod is not None for mod in vectors):
        sizes = _with_vectors(sizes, vectors, query.dtype, call_sizes, has_lse=normalize == "softmax")
    score, score_operands = (None, ()) if score_mod is None else trace_score_mod(score_mod)
    mask = _traced_mask(block_mask, mask_mod)
    check_requirements((*mod_requirements(score_mod, score), *mod_requirements(mask_mod, mask.mod)), call_sizes)
    warn_of_alignment(mask.mod, (B, Hq, T, S), kv_lengths)
    config = check_config(config, mask.blocks)
    numerics = Numerics(
        dtype=str(value.dtype),
        scale=scale,
        qk_dtype=None if query.dtype == value.dtype else str(query.dtype),  # eight bits, or the check had raised
        precision=current_precision(value.dtype),
        normalize=normalize,
        stats=tuple(name for name in return_stats if name != "lse"),
        sinks=sinks is not None,
    )
    spec = AttentionSpec(
        sizes=sizes,
        numerics=numerics,
        device=Device(*current_device(query, key, value)),
        mods=Mods(score, mask.mod),
        memory=Dense(layout, mask.blocks, kv_lengths is not None),
        config=config,
    )
    sinks = None if sinks is None else sinks.astype(spec.exact)
    inputs = Inputs(query, key, value, mask.lists, Captured(score_operands, mask.operands), kv_lengths, sinks=sinks)
    return with_dropout(Call(spec, inputs, vectors), dropout_rate, kept_mod(dropout_rate, dropout_key, B, Hq))


def _sizes(query: Any, key: Any, value: Any, layout: str) -> Sizes:
    """Sizes of a call with checked arrays."""
    length, heads = (1, 2) if layout == "BTNH" else (2, 1)
    (T, S), (Hq, Hkv) = ((query.shape[axis], key.shape[axis]) for axis in (length, heads))
    return Sizes(B=query.shape[0], T=T, S=S, Hq=Hq, Hkv=Hkv, D=query.shape[3], Dv=value.shape[3], Bkv=key.shape[0])


def _with_vectors(sizes: Sizes, vectors: VectorMods, dtype: DTypeLike, call: CallSizes, *, has_lse: bool) -> Sizes:
    """Checks vector mods; keys that they make different ones for each batch entry have the batch size of the query."""
    vectors.check(sizes.D, sizes.Dv, dtype, sizes=call, kv_heads=sizes.Hkv, has_lse=has_lse)
    if sizes.Bkv == sizes.B or not vectors.needs_batch(sizes.D, sizes.Dv, dtype):
        return sizes
    return sizes._replace(Bkv=sizes.B)


def with_modified_inputs(call: Call) -> Call:
    """The call with query, key and value as its vector mods make them."""
    if call.vectors[:3] == (None, None, None):
        return call
    spec, inputs = call.spec, call.inputs
    arrays = inputs.query, inputs.key, inputs.value
    query, key, value = modified_inputs(call.vectors, arrays, spec.layout, spec.Bkv, inputs.kv_lengths)
    return call._replace(inputs=inputs._replace(query=query, key=key, value=value))


class _Mask(NamedTuple):
    """The mask of a call: the traced mod, the arrays that it captures, and the blocks and lists of a BlockMask."""

    mod: TracedMod | None
    operands: tuple[jax.Array, ...]
    blocks: Blocks | None = None
    lists: BlockLists | None = None


def _traced_mask(block_mask: BlockMask | None, mask_mod: MaskMod | None) -> _Mask:
    if block_mask is not None:
        blocks = Blocks(block_mask.block_size, *block_mask.shape[:2])
        return _Mask(block_mask.traced, block_mask.mask_operands, blocks, block_mask.lists)
    return _Mask(None, ()) if mask_mod is None else _Mask(*trace_mask_mod(mask_mod))


def with_dropout(call: Call, rate: float, kept: KeptMod | None) -> Call:
    """The call with dropout of its weights: `kept` says which are kept, None for no dropout."""
    if kept is None:
        return call
    traced, operands = trace_mask_mod(kept)
    spec, captured = call.spec.replace(dropout=Dropout(rate, traced)), call.inputs.captured._replace(dropout=operands)
    return call._replace(spec=spec, inputs=call.inputs._replace(captured=captured))


def attend(caller: str, call: Call, implementation: Implementation) -> Saved:
    """Selects a backend and runs it; `caller` is the public function, for messages."""
    spec, inputs, _ = call
    name = select_forward(implementation, spec, caller)
    if spec.is_empty:
        out = jnp.zeros(spec.out_shape(), spec.out_dtype)
        return fold_sinks(spec, stats_of_no_keys(spec, out), inputs.sinks)
    return _run(name, implementation, spec, inputs)


def _run(name: str, implementation: Implementation, spec: AttentionSpec, inputs: Inputs) -> Saved:
    refuse_divided_tokens(spec, inputs.query, inputs.key, inputs.value)
    inputs = match_manual_axes(inputs)
    if backends.get(name).differentiable and spec.qk_dtype is None:
        return backends.get(name).forward(spec, inputs)
    warn_of_new_numbers(spec, inputs)
    named = implementation if implementation is None or isinstance(implementation, str) else tuple(implementation)
    return custom_vjp.attend(custom_vjp.Static(name, named, spec), inputs)

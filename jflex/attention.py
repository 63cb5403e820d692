"""`flex_attention`: validate, build the AttentionSpec, select a backend, run."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from jflex import backends
from jflex._call.call_warnings import warn_of_alignment
from jflex._call.checks import check_arrays, check_block_mask, warn_of_layout
from jflex._call.dispatch import Implementation, select_forward, warn_of_new_numbers
from jflex._call.dropout import KeptMod, kept_mod
from jflex._call.vector_mods import VectorMods
from jflex._check.arguments import (
    check_config,
    check_kv_lengths,
    check_normalize,
    check_scale,
    checked_sinks,
    current_device,
    current_precision,
    largest_value,
)
from jflex._jax import custom_vjp
from jflex._jax.partitioning import refuse_divided_tokens
from jflex._mesh import match_manual_axes
from jflex.backends.base import Inputs, Saved
from jflex.backends.results import results_of_no_keys
from jflex.backends.vector_mods import modified_inputs, modified_output
from jflex.block_mask.lists import BlockLists
from jflex.block_mask.mask import BlockMask
from jflex.config import Config
from jflex.mods.array_sizes import CallSizes, check_requirements
from jflex.mods.signature import answers_keywords
from jflex.mods.trace import TracedMod, mod_requirements, trace_mask_mod, trace_score_mod
from jflex.mods.types import MaskMod, OutputMod, ScoreMod, VectorMod
from jflex.options import Options, Settings, checked
from jflex.states.stats import AttentionStats, Stat
from jflex.types import AnyArray, Key, Lse, Out, Query, Value
from pallas_kernels.spec import AttentionSpec, Blocks, Captured, Dense, Device, Dropout, Mods, Numerics, Sizes


# fmt: off
@overload
def flex_attention(
    query: AnyArray, key: AnyArray, value: AnyArray, score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None, *, kv_lengths: AnyArray | None = None, layout: str = "BTNH",
    return_lse: Literal[False] = False, return_stats: tuple[()] = (), **options: Unpack[Options],
) -> Array: ...
@overload
def flex_attention(
    query: AnyArray, key: AnyArray, value: AnyArray, score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None, *, kv_lengths: AnyArray | None = None, layout: str = "BTNH",
    return_lse: bool = False, return_stats: tuple[Stat, ...] = (), **options: Unpack[Options],
) -> tuple[Array, Any]: ...
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
    recompile nothing. `jflex.options.Options` describes the keywords that all calls share in full.

    Args:
      query: In `layout`. Query and key may be ``float8_e4m3fn`` or ``float8_e5m2``, for inference: there are no
        gradients then. `scale` or a `score_mod` holds what descales them.
      key: In `layout` and the dtype of `query`; `key` and `value` may have batch size 1, shared by all of the batch.
      value: In `layout` and the dtype of `query`; bfloat16 or float16 beside a query of eight bits.
      score_mod: ``(score, b, h, q_idx, kv_idx) -> score``, on scalars: a float32 and four int32, of which ``h`` is the
        query head. An array that it indexes by one of these must be long enough; `jnp.minimum` clamps an index on
        purpose.
      block_mask: Which blocks of keys a block of queries visits, from `create_block_mask`.
      mask_mod: ``(b, h, q_idx, kv_idx) -> bool``, in place of a BlockMask: no block is skipped.
      query_mod: ``(query[D], b, h, q_idx) -> [D]``, on each query before its products with keys.
      key_mod: ``(key[D], b, h_kv, kv_idx) -> [D]``, on each key; ``h_kv`` is the key head.
      value_mod: ``(value[Dv], b, h_kv, kv_idx) -> [Dv]``, on each value.
      output_mod: ``(out[Dv], lse, b, h, q_idx) -> [Dv]``, on each output before it is returned.
      kv_lengths: How many keys each batch entry has, int32 [B] of 0 to S. Keys at or beyond the length are masked,
        whatever the mask says, and not read where possible; their contents, even NaN, affect neither output nor
        gradients. Lengths are data: one program serves all of them. Traced lengths are not checked but clamped to 0
        and S; checking others waits for their values.
      normalize: ``"softmax"``, or ``"none"`` for scores that are the weights.
      sinks: A logit for each query head in the denominator of its softmax.
      scale: Multiplies the raw scores; ``D ** -0.5`` for None.
      layout: ``"BTNH"``, or ``"BNTH"`` for [B, Hq, T, D], [B, Hkv, S, D], [B, Hkv, S, Dv].
      return_lse: Also return the float32 logsumexp (natural log) of the scores over the visible keys.
      return_stats: Also return these statistics of each row, computed in the kernel: of ``"lse"``, ``"max"`` (the
        largest score, without a gradient) and ``"entropy"`` (of the weights, in nats). See `AttentionStats`. Not
        together with `return_lse`.
      dropout_rate: Probability that a weight is dropped after the softmax.
      dropout_key: A random key, for a rate above 0.
      implementation: The name of a backend or names in order of preference; None selects one.
      config: Tile sizes; None for the tuned ones.

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
    settings = checked(
        score_mod=score_mod, mask_mod=mask_mod, query_mod=query_mod, key_mod=key_mod, value_mod=value_mod,
        output_mod=output_mod, normalize=normalize, sinks=sinks, scale=scale, return_lse=return_lse,
        return_stats=return_stats, dropout_rate=dropout_rate, dropout_key=dropout_key, implementation=implementation,
        config=config,
    )  # fmt: skip
    call = prepare(query, key, value, settings, block_mask=block_mask, kv_lengths=kv_lengths, layout=layout)
    saved = attend("flex_attention", with_modified_inputs(call), implementation)
    if output_mod is not None:
        lse = saved.lse if normalize == "softmax" else None
        saved = saved._replace(out=modified_output(output_mod, saved.out, lse, layout))
    return settings.results(saved)


class Call(NamedTuple):
    """A checked call; query, key and value are not yet modified."""

    spec: AttentionSpec
    inputs: Inputs
    vectors: VectorMods = VectorMods()


def prepare(
    query: Any,
    key: Any,
    value: Any,
    settings: Settings,
    *,
    block_mask: BlockMask | None = None,
    kv_lengths: AnyArray | None = None,
    layout: str = "BTNH",
    has_value: bool = True,
) -> Call:
    """Checks every argument of `flex_attention`; nothing is computed, and query, key and value may be shapes.

    Where the call has no value (`jflex.attention_weights`), `key` stands in its place.
    """
    score_mod, mask_mod, config = settings.score_mod, settings.mask_mod, settings.config
    query, key, value = (jnp.asarray(x) if isinstance(x, np.ndarray) else x for x in (query, key, value))
    check_arrays(query, key, value, layout, has_value=has_value, may_have_eight_bits=has_value)
    warn_of_layout(query, key, layout)
    value = value if has_value else key
    sizes = _sizes(query, key, value, layout)
    B, T, S, Hq = sizes[:4]
    scale = check_scale(settings.scale, sizes.D)
    if block_mask is not None:
        check_block_mask(block_mask, mask_mod, B, Hq, T, S)
    kv_lengths = check_kv_lengths(kv_lengths, B, S)
    check_normalize(settings.normalize, settings.sinks)
    sinks = None if settings.sinks is None else checked_sinks(settings.sinks, Hq)
    vectors = settings.vectors
    call_sizes = CallSizes(B, Hq, T, S if kv_lengths is None else largest_value(kv_lengths))
    if vectors != VectorMods():
        sizes = _with_vectors(sizes, vectors, query.dtype, call_sizes, has_lse=settings.normalize == "softmax")
    score, score_operands = (None, ()) if score_mod is None else trace_score_mod(score_mod)
    mask = _traced_mask(block_mask, mask_mod)
    check_requirements((*mod_requirements(score_mod, score), *mod_requirements(mask_mod, mask.mod)), call_sizes)
    if mask.mod is not None and kv_lengths is not None and T == 1:
        warn_of_alignment(mask.mod, (B, Hq, T, S), kv_lengths)
    config = check_config(config, mask.blocks)
    spec = AttentionSpec(
        sizes=sizes,
        numerics=_numerics(query, value, settings, scale),
        device=Device(*current_device(query, key, value)),
        mods=Mods(score, mask.mod),
        memory=Dense(layout, mask.blocks, kv_lengths is not None),
        config=config,
    )
    sinks = None if sinks is None else sinks.astype(spec.exact)
    captured = Captured(score_operands, mask.operands)
    inputs = Inputs(query, key, value, mask.lists, captured, kv_lengths, sinks=sinks)
    call = Call(spec, inputs, vectors)
    if not settings.dropout_rate:
        return call
    return with_dropout(call, settings.dropout_rate, kept_mod(settings.dropout_rate, settings.dropout_key, B, Hq))


def _numerics(query: Any, value: Any, settings: Settings, scale: float) -> Numerics:
    return Numerics(
        dtype=str(value.dtype),
        scale=scale,
        qk_dtype=None if query.dtype == value.dtype else str(query.dtype),  # eight bits, or the check had raised
        precision=current_precision(value.dtype),
        normalize=settings.normalize,
        stats=tuple(name for name in settings.return_stats if name != "lse"),
        sinks=settings.sinks is not None,
    )


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
    query, key, value = modified_inputs(call.vectors[:3], arrays, spec.layout, spec.Bkv, inputs.kv_lengths)
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
        return results_of_no_keys(spec, inputs.sinks)
    return _run(name, implementation, spec, inputs)


def _run(name: str, implementation: Implementation, spec: AttentionSpec, inputs: Inputs) -> Saved:
    if any(jax.typeof(x).sharding.mesh.explicit_axes for x in inputs[:3]):
        refuse_divided_tokens(spec, inputs.query, inputs.key, inputs.value)
    inputs = match_manual_axes(inputs)
    if backends.get(name).differentiable and spec.qk_dtype is None:
        return backends.get(name).forward(spec, inputs)
    warn_of_new_numbers(spec, inputs)
    named = implementation if implementation is None or isinstance(implementation, str) else tuple(implementation)
    return custom_vjp.attend(custom_vjp.Static(name, named, spec), inputs)

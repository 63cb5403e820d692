"""`flex_attention`: attention of dense arrays."""

from __future__ import annotations

from typing import Any, Literal, Unpack, overload

from jaxtyping import Array, Float, Int32

from jflex._call.dispatch import Implementation
from jflex.block_mask.mask import BlockMask
from jflex.config import Config
from jflex.entry import finish, prepare, run
from jflex.mods.signature import answers_keywords
from jflex.mods.types import MaskMod, OutputMod, ScoreMod, VectorMod
from jflex.options import Output, Pair, checked
from jflex.states.stats import AttentionStats, Stat
from jflex.types import AnyArray, Key, Lse, Out, Query, Value


# fmt: off
@overload
def flex_attention(
    query: AnyArray, key: AnyArray, value: AnyArray, score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None, *, kv_lengths: AnyArray | None = None, layout: str = "BTNH",
    **options: Unpack[Output],
) -> Array: ...
@overload
def flex_attention(
    query: AnyArray, key: AnyArray, value: AnyArray, score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None, *, kv_lengths: AnyArray | None = None, layout: str = "BTNH",
    **options: Unpack[Pair],
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
    and kernels skip blocks of keys that a `block_mask` hides. Query head ``h`` attends to key head
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
      mask_mod: ``(b, h, q_idx, kv_idx) -> bool``, in place of a BlockMask. A mask that compares indices (causal, a
        window, a prefix, chunks) bounds the loops of the GPU kernels by itself; of others, and by ``"xla"``, all
        blocks are visited.
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
    return finish(settings, run(call, settings.implementation), layout)

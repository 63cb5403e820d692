"""`context_parallel_attention`: `flex_attention` of sequences that are divided among the devices of a mesh."""

from __future__ import annotations

from typing import Any, Unpack, overload

from jaxtyping import Array, Int, Int32

from jflex.block_mask.mask import BlockMask
from jflex.context_parallel.call import Strategy
from jflex.context_parallel.placement import Names
from jflex.context_parallel.prepare import Division, prepare
from jflex.context_parallel.run import positions_of, run
from jflex.entry import finish
from jflex.mods.types import ScoreMod
from jflex.options import Options, Output, Pair, checked, takes
from jflex.states.stats import AttentionStats, Stat
from jflex.types import AnyArray, Key, Lse, Out, Query, Value


# fmt: off
@overload
def context_parallel_attention(
    query: AnyArray, key: AnyArray, value: AnyArray, score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None, *, kv_lengths: AnyArray | None = None, mesh: Any = None, axis: str = "context",
    batch_axes: Names = (), head_axes: Names = (), strategy: Strategy = "all_gather", order: AnyArray | None = None,
    layout: str = "BTNH", **options: Unpack[Output],
) -> Array: ...
@overload
def context_parallel_attention(
    query: AnyArray, key: AnyArray, value: AnyArray, score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None, *, kv_lengths: AnyArray | None = None, mesh: Any = None, axis: str = "context",
    batch_axes: Names = (), head_axes: Names = (), strategy: Strategy = "all_gather", order: AnyArray | None = None,
    layout: str = "BTNH", **options: Unpack[Pair],
) -> tuple[Array, Any]: ...
# fmt: on
@takes(Options)
def context_parallel_attention(
    query: Query,
    key: Key,
    value: Value,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    *,
    kv_lengths: Int32[AnyArray, " B"] | None = None,
    mesh: Any = None,
    axis: str = "context",
    batch_axes: Names = (),
    head_axes: Names = (),
    strategy: Strategy = "all_gather",
    order: Int[AnyArray, " chunks"] | None = None,
    layout: str = "BTNH",
    return_lse: bool = False,
    return_stats: tuple[Stat, ...] = (),
    **options: Unpack[Options],
) -> Out | tuple[Out, Lse] | tuple[Out, AttentionStats]:
    """`flex_attention` of sequences whose tokens are divided among the devices of a mesh.

    The result is that of one device: mods see absolute positions, and gradients flow into query, key, value, sinks and
    every floating-point array that `score_mod` or a vector mod captures. Each device returns the output of its own
    queries. What differs is how they meet the keys of others:

    * ``"all_gather"``: every device gets all keys and values. The gradients of these are summed by a reduce-scatter.
    * ``"ring"``: keys and values pass from device to device, and states are merged. Memory for them does not grow with
      the number of devices. A device computes nothing at a step whose keys it does not attend to; a step at which no
      device does is left out if the mask is known while tracing.
    * ``"ulysses"``: an all-to-all gives every device all tokens of some heads, and another one brings the output back.

    Outside of `jax.shard_map` the arrays are whole, with an axis of tokens sharded over `axis`, and captured arrays are
    whole on each device. Inside of one, with `mesh` None, arrays are those of the shard, and mods get its indices of
    batch and heads; positions, `block_mask` and `order` are those of the whole sequence all the same.

    Args:
      query: In `layout`.
      key: In `layout`; as in `flex_attention`.
      value: In `layout`.
      score_mod: ``(score, b, h, q_idx, kv_idx) -> score``, at absolute positions.
      block_mask: Of the whole sequence, its tokens in their natural order, whatever `order` is. Its blocks must divide
        the chunks of `order`, or without one the tokens of a device; for ``"ulysses"`` any do.
      kv_lengths: As in `flex_attention`: how many keys each batch entry has, of the whole sequence, which are the
        first ones in the natural order. They become a part of the mask.
      mesh: The mesh; None for that of `jax.set_mesh`, or of the enclosing `jax.shard_map`.
      axis: Its axis that divides the tokens. The lengths must be multiples of its size.
      batch_axes: Its axes that divide the batch, a name or a sequence; outside of `jax.shard_map` only. What is divided
        over an axis that no argument names is gathered.
      head_axes: Its axes that divide the heads, likewise.
      strategy: ``"all_gather"``, ``"ring"`` or ``"ulysses"``. For ``"ulysses"`` the key heads of a device must be a
        multiple of the size of `axis`.
      order: The order of the tokens in query, key and value: a permutation of chunks, known while tracing, as from
        `jflex.context_parallel.zigzag_order`. None for the natural order.
      layout: As in `flex_attention`.
      return_lse: Also return the float32 logsumexp (natural log) of the scores over the visible keys.
      return_stats: As in `flex_attention`; the statistics of partial results are merged exactly.
      **options: The keywords of `jflex.options.Options`, at absolute positions; `implementation` and `config` are of
        the kernels of each device. Of a `mask_mod` the call makes a BlockMask, in blocks of the largest power of two
        that divides the chunks, 128 at most; below 16 it evaluates the mask everywhere. Vector mods run on the device
        that holds the token, before anything is sent. Outside of `jax.shard_map`, what is dropped does not depend on
        the mesh. With ``"ring"``, ``"reference"`` stores the weights of all steps for its derivatives.

    Returns:
      The output in `layout` and the dtype of `query`, in the order of its tokens, and sharded like it; or a pair of it
      and the lse [B, Hq, T], or of it and the `AttentionStats`.

    Raises:
      TypeError: An argument has a wrong type.
      ValueError: Shapes disagree, the mesh lacks an axis, lengths or heads do not divide, `order` is no permutation, or
        a mod was made for other sizes.
      UnsupportedError: No requested backend supports the call of a device; the message gives the reason of each.

    References:
      Grattafiori et al. 2024, The Llama 3 Herd of Models, arXiv:2407.21783, section 3.3.2 (all-gather, zigzag); Liu et
      al. 2023, Ring Attention with Blockwise Transformers, arXiv:2310.01889; Jacobs et al. 2023, DeepSpeed Ulysses,
      arXiv:2309.14509.

    >>> import jax, jax.numpy as jnp, jflex
    >>> mesh = jax.make_mesh((1,), ("context",))
    >>> query, key, value = jax.random.normal(jax.random.key(0), (3, 1, 256, 4, 32))
    >>> order = jflex.context_parallel.zigzag_order(1)
    >>> reordered = (jflex.context_parallel.reorder(x, order) for x in (query, key, value))
    >>> out = context_parallel_attention(
    ...     *reordered, mask_mod=jflex.masks.causal(), mesh=mesh, strategy="ring", order=order)
    >>> whole = jflex.flex_attention(query, key, value, mask_mod=jflex.masks.causal())
    >>> bool(jnp.allclose(jflex.context_parallel.restore(out, order), whole, atol=1e-5))
    True
    """
    settings = checked(score_mod=score_mod, return_lse=return_lse, return_stats=return_stats, **options)
    division = Division(mesh, axis, batch_axes, head_axes, strategy, order)
    call = prepare(query, key, value, settings, division, block_mask=block_mask, kv_lengths=kv_lengths, layout=layout)
    saved = run(call, settings.implementation)
    positions = None if settings.output_mod is None else positions_of(call.context, call.call.spec.T)
    return finish(settings, saved, layout, positions)

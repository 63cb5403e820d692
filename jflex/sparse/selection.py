"""Sparse selection: block-level attention scores, and the best blocks of each query block."""

from __future__ import annotations

import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int32

from jflex._check.arguments import checked_block_size, checked_size
from jflex._mesh import leading_axes, partitioned_by_xla
from jflex.block_mask.lists import block_count
from jflex.types import AnyArray


def block_scores(
    query: Float[AnyArray, "B T Hq D"],
    key: Float[AnyArray, "#B S Hkv D"],
    *,
    block_size: int | tuple[int, int] = 128,
    queries: Literal["first", "mean"] = "first",
) -> Float[Array, "B Hkv R C"]:
    """Block-level attention scores, the gate of MoBA, for `select_blocks`.

    The score is the product of one query for the block and the mean of the keys of the block, averaged over the query
    heads that share a key head (NSA, equation 10, adds them up). MoBA scores each query alone; a block of queries
    selects together here, so that kernels load a block of keys once for all of them.

    Which query stands for its block matters in a causal model: the mean of a block depends on queries after the first
    one, and by it what a query attends to would depend on tokens after it. With ``"first"`` it does not.

    Args:
      query: Queries, as in `flex_attention` with the layout "BTNH".
      block_size: Of queries and keys, one number or a pair. A block at the end may be shorter.
      queries: ``"first"``: the first query of each block. ``"mean"``: the mean of its queries, for models that are not
        causal.

    Returns:
      Scores in float32, not scaled, without a mask; differentiable. It is plain JAX.

    Raises:
      ValueError: Shapes do not fit together, or `queries` is another word.

    References:
      Lu et al. 2025, MoBA, arXiv:2502.13189, equation 6; Yuan et al. 2025, NSA, arXiv:2502.11089, section 3.3.2.

    >>> query, key = jnp.ones((1, 4, 2, 1)), jnp.array([1.0, 3.0, 5.0, 7.0]).reshape(1, 4, 1, 1)
    >>> block_scores(query, key, block_size=2).tolist()
    [[[[2.0, 6.0], [2.0, 6.0]]]]
    """
    q_block, kv_block = checked_block_size(block_size)
    if queries not in ("first", "mean"):
        raise ValueError(f'`queries` must be "first" or "mean". Got {queries!r}.')
    query, key = jnp.asarray(query), jnp.asarray(key)
    fits = query.ndim == key.ndim == 4 and query.shape[3] == key.shape[3] and key.shape[0] in (1, query.shape[0])
    if not fits or not key.shape[2] or query.shape[2] % key.shape[2]:
        raise ValueError(
            "`query` [B, T, Hq, D] and `key` [B or 1, S, Hkv, D] must have the same D, and Hkv must divide Hq. Got "
            f"shapes {query.shape} and {key.shape}."
        )
    compute = functools.partial(_scores, blocks=(q_block, kv_block), by_mean=queries == "mean")
    out_spec = lambda: PartitionSpec(jax.typeof(query).sharding.spec[0], jax.typeof(key).sharding.spec[2])
    return partitioned_by_xla(compute, out_spec)(query, key)


def select_blocks(
    scores: Float[AnyArray, "*batch R C"],
    k: int,
    *,
    block_size: int | tuple[int, int] = 128,
    causal: bool = True,
    local_blocks: int = 1,
    initial_blocks: int = 0,
    visible: Bool[AnyArray, "*#batch #R #C"] | None = None,
) -> Int32[Array, "*batch R k"]:
    """The k best blocks of keys for each block of queries, for `block_mask_from_indices`.

    A block of queries always selects its own keys: the blocks that hold a key at the position of one of its queries
    (were the last one whole), one block if block sizes are equal. They count among the k, as in both papers. The others
    are those with the largest scores. Of equal scores, +0 and -0 among them, lower blocks come first, so the selection
    is deterministic. A block whose score is ``-inf`` or NaN is not selected, unless it always is. The selection has no
    gradient.

    Args:
      scores: Such as those of `block_scores`, [B, Hkv, R, C].
      k: How many. Blocks that are always selected count.
      block_size: Of queries and keys, one number or a pair; it says which blocks hold which positions.
      causal: Whether blocks with no key at or before the last query of the block are never selected. Inside of a
        selected block, the mask_mod decides.
      local_blocks: How many blocks are always selected that end with a query's own: 1 for its own alone (MoBA); 2 for
        one before it, too (NSA); 0 for none, so that its own has to be among the best.
      initial_blocks: How many blocks from the first one on are always selected (1 in NSA).
      visible: Which blocks may be selected at all: such as ``block_mask.to_dense() > 0``, for documents.

    Returns:
      Numbers of blocks. First come those that are always selected, in ascending order; then the others, the best first.
      -1 fills rows with fewer than k.

    Raises:
      TypeError: `scores` are not floating-point, or a number is not an integer.
      ValueError: A number is negative; `k` is less than the blocks that are always selected; `scores` have fewer than
        two axes; or `visible` does not broadcast to `scores`.

    References:
      Lu et al. 2025, MoBA, arXiv:2502.13189, section 2.2; Yuan et al. 2025, NSA, arXiv:2502.11089, section 3.3.2.

    >>> scores = jnp.array([[9.0, 9.0, 9.0, 9.0], [1.0, 0.0, 0.0, 9.0], [2.0, 2.0, 0.0, 9.0], [0.0, 3.0, 2.0, 1.0]])
    >>> select_blocks(scores, 2).tolist()
    [[0, -1], [1, 0], [2, 0], [3, 1]]
    """
    scores = jax.lax.stop_gradient(jnp.asarray(scores))
    if not jnp.issubdtype(scores.dtype, jnp.floating):
        raise TypeError(f"`scores` must be floating-point. Got {scores.dtype}. Cast them.")
    if scores.ndim < 2:
        raise ValueError(f"`scores` must have axes [..., query blocks, key blocks]. Got shape {scores.shape}.")
    k, local = checked_size(k, "k"), checked_size(local_blocks, "local_blocks")
    initial = min(checked_size(initial_blocks, "initial_blocks"), scores.shape[-1])
    q_block, kv_block = checked_block_size(block_size)
    query = np.arange(scores.shape[-2]) * q_block  # the first one of each block
    first, last = query // kv_block, (query + q_block - 1) // kv_block
    begin, end = np.maximum(first - (local - 1), 0), np.minimum(last + 1, scores.shape[-1])
    begin = np.minimum(begin, end) if local else end
    _check_room(k, begin, end, np.minimum(initial, last + 1) if causal else np.full_like(last, initial))
    column = np.arange(scores.shape[-1])[None]
    always = (column < initial) | ((column >= begin[:, None]) & (column < end[:, None]))
    allowed = jnp.asarray((column <= last[:, None]) | (not causal))
    if visible is not None:
        allowed = jnp.broadcast_to(allowed, scores.shape) & _checked_visible(jnp.asarray(visible), scores.shape)
    best = partitioned_by_xla(functools.partial(_best, k=k), lambda: leading_axes(scores, scores.ndim - 2))
    return best(scores, jnp.asarray(always), allowed)


def _scores(
    query: Float[Array, "B T Hq D"], key: Float[Array, "#B S Hkv D"], *, blocks: tuple[int, int], by_mean: bool
) -> Float[Array, "B Hkv R C"]:
    (batch, _, heads, size), kv_heads = query.shape, key.shape[2]
    one = _means(query, blocks[0]) if by_mean else query[:, :: blocks[0]].astype(jnp.float32)
    one = one.reshape(batch, one.shape[1], kv_heads, heads // kv_heads, size).mean(axis=3)
    means = jnp.broadcast_to(_means(key, blocks[1]), (batch, block_count(key.shape[1], blocks[1]), *key.shape[2:]))
    return jnp.einsum("brhd,bchd->bhrc", one, means, precision="highest")


def _means(x: jax.Array, block: int) -> Float[Array, "B blocks H D"]:
    """The mean of each block of tokens, in float32."""
    batch, length, heads, size = x.shape
    blocks = block_count(length, block)
    padded = jnp.pad(x, ((0, 0), (0, blocks * block - length), (0, 0), (0, 0)))
    sums = padded.reshape(batch, blocks, block, heads, size).sum(axis=2, dtype=jnp.float32)
    counts = np.minimum(block, length - np.arange(blocks) * block).astype(np.float32)
    return sums / counts[None, :, None, None]


def _check_room(k: int, begin: np.ndarray, end: np.ndarray, lead: np.ndarray) -> None:
    """Raises if more blocks are always selected than may be: those from `begin` to `end` and the first `lead` ones."""
    counts = (end - begin) + np.where(end > begin, np.minimum(lead, begin), lead)
    if counts.size and counts.max() > k:
        row = int(counts.argmax())
        raise ValueError(
            f"`k` must be at least the number of blocks that are always selected, {counts.max()} for query block "
            f"{row}: its own, and those of `local_blocks` and `initial_blocks`. Got {k}. Raise it, or lower these."
        )


def _checked_visible(visible: jax.Array, shape: tuple[int, ...]) -> Bool[Array, "*batch R C"]:
    fits = visible.ndim <= len(shape) and all(
        n in (1, size) for n, size in zip(visible.shape[::-1], shape[::-1], strict=False)
    )
    if visible.dtype != jnp.bool_ or not fits:
        raise ValueError(
            f"`visible` must be booleans that broadcast to the shape of `scores`, {shape}. Got {visible.dtype} of "
            f"shape {visible.shape}."
        )
    return jnp.broadcast_to(visible, shape)


@jax.jit(static_argnames="k")
def _best(
    scores: Float[Array, "*batch R C"], always: Bool[Array, "R C"], allowed: Bool[Array, "*#batch R C"], *, k: int
) -> Int32[Array, "*batch R k"]:
    wide = scores if scores.dtype == jnp.float64 else scores.astype(jnp.float32)
    wide = jnp.where(jnp.isnan(wide), -jnp.inf, jnp.minimum(wide, jnp.finfo(wide.dtype).max))
    wide = jnp.where(allowed, jnp.where(always, jnp.inf, wide), -jnp.inf)
    # A stable sort, which takes +0 for -0. `lax.top_k` does not.
    column = jax.lax.broadcasted_iota(jnp.int32, wide.shape, wide.ndim - 1)
    values, columns = jax.lax.sort((-wide, column), dimension=-1, is_stable=True, num_keys=1)
    chosen = jnp.where(values < jnp.inf, columns, -1)[..., :k]
    return jnp.pad(chosen, [(0, 0)] * (chosen.ndim - 1) + [(0, k - chosen.shape[-1])], constant_values=-1)

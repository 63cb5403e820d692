"""The lightning indexer of DeepSeek-V3.2: which keys each query selects for `sparse_mla_attention`."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int32

from jflex._check.arguments import describe_array
from jflex._mesh import leading_axes, partitioned_by_xla, vary, varying_axes
from jflex.config import Config
from jflex.latent import indexer_kernels
from jflex.latent.indexer_kernels import IndexerImplementation, site_of_kernel
from jflex.types import AnyArray

_PRODUCTS = 2**22  # of queries, heads and keys that XLA holds at once, in float32


def indexer_scores(
    query: Float[AnyArray, "N H D"],
    key: Float[AnyArray, "S D"],
    weights: Float[AnyArray, "N H"],
    *,
    implementation: IndexerImplementation = None,
    config: Config | None = None,
) -> Float[Array, "N S"]:
    """The lightning indexer of DeepSeek-V3.2: how much each query wants each key.

    ``scores[n, s] = sum over h of weights[n, h] * relu(query[n, h] . key[s])``, in float32. Several sequences:
    `jax.vmap`.

    On an NVIDIA GPU, a kernel holds the products of queries and keys in registers. Elsewhere XLA takes heads in groups
    whose products fit in 16 MB, or one by one, so that memory grows with N * S. The two add heads in different orders.
    Gradients are those of XLA, which computes the products again; the kernel has them in reverse mode only.

    Args:
      query: Queries of the indexer, small and in low precision.
      key: Its keys, one for each token.
      weights: Of the heads, for each query.
      implementation: ``"triton"`` for the kernel, which takes queries and keys in bfloat16, or both in float16, with
        heads up to 256 columns; ``"xla"`` for plain JAX, which takes everything. With None the kernel runs where it
        can and no array may be divided among devices: not under `jax.jit` or `jax.vmap` in a process that sees several,
        except inside of `jax.shard_map`. Divided arrays are gathered for the kernel. A JAX whose Pallas has no Triton
        has no kernel.
      config: `interpret` runs the kernel on a CPU; its other fields are not used.

    Returns:
      Scores, without a mask.

    Raises:
      TypeError: `config` is not a Config.
      ValueError: Shapes do not match, or `implementation` is not known.
      UnsupportedError: ``"triton"`` does not run this call.

    References:
      DeepSeek-AI 2025, DeepSeek-V3.2-Exp, section 2.1.

    >>> indexer_scores(jnp.array([[[1.0], [-2.0]]]), jnp.array([[3.0], [-1.0]]), jnp.array([[1.0, 0.5]])).tolist()
    [[3.0, 1.0]]
    """
    arrays = query, key, weights = jnp.asarray(query), jnp.asarray(key), jnp.asarray(weights)
    if query.ndim != 3:
        raise ValueError(f"`query` must be [N, H, D]. Got {describe_array(query)}. For several sequences `jax.vmap`.")
    if key.ndim != 2 or key.shape[1] != query.shape[2]:
        raise ValueError(
            f"`key` must be [S, {query.shape[2]}], one vector of the size of the queries for each token. Got "
            f"{describe_array(key)}. The keys of all heads are the same; for several sequences `jax.vmap`."
        )
    if weights.shape != query.shape[:2]:
        raise ValueError(
            f"`weights` must be {list(query.shape[:2])}, one for each head of each query. Got "
            f"{describe_array(weights)}. Broadcast them by `jnp.broadcast_to`."
        )
    limit = lambda kernels, site: kernels.limit_of_scores(site, query, key)
    site = site_of_kernel("indexer_scores", implementation, config, arrays, limit)
    if site is None or 0 in (*query.shape, *key.shape):
        return _scores(query, key, weights)
    return indexer_kernels.scores(site, _scores, arrays)


def _scores(query: Array, key: Array, weights: Array) -> Array:
    """The scores in plain JAX."""
    rows = lambda: PartitionSpec(*leading_axes(query, 1), None)
    return partitioned_by_xla(_sum_over_heads, rows)(query, key, weights)


def _sum_over_heads(query: Array, key: Array, weights: Array) -> Array:
    (N, H, _), S = query.shape, key.shape[0]
    at_once = next(n for n in range(max(H, 1), 0, -1) if H % n == 0 and (n == 1 or n * N * S <= _PRODUCTS))

    @jax.checkpoint
    def add(total: Array, heads: tuple[Array, Array]) -> tuple[Array, None]:
        q, w = heads  # [heads, N, D], [heads, N]
        products = jnp.einsum("hnd,sd->hns", q, key, preferred_element_type=jnp.float32)
        # One head after the other: XLA fuses these additions. As one sum over heads all takes 48 ms for 5 on two cores
        # (one query, 64 heads of 128, 65,536 keys, bfloat16), and a product with the weights is TF32 on a GPU.
        for each, weight in zip(jnp.split(jax.nn.relu(products), len(q)), w.astype(jnp.float32), strict=True):
            total = total + weight[:, None] * each[0]
        return total, None

    grouped = lambda x: jnp.moveaxis(x, 1, 0).reshape(H // at_once, at_once, N, *x.shape[2:])
    start = vary(jnp.zeros((N, S), jnp.float32), varying_axes(query, key, weights))
    return jax.lax.scan(add, start, (grouped(query), grouped(weights)))[0]


def select_keys(
    scores: Float[AnyArray, "N S"],
    k: int,
    *,
    visible: Bool[AnyArray, "#N S"] | None = None,
    implementation: IndexerImplementation = None,
    config: Config | None = None,
) -> Int32[Array, "N k"]:
    """The positions of the k largest scores of each row, for `sparse_mla_attention`.

    Of equal scores the lower positions come first, so the selection is deterministic, and the same by both
    implementations: in the order of `jax.lax.top_k`, where 0.0 is greater than -0.0. It has no gradient.

    Args:
      scores: Such as those of `indexer_scores`.
      visible: Which keys a query may select: ``positions[:, None] >= jnp.arange(S)`` for a causal selection. All for
        None.
      implementation: ``"triton"`` for a kernel, which takes scores in float32 and selects up to 16,384 of more than
        32,768 keys; ``"xla"`` for `jax.lax.top_k`; None as in `indexer_scores`.
      config: As in `indexer_scores`.

    Returns:
      Positions, the largest score first; -1 where fewer than k keys are visible.

    Raises:
      TypeError: `config` is not a Config.
      ValueError: `k` is negative, `scores` are not [N, S], or `implementation` is not known.
      UnsupportedError: ``"triton"`` does not run this call.

    >>> scores = jnp.array([[1.0, 3.0, 3.0, 2.0], [1.0, 3.0, 3.0, 2.0]])
    >>> causal = jnp.array([[1], [3]]) >= jnp.arange(4)[None]
    >>> select_keys(scores, 3, visible=causal).tolist()
    [[1, 0, -1], [1, 2, 3]]
    """
    if k < 0:
        raise ValueError(f"`k` must be 0 or more. Got {k}. Pass how many keys each query selects.")
    scores = jax.lax.stop_gradient(jnp.asarray(scores))
    if scores.ndim != 2:
        raise ValueError(f"`scores` must be [N, S]. Got {describe_array(scores)}. For several sequences `jax.vmap`.")
    count = min(k, scores.shape[1])
    limit = lambda kernels, site: kernels.limit_of_selection(site, scores, count)
    site = site_of_kernel("select_keys", implementation, config, (scores,), limit)
    if visible is not None:
        scores = jnp.where(jnp.broadcast_to(visible, scores.shape), scores, -jnp.inf)
    has_keys = 0 not in (count, *scores.shape)
    top_k = functools.partial(indexer_kernels.top_k, site) if site is not None and has_keys else jax.lax.top_k
    values, positions = top_k(scores, count)
    positions = jnp.where(values == -jnp.inf, -1, positions.astype(jnp.int32))
    return jnp.pad(positions, ((0, 0), (0, k - positions.shape[1])), constant_values=-1)


def indexer_loss(
    scores: Float[AnyArray, "N S"], weights: Float[AnyArray, "N S"], *, visible: Bool[AnyArray, "#N S"] | None = None
) -> Float[Array, ""]:
    """Distance of the indexer from the attention that it selects for: the mean over queries of a KL divergence.

    ``sum over s of p[s] * (log p[s] - log softmax(scores)[s])``, where ``p`` are the attention weights of a query,
    summed over heads and divided by their sum. Only `scores` get a gradient, as in DeepSeek-V3.2, whose indexer is
    trained by this loss alone.

    Args:
      scores: Those of `indexer_scores`.
      weights: Attention weights, summed over heads: such as of `jflex.attention_weights`.
      visible: As in `select_keys`; a position that is not selected is not visible, once the indexer selects.

    Returns:
      The loss, in nats. A query without visible weights counts 0.

    References:
      DeepSeek-AI 2025, DeepSeek-V3.2-Exp, section 2.1.

    >>> weights = jnp.array([[0.25, 0.75]])
    >>> [round(abs(float(indexer_loss(scores, weights))), 3) for scores in (jnp.log(weights), jnp.zeros((1, 2)))]
    [0.0, 0.131]
    """
    scores = jnp.asarray(scores).astype(jnp.float32)
    target = jax.lax.stop_gradient(jnp.asarray(weights).astype(jnp.float32))
    shown = jnp.ones(scores.shape, bool) if visible is None else jnp.broadcast_to(visible, scores.shape)
    target = jnp.where(shown, target, 0.0)
    total = target.sum(axis=1, keepdims=True)
    p = target / jnp.where(total == 0, 1.0, total)
    log_q = jax.nn.log_softmax(jnp.where(shown, scores, -jnp.inf), axis=1)
    terms = jnp.where(p > 0, p * (jnp.log(jnp.where(p > 0, p, 1.0)) - jnp.where(shown, log_q, 0.0)), 0.0)
    return terms.sum(axis=1).mean()

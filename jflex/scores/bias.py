"""Biases: a number for every query and key, and those of Graphormer for the nodes of graphs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Float, Int

from jflex.mods.array_sizes import Axis, ReadyMod, Requirement, ready
from jflex.mods.arrays import checked_array
from jflex.mods.types import ScoreMod


@ready
def bias(values: Float[ArrayLike, "B H T S"]) -> ScoreMod:
    """Adds ``values[b, h, q_idx, kv_idx]`` to the scores.

    Args:
      values: The bias. Batch and heads may be 1, shared by all; T and S may exceed those of a call.

    Raises:
      TypeError: `values` is not floating-point.
      ValueError: `values` does not have four axes.

    >>> float(bias(jnp.ones((1, 1, 2, 2)))(1.0, 0, 3, 1, 1))
    2.0
    """
    values = checked_array(values, "`values` of `bias`", "floating-point")
    if values.ndim != 4:
        raise ValueError(f"`values` must have four axes [B, H, T, S]. Got shape {values.shape}.")
    many_batches, many_heads = values.shape[0] > 1, values.shape[1] > 1

    def add_bias(score, b, h, q_idx, kv_idx):
        return score + values[b if many_batches else 0, h if many_heads else 0, q_idx, kv_idx].astype(jnp.float32)

    axes: tuple[tuple[Axis, str, str], ...] = (
        ("b", "have the batch size of the call, or 1", "Pass values [{}, H, T, S]."),
        ("h", "have the query heads of the call, or 1", "Pass values [B, {}, T, S]."),
        ("q_idx", "hold one row for each query", "Pass values [B, H, {}, S]."),
        ("kv_idx", "hold one number for each key", "Pass values [B, H, T, {}]."),
    )
    required = (
        Requirement(axis, size, f"`values` of `bias` must {rule}", remedy)
        for size, (axis, rule, remedy) in zip(values.shape, axes, strict=True)
        if size > 1 or axis not in ("b", "h")
    )
    return ReadyMod(add_bias, tuple(required))


@ready
def spatial_bias(table: Float[ArrayLike, "Hq N"], distances: Int[ArrayLike, "*B T S"]) -> ScoreMod:
    """Adds ``table[h, distances[b, q_idx, kv_idx]]`` to the scores: a learned number for each distance of two nodes.

    Source: Graphormer, https://arxiv.org/abs/2106.05234, section 3.1.

    Args:
      table: One number for each query head and distance.
      distances: Of each pair of nodes, from 0 to ``N - 1``, as the length of the shortest path between them; one more
        can stand for none. [T, S] for one graph that all batch entries share, or [B, T, S].

    Returns:
      A score_mod, which uses ``h``, and ``b`` if the distances have a batch axis.

    Raises:
      TypeError: `table` is not floating-point, or `distances` are not integers.
      ValueError: `table` does not have two axes, or `distances` not two or three.

    >>> path = jnp.array([[0, 1, 2], [1, 0, 1], [2, 1, 0]])  # three nodes in a row
    >>> score_mod = spatial_bias(jnp.array([[0.0, -1.0, -4.0]]), path)
    >>> [[float(score_mod(0.0, 0, 0, query, key)) for key in range(3)] for query in range(3)]
    [[0.0, -1.0, -4.0], [-1.0, 0.0, -1.0], [-4.0, -1.0, 0.0]]
    """
    table = checked_array(table, "`table` of `spatial_bias`", "floating-point", "[Hq, N]")
    distances = checked_array(distances, "`distances` of `spatial_bias`", "integers").astype(jnp.int32)
    if distances.ndim not in (2, 3):
        raise ValueError(f"`distances` of `spatial_bias` must be [T, S] or [B, T, S]. Got shape {distances.shape}.")

    def add_bias(score, b, h, q_idx, kv_idx):
        pair = (q_idx, kv_idx) if distances.ndim == 2 else (b, q_idx, kv_idx)
        return score + table[h, distances[pair]].astype(jnp.float32)

    required = (_heads("spatial_bias", table, "[{}, N]"), *_pairs("`distances` of `spatial_bias`", distances.shape))
    return ReadyMod(add_bias, required)


@ready
def edge_bias(table: Float[ArrayLike, "Hq L E"], edges: Int[ArrayLike, "*B T S L"]) -> ScoreMod:
    """Adds the mean of ``table[h, n, edges[b, q_idx, kv_idx, n]]`` over the edges ``n`` of the path between two nodes.

    Source: Graphormer, https://arxiv.org/abs/2106.05234, section 3.1.

    Args:
      table: A learned number for each query head, position in a path and type of an edge: the product of the paper's
        embedding of the position and feature of the edge, where edges have types.
      edges: The types of the edges of a shortest path from each query's node to each key's, from 0 to ``E - 1``, and -1
        after its end; no edges add 0. [T, S, L] for one graph that all batch entries share, or [B, T, S, L]. The
        kernels read L numbers for each score: cut long paths.

    Returns:
      A score_mod, which uses ``h``, and ``b`` if the edges have a batch axis.

    Raises:
      TypeError: `table` is not floating-point, or `edges` are not integers.
      ValueError: `table` does not have three axes, `edges` not three or four, or their L differ.

    >>> edges = jnp.array([[[-1, -1], [1, -1], [1, 0]]])  # of one query to three keys: itself, by one edge, by two
    >>> score_mod = edge_bias(jnp.array([[[1.0, 2.0], [10.0, 20.0]]]), edges)
    >>> [float(score_mod(0.0, 0, 0, 0, key)) for key in range(3)]
    [0.0, 2.0, 6.0]
    """
    table = checked_array(table, "`table` of `edge_bias`", "floating-point", "[Hq, L, E]")
    edges = checked_array(edges, "`edges` of `edge_bias`", "integers").astype(jnp.int32)
    if edges.ndim not in (3, 4) or edges.shape[-1] != table.shape[1]:
        raise ValueError(
            "`edges` of `edge_bias` must be [T, S, L] or [B, T, S, L], and `table` [Hq, L, E] for paths as long. "
            f"Got shapes {edges.shape} and {table.shape}. Pad the paths with -1."
        )

    def add_bias(score, b, h, q_idx, kv_idx):
        pair = (q_idx, kv_idx) if edges.ndim == 3 else (b, q_idx, kv_idx)
        total, count = jnp.float32(0), jnp.int32(0)
        for n in range(edges.shape[-1]):
            edge = edges[(*pair, n)]
            weight = table[h, n, jnp.maximum(edge, 0)].astype(jnp.float32)
            total += jnp.where(edge >= 0, weight, 0.0)
            count += (edge >= 0).astype(jnp.int32)
        return score + total / jnp.maximum(count, 1).astype(jnp.float32)

    required = (_heads("edge_bias", table, "[{}, L, E]"), *_pairs("`edges` of `edge_bias`", edges.shape[:-1]))
    return ReadyMod(add_bias, required)


def _heads(caller: str, table: jax.Array, shape: str) -> Requirement:
    rule = f"`table` of `{caller}` must hold one row for each query head"
    return Requirement("h", table.shape[0], rule, f"Pass a table {shape}.")


def _pairs(argument: str, shape: tuple[int, ...]) -> tuple[Requirement, ...]:
    axes: tuple[tuple[Axis, str, str], ...] = (
        ("b", "one graph for each batch entry", "Pass {} graphs, or one without a batch axis."),
        ("q_idx", "one row for each query", "Pass {} rows; pad the graph."),
        ("kv_idx", "one number for each key", "Pass {} columns; pad the graph."),
    )
    return tuple(
        Requirement(axis, size, f"{argument} must hold {rule}", remedy)
        for size, (axis, rule, remedy) in zip(shape, axes[-len(shape) :], strict=True)
    )

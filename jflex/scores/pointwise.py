"""Functions of the score alone: soft capping, and activations in place of the softmax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jflex.mods.array_sizes import ready
from jflex.mods.types import ScoreMod


@ready
def softcap(cap: float | Float[ArrayLike, ""]) -> ScoreMod:
    """Maps a score to ``cap * tanh(score / cap)``.

    Source: Gemma 2, https://arxiv.org/abs/2408.00118, section 2.

    Args:
      cap: The bound, positive; 50.0 in Gemma 2.

    Raises:
      ValueError: `cap` is a number that is not positive.

    >>> round(float(softcap(2.0)(1.0, 0, 0, 0, 0)), 4)
    0.9242
    """
    if isinstance(cap, (int, float)) and not cap > 0:
        raise ValueError(f"`cap` must be positive. Got {cap}.")
    return lambda score, b, h, q_idx, kv_idx: cap * jnp.tanh(score / cap)


@ready
def sigmoid(bias: float | Float[ArrayLike, ""]) -> ScoreMod:
    """Maps a score to ``sigmoid(score + bias)``, for calls with ``normalize="none"``.

    Args:
      bias: Added to each score. Ramapuram et al. start from ``-log(S)`` for S keys: then the weights of a
        row sum to about 1.

    References:
      Ramapuram et al. 2024, Theory, Analysis, and Best Practices for Sigmoid Self-Attention, arXiv:2409.04431.

    >>> import jax.numpy as jnp, jflex
    >>> q, k, v = jnp.zeros((1, 1, 1, 16)), jnp.ones((1, 4, 1, 16)), jnp.ones((1, 4, 1, 2))
    >>> jflex.flex_attention(q, k, v, jflex.scores.sigmoid(0.0), normalize="none").tolist()  # four keys of weight 1/2
    [[[[2.0, 2.0]]]]
    """
    return lambda score, b, h, q_idx, kv_idx: jax.nn.sigmoid(score + bias)


@ready
def activation(function: Callable[[jax.Array], ArrayLike], *, offset: float = 1.0) -> ScoreMod:
    """Maps a score to ``log(function(score) + offset)``, for `undo_softmax`.

    Source: ReLU attention, https://arxiv.org/abs/2309.08586.

    A kernel computes ``softmax(score_mod(s)) @ value``. With this mod the softmax is ``(function(s) + offset) /
    exp(lse)``, and `undo_softmax` gives ``function(s) @ value``.

    Args:
      function: Of a score, as `jax.nn.relu` or `jax.nn.gelu`.
      offset: What makes the logarithm finite: more than ``-function(score)`` for all scores. The larger, the more
        digits cancel in `undo_softmax`.

    Raises:
      TypeError: `function` cannot be called.
      ValueError: `offset` is not positive.

    >>> score_mod = activation(jax.nn.relu)
    >>> [round(float(score_mod(score, 0, 0, 0, 0)), 4) for score in (-2.0, 0.0, 2.0)]
    [0.0, 0.0, 1.0986]
    """
    if not callable(function):
        raise TypeError(f"`function` of `activation` must be a function of a score. Got {type(function).__name__}.")
    _check_offset("activation", offset)
    return lambda score, b, h, q_idx, kv_idx: jnp.log(function(score) + offset)


def undo_softmax(
    out: Float[ArrayLike, "B T Hq Dv"],
    lse: Float[ArrayLike, "B Hq T"],
    value_sum: Float[ArrayLike, "B _T Hkv Dv"],
    *,
    offset: float = 1.0,
    layout: Literal["BTNH", "BNTH"] = "BTNH",
) -> Float[Array, "B T Hq Dv"]:
    """Turns attention with `activation` into ``function(scores) @ value``: ``out * exp(lse) - offset * value_sum``.

    What is subtracted grows with the number of keys: compute in float32 where digits matter.

    Args:
      out: Output of `flex_attention`.
      lse: Its lse, from ``return_lse=True``.
      value_sum: The sum of the values that each query attends to, [B, T, Hkv, Dv]; T may be 1, shared by all: without a
        mask ``value.sum(1, keepdims=True)``, with a causal one ``jnp.cumsum(value, 1)``.
      offset: That of `activation`.
      layout: Of `out` and `value_sum`.

    Returns:
      An array as `out`, not normalized.

    Raises:
      ValueError: `offset` is not positive, `layout` is unknown, or the heads of `value_sum` do not divide those of
        `out`.

    >>> import jflex
    >>> query, key, value = jax.random.normal(jax.random.key(0), (3, 1, 4, 1, 8))
    >>> out, lse = jflex.flex_attention(query, key, value, activation(jax.nn.relu), scale=1.0, return_lse=True)
    >>> exact = jnp.einsum("bhts,bshd->bthd", jax.nn.relu(jnp.einsum("bthd,bshd->bhts", query, key)), value)
    >>> bool(jnp.allclose(undo_softmax(out, lse, value.sum(1, keepdims=True)), exact, atol=1e-4))
    True
    """
    _check_offset("undo_softmax", offset)
    if layout not in ("BTNH", "BNTH"):
        raise ValueError(f"`layout` of `undo_softmax` must be 'BTNH' or 'BNTH'. Got {layout!r}.")
    out, lse, value_sum = jnp.asarray(out), jnp.asarray(lse), jnp.asarray(value_sum)
    heads = 2 if layout == "BTNH" else 1
    if not value_sum.shape[heads] or out.shape[heads] % value_sum.shape[heads]:
        raise ValueError(
            f"`value_sum` of `undo_softmax` must have the heads of the values. Got {value_sum.shape[heads]} for an "
            f"output of {out.shape[heads]} heads."
        )
    sums = jnp.repeat(value_sum.astype(jnp.float32), out.shape[heads] // value_sum.shape[heads], axis=heads)
    weights = jnp.exp(lse.swapaxes(1, 2) if layout == "BTNH" else lse)[..., None]
    return (out.astype(jnp.float32) * weights - offset * sums).astype(out.dtype)


def _check_offset(caller: str, offset: float) -> None:
    if not offset > 0:
        raise ValueError(f"`offset` of `{caller}` must be positive. Got {offset}.")

"""Plain jnp attention at the precision of a call, step by step; arrays are BTNH, and all scores are in memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp


def scores(query, key, mod: Callable[..., Any] | None, visible, places: Sequence[Any], scale=None, noise=0.0) -> Any:
    """Modified scores [B, Hq, T, S]; a mod gets a score of 1 where a mask hides it.

    Args:
      query: The queries.
      key: The keys, of as many heads or fewer.
      mod: The score mod, or None.
      visible: What the mask shows, [B, Hq, T, S].
      places: b, h, q_idx and kv_idx of each score.
      scale: Of the products; None for the default.
      noise: Added to the scores that the mod gets.
    """
    wide = jnp.float64 if query.dtype == jnp.float64 else jnp.float32
    products = jnp.einsum("bthd,bshd->bhts", query, _of_heads(key, *query.shape[0:3:2]), preferred_element_type=wide)
    products = products if wide == jnp.float64 else rounded_back(products, query.dtype)
    s = jnp.where(visible, products * (query.shape[-1] ** -0.5 if scale is None else scale), 1.0) + noise
    return s if mod is None else over_all(mod)(s, *places)


def over_all(mod: Callable[..., Any]) -> Callable[..., Any]:
    """A mod of scalars as one of arrays [B, Hq, T, S]."""
    for _ in range(4):
        mod = jax.vmap(mod)
    return mod


def weights(s, visible, normalize: str = "softmax", sinks=None) -> tuple[Any, Any]:
    """The weights of modified scores, and the lse [B, Hq, T]: zeros without a softmax."""
    if normalize == "none":
        return jnp.where(visible, s, 0.0), jnp.zeros(s.shape[:3], jnp.float32)
    s = jnp.where(visible, s, -jnp.inf)
    sink = jnp.full((), -jnp.inf) if sinks is None else sinks[None, :, None, None]
    top = jax.lax.stop_gradient(jnp.maximum(s.max(-1, keepdims=True), sink))
    top = jnp.where(top == -jnp.inf, 0.0, top)
    exponentials = jnp.exp(s - top)
    total = exponentials.sum(-1, keepdims=True) + jnp.exp(sink - top)
    empty = total == 0
    lse = jnp.where(empty, -jnp.inf, top + jnp.log(jnp.where(empty, 1.0, total)))[..., 0]
    return exponentials / jnp.where(empty, 1.0, total), lse


def output(weights, value, dtype, factors=None) -> Any:
    """The output in a dtype, that of the products; `factors` are those of dropout."""
    value = _of_heads(value, *weights.shape[:2])
    rounded = (weights if factors is None else weights * factors).astype(dtype)
    return jnp.einsum("bhts,bshd->bthd", rounded, value, preferred_element_type=weights.dtype).astype(dtype)


def row_max(s, visible) -> Any:
    """The largest visible score of each row, without sinks."""
    return jax.lax.stop_gradient(jnp.max(jnp.where(visible, s, -jnp.inf), axis=-1, initial=-jnp.inf))


def entropy(weights, lse, sinks=None) -> Any:
    """The entropy of each row, over the keys and the sink."""
    if sinks is not None:
        of_sink = jnp.exp(sinks[None, :, None] - jnp.where(lse == -jnp.inf, jnp.inf, lse))
        weights = jnp.concatenate([weights, of_sink[..., None]], axis=-1)
    return -jnp.sum(weights * jnp.log(jnp.where(weights > 0, weights, 1.0)), -1)


def _of_heads(x, batch: int, heads: int) -> Any:
    return jnp.repeat(jnp.broadcast_to(x, (batch, *x.shape[1:])), heads // x.shape[2], axis=2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def rounded_back(x, dtype):
    """The same; its cotangent passes through `dtype`, as it must to enter products of that precision."""
    del dtype
    return x


rounded_back.defvjp(lambda x, dtype: (x, None), lambda dtype, _, ct: (ct.astype(dtype).astype(jnp.float32),))

"""Vector mods in pairs: in JAX, on one vector, and in numpy on all of them, with the derivative written by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jflex


@dataclasses.dataclass(frozen=True, eq=False)
class VectorPair:
    """A vector mod.

    Attributes:
      jax: From the captured arrays to the mod.
      exact: ``(x[..., D], b, h, i, c) -> [..., D]`` in numpy; the indices are open grids over the other axes.
      pull: ``(x, d, b, h, i, c) -> (dx, {name: dc})``, of the cotangent ``d`` of the result.
      captures: ``(rng, B, H, T, D) -> {name: array}``.
    """

    jax: Callable[..., Any]
    exact: Callable[..., np.ndarray]
    pull: Callable[..., Any]
    captures: Callable[..., dict[str, np.ndarray]] = lambda rng, B, H, T, D: {}


@dataclasses.dataclass(frozen=True, eq=False)
class OutputPair:
    """An output mod: as `VectorPair`, with the lse ``[...]`` after ``x``, and its cotangent after ``dx``."""

    jax: Callable[..., Any]
    exact: Callable[..., np.ndarray]
    pull: Callable[..., Any]
    captures: Callable[..., dict[str, np.ndarray]]


def added_at(shape, index, values):
    total = np.zeros(shape)
    np.add.at(total, tuple(np.broadcast_to(x, values.shape) for x in index), values)
    return total


def turned(x, i, sign, interleaved):
    """Rotated by ``100 ** (-2 j / D)`` radians for each position."""
    D = x.shape[-1]
    angle = sign * i[..., None] * 100.0 ** (-np.arange(0, D, 2) / D)
    first, second = (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., : D // 2], x[..., D // 2 :])
    pair = first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)
    return np.stack(pair, -1).reshape(x.shape) if interleaved else np.concatenate(pair, -1)


def _rope(c):
    def mod(x, b, h, i):
        angle = i.astype(jnp.float32) * 100.0 ** (-jnp.arange(0, x.size, 2, dtype=jnp.float32) / x.size)
        first, second = jnp.split(x, 2)
        cosine, sine = jnp.cos(angle), jnp.sin(angle)
        return jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine])

    return mod


rope = VectorPair(
    _rope, lambda x, b, h, i, c: turned(x, i, 1, False), lambda x, d, b, h, i, c: (turned(d, i, -1, False), {})
)


def _ready_rope(interleaved, turning):
    """`jflex.rope` of base 100, of the first features; `turning` is how many of D."""

    def exact(x, b, h, i, c, sign=1):
        size = turning(x.shape[-1])
        return np.concatenate([turned(x[..., :size], i, sign, interleaved), x[..., size:]], -1)

    def mod(x, b, h, i):
        return jflex.rope(100.0, rotary_dim=turning(x.size), interleaved=interleaved)(x, b, h, i)

    return VectorPair(lambda c: mod, exact, lambda x, d, b, h, i, c: (exact(d, b, h, i, c, -1), {}))


rope_of_halves = _ready_rope(False, lambda D: D)
rope_of_neighbors = _ready_rope(True, lambda D: D)
partial_rope = _ready_rope(False, lambda D: D // 2)


def _norm_pull(x, d, b, h, i, c):
    r = (np.mean(x * x, axis=-1, keepdims=True) + 1e-6) ** -0.5
    e = d * c["gain"]
    d_gain = (d * x * r).reshape(-1, x.shape[-1]).sum(0)
    return r * e - x * r**3 * np.mean(e * x, axis=-1, keepdims=True), {"gain": d_gain}


norm = VectorPair(
    lambda c: lambda x, b, h, i: x * jax.lax.rsqrt(jnp.mean(x * x) + 1e-6) * c["gain"],
    lambda x, b, h, i, c: x * (np.mean(x * x, axis=-1, keepdims=True) + 1e-6) ** -0.5 * c["gain"],
    _norm_pull,
    lambda rng, B, H, T, D: {"gain": rng.uniform(0.5, 1.5, D)},
)


def added_rows(shape, h, i, values):
    total = np.zeros(shape)
    np.add.at(total, (np.broadcast_to(h, values.shape[:-1]), np.broadcast_to(i, values.shape[:-1])), values)
    return total


def _project_pull(x, d, b, h, i, c):
    e = d * c["table"][h, i]
    flat = lambda a: a.reshape(-1, a.shape[-1])
    d_table = added_rows(c["table"].shape, h, i, d * (x @ c["matrix"]))
    return e @ c["matrix"].T, {"matrix": flat(x).T @ flat(e), "table": d_table}


project = VectorPair(
    lambda c: lambda x, b, h, i: (x @ c["matrix"]) * c["table"][h, i],
    lambda x, b, h, i, c: (x @ c["matrix"]) * c["table"][h, i],
    _project_pull,
    lambda rng, B, H, T, D: {"matrix": rng.normal(size=(D, D)) / D**0.5, "table": rng.uniform(0.5, 1.5, (H, T, D))},
)

by_batch = VectorPair(
    lambda c: lambda x, b, h, i: x * c["factor"][b, h],
    lambda x, b, h, i, c: x * c["factor"][b, h][..., None],
    lambda x, d, b, h, i, c: (
        d * c["factor"][b, h][..., None],
        {"factor": added_at(c["factor"].shape, (b, h), (d * x).sum(-1))},
    ),
    lambda rng, B, H, T, D: {"factor": rng.uniform(0.5, 1.5, (B, H))},
)


by_head = VectorPair(
    lambda c: lambda x, b, h, i: x * c["gains"][h],
    lambda x, b, h, i, c: x * c["gains"][h],
    lambda x, d, b, h, i, c: (d * c["gains"][h], {"gains": added_at(c["gains"].shape, (h,), d * x)}),
    lambda rng, B, H, T, D: {"gains": rng.uniform(0.5, 1.5, (H, D))},
)

by_position = VectorPair(
    lambda c: lambda x, b, h, i: x * (2.0 / (1 + i % 7).astype(jnp.float32)),
    lambda x, b, h, i, c: x * (2.0 / (1 + i % 7))[..., None],
    lambda x, d, b, h, i, c: (d * (2.0 / (1 + i % 7))[..., None], {}),
)


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


def _gate_pull(x, lse, d, b, h, i, c):
    gate, lanes = _sigmoid(lse)[..., None], c["lanes"][h]
    d_lanes = np.zeros(c["lanes"].shape)
    np.add.at(d_lanes, np.broadcast_to(h, x.shape[:-1]), d * x * gate)
    d_lse = (d * x * lanes).sum(-1) * _sigmoid(lse) * _sigmoid(-lse)
    return d * gate * lanes, d_lse, {"lanes": d_lanes}


gate = OutputPair(
    lambda c: lambda out, lse, b, h, i: out * jax.nn.sigmoid(lse) * c["lanes"][h],
    lambda x, lse, b, h, i, c: x * _sigmoid(lse)[..., None] * c["lanes"][h],
    _gate_pull,
    lambda rng, B, H, T, D: {"lanes": rng.uniform(0.5, 1.5, (H, D))},
)

"""The oracle: dense attention in numpy float64, forward and gradients by formula. It imports nothing of jflex.

Arrays are in the layout BTNH. A mod is a numpy function over open index grids ``b [B,1,1,1]``, ``h [1,Hq,1,1]``, ``q
[1,1,T,1]``, ``k [1,1,1,S]`` and a dict of captured arrays ``c``; its derivatives are written beside it, by hand, and
`test_oracle.py` holds them against finite differences.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

Captures = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True, eq=False)
class Score:
    """A score mod in numpy.

    Attributes:
      value: ``(s, b, h, q, k, c) -> s``.
      d_score: Derivative of the result with respect to ``s``, of the same arguments; None where it is 1.
      d_captures: ``{name: [(partial, index), ...]}``: the derivative with respect to the element (or the trailing
        axes) of the captured array at ``index``, once for each load.
    """

    value: Callable[..., Any]
    d_score: Callable[..., Any] | None = None
    d_captures: Callable[..., dict[str, list[tuple[Any, tuple[Any, ...]]]]] | None = None


class Forward(NamedTuple):
    """Output [B, T, Hq, Dv], lse [B, Hq, T], and what the gradients need.

    ``factors`` of dropout multiply the weights; ``places`` are open grids of b, h, q_idx and kv_idx.
    """

    out: np.ndarray
    lse: np.ndarray
    raw: np.ndarray
    weights: np.ndarray
    visible: np.ndarray
    places: tuple[np.ndarray, ...]
    factors: np.ndarray | float = 1.0
    normalize: str = "softmax"


class Gradients(NamedTuple):
    """Gradients, and how sensitive they are.

    ``masses`` are the sums of the magnitudes that were added up. ``output_masses`` are what a relative error of the
    output makes of a gradient, at most, if the backward pass computes rowsum(d_out * out) from that output, as fused
    ones do.
    """

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    captures: Captures
    masses: dict[str, np.ndarray]
    output_masses: dict[str, np.ndarray]


def grids(shape: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    """Open grids of b, h, q_idx, kv_idx."""
    return tuple(np.ogrid[tuple(slice(n) for n in shape)])


def forward(
    query, key, value, scale, score: Score | None, mask, captures: Captures, sinks=None, factors=None,
    normalize="softmax", places=None,
) -> Forward:  # fmt: skip
    """Follows the definition.

    `sinks` [Hq] enter the denominators, `factors` of dropout are a function of the grids, and `places` are the grids
    if those of the axes are not the indices that mods get.
    """
    k, v = (_per_query_head(x, query) for x in (key, value))
    raw = scale * np.einsum("bthd,bshd->bhts", query, k)
    places = grids(raw.shape) if places is None else places
    visible = np.broadcast_to(True if mask is None else mask(*places, captures), raw.shape)
    with np.errstate(all="ignore"):  # where nothing is visible, a mod may divide by 0
        s = raw if score is None else score.value(raw, *places, captures)
    factors = 1.0 if factors is None else factors(*places)
    if normalize == "none":
        weights = np.where(visible, s, 0)
        out = np.einsum("bhts,bshd->bthd", weights * factors, v)
        return Forward(out, np.zeros(s.shape[:3]), raw, weights, visible, places, factors, normalize)
    s = np.where(visible, s, -np.inf)
    sink = -np.inf if sinks is None else sinks[:, None, None]
    top = np.maximum(s.max(axis=-1, keepdims=True, initial=-np.inf), sink)
    empty = top == -np.inf
    weights = np.exp(s - np.where(empty, 0, top))
    total = np.where(empty, 1, weights.sum(-1, keepdims=True) + np.exp(sink - np.where(empty, 0, top)))
    weights = weights / total
    lse = np.where(empty, -np.inf, np.where(empty, 0, top) + np.log(total))[..., 0]
    return Forward(np.einsum("bhts,bshd->bthd", weights * factors, v), lse, raw, weights, visible, places, factors)


def row_max(found: Forward, score: Score | None, captures: Captures) -> np.ndarray:
    """The largest visible score of each row [B, Hq, T], without sinks; -inf for a row without any."""
    with np.errstate(all="ignore"):
        s = found.raw if score is None else score.value(found.raw, *found.places, captures)
    return np.where(found.visible, s, -np.inf).max(axis=-1, initial=-np.inf)


def entropy(found: Forward, sinks=None) -> np.ndarray:
    """``-sum(p * log(p))`` of each row [B, Hq, T], over the keys and the sink, before dropout."""
    return _entropy_terms(found.weights).sum(-1) + _entropy_terms(_of_sinks(found, sinks))


def _entropy_terms(p: np.ndarray) -> np.ndarray:
    return -p * np.log(np.where(p > 0, p, 1))


def _of_sinks(found: Forward, sinks) -> np.ndarray:
    """The weights of sinks [B, Hq, T]; 0 without."""
    if sinks is None:
        return np.zeros(found.lse.shape)
    return np.exp(sinks[:, None] - np.where(found.lse == -np.inf, np.inf, found.lse))


def _through_entropy(p: np.ndarray, of_row: np.ndarray, d_entropy: np.ndarray) -> np.ndarray:
    """The cotangent of scores with the weights p, from that of the entropy: dH/ds is ``-p (log p + H)``."""
    return d_entropy * (_entropy_terms(p) - p * of_row)


def gradients(
    query, key, value, scale, score: Score | None, found: Forward, captures: Captures, d_out, d_lse, sinks=None,
    d_entropy=None,
) -> Gradients:  # fmt: skip
    """Pulls cotangents of out, lse and entropy back; the gradient of `sinks` is among those of captured arrays."""
    v, p = _per_query_head(value, query), found.weights
    d_p = found.factors * np.einsum("bthd,bshd->bhts", d_out, v)
    delta = (p * d_p).sum(-1, keepdims=True)
    pull = lambda d_s, of: _pull(
        (of(query), of(key), of(value), of(d_out)), of(scale), score, found, captures, of(d_s), of
    )
    d_s = p * (d_p - delta + d_lse[..., None]) if found.normalize == "softmax" else np.where(found.visible, d_p, 0)
    of_row, size = entropy(found, sinks), np.abs(d_s)
    if d_entropy is not None:
        d_s = d_s + _through_entropy(p, of_row[..., None], d_entropy[..., None])
        size = size + np.abs(d_entropy[..., None]) * (_entropy_terms(p) + p * of_row[..., None])
    sums, masses = pull(d_s, lambda x: x)
    sizes, _ = pull(size, np.abs)
    output = np.abs(found.out * d_out).sum(-1).swapaxes(1, 2)[..., None] * (found.normalize == "softmax")
    by_output, output_masses = pull(p * output, np.abs)
    if sinks is not None:
        of_sink = np.exp(sinks[:, None] - found.lse)
        d_sink = of_sink * (d_lse - delta[..., 0])
        if d_entropy is not None:
            d_sink = d_sink + _through_entropy(of_sink, of_row, d_entropy)
        sums["sinks"] = d_sink.sum((0, 2))
        masses["sinks"] = sizes["sinks"] = np.abs(d_sink).sum((0, 2))
        output_masses["sinks"] = (of_sink * output[..., 0]).sum((0, 2))
    names = ("query", "key", "value")
    of_captures = {name: x for name, x in sums.items() if name not in names}
    return Gradients(
        *(sums[name] for name in names),
        of_captures,
        masses | {name: sizes[name] for name in names},
        output_masses | {name: by_output[name] for name in ("query", "key")} | {"value": np.zeros_like(sums["value"])},
    )


def _pull(arrays, scale, score, found: Forward, captures: Captures, d_s, of) -> tuple[dict, dict]:
    """Pulls the cotangent of the modified scores back; of captured arrays also the sums of the magnitudes.

    `of` is ``np.abs`` where magnitudes are asked for instead of sums, else the identity.
    """
    query, key, value, d_out = arrays
    k, places = _per_query_head(key, query), found.places
    d_raw, sums, masses = d_s, {}, {}
    with np.errstate(all="ignore"):
        if score is not None and score.d_score is not None:
            d_raw = np.where(found.visible, d_s * score.d_score(found.raw, *places, captures), 0)
        partials = {} if score is None or score.d_captures is None else score.d_captures(found.raw, *places, captures)
    d_raw = of(d_raw)
    for name, loads in partials.items():
        sums[name], masses[name] = np.zeros(captures[name].shape), np.zeros(captures[name].shape)
        for partial, index in loads:
            more = np.ndim(partial) - d_s.ndim if np.ndim(partial) > d_s.ndim else 0  # trailing axes of one load
            widen = lambda x, more=more: x.reshape(x.shape + (1,) * more)
            with np.errstate(all="ignore"):
                each = np.where(widen(found.visible), widen(d_s) * partial, 0)
            index = tuple(np.broadcast_to(i, d_s.shape) for i in index)
            if index:
                np.add.at(sums[name], index, each)
                np.add.at(masses[name], index, np.abs(each))
            else:
                sums[name] += each.sum()
                masses[name] += np.abs(each).sum()
    sums["query"] = scale * np.einsum("bhts,bshd->bthd", d_raw, k)
    sums["key"] = _per_key_head(scale * np.einsum("bhts,bthd->bshd", d_raw, query), key)
    sums["value"] = _per_key_head(np.einsum("bhts,bthd->bshd", of(found.weights) * found.factors, d_out), value)
    return sums, masses


def _per_query_head(x: np.ndarray, query: np.ndarray) -> np.ndarray:
    x = np.broadcast_to(x, (query.shape[0], *x.shape[1:]))
    return np.repeat(x, query.shape[2] // x.shape[2], axis=2)


def _per_key_head(gradient: np.ndarray, like: np.ndarray) -> np.ndarray:
    B, S, _, size = gradient.shape
    summed = gradient.reshape(B, S, like.shape[2], -1, size).sum(3)
    return summed.sum(0, keepdims=True) if like.shape[0] < B else summed

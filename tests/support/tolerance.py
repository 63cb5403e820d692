"""How far from the oracle a result may be.

At most twice as far as plain jnp attention of the same precision, and one rounding of the dtype of the result, both on
average and at the worst element. NaN is never right.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np


def check(name: str, got, plain, exact: np.ndarray, rounding: np.ndarray | None = None) -> None:
    """Fails unless `got` is near enough to `exact`.

    Args:
      name: What it is, for the message.
      got: The result under test.
      plain: The same by plain jnp attention; sets the dtype of the result, too.
      exact: The oracle's.
      rounding: The error that one rounding makes; None for one of `exact` to the dtype of the result.
    """
    got, plain = np.asarray(got), np.asarray(plain)
    assert got.shape == exact.shape, f"{name}: shape {got.shape}, not {exact.shape}"
    assert got.dtype == plain.dtype, f"{name}: dtype {got.dtype}, not {plain.dtype}"
    if not exact.size:
        return
    own, allowed = _error(got, exact), _error(plain, exact)
    assert np.isfinite(allowed).all(), f"{name}: plain attention is not finite where the oracle is; the case is no use"
    rounding = one_rounding(exact, got.dtype) if rounding is None else rounding
    for statistic in (np.mean, np.max):
        error, limit = statistic(own), 2 * statistic(allowed) + statistic(rounding)
        assert error <= limit, (
            f"{name}: {statistic.__name__} error {error:.3g} exceeds {limit:.3g} = 2 x {statistic(allowed):.3g} (plain)"
            f" + {statistic(rounding):.3g} (rounding); worst at {np.unravel_index(np.argmax(own), own.shape)}"
        )


def one_rounding(x: np.ndarray, dtype) -> np.ndarray:
    """How far rounding to `dtype` moves each number, at most."""
    return float(ml_dtypes.finfo(dtype).eps) * np.where(np.isfinite(x), np.abs(x), 0)


def half_rounding(dtype) -> float:
    """How far rounding to nearest moves a number, relative to it: as the output, from which a backward pass starts."""
    return float(ml_dtypes.finfo(dtype).eps) / 2


def gradient_rounding(exact: np.ndarray, mass: np.ndarray, lse: np.ndarray, dtype) -> np.ndarray:
    """One rounding of a gradient to its dtype, and one of the lse to float32.

    The backward pass computes the weights anew, as exp(score - lse): a rounding of the lse, relative to the lse,
    becomes one of the weights, and so of each term of a sum. Plain attention keeps the weights and has none.

    Args:
      exact: The gradient.
      mass: The sum of the magnitudes of its terms.
      lse: Of all rows.
      dtype: Of the gradient.
    """
    largest = np.max(one_rounding(lse, np.float32), initial=0)
    return one_rounding(exact, dtype) + largest * mass


def score_rounding(drawn, found, case) -> np.ndarray:
    """How far sums in another order than that of plain attention may move the scores of each row, [B, Hq, T].

    A sum in float32 of D products, one by one, is off by about sqrt(D) / 2 units in the last place. A tensor core adds
    16 products of 16-bit numbers at a time, and truncates: each of the D / 16 additions may lose one unit in the last
    place of the largest sum. Of eight bits it adds 32 products, and keeps 14 bits (DeepSeek-V3, arXiv:2412.19437,
    section 3.5.2). There the hardware's tanh may be used too, with a relative error of 2 ** -11.

    Args:
      drawn: The arrays of the case.
      found: The oracle's forward pass.
      case: The case.
    """
    eps, size = float(np.finfo(np.float32).eps), case.sizes.D
    largest = np.abs(found.raw * case.within).max(axis=-1, initial=0)
    if case.dtype == "float32":
        return eps * np.sqrt(size) / 2 * largest
    query, key = (x.astype(np.float64) for x in (drawn.query, drawn.key))
    key = np.broadcast_to(
        np.repeat(key, query.shape[2] // key.shape[2], axis=2), (query.shape[0], *key.shape[1:2], *query.shape[2:])
    )
    masses = np.einsum("bthd,bshd->bhts", np.abs(query), np.abs(key)) * abs(
        size**-0.5 if case.scale is None else case.scale
    )
    at_once, unit = (32, 2.0**-13) if case.qk_dtype else (16, eps)
    moved = unit * (1 + -(-size // at_once)) * (masses * case.within).max(axis=-1, initial=0)
    return moved + (2.0**-11 * largest if case.score is not None and case.score.by_tanh else 0)


def forward_rounding(drawn, found, case, moves: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """How far such sums may move the output [B, T, Hq, Dv] and the lse [B, Hq, T].

    Args:
      drawn: The arrays of the case.
      found: The oracle's forward pass.
      case: The case.
      moves: How far a weight moves with its score; None for as far as the weight is large.
    """
    moved = score_rounding(drawn, found, case)
    moves = np.abs(found.weights if moves is None else moves) * found.factors
    batch, heads = moves.shape[:2]
    value = np.broadcast_to(np.abs(drawn.value.astype(np.float64)), (batch, *drawn.value.shape[1:]))
    around = np.einsum("bhts,bshd->bthd", moves, np.repeat(value, heads // value.shape[2], axis=2))
    return 2 * np.where(np.isfinite(moved), moved, 0).swapaxes(1, 2)[..., None] * around, moved


def _error(x: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Absolute error; 0 where both are the same infinity, infinite where one is NaN or only one is infinite."""
    x = x.astype(np.float64)
    with np.errstate(invalid="ignore"):
        error = np.where(x == exact, 0.0, np.abs(x - exact))
    return np.where(np.isnan(error), np.inf, error)

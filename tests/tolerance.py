"""How far from the oracle a result may be.

At most twice as far as plain jnp attention of the same precision, and one rounding of the dtype of the result, both on
average and at the worst element. NaN is never right.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np


def check(name: str, got, plain, exact: np.ndarray, mass: np.ndarray | None = None) -> None:
    """Fails unless `got` is near enough to `exact`.

    Args:
      name: What it is, for the message.
      got: The result under test.
      plain: The same by plain jnp attention; sets the dtype of the result, too.
      exact: The oracle's.
      mass: For a sum, the sum of the magnitudes of its terms: what one rounding is relative to. None: `exact` itself.
    """
    got, plain = np.asarray(got), np.asarray(plain)
    assert got.shape == exact.shape, f"{name}: shape {got.shape}, not {exact.shape}"
    assert got.dtype == plain.dtype, f"{name}: dtype {got.dtype}, not {plain.dtype}"
    if not exact.size:
        return
    own, allowed = _error(got, exact), _error(plain, exact)
    assert np.isfinite(allowed).all(), f"{name}: plain attention is not finite where the oracle is; the case is no use"
    size = np.abs(exact if mass is None else mass)
    rounding = float(ml_dtypes.finfo(got.dtype).eps) * np.where(np.isfinite(size), size, 0)
    for statistic in (np.mean, np.max):
        error, limit = statistic(own), 2 * statistic(allowed) + statistic(rounding)
        assert error <= limit, (
            f"{name}: {statistic.__name__} error {error:.3g} exceeds {limit:.3g} = 2 x {statistic(allowed):.3g} (plain) + "
            f"{statistic(rounding):.3g} (rounding); worst at {np.unravel_index(np.argmax(own), own.shape)}"
        )


def _error(x: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Absolute error; 0 where both are the same infinity, infinite where one is NaN or only one is infinite."""
    x = x.astype(np.float64)
    with np.errstate(invalid="ignore"):
        error = np.where(x == exact, 0.0, np.abs(x - exact))
    return np.where(np.isnan(error), np.inf, error)

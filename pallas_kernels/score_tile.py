"""A tile of scores, with score mod and mask applied; the same for every kernel."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.program.evaluate import Evaluation


class ScoreTile(NamedTuple):
    """A tile of scores.

    Attributes:
      s: The scores, up to the `log2_scale` of the kernel; -inf where masked.
      visible: False where masked, or None where nothing is masked.
      score: The evaluation of the score mod, for its derivative.
      kept: False where dropout drops the weight, or None without dropout.
    """

    s: jax.Array
    visible: jax.Array | None
    score: Evaluation | None
    kept: jax.Array | None = None

    def clear(self, x: jax.Array) -> jax.Array:
        """A tile with zeros where masked."""
        return x if self.visible is None else jnp.where(self.visible, x, 0.0)

    def drop(self, x: jax.Array) -> jax.Array:
        """A tile with zeros where dropout drops the weight."""
        return x if self.kept is None else jnp.where(self.kept, x, 0.0)

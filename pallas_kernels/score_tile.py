"""What every kernel knows of a tile of scores, once mod and mask are applied."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.program.evaluate import Evaluation


class ScoreTile(NamedTuple):
    """A tile of scores.

    Attributes:
      s: The scores, in the unit of the kernel's own; -inf where nothing is seen.
      visible: What is seen, or None where everything is.
      score: The evaluation of the score mod, for its derivative.
    """

    s: jax.Array
    visible: jax.Array | None
    score: Evaluation | None

    def clear(self, x: jax.Array) -> jax.Array:
        """A tile with zeros where nothing is seen."""
        return x if self.visible is None else jnp.where(self.visible, x, 0.0)

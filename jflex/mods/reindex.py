"""Re-indexed mods: one class that maps the positions of a call to those that a mod was written for.

Queries that continue a sequence, packed sequences, pages, selected blocks and shards only differ in the mapping.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jflex.mods.array_sizes import Requirement, SizedMod


class Positions(NamedTuple):
    """Positions at which a mod is evaluated, int32 scalars: any valid ones where `exists` is False."""

    b: ArrayLike
    h: ArrayLike
    q_idx: ArrayLike
    kv_idx: ArrayLike
    exists: jax.Array | None = None  # None: True


@dataclasses.dataclass(frozen=True, eq=False)
class ReindexedMod(SizedMod):
    """A score_mod or mask_mod at other positions. Where there is none, a mask is False and a score ``-inf``.

    Or a `query_mod` or `output_mod`, for `with_offset`: called with a vector, it maps the positions of queries.

    >>> causal = lambda b, h, q_idx, kv_idx: q_idx >= kv_idx
    >>> continued = ReindexedMod(causal, lambda b, h, q_idx, kv_idx: Positions(b, h, q_idx + 16, kv_idx))
    >>> bool(continued(0, 0, 0, 16)), bool(continued(0, 0, 0, 17))
    (True, False)
    """

    mod: Callable[..., Any]  # the mod, of either role: a score_mod is called with a score before the positions
    # maps ``b, h, q_idx, kv_idx`` of the call to the positions for `mod`. The arrays that it captures are operands,
    # like those of `mod`
    positions: Callable[[jax.Array, jax.Array, jax.Array, jax.Array], Positions]
    # requirements of `mod` on the call that remain after the mapping; empty if already checked
    required: tuple[Requirement, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "__wrapped__", self.mod)  # messages name the function, and the signature is its own

    def __call__(self, *args: jax.Array) -> ArrayLike:
        """Evaluates the mod at one position."""
        if jnp.ndim(args[0]) == 1 and all(jnp.ndim(x) == 0 for x in args[-3:]):
            return self._of_vector(*args)
        *score, b, h, q_idx, kv_idx = args
        *positions, exists = self.positions(b, h, q_idx, kv_idx)
        value = self.mod(*score, *positions)
        if exists is None:
            return value
        if score:
            return jnp.where(exists, value, -jnp.inf)
        if getattr(value, "dtype", type(value)) not in (bool, jnp.bool_):
            return value  # tracing refuses it, and names the user's function
        return exists & value

    def _of_vector(self, *args: jax.Array) -> ArrayLike:
        """Reindexes a vector mod, whose last index is its query."""
        *vector, b, h, q_idx = args
        return self.mod(*vector, *self.positions(b, h, q_idx, jnp.zeros_like(q_idx))[:3])


def reindexed(mod: Any, positions: Callable[[jax.Array, jax.Array, jax.Array, jax.Array], Positions]) -> Any:
    """A mod at other positions; None without one. What cannot be called stays as it is, and tracing refuses it."""
    return ReindexedMod(mod, positions) if callable(mod) else mod

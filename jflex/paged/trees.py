"""Trees of drafted tokens in a paged batch: rows of keys, positions of nodes, and mods at these positions.

Row and position differ in a tree: its nodes are written to consecutive rows, and nodes of one depth have one position.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Int32

from jflex.mods.reindex import Positions
from jflex.mods.types import MaskMod
from jflex.types import AnyArray


@dataclasses.dataclass(frozen=True, eq=False)
class Trees:
    """The trees of a batch that has requests."""

    # the row of the first node of each request; for one without a tree its length, after all rows
    starts: Int32[Array, " R"]
    words: Int32[Array, "R nodes"]  # the ancestors of each node, itself included, as bits
    depths: Int32[Array, "R nodes"]  # the depth of each node; -1 for padding

    @classmethod
    def from_ancestors(cls, ancestors: AnyArray, kv_lengths: AnyArray, qo_indptr: AnyArray) -> Trees:
        """Trees of the fields of a batch."""
        words, lengths, indptr = (jnp.asarray(x) for x in (ancestors, kv_lengths, qo_indptr))
        counts = jnp.where(words[:, 0] != 0, indptr[1:] - indptr[:-1], 0)
        return cls(lengths - counts, words, lax.population_count(words) - 1)

    def position(self, b: jax.Array, row: jax.Array) -> jax.Array:
        """The position of a token that is in a row of a request."""
        node = row - self.starts[b]
        return jnp.where(node < 0, row, self.starts[b] + self.depths[b, self._clip(node)])

    def positions(self, b: jax.Array, h: jax.Array, q: jax.Array, kv: jax.Array) -> Positions:
        """The positions of rows, for a score_mod, or the mod of dropout."""
        return Positions(b, h, self.position(b, q), self.position(b, kv))

    def key_positions(self, b: jax.Array, h: jax.Array, row: jax.Array, kv: jax.Array) -> Positions:
        """The position of a row of keys, the last index of a key_mod or a value_mod."""
        return Positions(b, h, self.position(b, row), kv)

    def of_mask(self, mod: MaskMod | None) -> MaskMod:
        """A mask_mod on rows: within the tree, nodes attend to their ancestors and themselves alone.

        Keys before the tree are where they were, so that comparisons of positions still decide tiles of them.
        """

        def mask(b: jax.Array, h: jax.Array, q: jax.Array, kv: jax.Array) -> ArrayLike:
            position = self.position(b, q)
            before = kv < self.starts[b]
            word = self.words[b, self._clip(q - self.starts[b])]
            above = (word & jnp.left_shift(1, self._clip(kv - self.starts[b]))) != 0
            if mod is None:
                return before | above
            # Not `&` with the value, which may be of a type that tracing refuses, in the words of the user's function.
            shown, shown_above = mod(b, h, position, kv), mod(b, h, position, self.position(b, kv))
            if any(getattr(x, "dtype", type(x)) not in (bool, jnp.bool_) for x in (shown, shown_above)):
                return shown
            return (before & shown) | (~before & above & shown_above)

        if mod is not None:
            mask.__wrapped__ = mod  # pyright: ignore[reportFunctionMemberAccess]
        return mask

    def _clip(self, node: jax.Array) -> jax.Array:
        return jnp.clip(node, 0, self.words.shape[1] - 1)

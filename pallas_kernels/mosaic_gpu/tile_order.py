"""Which tile the blocks of threads compute first, and which last."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

MULTIPROCESSORS = 132  # of an H100 or H200
ROUNDS = 2  # of the multiprocessors, which the tiles of the heads that are computed at once fill


class Grid(NamedTuple):
    """All tiles: batch, heads, and tiles of a head, of which those with most work come first.

    A few heads are computed at once, the first tiles of all of them before the second ones. One by one, the heavy tiles
    of the last head would begin when all else is done: with list scheduling of a causal mask over 64 tiles of each of
    16 heads the last multiprocessor ends 11.5 % after the mean, with four heads at once 0.2 %. With all at once keys
    and values would not be found in the L2 cache.
    """

    batch: int
    heads: int
    tiles: int

    @property
    def size(self) -> int:
        """How many there are."""
        return self.batch * self.heads * self.tiles

    @property
    def together(self) -> int:
        """How many heads are computed at once, but for the last ones, which may be fewer."""
        return max(1, min(self.batch * self.heads, ROUNDS * MULTIPROCESSORS // max(1, self.tiles)))

    def place(self, number: Any) -> tuple[Any, Any, Any]:
        """Batch, head, and place in the order of the head's tiles, of a number below the size."""
        together, tiles, heads = (jnp.int32(x) for x in (self.together, self.tiles, self.heads))
        part = lax.div(number, together * tiles)
        rest, count = number - part * together * tiles, lax.min(together, self.batch * heads - part * together)
        nth = lax.div(rest, count)
        head = part * together + rest - nth * count
        return lax.div(head, heads), lax.rem(head, heads), nth

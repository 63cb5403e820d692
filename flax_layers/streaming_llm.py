"""StreamingLLM: attention to the first tokens and to the last ones, at positions within that cache."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

import jflex
from flax_layers.sampling import checked_integer
from jflex.masks import sliding_window
from jflex.paged import PagedBatch, token_positions, token_requests


class Part(NamedTuple):
    """Attention over a part of the keys.

    Attributes:
        positions: Where queries are rotated.
        score_mod: Of this part.
        mask_mod: Shows the keys of this part.
    """

    positions: Int32[Array, " N"]
    score_mod: jflex.ScoreMod | None
    mask_mod: jflex.MaskMod


@functools.partial(jax.tree_util.register_dataclass, data_fields=("dropped",), meta_fields=("sinks", "window"))
@dataclasses.dataclass(frozen=True)
class Streaming:
    """A query attends to the first tokens, the attention sinks, and to a window of the last ones.

    Rotary embedding and mods take positions within this cache of `size` tokens: in a longer sequence the sinks are at
    0, 1, ..., the window follows them without a gap, and the query is at `size - 1`. So no position is beyond what the
    model was trained on, however long the sequence is.

    Nothing is rotated again. Scores depend on distances alone, and in the window these are the distances of the whole
    sequence: keys are stored as they are rotated there. The sinks alone come closer: for them, the query is rotated at
    its position within the cache. Both parts are merged by their lse.

    Attributes:
        sinks: First tokens that stay visible; 0: the window alone.
        window: Last tokens that are visible, the query's own included.
        dropped: Of each request of a call, the tokens between sinks and window whose pages are no longer in the page
            table: whole pages. Its `kv_lengths` count the other tokens. None: all pages are there.

    Raises:
        TypeError: A number is not an integer.
        ValueError: A number is out of range.

    References:
        Xiao et al. 2024, Efficient Streaming Language Models with Attention Sinks, arXiv:2309.17453.

    Example:
        >>> streaming = Streaming(sinks=4, window=1020)
        >>> streaming.size
        1024
    """

    sinks: int = 4
    window: int = 1020
    dropped: Int32[Array, " R"] | None = None

    def __post_init__(self) -> None:
        for name, least in (("sinks", 0), ("window", 1)):
            if checked_integer(name, getattr(self, name)) < least:
                raise ValueError(
                    f"`{name}` of `Streaming` must be at least {least}. Got {getattr(self, name)}. The paper has 4 "
                    "sinks, and a window that fills the context of the model."
                )

    @property
    def size(self) -> int:
        """Tokens that a query attends to at most, and positions that the model sees."""
        return self.sinks + self.window

    def positions(self, batch: PagedBatch, num_tokens: int) -> Int32[Array, " N"]:
        """The position of every packed query in its sequence: where it and its key are rotated.

        Args:
            batch: The requests.
            num_tokens: N, the number of packed rows.

        Returns:
            Positions; those of padding mean nothing.
        """
        positions = token_positions(batch, num_tokens)
        if self.dropped is None or not batch.requests:
            return positions
        return positions + jnp.asarray(self.dropped)[jnp.maximum(token_requests(batch, num_tokens), 0)]

    def parts(
        self, positions: Int32[Array, " N"], score_mod: jflex.ScoreMod | None, mask_mod: jflex.MaskMod | None
    ) -> tuple[Part, ...]:
        """The window, and the sinks that are before it: no key is in both.

        Args:
            positions: Of the queries, from `positions`.
            score_mod: Of the layer. It gets positions within the cache.
            mask_mod: Of the layer, likewise; None: causal.

        Returns:
            What is attended to and merged.

        Example:
            >>> window, sinks = Streaming(sinks=1, window=2).parts(jnp.arange(4), None, None)
            >>> jflex.create_mask(window.mask_mod, None, None, 4, 4)[0, 0, 3].astype(int).tolist()
            [0, 0, 1, 1]
            >>> jflex.create_mask(sinks.mask_mod, None, None, 4, 4)[0, 0, 3].astype(int).tolist(), sinks.positions
            ([1, 0, 0, 0], Array([0, 1, 2, 2], dtype=int32))
        """
        last = self.size - 1
        before = lambda b, h, q_idx, kv_idx: (kv_idx < self.sinks) & (kv_idx <= q_idx - self.window)

        def part(at: Int32[Array, " N"], shown: jflex.MaskMod, *, moves: bool) -> Part:
            within = lambda mod: _within(mod, last, moves=moves)
            mask = shown if mask_mod is None else jflex.and_masks(shown, within(mask_mod))
            return Part(at, None if score_mod is None else within(score_mod), mask)

        window = part(positions, sliding_window(self.window - 1), moves=True)
        return (window, part(jnp.minimum(positions, last), before, moves=False)) if self.sinks else (window,)


def _within(mod: Callable[..., Any], last: int, *, moves: bool) -> Callable[..., Any]:
    """A mod that takes positions in the page table, and gives `mod` those within the cache.

    Pages are dropped only where the query is behind the end of the cache, so dropped tokens make no difference.

    Args:
        mod: Of scores or of a mask.
        last: The last position within the cache.
        moves: Whether the keys are those of the window, which moves, and not the sinks.
    """

    def within(*arguments: Any) -> Any:
        *others, q_idx, kv_idx = arguments
        gap = jnp.maximum(q_idx - last, 0)  # tokens between the sinks and the window
        return mod(*others, q_idx - gap, kv_idx - gap if moves else kv_idx)

    return within

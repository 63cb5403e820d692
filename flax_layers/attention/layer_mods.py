"""The mods and the mask of a layer, and of its calls."""

from __future__ import annotations

from typing import Any, NamedTuple

from jaxtyping import Array, Float, Int32

import jflex
from flax_layers.attention.constant_mask import block_mask_data
from flax_layers.attention.selection import BlockSelection


class Mods(NamedTuple):
    """The mods and the mask of a constructor or of a call; or, in place of a mask, the selection that makes one.

    Example:
        >>> causal, softcap = Mods(mask_mod=jflex.masks.causal()), jflex.scores.softcap(30.0)
        >>> causal.replaced_by(score_mod=softcap).mask_mod is causal.mask_mod
        True
    """

    score_mod: jflex.ScoreMod | None = None
    mask_mod: jflex.MaskMod | None = None
    block_mask: jflex.BlockMask | None = None
    selection: BlockSelection | None = None

    def replaced_by(
        self,
        score_mod: jflex.ScoreMod | None = None,
        mask_mod: jflex.MaskMod | None = None,
        block_mask: jflex.BlockMask | BlockSelection | None = None,
    ) -> Mods:
        """Replaces these by those of a call. Either form of a mask replaces both."""
        score_mod = self.score_mod if score_mod is None else score_mod
        if mask_mod is None and block_mask is None:
            return self._replace(score_mod=score_mod)
        if isinstance(block_mask, BlockSelection):
            return Mods(score_mod, mask_mod, None, block_mask)
        return Mods(score_mod, mask_mod, block_mask)

    def mask_for(self, query: Float[Array, "B T Hq D"], key: Float[Array, "B T Hkv D"]) -> jflex.BlockMask | None:
        """The BlockMask of a call, made of its queries and keys if they select blocks."""
        return self.block_mask if self.selection is None else self.selection.block_mask(query, key)

    def for_decoding(self) -> Mods:
        """Replaces the BlockMask by its mask_mod, which takes positions in the whole sequence.

        Raises:
            ValueError: The BlockMask masks more than its mask_mod, or is a selection.
        """
        if self.selection is not None:
            raise ValueError(
                "The `block_mask` of this layer's constructor is a BlockSelection, which selects blocks in calls on "
                "whole sequences, so it cannot be used for decoding. Pass `mask_mod` to this call: with "
                "`jflex.masks.causal()`, tokens attend to all keys before them."
            )
        if self.block_mask is None:
            return self
        if self.mask_mod is not None or not self.block_mask.lists_follow_mod:
            raise ValueError(
                "The `block_mask` of this layer's constructor masks more than its mask_mod, so it cannot be used for "
                "decoding. Pass `mask_mod` to this call, a mask of positions in the whole sequence."
            )
        return Mods(self.score_mod, self.block_mask.mask_mod)

    def at(self, first: Int32[Array, ""] | Int32[Array, " B"]) -> Mods:
        """The mods for queries whose positions begin at `first`; they must have no BlockMask."""
        move = lambda mod: None if mod is None else jflex.with_offset(mod, first)
        return Mods(move(self.score_mod), move(self.mask_mod))


class LayerMods:
    """The mods and the mask that a layer's constructor got, and those of a call."""

    score_mod: Any
    mask_mod: Any
    block_mask: Any

    def _mods(
        self,
        score_mod: jflex.ScoreMod | None,
        mask_mod: jflex.MaskMod | None,
        block_mask: jflex.BlockMask | BlockSelection | None = None,
    ) -> Mods:
        """The mods of a call: its own, or else those of the constructor."""
        stored = Mods().replaced_by(self.score_mod, self.mask_mod, block_mask_data(self.block_mask))
        return stored.replaced_by(score_mod, mask_mod, block_mask)

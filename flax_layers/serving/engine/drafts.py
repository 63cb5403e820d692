"""Drafts by prompt look-up: earlier continuations of the last tokens, merged into a tree.

Prompt look-up decoding is of Saxena, 2023 (https://github.com/apoorvumang/prompt-lookup-decoding); trees of drafts are
of SpecInfer (Miao et al., 2023, arXiv:2305.09781). Host Python, nothing of a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from jflex.masks import tree_bits

MAX_MATCHES = 16
"""Earlier positions that are compared: the most recent ones. It bounds the time of a look-up."""
LONGEST_MATCH = 8
"""Tokens before a position that are compared."""
DECAY = 0.75
"""Over the code and texts of this repository, 15 drafts in this order of weights got 10% more accepted than chains of
the longest match; 0.5 to 0.9 are alike."""


class Draft(NamedTuple):
    """A tree of drafted tokens that continue the known ones."""

    tokens: tuple[int, ...] = ()  # the tokens; children of one token differ
    parents: tuple[int, ...] = ()  # the parent of each, which comes before it; -1: it continues the last known token

    @property
    def bits(self) -> Int32[np.ndarray, " nodes"]:
        """The words of `jflex.masks.tree_bits`, for the last known token and then the drafts."""
        return tree_bits([-1, *(parent + 1 for parent in self.parents)])

    def first(self, count: int) -> Draft:
        """The first tokens, which are a tree too."""
        return Draft(self.tokens[:count], self.parents[:count])


class PromptLookup:
    """Finds drafts for one sequence in its own tokens.

    The positions where the last tokens occurred before come from an index that grows with the sequence: each token
    costs one entry of a dictionary, and a look-up compares `MAX_MATCHES` positions, however long the sequence is. The
    continuation of a match of n tokens, up to `LONGEST_MATCH`, weighs ``2**n``, and `DECAY` times as much with each
    further token; the weights of equal continuations add up. Drafts are the tokens with the greatest weights; of equal
    ones, longer matches, then more recent positions come first.

    Args:
        least_match: Tokens that must match, at least 1.

    Example:
        >>> lookup = PromptLookup((1, 2, 3, 4, 1, 2), least_match=2)
        >>> lookup.draft((1, 2, 3, 4, 1, 2), most=3)
        Draft(tokens=(3, 4, 1), parents=(-1, 0, 1))
        >>> lookup.draft((1, 2, 3, 4, 1, 2, 5, 1, 2), most=3)  # followed by 5 and by 3
        Draft(tokens=(5, 3, 1), parents=(-1, -1, 0))
    """

    def __init__(self, tokens: Sequence[int], least_match: int):
        self._least = least_match
        self._last: dict[tuple[int, ...], int] = {}  # the last position after each n-gram
        self._before: list[int] = []  # for each position the one before it that follows the same n-gram; -1 for none
        self._index(tokens)

    def draft(self, tokens: Sequence[int], most: int) -> Draft:
        """Drafts at most `most` continuations of the known tokens; none if nothing matches.

        The tokens are those of the last call, or of the constructor, and the ones that have become known since.
        """
        self._index(tokens)
        if most < 1 or len(tokens) <= self._least:
            return Draft()
        nodes: dict[tuple[int, int], int] = {}  # by parent and token, in the order of creation
        weights: list[float] = []
        for length, position in self._matches(tokens):
            node, weight = -1, 2.0**length
            for token in tokens[position : position + most]:
                node = nodes.setdefault((node, token), len(weights))
                if node == len(weights):
                    weights.append(0.0)
                weights[node] += weight
                weight *= DECAY
        # A parent weighs more than its children, so it comes before them.
        chosen = sorted(range(len(weights)), key=weights.__getitem__, reverse=True)[:most]
        number = {-1: -1} | {node: position for position, node in enumerate(chosen)}
        keys = list(nodes)
        return Draft(tuple(keys[x][1] for x in chosen), tuple(number[keys[x][0]] for x in chosen))

    def _matches(self, tokens: Sequence[int]) -> list[tuple[int, int]]:
        """Lengths of matches and the positions that follow them: the longest first, then the most recent."""
        matches: list[tuple[int, int]] = []
        end, least = len(tokens), self._least
        position = self._last.get(tuple(tokens[end - least : end]), -1)
        while position >= 0 and len(matches) < MAX_MATCHES:
            length, longest = least, min(LONGEST_MATCH, position)
            while length < longest and tokens[position - 1 - length] == tokens[end - 1 - length]:
                length += 1
            matches.append((length, position))
            position = self._before[position]
        return sorted(matches, reverse=True)

    def _index(self, tokens: Sequence[int]) -> None:
        """Indexes the positions of new tokens by the n-gram before each."""
        least, before, last = self._least, self._before, self._last
        for position in range(len(before), len(tokens)):
            if position < least:
                before.append(-1)
                continue
            gram = tuple(tokens[position - least : position])
            before.append(last.get(gram, -1))
            last[gram] = position

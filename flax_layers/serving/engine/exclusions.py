"""Tokens that may not come next: stop tokens while a text is short, and the last token of a bad word."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int32

from flax_layers.serving.engine.constraints import token_bits
from flax_layers.serving.engine.requests import Request


class Exclusions:
    """Follows `min_tokens` and `bad_words` of a request.

    Example:
        >>> exclusions = Exclusions(Request((1,), stop_tokens=(5,), min_tokens=2, bad_words=((7,), (8, 9))))
        >>> exclusions.excluded([8], 1), exclusions.excluded([8, 3], 2)
        ([5, 7, 9], [7])
    """

    def __init__(self, request: Request):
        self._least = request.min_tokens if request.stop_tokens else 0
        self._stops, self._words = request.stop_tokens, request.bad_words
        self.needs_tokens = any(len(word) > 1 for word in self._words)  # not only their number

    def is_active(self, count: int) -> bool:
        """True if a token may be excluded after `count` tokens."""
        return bool(self._words) or count < self._least

    def excluded(self, known: Sequence[int], count: int) -> list[int]:
        """The excluded tokens after `count` generated tokens, of which the first ones are known."""
        stops = self._stops if count < self._least else ()
        may_end = lambda x: tuple(known[-1:]) == x[-2:-1] and tuple(known[1 - len(x) :]) == x[:-1]  # few compare all
        return [*stops, *(x[-1] for x in self._words if len(x) == 1 or may_end(x))]

    def keep_allowed(
        self, allowed: Int32[np.ndarray, " words"] | None, known: Sequence[int], count: int, vocabulary: int
    ) -> Int32[np.ndarray, " words"]:
        """Bits of the tokens that are allowed next, also by a constraint; by that alone if none would remain."""
        excluded = [token for token in self.excluded(known, count) if 0 <= token < vocabulary]
        kept = ~token_bits(excluded, vocabulary).view(np.int32)
        if allowed is None:
            return kept
        return kept & allowed if (kept & allowed).any() else allowed

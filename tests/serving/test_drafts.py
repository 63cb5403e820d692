"""Prompt look-up against a naive search."""

from __future__ import annotations

import collections

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flax_layers.serving.device.options import MAX_DRAFTS
from flax_layers.serving.engine.drafts import DECAY, LONGEST_MATCH, MAX_MATCHES, Draft, PromptLookup


def naive(tokens: list[int], least: int, most: int) -> dict[tuple[int, ...], float]:
    """Weights of all continuations, by the tokens that lead to them; no index, and every place is compared."""
    end, weights = len(tokens), collections.defaultdict(float)
    matches = []
    for place in range(end - 1, least - 1, -1):
        lengths = [n for n in range(1, min(place, max(LONGEST_MATCH, least)) + 1)
                   if tokens[place - n : place] == tokens[end - n :]]  # fmt: skip
        length = max(lengths, default=0)
        if length >= least and len(matches) < MAX_MATCHES:
            matches.append((length, place))
    for length, place in sorted(matches, reverse=True):
        for depth in range(1, most + 1):
            if place + depth <= end:
                weights[tuple(tokens[place : place + depth])] += 2.0**length * DECAY ** (depth - 1)
    return weights


def paths_of(draft: Draft) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        assert -1 <= parent < len(paths)
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=60),
    st.integers(1, 60),
    st.integers(1, 3),
    st.integers(0, MAX_DRAFTS),
)
def test_drafts_are_those_of_a_naive_search(tokens, known, least, most):
    """Whatever was known when the index was made: tokens that become known later are found, too."""
    lookup = PromptLookup(tokens[:known], least)
    for end in range(min(known, len(tokens)), len(tokens) + 1):
        draft = lookup.draft(tokens[:end], most)
        paths, weights = paths_of(draft), naive(tokens[:end], least, most)
        assert len(set(paths)) == len(paths) == min(most, len(weights))
        found = [weights[path] for path in paths]
        np.testing.assert_allclose(found, sorted(weights.values(), reverse=True)[: len(paths)], rtol=1e-12)


@pytest.mark.full
def test_a_look_up_does_not_grow_with_the_text(monkeypatch):
    """It reads the index of one n-gram, and compares a bounded number of tokens."""

    class Counted(list):
        reads = 0

        def __getitem__(self, index):
            type(self).reads += 1
            return super().__getitem__(index)

    reads = []
    for length in (1000, 8000):
        tokens = Counted(np.random.default_rng(0).integers(0, 2, length).tolist())
        lookup = PromptLookup(tokens, 2)
        Counted.reads = 0
        lookup.draft(tokens, 7)
        reads.append(Counted.reads)
    assert max(reads) <= MAX_MATCHES * 2 * (LONGEST_MATCH + 1) + 2

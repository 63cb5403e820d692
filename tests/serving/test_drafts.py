"""Prompt look-up against a naive search, and the acceptance of drafts: walks and compaction."""

from __future__ import annotations

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flax_layers.serving.device.options import MAX_DRAFTS
from flax_layers.serving.device.speculation import DraftRows, accept, compact
from flax_layers.serving.engine.drafts import DECAY, LONGEST_MATCH, MAX_MATCHES, Draft, PromptLookup
from jflex.masks import tree_bits
from jflex.paged import PagedBatch, PagedCache
from tests.support.rows import tiers

# --- look-up


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


# --- acceptance

INT = functools.partial(np.array, dtype=np.int32)
PARENTS = [-1, 0, 0, 0, 1, 1, 3, 6]  # three children of the known token, two of one of them, a chain of another
TREE_TOKENS = [9, 1, 3, 4, 0, 2, 1, 4]
VOCABULARY = 5


def nodes_of(parents: list[int], columns: int, rows: int) -> DraftRows:
    words = jnp.asarray(np.tile(np.pad(tree_bits(parents), (0, columns - len(parents))), (rows, 1)))
    depths = jax.lax.population_count(words) - 1
    return DraftRows(jnp.zeros_like(words), words, depths, jnp.full(rows, 6, jnp.int32))


@tiers(default={"columns": 8})
@pytest.mark.parametrize("columns", [8, 32])
def test_the_walk_follows_what_is_sampled(columns):
    """Against a walk from child to child; also where several drafts elsewhere agree with their own parents."""
    rng = np.random.default_rng(0)
    sampled = rng.integers(0, VOCABULARY, (400, columns)).astype(np.int32)
    drafted = np.tile(np.pad(TREE_TOKENS, (0, columns - 8)), (400, 1)).astype(np.int32)
    found = jax.jit(accept)(nodes_of(PARENTS, columns, 400), drafted, sampled)
    for row in range(400):
        node, path = 0, [0]
        while True:
            following = [n for n in range(1, 8) if PARENTS[n] == node and TREE_TOKENS[n] == sampled[row, node]]
            if not following:
                break
            [node] = following
            path.append(node)
        assert found.counts[row] == len(path)
        assert found.path[row, : len(path)].tolist() == path
        assert found.tokens[row, : len(path)].tolist() == sampled[row, path].tolist()
        assert found.last[row] == sampled[row, node]
    assert {1, 2, 3, 4} <= set(found.counts.tolist())


# --- compaction


@pytest.mark.full
@pytest.mark.parametrize("layers", [None, 2])
def test_accepted_keys_follow_the_known_ones(layers):
    """Of a tree, a chain, a request without drafts and one without tokens; all other slots stay as they are."""
    words = np.zeros((4, 8), np.int32)
    words[0], words[1, :3] = tree_bits(PARENTS), tree_bits([-1, 0, 1])
    table = np.array([[3, 5, 1, 2], [4, 6, 0, 0], [7, 0, 0, 0], [0, 0, 0, 0]], np.int32)
    batch = PagedBatch(*map(jnp.asarray, (INT([0, 8, 11, 12, 12]), INT([13, 6, 2, 0]), table, words)))
    leading = () if layers is None else (layers,)
    shape = (*leading, 9, 4, 2, 3)
    cache = PagedCache(*jnp.asarray(np.random.default_rng(0).normal(size=(2, *shape)), jnp.float32))
    nodes = DraftRows.from_batch(batch)
    sampled = np.zeros((4, 8), np.int32)
    sampled[0, [0, 3, 6, 7]] = [4, 1, 4, 2]  # along nodes 3, 6 and 7
    drafted = np.tile(np.array(TREE_TOKENS, np.int32), (4, 1))
    sampled[1, :2] = drafted[1, 1:3]
    accepted = accept(nodes, jnp.asarray(drafted), jnp.asarray(sampled))
    assert accepted.counts.tolist() == [4, 3, 1, 1]
    found = jax.jit(compact)(cache, batch, nodes, accepted)
    slot = lambda row: table[0, row // 4] * 4 + row % 4
    for x, before in ((found.k, cache.k), (found.v, cache.v)):
        right = np.asarray(before).reshape(*leading, 36, 2, 3).copy()
        source = right.copy()
        for depth, node in enumerate([0, 3, 6, 7]):  # the tree begins in row 5
            right[..., slot(5 + depth), :, :] = source[..., slot(5 + node), :, :]
        np.testing.assert_array_equal(np.asarray(x).reshape(right.shape), right)

"""Trees of drafted tokens, a different one for each request of a batch: against dense float64, and refusals."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jflex
from jflex import masks
from jflex.backends.xla.paged import KEYS, walk_of
from jflex.options import Settings
from jflex.paged import PagedBatch, PagedCache, check_batch, debug_check_batch, token_positions, token_slots
from jflex.paged.attention import prepare
from tests.support import paged_evaluation
from tests.support.rows import tiers

pytestmark = pytest.mark.usefixtures("settings_of_device")
H, HKV, D, PAGE = 4, 2, 16, 4
TREE, WIDE = [-1, 0, 0, 1, 1, 2, 5], [-1, 0, 1, 2, 0, 4, 1, 0, 7, 8, 8, 3]
FULL = [-1, *[max(0, node // 2 - 1) for node in range(1, 32)]]
# Of each request: rows before its queries, and the parents of these; a number for consecutive tokens.
CHAIN, FORK = [-1, 0, 1, 2, 3], [-1, 0, 0]
REQUESTS = [(13, TREE), (3, 20), (9, 1), (7, CHAIN), (22, WIDE), (0, FORK), (5, [-1]), (30, FULL), (4, 0)]
SLOPES = np.array([0.5, 0.25, 0.125, 0.0625], np.float32)
IDS = np.sort(np.random.default_rng(3).integers(0, 3, 64)).astype(np.int32)

GPU = pytest.param("triton", marks=pytest.mark.gpu)
BACKENDS = ["reference", "xla", "triton-interpret", GPU]
causal = lambda b, h, q, k: q >= k
window = lambda b, h, q, k: (q >= k) & (q - k < 5)
document = lambda b, h, q, k: (q >= k) & (jnp.asarray(IDS)[q] == jnp.asarray(IDS)[k])
alibi = lambda s, b, h, q, k: s - jnp.asarray(SLOPES)[h] * (q - k).astype(jnp.float32)
softcap = lambda s, b, h, q, k: 2.0 * jnp.tanh(s / 2.0) + 0.01 * (b * q).astype(jnp.float32)

# Mods, and the same in numpy on arrays [T, S] of positions.
MODS = {
    "nothing": ({}, lambda s, b, h, q, k: s, lambda q, k: q >= -1),
    "causal": ({"mask_mod": causal}, lambda s, b, h, q, k: s, lambda q, k: q >= k),
    "alibi_in_a_window": (
        {"score_mod": alibi, "mask_mod": window},
        lambda s, b, h, q, k: s - SLOPES[h] * (q - k),
        lambda q, k: (q >= k) & (q - k < 5),
    ),
    "softcap_in_documents": (
        {"score_mod": softcap, "mask_mod": document},
        lambda s, b, h, q, k: 2 * np.tanh(s / 2) + 0.01 * b * q,
        lambda q, k: (q >= k) & (IDS[q] == IDS[k]),
    ),
}


def parents_of(queries) -> list[int]:
    return list(queries) if isinstance(queries, list) else list(range(-1, queries - 1))


def words_of(requests, columns: int = 32) -> np.ndarray:
    words = np.zeros((len(requests), columns), np.int32)
    for row, (_, queries) in zip(words, requests, strict=True):
        if isinstance(queries, list):
            row[: len(queries)] = masks.tree_bits(queries)
    return words


def drawn(requests=REQUESTS, padding: int = 2, seed: int = 0):
    """Queries, a cache whose unused slots hold NaN, the batch; and the keys and values of each request."""
    rng = np.random.default_rng(seed)
    counts = [len(parents_of(queries)) for _, queries in requests]
    lengths = np.array([before + count for (before, _), count in zip(requests, counts, strict=True)], np.int32)
    pages = -(-lengths // PAGE)
    table = np.zeros((len(requests), pages.max() + 1), np.int32)
    free = list(rng.permutation(np.arange(1, pages.sum() + 3)))
    k, v = np.full((2, pages.sum() + 3, PAGE, HKV, D), np.nan, np.float32)
    own = []
    for row, length in enumerate(lengths):
        table[row, : pages[row]] = [free.pop() for _ in range(pages[row])]
        own.append(rng.normal(size=(2, length, HKV, D)).astype(np.float32))
        at = np.arange(length)
        k[table[row, at // PAGE], at % PAGE], v[table[row, at // PAGE], at % PAGE] = own[-1]
    query = rng.normal(size=(sum(counts) + padding, H, D)).astype(np.float32)
    indptr = np.cumsum([0, *counts]).astype(np.int32)
    batch = PagedBatch(*map(jnp.asarray, (indptr, lengths, table)), ancestors=jnp.asarray(words_of(requests)))
    return query, PagedCache(jnp.asarray(k), jnp.asarray(v)), batch, own


def exact(requests, query, own, score, shown) -> np.ndarray:
    """The definition in float64: positions and ancestors by walking up the tree."""
    out, first = np.zeros(query.shape), 0
    for b, ((before, queries), (keys, values)) in enumerate(zip(requests, own, strict=True)):
        parents = parents_of(queries)
        positions, above = [*range(before)], np.zeros((len(parents), before + len(parents)), bool)
        for node in range(len(parents)):
            seen, depth = node, -1
            while seen >= 0:
                above[node, before + seen] = True
                seen, depth = parents[seen], depth + 1
            positions.append(before + depth)
        above[:, :before] = True
        if not isinstance(queries, list):
            above[:] = True
        at = np.array(positions)
        q, k = at[before:, None], at[None]
        for h in range(H):
            rows = query[first : first + len(parents), h].astype(np.float64)
            s = score(rows @ keys[:, h // 2].astype(np.float64).T * D**-0.5, b, h, q, k)
            weights = np.where(above & shown(q, k), np.exp(s), 0)
            out[first : first + len(parents), h] = weights / weights.sum(1, keepdims=True) @ values[:, h // 2]
        first += len(parents)
    return out


@tiers(default={"backend": "xla", "name": "alibi_in_a_window"}, in_turns=True, share=2)
@pytest.mark.parametrize("name", MODS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_trees_of_one_batch_against_float64(backend, name):
    mods, score, shown = MODS[name]
    query, cache, batch, own = drawn()
    attend = jax.jit(lambda *x: jflex.paged_attention(*x, **mods, **paged_evaluation.options_of(backend)))
    right = exact(REQUESTS, query, own, score, shown)
    np.testing.assert_allclose(attend(jnp.asarray(query), cache, batch), right, rtol=3e-5, atol=3e-5)


@pytest.mark.full
def test_words_are_data():
    """Other trees, and none, need no other program."""
    traces = []

    @jax.jit
    def attend(query, cache, batch):
        traces.append(None)
        return jflex.paged_attention(query, cache, batch, mask_mod=causal, implementation="xla")

    for requests in (REQUESTS, [(before, len(parents_of(queries))) for before, queries in REQUESTS]):
        query, cache, batch, own = drawn(requests)
        right = exact(requests, query, own, *MODS["causal"][1:])
        np.testing.assert_allclose(attend(jnp.asarray(query), cache, batch), right, rtol=3e-5, atol=3e-5)
    assert len(traces) == 1


@pytest.mark.full
def test_rows_and_positions():
    batch = drawn([(5, [-1, 0, 0, 2, 1]), (2, 3)])[2]
    assert token_positions(batch, 9).tolist() == [5, 6, 6, 7, 7, 2, 3, 4, -1]
    plain = dataclasses.replace(batch, ancestors=None)
    np.testing.assert_array_equal(token_slots(batch, 9, PAGE), token_slots(plain, 9, PAGE))


DOCUMENTS = masks.causal_document(jnp.arange(6 * KEYS) // (4 * KEYS))  # compares positions alone


@pytest.mark.full
@pytest.mark.parametrize(
    ("mask", "before", "queries", "first", "tiles"),
    [
        (window, 4 * KEYS + 9, TREE, 0, [4, 5]),
        (DOCUMENTS, 4 * KEYS + 9, 7, 0, [4, 5]),
        (causal, 0, 4 * KEYS, 0, [0, 1]),
        (causal, 0, 4 * KEYS, KEYS, [0, 2]),
        (causal, 0, 4 * KEYS, 4 * KEYS - 8, [0, 4]),
    ],
)
def test_tiles_that_a_mask_hides_are_not_read(mask, before, queries, first, tiles):
    """Comparisons of positions decide tiles of the prefix, with trees as without; causal tiles end with the queries."""
    query, cache, batch, _ = drawn([(before, queries)])
    call = prepare(jnp.asarray(query), cache, batch, Settings(mask_mod=mask))
    rows, heads = jnp.arange(first, first + 7, dtype=jnp.int32), jnp.arange(H, dtype=jnp.int32)
    walk = walk_of(call.spec, call.inputs(), jnp.int32(0), rows, heads, batch.kv_lengths[0], KEYS)
    assert [int(x) for x in walk] == tiles


@tiers(default={"columns": 7})
@pytest.mark.parametrize("columns", [7, 12])
def test_dense_masks_of_several_trees(columns):
    """`masks.trees` is `masks.tree` of each batch entry."""
    words = np.stack([np.pad(masks.tree_bits(parents), (0, columns - len(parents))) for parents in (TREE, TREE[:4])])
    found = jflex.create_mask(masks.trees(jnp.array([3, 6]), words), 2, None, columns, 6 + columns)[:, 0]
    for mask, parents, prefix in ((found[0], TREE, 3), (found[1], TREE[:4], 6)):
        nodes = len(parents)
        right = np.arange(prefix + nodes) < prefix
        right = np.tile(right, (nodes, 1))
        right[:, prefix:] = masks.tree_ancestors(parents)
        np.testing.assert_array_equal(mask[:nodes, : prefix + nodes], right)


WORDS = words_of(REQUESTS)
ERRORS = [
    (WORDS.astype(np.int16), TypeError, r"`batch\.ancestors` must be an int32 array of words"),
    (WORDS[:3], ValueError, r"must be \[R, nodes\].* 9 requests"),
    (np.pad(WORDS, ((0, 0), (0, 1))), ValueError, r"at most 32 nodes"),
    (np.where(np.arange(32) < 6, WORDS, 0), ValueError, r"Request 0 has 7 queries and 6 words.*`jflex\.masks"),
    (WORDS * np.where(np.arange(32) == 2, 2, 1).astype(np.int32), ValueError, r"Node 2 of request 0 has the word 10\."),
    (np.where(np.arange(32) == 31, WORDS & 0x7FFFFFFF, WORDS), ValueError, r"Node 31 of request 7"),
]


@pytest.mark.parametrize(("words", "error", "message"), ERRORS, ids=lambda x: x if isinstance(x, str) else "")
def test_refusals(words, error, message):
    query, cache, batch, _ = drawn()
    with pytest.raises(error, match=message):
        check_batch(dataclasses.replace(batch, ancestors=words), cache, len(query))


@pytest.mark.full
def test_traced_words_are_checked_where_it_is_asked_for():
    query, cache, batch, _ = drawn()
    checked = jax.experimental.checkify.checkify(jax.jit(lambda b: debug_check_batch(b, cache, len(query))))
    checked(batch)[0].throw()
    wrong = dataclasses.replace(batch, ancestors=batch.ancestors * 2)
    assert "`ancestors` must have the bit of the node itself" in checked(wrong)[0].get()


def test_masks_refuse():
    with pytest.raises(ValueError, match=r"at most 32 nodes.*Got 33"):
        masks.tree_bits([-1] * 33)
    with pytest.raises(ValueError, match=r"`ancestor_bits` of `trees` must be \[B, N\].*\(2, 33\)"):
        masks.trees(jnp.zeros(2, jnp.int32), np.zeros((2, 33), np.int32))
    with pytest.raises(TypeError, match=r"`prefix_lengths` of `trees` must be integers"):
        masks.trees(jnp.zeros(2), np.zeros((2, 3), np.int32))

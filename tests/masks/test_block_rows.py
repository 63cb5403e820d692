"""Block-sparse rows: converted to a BlockMask, to a page table and back, they mean what their lists say."""

import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jflex
from jflex import BlockSparseRows
from tests.support.rows import in_turns

T, S, PAGE = 24, 32, 4
CAUSAL = jflex.masks.causal()
from_indptr = BlockSparseRows.from_indptr


@st.composite
def boundaries(draw, length):
    """One size, or uneven blocks, empty ones among them, that may end before the sequence."""
    if draw(st.booleans()):
        return draw(st.sampled_from([4, 8, 10]))
    return [0, *sorted(draw(st.lists(st.integers(0, length), min_size=3, max_size=3)))]


@st.composite
def drawn_rows(draw):
    """Arguments of `from_indptr`."""
    q_blocks, kv_blocks = draw(boundaries(T)), draw(boundaries(S))
    count = lambda blocks, length: -(-length // blocks) if isinstance(blocks, int) else len(blocks) - 1
    columns = count(kv_blocks, S)
    lists = [draw(st.permutations(range(columns)))[: draw(st.integers(0, columns))] for _ in range(count(q_blocks, T))]
    indptr = np.cumsum([0, *map(len, lists)])
    indices = [*itertools.chain(*lists), *draw(st.sampled_from([[], [7, -3]]))]  # unused entries at the end
    lengths = [draw(st.integers(0, S)) for _ in lists] if draw(st.booleans()) else None
    return {"indptr": indptr, "indices": indices, "q_blocks": q_blocks, "kv_blocks": kv_blocks, "kv_lengths": lengths}


def made(drawn):
    drawn = dict(drawn)
    return from_indptr(drawn.pop("indptr"), drawn.pop("indices"), T, S, **drawn)


def edges(blocks, length):
    return [*range(0, length, blocks), length] if isinstance(blocks, int) else blocks


def dense(drawn):
    """The mask of elements, key by key."""
    visible = np.zeros((T, S), bool)
    q_edges, kv_edges = edges(drawn["q_blocks"], T), edges(drawn["kv_blocks"], S)
    for r in range(len(q_edges) - 1):
        keys = [
            k
            for c in drawn["indices"][drawn["indptr"][r] : drawn["indptr"][r + 1]]
            for k in range(kv_edges[c], kv_edges[c + 1])
        ]
        keys = keys if drawn["kv_lengths"] is None else keys[: drawn["kv_lengths"][r]]
        visible[q_edges[r] : q_edges[r + 1], keys] = True
    return visible


def attention(query, key, value, visible):
    """In float64; zeros where nothing is visible."""
    q, k, v = (np.asarray(x, np.float64) for x in (query, key, value))
    group = q.shape[1] // k.shape[1]
    s = np.einsum("thd,shd->hts", q, np.repeat(k, group, 1)) * q.shape[-1] ** -0.5
    s = np.where(visible, s, -np.inf)
    weights = np.exp(s - s.max(-1, keepdims=True, initial=-1e3))
    weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-300)
    return np.einsum("hts,shd->thd", weights, np.repeat(v, group, 1))


def arrays(queries=T, keys=S):
    shapes = (queries, 4, 8), (keys, 2, 8), (keys, 2, 8)
    return [jax.random.normal(jax.random.key(n), shape) for n, shape in enumerate(shapes)]


@pytest.mark.full
@settings(max_examples=12)
@given(drawn_rows(), st.sampled_from([None, 8, (4, 16)]), st.booleans())
def test_a_block_mask_shows_what_the_lists_say(drawn, block_size, is_causal):
    mask = made(drawn).to_block_mask(CAUSAL if is_causal else None, block_size=block_size)
    causal = np.arange(T)[:, None] >= np.arange(S)
    np.testing.assert_array_equal(mask.to_elements()[0, 0], dense(drawn) & (causal | (not is_causal)))


@pytest.mark.full
@settings(max_examples=8)
@given(drawn_rows())
def test_block_masks_convert_to_rows_and_back(drawn):
    """Whatever the rows were, those of their BlockMask list its blocks, and make it again."""
    mask = made(drawn).to_block_mask(block_size=(8, 4))
    rows = BlockSparseRows.from_block_mask(mask)
    blocks = dense(drawn).reshape(T // 8, 8, S // 4, 4).any((1, 3))
    lists = np.split(np.asarray(rows.indices), np.asarray(rows.indptr[1:-1]))
    assert [x.tolist() for x in lists] == [np.flatnonzero(x).tolist() for x in blocks]
    again = rows.to_block_mask(mask.mask_mod)
    np.testing.assert_array_equal(again.to_elements()[0, 0], dense(drawn))
    traced = jax.jit(lambda mask: BlockSparseRows.from_block_mask(mask).to_block_mask())(mask)
    np.testing.assert_array_equal(traced.to_dense()[0, 0], blocks)


@pytest.mark.full
@settings(max_examples=12)
@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=3),
    st.lists(st.integers(0, 8), min_size=3, max_size=3),
    st.randoms(),
)
def test_page_tables_convert_to_rows_and_back(counts, queries, random):
    """Traced, too, where tables are as wide as they are told to be."""
    pages = [random.sample(range(1, 8), n) for n in counts]
    lengths = np.array([random.randint(max(0, n * PAGE - PAGE + 1), n * PAGE) for n in counts], np.int32)
    table = np.array([[*x, *[0] * (7 - len(x))] for x in pages], np.int32)
    indptr = np.cumsum([0, *queries[: len(counts)]]).astype(np.int32)
    batch = jflex.paged.PagedBatch(*map(jnp.asarray, (indptr, lengths, table)))
    rows = BlockSparseRows.from_paged_batch(batch, T, num_pages=8, page_size=PAGE)
    assert rows.indices.tolist() == [*itertools.chain(*pages)]
    turn = lambda batch: BlockSparseRows.from_paged_batch(batch, T, num_pages=8, page_size=PAGE).to_paged_batch(
        max_pages=7
    )
    for found in (turn(batch), jax.jit(turn)(batch)):
        chex.assert_trees_all_equal(found, batch)


UNEVEN = {
    "indptr": [0, 2, 2, 5], "indices": [3, 0, 1, 3, 2], "q_blocks": [0, 5, 9, 21], "kv_blocks": [0, 3, 3, 17, 30],
    "kv_lengths": [10, 4, 23],
}  # fmt: skip
EVEN = {"indptr": [0, 1, 3, 6], "indices": [0, 3, 1, 2, 0, 1], "q_blocks": 8, "kv_blocks": 8, "kv_lengths": None}


@pytest.mark.full
@in_turns
@pytest.mark.parametrize("backend", ["reference", "xla", "triton-interpret"])
@pytest.mark.parametrize("drawn", [UNEVEN, EVEN], ids=["uneven", "even"])
def test_attention_with_mods(drawn, backend):
    """Output and gradients, of rows that are traced."""
    name, _, interpreted = backend.partition("-")
    options = {"implementation": name, "config": jflex.Config(interpret=True) if interpreted else None}
    query, key, value = (x[None] for x in arrays())
    softcap, visible = jflex.scores.softcap(2.0), jnp.asarray(dense(drawn))
    dense_mask = lambda b, h, q_idx, kv_idx: visible[q_idx, kv_idx] & (q_idx >= kv_idx)

    def loss(rows, *arrays):
        mask = {"mask_mod": dense_mask} if rows is None else {"block_mask": rows.to_block_mask(CAUSAL, block_size=16)}
        out = jflex.flex_attention(
            *arrays, softcap, **mask, **(options if rows is not None else {"implementation": "reference"})
        )
        return (out * jnp.cos(jnp.arange(out.size).reshape(out.shape).astype(out.dtype))).sum(), out

    found, right = (
        jax.jit(jax.grad(loss, argnums=(1, 2, 3), has_aux=True))(rows, query, key, value)
        for rows in (made(drawn), None)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, right)
    plain = jflex.flex_attention(query, key, value, block_mask=made(drawn).to_block_mask(block_size=16), **options)
    np.testing.assert_allclose(plain[0], attention(query[0], key[0], value[0], dense(drawn)), rtol=1e-5, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("backend", ["xla", "triton-interpret"])
def test_attention_over_a_cache(backend):
    """Pages as keys, and as the pages of a cache: the same; and the lists of another order hold the same keys."""
    name, _, interpreted = backend.partition("-")
    options = {"implementation": name, "config": jflex.Config(interpret=True) if interpreted else None}
    query, key, value = arrays(keys=32)
    drawn = {"indptr": [0, 2, 2, 5], "indices": [3, 1, 1, 7, 2], "q_blocks": [0, 5, 9, 21], "kv_blocks": 4}
    rows = from_indptr(
        drawn["indptr"], drawn["indices"], T, S, q_blocks=drawn["q_blocks"], kv_blocks=4, kv_lengths=[7, 0, 12]
    )
    cache = jflex.paged.PagedCache(key.reshape(8, 4, 2, 8), value.reshape(8, 4, 2, 8))
    paged = jflex.paged_attention(query, cache, rows.to_paged_batch(), **options)
    right = attention(query, key, value, dense(drawn | {"kv_lengths": [7, 0, 12]}))
    np.testing.assert_allclose(paged[:21], right[:21], rtol=1e-5, atol=1e-5)


def rows_of(indptr=(0, 1, 2), indices=(0, 1), q_blocks=16, kv_blocks=16, **more):
    return from_indptr(np.array(indptr), np.array(indices), 32, 32, q_blocks=q_blocks, kv_blocks=kv_blocks, **more)


@pytest.mark.full
def test_negative_lengths_are_zero():
    rows = rows_of((0, 1, 2), (1, 1), kv_lengths=[-5, 3])
    assert rows.to_paged_batch().kv_lengths.tolist() == [0, 3]
    assert rows.to_block_mask().to_elements().sum() == 16 * 3


@pytest.mark.full
def test_sizes_of_numpy():
    assert rows_of(q_blocks=np.int64(16), kv_blocks=np.int32(16)).block_size == (16, 16)

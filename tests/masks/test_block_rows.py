"""Block-sparse rows: converted to a BlockMask, to a page table and back, they mean what their lists say."""

import functools
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

T, S, PAGE = 24, 32, 4
CAUSAL = jflex.masks.causal()
from_indptr = BlockSparseRows.from_indptr


@st.composite
def drawn_rows(draw):
    """Arguments of `from_indptr`: blocks of one size, or uneven ones, some empty, that may end before the sequence.

    Few sizes of arrays, so that few programs are compiled.
    """
    is_even, columns = draw(st.booleans()), 4
    uneven = lambda length, n: [0, *sorted(draw(st.lists(st.integers(0, length), min_size=n, max_size=n)))]
    q_blocks, kv_blocks = (8, 10) if is_even else (uneven(T, 3), uneven(S, columns))
    lists = [draw(st.permutations(range(columns)))[: draw(st.integers(0, columns))] for _ in range(3)]
    indices = [*itertools.chain(*lists)]
    indices += [7, -3] * (6 - len(indices) // 2) + [0] * (len(indices) % 2)  # unused entries at the end
    lengths = None if is_even else [draw(st.integers(0, S)) for _ in lists]
    indptr = np.cumsum([0, *map(len, lists)])
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


def arrays(queries=T, keys=S):
    shapes = (queries, 4, 8), (keys, 2, 8), (keys, 2, 8)
    return [jax.random.normal(jax.random.key(n), shape) for n, shape in enumerate(shapes)]


@pytest.mark.full
@settings(max_examples=10)
@given(drawn_rows())
def test_block_masks_of_rows_and_their_rows(drawn):
    """Whatever the rows were, those of their BlockMask list its blocks, and make it again."""
    visible, block_size = dense(drawn), None if drawn["kv_lengths"] is None else (4, 16)
    mask = made(drawn).to_block_mask(CAUSAL, block_size=block_size)
    np.testing.assert_array_equal(mask.to_elements()[0, 0], visible & (np.arange(T)[:, None] >= np.arange(S)))
    mask, blocks = made(drawn).to_block_mask(block_size=(8, 4)), visible.reshape(T // 8, 8, S // 4, 4).any((1, 3))
    np.testing.assert_array_equal(mask.to_elements()[0, 0], visible)
    rows = BlockSparseRows.from_block_mask(mask)
    lists = np.split(np.asarray(rows.indices), np.asarray(rows.indptr[1:-1]))
    assert [x.tolist() for x in lists] == [np.flatnonzero(x).tolist() for x in blocks]
    np.testing.assert_array_equal(again(mask).to_dense()[0, 0], blocks)


@jax.jit
def again(mask):
    return BlockSparseRows.from_block_mask(mask).to_block_mask()


@pytest.mark.full
@settings(max_examples=6)
@given(*[st.lists(st.integers(0, most), min_size=3, max_size=3) for most in (6, 8)], st.randoms())
def test_page_tables_convert_to_rows_and_back(counts, queries, random):
    """Traced, too, where tables are as wide as they are told to be."""
    pages = [random.sample(range(1, 8), n) for n in counts]
    lengths = np.array([random.randint(max(0, n * PAGE - PAGE + 1), n * PAGE) for n in counts], np.int32)
    table = np.array([[*x, *[0] * (7 - len(x))] for x in pages], np.int32)
    indptr = np.cumsum([0, *queries]).astype(np.int32)
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


def dense_mod(drawn):
    visible = jnp.asarray(dense(drawn))
    return lambda b, h, q_idx, kv_idx: visible[q_idx, kv_idx]


@pytest.mark.full
@pytest.mark.parametrize(("drawn", "backend"), [(UNEVEN, "xla"), (EVEN, "triton")], ids=["uneven", "even"])
def test_attention_with_mods(drawn, backend):
    """Output and gradients, of rows that are traced."""
    options = {"implementation": backend, "config": jflex.Config(interpret=True)}

    def loss(rows, options, *arrays):
        mask = {"mask_mod": jflex.and_masks(dense_mod(drawn), CAUSAL)}
        if rows is not None:
            mask = {"block_mask": rows.to_block_mask(CAUSAL, block_size=16)}
        out = jflex.flex_attention(*arrays, jflex.scores.softcap(2.0), **mask, **options)
        return (out * jnp.cos(jnp.arange(out.size).reshape(out.shape).astype(out.dtype))).sum(), out

    def run(rows, options):
        attend = lambda rows, *arrays: loss(rows, options, *arrays)
        return jax.jit(jax.grad(attend, argnums=(1, 2, 3), has_aux=True))(rows, *(x[None] for x in arrays()))

    found, right = run(made(drawn), options), run(None, {"implementation": "reference"})
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, right)


@pytest.mark.full
def test_attention_over_a_cache():
    """Pages as keys, and as the pages of a cache: the same; and the lists of another order hold the same keys."""
    query, key, value = arrays(keys=32)
    drawn = {"indptr": [0, 2, 2, 5], "indices": [3, 1, 1, 7, 2], "q_blocks": [0, 5, 9, 21], "kv_blocks": 4}
    drawn |= {"kv_lengths": [7, 0, 12]}
    cache = jflex.paged.PagedCache(key.reshape(8, 4, 2, 8), value.reshape(8, 4, 2, 8))
    paged = jflex.paged_attention(query, cache, made(drawn).to_paged_batch(), implementation="xla")
    whole = functools.partial(jflex.flex_attention, mask_mod=dense_mod(drawn), implementation="reference")
    right = whole(query[None], key[None], value[None])[0]
    np.testing.assert_allclose(paged[:21], right[:21], rtol=1e-5, atol=1e-5)

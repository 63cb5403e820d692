"""The paper's route to a paged cache: converted masks and mods over slots, against dense attention of gathered keys."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jflex
from jflex.paged import PagedCache, PagePool, clear_unused, convert_block_mask, convert_mask_mod, convert_score_mod
from tests.cases.features import BACKENDS, REFERENCE
from tests.support import oracle
from tests.support.traces import Traced

T, HQ, HKV, D, DV = 8, 4, 2, 16, 8
LENGTHS = np.array([70, 33, 0, 5], np.int32)  # a prefix is shared, one is empty, one has fewer keys than queries
B, KV_LEN = len(LENGTHS), 80
F32 = jnp.float32
INT = functools.partial(np.asarray, dtype=np.int32)
OPTIONS = {"reference": REFERENCE, **BACKENDS}
assert_close = functools.partial(np.testing.assert_allclose, rtol=3e-5, atol=3e-5)
DOCUMENTS = np.sort(np.random.default_rng(1).integers(0, 3, (B, KV_LEN)), axis=1).astype(np.int32)
BIAS = np.random.default_rng(2).normal(size=(HQ, KV_LEN)).astype(np.float32)
OFFSETS = LENGTHS - T

MASKS = {
    "none": jflex.noop_mask,
    "causal": lambda b, h, q, k: q >= k,
    "window": lambda b, h, q, k: (q >= k) & (q - k < 20),
    "documents": lambda b, h, q, k: (jnp.asarray(DOCUMENTS)[b, q] == jnp.asarray(DOCUMENTS)[b, k]) & (q >= k),
}
SCORES = {
    "none": lambda bias: None,
    "bias by key": lambda bias: lambda s, b, h, q, k: s + bias[h, k] - 0.1 * (q - k).astype(F32),
}


def problem(page_size, seed=0, poison=1e4):
    """Queries, a cache that holds `poison` wherever no request has a token, and the table."""
    rng = np.random.default_rng(seed)
    pool = PagePool(24 if page_size >= 16 else 128, page_size)
    for page in rng.permutation(pool.alloc(pool.num_free)):
        pool.release([int(page)])  # from here on pages come in any order
    pages = [list(pool.alloc(pool.pages_for(int(length)))) for length in LENGTHS]
    shared = 16 // page_size or 1
    pool.release(pages[1][:shared])
    pool.share(pages[0][:shared])
    pages[1][:shared] = pages[0][:shared]
    table = pool.table(pages, max_pages=pool.pages_for(KV_LEN))
    content = np.random.default_rng(7)
    query = content.normal(size=(B, T, HQ, D)).astype(np.float32)
    dense = [content.normal(size=(B, KV_LEN, HKV, d)).astype(np.float32) for d in (D, DV)]
    for x in dense:
        x[1, : shared * page_size] = x[0, : shared * page_size]
    slots = []
    for x in dense:
        flat = np.full((pool.num_pages * page_size, *x.shape[2:]), poison, np.float32)
        for request, length in enumerate(LENGTHS):
            positions = np.arange(length)
            flat[table[request, positions // page_size] * page_size + positions % page_size] = x[request, :length]
        slots.append(flat.reshape(pool.num_pages, page_size, *x.shape[2:]))
    return query, dense, PagedCache(*map(jnp.asarray, slots)), table


def as_keys(cache):
    return [x.reshape(1, cache.num_pages * cache.page_size, *x.shape[2:]) for x in (cache.k, cache.v)]


@functools.cache
def exact(page_size, mask, score):
    query, dense, _, _ = problem(page_size)
    seen = {
        "none": lambda q, k, b: q == q,
        "causal": lambda q, k, b: q >= k,
        "window": lambda q, k, b: (q >= k) & (q - k < 20),
        "documents": lambda q, k, b: (DOCUMENTS[b, q] == DOCUMENTS[b, k]) & (q >= k),
    }[mask]
    at = lambda b, q: q + OFFSETS[b]
    mask_mod = lambda b, h, q, k, c: seen(at(b, q), k, b) & (k < LENGTHS[b])
    changed = oracle.Score(lambda s, b, h, q, k, c: s + c["bias"][h, k] - 0.1 * (at(b, q) - k))
    found = oracle.forward(
        *(x.astype(np.float64) for x in (query, *dense)),
        D**-0.5,
        None if score == "none" else changed,
        mask_mod,
        {"bias": BIAS.astype(np.float64)},
    )
    return found.out, found.lse


def logical_block_mask(mask, page_size, offsets):
    mod = jflex.with_offset(MASKS[mask], offsets)
    return jflex.create_block_mask(mod, B, None, T, KV_LEN, block_size=(16, page_size))


def paged(cache, table, query, lengths, mask, score, bias, backend, with_block_mask=True, clears=False):
    """Attention of the last T positions of each request, by converted mask and mods; all but `mask` is data."""
    sizes = {"page_size": cache.page_size, "num_pages": cache.num_pages, "kv_lengths": lengths}
    offsets = jnp.asarray(lengths) - T
    if with_block_mask:
        logical = logical_block_mask(mask, cache.page_size, offsets)
        masked = {"block_mask": convert_block_mask(logical, table, **sizes)}
    else:
        masked = {"mask_mod": convert_mask_mod(jflex.with_offset(MASKS[mask], offsets), table, **sizes)}
    score_mod = SCORES[score](bias)
    if score_mod is not None:
        score_mod = convert_score_mod(jflex.with_offset(score_mod, offsets), table, **sizes)
    keys = as_keys(clear_unused(cache, table, lengths) if clears else cache)
    return jflex.flex_attention(query, *keys, score_mod, return_lse=True, **masked, **OPTIONS[backend])


CASES = [
    *(("xla", 16, mask, "bias by key", {}) for mask in MASKS),
    ("xla", 80, "causal", "none", {}),
    ("reference", 5, "documents", "bias by key", {}),
    ("triton-interpret", 16, "documents", "bias by key", {}),
    ("triton-interpret", 32, "causal", "none", {}),
    *(("xla", size, "window", "bias by key", {"with_block_mask": False}) for size in (1, 7)),
    ("xla", 16, "none", "none", {"clears": True}),  # slots that held NaN
    ("xla", 16, "none", "none", {"clears": True, "with_block_mask": False}),
]


@pytest.mark.full
@pytest.mark.parametrize(("backend", "page_size", "mask", "score", "how"), CASES)
def test_converted_is_dense_attention_of_gathered_keys(backend, page_size, mask, score, how):
    query, _, cache, table = problem(page_size, poison=np.nan if "clears" in how else 1e4)
    call = jax.jit(functools.partial(paged, mask=mask, score=score, backend=backend, **how))
    jax.tree.map(assert_close, call(cache, table, query, LENGTHS, bias=BIAS), exact(page_size, mask, score))


@pytest.mark.full
def test_clearing_keeps_what_any_request_uses_and_every_layer():
    cache = PagedCache(*jnp.arange(1.0, 33).reshape(2, 2, 4, 2, 1, 1))
    cleared = clear_unused(cache, INT([[3, 1], [1, 0], [2, 3]]), INT([3, 2, 0]))
    expected = np.where(np.array([0, 0, 1, 1, 0, 0, 1, 1]), np.arange(1.0, 33).reshape(2, 2, 8), 0)
    np.testing.assert_array_equal(cleared.k.reshape(2, 8), expected[0])
    np.testing.assert_array_equal(cleared.v.reshape(2, 8), expected[1])


@pytest.mark.full
def test_new_tables_and_lengths_compile_nothing():
    traced = Traced(functools.partial(paged, mask="causal", score="bias by key", backend="xla"))
    call = jax.jit(traced)
    for seed, lengths in ((0, LENGTHS), (1, LENGTHS), (2, INT([64, 20, 0, 0]))):
        query, _, cache, table = problem(16, seed)
        out, _ = call(cache, table, query, lengths, bias=BIAS)
        assert np.isfinite(out).all()
        if lengths is LENGTHS:
            assert_close(out, exact(16, "causal", "bias by key")[0])
    assert traced.count == 1


@pytest.mark.full
def test_gradients_reach_queries_pages_and_captured_arrays():
    query, _, cache, table = problem(16)

    def loss(query, cache, bias):
        out, lse = paged(cache, table, query, LENGTHS, "documents", "bias by key", bias, "xla")
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.where(lse > -jnp.inf, lse, 0))

    def dense_loss(query, cache, bias):
        positions = np.arange(KV_LEN)
        rows = table[:, positions // 16] * 16 + positions % 16
        key, value = (x[0][rows] for x in as_keys(cache))
        mask_mod = jflex.with_offset(MASKS["documents"], OFFSETS)
        visible = lambda b, h, q, k: mask_mod(b, h, q, k) & (k < jnp.asarray(LENGTHS)[b])
        score_mod = jflex.with_offset(SCORES["bias by key"](bias), OFFSETS)
        options = {"mask_mod": visible, "return_lse": True, "implementation": "reference"}
        out, lse = jflex.flex_attention(query, key, value, score_mod, **options)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.where(lse > -jnp.inf, lse, 0))

    found = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(query, cache, BIAS)
    expected = jax.jit(jax.grad(dense_loss, argnums=(0, 1, 2)))(query, cache, BIAS)
    jax.tree.map(assert_close, found, expected)
    assert all(np.abs(x).max() > 1e-2 for x in jax.tree.leaves(found))


@pytest.mark.full
def test_the_worked_example():
    """Pages 3, 1 and 4 of one request, 1 and 2 of another; two full blocks and one partial, some without a page."""
    mask = jflex.create_block_mask(lambda b, h, q, k: k < 5, None, None, 4, 10, block_size=(2, 2))
    table = INT([[3, 1, 4, 0, 0], [1, 2, 0, -1, 0]])
    physical = convert_block_mask(mask, table, page_size=2, num_pages=6)
    assert physical.shape == (2, 1, 4, 12)
    assert physical.block_size == (2, 2)
    states = [[0, 2, 0, 2, 1, 0], [0, 2, 2, 0, 0, 0]]
    assert physical.states()[:, 0].tolist() == [[row, row] for row in states]
    assert physical.kv_num_blocks[:, 0].tolist() == [[1, 1], [0, 0]]
    assert physical.full_kv_num_blocks[:, 0].tolist() == [[2, 2], [2, 2]]
    assert physical.full_q_num_blocks[:, 0].tolist() == [[0, 2, 0, 2, 0, 0], [0, 2, 2, 0, 0, 0]]
    assert physical.q_num_blocks[:, 0].tolist() == [[0, 0, 0, 0, 2, 0], [0] * 6]
    shown = physical.to_elements()[:, 0, 0].astype(int).tolist()
    assert shown == [[0, 0, 1, 1, 0, 0, 1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0]]


@pytest.mark.full
def test_full_blocks_are_hidden_beyond_a_length():
    full = jflex.create_block_mask(jflex.noop_mask, None, None, 2, 8, block_size=(2, 4))
    physical = convert_block_mask(
        full, INT([[2, 1], [1, 2], [2, 1]]), page_size=4, num_pages=3, kv_lengths=INT([6, 4, 0])
    )
    assert physical.states()[:, 0, 0].tolist() == [[0, 1, 2], [0, 2, 0], [0, 0, 0]]
    shown = physical.to_elements()[:, 0, 0].astype(int)
    assert shown.tolist() == [[0] * 4 + [1, 1, 0, 0] + [1] * 4, [0] * 4 + [1] * 4 + [0] * 4, [0] * 12]


@pytest.mark.full
def test_lists_without_a_mask_mod():
    """All of a listed block is visible, up to the length of the mask."""
    mask = jflex.BlockMask.from_kv_blocks(INT([[[2]]]), INT([[[[2, 0]]]]), block_size=(1, 2), seq_lengths=(1, 5))
    physical = convert_block_mask(mask, INT([[3, 1, 2]]), page_size=2, num_pages=4)
    assert physical.to_elements()[0, 0, 0].astype(int).tolist() == [0, 0, 0, 0, 1, 0, 1, 1]
    assert not physical.lists_follow_mod


@pytest.mark.full
def test_heads_keep_their_lists():
    mask = jflex.create_block_mask(lambda b, h, q, k: k // 2 == h, None, 3, 1, 6, block_size=(1, 2))
    physical = convert_block_mask(mask, INT([[3, 1, 2]]), page_size=2, num_pages=4)
    assert physical.to_dense()[0, :, 0].tolist() == [[0, 0, 0, 1], [0, 1, 0, 0], [0, 0, 1, 0]]


@pytest.mark.full
def test_a_page_at_two_places_of_a_traced_table_counts_at_the_first():
    convert = functools.partial(convert_mask_mod, jflex.noop_mask, page_size=1, num_pages=4)
    shown = jax.jit(lambda table: jflex.create_mask(convert(table), 1, None, 1, 4))(INT([[2, 3, 2]]))
    assert shown[0, 0, 0].tolist() == [False, False, True, True]
    seen = lambda table: convert_score_mod(lambda s, b, h, q, k: k.astype(F32), table, page_size=1, num_pages=4)
    place = jax.jit(lambda table: seen(table)(jnp.float32(0), 0, 0, jnp.int32(0), jnp.int32(2)))
    assert place(INT([[1, 2, 3, 2]])) == 1


@pytest.mark.full
def test_entries_that_are_not_used_may_hold_anything():
    stale = INT([[3, 1, 3, 99, -5], [2, 2, 2, 2, 2]])
    convert = functools.partial(convert_mask_mod, jflex.noop_mask, page_size=2, num_pages=4, kv_lengths=INT([3, 1]))
    for shown in (
        jflex.create_mask(convert(stale), 2, None, 1, 8),
        jax.jit(lambda table: jflex.create_mask(convert(table), 2, None, 1, 8))(stale),
    ):
        assert shown[:, 0, 0].astype(int).tolist() == [[0, 0, 1, 0, 0, 0, 1, 1], [0, 0, 0, 0, 1, 0, 0, 0]]


@pytest.mark.full
@pytest.mark.parametrize("requests", [0, 2])
def test_no_requests_and_no_keys(requests):
    empty = jflex.create_block_mask(jflex.noop_mask, None, None, 1, 0, block_size=(1, 2))
    physical = convert_block_mask(empty, np.zeros((requests, 0), np.int32), page_size=2, num_pages=4)
    assert physical.shape == (max(requests, 1), 1, 1, 8)
    assert not np.asarray(physical.kv_num_blocks).any()
    cache = jnp.full((1, 8, 1, 4), jnp.nan)
    query = jnp.ones((requests, 1, 1, 4))
    out = jflex.flex_attention(query, cache, cache, block_mask=physical, implementation="xla")
    np.testing.assert_array_equal(out, np.zeros((requests, 1, 1, 4)))


@pytest.mark.full
def test_messages_name_the_users_function():
    def branches(b, h, q_idx, kv_idx):
        return q_idx and q_idx >= kv_idx

    with pytest.raises(ValueError, match=r"cannot branch.*branches \(test_paged_convert.py:\d+\)"):
        jflex.create_mask(convert_mask_mod(branches, TABLE, page_size=2, num_pages=4), 2, None, 1, 8)
    assert "tests" not in str(convert_block_mask(MASK, TABLE, page_size=2, num_pages=4).traced.source)
    assert convert_block_mask(MASK, TABLE, page_size=2, num_pages=4).traced.source == MASK.traced.source


TABLE = INT([[3, 1], [1, 2]])
MASK = jflex.create_block_mask(MASKS["causal"], None, None, 4, 4, block_size=(2, 2))
BY_BATCH = jflex.create_block_mask(lambda b, h, q, k: k > b, 1, None, 4, 4, block_size=(2, 2))


def block(mask=MASK, table=TABLE, page_size=2, num_pages=4, **options):
    return lambda: convert_block_mask(mask, table, page_size=page_size, num_pages=num_pages, **options)


def mods(mod, **options):
    return lambda: convert_mask_mod(mod, TABLE, page_size=2, num_pages=4, **options)


WRONG = [
    ("a mod", block(MASKS["causal"]),
     TypeError, r"`block_mask` must be a `BlockMask`. Got function. A mask_mod is conv"),
    ("blocks", block(page_size=4),
     ValueError, r"`block_mask` must have blocks of `page_size` keys, 4. It has 2. Make it "
     r"with `create_block_mask\(..., block_size=\(2, 4\)\)`"),
    ("batch", block(table=INT([[1, 2]] * 3),
     mask=jflex.create_block_mask(MASKS["causal"], 2, None, 4, 4, block_size=2)),
     ValueError, r"`block_mask` must have batch 1 or that of `page_table`, 3. It has 2. Make it.*B=3"),
    ("uses b", block(BY_BATCH),
     ValueError, r"`block_mask` has batch 1 and `page_table` 2 requests, but .* uses `b`. Make"),
    ("narrow", block(table=TABLE[:, :1]), ValueError,
     r"`page_table` is too narrow: its 1 entries of 2 tokens do not hold the 4 keys of "
     r"`block_mask`. Make the table wider"),
    ("beyond", block(num_pages=3), ValueError,
     r"`page_table` must hold pages below `num_pages`, 3. Entry 0 of request 0 is 3. Put 0 where"),
    ("twice", block(table=INT([[1, 2], [3, 3]])), ValueError,
     r"`page_table` must not hold a page twice.*Request 1 has page 3 twice. Use `jflex.paged_attention`"),
    ("length", block(kv_lengths=INT([4, 5])),
     ValueError, r"`page_table` is too narrow.*4 keys. Request 1 has 5. Make the"),
    ("no page", block(table=INT([[3, 0], [1, 2]]), kv_lengths=INT([3, 4])), ValueError,
     r"`page_table` must hold pages within 1 and 3.*Request 0 uses 2 entries, and entry 1 is 0"),
    ("no cache", lambda: clear_unused(TABLE, TABLE), TypeError, r"`cache` must be a `PagedCache`"),
    ("no mask mod", mods(None),
     TypeError, r"`mask_mod` must be a function \(b, h, q_idx, kv_idx\) -> bool. Got NoneType"),
]  # fmt: skip


@pytest.mark.parametrize(("provoke", "error", "message"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG])
def test_wrong_calls(provoke, error, message):
    with pytest.raises(error, match=message):
        provoke()

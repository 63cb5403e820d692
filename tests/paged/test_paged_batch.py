"""Batches over a paged cache: slots of their tokens, checks; dtypes, tiles and empty arrays of `paged_attention`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

import jflex
from jflex.paged import (
    PagedBatch,
    check_batch,
    debug_check_batch,
    slots_of,
    token_positions,
    token_requests,
    token_slots,
)
from tests.cases.errors import paged
from tests.paged.test_paged_cache import INT, SIZE, L, drawn


@pytest.mark.parametrize("page_size", [1, 4, 16, 256])
def test_slots_of_positions(page_size):
    table = np.random.default_rng(0).permutation(np.arange(1, 9)).astype(np.int32)
    positions = np.random.default_rng(1).integers(0, 8 * page_size, 40, np.int32)
    expected = table[positions // page_size] * page_size + positions % page_size
    np.testing.assert_array_equal(slots_of(table, positions, page_size), expected)
    traced = jax.jit(slots_of, static_argnames="page_size")
    both = traced(np.stack([table, table[::-1]]), np.stack([positions, positions]), page_size=page_size)
    np.testing.assert_array_equal(both[0], expected)
    np.testing.assert_array_equal(both[1], table[::-1][positions // page_size] * page_size + positions % page_size)


def test_positions_without_a_page_have_no_slot():
    table = INT([3, 0, -1, 5])
    positions = INT([-1, -16, 0, 4, 8, 12, 15, 16, 2**31 - 1, -(2**31)])
    assert slots_of(table, positions, 4).tolist() == [-1, -1, 12, -1, -1, 20, 23, -1, -1, -1]


# The last request has more queries than keys.
BATCH = PagedBatch(INT([0, 3, 3, 4, 9]), INT([3, 0, 9, 2]), INT([[1, 0, 0], [0, 0, 0], [5, 2, 4], [3, 99, -7]]))


def test_tokens_of_a_batch():
    assert token_requests(BATCH, 11).tolist() == [0, 0, 0, 2, 3, 3, 3, 3, 3, -1, -1]
    assert token_positions(BATCH, 11).tolist() == [0, 1, 2, 8, -3, -2, -1, 0, 1, -1, -1]
    assert token_slots(BATCH, 11, SIZE).tolist() == [4, 5, 6, 16, -1, -1, -1, 12, 13, -1, -1]
    traced = jax.jit(lambda batch: token_slots(batch, 4, SIZE))
    assert traced(BATCH).tolist() == [4, 5, 6, 16]


def test_tokens_are_found_without_a_loop():
    """A loop of XLA is a few kernels a step on a GPU: it took a decoding step of 82 us 60 more."""
    for find in (token_requests, token_positions, lambda batch, count: token_slots(batch, count, SIZE)):
        program = jax.jit(lambda batch, find=find: find(batch, 11)).lower(BATCH).compile().as_text()
        assert " while(" not in program


EMPTY = {
    "no request": PagedBatch(INT([0]), INT([]), np.zeros((0, 3), np.int32)),
    "no page": PagedBatch(INT([0, 0]), INT([0]), np.zeros((1, 0), np.int32)),
    "only empty requests": PagedBatch(INT([0, 0, 0]), INT([0, 0]), np.zeros((2, 1), np.int32)),
}


@pytest.mark.full
@pytest.mark.parametrize("batch", EMPTY.values(), ids=EMPTY)
@pytest.mark.parametrize("num_tokens", [0, 3])
def test_empty_batches_are_right(batch, num_tokens):
    check_batch(batch, drawn(), num_tokens)
    assert token_slots(batch, num_tokens, SIZE).tolist() == [-1] * num_tokens
    assert token_positions(batch, num_tokens).tolist() == [-1] * num_tokens
    error, _ = checkify.checkify(jax.jit(lambda batch: debug_check_batch(batch, drawn(), num_tokens)))(batch)
    assert error.get() is None


def changed(**fields):
    values = {name: getattr(BATCH, name).copy() for name in ("qo_indptr", "kv_lengths", "page_table")}
    for name, (place, value) in fields.items():
        values[name][place] = value
    return PagedBatch(**values)


WIDE = np.pad(BATCH.page_table, ((0, 0), (0, 4)), constant_values=1)
# Name, batch, number of tokens, message. `debug_check_batch` knows these rules, too.
WRONG_VALUES = [
    ("begin", changed(qo_indptr=(0, 1)), 9, r"`qo_indptr` must begin with 0.*It begins with 1. Prepend a 0"),
    ("descent", changed(qo_indptr=(2, 1)), 9, r"`qo_indptr` must ascend. Request 1 has .* from 3 to 1. Take the cum"),
    ("end", BATCH, 8, r"`qo_indptr` must end at N.*It ends at 9, and there are 8 queries. Pack the queries"),
    ("negative", changed(kv_lengths=(1, -2)), 9, r"`kv_lengths` must not be neg.* Request 1 has -2 keys. Give a"),
    ("narrow", changed(kv_lengths=(2, 13)), 9, r"`page_table` is too narrow: its 3 entries of 4.*12 keys. Request 2 "
     r"has 13. Make the table wider, or the cache with the page size"),
    ("cache", PagedBatch(BATCH.qo_indptr, INT([3, 0, 9, 21]), WIDE), 9, r"`kv_lengths` must fit in the cache, whose 5 "
     r"pages of 4 tokens .* 20 keys. Request 3 has 21. Make a cache with more"),
    ("page", changed(kv_lengths=(3, 5)), 9,
     r"`page_table` must hold pages within 1 and 5.*Request 3 uses 2 entries, and "
     r"entry 1 is 99. Take pages from the `PagePool`"),
    ("reserved page", changed(kv_lengths=(0, 5)), 9, r"`page_table` must.*page 0 is res.*Request 0.*entry 1 is 0"),
]  # fmt: skip
VALUE_ROWS = {"argvalues": [row[1:] for row in WRONG_VALUES], "ids": [row[0] for row in WRONG_VALUES]}


@pytest.mark.parametrize(("batch", "num_tokens", "message"), **VALUE_ROWS)
def test_wrong_values_where_they_are_known(batch, num_tokens, message):
    for known in (batch, jax.tree.map(jnp.asarray, batch)):
        with pytest.raises(ValueError, match=message):
            check_batch(known, drawn(), num_tokens)
    jax.eval_shape(lambda batch: check_batch(batch, drawn(), num_tokens), batch)  # tracers pass


@pytest.mark.parametrize(("batch", "num_tokens", "message"), **VALUE_ROWS)
def test_wrong_values_where_they_are_traced(batch, num_tokens, message):
    def step(batch):
        debug_check_batch(batch, drawn(), num_tokens)
        return batch.kv_lengths

    error, _ = checkify.checkify(jax.jit(step))(batch)
    with pytest.raises(checkify.JaxRuntimeError, match=message):
        error.throw()


def test_some_traced_and_some_known():
    table = jax.jit(lambda table, batch: check_batch(PagedBatch(batch.qo_indptr, batch.kv_lengths, table), drawn(), 9))
    table(BATCH.page_table, BATCH)
    wrong = changed(kv_lengths=(1, -2))
    with pytest.raises(ValueError, match="`kv_lengths` must not be negative"):
        jax.jit(lambda table: check_batch(PagedBatch(wrong.qo_indptr, wrong.kv_lengths, table), drawn(), 9))(WIDE)


def test_the_debug_check_passes_what_is_right_and_needs_checkify():
    step = jax.jit(lambda batch: debug_check_batch(batch, drawn(L), 9))
    error, _ = checkify.checkify(step)(BATCH)
    assert error.get() is None
    with pytest.raises(ValueError, match="not functionalized"):
        step(BATCH)


CACHE, NEW = drawn(), INT([4, 5, 6])
WRONG = [
    ("no table", lambda: slots_of(BATCH.page_table, NEW, 4),
     ValueError, r"`page_table` and `positions` must be.*\(4, 3\)"),
    ("no batch", lambda: check_batch(BATCH.page_table, CACHE, 9),
     TypeError, r"`batch` must be a `PagedBatch`. Got ndarray"),
    ("cache of a batch", lambda: check_batch(BATCH, BATCH, 9),
     TypeError, r"`cache` must be a `PagedCache`. Got PagedBatch"),
    ("long lengths", lambda: check_batch(PagedBatch(BATCH.qo_indptr, np.zeros(4, np.int64), WIDE), CACHE, 9),
     TypeError, r"`batch.kv_lengths` must be an int32 array of counts. Got int64\[4\]. Cast it"),
    ("shapes", lambda: check_batch(PagedBatch(BATCH.kv_lengths, BATCH.kv_lengths, WIDE), CACHE, 9), ValueError,
     r"`batch` must have `qo_indptr` \[R \+ 1\].*qo_indptr: int32\[4\], kv_lengths: int32\[4\], page_table: int32\[4,7"
     r"\]. Requests without"),
    ("tokens", lambda: check_batch(BATCH, CACHE, -1), ValueError, r"`num_tokens` must not be negative. Got -1"),
]  # fmt: skip


@pytest.mark.parametrize(("provoke", "error", "message"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG])
def test_wrong_calls(provoke, error, message):
    with pytest.raises(error, match=message):
        provoke()


# --- dtypes, tiles and empty arrays

INTERPRETED = {"implementation": "triton", "config": jflex.Config(interpret=True)}


def test_float64_runs_on_xla_alone():
    with jax.enable_x64(True):
        arrays = paged.zeros(3, 4, 16, dtype=jnp.float64), paged.cache_of(dtype=jnp.float64)
        with pytest.raises(jflex.UnsupportedError, match="compute in bfloat16, float16 or float32, not float64"):
            paged.call(*arrays, **INTERPRETED)()
        assert paged.call(*arrays)().dtype == jnp.float64


def test_small_tiles_are_refused():
    config = jflex.Config(interpret=True, decode=jflex.Tiles(16, 8))
    with pytest.raises(jflex.UnsupportedError, match="tiles of at least 16, in powers of two; `config` sets 8"):
        paged.call(implementation="triton", config=config)()


@pytest.mark.parametrize("backend", [{"implementation": "xla"}, {"implementation": "reference"}, INTERPRETED], ids=str)
def test_nothing_is_no_error(backend):
    """No requests, no queries, no pages in the table; numpy arrays."""
    nobody = PagedBatch(*(np.zeros(shape, np.int32) for shape in (1, 0, (0, 2))))
    for q, batch in (
        (paged.zeros(3, 4, 16), nobody),
        (paged.zeros(0, 4, 16), paged.wrong(qo_indptr=INT([0, 0, 0]))),
        (paged.zeros(3, 4, 16), paged.wrong(kv_lengths=INT([0, 0]), page_table=INT(np.zeros((2, 0))))),
        (np.zeros((3, 4, 16), np.float32), nobody),
    ):
        out, lse = paged.call(q, batch=batch, mask_mod=paged.four_arguments, return_lse=True, **backend)()
        np.testing.assert_array_equal(out, np.zeros(q.shape))
        np.testing.assert_array_equal(lse, np.full(q.shape[:2], -np.inf))

"""Limits of the rows of masks: where they say that they are the mask, they are, in both directions."""

import pickle

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings

import jflex
from jflex import masks
from jflex.block_mask import limits
from jflex.varlen import varlen_block_mask
from pallas_kernels.program.intervals import MAX_LOADED
from tests.kernels.test_intervals import MASKS
from tests.masks.test_block_states import QUICK, mod_of
from tests.support.dense_masks import causal
from tests.support.rows import tiers

T = S = 96
RNG = np.random.default_rng(0)
SORTED, OTHER = (np.sort(RNG.integers(0, 6, T)) for _ in range(2))


@pytest.fixture(autouse=True)
def of_small_masks(monkeypatch):
    monkeypatch.setattr(limits, "MIN_ELEMENTS", 1)


def documents(ids, kv_ids=None):
    return jflex.and_masks(masks.document(ids, kv_ids), causal)


def check(block_mask):
    """Returns what limits are: None, or whether they are the mask."""
    if block_mask.traced.limits is None:
        return None
    number, elements = block_mask.traced.limits, np.asarray(block_mask.to_elements()[:, 0])
    of_query, of_key, rows, _ = map(np.asarray, block_mask.mask_operands[number:])
    q, k = (np.arange(length) for length in block_mask.seq_lengths)
    of_query, of_key = of_query[:, :, :, None], of_key[:, :, None]
    found = (k >= of_query[:, 0]) & (k < of_query[:, 1]), (q[:, None] >= of_key[:, 0]) & (q[:, None] < of_key[:, 1])
    visits = np.asarray(block_mask.kv_num_blocks + block_mask.full_kv_num_blocks)
    assert (np.diff(np.take_along_axis(visits, rows, -1)) <= 0).all()
    exact = (of_query[:, 0, 0, 0] >= 0).tolist()
    for entry, is_exact in enumerate(exact):
        for shown in found:
            np.testing.assert_array_equal(shown[entry % len(shown)], elements[entry] if is_exact else True)
    return all(exact)


AGAIN = np.repeat([0, 1, 0], [30, 40, 26])
CASES = {
    "sorted": (documents(SORTED), True),
    "falling": (documents(SORTED[::-1]), True),
    "padding of zeros": (documents(np.where(np.arange(T) < 80, SORTED + 1, 0)), True),
    "all keys of a document": (masks.document(SORTED), True),
    "other keys": (documents(SORTED, OTHER), True),
    "queries without keys": (documents(SORTED, 2 * OTHER), True),
    "keys in another order": (masks.document(SORTED, OTHER[::-1]), False),
    "not consecutive": (documents(AGAIN), False),
    "not consecutive, by runs": (masks.causal_document(AGAIN), True),
    "random": (documents(RNG.integers(0, 4, T)), False),
    "window": (jflex.and_masks(documents(SORTED), lambda b, h, q_idx, kv_idx: q_idx - kv_idx < 17), True),
    "distance": (jflex.and_masks(documents(SORTED), lambda b, h, q, k: jnp.abs(q - k) < 17), True),
    "blocks": (lambda b, h, q, k: (k // 8 <= jnp.asarray(SORTED)[q]) & ~(k > q), True),
    "some queries": (jflex.and_masks(documents(SORTED), lambda b, h, q, k: (q < 50) | (q > 60)), False),
    "large": (lambda b, h, q, k: k <= jnp.full(T, MAX_LOADED + 1)[q], False),
    "least": (lambda b, h, q, k: k - jnp.full(T, -(2**31))[q] <= 5, False),
    "large literal": (lambda b, h, q, k: k - jnp.asarray(SORTED)[q] > -(2**31) + 1, False),
    "positions alone": (causal, None),
    "keys of their own": (jflex.and_masks(documents(SORTED), lambda b, h, q, k: jnp.asarray(SORTED)[k] > 0), None),
    "either": (jflex.or_masks(documents(SORTED), causal), None),
}


@tiers(default={"name": ["sorted", "window", "blocks", "random"]})
@pytest.mark.parametrize("name", CASES)
def test_limits_are_the_mask_where_they_say_so(name):
    mask_mod, expected = CASES[name]
    assert check(jflex.create_block_mask(mask_mod, None, None, T, S, block_size=16)) == expected


@pytest.mark.full
def test_limits_of_traced_ids_by_batch_and_of_a_pickled_mask():
    ids = jnp.asarray(np.stack([SORTED, AGAIN, OTHER]))
    make = jax.jit(lambda ids: jflex.create_block_mask(documents(ids), 3, None, T, S, block_size=16))
    assert check(make(ids)) is False
    assert check(pickle.loads(pickle.dumps(make(ids[::2].repeat(2, 0)[:3])))) is True
    assert make(ids)[0].traced.limits is None  # the mask_mod has another program there


@pytest.mark.full
@pytest.mark.parametrize("ends", [([0, 20, 20, 60, 86],) * 2, ([0, 10, 10, 90, 90], [0, 30, 60, 60, 80])], ids=str)
@pytest.mark.parametrize("window", [None, lambda b, h, q, k: (q >= k) & (q - k < 9), lambda b, h, q, k: k - q < 5])
def test_limits_of_packed_sequences(ends, window):
    queries, keys = (jnp.asarray(x, jnp.int32) for x in ends)
    assert check(varlen_block_mask(queries, keys, T, 88, mask_mod=window, block_size=16)) is True


@pytest.mark.full
@settings(QUICK)
@given(MASKS, MASKS, st.booleans(), st.integers(0, 2**32 - 1))
@example(("eq", "by_q", "by_k"), ("ge", "q", "k"), True, 0)
@example(("ge", ("add", "by_q", "by_b"), "k"), ("lt", ("sub", "q", "k"), "by_q"), True, 1)
def test_random_masks(one, two, ascending, seed):
    rng = np.random.default_rng(seed)
    arrays = [rng.integers(-3, 60, n) for n in (61, 2, 83)]
    by_q, by_b, by_k = (jnp.asarray(np.sort(x) if ascending else x, jnp.int32) for x in arrays)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "MIN_ELEMENTS", 1)
        mod = jflex.and_masks(mod_of(one, by_q, by_b, by_k), mod_of(two, by_q, by_b, by_k))
        check(jflex.create_block_mask(mod, 2, 2, 61, 83, block_size=16))

"""Error types and messages for invalid calls, by the tables of `tests/cases/errors`."""

import functools
import warnings

import jax
import numpy as np
import pytest

import jflex
from tests.cases.errors import (
    block_masks,
    calls,
    context_parallel,
    index_sizes,
    indexer,
    jax_nn,
    latent,
    latent_eight_bits,
    layers,
    mods,
    packed,
    paged,
    ready_mods,
    sizes,
    sparse_mla,
    states,
    weights,
)
from tests.cases.errors.calls import F32, array, call, score

# Each table, and whether a dot of its regular expressions matches the end of a line.
TABLES = {
    calls: True, jax_nn: True, mods: True, packed: True, paged: True, weights: True,
    index_sizes: True, latent_eight_bits: False, indexer: False, layers: False, sparse_mla: False,
    block_masks: False, context_parallel: False, latent: False, ready_mods: False, sizes: False, states: False,
}  # fmt: skip
ROWS = [
    pytest.param(provoke, kind, f"(?s){message}" if dots else message, id=f"{table.__name__.rpartition('.')[2]}-{name}")
    for table, dots in TABLES.items()
    for name, provoke, kind, message in table.ROWS
]
BEFORE_CALLS = [
    *(row for row in (*calls.ROWS, *sizes.ROWS, *index_sizes.ROWS) if "call" in row[1].__code__.co_names),
    *mods.ROWS,
]


@pytest.mark.parametrize(("provoke", "kind", "message"), ROWS)
def test_message(provoke, kind, message):
    with pytest.raises(kind, match=message) as caught:
        provoke()
    assert caught.type is kind


@pytest.mark.parametrize("row", BEFORE_CALLS, ids=lambda row: row[0])
def test_nothing_runs_before_the_message(row, monkeypatch):
    ran = []
    monkeypatch.setattr("jflex.entry._run", lambda *args: ran.append(args))
    with pytest.raises(row[2]):
        row[1]()
    assert not ran


def test_explain_says_the_same():
    for shapes in ((2, 8, 3, 16), (2, 8, 16)):
        wrong = jax.ShapeDtypeStruct(shapes, F32), *(jax.ShapeDtypeStruct((2, 8, 2, 16), F32),) * 2
        with pytest.raises(ValueError, match=r"`(key|query)`"):
            jflex.explain(*wrong)


@pytest.mark.parametrize("implementation", ["xla", "reference", None])
def test_empty_lengths_are_no_error(implementation):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out, lse = call((2, 0, 4, 16), return_lse=True, implementation=implementation)
        assert out.shape == (2, 0, 4, 16)
        assert lse.shape == (2, 4, 0)
        no_keys = functools.partial(call, key=(2, 0, 2, 16), value=(2, 0, 2, 5), return_lse=True)
        out, lse = no_keys(implementation=implementation, score_mod=score)
    np.testing.assert_array_equal(out, np.zeros((2, 8, 4, 5)))
    np.testing.assert_array_equal(lse, np.full((2, 4, 8), -np.inf))


def test_gradients_of_empty_lengths_are_zero():
    key = array(2, 0, 2, 16)
    grads = jax.grad(lambda q, k: jflex.flex_attention(q, k, k).sum(), argnums=(0, 1))(array(2, 8, 4, 16), key)
    np.testing.assert_array_equal(grads[0], np.zeros((2, 8, 4, 16)))
    assert grads[1].shape == key.shape

"""Dtypes, tiles and empty arrays that `paged_attention` takes or refuses; messages: `tests/cases/errors/paged.py`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jflex
from jflex.paged import PagedBatch
from tests.cases.errors.paged import INT, cache_of, call, four_arguments, wrong, zeros

INTERPRETED = {"implementation": "triton", "config": jflex.Config(interpret=True)}


def test_float64_runs_on_xla_alone():
    with jax.enable_x64(True):
        arrays = zeros(3, 4, 16, dtype=jnp.float64), cache_of(dtype=jnp.float64)
        with pytest.raises(jflex.UnsupportedError, match="compute in bfloat16, float16 or float32, not float64"):
            call(*arrays, **INTERPRETED)()
        assert call(*arrays)().dtype == jnp.float64


def test_small_tiles_are_refused():
    config = jflex.Config(interpret=True, decode=jflex.Tiles(16, 8))
    with pytest.raises(jflex.UnsupportedError, match="tiles of at least 16, in powers of two; `config` sets 8"):
        call(implementation="triton", config=config)()


@pytest.mark.parametrize("backend", [{"implementation": "xla"}, {"implementation": "reference"}, INTERPRETED], ids=str)
def test_nothing_is_no_error(backend):
    """No requests, no queries, no pages in the table; numpy arrays."""
    nobody = PagedBatch(*(np.zeros(shape, np.int32) for shape in (1, 0, (0, 2))))
    for q, batch in (
        (zeros(3, 4, 16), nobody),
        (zeros(0, 4, 16), wrong(qo_indptr=INT([0, 0, 0]))),
        (zeros(3, 4, 16), wrong(kv_lengths=INT([0, 0]), page_table=INT(np.zeros((2, 0))))),
        (np.zeros((3, 4, 16), np.float32), nobody),
    ):
        out, lse = call(q, batch=batch, mask_mod=four_arguments, return_lse=True, **backend)()
        np.testing.assert_array_equal(out, np.zeros(q.shape))
        np.testing.assert_array_equal(lse, np.full(q.shape[:2], -np.inf))

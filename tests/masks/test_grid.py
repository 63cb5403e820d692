"""In which order the Hopper kernels compute tiles: each once, those with most work first."""

import heapq

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.mosaic_gpu.launch import NUM_SMS, Grid

MOST = 5000  # one size for all, so that nothing is compiled twice


def places(grid):
    return np.stack(np.broadcast_arrays(*grid.unravel(jnp.arange(MOST, dtype=jnp.int32))), 1)[: grid.size]


@pytest.mark.full
@given(st.integers(1, 5), st.integers(1, 9), st.integers(1, 40))
def test_each_tile_once_and_those_of_a_head_in_order(batch, heads, tiles):
    found = places(Grid(batch, heads, tiles))
    assert sorted(map(tuple, found)) == list(np.ndindex(batch, heads, tiles))
    for head in np.ndindex(batch, heads):
        assert found[(found[:, :2] == head).all(1)][:, 2].tolist() == list(range(tiles))


@pytest.mark.parametrize(("heads", "tiles"), [(16, 64), (64, 64), (32, 128), (64, 32)])
def test_multiprocessors_end_together_under_a_causal_mask(heads, tiles):
    free = [0] * NUM_SMS
    for *_, nth in places(Grid(1, heads, tiles)).tolist():
        heapq.heappush(free, heapq.heappop(free) + tiles - nth + 2)
    assert max(free) < 1.01 * sum(free) / len(free)

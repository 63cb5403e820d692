"""How the keys of uneven rows are divided among programs: nothing is lost, nothing is walked twice, all bounds hold."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.triton import plan

ROWS = st.lists(st.integers(0, 1000), min_size=1, max_size=16)


def divided(tiles, shares):
    """Parts of each row, padded to the next power of two as kernels do."""
    size = 1 << len(tiles).bit_length()
    padded = np.zeros(size, np.int32)
    padded[: len(tiles)] = tiles
    copies = (np.arange(size) < len(tiles)).astype(np.int32)
    return padded, np.asarray(plan.parts_of(jnp.asarray(padded), jnp.asarray(copies), shares))


@given(ROWS, st.sampled_from([1, 5, 17, 33, 264]))
def test_every_tile_is_walked_once(tiles, shares):
    padded, parts = divided(tiles, shares)
    seen = [[] for _ in tiles]
    for item in range(int(parts.sum()) + 2):
        row, nth = (int(x) for x in plan.locate(jnp.asarray(parts), jnp.int32(item)))
        if row >= len(tiles):
            assert item >= parts.sum()
            continue
        start, end = (int(x) for x in plan.part_of(jnp.int32(padded[row]), jnp.int32(nth), jnp.int32(parts[row])))
        seen[row] += range(start, end)
    assert seen == [list(range(n)) for n in tiles]


@given(ROWS, st.sampled_from([1, 5, 17, 33, 264]))
def test_bounds(tiles, shares):
    """Of the grids and buffers, which are static."""
    _, parts = divided(tiles, shares)
    parts = parts[: len(tiles)]
    assert (parts >= 1).all()
    assert parts.sum() <= plan.most_items(len(tiles), shares)
    assert parts[parts > 1].sum() <= 2 * shares
    assert (parts > 1).sum() <= shares
    assert parts.max() <= shares + 1
    assert (np.array(tiles)[parts > 1] // parts[parts > 1] >= plan.LEAST_TILES).all()


@pytest.mark.parametrize("kind", ["even", "uniform", "one_long"])
@pytest.mark.parametrize(("rows", "heads"), [(8, 8), (16, 16), (32, 8)])
def test_no_part_is_much_longer_than_a_share(rows, heads, kind):
    rng = np.random.default_rng(0)
    tiles = {"even": [256] * rows, "uniform": rng.integers(1, 257, rows), "one_long": [256] + [16] * (rows - 1)}[kind]
    shares = plan.shares_for(heads)
    _, parts = divided(list(tiles), shares)
    longest = np.ceil(np.array(tiles) / parts[: len(tiles)]).max()
    assert longest <= 1.25 * sum(tiles) / shares

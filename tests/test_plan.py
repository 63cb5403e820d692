"""How the keys of uneven rows are divided among programs: nothing is lost, nothing is walked twice, all bounds hold."""

import jax
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


@given(ROWS, st.sampled_from([5, 33]), st.sampled_from([2, 8]))
def test_longest_parts_come_first(tiles, shares, least):
    """Each part once, those of a row side by side, and none after a shorter one."""
    size = max(16, 1 << (len(tiles) - 1).bit_length())
    padded, copies = np.zeros(size, np.int32), (np.arange(size) < len(tiles)).astype(np.int32)
    padded[: len(tiles)] = tiles
    parts = plan.parts_of(jnp.asarray(padded), jnp.asarray(copies), shares, least)
    items = jnp.arange(int(parts.sum()) + 1, dtype=jnp.int32)
    rows, nth = jax.vmap(lambda item: plan.locate_longest_first(jnp.asarray(padded), parts, item))(items)
    assert rows[-1] == size
    rows, nth, parts = np.asarray(rows[:-1]), np.asarray(nth[:-1]), np.asarray(parts)
    assert sorted(zip(rows, nth, strict=True)) == [(r, n) for r in range(size) for n in range(parts[r])]
    lengths = -(-padded[rows] // parts[rows])
    assert (np.diff(lengths) <= 0).all()


def test_even_rows_are_divided_among_the_multiprocessors():
    """One program for each; a second one where too many would have none, but never more than run at once."""
    assert [plan.even_parts(rows) for rows in (1, 8, 64, 67, 100, 256, 1000)] == [132, 16, 2, 3, 1, 1, 1]
    assert all(rows * plan.even_parts(rows) <= max(rows, plan.ENOUGH_PROGRAMS) for rows in range(1, 600))


@pytest.mark.parametrize("heads", [1, 8, 16, 32, 64])
def test_equal_tiles_of_queries_are_divided_into_no_more_than_run_at_once(heads):
    """As those of a prefix that many queries share."""
    for rows in (1, 2, 4):
        _, parts = divided([128] * rows, plan.shares_for(heads))
        assert parts.sum() * heads <= plan.ENOUGH_PROGRAMS

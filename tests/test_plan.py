"""How the keys of uneven rows are divided among programs: nothing is lost, nothing is walked twice, all bounds hold."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.triton import split_kv

ROWS = st.lists(st.integers(0, 1000), min_size=1, max_size=16)
SIZE = 32  # of what rows are padded to
ITEMS = jnp.arange(300, dtype=jnp.int32)  # more than there are parts
# Compiled once for all rows and shares.
parts_of = jax.jit(split_kv.parts_of, static_argnums=(2, 3))
part_of = jax.jit(jax.vmap(split_kv.part_of))
locate = jax.jit(jax.vmap(split_kv.locate, (None, 0)))
locate_longest_first = jax.jit(jax.vmap(split_kv.locate_longest_first, (None, None, 0)))


def divided(tiles, shares, least=split_kv.LEAST_TILES):
    """Tiles and parts of each row, padded as in kernels: with rows of which there are no copies."""
    padded = np.zeros(SIZE, np.int32)
    padded[: len(tiles)] = tiles
    copies = (np.arange(SIZE) < len(tiles)).astype(np.int32)
    return padded, np.asarray(parts_of(padded, copies, shares, least))


@given(ROWS, st.sampled_from([1, 5, 17, 33, 264]))
def test_every_tile_is_walked_once(tiles, shares):
    padded, parts = divided(tiles, shares)
    rows, nth = map(np.asarray, locate(parts, ITEMS))
    real = np.minimum(rows, SIZE - 1)
    starts, ends = map(np.asarray, part_of(padded[real], nth, parts[real]))
    seen = [[] for _ in tiles]
    for row, start, end in zip(rows[: parts.sum()], starts, ends, strict=False):
        seen[row] += range(start, end)
    assert seen == [list(range(n)) for n in tiles]
    assert (rows[parts.sum() :] == SIZE).all()


@given(ROWS, st.sampled_from([1, 5, 17, 33, 264]))
def test_bounds(tiles, shares):
    """Of the grids and buffers, which are static."""
    _, parts = divided(tiles, shares)
    parts = parts[: len(tiles)]
    assert (parts >= 1).all()
    assert parts.sum() <= split_kv.most_items(len(tiles), shares)
    assert parts[parts > 1].sum() <= 2 * shares
    assert (parts > 1).sum() <= shares
    assert parts.max() <= shares + 1
    assert (np.array(tiles)[parts > 1] // parts[parts > 1] >= split_kv.LEAST_TILES).all()


@pytest.mark.parametrize("kind", ["even", "uniform", "one_long"])
@pytest.mark.parametrize(("rows", "heads"), [(8, 8), (16, 16), (32, 8)])
def test_no_part_is_much_longer_than_a_share(rows, heads, kind):
    rng = np.random.default_rng(0)
    tiles = {"even": [256] * rows, "uniform": rng.integers(1, 257, rows), "one_long": [256] + [16] * (rows - 1)}[kind]
    shares = split_kv.shares_for(heads)
    _, parts = divided(list(tiles), shares)
    longest = np.ceil(np.array(tiles) / parts[: len(tiles)]).max()
    assert longest <= 1.25 * sum(tiles) / shares


@given(ROWS, st.sampled_from([5, 33]), st.sampled_from([2, 8]))
def test_longest_parts_come_first(tiles, shares, least):
    """Each part once, those of a row side by side, and none after a shorter one."""
    padded, parts = divided(tiles, shares, least)
    rows, nth = map(np.asarray, locate_longest_first(padded, parts, ITEMS))
    assert (rows[parts.sum() :] == SIZE).all()
    rows, nth = rows[: parts.sum()], nth[: parts.sum()]
    assert sorted(zip(rows, nth, strict=True)) == [(r, n) for r in range(SIZE) for n in range(parts[r])]
    lengths = -(-padded[rows] // parts[rows])
    assert (np.diff(lengths) <= 0).all()


def test_even_rows_are_divided_among_the_multiprocessors():
    """One program for each; a second one where too many would have none, but never more than run at once."""
    assert [split_kv.even_parts(rows) for rows in (1, 8, 64, 67, 100, 256, 1000)] == [132, 16, 2, 3, 1, 1, 1]
    assert all(rows * split_kv.even_parts(rows) <= max(rows, split_kv.ENOUGH_PROGRAMS) for rows in range(1, 600))


@pytest.mark.parametrize("heads", [1, 8, 16, 32, 64])
def test_equal_tiles_of_queries_are_divided_into_no_more_than_run_at_once(heads):
    """As those of a prefix that many queries share."""
    for rows in (1, 2, 4):
        _, parts = divided([128] * rows, split_kv.shares_for(heads))
        assert parts.sum() * heads <= split_kv.ENOUGH_PROGRAMS

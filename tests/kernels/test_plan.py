"""How uneven rows of keys are divided among programs, and tiles ordered: nothing is lost or walked twice."""

import heapq

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.mosaic_gpu.launch import NUM_SMS, Grid
from pallas_kernels.split_kv import planner

ROWS = st.lists(st.integers(0, 1000), min_size=1, max_size=16)
SIZE = 32  # of what rows are padded to
ITEMS = jnp.arange(300, dtype=jnp.int32)  # more than there are parts
# Compiled once for all rows and shares.
row_splits = jax.jit(planner.row_splits, static_argnums=(2, 3))
split_range = jax.jit(jax.vmap(planner.split_range))
find_work_item = jax.jit(jax.vmap(planner.find_work_item, (None, 0)))
find_longest_first = jax.jit(jax.vmap(planner.find_longest_first, (None, None, 0)))


def divided(tiles, target, least=planner.MIN_TILES_PER_SPLIT):
    """Tiles and parts of each row, padded as in kernels: with rows of which there are no copies."""
    padded = np.zeros(SIZE, np.int32)
    padded[: len(tiles)] = tiles
    copies = (np.arange(SIZE) < len(tiles)).astype(np.int32)
    return padded, np.asarray(row_splits(padded, copies, target, least))


@given(ROWS, st.sampled_from([1, 5, 17, 33, 264]))
def test_every_tile_is_walked_once(tiles, target):
    padded, splits = divided(tiles, target)
    rows, i = map(np.asarray, find_work_item(splits, ITEMS))
    real = np.minimum(rows, SIZE - 1)
    starts, ends = map(np.asarray, split_range(padded[real], i, splits[real]))
    seen = [[] for _ in tiles]
    for row, start, end in zip(rows[: splits.sum()], starts, ends, strict=False):
        seen[row] += range(start, end)
    assert seen == [list(range(n)) for n in tiles]
    assert (rows[splits.sum() :] == SIZE).all()


@given(ROWS, st.sampled_from([1, 5, 17, 33, 264]))
def test_bounds(tiles, target):
    """Of the grids and buffers, which are static."""
    _, splits = divided(tiles, target)
    splits = splits[: len(tiles)]
    assert (splits >= 1).all()
    assert splits.sum() <= planner.max_items(len(tiles), target)
    assert splits[splits > 1].sum() <= 2 * target
    assert (splits > 1).sum() <= target
    assert splits.max() <= target + 1
    assert (np.array(tiles)[splits > 1] // splits[splits > 1] >= planner.MIN_TILES_PER_SPLIT).all()


@given(ROWS, st.sampled_from([5, 33]), st.sampled_from([2, 8]))
def test_longest_parts_come_first(tiles, target, least):
    """Each part once, those of a row side by side, and none after a shorter one."""
    padded, splits = divided(tiles, target, least)
    rows, i = map(np.asarray, find_longest_first(padded, splits, ITEMS))
    assert (rows[splits.sum() :] == SIZE).all()
    rows, i = rows[: splits.sum()], i[: splits.sum()]
    assert sorted(zip(rows, i, strict=True)) == [(r, n) for r in range(SIZE) for n in range(splits[r])]
    lengths = -(-padded[rows] // splits[rows])
    assert (np.diff(lengths) <= 0).all()


def sizes_in(order, padded, splits):
    """Tiles of keys of the work items, in the order in which their programs start."""
    rows, i = (np.asarray(x)[: splits.sum()] for x in order)
    starts, ends = map(np.asarray, split_range(padded[rows], i, splits[rows]))
    return (ends - starts).tolist()


def makespan(sizes, resident):
    """When the last program ends, if so many run at once and each that ends makes room for the next."""
    ends = [0] * resident
    for size in sizes:
        heapq.heapreplace(ends, ends[0] + size)
    return max(ends)


@given(ROWS, st.sampled_from([1, 2, 8, 16]), st.booleans())
def test_the_last_program_ends_soon_after_a_share_of_all_tiles(tiles, heads, longest_first):
    """List scheduling (Graham 1966), longest first and in the order of requests; no split is far above its share."""
    resident, target = planner.MAX_RESIDENT_PROGRAMS, planner.num_splits(heads)
    padded, splits = divided(tiles, target)
    order = find_longest_first(padded, splits, ITEMS) if longest_first else find_work_item(splits, ITEMS)
    sizes = sizes_in(order, padded, splits)
    assert sum(sizes) == sum(tiles)
    share, longest = sum(tiles) / target, max(sizes)
    assert longest <= max(1.25 * share + 1, 2 * planner.MIN_TILES_PER_SPLIT - 1)
    of_all_heads = [size for size in sizes for _ in range(heads)]
    assert makespan(of_all_heads, resident) <= sum(of_all_heads) / resident + longest


def test_even_rows_are_divided_among_the_multiprocessors():
    """One program for each; a second one where too many would have none, but never more than run at once."""
    assert [planner.even_splits(rows) for rows in (1, 8, 64, 67, 100, 256, 1000)] == [132, 16, 2, 3, 1, 1, 1]
    assert all(rows * planner.even_splits(rows) <= max(rows, planner.MAX_RESIDENT_PROGRAMS) for rows in range(1, 600))


# --- the order of tiles in the Hopper kernels


MOST = 5000  # one size for all, so that nothing is compiled twice


def places(grid):
    return np.stack(np.broadcast_arrays(*grid.unravel(jnp.arange(MOST, dtype=jnp.int32))), 1)[: grid.size]


@pytest.mark.full
@given(st.integers(1, 5), st.integers(1, 9), st.integers(1, 40), st.integers(1, 2))
def test_each_tile_once_and_those_of_a_head_in_order(batch, heads, tiles, max_waves):
    found = places(Grid(batch, heads, tiles, max_waves))
    assert sorted(map(tuple, found)) == list(np.ndindex(batch, heads, tiles))
    for head in np.ndindex(batch, heads):
        assert found[(found[:, :2] == head).all(1)][:, 2].tolist() == list(range(tiles))


@pytest.mark.parametrize(
    ("heads", "tiles", "most"),
    [(16, 64, 1.01), (64, 64, 1.01), (32, 128, 1.01), (64, 32, 1.01), (16, 86, 1.04)],  # a head of 16 is left over
)
def test_multiprocessors_end_together_under_a_causal_mask(heads, tiles, most):
    free = [0] * NUM_SMS
    for *_, nth in places(Grid(1, heads, tiles)).tolist():
        heapq.heappush(free, heapq.heappop(free) + tiles - nth + 2)
    assert max(free) < most * sum(free) / len(free)

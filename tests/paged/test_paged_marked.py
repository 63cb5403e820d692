"""How tiles of queries are divided among programs of the repair: each is taken once, by one that reads its marks."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.config import Tiles
from pallas_kernels.split_kv.work import QueryBlocks, Work, planned_requests
from pallas_kernels.triton.containment import MAX_PROGRAMS

PADDED = 16  # requests
HEADS = 6


def plan_of(queries, tail, group, rows, least):
    """Blocks, work items and plan of packed requests with so many queries, and `tail` of no request."""
    R, N = len(queries), sum(queries) + tail
    sizes = {"T": N, "B": R, "S": 640, "Hq": HEADS * group, "Hkv": HEADS, "group": group}
    spec = types.SimpleNamespace(**sizes, route="interpreted", device_kind="")
    work = Work(Tiles(rows, 64, 4, 1), least, 10**6, may_split=False)
    start = np.full(PADDED, N, np.int32)
    start[: R + 1] = np.cumsum([0, *queries])
    end = np.append(start[1:], N).astype(np.int32)
    lengths = np.where(np.arange(PADDED) < R, 640, 0).astype(np.int32)
    return QueryBlocks(spec, work), planned_requests(spec, work, *map(jnp.asarray, (start, end, lengths)))


@pytest.mark.full
@given(
    st.lists(st.integers(0, 90), min_size=1, max_size=PADDED - 1),
    st.integers(0, 200),
    st.sampled_from([1, 3, 4]),
    st.sampled_from([4, 16, 64]),
    st.sampled_from([0, 17]),
)
def test_each_tile_is_taken_once(queries, tail, group, rows, least):
    if not sum(queries) + tail:
        return
    blocks, plan = plan_of(queries, tail, group, rows, least)
    of_all = jax.vmap(lambda block: blocks.items(plan, block))(jnp.arange(MAX_PROGRAMS))
    ranges = [range(*x) for x in np.stack(of_all, axis=1)[: blocks.programs // HEADS].tolist()]
    per_tile, tiles = blocks.work.queries(blocks.spec), zip(*map(np.asarray, (plan.start, plan.tiles)), strict=True)
    firsts = np.concatenate([start + per_tile * np.arange(count) for start, count in tiles])  # as `item_of` says
    assert [i for of_block in ranges for i in of_block] == list(range(len(firsts)))
    assert (firsts // blocks.size).tolist() == [block for block, of_block in enumerate(ranges) for _ in of_block]

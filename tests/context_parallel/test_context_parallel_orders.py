"""Orders of the tokens in context parallel attention: permutations, balance, and the picture of the costs."""

import functools

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType

import jflex
from jflex import context_parallel
from tests.support.context_parallel_calls import MASKS, NEEDS_EIGHT_DEVICES, ZIGZAG, drawn

pytestmark = NEEDS_EIGHT_DEVICES


@pytest.mark.full
@given(
    st.integers(1, 4).flatmap(
        lambda chunks: st.tuples(st.permutations(range(4 * chunks)), st.integers(1, 3), st.just(4 * chunks))
    )
)
def test_an_order_is_undone(drawn):
    order, size, chunks = np.array(drawn[0]), drawn[1], drawn[2]
    x = np.random.default_rng(0).normal(size=(2, chunks * size, 3)).astype(np.float32)
    turned = context_parallel.reorder(x, order)
    where = context_parallel.positions(order, chunks * size)
    np.testing.assert_array_equal(turned, x[:, where])
    np.testing.assert_array_equal(context_parallel.restore(turned, order), x)


@pytest.mark.full
@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 2**31))
def test_a_balanced_order_is_a_permutation_no_worse_than_the_natural_one(shards, chunks, seed):
    """And of one chunk for each device no order is better: the largest stays."""
    rng = np.random.default_rng(seed)
    rows = shards * chunks
    states = (rng.random((1, 1, rows, rows)) < rng.random()).astype(int)
    counts = states.sum(-1)
    mask = jflex.BlockMask.from_kv_blocks(counts, np.argsort(-states, axis=-1, stable=True), block_size=16)
    order = context_parallel.balanced_order(mask, shards)
    np.testing.assert_array_equal(np.sort(order), np.arange(rows))
    balanced, natural = (context_parallel.device_costs(mask, shards, x) for x in (order, None))
    assert balanced.sum() == natural.sum() == counts.sum()
    # Graham's bound, with as many chunks for each device: no device has more than the mean and one largest chunk.
    assert balanced.max() <= natural.sum() / shards + counts.max(initial=0)


@pytest.mark.full
@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_reordered_tokens_are_sharded_as_before(kind, jitted):
    mesh, (x, *_) = drawn(T=64, kind=kind)
    turn = functools.partial(context_parallel.reorder, order=ZIGZAG)
    back = functools.partial(context_parallel.restore, order=ZIGZAG)
    with jax.set_mesh(mesh):
        turned = jax.jit(turn)(x) if jitted else turn(x)
        restored = jax.jit(back)(turned) if jitted else back(turned)
    np.testing.assert_array_equal(turned, np.asarray(x)[:, context_parallel.positions(ZIGZAG, 64)])
    np.testing.assert_array_equal(restored, x)
    if kind == AxisType.Explicit:
        assert jax.typeof(turned) == jax.typeof(restored) == jax.typeof(x)


@pytest.mark.parametrize("shards", [1, 2, 8])
def test_zigzag_balances_a_causal_mask(shards):
    mask = jflex.create_block_mask(MASKS["causal"], None, None, 64 * shards, 64 * shards, block_size=16)
    costs = context_parallel.device_costs(mask, shards, context_parallel.zigzag_order(shards))
    assert len(set(costs.tolist())) == 1
    order = context_parallel.balanced_order(mask, shards)
    assert len(set(context_parallel.device_costs(mask, shards, order).tolist())) == 1


@pytest.mark.full
def test_a_picture_of_the_costs(tmp_path):
    pytest.importorskip("matplotlib")
    mask = jflex.create_block_mask(MASKS["causal"], None, None, 128, 128, block_size=16)
    orders = {"natural": None, "zigzag": context_parallel.zigzag_order(4)}
    figure = context_parallel.costs_to_image(mask, 4, orders)
    figure.savefig(tmp_path / "costs.png")
    heights = [[bar.get_height() for bar in axis.patches] for axis in figure.axes]
    assert heights[0] == list(range(1, 9))
    assert heights[1] == [3, 7, 11, 15]
    assert heights[2] == [1, 8, 2, 7, 3, 6, 4, 5]
    assert heights[3] == [9, 9, 9, 9]
    assert [axis.get_title() for axis in figure.axes[1::2]] == ["largest / mean: 1.67", "largest / mean: 1.00"]

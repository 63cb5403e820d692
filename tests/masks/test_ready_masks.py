"""Ready masks of grids, videos and packed sequences in attention; `test_masks.py` has their elements."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jflex
from jflex import masks
from tests.cases.ready_masks import GRID, READY, by_morton, by_tiles, cells
from tests.support import oracle
from tests.support.rows import tiers

INTERPRETED = jflex.Config(interpret=True)


def drawn(name):
    """A mask, the same dense [B, T, S], and query, key and value."""
    mask_mod, dense = READY[name]
    dense = np.broadcast_to(dense, (2, *dense.shape[-2:]))
    rng = np.random.default_rng(0)
    shapes = [(2, dense.shape[1], 2, 16), (2, dense.shape[2], 1, 16), (2, dense.shape[2], 1, 16)]
    return mask_mod, dense, [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def block_mask(mask_mod, dense, size):
    batch = 2 if (dense[0] != dense[1]).any() else None
    return jflex.create_block_mask(mask_mod, batch, None, *dense.shape[1:], block_size=size)


@tiers(
    default=[
        {"name": ["shared prefix", "neighborhood by Morton, wide"], "implementation": "xla"},
        {"name": "neighborhood by Morton, wide", "implementation": "triton"},
    ],
    in_turns=True,
)
@pytest.mark.parametrize("name", [name for name in READY if "by batch" not in name and "traced" not in name])
@pytest.mark.parametrize("implementation", ["triton", "xla"])
def test_attention(name, implementation):
    mask_mod, dense, arrays = drawn(name)
    options = {"block_mask": block_mask(mask_mod, dense, 16), "return_lse": True, "config": INTERPRETED}
    out, lse = jax.jit(lambda *x: jflex.flex_attention(*x, implementation=implementation, **options))(*arrays)
    visible = lambda b, h, q, k, c: dense[b, q, k]
    right = oracle.forward(*(x.astype(np.float64) for x in arrays), 0.25, None, visible, {})
    np.testing.assert_allclose(out, right.out, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(lse, right.lse, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", READY)
def test_kernels_can_evaluate_it(name):
    mask_mod, _, arrays = drawn(name)
    shapes = [jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in arrays]
    account = jflex.explain(*shapes, mask_mod=mask_mod, implementation="triton", config=INTERPRETED)
    assert account.backend == "triton"


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        (masks.tile_order(GRID, (2, 4)), by_tiles(GRID, (2, 4))),
        (masks.tile_order((2, 4, 3), (1, 2, 2)), by_tiles((2, 4, 3), (1, 2, 2))),
        (masks.morton_order((4, 4)), by_morton((4, 4))),
        (masks.morton_order((3, 17)), by_morton((3, 17))),
        (masks.morton_order((2, 3, 5)), by_morton((2, 3, 5))),
    ],
    ids=["tiles", "tiles of a video", "Morton", "Morton, wide", "Morton of a video"],
)
def test_orders(order, expected):
    canvas = tuple(np.max(expected, axis=0) + 1)
    assert order.dtype == np.int32
    assert [cells(canvas)[cell] for cell in order] == expected


@tiers(default={"order": "Morton"})
@pytest.mark.parametrize("order", [masks.tile_order(GRID, (2, 3)), masks.morton_order(GRID)], ids=["tiles", "Morton"])
def test_reordered_attention_is_attention_in_rows(order):
    query, key, value = jax.random.normal(jax.random.key(0), (3, 2, 30, 2, 16))

    @jax.jit
    def attend(query, key, value, order):
        arrays = (masks.reorder(x, order) for x in (query, key, value))
        mask_mod = masks.neighborhood(GRID, (3, 3), order=order)
        return masks.restore(jflex.flex_attention(*arrays, mask_mod=mask_mod, implementation="xla"), order)

    in_rows = jflex.flex_attention(query, key, value, mask_mod=masks.neighborhood(GRID, (3, 3)), implementation="xla")
    np.testing.assert_allclose(attend(query, key, value, order), in_rows, rtol=1e-5, atol=1e-5)
    heads_first = masks.reorder(query.swapaxes(1, 2), order, axis=2)
    np.testing.assert_array_equal(heads_first, masks.reorder(query, order).swapaxes(1, 2))
    np.testing.assert_array_equal(masks.restore(heads_first, order, axis=2), query.swapaxes(1, 2))


def test_groups_pass_on_what_their_mask_requires():
    grouped = masks.batchify(jflex.and_masks(masks.causal(), masks.padding(jnp.array([4, 2, 3]))), 4)
    with pytest.raises(ValueError, match=r"`kv_lengths` of `padding` .*Got 3 for a mask with batch 2"):
        jflex.create_mask(grouped, 2, None, 8, 8)
    assert jflex.create_mask(grouped, 3, None, 8, 8).shape == (3, 1, 8, 8)

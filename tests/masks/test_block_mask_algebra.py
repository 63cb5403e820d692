"""BlockMask: indexing, resizing and joining, against dense numpy masks."""

import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jflex.block_mask.mask import BlockMask, create_block_mask
from tests.support.dense_masks import (
    causal,
    check_same_mask,
    dense_mod,
    dense_values,
    lists_of,
    packed,
    random_documents,
    random_mask,
)

# --- indexing

SELECTIONS = [
    (1,), (-1, 0), (slice(None), 1), (slice(1), slice(None, None, -1)), (slice(None), slice(None), 2),
    (slice(None), slice(None), -1), (0, 1, slice(1, 3)), (0, 1, slice(1, None)), (slice(None), slice(None), slice(2)),
    (slice(None), slice(None), slice(0, None, 3)), ([1, 0, 1], np.array([1]), jnp.asarray([2, 0, 3])),
    (slice(None), slice(None), slice(2, 2)), (slice(0), 0, 0), (np.int64(1), np.array(0), jnp.asarray(1)),
]  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("index", SELECTIONS, ids=str)
def test_getitem_equals_slicing_the_dense_mask(index):
    block_mask, values = random_mask(1)  # 4 query blocks, the last of 4 queries
    chosen = block_mask[index]
    dense = values
    for axis, part in enumerate((*index, slice(None), slice(None), slice(None))[:3]):
        size = block_mask.kv_num_blocks.shape[axis]
        numbers = np.atleast_1d(np.arange(size)[part if isinstance(part, slice) else np.asarray(part)])
        if axis == 2:
            numbers = np.concatenate([np.arange(n * 32, min(n * 32 + 32, 100)) for n in numbers] or [numbers])
        dense = np.take(dense, numbers, axis)
    check_same_mask(chosen, dense)


@pytest.mark.full
def test_getitem_with_traced_numbers():
    block_mask, values = random_mask(2, lengths=(96, 70))
    chosen = jax.jit(lambda mask, b, row: mask[b, :, row])(block_mask, 1, jnp.asarray(2))
    check_same_mask(chosen, values[1:, :, 64:])
    chosen = jax.jit(lambda mask, rows: mask[:, :, rows])(block_mask, jnp.asarray([2, 0]))
    check_same_mask(chosen, np.concatenate([values[:, :, 64:], values[:, :, :32]], axis=2))


# --- resizing


@pytest.mark.parametrize(
    "lengths", [(100, 70), (40, 70), (100, 64), (31, 1), (0, 70), (128, 70), (150, 150), (50, 150)]
)
def test_with_lengths_equals_the_mask_made_for_them(lengths):
    def mod(b, h, q_idx, kv_idx):  # visible blocks that are no prefix
        return (kv_idx < 20) | ((kv_idx >= 60) & (kv_idx < 110)) | (q_idx == 3 * kv_idx)

    resized = create_block_mask(mod, 2, None, 100, 70, block_size=(32, 16)).with_lengths(*lengths)
    made = create_block_mask(mod, 2, None, *lengths, block_size=(32, 16))
    chex.assert_trees_all_equal(resized, made, strict=True)


@pytest.mark.full
@pytest.mark.parametrize("lengths", [(64, 96), (50, 40), (96, 128)])
def test_listed_masks_are_cropped(lengths):
    states = np.random.default_rng(3).integers(0, 3, (2, 1, 3, 4))
    block_mask = BlockMask.from_kv_blocks(*lists_of(states), block_size=32)
    dense = (states > 0).repeat(32, 2).repeat(32, 3)
    check_same_mask(block_mask.with_lengths(*lengths), dense[:, :, : lengths[0], : lengths[1]])


@pytest.mark.full
def test_listed_masks_are_extended_by_their_mod_alone():
    states = np.array([[[[1, 0, 0], [1, 0, 0], [0, 0, 1]]]])  # of causal, block (1, 1) and (2, 0), (2, 1) are left out
    block_mask = BlockMask.from_kv_blocks(*lists_of(states)[:2], block_size=32, mask_mod=causal, seq_lengths=(90, 90))
    inside = states.repeat(32, 2).repeat(32, 3)[:, :, :90, :90].astype(bool) & np.tri(90, dtype=bool)
    check_same_mask(block_mask, inside, exact=False)
    dense = np.tri(110, 130, dtype=bool)[None, None].copy()
    dense[:, :, :90, :90] = inside
    check_same_mask(block_mask.with_lengths(110, 130), dense)


# --- joining


def listed_mask(seed, mask_mod=None, dense=None):
    states = np.random.default_rng(seed).integers(0, 2, (2, 1, 4, 3))
    mask = BlockMask.from_kv_blocks(*lists_of(states)[:2], block_size=32, mask_mod=mask_mod, seq_lengths=(100, 70))
    listed = states.astype(bool).repeat(32, 2).repeat(32, 3)[:, :, :100, :70]
    return mask, listed if dense is None else listed & dense


OPERANDS = {
    "both axes": lambda: random_mask(1),
    "shared": lambda: (create_block_mask(causal, None, None, 100, 70, block_size=32), TRIANGLE),
    "one batch": lambda: (create_block_mask(dense_mod(ONE_BATCH), 1, 2, 100, 70, block_size=32), ONE_BATCH),
    "listed": lambda: listed_mask(6),
    "listed with a mod": lambda: listed_mask(7, causal, TRIANGLE),
}
TRIANGLE, ONE_BATCH = np.tri(100, 70, dtype=bool)[None, None], dense_values(5, (1, 2, 100, 70))
PAIRS = [*zip(OPERANDS, OPERANDS, strict=True), *itertools.pairwise([*OPERANDS, "both axes"])]


@pytest.mark.full
@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_join_matches_dense(first, second):
    (one, dense_one), (two, dense_two) = OPERANDS[first](), OPERANDS[second]()
    check_same_mask(one & two, dense_one & dense_two, exact=False)
    check_same_mask(one | two, dense_one | dense_two, exact=False)


@pytest.mark.full
@pytest.mark.parametrize("name", OPERANDS)
def test_invert_matches_dense(name):
    block_mask, dense = OPERANDS[name]()
    # A block past a length that shows all it has is partial, and stays partial when it shows nothing.
    check_same_mask(~block_mask, ~dense, exact=name == "listed")
    check_same_mask(~~block_mask, dense, exact=name == "listed")


@pytest.mark.full
def test_joins_keep_no_program_apart():
    """A join of the same programs with other values is the same program: nothing is compiled again."""
    join = [packed(random_documents(s)) & create_block_mask(causal, None, None, 100, 100) for s in (0, 1)]
    assert join[0].traced == join[1].traced
    assert jax.tree.structure(join[0]) == jax.tree.structure(join[1])

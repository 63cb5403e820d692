"""Dense masks in numpy, the oracle of BlockMask, and what its tests share."""

import jax.numpy as jnp
import numpy as np

from jflex.block_mask.dense import dense_elements
from jflex.block_mask.mask import create_block_mask


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def dense_mod(values):
    """A mask_mod that looks up a dense mask [B, H, Q, KV]."""
    values = jnp.asarray(values)
    if values.shape[:2] == (1, 1):
        return lambda b, h, q, kv: values[0, 0, q, kv]
    return lambda b, h, q, kv: values[b, h, q, kv]


def dense_values(seed, shape, block=8):
    """A random mask in which whole blocks are empty or full, and some are neither."""
    rng = np.random.default_rng(seed)
    batch, heads, q_length, kv_length = shape
    coarse = rng.integers(0, 3, (batch, heads, -(-q_length // block), -(-kv_length // block)))
    coarse = np.where(rng.random(coarse.shape[:2])[..., None, None] < 0.5, coarse, np.sort(coarse, -1))
    spread = coarse.repeat(block, 2).repeat(block, 3)[:, :, :q_length, :kv_length]
    return (spread == 2) | ((spread == 1) & (rng.random(shape) < 0.5))


def pooled_states(dense, block_size):
    """The oracle: 0 empty, 1 partial, 2 full; a block that reaches past a length is never full."""
    batch, heads, q_length, kv_length = dense.shape
    rows, columns = -(-q_length // block_size[0]), -(-kv_length // block_size[1])
    padded = np.zeros((batch, heads, rows * block_size[0], columns * block_size[1]), bool)
    padded[:, :, :q_length, :kv_length] = dense
    tiles = padded.reshape(batch, heads, rows, block_size[0], columns, block_size[1])
    return tiles.any((3, 5)).astype(int) + tiles.all((3, 5))


def check_lists(block_mask, states):
    """The eight lists say exactly `states`, in ascending order."""
    lists = block_mask.lists
    for transposed, pairs in ((False, (lists[0:2], lists[2:4])), (True, (lists[4:6], lists[6:8]))):
        matrix = np.swapaxes(states, 2, 3) if transposed else states
        for kind, (counts, numbers) in zip((1, 2), pairs, strict=True):
            assert counts.dtype == numbers.dtype == jnp.int32
            assert counts.shape == matrix.shape[:3]
            assert numbers.shape == matrix.shape
            for place in np.ndindex(*matrix.shape[:3]):
                listed = np.asarray(numbers)[place][: int(counts[place])]
                np.testing.assert_array_equal(listed, np.flatnonzero(matrix[place] == kind))


def check_same_mask(block_mask, dense, *, exact=True):
    """The mask shows `dense`; its states are the pooled ones or, unless `exact`, partial where those are not."""
    assert block_mask.shape == dense.shape
    np.testing.assert_array_equal(block_mask.to_elements(), dense)
    states, pooled = np.asarray(block_mask.states()), pooled_states(dense, block_mask.block_size)
    assert np.all((states == pooled) | ((states == 1) & (not exact)))
    check_lists(block_mask, states)
    if block_mask.lists_follow_mod:  # then the mod alone tells the same; the program is the one compiled above
        everywhere = jnp.ones_like(block_mask.states())
        sizes = (block_mask.seq_lengths, block_mask.block_size)
        shown = dense_elements(block_mask.traced, block_mask.mask_operands, everywhere, *sizes)
        np.testing.assert_array_equal(shown, dense)


def random_mask(seed, batch=2, heads=2, lengths=(100, 70), block_size=(32, 32)):
    values = dense_values(seed, (batch, heads, *lengths))
    return create_block_mask(dense_mod(values), batch, heads, *lengths, block_size=block_size), values


def packed(documents, **options):
    def mask_mod(b, h, q_idx, kv_idx):
        return (documents[b, q_idx] == documents[b, kv_idx]) & (q_idx >= kv_idx)

    return create_block_mask(mask_mod, documents.shape[0], None, documents.shape[1], documents.shape[1], **options)


def random_documents(seed, batch=2, length=100):
    return jnp.asarray(np.sort(np.random.default_rng(seed).integers(0, 5, (batch, length)), axis=1), jnp.int32)


def lists_of(states, seed=0):
    """Lists in any order with rubbish behind the counts."""
    rng = np.random.default_rng(seed)
    pairs = []
    for kind in (1, 2):
        counts = (states == kind).sum(-1)
        numbers = rng.integers(-99, 99, states.shape)
        for place in np.ndindex(*states.shape[:3]):
            listed = rng.permutation(np.flatnonzero(states[place] == kind))
            numbers[place][: len(listed)] = listed
        pairs += [counts, numbers]
    return pairs

"""Ready masks and scores, and their composition, against formulas in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jflex import masks, scores
from jflex.block_mask.dense import create_mask
from jflex.block_mask.mask import create_block_mask
from jflex.mods.compose import and_masks, noop_mask, not_mask, or_masks
from jflex.mods.trace import trace_mask_mod, trace_score_mod
from tests.cases.ready_masks import READY, neighbors
from tests.support.rows import tiers

BATCH, HEADS, LENGTH = 2, 2, 24
I, J = np.arange(LENGTH)[:, None], np.arange(LENGTH)[None]
B = np.arange(BATCH)[:, None, None]
H = np.arange(HEADS)[:, None, None]
IDS = np.sort(np.random.default_rng(0).integers(0, 4, (BATCH, LENGTH)), axis=1).astype(np.int32)
FLAGS = np.random.default_rng(1).random(LENGTH) < 0.2
PREFIXES, LENGTHS = np.array([3, 7]), np.array([24, 10])


def diffusion(length, block):
    dense = np.zeros((2 * length, 2 * length), bool)
    for i, j in np.ndindex(dense.shape):
        i_clean, j_clean, i_block, j_block = i >= length, j >= length, i % length // block, j % length // block
        dense[i, j] = (i_block == j_block) if i_clean == j_clean else j_clean and i_block > j_block
        dense[i, j] |= i_clean and j_clean and i_block >= j_block
    return dense


PARENTS = [-1, 0, 0, 1, 3, 2]


def tree_rows(prefix):
    dense = np.zeros((LENGTH, LENGTH), bool)
    dense[:, :prefix] = True
    for node in range(len(PARENTS)):
        seen = node
        while seen >= 0:
            dense[node, prefix + seen] = True
            seen = PARENTS[seen]
    return dense[: len(PARENTS), : prefix + len(PARENTS)]


MASKS = {
    "causal": (masks.causal(), I >= J),
    "causal, bottom right": (masks.causal("bottom_right", q_length=20, kv_length=24), I[:20] + 4 >= J),
    "causal, traced lengths": (
        masks.causal("bottom_right", q_length=jnp.int32(20), kv_length=jnp.int32(24)),
        I + 4 >= J,
    ),
    "sliding window": (masks.sliding_window(5), (J >= I - 5) & (J <= I)),
    "sliding window, both sides": (masks.sliding_window(jnp.int32(2), jnp.int32(3)), (J >= I - 2) & (J <= I + 3)),
    "dilated window": (masks.dilated_window(6, 4, dilation=2), (I - J <= 6) & (J - I <= 4) & ((I - J) % 2 == 0)),
    "prefix": (masks.prefix_lm(7), (J < 7) | (I >= J)),
    "prefixes": (masks.prefix_lm(PREFIXES), (PREFIXES[B] > J) | (I >= J)),
    "documents": (masks.document(IDS[0]), IDS[0][I] == IDS[0][J]),
    "documents by batch": (masks.document(IDS), IDS[:, :, None] == IDS[:, None]),
    "documents across": (masks.document(IDS[0], IDS[1]), IDS[0][I] == IDS[1][J]),
    "padding": (masks.padding(LENGTHS), (LENGTHS[B] > J) & (I >= 0)),
    "global tokens": (masks.global_tokens(FLAGS), FLAGS[I] | FLAGS[J]),
    "block diffusion": (masks.block_diffusion(12, 4), diffusion(12, 4)),
    "neighborhood, wide": (masks.neighborhood((3, 8), (3, 5)), neighbors((3, 8), (3, 5))),
    "neighborhood, high": (masks.neighborhood((8, 3), (3, 1)), neighbors((8, 3), (3, 1))),
    "tree": (masks.tree(4, masks.tree_ancestors(PARENTS)), tree_rows(4)),
    "noop": (noop_mask, I + J >= 0),
    "and": (and_masks(masks.causal(), masks.document(IDS)), (IDS[:, :, None] == IDS[:, None]) & (I >= J)),
    "or": (
        or_masks(masks.sliding_window(2), masks.global_tokens(FLAGS)),
        ((J >= I - 2) & (J <= I)) | FLAGS[I] | FLAGS[J],
    ),
    "not": (not_mask(masks.causal()), I < J),
    "and of nothing": (and_masks(), I + J >= 0),
    "or of nothing": (or_masks(), I + J < 0),
    **READY,
}


@tiers(
    full={"name": [
        "groups of flags", "groups by batch", "neighborhood of a video", "neighborhood by Morton, high",
        "neighborhood in tiles, short ones at the border", "sliding tile, even window", "sliding tile of a video",
        "sliding tile, traced text", "spatial head, first frame", "temporal head, first frame",
    ]}
)  # fmt: skip
@pytest.mark.parametrize("name", MASKS)
def test_mask_matches_its_formula(name):
    mask_mod, dense = MASKS[name]
    dense = np.broadcast_to(dense if dense.ndim == 3 else dense[None], (BATCH, *dense.shape[-2:]))[:, None]
    np.testing.assert_array_equal(create_mask(mask_mod, BATCH, None, *dense.shape[2:]), dense)
    block_mask = create_block_mask(mask_mod, BATCH, None, *dense.shape[2:], block_size=8)
    np.testing.assert_array_equal(block_mask.to_elements(), dense)


def test_arrays_are_operands_and_numbers_are_program():
    one, two = (trace_mask_mod(masks.sliding_window(jnp.int32(n))) for n in (3, 4))
    assert one[0] == two[0]
    assert [int(x) for x in one[1]] != [int(x) for x in two[1]]
    assert trace_mask_mod(masks.sliding_window(3))[0] != trace_mask_mod(masks.sliding_window(4))[0]


def test_document_ids_from_traced_lengths():
    ids = jax.jit(lambda lengths: masks.document_ids_from_lengths(lengths, 8))(jnp.array([2, 0, 3]))
    assert ids.tolist() == [0, 0, 2, 2, 2, 3, 3, 3]
    assert ids.dtype == jnp.int32


TABLE = np.random.default_rng(2).normal(size=(HEADS, 8)).astype(np.float32)
BIAS = np.random.default_rng(3).normal(size=(BATCH, 1, LENGTH, LENGTH)).astype(np.float32)
SLOPES = np.array([0.5, 0.25], np.float32)


def t5_buckets(distance):
    """For 4 buckets a side up to distance 16: 0 and 1 are exact, the rest grows as 2 * 8 ** (n / 2)."""
    near = np.abs(distance)
    bucket = np.select([near < 2, near < 2 * 8**0.5], [near, 2], 3)
    return bucket + 4 * (distance > 0)


SCORES = {
    "alibi": (scores.alibi(SLOPES), lambda s: s + SLOPES[H] * (J - I)),
    "softcap": (scores.softcap(2.0), lambda s: 2 * np.tanh(s / 2)),
    "softcap, captured": (scores.softcap(jnp.float32(2)), lambda s: 2 * np.tanh(s / 2)),
    "bias": (scores.bias(BIAS), lambda s: s + BIAS),
    "relative": (scores.relative_bias(TABLE[:, :7]), lambda s: s + TABLE[H, np.clip(J - I, -3, 3) + 3]),
    "t5": (scores.t5_bias(TABLE, bidirectional=True, max_distance=16), lambda s: s + TABLE[H, t5_buckets(J - I)]),
}


@pytest.mark.parametrize("name", SCORES)
def test_score_matches_its_formula(name):
    score_mod, formula = SCORES[name]
    traced, operands = trace_score_mod(score_mod)
    values = np.random.default_rng(4).normal(size=(BATCH, HEADS, LENGTH, LENGTH)).astype(np.float32)
    places = [jnp.asarray(x, jnp.int32).ravel() for x in np.indices(values.shape)]
    out = jax.vmap(lambda *scalars: traced(operands, *scalars))(jnp.asarray(values).ravel(), *places)
    np.testing.assert_allclose(out.reshape(values.shape), formula(values.astype(np.float64)), rtol=1e-5, atol=1e-6)


def test_alibi_slopes():
    np.testing.assert_allclose(scores.alibi_slopes(8), 2.0 ** -np.arange(1, 9))
    assert scores.alibi_slopes(12).shape == (12,)
    np.testing.assert_allclose(scores.alibi_slopes(12)[8:], 2.0 ** -np.array([0.5, 1.5, 2.5, 3.5]))

"""Wrong arguments and sizes of ready masks and scores of grids, videos, graphs and packed sequences."""

import jax
import jax.numpy as jnp
import numpy as np

from jflex import masks, scores
from tests.support.sized_calls import IDS, call, draw, ids_of, int32

TWO_ROWS = ids_of(2, 24)
TILED = masks.neighborhood((4, 4), (3, 3), order=masks.tile_order((4, 4), (2, 2)))


def undone(heads=2, **options):
    out, lse, value_sum = jnp.ones((1, 3, 4, 8)), jnp.ones((1, 4, 3)), jnp.ones((1, 1, heads, 8))
    return scores.undo_softmax(out, lse, value_sum, **options)


# How to provoke it, type, what the message holds.
ROWS = [
    # --- wrong values
    (lambda: masks.neighborhood((3, 4), (1, 1, 1)), ValueError,
     r"`kernel` of `neighborhood` .*each axis.*canvas of \(3, 4\)"),
    (lambda: masks.neighborhood((0, 4), (1, 1)), ValueError, "`canvas` of `neighborhood` must be a tuple of positive"),
    (lambda: masks.neighborhood((3, 4), (1, 1), order=masks.morton_order((3, 3))), ValueError,
     r"`order` of `neighborhood` must hold every cell .*\(3, 4\) once\. Got 9 cells\. Pass `tile_order`"),
    (lambda: masks.tile_order((3, 4), (0, 1)), ValueError, r"`tile` of `tile_order` must be .*positive .*Got \(0, 1\)"),
    (lambda: masks.morton_order(()), ValueError, r"`canvas` of `morton_order` must be .* Got \(\)"),
    (lambda: masks.reorder(jnp.ones((2, 3)), masks.morton_order((2, 2))), ValueError,
     r"`order` of `reorder` must .*Got 4 cells for axis 1 of shape \(2, 3\)\. Pass the axis"),
    (lambda: masks.restore(jnp.ones((2, 3)), masks.morton_order((3,)), axis=0), ValueError,
     r"`order` of `restore` must"),
    (lambda: masks.sliding_tile((4, 6), (2, 3), (2, 2)), ValueError,
     r"`canvas` and `kernel` of `sliding_tile` must be multiples of `tile`.*Pad the canvas"),
    (lambda: masks.sliding_tile((4, 6), (6, 2), (2, 2)), ValueError,
     r"the kernel must fit .*\(4, 6\), \(6, 2\) and \(2, 2\)"),
    (lambda: masks.sliding_tile((2, 2), (2, 2), (2, 2), text_length=-1), ValueError,
     r"`text_length` .*negative\. Got -1"),
    (lambda: masks.spatial_head(0, 4), ValueError, r"`frame` and `window` of `spatial_head` must be positive"),
    (lambda: masks.temporal_head(4, 4, prompt=-1), ValueError,
     r"`temporal_head` .*`prompt` not negative\. Got 4, 4 and -1"),
    (lambda: masks.batchify(masks.causal(), 0), ValueError, r"`length` of `batchify` must be positive\. Got 0"),
    (lambda: masks.batchify(masks.document(TWO_ROWS[0]), 30), ValueError,
     r"`q_ids` of `document` .*Got 24 for groups of `batchify` with queries up to position 29\. Pass 30"),
    (lambda: masks.draft_blocks(3, 0), ValueError, r"`block` of `draft_blocks` must be positive\. Got 0"),
    (lambda: masks.draft_blocks(-1, 2), ValueError, r"`prefix_length` of .* must not be negative\. Got -1"),
    (lambda: masks.causal_document(TWO_ROWS[None]), ValueError,
     r"`ids` of `causal_document` must be \[T\] or \[B, T\]"),
    (lambda: masks.shared_prefix(TWO_ROWS, TWO_ROWS[0]), ValueError,
     r"`ids` and `prefixes` of `shared_prefix` must be .*Got \(2, 24\)"),
    (lambda: masks.vision_cross_attention(TWO_ROWS, 4), ValueError,
     r"`intervals` .* must be \[N, 2\] .*Got shape \(2, 24\)"),
    (lambda: masks.vision_cross_attention(TWO_ROWS[:, :2], 0), ValueError, r"`image` of .* must be positive\. Got 0"),
    (lambda: scores.sandwich(4, 0), ValueError,
     r"`heads` and `length` of `sandwich` must be positive.*Got 4, 0 and 128"),
    (lambda: scores.sandwich(4, 8, dimension=3), ValueError, "`dimension` positive and even"),
    (lambda: scores.spatial_bias(jnp.ones((2, 4)), TWO_ROWS[0]), ValueError,
     r"`distances` .* must be \[T, S\] or \[B, T, S\]"),
    (lambda: scores.edge_bias(jnp.ones((2, 4, 3)), np.zeros((8, 8, 3), int)), ValueError,
     r"`edges` of `edge_bias` must be .*Got shapes \(8, 8, 3\) and \(2, 4, 3\)\. Pad the paths"),
    (lambda: scores.activation(jax.nn.relu, offset=0.0), ValueError,
     r"`offset` of `activation` must be positive\. Got 0"),
    (lambda: undone(offset=-1.0), ValueError, r"`offset` of `undo_softmax` must be positive\. Got -1"),
    (lambda: undone(layout="BHTD"), ValueError, r"`layout` of `undo_softmax` must be 'BTNH' or 'BNTH'\. Got 'BHTD'"),
    (lambda: undone(heads=3), ValueError, r"`value_sum` of `undo_softmax` must .*Got 3 for an output of 4 heads"),
    # --- of another kind
    (lambda: masks.neighborhood((3, 4.0), (1, 1)), TypeError,
     r"`canvas` of `neighborhood` must be a tuple of positive integers, .*Got \(3, 4\.0\)"),
    (lambda: masks.neighborhood((2, 2), (1, 1), order=jnp.ones(4)), TypeError,
     r"`order` of `neighborhood` must be integers"),
    (lambda: masks.tile_order(4, 2), TypeError, r"`canvas` of `tile_order` .*Got 4"),
    (lambda: masks.reorder(draw(1, 2), [0.0, 1.0]), TypeError, r"`order` of `reorder` must be integers"),
    (lambda: masks.sliding_tile((2, 2), (2, 2), (2, 2), text_length=2.5), TypeError,
     r"`text_length` of `sliding_tile` must be integers"),
    (lambda: masks.batchify(3, 4), TypeError,
     r"`mask_mod` of `batchify` must be a function \(b, h, q_idx, kv_idx\) -> bool\. Got int"),
    (lambda: masks.draft_blocks(jnp.ones(()), 4), TypeError, r"`prefix_length` of .* must be integers"),
    (lambda: masks.causal_document(jnp.ones(4)), TypeError, r"`ids` of .* must be integers"),
    (lambda: masks.shared_prefix(IDS, [0.5]), TypeError, r"`prefixes` of .* must be integers"),
    (lambda: masks.vision_cross_attention(draw(3, 2), 4), TypeError, r"`intervals` of .* must be integers"),
    (lambda: scores.spatial_bias(draw(4, 5), draw(8, 8)), TypeError, r"`distances` .* be integers"),
    (lambda: scores.spatial_bias(draw(4), ids_of(8, 8)), ValueError, r"must be \[Hq, N\]"),
    (lambda: scores.edge_bias(ids_of(4, 2, 3), ids_of(8, 8, 2)), TypeError, r"`table` .* be floating-point"),
    (lambda: scores.activation(2.0), TypeError, r"`function` of `activation` must .*Got float"),
    # --- made for other sizes than those of a call
    (lambda: call(mask_mod=TILED), ValueError, r"`canvas` of `neighborhood` .*each query\. Got 16"),
    (lambda: call(mask_mod=masks.sliding_tile((4, 4), (2, 2), (2, 2), text_length=3)), ValueError,
     r"`canvas` and `text_length` of `sliding_tile` .*each query\. Got 19 .*Pass a canvas and text of 32 positions"),
    (lambda: call(mask_mod=masks.causal_document(IDS)), ValueError,
     r"`ids` of `causal_document` must hold one id for each query\. Got 20 .*Pass 32 ids"),
    (lambda: call(mask_mod=masks.causal_document(ids_of(3, 32))), ValueError,
     r"`ids` of `causal_document` must hold one row for each batch entry\. Got 3 .*Pass ids \[2, T\]"),
    (lambda: call(T=20, S=32, mask_mod=masks.shared_prefix(IDS, int32([0, 0, 0, 0]))), ValueError,
     r"`ids` of `shared_prefix` must hold one id for each key\. Got 20"),
    (lambda: call(mask_mod=masks.vision_cross_attention(ids_of(3, 2), 8)), ValueError,
     r"`intervals` and `image` of .* must make up all keys, .*Got 24 .*Pass an interval for each image"),
    (lambda: call(mask_mod=masks.vision_cross_attention(ids_of(3, 4, 2), 8)), ValueError,
     r"`intervals` of .* each batch entry\. Got 3 .*Pass intervals \[2, N, 2\]"),
    (lambda: call(score_mod=scores.sandwich(8, 32)), ValueError,
     r"`heads` of `sandwich` must be the number of query heads\. Got 8 .*4 heads\. Pass `heads=4`"),
    (lambda: call(score_mod=scores.sandwich(4, 31)), ValueError,
     r"`length` of `sandwich` must count .* each query\. Got 31 .*Pass `length=32`"),
    (lambda: call(score_mod=scores.spatial_bias(draw(2, 5), ids_of(32, 32))), ValueError,
     r"`table` of `spatial_bias` .*each query head\. Got 2 .*Pass a table \[4, N\]"),
    (lambda: call(score_mod=scores.spatial_bias(draw(4, 5), ids_of(24, 32))), ValueError,
     r"`distances` of `spatial_bias` must hold one row for each query\. Got 24 .*Pass 32 rows"),
    (lambda: call(score_mod=scores.edge_bias(draw(4, 2, 3), ids_of(3, 32, 32, 2))), ValueError,
     r"`edges` of `edge_bias` must hold one graph for each batch entry\. Got 3 .*Pass 2 graphs"),
    (lambda: call(score_mod=scores.edge_bias(draw(4, 2, 3), ids_of(32, 24, 2))), ValueError,
     r"`edges` of `edge_bias` must hold one number for each key\. Got 24 .*Pass 32 columns"),
]  # fmt: skip
ROWS = [(str(number), *row) for number, row in enumerate(ROWS)]

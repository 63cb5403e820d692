"""Wrong arguments and sizes of ready masks, scores and rotary embeddings, and of mods with an offset."""

import jax
import jax.numpy as jnp
import numpy as np

import jflex
from jflex import masks, scores, with_offset
from jflex.rotary import LongRopeScaling
from tests.cases.errors.calls import block_mask
from tests.cases.errors.calls import mask as causal
from tests.support.sized_calls import IDS, call, draw, ids_of, int32

TWO_ROWS = ids_of(2, 24)
TILED = masks.neighborhood((4, 4), (3, 3), order=masks.tile_order((4, 4), (2, 2)))


def undone(heads=2, **options):
    out, lse, value_sum = jnp.ones((1, 3, 4, 8)), jnp.ones((1, 4, 3)), jnp.ones((1, 1, heads, 8))
    return scores.undo_softmax(out, lse, value_sum, **options)


# How to provoke it, type, what the message holds.
ROWS = [
    # --- wrong values
    (lambda: masks.causal("left"), ValueError, "must be 'top_left' or 'bottom_right'"),
    (lambda: masks.causal("bottom_right"), ValueError, "needs `q_length` and `kv_length`"),
    (lambda: masks.causal(q_length=3), ValueError, "are for `alignment='bottom_right'` only"),
    (lambda: masks.dilated_window(3, dilation=0), ValueError, "`dilation` must be at least 1"),
    (lambda: masks.dilated_window(-2, 1, dilation=2), ValueError, "`left` and `right` must leave a key .* -2 and 1"),
    (lambda: masks.sliding_window(-1), ValueError, "`left` and `right` must leave a key .* Got -1 and 0.* the length"),
    (lambda: masks.document(TWO_ROWS[None]), ValueError, r"must be \[T\] or \[B, T\]"),
    (lambda: masks.document(TWO_ROWS, TWO_ROWS[0]), ValueError, "alike for queries and keys"),
    (lambda: masks.block_diffusion(0, 4), ValueError, "must be positive"),
    (lambda: masks.neighborhood((3, 4), (5, 3)), ValueError, "`kernel` must be odd and fit in the canvas"),
    (lambda: masks.tree_ancestors([-1, 1]), ValueError, "Node 1 has parent 1"),
    (lambda: scores.softcap(0.0), ValueError, "`cap` must be positive"),
    (lambda: scores.bias(jnp.ones((2, 2))), ValueError, "must have four axes"),
    (lambda: scores.relative_bias(jnp.ones((2, 4))), ValueError, r"must be \[Hq, 2 \* m \+ 1\]"),
    (lambda: scores.t5_bias(jnp.ones(4), bidirectional=True), ValueError, r"must be \[Hq, buckets\]"),
    (lambda: scores.t5_bias(jnp.ones((2, 2)), bidirectional=True), ValueError, "does not fit `max_distance` 128"),
    (lambda: masks.neighborhood((3, 4), (1, 1, 1)), ValueError,
     r"`kernel` of `neighborhood` .*each axis.*canvas of \(3, 4\)"),
    (lambda: masks.neighborhood((0, 4), (1, 1)), ValueError, "`canvas` of `neighborhood` must be a tuple of positive"),
    (lambda: masks.neighborhood((3, 4), (1, 1), order=masks.morton_order((3, 3))), ValueError,
     r"`order` of `neighborhood` must hold every cell .*\(3, 4\) once\. Got 9 cells\. Pass `tile_order`"),
    (lambda: masks.tile_order((3, 4), (0, 1)), ValueError, r"`tile` of `tile_order` must be .*positive .*Got \(0, 1\)"),
    (lambda: masks.reorder(jnp.ones((2, 3)), masks.morton_order((2, 2))), ValueError,
     r"`order` of `reorder` must .*Got 4 cells for axis 1 of shape \(2, 3\)\. Pass the axis"),
    (lambda: masks.sliding_tile((4, 6), (2, 3), (2, 2)), ValueError,
     r"`canvas` and `kernel` of `sliding_tile` must be multiples of `tile`.*Pad the canvas"),
    (lambda: masks.sliding_tile((4, 6), (6, 2), (2, 2)), ValueError,
     r"the kernel must fit .*\(4, 6\), \(6, 2\) and \(2, 2\)"),
    (lambda: masks.sliding_tile((2, 2), (2, 2), (2, 2), text_length=-1), ValueError,
     r"`text_length` .*negative\. Got -1"),
    (lambda: masks.spatial_head(0, 4), ValueError, r"`frame` and `window` of `spatial_head` must be positive"),
    (lambda: masks.batchify(masks.causal(), 0), ValueError, r"`length` of `batchify` must be positive\. Got 0"),
    (lambda: masks.batchify(masks.document(TWO_ROWS[0]), 30), ValueError,
     r"`q_ids` of `document` .*Got 24 for groups of `batchify` with queries up to position 29\. Pass 30"),
    (lambda: masks.draft_blocks(3, 0), ValueError, r"`block` of `draft_blocks` must be positive\. Got 0"),
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
    (lambda: undone(heads=3), ValueError, r"`value_sum` of `undo_softmax` must .*Got 3 for an output of 4 heads"),
    # --- of another kind
    (lambda: masks.neighborhood((3, 4.0), (1, 1)), TypeError,
     r"`canvas` of `neighborhood` must be a tuple of positive integers, .*Got \(3, 4\.0\)"),
    (lambda: masks.neighborhood((2, 2), (1, 1), order=jnp.ones(4)), TypeError,
     r"`order` of `neighborhood` must be integers"),
    (lambda: masks.batchify(3, 4), TypeError,
     r"`mask_mod` of `batchify` must be a function \(b, h, q_idx, kv_idx\) -> bool\. Got int"),
    (lambda: scores.activation(2.0), TypeError, r"`function` of `activation` must .*Got float"),
    # --- made for other sizes than those of a call
    (lambda: call(mask_mod=TILED), ValueError, r"`canvas` of `neighborhood` .*each query\. Got 16"),
    (lambda: call(mask_mod=masks.sliding_tile((4, 4), (2, 2), (2, 2), text_length=3)), ValueError,
     r"`canvas` and `text_length` of `sliding_tile` .*each query\. Got 19 .*Pass a canvas and text of 32 positions"),
    (lambda: call(mask_mod=masks.causal_document(IDS)), ValueError,
     r"`ids` of `causal_document` must hold one id for each query\. Got 20 .*Pass 32 ids"),
    (lambda: call(T=20, S=32, mask_mod=masks.shared_prefix(IDS, int32([0, 0, 0, 0]))), ValueError,
     r"`ids` of `shared_prefix` must hold one id for each key\. Got 20"),
    (lambda: call(mask_mod=masks.vision_cross_attention(ids_of(3, 2), 8)), ValueError,
     r"`intervals` and `image` of .* must make up all keys, .*Got 24 .*Pass an interval for each image"),
    (lambda: call(score_mod=scores.sandwich(8, 32)), ValueError,
     r"`heads` of `sandwich` must be the number of query heads\. Got 8 .*4 heads\. Pass `heads=4`"),
    (lambda: call(score_mod=scores.spatial_bias(draw(2, 5), ids_of(32, 32))), ValueError,
     r"`table` of `spatial_bias` .*each query head\. Got 2 .*Pass a table \[4, N\]"),
    (lambda: call(score_mod=scores.edge_bias(draw(4, 2, 3), ids_of(3, 32, 32, 2))), ValueError,
     r"`edges` of `edge_bias` must hold one graph for each batch entry\. Got 3 .*Pass 2 graphs"),
    # --- rotary embeddings
    (lambda: jflex.rope(positions=[0, 1]), TypeError, r"`positions` must be integers.*Got list"),
    (lambda: jflex.rope(positions=jnp.ones(3)), TypeError, r"`positions` must.*Got float32\[3\]\. Cast"),
    (lambda: jflex.rope(positions=jnp.ones((1, 2, 3), int)), ValueError, r"`positions` must.*int32\[1,2,3\]"),
    (lambda: jflex.rope(scaling=LongRopeScaling((1.0,), (1.0,), 4, 8)), ValueError, r"`length` must be passed"),
    (lambda: call(query_mod=jflex.rope(positions=jnp.arange(3))), ValueError,
     r"`positions` of `rope` must hold one position for each query\. Got 3 for a call with queries up to"),
    (lambda: call(query_mod=jflex.rope(positions=jnp.ones((3, 32), int))), ValueError,
     r"a row for each batch entry.*batch 2"),
    (lambda: call(query_mod=jflex.rope(rotary_dim=10)), ValueError, r"`rotary_dim` must be between 0 and.*8\. Got 10"),
    (lambda: call(query_mod=jflex.rope(rotary_dim=3)), ValueError, r"must be even\. Got 3"),
    # --- offsets
    (lambda: with_offset(3, 0), TypeError, r"`mod` must be a score_mod .* or a mask_mod .*Got int"),
    (lambda: with_offset(block_mask(), 0), TypeError,
     r"`mod` must be.*Got BlockMask. Make the BlockMask anew: `create_block_mask\(with_offset"),
    (lambda: with_offset(lambda q, k: q >= k, 0), TypeError, r"`mod` must be.*ready_mods.py:\d+\) takes \(q, k\)\."),
    (lambda: with_offset(lambda *indices: True, 0), TypeError,
     r"`mod` must be.*takes \(\*indices\). Both would fit.*`lambda`"),
    (lambda: with_offset(max, 0), TypeError, r"`mod` must be.*max has no signature.*`lambda`"),
    (lambda: with_offset(causal, 2.0), TypeError, r"`offset` must be an integer.*Got float\."),
    (lambda: with_offset(causal, jnp.ones(2)), TypeError,
     r"`offset` must be.*Got float32\[2\]. Cast it with `.astype\(jnp.int32"),
    (lambda: with_offset(causal, jnp.ones((2, 3), int)), ValueError,
     r"`offset` must be.*Got int32\[2,3\]. Index or `jax.vmap`"),
    (lambda: with_offset(causal, 2**31), ValueError, r"`offset` must be.*within int32.*Got 2147483648"),
    (lambda: jflex.create_block_mask(with_offset(causal, jnp.array([1, 2])), None, None, 16, 16), ValueError,
     r"mask \(calls.py:\d+\) uses `b`. Pass `B=`"),
    (lambda: jflex.create_block_mask(with_offset(lambda b, h, q, k: q and q >= k, 3), None, None, 8, 8), ValueError,
     r"cannot branch.*<lambda> \(ready_mods.py:\d+\)"),
    (lambda: call(score_mod=with_offset(causal, 3)), TypeError, r"It fits a mask_mod: pass it as `mask_mod`"),
]  # fmt: skip
ROWS = [(str(number), *row) for number, row in enumerate(ROWS)]

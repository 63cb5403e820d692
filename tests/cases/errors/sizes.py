"""Sizes that ready masks and scores were made for, calls of other sizes, and arrays of another kind."""

import jax.numpy as jnp
import numpy as np

import jflex
from jflex import masks, scores
from jflex.paged import PagedBatch
from tests.support.sized_calls import (
    ALIBI,
    DOCUMENT,
    IDS,
    PADDING,
    block_mask,
    call,
    cascade,
    draw,
    ids_of,
    int32,
    layer,
    paged,
    varlen,
)

CHAIN = masks.tree_ancestors([-1, 0, 1])


def decode(mods, tokens=2, before=6, call_mods=None):
    made = layer(**mods)
    _, cache = made.decode(jnp.zeros((2, before, 32)), made.init_cache(2, 64))
    return made.decode(jnp.zeros((2, tokens, 32)), cache, **(call_mods or {}))


def decode_paged(mods):
    made = layer(**mods)
    batch = PagedBatch(int32([0, 3, 4]), int32([3, 20]), int32([[1, 0], [2, 3]]))
    return made.decode_paged(jnp.zeros((4, 32)), made.init_paged_cache(4, 16), batch)


def with_table(convert, mod, requests=2, kv_lengths=None):
    table = int32(np.arange(1, 2 * requests + 1).reshape(requests, 2))
    return convert(mod, table, page_size=16, num_pages=8, kv_lengths=kv_lengths)


# Name, how to provoke it, what the message holds.
SIZES = [
    ("alibi", lambda: call(score_mod=ALIBI),
     r"`slopes` of `alibi` must .* each query head\. Got 8 for a call with 4 heads\. Pass `alibi_slopes\(4\)`"),
    ("relative_bias", lambda: call(score_mod=scores.relative_bias(draw(2, 5))),
     r"`table` of `relative_bias`.*Got 2 .* 4 heads\. Pass a table of 4 rows"),
    ("t5_bias", lambda: call(score_mod=scores.t5_bias(draw(8, 32), bidirectional=True)),
     r"`table` of `t5_bias`.*Got 8 .* 4 heads"),
    ("bias_queries", lambda: call(score_mod=scores.bias(draw(1, 1, 16, 32))),
     r"`values` of `bias` .*for each query\. Got 16 .*queries up to position 31\. Pass values \[B, H, 32, S\]"),
    ("document", lambda: call(mask_mod=DOCUMENT),
     r"`q_ids` of `document` must hold one id for each query\. Got 20 .*queries up to position 31\. Pass 32 ids"),
    ("document_keys", lambda: call(mask_mod=masks.document(ids_of(32), IDS)),
     r"`kv_ids` of `document` .*each key\. Got 20 .*keys up to position 31"),
    ("padding", lambda: call(mask_mod=PADDING),
     r"`kv_lengths` of `padding` .*each batch entry\. Got 3 .*batch 2\. Pass lengths \[2\]"),
    ("prefix_lm", lambda: call(mask_mod=masks.prefix_lm(int32([1, 2, 3]))),
     r"`prefix_length` of `prefix_lm` .*Got 3 .*batch 2"),
    ("neighborhood", lambda: call(mask_mod=masks.neighborhood((4, 4), (3, 3))),
     r"`canvas` of `neighborhood` .*each query\. Got 16 .*position 31\. Pass a canvas of 32 positions"),
    ("global_tokens", lambda: call(mask_mod=masks.global_tokens(jnp.ones(20, bool))),
     r"`is_global` of `global_tokens` .*each query\. Got 20 .*Pass flags \[32\]"),
    ("block_diffusion", lambda: call(mask_mod=masks.block_diffusion(8, 4)),
     r"`length` of `block_diffusion` must give 2 \* length positions, one for each query\. Got 16"),
    ("bottom_right_queries", lambda: call(mask_mod=masks.causal("bottom_right", q_length=16, kv_length=32)),
     r"`q_length` of `causal` must count all queries.*Got 16 .*Pass `q_length=32`, or an array"),
    ("tree_queries", lambda: call(S=7, mask_mod=masks.tree(4, CHAIN)),
     r"`ancestors` of `tree` must hold one row for each query\. Got 3"),
    ("tree_keys", lambda: call(T=3, S=32, mask_mod=masks.tree(4, CHAIN)),
     r"`prefix_length` and `ancestors` of `tree` .*Got 7 .*Pass `kv_lengths`"),
    ("with_offset", lambda: call(T=4, mask_mod=jflex.with_offset(masks.causal(), int32([1, 2, 3]))),
     r"`offset` of `with_offset` .*each batch entry\. Got 3 .*batch 2\. Pass offsets \[2\]"),
    # --- ways to the call
    ("explain", lambda: call(of=jflex.explain, score_mod=ALIBI), r"`slopes` of `alibi`"),
    ("known_kv_lengths", lambda: call(T=1, S=64, mask_mod=DOCUMENT, kv_lengths=int32([3, 21])),
     r"`q_ids` of `document`.*keys up to position 20"),
    ("and_masks", lambda: call(mask_mod=jflex.and_masks(masks.causal(), DOCUMENT)), r"`q_ids` of `document`"),
    ("offset", lambda: call(T=4, S=20, mask_mod=jflex.with_offset(jflex.and_masks(DOCUMENT), 17)),
     r"Got 20 .*queries up to position 20\. Pass 21"),
    ("offsets", lambda: call(T=4, S=20, mask_mod=jflex.with_offset(DOCUMENT, int32([0, 18]))),
     r"queries up to position 21"),
    ("create_mask", lambda: jflex.create_mask(DOCUMENT, None, None, 20, 21),
     r"each key\. Got 20 for a mask with keys up to position 20"),
    ("create_block_mask", lambda: block_mask(jflex.and_masks(DOCUMENT)),
     r"Got 20 for a BlockMask with queries up to position 31"),
    ("create_block_mask_none", lambda: block_mask(PADDING), r"`B` is None.*uses `b`"),
    (
        "from_kv_blocks",
        lambda: jflex.BlockMask.from_kv_blocks(
            np.ones((1, 1, 4), int), np.zeros((1, 1, 4, 1), int), block_size=8, mask_mod=DOCUMENT
        ),
        r"Got 20 for a BlockMask",
    ),
    ("with_lengths", lambda: block_mask(DOCUMENT, T=20, S=20).with_lengths(20, 24),
     r"each key\. Got 20 for a BlockMask with keys up to position 23"),
    ("paged_heads", lambda: paged(score_mod=ALIBI), r"`slopes` of `alibi`.*4 heads"),
    ("paged_positions", lambda: paged((21, 5), mask_mod=DOCUMENT), r"`q_ids` of `document`.*queries up to position 20"),
    ("convert_mask_mod", lambda: with_table(jflex.paged.convert_mask_mod, PADDING),
     r"Got 3 for a page table with batch 2"),
    ("converted_score", lambda: call(S=128, score_mod=with_table(jflex.paged.convert_score_mod, ALIBI)),
     r"`slopes` of `alibi`.*4 heads"),
    ("cascade_positions", lambda: cascade(mask_mod=DOCUMENT), r"queries up to position 40"),
    ("cascade_requests", lambda: cascade(mask_mod=masks.padding(int32([1, 2]))),
     r"Got 2 for a call with batch entries up to 2\. Pass lengths \[3\]"),
    ("varlen_sequences", lambda: varlen(mask_mod=PADDING), r"Got 3 for a call with batch 2"),
    ("varlen_block_mask", lambda: varlen(of_mask=True, mask_mod=DOCUMENT),
     r"Got 20 for packed sequences with queries up to position 21"),
    # --- layers
    ("layer_heads", lambda: layer(score_mod=ALIBI), r"`slopes` of `alibi`.*Got 8 for a layer with 4 heads"),
    ("layer_mod_of_call", lambda: layer()(jnp.zeros((2, 8, 32)), score_mod=ALIBI), r"`slopes` of `alibi`"),
    ("decode_block_mask", lambda: decode({"block_mask": block_mask(masks.document(ids_of(3, 20)), B=3, T=20, S=20)}),
     r"Got 3 for a call with batch 2"),
    ("decode_paged", lambda: decode_paged({"mask_mod": masks.document(ids_of(19))}), r"queries up to position 19"),
]  # fmt: skip

# Name, how to provoke it, type, what the message holds.
ARRAYS = [
    ("document", lambda: masks.document(jnp.zeros(8)), TypeError,
     r"`q_ids` of `document` must be integers\. Got float32\[8\]\. Cast"),
    ("document_batches", lambda: masks.document(ids_of(2, 8), ids_of(3, 8)), ValueError, r"alike for queries and keys"),
    ("global_tokens", lambda: masks.global_tokens(jnp.ones(8)), TypeError,
     r"`is_global` of `global_tokens` must be booleans\. Got float32\[8\]\. Compare"),
    ("padding", lambda: masks.padding(jnp.ones(2)), TypeError, r"`kv_lengths` of `padding` must be integers"),
    ("padding_axes", lambda: masks.padding(3), ValueError, r"`kv_lengths` of `padding` must be \[B\]\. Got shape \(\)"),
    ("prefix_lm", lambda: masks.prefix_lm(2.5), TypeError, r"`prefix_length` of `prefix_lm` must be integers"),
    ("tree", lambda: masks.tree(1, np.eye(3)), TypeError, r"`ancestors` of `tree` must be booleans"),
    ("alibi", lambda: scores.alibi(int32([1, 2])), TypeError,
     r"`slopes` of `alibi` must be floating-point\. Got int32\[2\]"),
    ("bias", lambda: scores.bias(jnp.ones((1, 1, 8, 8), bool)), TypeError,
     r"`values` of `bias` must be floating-point\. Got bool"),
    ("relative_bias", lambda: scores.relative_bias(ids_of(4, 5)), TypeError,
     r"`table` of `relative_bias` must be floating"),
    ("t5_bias", lambda: scores.t5_bias(ids_of(4, 32), bidirectional=True), TypeError,
     r"`table` of `t5_bias` must be floating"),
]  # fmt: skip

ROWS = [*((name, provoke, ValueError, message) for name, provoke, message in SIZES), *ARRAYS]

"""Wrong lists, sizes, indices and conversions of BlockMasks, of block-sparse rows and of selected blocks."""

import operator

import jax
import jax.numpy as jnp
import numpy as np

import jflex
from jflex import BlockMask, BlockSparseRows, create_block_mask, masks
from tests.cases.errors.calls import mask as causal

ONE, BOTH = np.ones((1, 1, 2), int), np.array([[[[0, 1], [1, 0]]]])
UNEVEN = create_block_mask(causal, 2, 2, 100, 70, block_size=32)  # 4 query blocks, the last of 4 queries
TREE = jflex.paged.PagedBatch(jnp.array([0, 1]), jnp.array([4]), jnp.array([[1]]), jnp.zeros((1, 1), jnp.int32))
listed = BlockMask.from_kv_blocks


def create(mod=causal, B=None, H=None, Q_LEN=64, KV_LEN=64, **options):
    return create_block_mask(mod, B, H, Q_LEN, KV_LEN, **options)


def joined(**sizes):
    """Of a mask with two batch entries and three heads, in blocks of 32, and another."""
    sizes = {"B": 2, "H": 3, "block_size": 32} | sizes
    return create(B=2, H=3, block_size=32), create(**sizes)


def rows_of(indptr=(0, 1, 2), indices=(0, 1), q_blocks=16, kv_blocks=16, **more):
    lists = np.array(indptr), np.array(indices)
    return BlockSparseRows.from_indptr(*lists, 32, 32, q_blocks=q_blocks, kv_blocks=kv_blocks, **more)


def indexed(*shape, dtype=jnp.int32, Q_LEN=64, **options):
    return jflex.block_mask_from_indices(jnp.zeros(shape, dtype), Q_LEN, 64, **({"block_size": 32} | options))


def select(*shape, k=2, dtype=jnp.float32, **options):
    return jflex.select_blocks(jnp.zeros(shape, dtype), k, **({"block_size": 32} | options))


def scored(query=(1, 64, 4, 8), key=(1, 64, 2, 8), **options):
    return jflex.block_scores(jnp.zeros(query), jnp.zeros(key), **options)


# Name, how to provoke it, type, what the message holds.
ROWS = [
    # --- create_block_mask
    ("score_mod", lambda: create(lambda s, b, h, q, kv: s), TypeError, r"pass it as `score_mod`"),
    ("float_mod", lambda: create(lambda b, h, q, kv: q.astype(jnp.float32)), TypeError, r"must return one boolean"),
    ("no_mod", lambda: create(3), TypeError, r"`mask_mod` must be a function"),
    ("negative", lambda: create(Q_LEN=-1), ValueError, r"`Q_LEN` must not be negative. Got -1"),
    ("float_length", lambda: create(KV_LEN=64.0), TypeError, r"`KV_LEN` must be a Python int"),
    ("three_sizes", lambda: create(block_size=(32,) * 3), TypeError, r"`block_size` must be an integer or a pair"),
    ("no_size", lambda: create(block_size=0), ValueError, r"`block_size` must be positive"),
    ("uses_b", lambda: create(lambda b, h, q, kv: q + b > kv, H=2), ValueError, r"`B` is None, .* uses `b`"),
    ("uses_h", lambda: create(lambda b, h, q, kv: q + h > kv, B=2), ValueError,
     r"`H` is None, .* number of query heads"),
    ("traced_sparsity", lambda: jax.jit(lambda mask: mask.sparsity())(UNEVEN), TypeError,
     r"needs the values of the lists"),
    # --- from_kv_blocks
    ("full_alone", lambda: listed(ONE, BOTH, ONE), ValueError,
     r"`full_kv_num_blocks` is passed without `full_kv_indices`"),
    ("index_axes", lambda: listed(ONE, BOTH[0]), ValueError, r"`kv_indices` must have 4 axes"),
    ("count", lambda: listed(ONE + 2, BOTH), ValueError,
     r"`kv_num_blocks` must lie between 0 and the last axis of `kv_indices`, 2. Got 3 to 3"),
    ("index_below", lambda: listed(ONE, BOTH - 1), ValueError,
     r"`kv_indices` must lie between 0 and 1, the last key block. Got -1"),
    ("index_twice", lambda: listed(ONE + 1, BOTH * 0), ValueError, r"lists key block 0 twice"),
    ("partial_and_full", lambda: listed(ONE, BOTH, ONE, BOTH), ValueError,
     r"partial or full, not both: key block 0"),
    ("fewer_queries", lambda: listed(ONE, BOTH, seq_lengths=(128, 256)), ValueError,
     r"makes 1 query blocks and 2 key blocks"),
    ("extended", lambda: listed(ONE, BOTH).with_lengths(256, 300), ValueError,
     r"cannot extend this mask from \(256, 256\) to \(256, 300\)"),
    # --- indices
    ("four_indices", lambda: UNEVEN[0, 0, 0, 0], IndexError, r"at most 3 indices"),
    ("batch", lambda: UNEVEN[2], IndexError, r"out of range for the batch of a BlockMask, of size 2"),
    *(
        (f"index_{name}", lambda index=index: UNEVEN[index], TypeError, r"an integer, a slice or an array")
        for name, index in {
            "float": (0, 0, 1.0), "dots": (0, 0, ...), "bool": True, "axes": np.array([[0]]),
            "bools": np.array([True, False]),
        }.items()
    ),
    ("short_block", lambda: UNEVEN[0, 0, [3, 0]], ValueError,
     r"query block 3 of a BlockMask holds 4 queries instead of 32"),
    ("reversed", lambda: UNEVEN[0, 0, ::-1], ValueError, r"only be selected last"),
    ("traced_row", lambda: jax.jit(lambda row: UNEVEN[:, :, row])(0), ValueError,
     r"only if Q_LEN is a multiple of the block size"),
    # --- algebra
    ("joined_lengths", lambda: operator.and_(*joined(KV_LEN=96)), ValueError, r"BlockMasks of equal lengths"),
    ("joined_batch", lambda: operator.and_(*joined(B=4)), ValueError,
     r"whose batch are equal or 1. Got 2 and 4"),
    ("joined_mod", lambda: UNEVEN & causal, TypeError, r"`&` joins BlockMasks\. Got a function\..*and_masks\(f, g\)"),
    ("joined_number", lambda: UNEVEN & 3, TypeError, r"unsupported operand"),
    *(
        (compose.__name__, lambda compose=compose, part=part: compose(part), TypeError, message)
        for compose in (jflex.and_masks, jflex.or_masks, jflex.not_mask)
        for part, message in (
            (3, f"`{compose.__name__}` takes functions .* is of type int"),
            (UNEVEN, r"Combine BlockMasks with `&`, `\|`, `~`"),
        )
    ),
    # --- block-sparse rows
    ("row_floats", lambda: rows_of(indices=(0.5, 1.0)), TypeError, r"`indices` must be integers\. Got float64"),
    ("row_axes", lambda: rows_of(indptr=[[0, 1, 2]]), ValueError, r"`indptr` must have one axis\. Got shape \(1, 3\)"),
    ("rows", lambda: rows_of(indptr=(0, 1)), ValueError,
     r"`q_blocks` make 2 query blocks, so `indptr`.*3 entries.*Got 2"),
    ("row_lengths", lambda: rows_of(kv_lengths=[3]), ValueError, r"`kv_lengths` 2\. Got 3 and 1"),
    ("row_descends", lambda: rows_of(indptr=(0, 2, 1)), ValueError,
     r"`indptr` must ascend from 0 and end within 2.*\[0, 2, 1\]"),
    ("q_blocks", lambda: rows_of(q_blocks=[0, 40]), ValueError, r"`q_blocks` must ascend from 0 and end within 32"),
    ("row_size", lambda: rows_of(kv_blocks=0), ValueError, r"`kv_blocks` must be at least 1"),
    ("row_number", lambda: rows_of(indices=(0, 2)), ValueError,
     r"`indices`.*between 0 and 1.*Got 2 for query block 1"),
    ("row_twice", lambda: rows_of(indptr=(0, 2, 2), indices=(1, 1)), ValueError,
     r"list a key block twice for query block 0: \[1, 1\]"),
    ("row_heads", lambda: BlockSparseRows.from_block_mask(create(lambda b, h, q, k: q + h >= k, H=2)), ValueError,
     r"one batch entry and one head\. Got 1 and 2\. Select"),
    ("row_tree", lambda: BlockSparseRows.from_paged_batch(TREE, 1, num_pages=2, page_size=4), ValueError,
     r"`batch.ancestors` must be None"),
    ("row_uneven", lambda: rows_of(kv_blocks=[0, 8, 32]).to_paged_batch(), ValueError,
     r"pages of one size.*different sizes.*`to_block_mask\(\)`"),
    ("row_narrow", lambda: rows_of((0, 2, 2), (1, 0)).to_paged_batch(max_pages=1), ValueError,
     r"`max_pages` must be at least 2.*Got 1"),
    # --- selected blocks
    ("selected_floats", lambda: indexed(1, 1, 2, 1, dtype=jnp.float32), TypeError,
     r"`indices` must be integers.*Got float32"),
    ("selected_axes", lambda: indexed(1, 2, 1), ValueError,
     r"`indices` must have 4 axes, \[B, heads, query blocks, k\]\. Got.*\(1, 2, 1\)"),
    ("selected_rows", lambda: indexed(1, 1, 3, 1), ValueError,
     r"`indices`.*each query block, 2 for `Q_LEN` 64 in blocks of 32.*Got 3.*`block_size`"),
    ("selected_heads", lambda: indexed(1, 2, 2, 1, H=3), ValueError,
     r"`H` must be a multiple of the heads of `indices`, 2,.*Got 3"),
    ("selected_mod", lambda: indexed(1, 1, 2, 1, mask_mod=3), TypeError, r"mask_mod"),
    ("selected_ready", lambda: indexed(1, 1, 2, 1, mask_mod=masks.document(jnp.zeros((8,), jnp.int32))), ValueError,
     r"document.*BlockMask"),
    ("score_integers", lambda: select(2, 2, dtype=jnp.int32), TypeError,
     r"`scores` must be floating-point\. Got int32"),
    ("room", lambda: select(4, 4, local_blocks=2, initial_blocks=1), ValueError,
     r"`k` must be at least.*3 for query block 2:.*`local_blocks`.*Got 2"),
    ("visible", lambda: select(2, 2, visible=jnp.ones((3, 2), bool)), ValueError,
     r"`visible` must be booleans.*\(2, 2\)\. Got bool of shape \(3, 2\)"),
    ("queries", lambda: scored(queries="last"), ValueError, r"`queries` must be \"first\" or \"mean\"\. Got 'last'"),
    ("groups", lambda: scored(key=(1, 64, 3, 8)), ValueError,
     r"Hkv must divide Hq\. Got shapes \(1, 64, 4, 8\) and \(1, 64, 3, 8\)"),
    ("head_sizes", lambda: scored(key=(1, 64, 2, 4)), ValueError, r"`query`.*and `key`.*must have the same D"),
]  # fmt: skip

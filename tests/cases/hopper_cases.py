"""The table of cases as the Hopper kernels take it: 16-bit inputs, and masks in blocks of at least 64."""

import dataclasses

import numpy as np

from tests.cases import captured_pairs as captured
from tests.cases import mask_pairs as masks
from tests.cases import score_pairs as scores
from tests.cases.table import CASES, LENGTHS, Case, Sizes

BF16 = {"dtype": "bfloat16"}
REFUSED = {
    "remainder": r"primitive `rem` has a lowering for Mosaic GPU for integers alone",
    "sorting": r"score_mod.*sort.*implementation='xla'",
    "table_of_wrapped": r"computes in int8, for which Mosaic GPU has no arithmetic",
    "head_size_300": r"head sizes up to 256, not 300",
}


def _on_hopper(case: Case) -> Case:
    block = case.block
    if block is not None:
        block = tuple(max(64, -(-size // 64) * 64) for size in (block if isinstance(block, tuple) else (block,) * 2))
    reason = REFUSED.get(case.name)
    return dataclasses.replace(
        case,
        block=block,
        dtype="bfloat16" if case.dtype == "float32" else case.dtype,
        precision=None,
        unsupported={} if reason is None else {"mosaic_gpu": reason},
    )


# Two warp groups that compute; the others of the default and the full tier have one.
TWO_GROUPS = Case("two_groups_small", scores.alibi, masks.causal, Sizes(B=1, T=256, D=64), block=128, **BF16)
# Two warp groups of 64 queries need blocks of 128; most of the table's are smaller.
WIDE = [
    Case("two_groups_causal", mask=masks.causal, sizes=Sizes(T=300, Hq=4, Hkv=2, D=64), block=128, **BF16),
    Case("two_groups_more_keys", scores.alibi, masks.causal, Sizes(T=200, S=520, D=128), block=128, **BF16),
    Case("two_groups_192_128", scores.alibi, masks.causal, Sizes(T=200, S=300, D=192, Dv=128), block=128, **BF16),
    Case("wide_keys_documents", mask=masks.documents, sizes=Sizes(T=384, Hq=4, Hkv=2, D=192, Dv=128), block=128,
     by_batch=True, dtype="float16"),
    Case("wide_values_softcap", scores.softcap, sizes=Sizes(T=257, S=450, Hq=4, Hkv=1, D=128, Dv=192), **BF16),
    Case("two_groups_many_tiles", mask=masks.window, sizes=Sizes(B=1, T=1030, D=64), block=128, dtype="float16"),
    Case("two_groups_table", captured.table, masks.causal, Sizes(B=1, T=390, D=64), block=128, **BF16),
    Case("two_groups_empty_rows", mask=masks.first_half_only, sizes=Sizes(T=400, D=64), block=128, **BF16),
    Case("two_groups_documents", mask=masks.documents, sizes=Sizes(T=384, D=128), block=128, by_batch=True, **BF16),
    Case("narrow_runs_wide", mask=masks.causal, sizes=Sizes(B=1, T=512, D=64), block=128, max_blocks=1, **BF16),
    Case("narrow_cut_wide", mask=masks.scattered(128), sizes=Sizes(B=1, T=640, D=64), block=128, max_blocks=1, **BF16),
    Case("shortest", scores.alibi, masks.causal, Sizes(T=120, S=128, Hq=4, Hkv=2, D=64), **BF16),
    Case("shortest_hidden_key", mask=masks.hidden_key, sizes=Sizes(T=128, D=64), **BF16),
    # Weights without a maximum, of up to exp(50), which float16 does not hold.
    Case("softcap_far", scores.softcap_far, masks.causal, Sizes(T=260, D=64), block=128, scale=10.0, **BF16),
    Case("softcap_far_float16", scores.softcap_far, masks.causal, Sizes(T=260, D=64), block=128, scale=10.0,
     dtype="float16"),
    Case("two_groups_sinks", scores.alibi, masks.first_half_only, Sizes(T=400, Hq=4, D=64), block=128, sinks=True,
     **BF16),
    Case("sinks_bounded", scores.softcap, masks.first_half_only, Sizes(T=260, Hq=4, D=64), block=128, sinks=True,
     **BF16),
    Case("softcap_of_much", scores.softcap_of_much, masks.causal, Sizes(T=260, D=64), block=128, **BF16),
    # Tiles end where the sequences do: elements are loaded from one address on.
    Case("even_table", captured.table, masks.causal, Sizes(T=256, Hq=4, Hkv=2, D=64), block=128, **BF16),
    Case("even_padding", captured.bias_of_padding, masks.causal, Sizes(T=256, D=64), block=128, **BF16),
    Case("even_bias", captured.bias_bhqk, masks.causal, Sizes(T=256, S=384, D=128), block=128, layout="BNTH", **BF16),
    # Ranges of keys and of queries follow from the mask; no tile shows the last keys, whose bias has gradients of 0.
    Case("range_of_window", mask=masks.window, sizes=Sizes(T=300, S=420, Hq=4, Hkv=2, D=64), **BF16),
    Case("range_by_head", mask=masks.both_sides_by_head, sizes=Sizes(B=1, T=140, S=200, Hq=4, Hkv=2, D=64), **BF16),
    Case("range_and_plane", captured.fixed_bias, masks.causal, Sizes(B=1, T=136, S=448, Hq=4, Hkv=2, D=128), **BF16),
    # Elements that the copy engine brings, of 16 bits also for gradients.
    Case("plane", captured.fixed_bias, masks.causal, Sizes(T=304, S=448, Hq=4, Hkv=2, D=128), block=128, **BF16),
    Case("plane_no_mask", captured.fixed_bias, sizes=Sizes(B=1, T=264, S=576, D=64), dtype="float16"),
    Case("planes_two", captured.fixed_biases, masks.window, Sizes(T=384, D=64), block=128, **BF16),
    Case("planes_one_group", captured.fixed_biases, masks.causal, Sizes(T=192, S=320, D=80), block=64, **BF16),
    Case("plane_wide", captured.fixed_bias, masks.causal, Sizes(T=264, S=320, Hq=4, Hkv=2, D=192), block=128, **BF16),
    Case("plane_gradient", captured.bias_bf16, masks.causal, Sizes(T=256, D=64), block=128, **BF16),
    # Gradients of a pair bias that are stored, and of one that batch or heads share.
    Case("stored_odd", captured.bias_bhqk, masks.causal, Sizes(T=200, S=300, Hq=4, Hkv=2, D=64), block=128, **BF16),
    Case("stored_no_mask", captured.bias_bf16, sizes=Sizes(T=136, S=200, Hq=4, Hkv=2, D=96), dtype="float16"),
    Case("shared_heads", captured.bias_hqk, sizes=Sizes(B=4, T=200, S=300, Hq=4, Hkv=2, D=32), **BF16),
    Case("shared_more_heads", captured.bias_of_more_heads, sizes=Sizes(B=4, T=64, S=64, Hq=2, D=64), **BF16),
    Case("shared_causal", captured.bias_of_heads_bf16, masks.causal, Sizes(B=5, T=256, D=64), block=128,
     dtype="float16"),
    Case("shared_by_all", captured.bias_qk, masks.window, Sizes(B=3, T=260, Hq=4, Hkv=2, D=64), block=128,
     by_batch=True, **BF16),
    Case("shared_batch", captured.bias_bqk, masks.window, Sizes(T=192, S=320, Hq=4, Hkv=2, D=128), block=64, **BF16),
    Case("shared_dropout", captured.bias_hqk, masks.causal, Sizes(B=4, T=256, D=64), block=128, dropout_rate=0.1,
     **BF16),
    Case("even_booleans", mask=masks.random_elements, sizes=Sizes(T=256, D=64), block=128, by_head=True, **BF16),
    Case("two_groups_scalar", captured.scale_0d, masks.causal, Sizes(T=256, D=64), block=128, **BF16),
    Case("two_groups_sigmoid", scores.sigmoid, masks.causal, Sizes(T=260, D=64), block=128, normalize="none", **BF16),
    Case("two_groups_as_weights", mask=masks.first_half_only, sizes=Sizes(B=1, T=400, D=128), block=128,
     normalize="none", **BF16),
    Case("two_groups_dropout", mask=masks.causal, sizes=Sizes(T=260, D=64), block=128, dropout_rate=0.1, **BF16),
    Case("two_groups_dropout_shared", scores.alibi, masks.causal, Sizes(T=260, D=64), block=128, dropout_rate=0.1,
     shared_dropout=True, **BF16),
    Case("two_groups_dropout_wide", scores.alibi, masks.causal, Sizes(B=1, T=260, Hq=4, Hkv=2, D=128), block=128,
     dropout_rate=0.2, sinks=True, **BF16),
    Case("shared_keys_256", captured.bias_kv, masks.documents, Sizes(T=200, S=330, Hq=4, Hkv=2, D=256, Dv=176),
     block=128, by_batch=True, dropout_rate=0.1, **BF16),
    Case("two_groups_no_mask", scores.softcap, sizes=Sizes(T=257, S=450, Hq=4, Hkv=1, D=96), **BF16),
    Case("two_groups_own_lists", mask=masks.random_elements, sizes=Sizes(T=384, Hq=2, D=64), block=128,
     states=np.random.default_rng(2).integers(0, 3, (2, 2, 3, 3)), **BF16),
]  # fmt: skip
# More than twice as many tiles as an H200 has multiprocessors: a block of threads computes several in turn.
MANY = [
    Case("many_causal", scores.alibi, masks.causal, Sizes(B=3, T=530, Hq=24, Hkv=6, D=64), block=128, **BF16),
    Case("many_mask_mod", mask=masks.causal, sizes=Sizes(B=4, T=1000, Hq=10, Hkv=5, D=64), **BF16),
    Case("many_no_mask", scores.softcap, sizes=Sizes(B=8, T=270, S=200, Hq=15, Hkv=5, D=128), **BF16),
    Case("many_documents", mask=masks.documents, sizes=Sizes(B=8, T=300, Hq=15, D=64), block=128, by_batch=True,
     **BF16),
    Case("many_empty_rows", mask=masks.first_half_only, sizes=Sizes(B=10, T=260, Hq=12, D=64, Dv=128), block=128,
     **BF16),
    Case("many_planes", captured.fixed_bias, masks.causal, Sizes(B=6, T=256, Hq=24, D=64), block=128, **BF16),
    Case("many_one_group", captured.table, masks.causal, Sizes(B=6, T=260, Hq=11, D=64), block=64, **BF16),
    Case("many_wide", mask=masks.window, sizes=Sizes(B=7, T=260, Hq=17, D=192), block=128, layout="BNTH", **BF16),
]  # fmt: skip
# Documents give rows limits; a warp group passes over tiles that they hide. Heads of a group share a walk, unless a mod
# depends on the head or has cotangents by key.
LIMITED = [
    Case("limits", mask=masks.documents, sizes=Sizes(T=256, Hq=4, Hkv=2, D=128), block=128, by_batch=True, **BF16),
    Case("limits_end", scores.alibi, masks.documents, Sizes(B=1, T=330, D=64), block=128, by_batch=True, **BF16),
    Case("limits_and_head", scores.alibi, masks.documents, Sizes(B=1, T=140, Hq=2, Hkv=1, D=64), block=128,
     by_batch=True, **BF16),
    Case("limits_and_key", captured.bias_kv, masks.documents, Sizes(B=1, T=140, Hq=2, Hkv=1, D=64), block=128,
     by_batch=True, **BF16),
    Case("limits_of_more_keys", mask=masks.documents, sizes=Sizes(B=1, T=130, S=300, D=64), block=128, by_batch=True,
     **BF16),
    Case("limits_shared_keys", captured.bias_kv, masks.documents, Sizes(B=1, T=140, Hq=2, Hkv=1, D=192), block=128,
     by_batch=True, **BF16),
    Case("limits_one_group", mask=masks.documents, sizes=Sizes(B=1, T=200, D=80), block=64, by_batch=True, **BF16),
    Case("limits_unknown", mask=masks.unsorted_documents, sizes=Sizes(B=1, T=256, D=128), block=128, by_batch=True,
     **BF16),
]  # fmt: skip
HOPPER = [_on_hopper(case) for case in (*CASES, *LENGTHS) if case.states is None] + WIDE + MANY
# Computed by three and by four warp groups too.
_PLAIN = ["alibi_like", "causal_mask_mod", "prefix_mask_mod", "bnth_shared_keys", "sinks_alone", "range_of_window",
          "range_by_head", "plane_no_mask", "many_mask_mod", "shortest_hidden_key"]  # fmt: skip
MORE_GROUPS = [case for case in HOPPER if case.name in _PLAIN]
# Computed in one pass too, which short sequences take two for.
_OF_TABLE = [
    "identity",
    "relative_causal",
    "times_two_through_full_blocks",
    "softcap",
    "own_derivative",
    "negative_scale",
    "bias_bqk",
    "table",
    "table_of_distance",
    "outside_index",
    "only_bias",
    "window",
    "documents",
    "rows_that_see_nothing",
    "window_by_head",
    "padding",
    "wide_blocks",
    "decode_mask_mod",
    "one_query_one_key",
    "head_size_1",
    "head_sizes_16_40",
    "head_size_80",
    "head_size_96",
    "head_size_128",
    "grouped_causal",
    "long",
    "length_mask_mod",
    "length_sees_nothing",
]
_TWO_KERNELS = {"softcap_of_much", "even_bias", "plane_gradient", "planes_two", "two_groups_scalar", "many_empty_rows",
                "two_groups_dropout", "two_groups_dropout_shared", "stored_odd", "stored_no_mask", "shared_heads",
                "shared_causal", "shared_by_all", "shared_batch", "shared_dropout", "shared_more_heads"}  # fmt: skip
ONE_PASS = [case for case in HOPPER if case.name in _OF_TABLE]
ONE_PASS += [case for case in (*WIDE, *MANY) if case.name not in _TWO_KERNELS and case.sizes.D + case.sizes.Dv <= 320]

"""The table of cases: mods x shapes x dtypes. Every backend computes each of them, or says why it cannot."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pytest

import jflex
from tests.cases import captured_pairs as captured
from tests.cases import mask_pairs as masks
from tests.cases import ready_masks
from tests.cases import ready_score_pairs as ready
from tests.cases import score_pairs as scores
from tests.cases.mask_pairs import MaskPair
from tests.cases.score_pairs import ScorePair
from tests.support.rows import stays


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The letters of the documentation; 0 for those that follow: S as T, Hkv as Hq, Dv as D, Bkv as B."""

    B: int = 2
    T: int = 100
    S: int = 0
    Hq: int = 2
    Hkv: int = 0
    D: int = 32
    Dv: int = 0
    Bkv: int = 0

    def __post_init__(self) -> None:
        for own, other in (("S", "T"), ("Hkv", "Hq"), ("Dv", "D"), ("Bkv", "B")):
            object.__setattr__(self, own, getattr(self, own) or getattr(self, other))


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """One call of `flex_attention`.

    Attributes:
      name: Its name in the reports of pytest.
      score: The score mod, in JAX and in numpy.
      mask: The mask mod, likewise.
      sizes: Of the arrays.
      block: Block size of a BlockMask; None to pass the mask as `mask_mod`.
      max_blocks: Width of its tables. They are made inside of `jit`, so that rows that need more entries are cut.
      by_batch: Whether the BlockMask has lists for each batch entry.
      by_head: Whether it has lists for each query head.
      states: Blocks for `BlockMask.from_kv_blocks`, [B or 1, Hq or 1, R, C]: 0 empty, 1 partial, 2 full.
      dtype: Of query, key and value.
      qk_dtype: Of query and key where these have eight bits: a case without gradients; "" for `dtype`.
      layout: As in the call.
      scale: As in the call.
      precision: Of float32 products, as in `jax.default_matmul_precision`.
      kv_lengths: As in the call; what lies beyond is NaN for the backends.
      sinks: Whether each head has a sink; its gradient is named like that of a captured array, ``sinks``.
      normalize: As in the call; without a softmax, the lse is 0 here.
      dropout_rate: As in the call; the key is that of `tests.support.dropout_bits`.
      shared_dropout: Whether batch entries and heads drop the same weights.
      tiles: Of all kernels; None for those of the plan.
      positive: Draws queries and keys above 0, so that no score is near 0.
      unsupported: Backends that must refuse the case, with what their reason must match.
      tier: When tests of the case run, unless they say otherwise: ``default`` or ``full``.
    """

    name: str
    score: ScorePair | None = None
    mask: MaskPair | None = None
    sizes: Sizes = Sizes()
    block: int | tuple[int, int] | None = None
    max_blocks: int | None = None
    by_batch: bool = False
    by_head: bool = False
    states: Any = None
    dtype: str = "float32"
    qk_dtype: str = ""
    layout: str = "BTNH"
    scale: float | None = None
    precision: str | None = None
    kv_lengths: tuple[int, ...] | None = None
    sinks: bool = False
    normalize: str = "softmax"
    dropout_rate: float = 0.0
    shared_dropout: bool = False
    tiles: jflex.Tiles | None = None
    positive: bool = False
    unsupported: Mapping[str, str] = dataclasses.field(default_factory=dict)
    tier: str = "full"

    def __str__(self) -> str:
        return self.name

    @property
    def places(self) -> tuple[np.ndarray, ...]:
        """Open grids of b, h, q_idx and kv_idx."""
        n = self.sizes
        return tuple(np.ogrid[: n.B, : n.Hq, : n.T, : n.S])

    @property
    def within(self) -> Any:
        """Which scores there are at all, by open grids: those of packed sequences are of one sequence."""
        return True

    @property
    def capture_sizes(self) -> Any:
        """The sizes that captured arrays are drawn by."""
        return self.sizes


def distinct(cases: Iterable[Case]) -> list[Case]:
    """One case of each score mod and of each mask mod."""
    seen: set[Any] = set()
    return [x for x in cases if not {x.score, x.mask} <= seen and not seen.update((x.score, x.mask))]


def in_tiers(cases: Iterable[Case], share: int = 1) -> list[Any]:
    """Parameters of a test: cases with the mark of their tier. Of ``full``, one in `share` stays; others are long."""
    rows = []
    for number, case in enumerate(cases):
        rest = pytest.mark.full if stays(number, share) else pytest.mark.long
        rows.append(pytest.param(case, id=case.name, marks=[rest] if case.tier == "full" else []))
    return rows


N = Sizes
BF16, F16 = {"dtype": "bfloat16"}, {"dtype": "float16"}

# The eight mods of FlexAttention's own tests, in three dtypes between them and through three kinds of mask.
STANDARD = [
    Case("identity", scores.identity),
    Case("times_two", scores.times_two, sizes=N(T=129), **BF16),
    Case("squared", scores.squared, sizes=N(T=129), **F16),
    Case("causal_score", scores.causal, sizes=N(T=129)),
    Case("inverse_causal_score", scores.inverse_causal, **BF16),
    Case("relative", scores.relative, sizes=N(T=70, S=100)),
    Case("relative_causal", scores.relative_causal, sizes=N(T=129), **BF16),
    Case("alibi_like", scores.alibi, sizes=N(Hq=4, Hkv=2), **F16),
    Case("identity_highest", scores.identity, precision="highest"),
    Case("causal_highest", scores.causal, sizes=N(T=129), precision="highest"),
    Case("squared_through_causal_blocks", scores.squared, masks.causal, N(T=256), block=128, **BF16),
    Case("alibi_through_causal_blocks", scores.alibi, masks.causal, N(T=255), block=64, precision="highest"),
    Case("times_two_through_full_blocks", scores.times_two, masks.everything, N(T=256), block=64, **F16),
]

ELEMENTWISE = [
    Case("silu", scores.silu, **BF16),
    Case("floor_division", scores.floor_division, **BF16),
    Case("remainder", scores.remainder, **F16),
    Case("odd_keys_score", scores.odd_keys),
    Case("bits", scores.bits, **BF16),
    Case("softcap", scores.softcap, masks.causal, N(T=129), block=64, **BF16, tier="default"),
    Case("softcap_float32", scores.softcap, precision="highest"),
    Case("relu", scores.relu, **BF16),
    Case("softplus", scores.softplus, **F16),
    Case("gelu_exact", scores.gelu, **BF16),
    Case("clip", scores.clip, **BF16),
    Case("trigonometry", scores.trigonometry, sizes=N(T=11, D=4)),
    Case("cond", scores.cond, **BF16),
    Case("switch", scores.switch, sizes=N(Hq=3), **BF16),
    Case("own_derivative", scores.own_derivative, **BF16),
    Case("extreme_logits", scores.identity, masks.causal, block=64, scale=1e3, precision="highest"),
    Case("extreme_logits_softcap", scores.softcap, scale=1e2, **BF16),
    Case("negative_scale", scores.identity, scale=-0.5, **BF16),
    Case("reciprocal_with_padding", scores.reciprocal, masks.padding, N(T=65), block=32, by_batch=True, positive=True,
     **BF16),
    Case("log_where_seen", scores.log_distance, masks.strictly_causal, block=32, **BF16),
    Case("log_where_seen_mask_mod", scores.log_distance, masks.strictly_causal, N(T=37), **BF16),
]  # fmt: skip

CAPTURED = [
    Case("bias_q", captured.bias_q, **BF16),
    Case("bias_kv", captured.bias_kv, sizes=N(T=37, S=100)),
    Case("bias_h", captured.bias_h, sizes=N(Hq=4, Hkv=1), **BF16),
    Case("bias_bq", captured.bias_bq, masks.causal, block=32, **BF16),
    Case("bias_qk", captured.bias_qk, masks.window, block=32, **BF16),
    Case("bias_bqk", captured.bias_bqk, sizes=N(T=70), **F16),
    Case("bias_hqk", captured.bias_hqk, sizes=N(Hq=4, Hkv=2), **BF16),
    Case("bias_bhqk", captured.bias_bhqk, sizes=N(T=37, S=67)),
    Case("bias_bhqk_causal", captured.bias_bhqk, masks.causal, N(T=129), block=64, **BF16),
    Case("bias_bhwq", captured.bias_bhwq, **BF16),
    Case("bias_of_padding", captured.bias_of_padding, sizes=N(S=96), **BF16),
    Case("bias_0d", captured.bias_0d, **BF16),
    Case("bias_bf16", captured.bias_bf16, **BF16),
    Case("bias_of_product", captured.bias_of_product, sizes=N(T=67)),
    Case("bias_q_and_kv", captured.bias_q_and_kv, **BF16),
    Case("table", captured.table, masks.causal, N(T=129), block=64, **BF16),
    Case("table_float32", captured.table, sizes=N(T=37, S=70)),
    Case("table_more_keys", captured.table, masks.both_sides, N(T=70, S=200), block=(32, 64), **BF16),
    Case("table_by_document", captured.table, masks.documents, N(T=200), block=64, by_batch=True, **BF16),
    Case("bias_hqk_by_head", captured.bias_hqk, masks.window_by_head, N(T=130, Hq=4, Hkv=2), block=64, by_head=True,
     **BF16),
    Case("bias_bqk_through_full_blocks", captured.bias_bqk, masks.causal, N(T=129, Hq=4, Hkv=1), block=32, **F16),
    Case("table_of_distance", captured.table_of_distance, **BF16),
    Case("table_of_wrapped", captured.table_of_wrapped, sizes=N(T=150, S=40)),
    Case("table_by_score", captured.table_by_score, positive=True),
    Case("at_score", captured.at_score, masks.strictly_causal, N(T=37), block=32),
    Case("take", captured.take, **F16),
    Case("negative_index", captured.negative_index, **BF16),
    Case("outside_index", captured.outside_index, sizes=N(T=67), **BF16),
    Case("filled", captured.filled, **BF16),
    Case("permuted", captured.permuted, sizes=N(T=70), **BF16),
    Case("only_bias", captured.only_bias, **BF16),
    Case("rounded", captured.rounded, **BF16),
    Case("slopes", captured.slopes, masks.causal, N(T=129, Hq=4, Hkv=2), block=64, **BF16, tier="default"),
    Case("scale_0d", captured.scale_0d, **BF16),
    Case("scale_int", captured.scale_int, **BF16),
    Case("scale_one", captured.scale_one, masks.window, block=32),
    Case("times_bias_q", captured.times_bias_q, **BF16),
    Case("gate", captured.gate, sizes=N(Hq=4, Hkv=2), precision="highest"),
    Case("outside_work", captured.outside_work, **BF16),
    Case("pytree", captured.pytree, masks.documents, block=32, by_batch=True, **BF16),
    Case("distance", captured.distance, sizes=N(T=67), **BF16),
    Case("polynomial", captured.polynomial, **BF16),
    Case("scan", captured.scan, **BF16),
    Case("sorting", captured.sorting, unsupported={"triton": r"score_mod.*sort.*implementation='xla'"}, tier="default"),
]  # fmt: skip

READY = [
    Case("sandwich", ready.sandwich, masks.causal, N(T=129, Hq=4, Hkv=2), block=64, **BF16),
    Case("relu_activation", ready.relu_activation, **BF16),
    Case("gelu_activation", ready.gelu_activation, masks.causal, block=32, **F16),
    Case("spatial_bias", ready.spatial_bias, sizes=N(T=37, S=50, Hq=4, Hkv=2), **BF16),
    Case("spatial_bias_of_one_graph", ready.spatial_bias_of_one_graph, sizes=N(T=37)),
    Case("edge_bias", ready.edge_bias, sizes=N(T=37, S=50), **BF16),
    Case("morton_neighborhood", mask=ready_masks.morton_neighborhood, sizes=N(T=128), block=32, **BF16),
    Case("sliding_tile", mask=ready_masks.sliding_tile, sizes=N(T=105, Hq=4, Hkv=2), block=16, **BF16),
    Case("shared_prefix", mask=ready_masks.shared_prefix, block=32, by_batch=True, **BF16),
    Case("temporal_head", mask=ready_masks.temporal_head, sizes=N(T=130), **F16),
]

MASKED = [
    Case("causal", mask=masks.causal, sizes=N(T=257), block=128, **BF16, tier="default"),
    Case("causal_mask_mod", mask=masks.causal, sizes=N(T=129), **BF16),
    Case("causal_more_keys", mask=masks.causal, sizes=N(T=67, S=130), block=(32, 64)),
    Case("causal_more_queries", mask=masks.causal, sizes=N(T=130, S=67), block=(64, 32), **BF16),
    Case("tiles_end_before_their_block", scores.times_two, masks.everything, N(T=192), block=128, **BF16),
    Case("tiles_end_before_their_block_of_keys", scores.times_two, masks.both_sides, N(T=70, S=64), block=128, **BF16),
    Case("tiles_end_before_their_block_of_queries", mask=masks.window, sizes=N(T=64, S=100), block=128, **F16),
    Case("window", mask=masks.window, sizes=N(T=257), block=64, **F16),
    Case("both_sides", mask=masks.both_sides, sizes=N(T=200), block=32),
    Case("prefix", mask=masks.prefix, sizes=N(T=129), block=32, **BF16),
    Case("prefix_mask_mod", mask=masks.prefix, sizes=N(T=130, S=200), **BF16),
    Case("documents", mask=masks.documents, sizes=N(T=256), block=64, by_batch=True, **BF16),
    Case("padded_document_row", mask=masks.one_document_row, sizes=N(T=9), block=128),
    Case("neighborhood", mask=masks.neighborhood, sizes=N(T=128), block=32, **BF16),
    Case("rows_that_see_nothing", mask=masks.first_half_only, sizes=N(T=129), block=64, **BF16),
    Case("rows_that_see_nothing_mask_mod", mask=masks.first_half_only, sizes=N(T=100)),
    Case("odd_keys", mask=masks.odd_keys, block=64, **BF16),
    Case("window_by_head_mask_mod", mask=masks.window_by_head, sizes=N(T=200, Hq=4), **BF16),
    Case("window_by_head", mask=masks.window_by_head, sizes=N(T=200, Hq=4), block=32, by_head=True, **BF16),
    Case("window_by_head_grouped", captured.bias_kv, masks.window_by_head, N(T=200, Hq=4, Hkv=2), block=32,
     by_head=True),
    Case("offset_by_batch", mask=masks.offset_by_batch, sizes=N(T=130), block=32, by_batch=True, **BF16),
    Case("padding", mask=masks.padding, sizes=N(T=130), block=64, by_batch=True, by_head=True, **BF16),
    Case("random_elements", mask=masks.random_elements, sizes=N(T=96, Hq=4, Hkv=2), block=32, by_head=True, **BF16),
    Case("table_of_booleans", mask=masks.table, sizes=N(T=70), block=32, **BF16),
    Case("wide_blocks", mask=masks.causal, sizes=N(B=1, T=257), block=(64, 128), **BF16),
    Case("high_blocks", mask=masks.causal, sizes=N(B=1, T=257), block=(128, 32), **BF16),
    Case("narrow_runs", captured.bias_kv, masks.causal, N(T=256), block=32, max_blocks=1, **BF16),
    Case("narrow_documents", scores.alibi, masks.documents, N(T=200), block=32, by_batch=True, max_blocks=2),
    Case("narrow_cut", captured.table, masks.scattered(32), N(T=250, S=200, Hq=4, Hkv=2), block=32, max_blocks=2),
    Case("narrow_cut_to_one", mask=masks.scattered(32), sizes=N(T=130, S=260), block=32, max_blocks=1, **BF16),
    Case("narrow_decode", mask=masks.scattered(64), sizes=N(T=3, S=600, Hq=4, Hkv=2), block=64, max_blocks=2, **BF16),
    Case("blocks_of_one_call", mask=masks.causal, sizes=N(T=33), block=256, **BF16),
    Case("own_lists", sizes=N(T=130, S=96), block=32, states=np.random.default_rng(0).integers(0, 2, (1, 1, 5, 3)),
     **BF16),
    Case("own_lists_mixed", mask=masks.random_elements, sizes=N(T=128, Hq=4, Hkv=2), block=32,
     states=np.random.default_rng(1).integers(0, 3, (2, 4, 4, 4)), **BF16),
    Case("blocks_of_24", mask=masks.causal, block=24,
     unsupported={"triton": r"mask's block size allows 8.*multiple of 16"}),
]  # fmt: skip

SHAPES = [
    Case("decode", scores.softcap, sizes=N(T=1, S=500, Hq=8, Hkv=2), **BF16, tier="default"),
    Case("decode_blocks", scores.alibi, masks.offset_by_batch, N(T=3, S=300, Hq=4, Hkv=2), block=64, by_batch=True,
     **F16),
    Case("decode_mask_mod", captured.bias_hqk, masks.window_by_head, N(T=2, S=130, Hq=4, Hkv=2), **BF16),
    Case("decode_lists_by_head", captured.slopes, masks.random_elements, N(T=5, S=200, Hq=3, Hkv=3), block=32,
     by_head=True),
    Case("decode_lists_by_grouped_head", mask=masks.random_elements, sizes=N(T=5, S=200, Hq=4, Hkv=2), block=32,
     by_head=True, **BF16),
    Case("decode_sees_nothing", captured.table, masks.strictly_causal, N(T=4, S=257, Hkv=1, D=40, Dv=80), block=64,
     **F16),
    Case("decode_by_head_major", mask=masks.both_sides, sizes=N(T=4, S=99, Hq=2, Hkv=1), block=64, layout="BNTH"),
    Case("decode_sixteen_queries", captured.bias_q, masks.odd_keys, N(T=16, S=150, Hq=4, Hkv=1), block=(16, 64),
     **BF16),
    Case("one_query_one_key", sizes=N(B=1, T=1, Hq=1, D=16)),
    Case("one_query", captured.bias_kv, masks.everything, N(T=1, S=257, Hq=4, Hkv=2), **BF16),
    Case("one_key", scores.times_two, sizes=N(T=37, S=1), **BF16),
    Case("head_size_1", sizes=N(D=1)),
    Case("head_size_8", sizes=N(T=64, D=8), **BF16),
    Case("head_sizes_40_16", sizes=N(D=40, Dv=16), **BF16),
    Case("head_sizes_16_40", scores.alibi, masks.causal, N(D=16, Dv=40), block=32),
    Case("head_size_80", mask=masks.causal, sizes=N(B=1, D=80), block=64, **F16),
    Case("head_size_96", sizes=N(B=1, D=96), **BF16),
    Case("head_size_128", scores.softcap, masks.causal, N(B=1, T=257, D=128), block=128, **BF16),
    Case("head_sizes_192_128", mask=masks.causal, sizes=N(B=1, D=192, Dv=128), block=64, **BF16),
    Case("head_size_256", mask=masks.causal, sizes=N(B=1, T=129, D=256), block=128, **BF16),
    Case("head_size_256_float32", sizes=N(B=1, T=70, D=256)),
    Case("head_size_300", sizes=N(B=1, T=37, D=300), unsupported={"triton": r"head sizes up to 256, not 300"},
     tier="default"),
    Case("grouped", scores.alibi, sizes=N(T=33, S=256, Hq=8, Hkv=2), **BF16),
    Case("grouped_causal", mask=masks.causal, sizes=N(T=129, Hq=6, Hkv=2), block=64, **F16),
    Case("one_key_head", mask=masks.causal, sizes=N(T=100, Hq=4, Hkv=1), block=32),
    Case("shared_keys", mask=masks.causal, sizes=N(B=3, T=70, Bkv=1), block=32, **BF16),
    Case("shared_keys_bias", captured.bias_bq, sizes=N(B=3, T=37, S=67, Hq=4, Hkv=2, Bkv=1)),
    Case("bnth", captured.bias_hqk, masks.causal, N(T=100, S=67, Hq=4, Hkv=2, Dv=16), block=32, layout="BNTH", **BF16,
     tier="default"),
    Case("bnth_shared_keys", mask=masks.window, sizes=N(T=129, Bkv=1), layout="BNTH"),
    Case("long", mask=masks.window, sizes=N(B=1, T=1023, D=16), block=128, **BF16),
]  # fmt: skip

SINKS = [
    Case("sinks", mask=masks.causal, sizes=N(T=129, Hq=4, Hkv=2), block=64, sinks=True, **BF16, tier="default"),
    Case("sinks_alone", sizes=N(T=70, S=100, Hq=3), sinks=True),
    Case("sinks_see_nothing", captured.slopes, masks.strictly_causal, N(T=70, Hq=4, Hkv=2), block=32, sinks=True),
    Case("softcap_sinks", scores.softcap, masks.window, N(T=129, Hq=4, Hkv=1), layout="BNTH", sinks=True, **F16),
    Case("sinks_negative_scale", scale=-0.5, sizes=N(T=33, Bkv=1), sinks=True, **BF16),
    Case("softcap_sinks_decode", scores.softcap, sizes=N(T=1, S=500, Hq=8, Hkv=2), sinks=True, **BF16),
    Case("sinks_decode_bnth", captured.slopes, masks.causal, N(T=4, S=99, Hq=4, Hkv=2), layout="BNTH", sinks=True),
]

NOT_NORMALIZED = [
    Case("sigmoid", scores.sigmoid, masks.causal, N(T=129, Hq=4, Hkv=2), block=64, normalize="none", **BF16,
     tier="default"),
    Case("sigmoid_everywhere", scores.sigmoid, sizes=N(T=70, S=100, Dv=40), normalize="none"),
    Case("flash_sigmoid", scores.flash_sigmoid, sizes=N(B=1, T=100, D=128), scale=128**-0.5, normalize="none", **F16),
    Case("sigmoid_decode", scores.sigmoid, sizes=N(T=1, S=300, Hq=8, Hkv=2), normalize="none", **F16),
    Case("sigmoid_dropout", scores.sigmoid, masks.window, N(T=70), layout="BNTH", normalize="none", dropout_rate=0.2),
    Case("scores_as_weights", mask=masks.strictly_causal, scale=-0.1, sizes=N(T=70), block=32, normalize="none"),
    Case("bias_as_weights", captured.bias_hqk, masks.causal, N(T=67, S=70), normalize="none", **BF16),
    Case("log_as_weights", scores.log_distance, masks.strictly_causal, N(T=67), block=32, normalize="none"),
]  # fmt: skip

DROPOUT = [
    Case("dropout", mask=masks.causal, sizes=N(T=70, Hq=4, Hkv=2), block=32, dropout_rate=0.3, **BF16, tier="default"),
    Case("causal_dropout_repaired", captured.bias_hqk, masks.causal, N(T=67, S=70), block=32, dropout_rate=0.5),
    Case("softcap_dropout_sinks", scores.softcap, masks.causal, N(T=70, Hq=4, Hkv=2), dropout_rate=0.3, sinks=True,
     **BF16),
    Case("softcap_dropout", scores.softcap, sizes=N(T=129, Hq=4, Hkv=2), dropout_rate=0.1, **BF16),
    Case("dropout_bias_qk", captured.bias_qk, masks.window, N(T=70, Hq=4, Hkv=1), dropout_rate=0.2, layout="BNTH"),
    Case("dropout_shared", mask=masks.causal, sizes=N(T=70, Hq=4, Hkv=2), dropout_rate=0.3, shared_dropout=True,
     **BF16),
    Case("dropout_table", captured.table, masks.causal, N(T=129), block=64, dropout_rate=0.9, **F16),
    Case("dropout_decode", captured.bias_kv, sizes=N(T=3, S=300, Hq=4, Hkv=2, Bkv=1), dropout_rate=0.25, **BF16),
    Case("dropout_head_size_128", sizes=N(B=1, T=100, D=128), dropout_rate=0.1, **BF16),
]  # fmt: skip

CASES = [*STANDARD, *ELEMENTWISE, *CAPTURED, *READY, *MASKED, *SHAPES, *SINKS, *NOT_NORMALIZED, *DROPOUT]

# Each batch entry with its own number of keys: first few queries, then more than are decoded.
LENGTHS = [
    Case("length_one_query", scores.softcap, sizes=N(B=3, T=1, S=500, Hq=8, Hkv=2), kv_lengths=(129, 0, 500), **BF16),
    Case("length_sinks", sizes=N(B=3, T=1, S=300, Hq=8, Hkv=2), kv_lengths=(129, 0, 300), sinks=True, **BF16),
    Case("length_many_sinks", mask=masks.causal, sizes=N(B=3, T=70, Hq=4), kv_lengths=(9, 0, 70), sinks=True),
    Case("length_sigmoid", scores.sigmoid, sizes=N(B=3, T=1, S=300), kv_lengths=(129, 0, 300), normalize="none"),
    Case("length_of_one", sizes=N(B=1, T=1, S=700, Hq=4, Hkv=1), kv_lengths=(643,), **BF16),
    Case("length_mask_mod", captured.bias_hqk, masks.odd_keys, N(T=4, S=257, Hq=4, Hkv=2), kv_lengths=(257, 100)),
    Case("length_blocks", scores.alibi, masks.offset_by_batch, N(B=3, T=4, S=300, Hq=4, Hkv=2), block=64, by_batch=True,
     kv_lengths=(1, 300, 90), **F16),
    Case("length_shared_blocks", captured.slopes, masks.both_sides, N(B=2, T=16, S=200, Hq=4, Hkv=1), block=32,
     kv_lengths=(33, 10), layout="BNTH", **BF16),
    Case("length_full_blocks", captured.bias_kv, masks.everything, N(B=2, T=2, S=256, Hq=2, Hkv=1), block=64,
     kv_lengths=(70, 256), **BF16),
    Case("length_lists_by_head", captured.table, masks.random_elements, N(T=5, S=200, Hq=3), block=32, by_head=True,
     kv_lengths=(190, 64), **BF16),
    Case("length_shared_keys", sizes=N(3, 2, 150, Hq=4, Hkv=2, D=40, Dv=80, Bkv=1), kv_lengths=(5, 150, 64), **BF16),
    Case("length_sees_nothing", scores.times_two, masks.strictly_causal, N(T=3, S=130), kv_lengths=(0, 1)),
    Case("softcap_length_many_queries", scores.softcap, sizes=N(3, 70, 300, Hq=4), kv_lengths=(99, 0, 300), **BF16),
    Case("length_many_mask_mod", captured.table, masks.window, N(T=70, S=100), kv_lengths=(40, 100)),
    Case("length_many_blocks", scores.log_distance, masks.strictly_causal, N(T=100, Hq=4, Hkv=2), block=32,
     kv_lengths=(33, 96), **BF16),
    Case("length_many_lists_by_head", captured.bias_hqk, masks.window_by_head, N(T=70, S=130, Hq=4, Hkv=2), block=32,
     by_head=True, kv_lengths=(64, 90), layout="BNTH", **BF16),
    Case("length_own_lists", captured.bias_bq, sizes=N(T=130, S=96), block=32, kv_lengths=(95, 20),
     states=np.random.default_rng(0).integers(0, 3, (1, 1, 5, 3)), **BF16),
    Case("length_dropout", captured.slopes, masks.both_sides, N(T=40, S=100, Hq=4, Hkv=2), block=32,
     kv_lengths=(33, 96), dropout_rate=0.3),
    Case("length_dropout_decode", sizes=N(B=3, T=2, S=300, Hq=4), kv_lengths=(5, 0, 300), dropout_rate=0.5, **BF16),
    Case("length_many_shared_keys", captured.slopes, sizes=N(B=3, T=37, S=67, Bkv=1), kv_lengths=(67, 4, 0), **BF16),
]  # fmt: skip

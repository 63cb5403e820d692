"""Cases of the kernels for Hopper that split keys: few queries over contiguous keys, requests over pages, latents."""

from tests.cases import captured_pairs as captured
from tests.cases import mask_pairs as masks
from tests.cases import paged_cases
from tests.cases import score_pairs as scores
from tests.cases.paged_cases import MIXED, PagedCase, bias_by_key, documents, prefix_by_request, slopes, window
from tests.cases.table import Case, Sizes

BF16 = {"dtype": "bfloat16"}
wide_window = masks.same(lambda b, h, q, k, c: (q >= k) & (q - k < 400))  # shows whole tiles, between two partial ones
wide_window_by_head = masks.same(lambda b, h, q, k, c: (q >= k) & (q - k < 400 - 300 * h))
DENSE = [
    Case("dense_decode", sizes=Sizes(T=1, S=512, Hq=8, Hkv=2, D=128), **BF16),
    Case("dense_one_tile", scores.softcap, sizes=Sizes(B=3, T=1, S=64, Hq=4, D=64), **BF16),
    Case("dense_tail", scores.sigmoid, sizes=Sizes(T=2, S=200, Hq=4, Hkv=2, D=64), dtype="float16"),
    Case("dense_alibi", scores.alibi, masks.causal, Sizes(T=4, S=256, Hq=8, Hkv=2, D=128), **BF16),
    Case("dense_window_by_head", mask=masks.window_by_head, sizes=Sizes(T=3, S=320, Hq=4, Hkv=2, D=64), **BF16),
    Case("dense_sees_nothing", mask=masks.strictly_causal, sizes=Sizes(T=4, S=136, Hq=4, Hkv=1, D=80, Dv=48), **BF16),
    Case("dense_16_queries", captured.bias_q, masks.odd_keys, Sizes(T=16, S=192, Hq=4, Hkv=1, D=64), **BF16),
    Case("dense_bnth", captured.bias_hqk, masks.both_sides, Sizes(T=3, S=128, Hq=4, Hkv=2, D=64), layout="BNTH",
     **BF16),
    Case("dense_bnth_one", sizes=Sizes(T=1, S=512, Hq=4, Hkv=2, D=128), layout="BNTH", dtype="float16"),
    Case("dense_sinks", captured.slopes, sizes=Sizes(T=1, S=512, Hq=8, Hkv=2, D=64), sinks=True, **BF16),
    Case("dense_lengths", scores.softcap, sizes=Sizes(B=3, T=1, S=504, Hq=8, Hkv=2, D=128), kv_lengths=(129, 0, 504),
     **BF16),
    Case("dense_shared_keys", sizes=Sizes(B=3, T=2, S=152, Hq=4, Hkv=2, D=48, Dv=80, Bkv=1), kv_lengths=(5, 150, 64),
     **BF16),
    Case("dense_lengths_window", captured.slopes, masks.both_sides, Sizes(T=4, S=640, Hq=4, Hkv=1, D=64),
     kv_lengths=(600, 77), **BF16),
    Case("dense_256", scores.alibi, sizes=Sizes(T=1, S=192, Hq=4, Hkv=2, D=256), **BF16),
]  # fmt: skip


def _paged(name: str, *args, **more) -> PagedCase:
    return PagedCase(f"hopper_{name}", *args, **{"dtype": "bfloat16", "D": 128, "page_size": 64, **more})


PAGED = [
    _paged("decode", Hq=8),
    _paged("divided", (1, 1, 2), (2900, 40, 700), Hq=8, mask=masks.causal),
    _paged("window_divided", (1, 2), (1500, 700), D=64, mask=window),
    _paged("mixed", **MIXED, page_size=16, D=64, mask=masks.causal, score=slopes),
    _paged("pages_of_8", (1, 3, 1), (130, 64, 7), page_size=8, D=64, mask=masks.causal),
    _paged("pages_of_32", (2, 1), (200, 33), page_size=32, D=64, score=bias_by_key),
    _paged("pages_of_128", (2, 1), (300, 64), page_size=128, Hq=8, score=scores.softcap, factor=8.0),
    _paged("layers", (1, 2), (20, 133), layers=2, D=64, dtype="float16"),
    _paged("padding_and_empty", (0, 1, 0, 20, 2), (0, 30, 9, 24, 0), 5, slopes, D=64),
    _paged("group_5", (1, 3, 17), (9, 140, 33), Hq=10, D=64, mask=documents),
    _paged("group_1", (1, 5), (70, 140), Hq=2, D=64, Dv=128, mask=masks.causal),
    _paged("group_64", (1, 2), (70, 140), Hq=64, Hkv=1, D=64, mask=masks.causal),
    _paged("prefix", (1, 20, 4), (60, 140, 50), D=64, mask=prefix_by_request),
    _paged("head_sizes_80_48", (1, 2), (30, 140), D=80, Dv=48, scale=0.3),
    _paged("head_size_256", (1, 2), (30, 140), D=256, score=slopes),
]
# Requests with many queries, and with few beside them; tiles of queries that start and end within others.
PROMPTS = [
    _paged("prompts", (150, 1, 37, 131, 0), (300, 90, 37, 140, 5), 3, D=64, mask=masks.causal),
    _paged("prompt_alone", (200,), (261,), D=64, mask=window, score=slopes),
    _paged("prompt_pages_of_8", (18, 2, 140), (130, 64, 141), page_size=8, D=64, mask=masks.causal, dtype="float16"),
    _paged("prompt_pages_of_1", (18, 2, 140), (130, 64, 141), page_size=1, D=64, mask=masks.causal, layers=2),
    _paged("prompt_pages_of_4", (24, 17), (300, 170), page_size=4, D=80, Dv=48, mask=window, score=slopes),
    _paged("prompt_pages_of_2", (40,), (140,), page_size=2, Hq=2, Hkv=1, D=256, dtype="float16"),
    _paged("prompt_pages_of_192", (18, 20), (411, 20), page_size=192, D=64, Dv=128, score=scores.softcap, factor=8.0),
    _paged("prompt_pages_of_128", (40, 17), (300, 17), page_size=128, mask=documents, layers=2),
    _paged("prompt_bias", (24, 17), (170, 300), page_size=32, D=64, Hq=3, Hkv=3, score=bias_by_key),
    _paged("prompt_divided", (33, 18), (4700, 40), D=64, Hq=2, Hkv=1, mask=masks.causal),
    _paged("prompt_head_size_256", (24, 140), (80, 140), Hq=2, Hkv=1, D=256, mask=masks.causal),
    _paged("prompt_window", (140, 20), (700, 400), D=64, Hq=2, Hkv=1, mask=wide_window),
    _paged("prompt_by_head", (140,), (600,), D=64, Hq=2, Hkv=1, mask=wide_window_by_head),
    _paged("prompt_first_keys_and_window", (140, 20), (300, 20), D=64, mask=paged_cases.sinks_and_window),
    _paged("prompt_without_keys", (30, 20), (0, 80), D=64, mask=masks.causal),
]


def _latent(name: str, *args, **more) -> PagedCase:
    return paged_cases.latent_case(f"hopper_{name}", *args, **{"dtype": "bfloat16", **more})


ON_HOPPER = [case for case in paged_cases.LATENT if case.name not in paged_cases.NOT_ON_HOPPER]
LATENT = [
    *(paged_cases.in_dtype(case, "bfloat16") for case in ON_HOPPER),
    _latent("32_heads", (1, 2), (140, 33), Hq=32, page_size=64, mask=masks.causal),
    _latent("126_heads", (2,), (270,), Hq=126, page_size=128),
    _latent("window_pages_of_8", (1, 1, 20), (8, 9, 70), Hq=8, mask=window, page_size=8),
    _latent("window_divided", (1, 2), (1500, 700), Hq=8, page_size=64, mask=window),
    _latent("float16", (1, 2), (70, 33), Hq=16, page_size=128, dtype="float16"),
    # NaN past an odd length: two weights share the reciprocal of a logistic.
    _latent("odd_sigmoid", (1, 3), (33, 21), Hq=8, score=scores.sigmoid),
]
BY_NAME = {case.name: case for case in (*DENSE, *PAGED, *PROMPTS, *LATENT)}
# Small ones of several splits, and of keys that a window hides.
DIVIDED = _paged("small_divided", (1, 2), (700, 40), D=64, mask=masks.causal)
LATENT_DIVIDED = _latent("small_latent_divided", (1, 2), (700, 40), Hq=8, page_size=64, mask=masks.causal)
HIDING = _paged("hiding", (2,), (192,), D=64, page_size=16, mask=window)
LATENT_HIDING = _latent("latent_hiding", (1, 3), (171, 301), Hq=8, mask=window)

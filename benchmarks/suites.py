"""The suites that attention problems form. Imports neither JAX nor torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks.problems import EIGHT_BITS, Problem, square

PAPER = "Dong et al. 2024, arXiv:2412.05496"
SEVEN = ("noop", "causal", "alibi", "sliding_window", "prefix_lm", "softcap", "document_mask")
NEIGHBORHOODS = ("neighborhood", "neighborhood_tiled", "neighborhood_morton")
_KV_BYTES = 256 * 2**20  # The paper keeps key and value together at this size (section 6.2).


class Suite(NamedTuple):
    """Problems that are measured together."""

    title: str
    problems: Callable[[], list[Problem]]
    peers: tuple[str, ...]  # names in `benchmarks.peers.table.PEERS`; targets and ratios are about the first
    served: bool = False  # whether the problems are `Problem.served`, so that there is no backward
    inference: bool = False  # whether there is no backward in any case
    queue: bool = False  # whether the wall time of a call in a queue of calls is measured too


SUITES: dict[str, Suite] = {}
_FLEX, _CUDNN = "jflex torch-flex", "jflex torch-flex jax-cudnn"
_HEADS: dict[str, Any] = {"Hq": 32, "Hkv": 8, "D": 128}  # of Llama 3 8B


def _suite(title: str, peers: str, **how: bool) -> Callable[[Callable[[], list[Problem]]], Any]:
    """Enters what a function makes into `SUITES`, under the function's name."""

    def enter(problems: Callable[[], list[Problem]]) -> Any:
        SUITES[problems.__name__.removeprefix("_")] = Suite(title, problems, tuple(peers.split()), **how)
        return problems

    return enter


def suite(name: str) -> tuple[Problem, ...]:
    """The problems of a suite.

    >>> len(suite("main")), suite("main")[0].name
    (21, 'noop; B 4, H 16, S 16384, D 64')
    """
    return tuple(SUITES[name].problems())


@_suite("long sequences, and the heads of Llama 3 8B", f"{_CUDNN} tokamax fa4")
def _main() -> list[Problem]:
    shapes = ((4, 16384, 16, 64), (2, 16384, 16, 128), (2, 8192, (32, 8), 128))
    return [square(*shape, variant) for shape in shapes for variant in SEVEN]


@_suite(
    "the Mosaic GPU kernels beside the fastest peers on Hopper",
    "jflex-mosaic jflex-triton jax-cudnn torch-flex sdpa-cudnn fa4 tokamax",
)
def _hopper() -> list[Problem]:
    """Variants at two head sizes, grouped heads, other head sizes."""
    variants = ("causal", "noop", "softcap", "sliding_window", "alibi", "relative_bias", "document_mask")
    shapes = ((2, 16384, 16, 128), (4, 16384, 16, 64))
    table = [square(*shape, variant) for shape in shapes for variant in variants]
    gathered = square(*shapes[0], "relative_table")
    grouped = square(2, 8192, (32, 8), 128, "causal")
    sizes = [square(2, 16384, 16, D, variant) for D in (96, 192, 256) for variant in ("causal", "noop")]
    return [*table, gathered, grouped, *sizes, square(2, 16384, 16, 192, "causal", Dv=128)]


@_suite(
    "queries and keys in eight bits beside bfloat16, values in bfloat16", "jflex-mosaic jflex-triton", inference=True
)
def _fp8() -> list[Problem]:
    """Target: at head size 128, 1.2 times as fast. At 64 exponentials bound the time."""
    shapes = ((2, 16384, 16, 128), (4, 16384, 16, 64))
    kinds = ("", EIGHT_BITS[0])
    return [square(*shape, variant, keys=x) for shape in shapes for variant in ("noop", "causal") for x in kinds]


@_suite("short sequences, Mosaic GPU beside Triton", "jflex jflex-mosaic jflex-triton")
def _hopper_short() -> list[Problem]:
    """An equal number of tokens at every length, and a single sequence, whose tiles do not fill the GPU."""
    lengths, sizes = (256, 512, 1024, 2048, 4096), (64, 128)
    even = [square(16384 // S, S, 16, D, variant) for variant in ("causal", "noop") for D in sizes for S in lengths]
    return even + [square(1, S, 16, 128, "causal") for S in lengths]


def _of_paper(S: int, H: int | tuple[int, int], D: int, variant: str, section: str = "section 6.2") -> Problem:
    Hkv = H[1] if isinstance(H, tuple) else H
    return square(max(1, _KV_BYTES // (2 * 2 * S * Hkv * D)), S, H, D, variant, source=f"{PAPER}, {section}")


_PAPER_SHAPES = [(H, D) for D in (64, 128) for H in (16, (16, 2))]
_PAPER_LENGTHS = [2**n for n in range(10, 17)]


@_suite(
    "the paper's figure 7 (causal by length, variants at 16k; key and value 256 MiB) and its neighborhoods",
    f"{_CUDNN} sdpa-flash sdpa-efficient",
)
def _paper() -> list[Problem]:
    """Figure 7: causal by length, and every variant at 16k; and the neighborhoods of appendix A.1."""
    by_length = [_of_paper(S, *shape, "causal") for shape in _PAPER_SHAPES for S in _PAPER_LENGTHS]
    by_variant = [_of_paper(16384, *shape, x) for shape in _PAPER_SHAPES for x in SEVEN if x != "causal"]
    near = [_of_paper(16384, 16, D, x, "appendix A.1") for D in (64, 128) for x in NEIGHBORHOODS]
    return by_length + by_variant + near


@_suite("one sequence of up to a million tokens: texts of 16384 in the mean, each in a window of 4096",
        "jflex jflex-mosaic jflex-triton")  # fmt: skip
def _million() -> list[Problem]:
    """Target: at S 1048576, of 64 texts, at least 0.9 of the TFLOP/s over visited blocks at S 16384, of one."""
    return [square(1, S, 8, 128, "windows_in_texts") for S in (16384, 131072, 1048576)]


@_suite("head sizes", _CUDNN)
def _heads() -> list[Problem]:
    """Odd head sizes beside even ones: 80 (Phi-2, Stable Diffusion), 96 (Phi-3), 192 (query and key of DeepSeek)."""
    return [square(2, 8192, 16, D, variant) for variant in ("noop", "causal") for D in (64, 80, 96, 128, 192)]


@_suite(
    "short sequences",
    f"{_FLEX} jax-cudnn jax-xla sdpa-cudnn sdpa-flash sdpa-efficient tokamax",
    queue=True,
)
def _short() -> list[Problem]:
    """Causal with blocks of 64: with 128, a fifth of the visited elements would be masked at S 256, a tenth at 512."""
    blocks = {"noop": 128, "causal": 64}
    return [square(32, S, 16, 64, x, block=blocks[x]) for x in blocks for S in (128, 256, 512, 1024)]


@_suite("the gain from the BlockMask and from its full blocks, causal", _FLEX)
def _blocks() -> list[Problem]:
    """The paper's figure 8: causal with the split of blocks, without it, and without a BlockMask."""
    shapes = [(16, S, 16, 64) for S in (1024, 2048, 4096, 8192)] + [(4, 16384, 16, 64), (2, 16384, 16, 128)]
    forms = ("split", "partial", "everywhere")
    return [square(*shape, "causal", form=form) for shape in shapes for form in forms]


@_suite("sinks, dropout, sigmoid weights and row statistics beside a plain softmax", "jflex jflex-mosaic jflex-triton")
def _weights() -> list[Problem]:
    """Target of the statistics: "lse max" takes at most 1% longer than "lse"."""
    shapes = ((2, 16384, 16, 128), (4, 16384, 16, 64))
    kinds = ("", "sinks", "dropout", "sigmoid")
    return [
        square(*shape, variant, weights=x)
        for shape in shapes
        for variant in ("causal", "sliding_window")
        for x in kinds
    ] + [square(*shape, "causal", stats=x) for shape in shapes for x in ("lse", "lse max", "lse max entropy")]


@_suite(
    "causal attention to blocks that each block of queries selects anew, beside all of them",
    "jflex jflex-mosaic jflex-triton",
)
def _selected() -> list[Problem]:
    """The best of 256 key blocks, with the selection in the forward pass.

    Of the blocks that causal attention visits, 13 for each query block are 10% and 26 are 19% (10% of all).
    """
    shapes = ((1, 32768, (32, 8), 128), (1, 32768, 16, 64))
    return [
        square(*shape, "causal", selected=k, source="MoBA, arXiv:2502.13189") for shape in shapes for k in (0, 13, 26)
    ]


@_suite("causal attention to queries and keys that the call rotates, beside rotated ones", "jflex jflex-rotating")
def _rotary() -> list[Problem]:
    """`query_mod` and `key_mod`, beside the same call on rotated arrays and beside a rotation by XLA in front of it.

    Target: at most 1.08 times the time of the former, and no more than that of the latter.
    """
    shapes = ((2, 16384, 16, 128), (4, 16384, 16, 64))
    return [square(*shape, "causal", keys=keys) for shape in shapes for keys in ("", "raw")]


@_suite("captured arrays with and without their gradient", _CUDNN)
def _captured() -> list[Problem]:
    captured = [(x, gradient) for x in ("alibi", "relative_table", "pair_bias") for gradient in (False, True)]
    return [square(2, 4096, 16, 64, x, differentiated=gradient) for x, gradient in (("noop", False), *captured)]


@_suite(
    "a pair bias shared by the batch, with its gradient, at AlphaFold 2's sizes", f"{_CUDNN} jax-xla sdpa-efficient"
)
def _pair_bias() -> list[Problem]:
    """AlphaFold 2 (Jumper et al. 2021, supplementary 1.6): one bias shared by the batch, with its gradient.

    Triangle attention (algorithms 13 and 14) has a row of the pair representation in each batch entry and 4 heads of
    32; row-wise attention of the MSA with pair bias (algorithm 7) has a sequence in each, here 128, and 8 heads of 32.
    """
    triangle, rows = "AlphaFold 2, supplementary, algorithm 13", "AlphaFold 2, supplementary, algorithm 7"
    return [
        square(B, S, H, 32, variant, differentiated=variant == "pair_bias", source=source)
        for S in (384, 768)
        for B, H, source in ((S, 4, triangle), (128, 8, rows))
        for variant in ("noop", "pair_bias")
    ]


@_suite(
    "one token against long keys, and keys of uneven lengths",
    "jflex jflex-mosaic jflex-triton jax-cudnn sdpa-cudnn sdpa-flash torch-decode-mask torch-decode",
    served=True,
)
def _decode() -> list[Problem]:
    """One token each; the ragged ones have as many keys in total as the first problem, in a half-empty cache.

    The last position attends to every key, so ALiBi and the soft cap are measured without a mask.
    """
    plain = [Problem(B, 1, S, **_HEADS, variant="noop") for B, S in ((8, 16384), (32, 4096), (1, 65536))]
    plain += [Problem(B, 1, S, 16, 16, 64, "noop") for B, S in ((4, 16384), (16, 4096))]
    ragged = [Problem(32, 1, 16384, **_HEADS, variant="noop", lengths=x) for x in ("even", "uniform", "skewed")]
    scored = [dataclasses.replace(plain[0], variant=variant) for variant in ("alibi", "softcap")]
    return plain + ragged + scored


@_suite(
    "one token against pages at random places, beside the same keys contiguous",
    "jflex jflex-mosaic jflex-triton jflex-contiguous flashinfer",
    served=True,
)
def _paged() -> list[Problem]:
    return [Problem(32, 1, 4096, **_HEADS, variant="noop", page=page) for page in (64, 16, 1, 256, 128)]


@_suite(
    "one token against pages of raw keys, rotated as they are loaded, beside keys rotated before", "jflex", served=True
)
def _raw_keys() -> list[Problem]:
    kinds = ("", "raw", "raw neighbours")
    return [Problem(32, 1, 4096, **_HEADS, variant="noop", page=page, keys=x) for page in (64, 16) for x in kinds]


@_suite(
    "StreamingLLM: one token against 4 sinks and a window, at positions within the cache",
    "jflex jflex-raw-keys jflex-rerotating",
    served=True,
)
def _streaming_llm() -> list[Problem]:
    """Heads of Llama 3 8B, and as many key heads as query heads; FlashInfer's gain is 28 to 30% of the latency.

    The caches hold 1k and 4k tokens; Llama 2 was trained on sequences of 4k.
    """
    heads = (_HEADS, {**_HEADS, "Hkv": 32})
    more = {"variant": "noop", "page": 64, "keys": "rolling", "source": "FlashInfer, arXiv:2501.01005"}
    return [Problem(B, 1, S, **x, **more) for x in heads for B in (1, 32) for S in (1024, 4096)]


@_suite(
    "one token against pages of keys and values in eight bits, with a scale for each token and head, beside bfloat16",
    "jflex",
    served=True,
)
def _paged_fp8() -> list[Problem]:
    kinds = ("", *EIGHT_BITS)
    return [Problem(32, 1, 16384, **_HEADS, variant="noop", page=64, keys=x) for x in kinds]


@_suite(
    "multi-head latent attention, absorbed: latent vectors of 512 columns and rotated keys of 64, in pages",
    "jflex-mosaic jflex-triton jax-xla-latents",
    served=True,
)
def _mla() -> list[Problem]:
    """The shapes of FlashMLA's figures: with 16 heads loading keys bounds the time, with 128 the products do."""
    sizes = {"Hkv": 1, "D": 576, "Dv": 512, "page": 64, "keys": "latent", "source": "FlashMLA"}
    variants = {1: "noop", 2: "causal"}
    return [Problem(128, T, 4096, Hq=heads, variant=variants[T], **sizes) for heads in (16, 128) for T in (1, 2)]


@_suite(
    "one token against 2048 of 65,536 latent vectors in pages, beside all of them; the indexer that selects them",
    "jflex jax-xla-latents",
    served=True,
)
def _sparse_mla() -> list[Problem]:
    """The shapes of DeepSeek-V3.2, with all heads and with those of one of 8 devices. Target: 8 times dense attention.

    The figures of a problem with a selection are of attention alone; the indexer is a problem of its own.
    """
    sizes = {"Hkv": 1, "D": 576, "Dv": 512, "page": 64, "keys": "latent"}
    indexer = {"Hq": 64, "Hkv": 1, "D": 128, "keys": "indexer", "selected": 2048}
    kinds = [{**sizes, "Hq": heads, "selected": k} for heads in (128, 16) for k in (0, 2048)]
    source = "DeepSeek-V3.2-Exp"
    return [Problem(B, 1, 65536, variant="noop", source=source, **x) for B in (32, 8, 1) for x in (*kinds, indexer)]


@_suite(
    "64 sequences that share a prefix: a cascade loads it once, the others once per sequence",
    "jflex jflex-joined jflex-flat jflex-copies",
    served=True,
)
def _cascade() -> list[Problem]:
    """With 32 key heads, loading keys bounds the time; with 8, the GEMMs of the prefix do too."""
    return [
        Problem(64, 1, prefix + suffix, **heads, variant="noop", prefix=prefix, page=64)
        for heads in ({**_HEADS, "Hkv": 32}, _HEADS)
        for prefix, suffix in ((8192, 128), (1024, 1024))
    ]


@_suite(
    "a chunk of 2048 tokens at the end of 8192 and 63 decoding steps after 4096 keys, in one call and alone",
    "jflex",
    served=True,
)
def _mixed() -> list[Problem]:
    mixed = Problem(64, 2048, 8192, **_HEADS, variant="causal", lengths="mixed", page=64)
    return [mixed, *parts_of_mixed(mixed)]


@_suite("`Config(batch_invariant=True)` beside the default", "jflex-invariant jflex", served=True)
def _batch_invariant() -> list[Problem]:
    """Target: decoding takes at most 1.15 times as long. What prefill and cascades cost is measured beside it."""
    return [*_decode(), *_paged(), *_mixed(), *_cascade()]


def parts_of_mixed(mixed: Problem) -> tuple[Problem, Problem]:
    """The chunk and the decoding steps of a mixed batch, alone."""
    chunk = dataclasses.replace(mixed, B=1, lengths="")
    return chunk, dataclasses.replace(mixed, B=mixed.B - 1, T=1, S=mixed.S // 2, lengths="")


@_suite("a glance", _CUDNN)
def _quick() -> list[Problem]:
    return [square(1, 4096, 16, 64, variant, source="a glance") for variant in ("causal", "softcap", "document_mask")]


@_suite("for tests", f"{_FLEX} jax-xla", queue=True)
def _tiny() -> list[Problem]:
    """Small enough for the CPU."""
    partial = square(1, 256, 2, 16, "causal", form="partial", source="tests")
    differentiated = square(1, 256, (2, 1), 16, "alibi", differentiated=True, source="tests")
    plain = [square(1, 256, 2, 16, variant, source="tests") for variant in ("noop", "softcap")]
    return [*plain, partial, differentiated]

"""The suites that attention problems form. Imports neither JAX nor torch."""

import dataclasses
from collections.abc import Iterable
from itertools import product
from typing import Any, NamedTuple

from benchmarks.problems import EIGHT_BITS, Problem, square

SEVEN = ("noop", "causal", "alibi", "sliding_window", "prefix_lm", "softcap", "document_mask")
_FLEX, _CUDNN, _OURS = "jflex torch-flex", "jflex torch-flex jax-cudnn", "jflex jflex-mosaic jflex-triton"
_FLASHINFER = "flashinfer flashinfer-fa2 flashinfer-batch"
_SHAPES = ((2, 16384, 16, 128), (4, 16384, 16, 64))  # batch, length, heads, head size
_GROUPED = (2, 8192, (32, 8), 128)
_BOTH = ("noop", "causal")
TRAINED = ("forward", "backward")
_TANGENTS = ("causal", "alibi", "softcap", "document_mask")
_PAPER, _PAPER_KV = "Dong et al. 2024, arXiv:2412.05496", 256 * 2**20  # bytes of key and value together (section 6.2)


class Suite(NamedTuple):
    """Problems that are measured together."""

    title: str
    peers: tuple[str, ...]  # names in `benchmarks.peers.table.PEERS`; ratios are about the first
    problems: tuple[Problem, ...]
    directions: tuple[str, ...]  # of `benchmarks.run.library_runner`
    queue: bool = False  # whether the wall time of a call in a queue of calls is measured too

    @property
    def served(self) -> bool:
        """Whether the problems are `Problem.served`."""
        return self.problems[0].served


def _suite(
    title: str, peers: str, problems: Iterable[Problem], directions: tuple[str, ...] = TRAINED, queue: bool = False
) -> Suite:
    """A suite of the directions; of the forward alone if the problems are served."""
    problems = tuple(problems)
    return Suite(title, tuple(peers.split()), problems, ("forward",) if problems[0].served else directions, queue)


def _squares(shapes: Iterable[tuple[Any, ...]], variants: Iterable[str], **more: Iterable[Any]) -> list[Problem]:
    """One for each shape, variant and value of the other fields."""
    rows = product(shapes, variants, *more.values())
    return [square(*shape, variant, **dict(zip(more, x, strict=True))) for shape, variant, *x in rows]


def _paper(S: int, H: int | tuple[int, int], D: int, variant: str, section: str = "section 6.2") -> Problem:
    Hkv = H[1] if isinstance(H, tuple) else H
    return square(max(1, _PAPER_KV // (2 * 2 * S * Hkv * D)), S, H, D, variant, source=f"{_PAPER}, {section}")


def _token(B: int, S: int, Hkv: int = 8, **more: Any) -> Problem:
    """One token against S keys, with the heads of Llama 3 8B."""
    return Problem(B, 1, S, 32, Hkv, 128, **{"variant": "noop", **more})


def _latent(B: int, T: int, S: int, Hq: int, variant: str = "noop", **more: Any) -> Problem:
    return Problem(B, T, S, Hq, 1, 576, variant, Dv=512, page=64, keys="latent", **more)


_PAPER_SHAPES = [(H, D) for D in (64, 128) for H in (16, (16, 2))]
# The last position attends to every key, so ALiBi and the soft cap are measured without a mask. Uneven lengths have as
# many keys in total as the first problem, in a half-empty cache.
_DECODE = (
    *(_token(B, S) for B, S in ((8, 16384), (32, 4096), (1, 65536))),
    *(Problem(B, 1, S, 16, 16, 64, "noop") for B, S in ((4, 16384), (16, 4096))),
    *(_token(32, 16384, lengths=x) for x in ("even", "uniform", "skewed")),
    *(_token(8, 16384, variant=x) for x in ("alibi", "softcap")),
)
_PAGED = [_token(32, 4096, page=page) for page in (64, 16, 1, 256, 128)]
# With 32 key heads, loading keys bounds the time; with 8, the GEMMs of the prefix do too.
_CASCADE = [
    _token(64, prefix + suffix, Hkv, prefix=prefix, page=64)
    for Hkv, (prefix, suffix) in product((32, 8), ((8192, 128), (1024, 1024)))
]
# A mixed batch, and its chunk and its decoding steps alone.
_MIXED = [
    Problem(B, T, S, 32, 8, 128, "causal", lengths=lengths, page=64)
    for B, T, S, lengths in ((64, 2048, 8192, "mixed"), (1, 2048, 8192, ""), (63, 1, 4096, ""))
]

SUITES = {
    "main": _suite(
        "long sequences, and the heads of Llama 3 8B",
        f"{_CUDNN} tokamax fa4",
        _squares((*reversed(_SHAPES), _GROUPED), SEVEN),
    ),
    # Two rows of 12 documents, and documents as long as a corpus has them: most are shorter than a tile of queries.
    "documents": _suite(
        "packed documents, causal, beside FlashAttention-4 over sequences of these lengths",
        "jflex-mosaic jflex-triton torch-flex fa4",
        [
            *_squares((*_SHAPES, _GROUPED), ["document_mask"]),
            *_squares([(1, 32768, (64, 8), 128), (4, 8192, (64, 8), 128)], ["corpus_mask"]),
        ],
    ),
    "hopper": _suite(
        "the Mosaic GPU kernels beside the fastest peers on Hopper",
        "jflex-mosaic jflex-triton jax-cudnn torch-flex sdpa-cudnn fa4 tokamax",
        [
            *_squares(_SHAPES, (*(x for x in SEVEN if x != "prefix_lm"), "relative_bias")),
            square(*_SHAPES[0], "relative_table"),
            square(*_GROUPED, "causal"),
            *_squares([(2, 16384, 16, D) for D in (96, 192, 256)], _BOTH),
            square(2, 16384, 16, 192, "causal", Dv=128),
        ],
    ),
    # Value and tangent of one call; of ALiBi the slopes have tangents too.
    "tangents": _suite(
        "forward mode: the jvp, value and tangent together, beside the forward",
        "jflex-mosaic jflex-triton fa4-jax",
        [
            dataclasses.replace(x, differentiated=x.variant == "alibi")
            for x in _squares((*_SHAPES, (8, 4096, 16, 128), (16, 4096, 16, 64)), _TANGENTS)
        ],
        directions=("forward", "jvp"),
    ),
    # At head size 64 exponentials bound the time.
    "fp8": _suite(
        "queries and keys in eight bits beside bfloat16, values in bfloat16",
        "jflex-mosaic jflex-triton",
        _squares(_SHAPES, _BOTH, keys=("", EIGHT_BITS[0])),
        directions=("forward",),
    ),
    # An equal number of tokens at every length, and a single sequence, whose tiles do not fill the GPU.
    "hopper_short": _suite(
        "short sequences, Mosaic GPU beside Triton",
        _OURS,
        [
            *_squares([(16384 // S, S, 16, D) for D in (64, 128) for S in (256, 512, 1024, 2048, 4096)], _BOTH),
            *(square(1, S, 16, 128, "causal") for S in (256, 512, 1024, 2048, 4096)),
        ],
    ),
    # Figure 7: causal by length, and every variant at 16k; and the neighborhoods of appendix A.1.
    "paper": _suite(
        "the paper's figure 7 (causal by length, variants at 16k; key and value 256 MiB) and its neighborhoods",
        f"{_CUDNN} sdpa-flash sdpa-efficient",
        [
            *(_paper(2**n, *shape, "causal") for shape in _PAPER_SHAPES for n in range(10, 17)),
            *(_paper(16384, *shape, x) for shape in _PAPER_SHAPES for x in SEVEN if x != "causal"),
            *(
                _paper(16384, 16, D, f"neighborhood{order}", "appendix A.1")
                for D, order in product((64, 128), ("", "_tiled", "_morton"))
            ),
        ],
    ),
    # Of one text, 8 and 64.
    "million": _suite(
        "one sequence of up to a million tokens: texts of 16384 in the mean, each in a window of 4096",
        _OURS,
        [square(1, S, 8, 128, "windows_in_texts") for S in (16384, 131072, 1048576)],
    ),
    # Odd head sizes beside even ones: 80 (Phi-2, Stable Diffusion), 96 (Phi-3), 192 (query and key of DeepSeek).
    "heads": _suite("head sizes", _CUDNN, _squares([(2, 8192, 16, D) for D in (64, 80, 96, 128, 192)], _BOTH)),
    "short": _suite(
        "short sequences",
        f"{_FLEX} jax-cudnn jax-xla sdpa-cudnn sdpa-flash sdpa-efficient tokamax fa4",
        [
            square(32, S, 16, 64, variant, form=form)
            for (variant, form), S in product(
                (("noop", "split"), ("causal", "split"), ("causal", "everywhere")), (128, 256, 512, 1024)
            )
        ],
        queue=True,
    ),
    # The paper's figure 8: causal with the split of blocks, without it, and without a BlockMask.
    "blocks": _suite(
        "the gain from the BlockMask and from its full blocks, causal",
        _FLEX,
        _squares(
            [*((16, S, 16, 64) for S in (1024, 2048, 4096, 8192)), *reversed(_SHAPES)],
            ["causal"],
            form=("split", "partial", "everywhere"),
        ),
    ),
    "weights": _suite(
        "sinks, dropout, sigmoid weights and row statistics beside a plain softmax",
        _OURS,
        [
            *_squares(_SHAPES, ("causal", "sliding_window"), weights=("", "sinks", "dropout", "sigmoid")),
            *_squares(_SHAPES, ["causal"], stats=("lse", "lse max", "lse max entropy")),
        ],
    ),
    # The best of 256 key blocks, with the selection in the forward pass. Of the blocks that causal attention visits, 13
    # for each query block are 10% and 26 are 19% (10% of all).
    "selected": _suite(
        "causal attention to blocks that each block of queries selects anew, beside all of them",
        _OURS,
        _squares(
            [(1, 32768, (32, 8), 128), (1, 32768, 16, 64)],
            ["causal"],
            selected=(0, 13, 26),
            source=["MoBA, arXiv:2502.13189"],
        ),
    ),
    # `query_mod` and `key_mod`, beside the same call on rotated arrays and beside a rotation by XLA in front of it.
    "rotary": _suite(
        "causal attention to queries and keys that the call rotates, beside rotated ones",
        "jflex jflex-rotating",
        _squares(_SHAPES, ["causal"], keys=("", "raw")),
    ),
    "captured": _suite(
        "captured arrays with and without their gradient",
        _CUDNN,
        [
            square(2, 4096, 16, 64, "noop"),
            *_squares([(2, 4096, 16, 64)], ("alibi", "relative_table", "pair_bias"), differentiated=(False, True)),
        ],
    ),
    # AlphaFold 2 (Jumper et al. 2021, supplementary 1.6): triangle attention (algorithms 13 and 14) has a row of the
    # pair representation in each batch entry and 4 heads of 32; row-wise attention of the MSA with pair bias (algorithm
    # 7) has a sequence in each, here 128, and 8 heads of 32.
    "pair_bias": _suite(
        "a pair bias shared by the batch, with its gradient, at AlphaFold 2's sizes",
        f"{_CUDNN} jax-xla sdpa-efficient",
        [
            square(B, S, H, 32, x, differentiated=x == "pair_bias", source=f"AlphaFold 2, supplementary, algorithm {n}")
            for S in (384, 768)
            for B, H, n in ((S, 4, 13), (128, 8, 7))
            for x in ("noop", "pair_bias")
        ],
    ),
    "decode": _suite(
        "one token against long keys, and keys of uneven lengths",
        f"{_OURS} jax-cudnn sdpa-cudnn sdpa-flash torch-decode-mask torch-decode",
        _DECODE,
    ),
    "paged": _suite(
        "one token against pages at random places, beside the same keys contiguous",
        f"{_OURS} jflex-contiguous fa4 {_FLASHINFER}",
        _PAGED,
    ),
    "raw_keys": _suite(
        "one token against pages of raw keys, rotated as they are loaded, beside keys rotated before",
        "jflex",
        [_token(32, 4096, page=page, keys=x) for page in (64, 16) for x in ("", "raw", "raw neighbours")],
    ),
    # As many key heads as query heads, too; FlashInfer's gain is 28 to 30% of the latency. The caches hold 1k and 4k
    # tokens; Llama 2 was trained on sequences of 4k.
    "streaming_llm": _suite(
        "StreamingLLM: one token against 4 sinks and a window, at positions within the cache",
        "jflex jflex-raw-keys jflex-rerotating",
        [
            _token(B, S, Hkv, page=64, keys="rolling", source="FlashInfer, arXiv:2501.01005")
            for Hkv, B, S in product((8, 32), (1, 32), (1024, 4096))
        ],
    ),
    "paged_fp8": _suite(
        "one token against pages of keys and values in eight bits, with a scale for each token and head, beside "
        "bfloat16",
        "jflex",
        [_token(32, 16384, page=64, keys=x) for x in ("", *EIGHT_BITS)],
    ),
    # The shapes of FlashMLA's figures: with 16 heads loading keys bounds the time, with 128 the products do.
    "mla": _suite(
        "multi-head latent attention, absorbed: latent vectors of 512 columns and rotated keys of 64, in pages",
        f"jflex-mosaic jflex-triton jax-xla-latents {_FLASHINFER}",
        [_latent(128, T, 4096, Hq, _BOTH[T - 1], source="FlashMLA") for Hq in (16, 32, 64, 128) for T in (1, 2)],
    ),
    # The shapes of DeepSeek-V3.2, with all heads and with those of one of 8 devices. The figures of a problem with a
    # selection are of attention alone; the indexer is a problem of its own.
    "sparse_mla": _suite(
        "one token against 2048 of 65,536 latent vectors in pages, beside all of them; the indexer that selects them",
        "jflex jax-xla-latents",
        [
            dataclasses.replace(x, source="DeepSeek-V3.2-Exp")
            for B in (32, 8, 1)
            for x in (
                *(_latent(B, 1, 65536, Hq, selected=k) for Hq in (128, 16) for k in (0, 2048)),
                Problem(B, 1, 65536, 64, 1, 128, "noop", keys="indexer", selected=2048),
            )
        ],
    ),
    "cascade": _suite(
        "64 sequences that share a prefix: a cascade loads it once, the others once per sequence",
        f"jflex jflex-joined jflex-flat jflex-copies {_FLASHINFER}",
        _CASCADE,
    ),
    # FlashAttention-4 loads pages by TMA where one holds a tile of 128 keys.
    "prompts": _suite(
        "prompts over pages at random places: 2048 tokens at the end of 8192, and 8 prompts of 1024",
        f"jflex jflex-triton fa4 {_FLASHINFER}",
        [
            *(Problem(1, 2048, 8192, 32, 8, 128, variant, page=64) for variant in ("sliding_window", "softcap")),
            *(
                Problem(B, T, S, 32, 8, 128, "causal", page=page)
                for page, (B, T, S) in product((1, 16, 64, 128), ((1, 2048, 8192), (8, 1024, 1024)))
            ),
        ],
    ),
    "mixed": _suite(
        "a chunk of 2048 tokens at the end of 8192 and 63 decoding steps after 4096 keys, in one call and alone",
        f"jflex fa4 {_FLASHINFER}",
        _MIXED,
    ),
    "batch_invariant": _suite(
        "`Config(batch_invariant=True)` beside the default",
        "jflex-invariant jflex",
        [*_DECODE, *_PAGED, *_MIXED, *_CASCADE],
    ),
    "quick": _suite(
        "a glance", _CUDNN, _squares([(1, 4096, 16, 64)], ("causal", "softcap", "document_mask"), source=["a glance"])
    ),
    "tiny": _suite(  # small enough for the CPU
        "for tests",
        f"{_FLEX} jax-xla",
        [
            *_squares([(1, 256, 2, 16)], ("noop", "softcap"), source=["tests"]),
            square(1, 256, 2, 16, "causal", form="partial", source="tests"),
            square(1, 256, (2, 1), 16, "alibi", differentiated=True, source="tests"),
        ],
        queue=True,
    ),
}

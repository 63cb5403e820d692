"""Attention problems and the suites that they form, with their sources. Imports neither JAX nor torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

PAPER = "Dong et al. 2024, arXiv:2412.05496"
SEVEN = ("noop", "causal", "alibi", "sliding_window", "prefix_lm", "softcap", "document_mask")
NEIGHBORHOODS = ("neighborhood", "neighborhood_tiled", "neighborhood_morton")
_KV_BYTES = 256 * 2**20  # The paper keeps key and value together at this size (section 6.2).


@dataclasses.dataclass(frozen=True)
class Problem:
    """One attention to measure.

    Attributes:
      B: Batch.
      T: Queries.
      S: Keys.
      Hq: Query heads.
      Hkv: Key heads.
      D: Size of a head of query and key.
      variant: A name in `benchmarks.variants.VARIANTS`.
      form: How the mask is given: ``"split"`` as a BlockMask with full and partial blocks, ``"partial"`` as one with
        every block partial, ``"everywhere"`` as a bare mask_mod.
      block: Queries and keys in a block of jflex's BlockMask. Peers keep their own size, and FLOPs are counted over
        blocks of 128 in any case.
      differentiated: Whether the backward also gives the gradient of the array that the score_mod captures.
      lengths: Keys of each sequence, by a name of `benchmarks.request_lengths.LENGTHS`; "" for S each. With
        fewer queries than keys, the queries are the last positions of the keys, as in decoding.
      page: Keys of a page, for caches in pages that lie at random; 0 for contiguous ones.
      prefix: Keys at the front that all sequences share.
      Dv: Size of a head of the values; 0 for D.
      dtype: Of the arrays.
      source: Where the problem comes from.
    """

    B: int
    T: int
    S: int
    Hq: int
    Hkv: int
    D: int
    variant: str
    form: str = "split"
    block: int = 128
    differentiated: bool = False
    lengths: str = ""
    page: int = 0
    prefix: int = 0
    Dv: int = 0
    dtype: str = "bfloat16"
    source: str = "jflex"

    @property
    def shape(self) -> str:
        """In words, without the variant."""
        heads = f"H {self.Hq}" if self.Hq == self.Hkv else f"H {self.Hq}/{self.Hkv}"
        lengths = f"S {self.S}" if self.T == self.S else f"T {self.T}, S {self.S}"
        sizes = f"D {self.D}, Dv {self.Dv}" if self.Dv else f"D {self.D}"
        return f"B {self.B}, {heads}, {lengths}, {sizes}{self._cache}"

    @property
    def value_size(self) -> int:
        """Of a head of the values."""
        return self.Dv or self.D

    @property
    def served(self) -> bool:
        """Whether the queries continue sequences whose keys are there, as in decoding."""
        return self.T < self.S

    @property
    def _cache(self) -> str:
        parts = {f"{self.lengths} lengths": self.lengths, f"prefix {self.prefix}": self.prefix}
        parts |= {f"pages of {self.page}": self.page}
        return "".join(f", {part}" for part, given in parts.items() if given)

    @property
    def label(self) -> str:
        """The variant and how it is given."""
        notes = {"partial": ", every block partial", "everywhere": ", mask_mod alone"}.get(self.form, "")
        notes += "" if self.block == 128 else f" (jflex: blocks of {self.block})"
        return f"{self.variant}{notes}{' and its gradient' if self.differentiated else ''}"

    @property
    def name(self) -> str:
        """All in words."""
        return f"{self.label}; {self.shape}"

    def to_json(self) -> dict[str, Any]:
        """The fields that differ from their defaults; `Problem(**fields)` is the inverse."""
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        return {name: x for name, x in dataclasses.asdict(self).items() if x != defaults[name]}


def square(B: int, S: int, H: int | tuple[int, int], D: int, variant: str, **more: Any) -> Problem:
    """As many queries as keys."""
    Hq, Hkv = H if isinstance(H, tuple) else (H, H)
    return Problem(B, S, S, Hq, Hkv, D, variant, **more)


HOPPER_SHAPES = ((2, 16384, 16, 128), (4, 16384, 16, 64))  # B, S, H, D


def _main() -> list[Problem]:
    shapes = ((4, 16384, 16, 64), (2, 16384, 16, 128), (2, 8192, (32, 8), 128))
    return [square(*shape, variant) for shape in shapes for variant in SEVEN]


def _of_paper(S: int, H: int | tuple[int, int], D: int, variant: str) -> Problem:
    Hkv = H[1] if isinstance(H, tuple) else H
    return square(max(1, _KV_BYTES // (2 * 2 * S * Hkv * D)), S, H, D, variant, source=f"{PAPER}, section 6.2")


def _paper() -> list[Problem]:
    """Figure 7: causal by length, and every variant at 16k; and the neighborhoods of appendix A.1."""
    shapes = [(H, D) for D in (64, 128) for H in (16, (16, 2))]
    lengths = [2**n for n in range(10, 17)]
    by_length = [_of_paper(S, H, D, "causal") for H, D in shapes for S in lengths]
    by_variant = [_of_paper(16384, H, D, variant) for H, D in shapes for variant in SEVEN if variant != "causal"]
    source = f"{PAPER}, appendix A.1"
    neighborhoods = [
        dataclasses.replace(_of_paper(16384, 16, D, name), source=source) for D in (64, 128) for name in NEIGHBORHOODS
    ]
    return by_length + by_variant + neighborhoods


def _grid() -> list[Problem]:
    """Every variant of the paper at every length."""
    shapes = [(H, D) for D in (64, 128) for H in (16, (16, 2))]
    return [_of_paper(2**n, H, D, variant) for H, D in shapes for n in range(10, 17) for variant in SEVEN]


def _heads() -> list[Problem]:
    """Odd head sizes beside even ones: 80 (Phi-2, Stable Diffusion), 96 (Phi-3), 192 (query and key of DeepSeek)."""
    return [square(2, 8192, 16, D, variant) for variant in ("noop", "causal") for D in (64, 80, 96, 128, 192)]


def _short() -> list[Problem]:
    """Causal with blocks of 64: with 128, a fifth of the visited elements would be masked at S 256, a tenth at 512."""
    blocks = {"noop": 128, "causal": 64}
    return [square(32, S, 16, 64, x, block=blocks[x]) for x in blocks for S in (128, 256, 512, 1024)]


def _hopper() -> list[Problem]:
    """Variants at two head sizes, grouped heads, other head sizes."""
    variants = ("causal", "noop", "softcap", "sliding_window", "alibi", "relative_bias", "document_mask")
    table = [square(*shape, variant) for shape in HOPPER_SHAPES for variant in variants]
    gathered = square(*HOPPER_SHAPES[0], "relative_table")
    grouped = square(2, 8192, (32, 8), 128, "causal")
    sizes = [square(2, 16384, 16, D, variant) for D in (96, 192, 256) for variant in ("causal", "noop")]
    return [*table, gathered, grouped, *sizes, square(2, 16384, 16, 192, "causal", Dv=128)]


def _hopper_short() -> list[Problem]:
    """The same number of tokens at every length, and a single sequence, whose tiles do not fill the GPU."""
    lengths, sizes = (256, 512, 1024, 2048, 4096), (64, 128)
    even = [square(16384 // S, S, 16, D, variant) for variant in ("causal", "noop") for D in sizes for S in lengths]
    return even + [square(1, S, 16, 128, "causal") for S in lengths]


def _blocks() -> list[Problem]:
    """The paper's figure 8: causal with the split of blocks, without it, and without a BlockMask."""
    shapes = [(16, S, 16, 64) for S in (1024, 2048, 4096, 8192)] + [(4, 16384, 16, 64), (2, 16384, 16, 128)]
    forms = ("split", "partial", "everywhere")
    return [square(*shape, "causal", form=form) for shape in shapes for form in forms]


def _captured() -> list[Problem]:
    problems = [square(2, 4096, 16, 64, "noop")]
    for variant in ("alibi", "relative_table", "pair_bias"):
        problems += [square(2, 4096, 16, 64, variant, differentiated=x) for x in (False, True)]
    return problems


def _pair_bias() -> list[Problem]:
    """AlphaFold 2 (Jumper et al. 2021, supplementary 1.6): one bias shared by the batch, with its gradient.

    Triangle attention (algorithms 13 and 14) has a row of the pair representation in each batch entry and 4 heads of
    32; row-wise attention of the MSA with pair bias (algorithm 7) has a sequence in each, here 128, and 8 heads of 32.
    """
    triangle, rows = "AlphaFold 2, supplementary, algorithm 13", "AlphaFold 2, supplementary, algorithm 7"
    problems = []
    for S in (384, 768):
        for B, H, source in ((S, 4, triangle), (128, 8, rows)):
            problems.append(square(B, S, H, 32, "noop", source=source))
            problems.append(square(B, S, H, 32, "pair_bias", differentiated=True, source=source))
    return problems


_HEADS: dict[str, Any] = {"Hq": 32, "Hkv": 8, "D": 128}  # of Llama 3 8B


def _decode() -> list[Problem]:
    """One token each; the ragged ones have as many keys in total as the first problem, in a half-empty cache.

    The last position attends to every key, so ALiBi and the soft cap are measured without a mask.
    """
    plain = [Problem(B, 1, S, **_HEADS, variant="noop") for B, S in ((8, 16384), (32, 4096), (1, 65536))]
    plain += [Problem(B, 1, S, 16, 16, 64, "noop") for B, S in ((4, 16384), (16, 4096))]
    ragged = [Problem(32, 1, 16384, **_HEADS, variant="noop", lengths=x) for x in ("even", "uniform", "skewed")]
    scored = [dataclasses.replace(plain[0], variant=variant) for variant in ("alibi", "softcap")]
    return plain + ragged + scored


def _paged() -> list[Problem]:
    return [Problem(32, 1, 4096, **_HEADS, variant="noop", page=page) for page in (64, 16, 1, 256, 128)]


def _mixed() -> list[Problem]:
    """A chunk of 2048 tokens at the end of 8192, with 63 decoding steps after 4096 keys each; and each alone."""
    mixed = Problem(64, 2048, 8192, **_HEADS, variant="causal", lengths="mixed", page=64)
    return [mixed, *parts_of_mixed(mixed)]


def parts_of_mixed(mixed: Problem) -> tuple[Problem, Problem]:
    """The chunk and the decoding steps of a mixed batch, alone."""
    chunk = dataclasses.replace(mixed, B=1, lengths="")
    return chunk, dataclasses.replace(mixed, B=mixed.B - 1, T=1, S=mixed.S // 2, lengths="")


def _cascade() -> list[Problem]:
    """With 32 key heads, loading keys bounds the time; with 8, the GEMMs of the prefix do too."""
    return [
        Problem(64, 1, prefix + suffix, **heads, variant="noop", prefix=prefix, page=64)
        for heads in ({**_HEADS, "Hkv": 32}, _HEADS)
        for prefix, suffix in ((8192, 128), (1024, 1024))
    ]


def _quick() -> list[Problem]:
    return [square(1, 4096, 16, 64, variant, source="a glance") for variant in ("causal", "softcap", "document_mask")]


def _tiny() -> list[Problem]:
    """Small enough for the CPU; for tests."""
    partial = square(1, 256, 2, 16, "causal", form="partial", source="tests")
    differentiated = square(1, 256, (2, 1), 16, "alibi", differentiated=True, source="tests")
    plain = [square(1, 256, 2, 16, variant, source="tests") for variant in ("noop", "softcap")]
    return [*plain, partial, differentiated]


class Suite(NamedTuple):
    """Problems that are measured together.

    Attributes:
      title: For tables.
      problems: Makes the problems.
      peers: Names in `benchmarks.peers.table.PEERS`; the first is the one that targets and ratios are about.
      served: Whether the problems are `Problem.served`, so that there is no backward.
      queue: Whether the wall time of a call in a queue of calls is measured too.
    """

    title: str
    problems: Callable[[], list[Problem]]
    peers: tuple[str, ...]
    served: bool = False
    queue: bool = False


_ALL_HOPPER = ("jflex-mosaic", "jflex-triton", "jax-cudnn", "torch-flex", "sdpa-cudnn", "fa4", "tokamax")
_ALL_DECODE = ("jflex", "jax-cudnn", "sdpa-cudnn", "sdpa-flash", "torch-decode-mask", "torch-decode")
_ALL_SHORT = ("torch-flex", "jax-cudnn", "jax-xla", "sdpa-cudnn", "sdpa-flash", "sdpa-efficient", "tokamax")
_FLEX, _CUDNN = ("jflex", "torch-flex"), ("jflex", "torch-flex", "jax-cudnn")
SUITES = {
    "main": Suite("long sequences, and the heads of Llama 3 8B", _main, (*_CUDNN, "tokamax", "fa4")),
    "hopper": Suite("the Mosaic GPU kernels beside the fastest peers on Hopper", _hopper, _ALL_HOPPER),
    "hopper_short": Suite(
        "short sequences, Mosaic GPU beside Triton", _hopper_short, ("jflex", "jflex-mosaic", "jflex-triton")
    ),
    "paper": Suite(
        "the paper's figure 7 (causal by length, variants at 16k; key and value 256 MiB) and its neighborhoods",
        _paper,
        (*_CUDNN, "sdpa-flash", "sdpa-efficient"),
    ),
    "grid": Suite("every variant at every length, key and value 256 MiB", _grid, _FLEX),
    "heads": Suite("head sizes", _heads, _CUDNN),
    "short": Suite("short sequences", _short, ("jflex", *_ALL_SHORT), queue=True),
    "blocks": Suite("the gain from the BlockMask and from its full blocks, causal", _blocks, _FLEX),
    "captured": Suite("captured arrays with and without their gradient", _captured, _CUDNN),
    "pair_bias": Suite(
        "a pair bias shared by the batch, with its gradient, at AlphaFold 2's sizes",
        _pair_bias,
        (*_CUDNN, "jax-xla", "sdpa-efficient"),
    ),
    "decode": Suite("one token against long keys, and keys of uneven lengths", _decode, _ALL_DECODE, served=True),
    "paged": Suite(
        "one token against pages at random places, beside the same keys contiguous",
        _paged,
        ("jflex", "jflex-contiguous", "flashinfer"),
        served=True,
    ),
    "cascade": Suite(
        "64 sequences that share a prefix: a cascade loads it once, the others once per sequence",
        _cascade,
        ("jflex", "jflex-flat", "jflex-copies"),
        served=True,
    ),
    "mixed": Suite(
        "a chunk of 2048 tokens at the end of 8192 and 63 decoding steps after 4096 keys, in one call and alone",
        _mixed,
        ("jflex",),
        served=True,
    ),
    "quick": Suite("a glance", _quick, _CUDNN),
    "tiny": Suite("for tests", _tiny, (*_FLEX, "jax-xla"), queue=True),
}


def suite(name: str) -> tuple[Problem, ...]:
    """The problems of a suite.

    >>> len(suite("main")), suite("main")[0].name
    (21, 'noop; B 4, H 16, S 16384, D 64')
    """
    return tuple(SUITES[name].problems())

"""What is asked of the kernels for Hopper.

The figures that a target stands on were measured elsewhere, on another H200. A run is judged by its own peers: a kernel
that is asked for 680 TFLOP/s, where elsewhere a peer reached 664, is asked for 680 / 664 of what the peer reaches in
the same run; and a mod for its share of what the kernel reaches without it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from benchmarks.peers import PEERS
from benchmarks.problems import HOPPER_SHAPES, Problem, square, suite
from benchmarks.ratios import Found, figure_of, over, tflops
from benchmarks.records import SuiteResult
from benchmarks.results import Figure
from benchmarks.side import DIRECTIONS
from benchmarks.tables import is_absent

_ELSEWHERE = "TFLOP/s, by figures from elsewhere"


class Target(NamedTuple):
    """A row of what is asked; a pair of numbers is for the shapes of `HOPPER_SHAPES`, TFLOP/s over visited blocks.

    Attributes:
      direction: Of `DIRECTIONS`.
      variants: Of the problems; each must reach it.
      wanted: What to reach.
      peers: What peers reached elsewhere.
      later: What to reach after that.
      base: The variant of whose rate this one is to keep a share; None for those without a score mod or a costly mask.
    """

    direction: str
    variants: tuple[str, ...]
    wanted: tuple[float, float]
    peers: dict[str, tuple[float, float]]
    later: tuple[float, float] | None = None
    base: str | None = None

    @property
    def name(self) -> str:
        """In words."""
        return f"{self.direction} {' and '.join(self.variants)}"


# cuDNN's forward without a mask was seen at 656 and at 702; the middle counts.
TARGETS = (
    Target("forward", ("causal",), (680, 500),
           {"fa4": (630, 515), "jax-cudnn": (664, 485), "tokamax": (696, 451), "torch-flex": (425, 393)}),
    Target("forward", ("noop",), (690, 520),
           {"fa4": (657, 534), "jax-cudnn": (679, 483), "tokamax": (699, 477), "torch-flex": (479, 411)}),
    Target("forward", ("softcap",), (560, 400), {"fa4": (311, 204), "torch-flex": (201, 118)}, base="causal"),
    Target("forward", ("sliding_window",), (560, 420), {"fa4": (534, 389), "torch-flex": (355, 326)}, base="causal"),
    Target("forward", ("alibi", "relative_bias"), (600, 440), {"torch-flex": (385, 324)}, base="causal"),
    Target("forward", ("document_mask",), (540, 400), {"torch-flex": (347, 276)}, base="causal"),
    Target("backward", ("causal",), (520, 430),
           {"fa4": (600, 523), "jax-cudnn": (507, 420), "tokamax": (426, 344), "torch-flex": (389, 308)}, (600, 523)),
    Target("backward", ("noop",), (540, 460),
           {"fa4": (623, 530), "jax-cudnn": (533, 451), "tokamax": (439, 353), "torch-flex": (410, 326)}, (620, 530)),
    Target("backward", ("softcap",), (420, 330), {"fa4": (401, 203), "torch-flex": (201, 126)}, base="causal"),
)  # fmt: skip


def hopper(result: SuiteResult) -> Iterable[Found]:
    """The targets, grouped heads and head sizes."""
    yield from in_table(result)
    for direction in DIRECTIONS:
        grouped = square(2, 8192, (32, 8), 128, "causal")
        ratio = result.ratio(grouped, direction, result.first, "jax-cudnn")
        yield figure_of(f"{direction} {grouped.name}, over {PEERS['jax-cudnn'].title}", [ratio], min, at_least=1.0)
    for direction in DIRECTIONS:
        for D in (96, 192, 256):
            shares = [over(*(tflops(result, square(2, 16384, 16, size, variant), direction) for size in (D, 128)))
                      for variant in ("causal", "noop")]  # fmt: skip
            bar = {"at_least": 0.85} if D < 256 else {}
            yield figure_of(
                f"{direction}, TFLOP/s of D {D} over D 128, the least of noop and causal", shares, min, **bar
            )


def in_table(result: SuiteResult) -> Iterator[Found]:
    """Every figure of the targets."""
    for target in TARGETS:
        for place in range(len(HOPPER_SHAPES)):
            yield from figures(result, target, place).values()


def figures(result: SuiteResult, target: Target, place: int) -> dict[str, Found]:
    """What is asked at a shape: ``wanted``, ``later``, ``share``, and by peer.

    Args:
      result: Of the suite `hopper`.
      target: The row.
      place: Of the shape, in `HOPPER_SHAPES`.
    """
    B, S, H, D = HOPPER_SHAPES[place]
    problems = [square(B, S, H, D, variant) for variant in target.variants]
    rates = [tflops(result, problem, target.direction) for problem in problems]
    name, wanted = f"{target.name}, D {D}", target.wanted[place]
    found = {"wanted": figure_of(name, rates, min, _ELSEWHERE, at_least=wanted)}
    if target.later is not None:
        found["later"] = figure_of(f"{name}, then", rates, min, _ELSEWHERE, at_least=target.later[place])
    for peer, reached in target.peers.items():
        if not is_absent(result, peer):
            ratios = [result.ratio(problem, target.direction, result.first, peer) for problem in problems]
            least = _floored(wanted / reached[place])
            found[peer] = figure_of(f"{name}, over {PEERS[peer].title}", ratios, min, at_least=least)
    if target.base is not None:
        base = next(x for x in TARGETS if (x.direction, x.variants) == (target.direction, (target.base,)))
        whole = tflops(result, square(B, S, H, D, target.base), target.direction)
        least = _floored(wanted / base.wanted[place])
        shares = [over(rate, whole) for rate in rates]
        found["share"] = figure_of(f"{name}, of the rate of {target.base}", shares, min, at_least=least)
    return found


def _floored(x: float) -> float:
    return math.floor(100 * x) / 100


def table(result: SuiteResult) -> list[list[str]]:
    """The targets in short, the header first: what was reached, and in brackets what was asked."""
    peers = [name for name in PEERS if any(name in target.peers for target in TARGETS) and not is_absent(result, name)]
    kinds = {"wanted": "TFLOP/s (asked, by figures from elsewhere)", "later": "(then)", "share": "of causal's rate"}
    kinds |= {name: f"over {PEERS[name].title}" for name in peers}
    rows = [["", *kinds.values()]]
    for place, shape in enumerate(HOPPER_SHAPES):
        for target in TARGETS:
            found = figures(result, target, place)
            cells = [_cell(kind, found.get(kind, "")) for kind in kinds]
            if any(isinstance(figure, Figure) for figure in found.values()):
                rows.append([f"{target.name}, D {shape[-1]}", *cells])
    return rows if len(rows) > 1 else []


def _cell(kind: str, found: Found) -> str:
    if isinstance(found, str):
        return ""
    digits = ".0f" if found.value >= 10 else ".2f"
    asked = f"({found.at_least:{digits}})"
    asked = asked if found.holds else f"**{asked}**"
    return asked if kind == "later" else f"{found.value:{digits}} {asked}"


def hopper_short(result: SuiteResult) -> Iterable[Found]:
    """What jflex chooses by itself is never slower than Triton's kernels: it takes them where they are faster."""
    problems = suite(result.suite)
    for direction in DIRECTIONS:
        chosen = [_over_triton(result, problem, direction) for problem in problems]
        yield figure_of(f"short, {direction} over {PEERS['jflex-triton'].title}, the least of {len(problems)}", chosen,
                        min, at_least=1.0)  # fmt: skip
        named = [result.ratio(problem, direction, "jflex-mosaic", "jflex-triton") for problem in problems]
        yield figure_of(f"short, {direction}, {PEERS['jflex-mosaic'].title} over {PEERS['jflex-triton'].title}, the "
                        f"least of {len([x for x in named if x is not None])}", named, min)  # fmt: skip


def _over_triton(result: SuiteResult, problem: Problem, direction: str) -> float | None:
    """1 where Triton's kernels are what jflex chose: what then differs is chance."""
    record = result.find(problem, result.first, direction)
    if record is not None and record.backend == "triton":
        return 1.0
    return result.ratio(problem, direction, result.first, "jflex-triton")

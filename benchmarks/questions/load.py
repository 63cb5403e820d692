"""Loads of requests on a server or an engine: prompts, arrivals, and the figures of their timings."""

from __future__ import annotations

import dataclasses
import random
import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.questions.question import Measured
from benchmarks.results.schema import Record


@dataclasses.dataclass(frozen=True)
class Load:
    """The requests.

    Attributes:
      requests: How many are measured.
      concurrency: Clients of a closed loop; without `rate`.
      rate: Requests per second on average; None: a closed loop.
      lengths: Pairs of prompt and output tokens, one for each request in turn.
      shared: Tokens at the beginning of all prompts that are the same.
      warm_up: Requests before, which are not measured.
      seed: Of prompts and arrivals.
    """

    requests: int = 128
    concurrency: int = 16
    rate: float | None = None
    lengths: tuple[tuple[int, int], ...] = ((128, 64),)
    shared: int = 0
    warm_up: int = 2
    seed: int = 0

    @property
    def name(self) -> str:
        """Prefix of its records."""
        return f"{self.concurrency} clients" if self.rate is None else f"{self.rate:g} requests/s"

    def prompts(self, vocabulary: int) -> list[tuple[list[int], int]]:
        """Tokens and the number of output tokens of each request, those of the warm-up first.

        >>> [len(tokens) for tokens, _ in Load(requests=2, warm_up=0, lengths=((5, 1), (8, 2))).prompts(100)]
        [5, 8]
        """
        draw = random.Random(self.seed)
        tokens = lambda count: [draw.randrange(vocabulary) for _ in range(count)]
        shared, prompts = tokens(self.shared), []
        for number in range(self.warm_up + self.requests):
            prompt, output = self.lengths[number % len(self.lengths)]
            prompts.append((shared[:prompt] + tokens(max(0, prompt - self.shared)), output))
        return prompts


@dataclasses.dataclass
class Timing:
    """Times of one request, by `time.perf_counter`."""

    sent: float
    arrivals: list[float] = dataclasses.field(default_factory=list)
    tokens: int = 0
    error: str = ""

    @property
    def first(self) -> float:
        """From sending to the first token."""
        return self.arrivals[0] - self.sent

    @property
    def gap(self) -> float:
        """Mean time from one token to the next; servers may send several at once."""
        return (self.arrivals[-1] - self.arrivals[0]) / max(1, self.tokens - 1)


def records_of(timings: Sequence[Timing], load: Load) -> Measured:
    """Rates, times to the first token and between tokens, with their percentiles."""
    good = [timing for timing in timings if not timing.error]
    remarks = sorted({f"a request failed: {timing.error}" for timing in timings if timing.error})
    if not good:
        return Measured([], remarks)
    seconds = max(x.arrivals[-1] for x in good) - min(x.sent for x in timings)
    rounded = lambda x: float(f"{x:.4g}")
    records = [
        Record.single(f"{load.name}: output", rounded(sum(x.tokens for x in good) / seconds), "tokens/s"),
        Record.single(f"{load.name}: requests", rounded(len(good) / seconds), "1/s"),
        Record.single(f"{load.name}: failed", len(timings) - len(good), ""),
    ]
    for name, values in (("first token", [x.first for x in good]), ("between tokens", [x.gap for x in good])):
        records.append(Record.from_values(f"{load.name}: {name}", values, "s"))
        last = statistics.quantiles(values, n=100, method="inclusive")[98] if len(values) > 1 else values[0]
        records.append(Record.single(f"{load.name}: {name}, 99th percentile", rounded(last), "s"))
    return Measured(records, remarks)


def draw_times(timings: Sequence[Timing], load: Load, path: Path) -> None:
    """Draws the distributions of the times of requests."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.5), layout="constrained")
    good = [timing for timing in timings if not timing.error]
    times = {"to the first token": [x.first for x in good], "between tokens": [x.gap for x in good]}
    for axis, (name, values) in zip(figure.subplots(1, 2), times.items(), strict=True):
        ordered = sorted(1000 * value for value in values)
        axis.step(ordered, [100 * (n + 1) / len(ordered) for n in range(len(ordered))], where="post")
        axis.set(xlabel=f"ms {name}", ylabel="% of requests", ylim=(0, 100))
        axis.grid(alpha=0.3)
    figure.suptitle(f"{len(good)} requests, {load.name}")
    figure.savefig(path, dpi=120)

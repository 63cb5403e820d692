"""Loads of requests on a server or an engine: prompts, arrivals, and the figures of their timings."""

import dataclasses
import random
import statistics
from collections.abc import Sequence

from benchmarks.questions.question import Measured
from benchmarks.results.schema import Record


@dataclasses.dataclass(frozen=True)
class Load:
    """The requests."""

    requests: int = 128  # that are measured
    concurrency: int = 16  # clients of a closed loop; without `rate`
    rate: float | None = None  # requests per second on average; None: a closed loop
    lengths: tuple[tuple[int, int], ...] = ((128, 64),)  # prompt and output tokens, one pair for each request in turn
    shared: int = 0  # tokens at the beginning of all prompts that are the same
    warm_up: int = 2  # requests before, which are not measured
    seed: int = 0  # of prompts and arrivals

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


def records_of(timings: Sequence[Timing], load: Load) -> Measured:
    """Rates, times to the first token and mean times from one to the next, with their percentiles.

    Servers may send several tokens at once.
    """
    good = [timing for timing in timings if not timing.error]
    remarks = sorted({f"a request failed: {timing.error}" for timing in timings if timing.error})
    if not good:
        return Measured([], remarks)
    seconds = max(x.arrivals[-1] for x in good) - min(x.sent for x in timings)
    records = [
        Record.single(f"{load.name}: output", sum(x.tokens for x in good) / seconds, "tokens/s"),
        Record.single(f"{load.name}: requests", len(good) / seconds, "1/s"),
        Record.single(f"{load.name}: failed", len(timings) - len(good), ""),
    ]
    first = [x.arrivals[0] - x.sent for x in good]
    between = [(x.arrivals[-1] - x.arrivals[0]) / max(1, x.tokens - 1) for x in good]
    for name, values in (("first token", first), ("between tokens", between)):
        records.append(Record.from_values(f"{load.name}: {name}", values, "s"))
        last = statistics.quantiles(values, n=100, method="inclusive")[98] if len(values) > 1 else values[0]
        records.append(Record.single(f"{load.name}: {name}, 99th percentile", last, "s"))
    return Measured(records, remarks)

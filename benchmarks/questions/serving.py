"""Load on a server: ``python -m benchmarks serving --url http://localhost:8000``, or ``--start`` for one of its own.

Any server of OpenAI's completions API: ``python -m flax_layers.serve``, vLLM, SGLang. Requests arrive in a closed loop
(`--concurrency` clients, each sends its next request when the last one has ended) or at random (`--rate` requests a
second, Poisson: whether the server keeps up or not). Prompts are random tokens, after a prefix that all share, if any;
their lengths are given, or those of the lines of a file. A few requests before warm the server up. With ``--start``
the time from the start of the process to the first token is measured, too.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import functools
import json
import pathlib
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from tqdm import tqdm

from benchmarks.environment import gpu_facts, results_folder
from benchmarks.questions.command import Measured
from benchmarks.questions.started import started
from benchmarks.results import schema
from benchmarks.results.schema import Record

TITLE = "load on a server of OpenAI's completions API"
_TIMEOUT = 600.0


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

    def prompts(self, vocabulary: int) -> list[tuple[list[int], int]]:
        """Tokens and the number of output tokens of each request, those of the warm-up first.

        >>> [len(tokens) for tokens, _ in Load(requests=2, warm_up=0, lengths=((5, 1), (8, 2))).prompts(100)]
        [5, 8]
        """
        draw = random.Random(self.seed)
        tokens = lambda count: [draw.randrange(vocabulary) for _ in range(count)]
        shared, made = tokens(self.shared), []
        for number in range(self.warm_up + self.requests):
            prompt, output = self.lengths[number % len(self.lengths)]
            made.append((shared[:prompt] + tokens(max(0, prompt - self.shared)), output))
        return made


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


async def _ask(session: Any, model: str, prompt: Sequence[int], output: int) -> Timing:
    """Streams one request, greedy, to its last token."""
    body = {"model": model, "prompt": list(prompt), "max_tokens": output, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    found = Timing(time.perf_counter())
    async with session.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            found.error = f"status {answer.status_code}: {(await answer.aread())[:200]!r}"
            return found
        async for line in answer.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                found.error = event["error"]["message"]
            elif event.get("usage"):
                found.tokens = event["usage"]["completion_tokens"]
            elif event["choices"]:
                found.arrivals.append(time.perf_counter())
    if not found.error and (not found.arrivals or found.tokens != output):
        found.error = f"got {found.tokens} tokens, expected {output}"
    return found


async def send(
    url: str,
    load: Load,
    key: str | None = None,
    vocabulary: int = 256,
    report: Callable[[], object] = lambda: None,
    transport: Any = None,
) -> list[Timing]:
    """Puts a load on a server.

    Args:
      url: URL of the server.
      load: The requests.
      key: API key.
      vocabulary: Tokens of prompts are below it.
      report: Called after each request.
      transport: Of httpx, instead of the network.
    """
    import httpx

    headers = {"Authorization": f"Bearer {key}"} if key else {}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=url, headers=headers, timeout=_TIMEOUT, limits=limits, transport=transport
    ) as session:
        answer = await session.get("/v1/models")
        model = answer.raise_for_status().json()["data"][0]["id"]
        prompts = load.prompts(vocabulary)
        for prompt, output in prompts[: load.warm_up]:
            await _ask(session, model, prompt, output)
        draw, free = random.Random(load.seed + 1), asyncio.Semaphore(load.concurrency)

        async def one(prompt: list[int], output: int) -> Timing:
            try:
                return await _ask(session, model, prompt, output)
            except httpx.HTTPError as error:
                return Timing(time.perf_counter(), error=f"{type(error).__name__}: {error}")
            finally:
                report()
                if load.rate is None:
                    free.release()

        asked = []
        for prompt, output in prompts[load.warm_up :]:
            if load.rate is None:
                await free.acquire()
            else:
                await asyncio.sleep(draw.expovariate(load.rate))
            asked.append(asyncio.create_task(one(prompt, output)))
        return await asyncio.gather(*asked)


def records_of(timings: Sequence[Timing], load: Load) -> Measured:
    """Rates, times to the first token and between tokens, with their percentiles.

    Args:
      timings: Of all requests.
      load: That was put on the server.
    """
    good = [timing for timing in timings if not timing.error]
    remarks = sorted({f"a request failed: {timing.error}" for timing in timings if timing.error})
    if not good:
        return [], remarks
    seconds = max(x.arrivals[-1] for x in good) - min(x.sent for x in timings)
    how = f"{load.concurrency} clients" if load.rate is None else f"{load.rate:g} requests/s"
    rate = lambda count: float(f"{count / seconds:.4g}")
    found = [
        Record.single(f"{how}: output", rate(sum(x.tokens for x in good)), "tokens/s"),
        Record.single(f"{how}: requests", rate(len(good)), "1/s"),
        Record.single(f"{how}: failed", len(timings) - len(good), ""),
    ]
    for name, values in (("first token", [x.first for x in good]), ("between tokens", [x.gap for x in good])):
        found.append(Record.of(f"{how}: {name}", values, "s"))
        last = statistics.quantiles(values, n=100, method="inclusive")[98] if len(values) > 1 else values[0]
        found.append(Record.single(f"{how}: {name}, 99th percentile", float(f"{last:.4g}"), "s"))
    return found, remarks


def draw_times(path: pathlib.Path, timings: Sequence[Timing], load: Load) -> None:
    """Draws how the times of requests are distributed."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    good = [timing for timing in timings if not timing.error]
    how = f"{load.concurrency} clients" if load.rate is None else f"{load.rate:g} requests/s"
    for axis, (name, values) in zip(
        axes, (("to the first token", [x.first for x in good]), ("between tokens", [x.gap for x in good])), strict=True
    ):
        ordered = sorted(1000 * value for value in values)
        axis.step(ordered, [100 * (n + 1) / len(ordered) for n in range(len(ordered))], where="post")
        axis.set(xlabel=f"ms {name}", ylabel="% of requests", ylim=(0, 100))
        axis.grid(alpha=0.3)
    figure.suptitle(f"{len(good)} requests, {how}")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _lengths(options: argparse.Namespace) -> tuple[tuple[int, int], ...]:
    if options.lengths is None:
        return ((options.prompt_tokens, options.output_tokens),)
    lines = [line.split() for line in options.lengths.read_text().splitlines() if line.strip()]
    return tuple((int(prompt), int(output)) for prompt, output in lines)


def main(words: Sequence[str] | None = None) -> None:
    """Measures, prints a table, and writes ``serving.json`` and ``serving.png``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks serving", description=(__doc__ or "").split("\n\n")[1])
    add = parser.add_argument
    add("--url", default="http://localhost:8000", help="of the server, without /v1; default: http://localhost:8000")
    add("--key", help="API key")
    add("--start", nargs=argparse.REMAINDER, metavar="OPTION", help="starts flax_layers.serve with what follows")
    add("--requests", type=int, default=128, metavar="N", help="measured requests; default: 128")
    add("--concurrency", type=int, nargs="+", default=[16], metavar="N", help="clients of a closed loop; default: 16")
    add("--rate", type=float, nargs="+", default=[], metavar="R", help="requests a second, Poisson, instead")
    add("--prompt-tokens", type=int, default=128, metavar="N", help="of each prompt; default: 128")
    add("--output-tokens", type=int, default=64, metavar="N", help="of each answer; default: 64")
    add("--lengths", type=pathlib.Path, metavar="FILE", help="lines of two numbers: prompt and output tokens")
    add("--shared", type=int, default=0, metavar="N", help="tokens that all prompts begin with; default: 0")
    add("--vocabulary", type=int, default=256, metavar="N", help="prompts are of tokens below it; default: 256")
    add("--seed", type=int, default=0)
    add("--out", type=pathlib.Path, metavar="DIR", help="default: benchmarks/results/<device>")
    options = parser.parse_args(words)
    if options.start is None:
        _measure(options, options.url, [])
        return
    with started(options.start) as server:
        [first] = asyncio.run(send(server.url, Load(1, lengths=((16, 1),), warm_up=0), options.key))
        seconds = float(f"{first.arrivals[0] - server.begun:.4g}")
        _measure(options, server.url, [Record.single("start to the first token", seconds, "s")])


def _measure(options: argparse.Namespace, url: str, records: list[Record]) -> None:
    for record in records:
        _show(record)
    common = Load(options.requests, lengths=_lengths(options), shared=options.shared, seed=options.seed)
    loads = [dataclasses.replace(common, rate=rate) for rate in options.rate]
    loads = loads or [dataclasses.replace(common, concurrency=clients) for clients in options.concurrency]
    machine = gpu_facts()
    folder = options.out or schema.FOLDER / results_folder(machine.get("device", "cpu"))
    folder.mkdir(parents=True, exist_ok=True)
    remarks: list[str] = []
    for load in loads:
        with tqdm(total=load.requests, unit="request", dynamic_ncols=True, disable=None) as bar:
            report = functools.partial(bar.update, 1)
            timings = asyncio.run(send(url, load, options.key, options.vocabulary, report))
        found, failures = records_of(timings, load)
        records, remarks = [*records, *found], [*remarks, *failures]
        for record in found:
            _show(record)
        draw_times(folder / "serving.png", timings, load)
    print("\n".join(remarks))
    schema.write(folder / "serving.json", records, {"title": TITLE, "machine": machine, "remarks": remarks})


def _show(record: Record) -> None:
    print(f"{record.name:50} {record.value.median:10.4g} {record.unit}")


if __name__ == "__main__":
    main()

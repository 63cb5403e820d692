"""Load on a server: ``python -m benchmarks serving --url http://localhost:8000``, or ``--start`` for one of its own.

Any server of OpenAI's completions API: ``python -m flax_layers.serve``, vLLM, SGLang. Requests arrive in a closed loop
(`--concurrency` clients, each sends its next request when the last one has ended) or at random (`--rate` requests a
second, Poisson: whether the server keeps up or not). Prompts are random tokens, after a prefix that all share, if any;
their lengths are given, or listed in the lines of a file. A few requests before warm the server up. With ``--start``
the time from the start of the process to the first token is measured, too.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.questions.question import Measured
from benchmarks.results.schema import Record

OPTIONS = {
    "url": {"help": "address of the server, without /v1"},
    "key": {"help": "API key"},
    "start": {"nargs": argparse.REMAINDER, "help": "start flax_layers.serve with the options that follow"},
    "requests": {"help": "measured requests"},
    "concurrency": {"help": "clients of a closed loop"},
    "rate": {"type": float, "help": "requests a second of Poisson arrivals, instead of --concurrency"},
    "prompt_tokens": {"help": "tokens of each prompt"},
    "output_tokens": {"help": "tokens of each answer"},
    "lengths": {"type": Path, "metavar": "FILE", "help": "lines of two numbers: prompt and output tokens"},
    "shared": {"help": "tokens that all prompts begin with"},
    "vocabulary": {"help": "number of tokens that prompts are drawn from"},
}
_TIMEOUT = 600.0


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
        """Tokens and the number of output tokens of each request, those of the warm-up first."""
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


@contextlib.contextmanager
def started(options: Sequence[str]) -> Iterator[str]:
    """Runs ``python -m flax_layers.serve`` on a free port, gives its URL when it takes requests, and ends it."""
    command = [sys.executable, "-m", "flax_layers.serve", "--port=0", "--log-level=warning", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            lines = iter(process.stdout.readline, "")
            ready = next(filter(None, (re.match(r"Serving .* at (\S+)", line) for line in lines)), None)
            if ready is None:
                raise RuntimeError(f"The server ended with status {process.wait()}. Its output above says why.")
            yield ready[1]
        finally:
            process.terminate()


async def _ask(session: Any, model: str, prompt: Sequence[int], output: int) -> Timing:
    """Streams one request, greedy, to its last token."""
    body = {"model": model, "prompt": list(prompt), "max_tokens": output, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    timing = Timing(time.perf_counter())
    async with session.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            timing.error = f"status {answer.status_code}: {(await answer.aread())[:200]!r}"
            return timing
        async for line in answer.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                timing.error = event["error"]["message"]
            elif event.get("usage"):
                timing.tokens = event["usage"]["completion_tokens"]
            elif event["choices"]:
                timing.arrivals.append(time.perf_counter())
    if not timing.error and (not timing.arrivals or timing.tokens != output):
        timing.error = f"got {timing.tokens} tokens, expected {output}"
    return timing


async def send(
    url: str, load: Load, key: str | None = None, vocabulary: int = 256, *, begin: float = 0.0, **client: Any
) -> list[Timing]:
    """Puts a load on a server, from `begin` on by `time.perf_counter`; the `client` has more of `httpx.AsyncClient`."""
    import httpx

    client |= {"base_url": url, "timeout": _TIMEOUT, "limits": httpx.Limits(max_connections=None)}
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {key}"} if key else {}, **client) as session:
        answer = await session.get("/v1/models")
        model = answer.raise_for_status().json()["data"][0]["id"]
        prompts = load.prompts(vocabulary)
        for prompt, output in prompts[: load.warm_up]:
            await _ask(session, model, prompt, output)
        await asyncio.sleep(begin - time.perf_counter())
        draw, free = random.Random(load.seed + 1), asyncio.Semaphore(load.concurrency)

        async def one(prompt: list[int], output: int) -> Timing:
            try:
                return await _ask(session, model, prompt, output)
            except httpx.HTTPError as error:
                return Timing(time.perf_counter(), error=f"{type(error).__name__}: {error}")
            finally:
                if load.rate is None:
                    free.release()

        tasks = []
        for prompt, output in prompts[load.warm_up :]:
            if load.rate is None:
                await free.acquire()
            else:
                await asyncio.sleep(draw.expovariate(load.rate))
            tasks.append(asyncio.create_task(one(prompt, output)))
        return await asyncio.gather(*tasks)


def loaded(url: str, load: Load, vocabulary: int, begin: float) -> list[Timing]:
    """Puts a load on a server; a job."""
    return asyncio.run(send(url, load, None, vocabulary, begin=begin))


def serving(
    url: str = "http://localhost:8000",
    key: str | None = None,
    start: Sequence[str] | None = None,
    requests: int = 128,
    concurrency: Sequence[int] = (16,),
    rate: Sequence[float] = (),
    prompt_tokens: int = 128,
    output_tokens: int = 64,
    lengths: Path | None = None,
    shared: int = 0,
    vocabulary: int = 256,
    seed: int = 0,
) -> Iterator[Measured]:
    """Tokens a second, and latencies of the first token and the next ones."""
    pairs = [(prompt_tokens, output_tokens)]
    if lengths is not None:
        lines = [line.split() for line in lengths.read_text().splitlines() if line.strip()]
        pairs = [(int(prompt), int(output)) for prompt, output in lines]
    common = Load(requests, lengths=(*pairs,), shared=shared, seed=seed)
    loads = [dataclasses.replace(common, rate=x) for x in rate]
    loads = loads or [dataclasses.replace(common, concurrency=clients) for clients in concurrency]
    with contextlib.ExitStack() as stack:
        if start is not None:
            begun, url = time.perf_counter(), stack.enter_context(started(start))
            [first] = asyncio.run(send(url, Load(1, lengths=((16, 1),), warm_up=0), key))
            yield Measured([Record.single("start to the first token", first.arrivals[0] - begun, "s")])
        for one in loads:
            yield records_of(asyncio.run(send(url, one, key, vocabulary)), one)

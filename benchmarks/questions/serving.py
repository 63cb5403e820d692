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
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.questions.load import Load, Timing, records_of
from benchmarks.questions.question import Measured
from benchmarks.results.schema import Record

OPTIONS = {
    "url": {"help": "of the server, without /v1"},
    "key": {"help": "API key"},
    "start": {"nargs": argparse.REMAINDER, "help": "starts flax_layers.serve with the options that follow"},
    "requests": {"help": "measured requests"},
    "concurrency": {"help": "clients of a closed loop"},
    "rate": {"type": float, "help": "requests a second, Poisson, instead"},
    "prompt_tokens": {"help": "of each prompt"},
    "output_tokens": {"help": "of each answer"},
    "lengths": {"type": Path, "metavar": "FILE", "help": "lines of two numbers: prompt and output tokens"},
    "shared": {"help": "tokens that all prompts begin with"},
    "vocabulary": {"help": "prompts are of tokens below it"},
}
_TIMEOUT = 600.0


class Started(NamedTuple):
    """A server that runs: its URL, and the start of its process by `time.perf_counter`."""

    url: str
    begun: float


@contextlib.contextmanager
def started(options: Sequence[str]) -> Iterator[Started]:
    """Runs ``python -m flax_layers.serve`` on a free port until it takes requests, and ends it.

    Raises:
      RuntimeError: It has ended before.
    """
    begun = time.perf_counter()
    command = [sys.executable, "-m", "flax_layers.serve", "--port=0", "--log-level=warning", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            lines = iter(process.stdout.readline, "")
            ready = next(filter(None, (re.match(r"Serving .* at (\S+)", line) for line in lines)), None)
            if ready is None:
                raise RuntimeError(f"The server ended with status {process.wait()}. Its output above says why.")
            yield Started(ready[1], begun)
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


async def send(url: str, load: Load, key: str | None = None, vocabulary: int = 256, **client: Any) -> list[Timing]:
    """Puts a load on a server; the `client` has more arguments of `httpx.AsyncClient`."""
    import httpx

    client |= {"base_url": url, "timeout": _TIMEOUT, "limits": httpx.Limits(max_connections=None)}
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {key}"} if key else {}, **client) as session:
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
            url, begun = stack.enter_context(started(start))
            [first] = asyncio.run(send(url, Load(1, lengths=((16, 1),), warm_up=0), key))
            yield Measured([Record.single("start to the first token", first.arrivals[0] - begun, "s")])
        for one in loads:
            yield records_of(asyncio.run(send(url, one, key, vocabulary)), one)

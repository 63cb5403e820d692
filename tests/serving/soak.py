"""A soak of the serving engine: ``python -m tests.serving.soak --cache-dtype float8_e4m3fn --seconds 1200``.

Random requests for a time: prompts of all lengths, shared prefixes, samples of one prompt, penalties, log
probabilities, drafts, aborts, and more of all than the pages hold, so that requests are preempted. Free pages hold NaN.
Outputs of greedy requests come back as prompts, and their tokens must be the most probable ones, to rounding. A line
every half minute tells counts and memory; the exit status is 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import itertools
import random
import resource
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import jax

from flax_layers.sampling import Sampling
from flax_layers.serving import Engine, EngineOptions, Event, QueueFull, Request, Ticket
from flax_layers.serving.device.penalties import Penalties

KINDS = ("greedy", "greedy", "greedy", "sampled", "penalties", "logprobs", "scores", "exclusions")
GAP = 0.25  # in log probability: an output in bfloat16, decoded and as a prompt, is rounded differently
SERVED = EngineOptions(
    max_requests=64, max_step_tokens=1024, num_pages=480, context=4096, cascade_bytes=1_000_000, draft_tokens=4,
    poison=True,
)  # fmt: skip


@dataclasses.dataclass(eq=False)
class Client:
    """The receiver of a request's events."""

    soak: Soak
    request: Request
    kind: str
    abort_after: int | None  # tokens
    rescored: tuple[int, ...] = ()  # the last tokens of the prompt, which an engine sampled before
    tokens: list[int] = dataclasses.field(default_factory=list)
    ended: bool = False

    def __call__(self, event: Event) -> None:
        soak = self.soak
        self.tokens += event.tokens
        logprobs = [x.logprob for x in (*event.logprobs, *event.prompt_logprobs) if x is not None]
        soak.expect(all(-1e4 < x < 1e-3 for x in logprobs), "log probabilities", self.kind, logprobs)
        soak.expect(all(0 <= x < soak.vocabulary for x in event.tokens), "tokens", event.tokens)
        if self.rescored and event.prompt_logprobs:
            scores = [x for x in event.prompt_logprobs[-len(self.rescored) :] if x is not None]
            gap = max(score.top[0][1] - score.logprob for score in scores)
            soak.expect(gap < GAP, "an output is not the most probable one", gap)
            soak.counts["rescored tokens"] += len(scores)
        if event.finish_reason is not None:
            self.ended = True
            self._end(event)

    def _end(self, event: Event) -> None:
        soak = self.soak
        soak.counts[event.finish_reason or ""] += 1
        soak.expect(not event.error, "an error", event.error)
        if event.finish_reason == "length":
            soak.expect(len(self.tokens) == self.request.max_tokens, "output length", len(self.tokens))
            if self.kind == "greedy" and not self.rescored:
                soak.outputs.append((self.request.prompt, tuple(self.tokens)))


class Soak:
    """Random traffic on an engine, whose steps `run` runs."""

    def __init__(self, engine: Engine, seed: int):
        self.engine, self.vocabulary = engine, engine.config.vocabulary
        self.draw = random.Random(seed)
        self.counts: collections.Counter[str] = collections.Counter()
        self.problems: list[str] = []
        self.outputs: collections.deque[tuple[tuple[int, ...], tuple[int, ...]]] = collections.deque(maxlen=16)
        self._prefixes = [self._tokens(engine.context // n) for n in (2, 3, 4, 8, 8)]
        self._live: list[tuple[Client, Ticket]] = []
        self._stopped = threading.Event()

    def expect(self, is_right: bool, *problem: object) -> None:
        if not is_right:
            self.problems.append(" ".join(map(str, problem))[:300])

    def run(self, is_over: Callable[[float], bool], say: Callable[[str], None], every: float = 30.0) -> bool:
        """Sends requests until `is_over` of the seconds, then runs until all have ended; True if nothing was wrong."""
        begin, thread = time.monotonic(), threading.Thread(target=self._submit, daemon=True)
        thread.start()
        try:
            self._step(begin, is_over, say, every)
        finally:
            self._stopped.set()
        thread.join()
        while self.engine.step():
            pass
        self.engine.check()
        stats = self.engine.stats()
        self.expect(stats.used_pages == stats.failures == 0, "pages or steps lost:", stats)
        self.expect(all(client.ended for client, _ in self._live), "a request has not ended")
        say(self.line(time.monotonic() - begin))
        return not self.problems

    def _step(self, begin: float, is_over: Callable[[float], bool], say: Callable[[str], None], every: float) -> None:
        said = begin
        for step in itertools.count():
            now = time.monotonic()
            if not self.engine.step():
                time.sleep(1e-3)
            if step % 50 == 0:
                self.engine.check()
            if now - said > every:
                said = now
                say(self.line(now - begin))
            if is_over(now - begin):
                return

    def line(self, seconds: float) -> str:
        """Counts and memory."""
        stats = {k: v for k, v in dataclasses.asdict(self.engine.stats()).items() if v}
        on_device = (jax.local_devices()[0].memory_stats() or {}).get("bytes_in_use", 0) >> 20
        host = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() >> 20
        problems = f"{len(self.problems)} problems {self.problems[:3]}"
        return f"{seconds:.0f} s: {stats}, {dict(self.counts)}, device {on_device} MiB, host {host} MiB, {problems}"

    def _submit(self) -> None:
        draw = self.draw
        while not self._stopped.is_set():
            self._live = [x for x in self._live if not x[0].ended]
            for _ in range(draw.choice((1, 2, 8, 40)) if len(self._live) < 90 else 0):
                client, samples = self._client(), draw.choice((1, 1, 1, 3))
                clients = [dataclasses.replace(client, tokens=[]) for _ in range(samples)]
                try:
                    tickets = self.engine.submit_all([x.request for x in clients], clients)
                except QueueFull:
                    self.counts["refused"] += len(clients)
                    break
                self.counts["submitted"] += len(clients)
                self._live += zip(clients, tickets, strict=True)
            for client, ticket in self._live:
                if client.abort_after is not None and len(client.tokens) >= client.abort_after:
                    client.abort_after = None
                    ticket.cancel()
            time.sleep(draw.choice((0.002, 0.02, 0.1)))

    def _client(self) -> Client:
        draw, context = self.draw, self.engine.context
        abort_after = draw.randrange(1, 200) if draw.random() < 0.15 else None
        if self.outputs and draw.random() < 0.2:
            prompt, output = self.outputs.popleft()
            if len(prompt) + len(output) < context:
                scored = Request(prompt + output, max_tokens=1, prompt_logprobs=1)
                return Client(self, scored, "greedy", abort_after, output)
        prompt = self._tokens(draw.choice((1, draw.randrange(1, 64), draw.randrange(1, context // 4), context // 2)))
        prompt = draw.choice(self._prefixes) + prompt if draw.random() < 0.4 else prompt
        prompt = (prompt * 4 if draw.random() < 0.2 else prompt)[: 3 * context // 4]  # drafts repeat the prompt
        most = min(draw.choice((1, 16, 64, 256, 700)), context - len(prompt))
        kind = draw.choice(KINDS)
        namespace = draw.choice((None, None, None, "a", "b"))
        request = Request(prompt, max_tokens=most, namespace=namespace, **self._parameters(kind))
        return Client(self, request, kind, abort_after)

    def _parameters(self, kind: str) -> dict[str, object]:
        draw = self.draw
        sampling = Sampling(draw.choice((0.3, 2.0)), draw.choice((0, 40)), 0.9, draw.getrandbits(31))
        return {
            "sampled": {"sampling": sampling},
            "penalties": {"penalties": Penalties(0.5, 0.5, 1.2, ((5, 3.0),))},
            "logprobs": {"logprobs": draw.choice((0, 5))},
            "scores": {"prompt_logprobs": 0},
            "exclusions": {"min_tokens": 1, "bad_words": ((7,), (8, 9)), "stop_tokens": (3,)},
        }.get(kind, {})

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self.draw.randrange(self.vocabulary) for _ in range(count))


def main() -> int:
    from benchmarks.questions.generation import Shape, jax_model

    parser = argparse.ArgumentParser(prog="python -m tests.serving.soak", description=__doc__)
    parser.add_argument("--cache-dtype", help="dtype of the cache; default: the model's")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    model = jax_model(Shape(layers=8, width=2048, mlp_width=5632, head_size=64, vocabulary=32000))
    engine = Engine(model, dataclasses.replace(SERVED, cache_dtype=args.cache_dtype))
    engine.warm_up()
    is_clean = Soak(engine, args.seed).run(lambda seconds: seconds > args.seconds, lambda line: print(line, flush=True))
    return 0 if is_clean else 1


if __name__ == "__main__":
    sys.exit(main())

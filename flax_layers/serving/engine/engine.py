"""The engine: takes requests, runs steps, delivers tokens.

The steps of a request:

1. `Engine.submit` checks it, packs its parameters, compiles its constraint and queues it as a `Sequence`.
2. `Engine.step` hands queued sequences to the scheduler, and ends cancelled ones.
3. `Scheduler.schedule` admits it, allocates its pages through `Pages`, and plans chunks of its tokens.
4. `Dispatcher.run` packs the chunks of all requests into one array, and `Executor.run` dispatches the program.
5. While the device computes, `Engine.step` reads the tokens of the step before: `Sequence.append` checks its ends.
6. `Engine` delivers an `Event` with the new tokens, until one has a finish reason, and calls `after_step` functions.
7. `Scheduler.finish` releases its pages; the prefix cache keeps the full ones.
"""

from __future__ import annotations

import collections
import itertools
import logging
import threading
from collections.abc import Callable, Hashable
from collections.abc import Sequence as Items

import numpy as np

from flax_layers.models import Decoder
from flax_layers.serving.device.executor import Executor
from flax_layers.serving.device.options import EngineOptions
from flax_layers.serving.device.step import TokenLogprobs, read_row
from flax_layers.serving.engine.admission import Admission
from flax_layers.serving.engine.constraints import Guides
from flax_layers.serving.engine.dispatch import Dispatched, Dispatcher
from flax_layers.serving.engine.pages import Pages
from flax_layers.serving.engine.requests import COUNTED, Closed, Deliver, Event, FinishReason, Request, Stats
from flax_layers.serving.engine.scheduler import Chunk, OutOfRoom, Scheduler
from flax_layers.serving.engine.sequence import Sequence, Ticket

_LOG = logging.getLogger(__name__)


class Engine:
    """Generates tokens for many requests at once, from one paged cache.

    The host runs one step ahead: it dispatches a step before it reads the tokens of the one before, which the device
    hands from step to step itself. `submit` and `cancel` may be called from any thread; `step` from one, as by `start`.

    With `draft_tokens`, drafts of each request are verified in the step that follows them, as a tree: see
    `flax_layers.serving.engine.drafts` and `flax_layers.serving.device.speculation`. Tokens stay the same. Drafts need
    known tokens, so the host does not run ahead while a request is speculated. Requests with penalties or log
    probabilities are not.

    A model whose parameters are sharded over a mesh (`from_pretrained(folder, mesh=mesh)`) is served tensor parallel:
    the cache is sharded by KV heads, and so are its scales.

    Args:
        guides: Compiles the constraints of requests; None: there are none. A step with a constrained request has a
            second transfer, a bit for each token and request. Such a request does not run ahead, so its steps are read
            one by one, with all in them.
        executor: Runs the steps; None: in this process.

    Raises:
        ValueError: `context`, `streaming` or `num_pages` is out of range, the model refuses `cache_dtype`, `guides` are
            of another vocabulary, the mesh does not divide the KV heads, or model and options are not batch invariant
            alike, on one device.

    Example:
        >>> from flax import nnx
        >>> from flax_layers.models import LayerConfig, ModelConfig
        >>> config = ModelConfig(
        ...     vocabulary=64, width=16, mlp_width=32, num_heads=2, num_kv_heads=1, head_dim=8,
        ...     layers=(LayerConfig(),), max_positions=64,
        ... )
        >>> options = EngineOptions(max_requests=2, max_step_tokens=16, num_pages=16, page_size=8)
        >>> engine, events = Engine(Decoder(config, rngs=nnx.Rngs(0)), options), []
        >>> ticket = engine.submit(Request((1, 2, 3), max_tokens=4), events.append)
        >>> while engine.step():
        ...     pass
        >>> sum(len(event.tokens) for event in events), events[-1].finish_reason
        (4, 'length')
    """

    def __init__(
        self,
        model: Decoder,
        options: EngineOptions = EngineOptions(),  # noqa: B008  frozen
        guides: Guides | None = None,
        executor: Executor | None = None,
    ):
        self.config, self.options, self._guides = model.config, options, guides
        if guides is not None and guides.vocabulary != model.config.vocabulary:
            raise ValueError(
                f"`guides` must be of the {model.config.vocabulary} tokens of the model. Got {guides.vocabulary}."
            )
        self.context = options.context_of(model.config)
        self._executor = Executor(model, options) if executor is None else executor
        self._dispatcher = Dispatcher(self._executor, options, model.config)
        windows = model.config.windows
        self._pages = Pages(options, model.config, None if None in windows else max(filter(None, windows)))
        self._scheduler = Scheduler(options, self._pages)
        self._admission = Admission(options, model.config, self._pages.longest, guides)
        self._dispatched: Dispatched | None = None
        self._numbers = itertools.count()
        self._counts: collections.Counter[str] = collections.Counter()
        self._changed = threading.Condition()
        self._inbox: list[Sequence] = []
        self._cancelled: list[Sequence] = []
        self._closed = False
        self._thread: threading.Thread | None = None
        self.after_step: list[Callable[[], None]] = []  # called once the events of a step have been delivered

    def submit(self, request: Request, deliver: Deliver) -> Ticket:
        """Takes a request, and returns its ticket. Arguments and errors are as for `submit_all`."""
        [ticket] = self.submit_all([request], [deliver])
        return ticket

    def submit_all(self, requests: Items[Request], deliver: Items[Deliver]) -> list[Ticket]:
        """Takes several requests, or none if it raises. A prompt is computed once for all requests that have it.

        Args:
            requests: Those with one prompt and one namespace are samples of it, and should follow each other.
            deliver: Receives the events of each. The last one of a request has a `finish_reason`.

        Returns:
            A ticket for each, which cancels it.

        Raises:
            ValueError: A request can never run: too long, a token that the model does not know, or a constraint that
                does not compile.
            QueueFull: Too many requests wait.
            Closed: The engine shuts down.
        """
        sequences = [self._admission.sequence(*pair) for pair in zip(requests, deliver, strict=True)]
        prompts: dict[tuple[Items[int], Hashable], list[Sequence]] = {}
        for sequence, request in zip(sequences, requests, strict=True):
            prompts.setdefault((request.prompt, request.namespace), []).append(sequence)
        with self._changed:
            if self._closed:
                raise Closed("The engine takes no more requests: it is shutting down. Send them to another server.")
            self._scheduler.check_room(len(self._inbox), len(sequences))
            for sequence, request in zip(sequences, requests, strict=True):
                samples = prompts[request.prompt, request.namespace]
                sequence.number = next(self._numbers)
                sequence.samples = samples if len(samples) > 1 and request.prompt_logprobs is None else []
            self._inbox += sequences
            self._changed.notify()
        return [Ticket(sequence, self._cancel) for sequence in sequences]

    def step(self) -> bool:
        """Dispatches a step, then reads the one before. A step that fails ends its requests with an error.

        Returns:
            Whether there is more to do.
        """
        self._take_in()
        chunks = self._schedule()
        try:
            following = self._dispatch(chunks) if chunks else None
        except Exception as error:  # any error of the device: its requests fail, and the others must not hang
            self._drain()
            self._fail(chunks, error, is_intact=self._executor.is_intact())
        else:
            self._drain(following)
        self._end_step()
        with self._changed:
            return self._has_work()

    def warm_up(self, report: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Compiles every program that a step may need, so that none is compiled later.

        Args:
            report: Called with the number of compiled programs, and of all, after each. An error of it ends the
                warm-up.
        """
        self._dispatcher.warm_up(report)

    @property
    def is_running(self) -> bool:
        """True while a thread runs the engine, and requests are taken."""
        return self._thread is not None and self._thread.is_alive() and not self._closed

    def stats(self) -> Stats:
        """Counts of the engine at this moment."""
        return Stats(
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting) + len(self._inbox),
            free_pages=self._pages.free,
            cached_pages=self._pages.cached,
            used_pages=self._pages.used,
            **{name: getattr(self._scheduler, name) for name in ("preemptions", "prompt_tokens", "hit_tokens")},
            **{name: self._counts[name] for name in COUNTED},
        )

    def check(self) -> None:
        """Raises RuntimeError unless every page is free, cached or in use, once; for tests and debugging."""
        self._pages.check(self._scheduler.running)

    def start(self) -> None:
        """Runs the engine in a thread of its own, until `stop`."""
        self._thread = threading.Thread(target=self._loop, name="jflex-engine", daemon=True)
        self._thread.start()

    def stop(self, grace: float = 0.0) -> None:
        """Refuses new requests, lets the others go on for `grace` seconds, and then ends them with `cancelled`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            if self._thread is not None:
                self._changed.wait_for(lambda: not self._has_work(), grace)
            self._cancelled += self._unfinished()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        else:
            while self.step():
                pass
        self._executor.close()

    def _loop(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or self._has_work())
                    if not self._has_work():
                        return
                if not self.step():
                    with self._changed:
                        self._changed.notify_all()
        except BaseException as error:
            self._break_down(error)  # a fault of the engine itself; no client may wait for ever
            raise

    def _break_down(self, error: BaseException) -> None:
        with self._changed:
            self._closed = True
            unfinished = self._unfinished()
            self._dispatched = None
            for group in (self._inbox, self._cancelled, self._scheduler.waiting, self._scheduler.running):
                group.clear()
            self._changed.notify_all()
        for sequence in unfinished:
            sequence.finish_reason = "error"
            self._deliver(sequence, Event(finish_reason="error", error=f"The engine broke down: {error!r}"))
        self._end_step()

    def _has_work(self) -> bool:
        scheduler = self._scheduler
        waiting = self._inbox or self._cancelled or scheduler.waiting or scheduler.running
        return bool(waiting or self._dispatched)

    def _unfinished(self) -> list[Sequence]:
        return [*self._inbox, *self._scheduler.waiting, *self._scheduler.running]

    def _cancel(self, sequence: Sequence) -> None:
        with self._changed:
            self._cancelled.append(sequence)
            self._changed.notify_all()

    def _take_in(self) -> None:
        with self._changed:
            arrived, cancelled = [*self._inbox], [*self._cancelled]
            self._inbox.clear()
            self._cancelled.clear()
        self._scheduler.waiting += arrived
        for sequence in cancelled:
            if sequence.finish_reason is None:
                self._end(sequence, "cancelled", "The server is shutting down." if self._closed else "")

    def _schedule(self) -> list[Chunk]:
        if not all(sequence.runs_ahead for sequence in self._scheduler.running):
            self._drain()
            self._follow_constraints()
        try:
            return self._scheduler.schedule(may_preempt=self._dispatched is None)
        except OutOfRoom:
            self._drain()  # requests that end with it release their pages
            return self._scheduler.schedule(may_preempt=True)

    def _drain(self, following: Dispatched | None = None) -> None:
        """Reads the dispatched step, which another one may follow: that fails with it."""
        dispatched, self._dispatched = self._dispatched, following
        try:
            if dispatched is not None:
                self._read(dispatched)
        except Exception as error:  # as in `step`
            self._dispatched = None
            self._fail([chunk for x in (dispatched, following) if x is not None for chunk in x.chunks], error)

    def _follow_constraints(self) -> None:
        """Computes the tokens that may come next, and ends sequences that none may follow."""
        guided = [(x, x.guide) for x in self._scheduler.running if x.guide is not None]
        if self._guides is not None:
            self._guides.allow([guide for _, guide in guided])
        for sequence, guide in guided:
            if guide.error:
                self._end(sequence, "error", f"`constraint` cannot be followed any further: {guide.error}")
            elif guide.is_complete:
                self._end(sequence, "stop")

    def _dispatch(self, chunks: list[Chunk]) -> Dispatched:
        if self.options.poison:
            self._executor.change("poison", self._pages.free_mask())
        dispatched = self._dispatcher.run(chunks)
        self._counts["steps"] += 1
        self._counts["cascade_steps"] += dispatched.program.is_cascade
        return dispatched

    def _read(self, dispatched: Dispatched) -> None:
        """Waits for a step, and delivers its tokens."""
        chunks, program, results = dispatched
        fields = np.asarray(results)  # may raise; then the requests of the step fail
        end = program.shape.rows  # after the rows of requests come the rows of tokens
        for chunk in chunks:
            if chunk.scores:
                chunk.sequence.score(chunk.first, fields[end : end + chunk.count], program.shape.drafts)
            end += chunk.size
        for chunk, row in zip(chunks, fields[: len(chunks)], strict=True):
            sequence = chunk.sequence
            if chunk.samples and sequence.finish_reason is None:
                tokens, logprobs = read_row(row, sequence.top_logprobs, program.shape.drafts)
                self._counts["drafted_tokens"] += len(chunk.draft.tokens)
                self._counts["accepted_tokens"] += len(tokens) - 1
                self._append(sequence, tokens, logprobs)

    def _append(self, sequence: Sequence, tokens: tuple[int, ...], logprobs: TokenLogprobs | None) -> None:
        """Makes a pending token of a sequence known, and those after accepted drafts."""
        reason = None
        with sequence.alone():
            tokens, reason = sequence.append(tokens)
        if sequence.fault is not None:
            self._end(sequence, "error", f"{type(sequence.fault).__name__}: {sequence.fault}", keep=False)
            return
        if reason is not None:
            self._scheduler.finish(sequence, reason)
        elif sequence.lookup is not None:
            self._pages.trim(sequence)
        self._counts["generated_tokens"] += len(tokens)
        of_tokens = () if logprobs is None else (logprobs,) * len(tokens)
        self._deliver(sequence, Event(tokens, of_tokens, reason, prompt_logprobs=sequence.take_scores()))

    def _end(self, sequence: Sequence, reason: FinishReason, error: str = "", *, keep: bool = True) -> None:
        self._scheduler.finish(sequence, reason, keep=keep)
        self._deliver(sequence, Event(finish_reason=reason, error=error))

    def _deliver(self, sequence: Sequence, event: Event) -> None:
        try:
            sequence.deliver(event)
        except Exception:  # any error of the caller's function ends this request alone
            _LOG.exception("Request %d: its events cannot be delivered.", sequence.number)
            if sequence.finish_reason is None:
                self._scheduler.finish(sequence, "error")

    def _end_step(self) -> None:
        for function in self.after_step:
            function()

    def _fail(self, chunks: Items[Chunk], error: Exception, *, is_intact: bool = False) -> None:
        """Ends the requests of failed steps, and computes the others again whose keys may be lost.

        If the device still has its state, only prefixes in the namespaces of the steps may be: chunks share their pages
        before they are written.
        """
        self._counts["failures"] += 1
        for sequence in dict.fromkeys(chunk.sequence for chunk in chunks):
            if sequence.finish_reason is None:
                self._end(sequence, "error", f"{type(error).__name__}: {error}", keep=False)
        namespaces = {chunk.sequence.request.namespace for chunk in chunks} if is_intact else None
        for sequence in self._scheduler.running[::-1]:
            if namespaces is None or sequence.request.namespace in namespaces:
                sequence.pending = 0  # those tokens are sampled again
                self._scheduler.preempt(sequence, keep=False)
        self._pages.clear(namespaces)
        if not is_intact:
            self._executor.reset()

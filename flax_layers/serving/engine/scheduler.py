"""Decides which tokens of which requests a step computes, and owns the pages: host Python, nothing of a device.

Continuous batching with chunked prefill (Orca, Yu et al., OSDI 2022; Sarathi-Serve, Agrawal et al., OSDI 2024): every
decoding request gets its token in each step, and the remaining budget goes to chunks of prompts, in the order of
arrival, and then to drafts. When pages run out, cached prefixes are evicted; then the request that came last is
preempted: its pages are released, and it is computed again later (vLLM, Kwon et al., 2023, section 4.5). Drafts preempt
nobody.
"""

from __future__ import annotations

import bisect
import collections
from typing import NamedTuple

from flax_layers.serving.device.options import EngineOptions
from flax_layers.serving.engine.drafts import Draft
from flax_layers.serving.engine.pages import Pages
from flax_layers.serving.engine.requests import FinishReason, QueueFull
from flax_layers.serving.engine.sequence import PageCopy, Sequence


class Chunk(NamedTuple):
    """Consecutive tokens of one sequence, for one step."""

    sequence: Sequence
    first: int  # position of the first token
    # number of tokens. 0 for a sample of a prompt that the chunk before completes: its next token is sampled from the
    # same logits
    count: int
    samples: bool  # whether they end the sequence, so that the next token is sampled
    draft: Draft = Draft()  # drafted tokens after them, to be verified
    copies: tuple[PageCopy, ...] = ()  # pages that are copied before the step; if there are no tokens, after it

    @property
    def size(self) -> int:
        """Tokens to compute, drafts included."""
        return self.count + len(self.draft.tokens)

    @property
    def scores(self) -> bool:
        """True if log probabilities of tokens of its prompt are computed from its tokens."""
        request = self.sequence.request
        return request.prompt_logprobs is not None and self.first + 1 < len(request.prompt)


class OutOfRoom(Exception):
    """A running sequence needs a page, and only a preemption can free one."""


class Scheduler:
    """The waiting and running sequences, and their pages."""

    def __init__(self, options: EngineOptions, pages: Pages):
        self._options = options
        self._pages = pages
        self._slots = list(range(options.max_requests))[::-1]
        self.waiting: collections.deque[Sequence] = collections.deque()  # in the order of service
        self.running: list[Sequence] = []  # sequences that have pages, in the order of arrival
        self.preemptions = 0  # how many times a sequence lost its pages
        self.prompt_tokens = 0  # of the prompts that were admitted
        self.hit_tokens = 0  # of prompts, from the prefix cache, or computed by another sample of the prompt
        self._lacks_pages = False  # whether the first one that waits found no pages

    def check_room(self, known: int, arriving: int) -> None:
        """Raises QueueFull if more requests would wait than may; from any thread.

        A request that can start at once does not wait. The `known` ones were taken, and are not in `waiting` yet.
        """
        options = self._options
        free = 0 if self._lacks_pages else options.max_requests - len(self.running)
        waiting = len(self.waiting) + known - free
        if waiting + arriving <= options.max_waiting:
            return
        most = options.max_requests + options.max_waiting
        remedy = "Try again later" if arriving <= most else f"Ask for at most {most} samples"
        raise QueueFull(f"{max(0, waiting)} requests wait, and `max_waiting` is {options.max_waiting}. {remedy}.")

    def schedule(self, *, may_preempt: bool) -> list[Chunk]:
        """Plans a step, and counts its tokens as computed; returns a chunk for each sequence that takes part.

        With `may_preempt`, a sequence may lose its pages: only while no dispatched step is unread, since the tokens of
        a sequence must be known to compute it again. Without it, OutOfRoom is raised if pages run out. Then nothing has
        been planned: read the dispatched steps and call again.
        """
        decoding = self._make_room(may_preempt)
        chunks = [self._chunk(sequence, 1) for sequence in decoding]
        budget = self._options.max_step_tokens - len(chunks)
        reading = [x for x in self.running if x.missing > 1 and not x.is_done]
        for sequence in reading:
            budget -= self._add_chunk(chunks, sequence, budget)
        if reading and not chunks:  # with `streaming`, prompts get their pages chunk by chunk
            if not may_preempt:
                raise OutOfRoom
            self.preempt(self.running[-1])
            return self.schedule(may_preempt=True)
        self._lacks_pages = False
        while budget and self.waiting and self._slots:
            sequence = self.waiting[0]
            if not self._admit(sequence, decoding):
                self._lacks_pages = True
                break
            budget -= self._add_chunk(chunks, sequence, budget)
        for row in range(len(decoding)):
            chunks[row] = self._with_draft(chunks[row], budget)
            budget -= len(chunks[row].draft.tokens)
        return chunks

    def finish(self, sequence: Sequence, reason: FinishReason, *, keep: bool = True) -> None:
        """Ends a waiting or running sequence; with `keep`, the prefix cache may keep its full pages."""
        sequence.finish_reason = reason
        if sequence.slot is None:
            self.waiting.remove(sequence)
        else:
            self._release(sequence, keep=keep)

    def preempt(self, sequence: Sequence, *, keep: bool = True) -> None:
        """Takes the pages of a running sequence without pending tokens; it is the next one to be admitted.

        With `keep`, the prefix cache may keep computed pages until other sequences need them.
        """
        assert not sequence.pending
        self._release(sequence, keep=keep)
        sequence.computed = 0
        self.waiting.appendleft(sequence)
        self.preemptions += 1

    def _make_room(self, may_preempt: bool) -> list[Sequence]:
        """The decoding sequences, each with a page for its token; the oldest ones come first."""
        decoding: list[Sequence] = []
        for sequence in list(self.running):
            if sequence.slot is None or sequence.missing != 1 or sequence.is_done:
                continue
            while not self._pages.extend(sequence):
                if not may_preempt:
                    raise OutOfRoom
                last = self.running[-1]
                self.preempt(last)
                if last is sequence:
                    break
            else:
                decoding.append(sequence)
        return decoding

    def _admit(self, sequence: Sequence, decoding: list[Sequence]) -> bool:
        """Lets the first sequence that waits run, if it gets its pages and one is left for each that runs."""
        samples = [x for x in sequence.samples if x in decoding]  # earlier steps have written their prompt
        if not self._pages.begin(sequence, samples, spare=len(self.running)):
            return False
        self.waiting.popleft()
        self._enter(sequence)
        return True

    def _admit_samples(self, chunks: list[Chunk]) -> None:
        """Admits the other samples of a prompt that the last chunk completes. They have no tokens to compute."""
        first = chunks[-1].sequence
        if not chunks[-1].samples or first.generated > 1:
            return
        while self.waiting and self._slots and self.waiting[0] in first.samples and not self.waiting[0].generated:
            if not self._pages.fork(self.waiting[0], first, spare=len(self.running)):
                return
            sequence = self.waiting.popleft()
            self._enter(sequence)
            chunks.append(self._chunk(sequence, 0))

    def _enter(self, sequence: Sequence) -> None:
        if sequence.hit is None:
            sequence.hit = sequence.computed
            self.prompt_tokens += len(sequence.request.prompt)
            self.hit_tokens += sequence.hit
        sequence.slot = self._slots.pop()
        bisect.insort(self.running, sequence, key=lambda x: x.number)

    def _add_chunk(self, chunks: list[Chunk], sequence: Sequence, budget: int) -> int:
        if not budget:
            return 0
        self._pages.skip_cached(sequence)
        count = self._pages.room(sequence, min(budget, sequence.missing), spare=len(self.running) - 1)
        if count:
            chunks.append(self._chunk(sequence, count))
            self._admit_samples(chunks)
        return count

    def _chunk(self, sequence: Sequence, count: int) -> Chunk:
        chunk = Chunk(sequence, sequence.computed, count, count == sequence.missing, copies=sequence.copies)
        sequence.copies = ()
        sequence.computed += count
        sequence.pending += chunk.samples
        if count > 1:
            self._pages.share(sequence)
        return chunk

    def _with_draft(self, chunk: Chunk, budget: int) -> Chunk:
        """A chunk of one token with drafts after it, as many as there is room for."""
        sequence = chunk.sequence
        if sequence.lookup is None:
            return chunk
        # Before the last token that it may generate: so drafts are within the context, too.
        most = min(self._options.draft_tokens, budget, sequence.limit - sequence.generated)
        draft = sequence.draft(most)
        return chunk._replace(draft=draft.first(self._pages.extend_for_drafts(sequence, len(draft.tokens))))

    def _release(self, sequence: Sequence, *, keep: bool) -> None:
        self._pages.end(sequence, keep=keep)
        self.running.remove(sequence)
        assert sequence.slot is not None
        self._slots.append(sequence.slot)
        sequence.slot, sequence.is_edited = None, False

"""Dispatches the chunks of a step as a program on the device, and compiles all programs ahead of time."""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Int32

from flax_layers.models import ModelConfig
from flax_layers.nnx import SharedPrefix
from flax_layers.serving.device.executor import Executor
from flax_layers.serving.device.options import EngineOptions, Program
from flax_layers.serving.device.penalties import Penalties, pack_penalties
from flax_layers.serving.engine.cascades import NO_PREFIX, Cascades
from flax_layers.serving.engine.packing import pack, pack_allowed, pack_copies, pack_following
from flax_layers.serving.engine.scheduler import Chunk
from flax_layers.serving.engine.sequence import PageCopy
from jflex.types import AnyArray

Inputs = tuple[Int32[AnyArray, " words"], Program]
"""The packed inputs of a step without requests, and its program."""


class Dispatched(NamedTuple):
    """A step on its way: its chunks, its program, and its results."""

    chunks: list[Chunk]
    program: Program
    fields: Array


class Dispatcher:
    """Chooses the program of a step, packs its numbers, and calls the executor."""

    def __init__(self, executor: Executor, options: EngineOptions, config: ModelConfig):
        self._executor, self._options, self._config = executor, options, config
        self._context = options.context_of(config)
        self._cascades = Cascades(options, executor.token_bytes)
        can_share = None in config.windows and not (options.streaming or options.batch_invariant or config.latent)
        self._cascade_shapes = self._cascades.shapes(options.shapes(config)) if can_share else []

    def run(self, chunks: list[Chunk]) -> Dispatched:
        """Dispatches a step of at least one chunk. Its results are on their way to the host."""
        self._write_penalties(chunks)
        if any(chunk.samples and chunk.sequence.is_limited for chunk in chunks):
            self._allow(chunks)
        chunks, program, shared = self._choose_program(chunks)
        self._copy_pages([pair for chunk in chunks if chunk.count for pair in chunk.copies])
        fields = self._executor.run(self.packed(chunks, program, shared), program)
        self._copy_pages([pair for chunk in chunks if not chunk.count for pair in chunk.copies])
        fields.copy_to_host_async()
        return Dispatched(chunks, program, fields)

    def packed(
        self, chunks: list[Chunk], program: Program, shared: SharedPrefix = NO_PREFIX
    ) -> Int32[np.ndarray, " words"]:
        """Packs a step; see `pack`."""
        words = pack(chunks, program.shape, self._options.max_requests, shared)
        return np.concatenate([words, pack_following(chunks, program.shape.tokens)]) if program.is_scoring else words

    def warm_up(self, report: Callable[[int, int], None]) -> None:
        """Compiles every program that a step may need; see `warm_up`."""
        self._begin_penalties(Penalties(), 0, [], 0)
        self._allow([])
        self._copy_pages([(0, -1)])
        programs = [(shape, False) for shape in self._options.shapes(self._config)]
        programs += [(shape, True) for shape in self._cascade_shapes]
        kinds = (False,) if self._options.batch_invariant else (True, False)
        programs = [Program(shape, greedy, cascade) for shape, cascade in programs for greedy in kinds]
        programs += [Program(shape, is_scoring=True) for shape in self._options.scoring_shapes(self._config)]
        warm_up(self._executor, [(self.packed([], program), program) for program in programs], report)

    def _write_penalties(self, chunks: list[Chunk]) -> None:
        """Writes the penalties of sequences that the device does not know yet in their slots."""
        for sequence, *_ in chunks:
            if not sequence.is_edited and sequence.request.penalties:
                assert sequence.slot is not None
                prompt = len(sequence.request.prompt)
                self._begin_penalties(sequence.request.penalties, sequence.slot, sequence.tokens, prompt)
                sequence.is_edited = True

    def _choose_program(self, chunks: list[Chunk]) -> tuple[list[Chunk], Program, SharedPrefix]:
        """The chunks in the order of their rows, their program, and the prefix that the first rows share."""
        tokens, pages = sum(chunk.size for chunk in chunks), max(len(chunk.sequence.pages) for chunk in chunks)
        if any(chunk.scores for chunk in chunks):
            holds = lambda shape: shape.tokens >= tokens and shape.pages >= pages
            scoring = next(filter(holds, self._options.scoring_shapes(self._config)))
            return chunks, Program(scoring, is_scoring=True), NO_PREFIX
        drafts, forks = any(chunk.draft.tokens for chunk in chunks), not all(chunk.count for chunk in chunks)
        shape = self._options.shape_for(tokens, len(chunks), pages, self._config, drafts=drafts, forks=forks)
        may_cascade = shape in self._cascade_shapes and all(chunk.size == 1 for chunk in chunks)
        chunks, shared = self._cascades.arrange(chunks) if may_cascade else (chunks, NO_PREFIX)
        is_greedy = not self._options.batch_invariant and all(chunk.sequence.request.is_greedy for chunk in chunks)
        return chunks, Program(shape, is_greedy, shared is not NO_PREFIX), shared

    def _begin_penalties(self, penalties: Penalties, slot: int, tokens: Sequence[int], prompt: int) -> None:
        self._executor.change("penalties", pack_penalties(penalties, slot, tokens, prompt, self._context))

    def _allow(self, chunks: list[Chunk]) -> None:
        """Writes the tokens that constraints allow: a second transfer, in steps that have any."""
        self._executor.change("allowed", pack_allowed(chunks, self._options.max_requests, self._config.vocabulary))

    def _copy_pages(self, copies: list[PageCopy]) -> None:
        for words in pack_copies(copies):
            self._executor.change("copies", words)


def warm_up(executor: Executor, steps: Sequence[Inputs], report: Callable[[int, int], None]) -> None:
    """Compiles programs, as many at once as there are CPUs, then runs each once.

    They are lowered one after the other, since that is Python; XLA compiles without the GIL. `report` is called after
    each program with the number of compiled programs, and of all. An error of it ends the warm-up.
    """
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        try:
            lowered = (executor.lower(*step) for step in steps)
            compiling = [pool.submit(x.compile) for x in lowered if x is not None]
            for done, future in enumerate(concurrent.futures.as_completed(compiling), 1):
                future.result()
                report(done, len(steps))
        finally:
            pool.shutdown(cancel_futures=True)
    for done, step in enumerate(steps, 1):
        jax.block_until_ready(executor.run(*step))
        if not compiling:
            report(done, len(steps))

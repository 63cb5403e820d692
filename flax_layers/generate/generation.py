"""Generates several sequences in one batch, and streams them in pieces."""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from flax_layers.generate.batch import Batch, check_batch, check_cache
from flax_layers.generate.steps import NO_TOKEN, Rules, State, make_programs
from flax_layers.models import Decoder
from flax_layers.models.cache_dtype import check_cache_dtype
from flax_layers.models.form import flatten_model
from flax_layers.sampling import Sampling, SamplingBatch, checked_integer

FinishReason = Literal["stop", "length"]
"""`stop`: a stop token was generated. `length`: `max_tokens` or the model's last position was reached."""

Tokens = Int32[np.ndarray, "B steps"]

CHUNK = 8
"""Decoding steps in one compiled call, whose tokens are streamed together. A call runs all of them."""


class Piece(NamedTuple):
    """New tokens of one sequence.

    Attributes:
        row: Index of the prompt.
        tokens: The tokens, without a stop token.
        finish_reason: None until the sequence is complete.
    """

    row: int
    tokens: list[int]
    finish_reason: FinishReason | None


@dataclasses.dataclass(frozen=True)
class Result:
    """The continuation of one prompt.

    Attributes:
        tokens: All new tokens, without a stop token.
        finish_reason: Why the sequence ended.
    """

    tokens: list[int]
    finish_reason: FinishReason


@dataclasses.dataclass
class Speed:
    """Tokens of all sequences, and the time to compute them, not counting the time of the consumer.

    Attributes:
        prompt_tokens: Tokens read by prefill, without padding.
        tokens: Tokens generated so far, stop tokens included.
        first_tokens: Tokens chosen by prefill, one for each sequence that it read.
        compile_seconds: Time to compile the programs.
        prefill_seconds: Time to read the prompts and choose the first tokens.
        decode_seconds: Time to generate all other tokens.
    """

    prompt_tokens: int
    rows: int
    tokens: int = 0
    first_tokens: int = 0
    compile_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens per second."""
        return self.prompt_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_rate(self) -> float:
        """Tokens per second of decoding steps; 0 if there were none."""
        return (self.tokens - self.first_tokens) / self.decode_seconds if self.decode_seconds else 0.0


class Generation(Iterator[Piece]):
    """A running generation. Iterate over it to stream pieces; `results` runs it to the end.

    While you process a piece, the device computes the next one.

    Args:
        max_tokens: See `generate`. It determines the capacity of the cache.
        chunk: Decoding steps in one compiled call.
        kind: Kind and dtype of the cache, as `cache` and `dtype`.

    Attributes:
        speed: Tokens and seconds so far.
    """

    def __init__(self, model: Decoder, batch: Batch, max_tokens: int, chunk: int, **kind: str | None):
        self._batch = batch
        self._tokens: list[list[int]] = [[] for _ in batch.prompts]
        self._reasons: list[FinishReason | None] = [None] * len(batch.prompts)
        self.speed = Speed(0, len(batch.prompts))
        self._pieces = self._run(model, max_tokens, chunk, kind)

    def __next__(self) -> Piece:
        return next(self._pieces)

    def results(self) -> list[Result]:
        """Runs the generation to the end. The results include the pieces that were already streamed."""
        for _ in self:
            pass
        pairs = zip(self._tokens, self._reasons, strict=True)
        return [Result(tokens, reason) for tokens, reason in pairs if reason is not None]

    def _run(self, model: Decoder, max_tokens: int, chunk: int, kind: dict[str, str | None]) -> Iterator[Piece]:
        """Runs one batch for each set of rotary factors; LongRoPE has two.

        A sequence that outgrows the first set is read again, since the keys in its cache are rotated with it.
        """
        for limit in model.config.context_limits:
            lengths = [len(p) + len(written) for p, written in zip(self._batch.prompts, self._tokens, strict=True)]
            rows = [row for row, n in enumerate(lengths) if n <= limit and self._reasons[row] is None]
            if rows:
                yield from self._run_batch(model, rows, limit, max_tokens, chunk, kind)

    def _run_batch(
        self, model: Decoder, rows: list[int], limit: int, max_tokens: int, chunk: int, kind: dict[str, str | None]
    ) -> Iterator[Piece]:
        """Continues some rows until they end, or need more than `limit` positions."""
        batch = self._batch.continued(rows, self._tokens, limit)
        parameters, form = flatten_model(model)
        programs = make_programs(form)
        rules = Rules(
            SamplingBatch.from_requests(batch.sampling),
            jnp.asarray(batch.max_tokens, jnp.int32),
            jnp.asarray(batch.stop_tokens, jnp.int32),
        )
        prompts, options = (parameters, *batch.padded(limit), rules), {**kind, "room": batch.room(max_tokens, limit)}
        self.speed.compile_seconds += programs.compile(programs.prefill, *prompts, **options)
        started = time.perf_counter()
        state = programs.prefill(*prompts, **options)
        first = np.asarray(state.token)[:, None]
        self.speed.prefill_seconds += time.perf_counter() - started
        self.speed.prompt_tokens += sum(map(len, batch.prompts))
        self.speed.first_tokens += len(rows)
        remaining = dict(zip(rows, batch.max_tokens, strict=True))
        yield from self._take(remaining, first)
        if any(remaining.values()):
            self.speed.compile_seconds += programs.compile(programs.write_chunk, parameters, state, rules, steps=chunk)
            write = lambda state: programs.write_chunk(parameters, state, rules, steps=chunk)
            yield from self._decode(write, state, remaining, chunk)

    def _decode(
        self, write: Callable[[State], tuple[State, Array]], state: State, remaining: dict[int, int], chunk: int
    ) -> Iterator[Piece]:
        """Runs chunks of decoding steps. The next chunk is dispatched before the current one is read.

        A thread copies chunks to the host, in their order. The seconds of a chunk count from its dispatch, or from the
        end of the chunk before it if that is later; so the time of the caller meanwhile does not count.
        """
        copy = lambda chunk: (np.asarray(chunk), time.perf_counter())
        chunks, copied = -(-max(remaining.values()) // chunk), 0.0
        pending: collections.deque[tuple[float, Future[tuple[Tokens, float]]]] = collections.deque()
        with ThreadPoolExecutor(1) as thread:
            while any(remaining.values()):
                while chunks and len(pending) < 2:
                    dispatched = time.perf_counter()
                    state, written = write(state)
                    pending.append((dispatched, thread.submit(copy, written)))
                    chunks -= 1
                dispatched, copying = pending.popleft()
                begun, (tokens, copied) = max(dispatched, copied), copying.result()
                self.speed.decode_seconds += copied - begun
                yield from self._take(remaining, tokens)
        jax.block_until_ready(state.ended)  # the chunk after the last one that was read

    def _take(self, remaining: dict[int, int], chunk: np.ndarray) -> list[Piece]:
        """The pieces of a chunk. `remaining` holds the tokens that each row may still get, and is updated."""
        pieces: list[Piece] = []
        for row, tokens in zip(remaining, chunk.tolist(), strict=True):
            if remaining[row]:
                tokens = [token for token in tokens if token != NO_TOKEN]
                pieces.append(self._piece(row, tokens))
                remaining[row] = 0 if pieces[-1].finish_reason else remaining[row] - len(tokens)
        return pieces

    def _piece(self, row: int, tokens: list[int]) -> Piece:
        self.speed.tokens += len(tokens)
        if tokens and tokens[-1] in self._batch.stop_tokens:
            self._reasons[row] = "stop"
            tokens = tokens[:-1]
        elif len(self._tokens[row]) + len(tokens) == self._batch.max_tokens[row]:
            self._reasons[row] = "length"
        self._tokens[row] += tokens
        return Piece(row, tokens, self._reasons[row])


def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int = 256,
    sampling: Sampling | Sequence[Sampling] = Sampling(),  # noqa: B008  frozen
    cache: str = "dense",
    cache_dtype: str | None = None,
    stop_tokens: Sequence[int] | None = None,
    chunk: int = CHUNK,
) -> Generation:
    """Continues prompts in one batch.

    Two programs are compiled: prefill, and a loop of decoding steps. Prompts and the capacity of the cache are padded
    to buckets (`flax_layers.generate.batch.bucket`). Prompts in the same bucket do not recompile, nor do new seeds,
    stop tokens or values of temperature, top-k and top-p. After all sequences have ended, the device finishes at most
    two chunks.

    Args:
        prompts: Tokens of each prompt, at least one. Lengths may differ.
        max_tokens: Maximum number of new tokens of each sequence, which also ends at the model's last position.
        sampling: Sampling parameters, one for all prompts or one for each. Default: greedy.
        cache: ``"dense"``: each sequence has a row with room for the longest. ``"paged"``: each has pages.
        cache_dtype: Dtype of paged keys and values: ``int8``, ``float8_e4m3fn`` or ``float8_e5m2``, with a scale for
            each token and head; of latent vectors ``float8_e4m3fn``. Default: the dtype of the model.
        stop_tokens: Tokens that end a sequence. Default: the stop tokens of the model's configuration.
        chunk: Decoding steps in one compiled call, whose tokens are streamed together.

    Returns:
        An iterator over pieces; its `results()` returns all tokens.

    Raises:
        TypeError: Tokens or numbers are not integers.
        ValueError: A prompt is empty, too long, or has tokens outside the vocabulary; a parameter is out of range; or
            the cache or the model refuses `cache_dtype`.

    Example:
        >>> from flax import nnx
        >>> from flax_layers.models import LayerConfig, ModelConfig
        >>> config = ModelConfig(
        ...     vocabulary=64, width=16, mlp_width=32, num_heads=2, num_kv_heads=1, head_dim=8,
        ...     layers=(LayerConfig(),), max_positions=64,
        ... )
        >>> model = Decoder(config, rngs=nnx.Rngs(0))
        >>> for piece in generate(model, [[1, 2, 3]], max_tokens=5, chunk=2):
        ...     print(len(piece.tokens), piece.finish_reason)
        1 None
        2 None
        2 length
    """
    batch = check_batch(model.config, prompts, max_tokens, sampling, stop_tokens)
    check_cache(cache, cache_dtype)
    check_cache_dtype(cache_dtype, model)
    if checked_integer("chunk", chunk) < 1:
        raise ValueError(f"`chunk` must be at least 1. Got {chunk}. The default is {CHUNK}.")
    return Generation(model, batch, int(max_tokens), int(chunk), cache=cache, dtype=cache_dtype)

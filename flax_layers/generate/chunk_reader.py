"""Reads chunks of tokens from the device, and measures how long it took to compute them."""

from __future__ import annotations

import collections
import time
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import numpy as np
from jaxtyping import Array, Int32

Tokens = Int32[np.ndarray, "B steps"]


class ChunkReader:
    """Copies chunks to the host in a thread of its own, in the order in which they are pushed.

    The seconds of a chunk count from its dispatch, or from the end of the chunk before it if that is later, to the end
    of its copy. What the caller does meanwhile does not count.

    Example:
        >>> import jax.numpy as jnp
        >>> with ChunkReader() as reader:
        ...     reader.push(jnp.array([[1, 2]]), time.perf_counter())
        ...     tokens, seconds = reader.pop()
        >>> tokens.tolist(), 0 <= seconds < 60
        ([[1, 2]], True)
    """

    def __init__(self):
        self._thread = ThreadPoolExecutor(1)
        self._pending: collections.deque[Future[tuple[Tokens, float]]] = collections.deque()
        self._copied = 0.0

    def __enter__(self) -> ChunkReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._thread.shutdown()

    def __len__(self) -> int:
        """Chunks that have been pushed and not popped."""
        return len(self._pending)

    def push(self, chunk: Int32[Array, "B steps"], dispatched: float) -> None:
        """Begins to copy a chunk.

        Args:
            chunk: On the device; it need not be computed yet.
            dispatched: When its program was called, by `time.perf_counter`.
        """
        self._pending.append(self._thread.submit(self._copy, chunk, dispatched))

    def pop(self) -> tuple[Tokens, float]:
        """Waits for the oldest chunk.

        Returns:
            Its tokens, and its seconds.
        """
        return self._pending.popleft().result()

    def _copy(self, chunk: Int32[Array, "B steps"], dispatched: float) -> tuple[Tokens, float]:
        tokens = np.asarray(chunk)
        begun, self._copied = max(dispatched, self._copied), time.perf_counter()
        return tokens, self._copied - begun

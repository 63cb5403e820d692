"""How often XLA compiles."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"


class Count:
    """Programs compiled so far."""

    programs: int = 0


@contextmanager
def counted() -> Iterator[Count]:
    """Counts the programs that are compiled inside of the block.

    >>> import jax.numpy as jnp
    >>> with counted() as count:
    ...     function = jax.jit(lambda x: x * 3.25)
    ...     three, four = function(jnp.float32(3)), function(jnp.float32(4))
    >>> count.programs > 0
    True
    """
    count, open_ = Count(), [True]

    def listen(event: str, duration: float, **_) -> None:
        del duration
        if open_ and event == _EVENT:
            count.programs += 1

    jax.monitoring.register_event_duration_secs_listener(listen)  # JAX has no public way to remove one
    try:
        yield count
    finally:
        open_.clear()

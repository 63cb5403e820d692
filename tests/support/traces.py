"""How often JAX traces a function: once for each program that it compiles of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Traced:
    """A function for `jax.jit` that counts its traces.

    The `_cache_size` of a jitted function tells nothing in a long run: it is 0 once the cache that all functions of a
    process share is full (8,192 of them, JAX 0.10.2).
    """

    def __init__(self, function: Callable[..., Any]):
        self.function = function
        self.count = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return self.function(*args, **kwargs)

"""Tracing kernels apart from the settings of the caller."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax

from jflex._jax.primitive import no_mesh

_P = ParamSpec("_P")
_R = TypeVar("_R")


def isolated_trace(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Traces kernels and programs apart from the caller's settings.

    That is without ``jax_enable_x64``, which would give Python numbers in them 64 bits, and outside the mesh of an
    enclosing `jax.shard_map`, which would put sharding annotations into derivatives.
    """

    @functools.wraps(function)
    def traced(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with jax.enable_x64(False), no_mesh():
            return function(*args, **kwargs)

    return traced

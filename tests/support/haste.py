"""How XLA compiles what tests run: in haste, but for what shall be compiled as users compile it."""

import contextlib
import os
from collections.abc import Iterator

import jax

_SETTING = "jax_disable_most_optimizations"


def begin() -> None:
    """Compiles in haste from now on, also in the processes that tests start.

    Half the time; a random number of `jax.random.normal` takes 0.06 s to compile instead of 0.8 s.
    """
    os.environ[_SETTING.upper()] = "1"
    jax.config.update(_SETTING, True)


@contextlib.contextmanager
def compiled_in_haste(wanted: bool) -> Iterator[None]:
    """Compiles without most of XLA's optimizations, or with them: as users do."""
    before = jax.config.read(_SETTING)
    jax.config.update(_SETTING, wanted)
    try:
        yield
    finally:
        jax.config.update(_SETTING, before)

"""Pages and examples run as users run them: with JAX's own promotion."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True)
def _defaults_of_jax() -> Iterator[None]:
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield

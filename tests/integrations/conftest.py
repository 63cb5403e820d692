"""Settings of the frameworks: they promote dtypes and ranks, and warn of their own dependencies."""

import os
import warnings
from collections.abc import Iterator

import jax
import pytest

os.environ.setdefault("KERAS_BACKEND", "jax")


@pytest.fixture(autouse=True)
def _as_frameworks_run() -> Iterator[None]:
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield

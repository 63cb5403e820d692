"""Queries and keys of eight bits, for inference: which dtypes go together, and why there are no gradients."""

from __future__ import annotations

from typing import Any

import jax

from pallas_kernels.spec import AttentionSpec

EIGHT_BITS = ("float8_e4m3fn", "float8_e5m2")
VALUES = ("bfloat16", "float16")  # each holds every number of eight bits


def has_eight_bits(*arrays: Any) -> bool:
    """Whether one of these has a floating-point dtype of eight bits.

    >>> has_eight_bits(jnp.zeros(2, jnp.float8_e5m2)), has_eight_bits(jnp.zeros(2, jnp.int8))
    (True, False)
    """
    return any(str(x.dtype) in EIGHT_BITS for x in arrays)


def check_dtypes(query: Any, key: Any, value: Any, got: str) -> None:
    """Raises unless query and key share a dtype of eight bits, and the value is wider; `got` lists them all.

    Raises:
      TypeError: They do not.
    """
    if query.dtype != key.dtype:
        raise TypeError(
            f"`query` and `key` must have one dtype where one of them has eight bits ({', '.join(EIGHT_BITS)}). "
            f"Quantise both, or cast both to the dtype of `value`. {got}"
        )
    if str(value.dtype) not in VALUES:
        raise TypeError(
            f"`value` must be {' or '.join(VALUES)} where `query` and `key` have eight bits: weights and output have "
            f"its dtype. Cast it. {got}"
        )


def no_gradients(spec: AttentionSpec) -> str | None:
    """Why no backend computes gradients of a call, as part of a sentence, or None."""
    if spec.qk_dtype is None:
        return None
    return f"`query` and `key` of {spec.qk_dtype} are for inference (cast both to {spec.dtype})"


def widened(spec: AttentionSpec, x: jax.Array) -> jax.Array:
    """A query or key of eight bits in the dtype of the value, which holds each of its numbers; others as they are."""
    return x if spec.qk_dtype is None else x.astype(spec.dtype)

"""Queries and keys of eight bits, for inference: which dtypes go together, and why there are no gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pallas_kernels.spec import AttentionSpec

if TYPE_CHECKING:
    from jflex.backends.base import Inputs

EIGHT_BITS = ("float8_e4m3fn", "float8_e5m2")
VALUES = ("bfloat16", "float16")  # each holds every number of eight bits


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


def no_gradients(spec: AttentionSpec) -> str:
    """Why no backend computes gradients of a call with eight bits, as part of a sentence."""
    return f"`query` and `key` of {spec.qk_dtype} are for inference (cast both to {spec.dtype})"


def widened(inputs: Inputs) -> Inputs:
    """With query and key in the dtype of the value, which holds each of their numbers."""
    dtype = inputs.value.dtype
    return inputs._replace(query=inputs.query.astype(dtype), key=inputs.key.astype(dtype))

"""Limits of the kernels of the indexer, whatever the device: asked before Pallas is imported."""

from __future__ import annotations

from pallas_kernels.triton.plan.limits import MAX_HEAD_SIZE

MAX_PART = 32768  # elements that a program of the selection holds: 32 registers of a thread, where 32 warps have 64


def scores_not_taken(query_dtype: str, key_dtype: str, size: int) -> str | None:
    """Why the kernel does not compute scores, as part of a sentence, or None."""
    if query_dtype != key_dtype or query_dtype not in ("bfloat16", "float16"):
        return (
            "its kernel takes queries and keys in bfloat16, or both in float16, not queries in "
            f"{query_dtype} and keys in {key_dtype}"
        )
    if size > MAX_HEAD_SIZE:
        return f"its kernel takes head sizes up to {MAX_HEAD_SIZE}, not {size}"
    return None


def selection_not_taken(dtype: str, keys: int, k: int) -> str | None:
    """Why the kernel does not select k of a row of keys, as part of a sentence, or None."""
    if dtype != "float32":
        return f"its kernel takes scores in float32, not {dtype}"
    if keys > MAX_PART and k > MAX_PART // 2:
        return f"its kernel selects up to {MAX_PART // 2} of more than {MAX_PART} keys, not {k} of {keys}"
    return None

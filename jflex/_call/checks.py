"""Checks of query, key, value and BlockMask of a dense call."""

from __future__ import annotations

from typing import Any, NoReturn

import jax
import numpy as np

from jflex._check.arguments import DTYPES, EIGHT_BITS, LAYOUTS, check_is_array, check_layout, describe_array
from jflex._check.user_warnings import warn_user
from jflex.block_mask.mask import BlockMask
from jflex.mods.dependence import uses_index
from jflex.types import ArrayOrShape

_VALUES_OF_EIGHT_BITS = ("bfloat16", "float16")  # each holds every number of eight bits
_MOST_HEADS = 256


def check_arrays(
    query: ArrayOrShape,
    key: ArrayOrShape,
    value: ArrayOrShape | None,
    layout: str,
    *,
    has_value: bool = True,
    may_have_eight_bits: bool = False,
) -> None:
    """Raises unless query, key and value fit together; a call without a value may have any."""
    check_layout(layout)
    named: dict[str, Any] = {"query": query, "key": key} | ({"value": value} if has_value else {})
    for name, x in named.items():
        check_is_array(x, name)
    got = "Got " + ", ".join(f"{name}: {describe_array(x)}" for name, x in named.items()) + "."
    for name, x in named.items():
        if len(x.shape) != 4:
            axes = "[B, T, Hq, D]" if name == "query" else "[B, S, Hkv, D]"
            axes = axes if layout == "BTNH" else "[B, Hq, T, D]" if name == "query" else "[B, Hkv, S, D]"
            raise ValueError(
                f"`{name}` must have four axes, {axes} in the layout {layout!r}; it has {len(x.shape)}. Add the "
                f"missing ones with `x[None]`, or `jax.vmap` the call. {got}"
            )
        if not all(isinstance(size, int) for size in x.shape):
            raise ValueError(
                f"`{name}` must have sizes that are known while tracing; `jax.export` gave it symbolic ones. Export "
                "one program for each size. A batch can be symbolic where `jax.vmap` is around a call for one entry, "
                f"`flex_attention(q[None], k[None], v[None], ...)[0]`. {got}"
            )
    if may_have_eight_bits and not {str(query.dtype), str(key.dtype)}.isdisjoint(EIGHT_BITS):
        _check_eight_bits(query, key, value, got)
        del named["query"], named["key"]
    _check_floats(named, got, may_have_eight_bits)
    if len({x.dtype for x in named.values()}) > 1:
        names = "`query`, `key` and `value`" if has_value else "`query` and `key`"
        raise TypeError(f"{names} must have one dtype. Cast them to one of these. {got}")
    _check_shapes(query.shape, key.shape, named.get("value", key).shape, layout, got, has_value)


def _check_eight_bits(query: Any, key: Any, value: Any, got: str) -> None:
    """Raises unless query and key share a dtype of eight bits, and the value is wider; `got` lists them all."""
    if query.dtype != key.dtype:
        raise TypeError(
            f"`query` and `key` must have one dtype where one of them has eight bits ({', '.join(EIGHT_BITS)}). "
            f"Quantize both, or cast both to the dtype of `value`. {got}"
        )
    if str(value.dtype) not in _VALUES_OF_EIGHT_BITS:
        raise TypeError(
            f"`value` must be {' or '.join(_VALUES_OF_EIGHT_BITS)} where `query` and `key` have eight bits: weights "
            f"and output have its dtype. Cast it. {got}"
        )


def _check_floats(named: dict[str, Any], got: str, may_have_eight_bits: bool) -> None:
    for name, x in named.items():
        if str(x.dtype) in DTYPES:
            continue
        also = ""
        if may_have_eight_bits and name != "value":
            other = "key" if name == "query" else "query"
            also = f", or have eight bits, as `{other}` ({', '.join(EIGHT_BITS)})"
        raise TypeError(f"`{name}` must be floating-point ({', '.join(DTYPES)}){also}; it is {x.dtype}. Cast it. {got}")


def _check_shapes(q: tuple, k: tuple, v: tuple, layout: str, got: str, has_value: bool) -> None:
    heads, length = (2, 1) if layout == "BTNH" else (1, 2)
    other = LAYOUTS[1 - LAYOUTS.index(layout)]

    def fail(text: str) -> NoReturn:
        swapped_fits = (
            k[heads] == v[heads]
            and k[length] == v[length]
            and k[length]
            and q[length] % k[length] == 0
            and q[length] < q[heads]
            and q[3] == k[3]
            and q[0] == v[0] == k[0]
        )
        hint = (
            f" The shapes suggest another order of axes: if it is meant, pass layout={other!r}." if swapped_fits else ""
        )
        raise ValueError(f"{text} {got}{hint}")

    if k[0] != v[0] or k[0] not in (1, q[0]):
        if not has_value:
            fail(
                f"`key` must have the batch size of `query`, or 1 (shared by all). The batch sizes are {q[0]} (query), "
                f"{k[0]} (key)."
            )
        fail(
            f"`key` and `value` must have the batch size of `query`, or both 1 (shared by all). The batch sizes are "
            f"{q[0]} (query), {k[0]} (key), {v[0]} (value)."
        )
    if q[3] != k[3]:
        fail(f"`query` and `key` must have one head size. They have {q[3]} and {k[3]}.")
    if k[length] != v[length]:
        fail(f"`key` and `value` must have one length. They have {k[length]} and {v[length]}.")
    if k[heads] != v[heads]:
        fail(f"`key` and `value` must have as many heads. They have {k[heads]} and {v[heads]}.")
    if k[heads] == 0 or q[heads] == 0 or q[heads] % k[heads]:
        fail(
            f"`key` has {k[heads]} heads, which do not divide the {q[heads]} heads of `query`. Grouped-query "
            "attention gives each key head an equal share of the query heads."
        )
    if 0 in (q[3], v[3]):
        fail("Head sizes must be at least 1.")


def warn_of_layout(query: ArrayOrShape, key: ArrayOrShape, layout: str) -> None:
    """Warns of arrays that are meant in the other layout: more heads than positions; one query is a decoding step."""
    length, heads = (1, 2) if layout == "BTNH" else (2, 1)
    (T, Hq), (S, Hkv) = ((x.shape[length], x.shape[heads]) for x in (query, key))
    if Hq > _MOST_HEADS and 1 < T < Hq and Hkv > S:
        other = LAYOUTS[1 - LAYOUTS.index(layout)]
        warn_user(
            f"In the layout {layout!r}, `query` {describe_array(query)} has {Hq} heads and {T} positions, `key` "
            f"{describe_array(key)} {Hkv} heads and {S} positions. If heads and positions are swapped, pass "
            f"layout={other!r} to `jflex.flex_attention`, or arrays with `jnp.swapaxes(x, 1, 2)`."
        )


def check_block_mask(block_mask: object, mask_mod: object, B: int, Hq: int, T: int, S: int) -> None:
    """Raises unless `block_mask` fits the call."""
    if not isinstance(block_mask, BlockMask):
        hint, kind = "", type(block_mask).__name__
        if callable(block_mask):
            hint = " A mask function goes to `mask_mod`, or through `create_block_mask`."
        elif isinstance(block_mask, (jax.Array, np.ndarray)):
            hint, kind = " Pass a mask [B, H, T, S] as `mask` of `jflex.dot_product_attention`.", "an array"
        raise TypeError(f"`block_mask` must be a `BlockMask`. Got {kind}.{hint}")
    if mask_mod is not None:
        raise ValueError(
            "`block_mask` and `mask_mod` cannot both be given: a BlockMask holds its own mask_mod. Combine them: "
            "create_block_mask(and_masks(f, g), ...)."
        )
    sentence = block_mask_mismatch(block_mask, B, Hq, T, S)
    if sentence is not None:
        raise ValueError(sentence)


def block_mask_mismatch(block_mask: BlockMask, batch: int, heads: int, q_length: int, kv_length: int) -> str | None:
    """Says in one sentence or two why a BlockMask does not fit a call, and what would."""
    if block_mask.kv_num_blocks.ndim != 3:
        return (
            f"`block_mask` has lists with {block_mask.kv_num_blocks.ndim - 3} leading axes more than a BlockMask has. "
            "Map over them with `jax.vmap`."
        )
    mask_batch, mask_heads, mask_q, mask_kv = block_mask.shape
    for name, argument, of_mask, of_call in (("batch", "B", mask_batch, batch), ("heads", "H", mask_heads, heads)):
        if of_mask not in (1, of_call):
            return (
                f"`block_mask` has {name} {of_mask}, the query {of_call}. Make it with `create_block_mask(mask_mod, "
                f"{argument}={of_call}, ...)`, or with `{argument}=None` for one mask that all share."
            )
        index = "b" if argument == "B" else "h"
        if of_mask == 1 and of_call != 1 and block_mask.traced is not None and uses_index(block_mask.traced, index):
            return (
                f"`block_mask` has {name} 1, the query {of_call}, but its mask_mod {block_mask.traced.source} uses "
                f"`{index}`. Make it with `create_block_mask(mask_mod, {argument}={of_call}, ...)`."
            )
    if (mask_q, mask_kv) == (q_length, kv_length):
        return None
    fault = f"`block_mask` is for {mask_q} queries and {mask_kv} keys, the call has {q_length} and {kv_length}."
    if mask_q >= q_length and mask_kv >= kv_length:
        return f"{fault} Crop it with `block_mask.with_lengths({q_length}, {kv_length})`."
    return (
        f"{fault} Make it with `create_block_mask(mask_mod, B, H, {q_length}, {kv_length})`, or extend it with "
        f"`block_mask.with_lengths({q_length}, {kv_length})`."
    )

"""Whether a BlockMask fits a call: batch, heads and lengths, compared exactly, never modulo."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jax.extend import core

from jflex.mods.fingerprint import open_jaxpr, sub_jaxpr
from jflex.mods.trace import TracedMod

if TYPE_CHECKING:
    from jflex.block_mask.mask import BlockMask

_INDEX_POSITIONS = {"b": 0, "h": 1, "q_idx": 2, "kv_idx": 3}


def mismatch(block_mask: BlockMask, batch: int, heads: int, q_length: int, kv_length: int) -> str | None:
    """Says in one sentence or two why a BlockMask does not fit a call, and what would.

    Args:
      block_mask: The mask.
      batch: ``B`` of the call.
      heads: Query heads ``Hq`` of the call.
      q_length: Queries ``T`` of the call.
      kv_length: Keys ``S`` of the call.

    Returns:
      The sentence, or None when the mask fits.

    >>> from jflex.block_mask.mask import create_block_mask
    >>> block_mask = create_block_mask(lambda b, h, q, kv: q >= kv, 2, None, 256, 256)
    >>> mismatch(block_mask, 2, 8, 256, 256) is None
    True
    >>> mismatch(block_mask, 2, 8, 128, 256)  # doctest: +ELLIPSIS
    '`block_mask` is for 256 queries and 256 keys, the call has 128 and 256. Crop it with ...'
    """
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


def uses_index(traced: TracedMod, index: str) -> bool:
    """Whether the result of a mask_mod can depend on one of its indices: ``"b"``, ``"h"``, ``"q_idx"`` or ``"kv_idx"``.

    Loops and branches count as using whatever enters them.

    >>> from jflex.mods.trace import trace_mask_mod
    >>> traced, _ = trace_mask_mod(lambda b, h, q_idx, kv_idx: q_idx - h >= kv_idx)
    >>> uses_index(traced, "h"), uses_index(traced, "b")
    (True, False)
    """
    jaxpr = open_jaxpr(traced.jaxpr).jaxpr
    return _INDEX_POSITIONS[index] in _used_inputs(jaxpr, [True])


def _used_inputs(jaxpr: core.Jaxpr, wanted: Sequence[bool]) -> set[int]:
    """Positions of the inputs on which the `wanted` outputs depend."""
    live = {v for v, want in zip(jaxpr.outvars, wanted, strict=True) if want and not isinstance(v, core.Literal)}
    for eqn in reversed(jaxpr.eqns):
        outputs = [v in live for v in eqn.outvars]
        if not any(outputs):
            continue
        inner = sub_jaxpr(eqn)
        inputs = range(len(eqn.invars))
        if inner is not None and len(inner.jaxpr.invars) == len(eqn.invars) and eqn.primitive.name in ("jit", "pjit"):
            inputs = _used_inputs(inner.jaxpr, outputs)
        live |= {eqn.invars[i] for i in inputs if not isinstance(eqn.invars[i], core.Literal)}
    return {i for i, v in enumerate(jaxpr.invars) if v in live}

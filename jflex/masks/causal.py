"""Causal attention: a query attends to the keys up to its own position."""

from __future__ import annotations

from typing import Literal

from jaxtyping import Array, Int

from jflex.mods.array_sizes import Axis, ReadyMod, Requirement, ready
from jflex.mods.arrays import known_count
from jflex.mods.compose import MaskMod

_Length = int | Int[Array, ""]


@ready
def causal(
    alignment: Literal["top_left", "bottom_right"] = "top_left",
    *,
    q_length: _Length | None = None,
    kv_length: _Length | None = None,
) -> MaskMod:
    """Masks the keys after the query.

    Args:
      alignment: ``"top_left"``: query 0 is at key 0. ``"bottom_right"``: the last query is at the last key, as when new
        queries follow a cache of earlier keys. For equal lengths they are the same.
      q_length: Number of queries, for ``"bottom_right"``. If it is a Python number, a call must not have more.
      kv_length: Number of keys, likewise.

    Returns:
      A mask_mod.

    Raises:
      ValueError: `alignment` is unknown, or the lengths are missing for ``"bottom_right"`` or set for ``"top_left"``.

    >>> from jflex.block_mask.dense import create_mask
    >>> create_mask(causal("bottom_right", q_length=2, kv_length=4), None, None, 2, 4)[0, 0].astype(int).tolist()
    [[1, 1, 1, 0], [1, 1, 1, 1]]
    """
    if alignment not in ("top_left", "bottom_right"):
        raise ValueError(f"`alignment` must be 'top_left' or 'bottom_right'. Got {alignment!r}.")
    if alignment == "top_left":
        if q_length is not None or kv_length is not None:
            raise ValueError("`q_length` and `kv_length` are for `alignment='bottom_right'` only.")
        return lambda b, h, q_idx, kv_idx: q_idx >= kv_idx
    if q_length is None or kv_length is None:
        raise ValueError("`alignment='bottom_right'` needs `q_length` and `kv_length`.")
    offset = kv_length - q_length

    def causal_bottom_right(b, h, q_idx, kv_idx):
        return q_idx + offset >= kv_idx

    lengths: tuple[tuple[Axis, _Length, str, str], ...] = (
        ("q_idx", q_length, "q_length", "queries"),
        ("kv_idx", kv_length, "kv_length", "keys"),
    )
    required = []
    for axis, length, name, what in lengths:
        known = known_count(length)
        if known is not None:
            rule = f"`{name}` of `causal` must count all {what}, the last of which are aligned"
            remedy = f"Pass `{name}={{}}`, or an array if the {what} after them are padding."
            required.append(Requirement(axis, known, rule, remedy, in_program=False))
    return ReadyMod(causal_bottom_right, tuple(required))

"""The sizes that a ready mod was made for, and their comparison with those of a call.

A mod that indexes an array beyond its end reads the last element: JAX's rule, which holds for mods of users. A ready
mod, of `jflex.masks` and `jflex.scores`, says which sizes its arrays have; what composes or shifts mods passes that on,
as far as positions are still known; and a call that does not fit is refused before anything is computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

import jax
import numpy as np
from jax.typing import ArrayLike

Axis = Literal["b", "h", "q_idx", "kv_idx"]


class Requirement(NamedTuple):
    """What a mod requires of one of its indices.

    Attributes:
      axis: The index.
      size: How many values of it the mod was made for: the number of batch entries or heads of a call must be equal,
        the number of positions at most this.
      rule: The beginning of the message: which argument, and what it must hold.
      remedy: The end of the message; ``{}`` stands for the size that would fit.
      shift: What the mod adds to the index of the call.
      in_program: Whether equal programs over arrays of equal shapes require the same; a shift is the value of an array.
    """

    axis: Axis
    size: int
    rule: str
    remedy: str
    shift: int = 0
    in_program: bool = True


class CallSizes(NamedTuple):
    """How far the indices of a call go; None where that is not known.

    Attributes:
      batch: Batch entries.
      heads: Query heads.
      queries: The last position of a query, plus 1.
      keys: The last position of a key, plus 1.
      caller: What has these sizes, for messages.
      all_batch: Whether `batch` counts all entries; else it is the last one in use, plus 1.
    """

    batch: int | None = None
    heads: int | None = None
    queries: int | None = None
    keys: int | None = None
    caller: str = "a call"
    all_batch: bool = True


class SizedMod:
    """A mod that knows sizes that it was made for."""

    def requirements(self) -> tuple[Requirement, ...]:
        """What it requires of a call."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, eq=False)
class ReadyMod(SizedMod):
    """A ready mod: a function, and what it requires."""

    mod: Callable[..., ArrayLike]
    required: tuple[Requirement, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "__wrapped__", self.mod)  # messages name the function, and the signature is its own

    def __call__(self, *args: jax.Array) -> ArrayLike:
        """Evaluates the mod at one place."""
        return self.mod(*args)

    def requirements(self) -> tuple[Requirement, ...]:
        """See `SizedMod`."""
        return self.required


def for_positions(size: int, rule: str, remedy: str) -> tuple[Requirement, Requirement]:
    """What queries and keys alike require; ``{}`` in the rule stands for one of them."""
    return (
        Requirement("q_idx", size, rule.format("query"), remedy),
        Requirement("kv_idx", size, rule.format("key"), remedy),
    )


def requirements_of(*mods: object) -> tuple[Requirement, ...]:
    """What mods require together; nothing for functions of users.

    >>> requirements_of(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx)
    ()
    """
    return tuple(needed for mod in mods if isinstance(mod, SizedMod) for needed in mod.requirements())


def program_requirements(mod: object) -> tuple[Requirement, ...]:
    """Those that a traced mod keeps, which JAX may replace by an equal one of other values."""
    return tuple(needed for needed in requirements_of(mod) if needed.in_program)


def without(requirements: Iterable[Requirement], *axes: Axis) -> tuple[Requirement, ...]:
    """Those of the other indices: what remains where these are replaced by unknown ones."""
    return tuple(needed for needed in requirements if needed.axis not in axes)


def shifted(requirements: Iterable[Requirement], axis: Axis, shift: int | None) -> tuple[Requirement, ...]:
    """What remains where a number is added to an index first; None for an unknown number.

    >>> needed = Requirement("q_idx", 32, "`ids` must hold one number for each query", "")
    >>> shifted((needed,), "q_idx", 16)[0].shift, shifted((needed,), "q_idx", None)
    (16, ())
    """
    requirements = tuple(requirements)
    if shift is None:
        return without(requirements, axis)
    add = lambda r: r._replace(shift=r.shift + shift, in_program=False) if r.axis == axis else r
    return tuple(map(add, requirements))


def last_plus_one(positions: np.ndarray | None) -> int | None:
    """One more than the largest of known positions: 0 for none, None for unknown ones."""
    return None if positions is None else int(positions.max(initial=-1)) + 1


def check_mod_sizes(
    mod: object,
    *,
    batch: int | None = None,
    heads: int | None = None,
    queries: int | None = None,
    keys: int | None = None,
    caller: str = "a call",
) -> None:
    """Raises unless a mod was made for these sizes: early, where a model that is built knows some of them.

    Ready mods, of `jflex.masks` and `jflex.scores`, and what is composed of them know what they were made for. A
    function of a user does not, and passes.

    Args:
      mod: A score_mod or a mask_mod.
      batch: The number of batch entries; None, here and below, where it is not known.
      heads: The number of query heads.
      queries: The number of queries, or the last position of one, plus 1.
      keys: The number of keys, or the last position of one, plus 1.
      caller: What has these sizes, for the message.

    Raises:
      ValueError: The mod was made for other batch entries or heads, or for fewer positions.

    >>> from jflex.scores import alibi, alibi_slopes
    >>> check_mod_sizes(alibi(alibi_slopes(4)), heads=8, caller="a layer")
    Traceback (most recent call last):
    ValueError: `slopes` of `alibi` must hold one slope for each query head. Got 4 for a layer with 8 heads. Pass
    `alibi_slopes(8)`.
    """
    check_requirements(requirements_of(mod), CallSizes(batch, heads, queries, keys, caller))


def check_mask_shape(mask_mod: object, shape: tuple[int, ...], caller: str) -> None:
    """`check_mod_sizes` for a mask of the shape ``(B, H, Q_LEN, KV_LEN)``."""
    batch, heads, queries, keys = shape
    check_mod_sizes(mask_mod, batch=batch, heads=heads, queries=queries, keys=keys, caller=caller)


def check_requirements(requirements: Iterable[Requirement], sizes: CallSizes) -> None:
    """Raises ValueError for the first requirement that a call does not meet."""
    for needed in requirements:
        fault = _fault(needed, sizes)
        if fault is not None:
            raise ValueError(f"{needed.rule}. Got {needed.size} for {sizes.caller} with {fault[0]}. "
                             f"{needed.remedy.format(fault[1])}")  # fmt: skip


def _fault(needed: Requirement, sizes: CallSizes) -> tuple[str, int] | None:
    """What of a call does not meet a requirement, and the size that would fit."""
    if needed.axis in ("q_idx", "kv_idx"):
        number, name = (sizes.queries, "queries") if needed.axis == "q_idx" else (sizes.keys, "keys")
        reach = (number or 0) + needed.shift
        return (f"{name} up to position {reach - 1}", reach) if number and reach > needed.size else None
    number = sizes.batch if needed.axis == "b" else sizes.heads
    if number is None or number == needed.size:
        return None
    if needed.axis == "h":
        return f"{number} heads", number
    if sizes.all_batch:
        return f"batch {number}", number
    return (f"batch entries up to {number - 1}", number) if number > needed.size else None

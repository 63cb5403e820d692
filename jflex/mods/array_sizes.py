"""The sizes that a mod was made for, and their comparison with those of a call.

A ready mod, of `jflex.masks` and `jflex.scores`, declares the sizes of its arrays; composed and re-indexed mods pass
them on while positions are known; the sizes of other mods follow from their programs (`jflex.mods.dependence`). A call
that does not match is refused before anything is computed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple, ParamSpec

import jax
import numpy as np
from jax.typing import ArrayLike

from jflex.mods.arrays import compile_time

Axis = Literal["b", "h", "q_idx", "kv_idx"]
_P = ParamSpec("_P")


class Requirement(NamedTuple):
    """A mod's requirement on one of its indices."""

    axis: Axis
    size: int  # the range of the index: a call must have as many batch entries or heads, and at most as many positions
    rule: str  # the beginning of the message: which argument, and what it must hold
    remedy: str  # the end of the message; ``{}`` is replaced by the required size
    shift: int = 0  # added by the mod to the index of the call
    # whether all mods with this program and array shapes require it; not so with a shift, a captured value
    in_program: bool = True
    is_exact: bool = True  # whether a call must have just as many batch entries or heads, and not fewer


class CallSizes(NamedTuple):
    """The ranges of the indices of a call; None if not known."""

    batch: int | None = None
    heads: int | None = None
    queries: int | None = None  # the last position of a query, plus 1
    keys: int | None = None
    caller: str = "a call"  # what has these sizes, for messages
    all_batch: bool = True  # whether `batch` is the batch size; else it is the last entry in use, plus 1


class SizedMod:
    """A mod that knows the sizes that it was made for."""

    required: tuple[Requirement, ...] = ()

    def requirements(self) -> tuple[Requirement, ...]:
        """Its requirements on a call."""
        return self.required


@dataclasses.dataclass(frozen=True)
class ReadyMod(SizedMod):
    """A ready mod: a function and its requirements; `ready` adds the call that makes it, which pickles hold."""

    mod: Callable[..., ArrayLike] = dataclasses.field(compare=False)
    required: tuple[Requirement, ...] = dataclasses.field(compare=False)
    call: tuple[Callable[..., ReadyMod], tuple[object, ...], dict[str, object]] | None = dataclasses.field(
        default=None, compare=False
    )
    key: object = dataclasses.field(init=False)  # of equal calls with numbers alone: their layers share programs

    def __post_init__(self) -> None:
        object.__setattr__(self, "__wrapped__", self.mod)  # messages name the function, and the signature is its own
        make, *arguments = self.call or (None, self)
        is_known = all(type(x) in (bool, int, float, str) for x in jax.tree.leaves(arguments))
        object.__setattr__(self, "key", (make, repr(arguments)) if is_known else id(self))  # tells 1 and True apart

    def __reduce__(self) -> tuple[object, ...]:
        assert self.call is not None  # made by a decorated function
        return _called, self.call

    def __deepcopy__(self, memo: object) -> ReadyMod:
        """Itself: it never changes."""
        return self

    def __call__(self, *args: jax.Array) -> ArrayLike:
        """Evaluates the mod at one position."""
        return self.mod(*args)


def ready(make: Callable[_P, Callable[..., ArrayLike]]) -> Callable[_P, ReadyMod]:
    """Decorates the factory of a ready mod: its result can be pickled, and its arrays are evaluated at once.

    Inside ``jit``, `jnp.asarray` of a numpy array is a tracer. A Flax layer that is constructed there, as for sharded
    parameters, keeps its mods for calls outside.
    """

    @functools.wraps(make)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> ReadyMod:
        with compile_time(args, kwargs):
            mod = make(*args, **kwargs)
        mod = mod if isinstance(mod, ReadyMod) else ReadyMod(mod, ())
        return dataclasses.replace(mod, call=(call, args, kwargs))

    return call


def _called(make: Callable[..., ReadyMod], args: tuple[object, ...], kwargs: dict[str, object]) -> ReadyMod:
    return make(*args, **kwargs)


def for_positions(size: int, rule: str, remedy: str) -> tuple[Requirement, Requirement]:
    """One requirement on queries and one on keys; ``{}`` in the rule is replaced by either."""
    return (
        Requirement("q_idx", size, rule.format("query"), remedy),
        Requirement("kv_idx", size, rule.format("key"), remedy),
    )


def requirements_of(*mods: object) -> tuple[Requirement, ...]:
    """The requirements of all of these mods; a user's function has none.

    >>> requirements_of(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx)
    ()
    """
    return tuple(needed for mod in mods if isinstance(mod, SizedMod) for needed in mod.requirements())


def program_requirements(mod: object) -> tuple[Requirement, ...]:
    """The requirements that a traced mod keeps, which JAX may replace by an equal one with other captured values."""
    return tuple(needed for needed in requirements_of(mod) if needed.in_program)


def without(requirements: Iterable[Requirement], *axes: Axis) -> tuple[Requirement, ...]:
    """The requirements on the other indices: those that remain if these axes are replaced by unknown indices."""
    return tuple(needed for needed in requirements if needed.axis not in axes)


def shifted(requirements: Iterable[Requirement], axis: Axis, shift: int | None) -> tuple[Requirement, ...]:
    """The requirements after adding `shift` to an index; those on it are dropped if the shift is None, unknown.

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
    """Raises unless a mod was made for these sizes: for early checks, when a model is built and some are known.

    Ready mods, of `jflex.masks` and `jflex.scores`, and mods composed of them know the sizes that they were made for. A
    user's function passes here, and is checked by each call.

    Args:
      mod: A score_mod or a mask_mod.
      batch: The number of batch entries; None, here and below, if not known.
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


def check_mask_shape(requirements: Iterable[Requirement], shape: tuple[int, ...], caller: str) -> None:
    """`check_requirements` for a mask of the shape ``(B, H, Q_LEN, KV_LEN)``."""
    check_requirements(requirements, CallSizes(*shape, caller=caller))


def check_requirements(requirements: Iterable[Requirement], sizes: CallSizes) -> None:
    """Raises ValueError for the first requirement that a call does not meet."""
    for needed in requirements:
        fault = _fault(needed, sizes)
        if fault is not None:
            raise ValueError(f"{needed.rule}. Got {needed.size} for {sizes.caller} with {fault[0]}. "
                             f"{needed.remedy.format(fault[1])}")  # fmt: skip


def _fault(needed: Requirement, sizes: CallSizes) -> tuple[str, int] | None:
    """The size of a call that does not meet a requirement, as text, and the size that would; None if it is met."""
    if needed.axis in ("q_idx", "kv_idx"):
        number, name = (sizes.queries, "queries") if needed.axis == "q_idx" else (sizes.keys, "keys")
        reach = (number or 0) + needed.shift
        return (f"{name} up to position {reach - 1}", reach) if number and reach > needed.size else None
    number = sizes.batch if needed.axis == "b" else sizes.heads
    if number is None or number == needed.size or (number < needed.size and not needed.is_exact):
        return None
    if needed.axis == "h":
        return f"{number} heads", number
    if sizes.all_batch:
        return f"batch {number}", number
    return (f"batch entries up to {number - 1}", number) if number > needed.size else None

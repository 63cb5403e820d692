"""The mods and the mask of a layer and of its calls."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, TypedDict

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

import jflex
from flax_layers.attention.selection import BlockSelection


class Mods(NamedTuple):
    """The mods and the mask of a constructor or of a call; or, in place of a mask, the selection that makes one.

    Example:
        >>> causal, softcap = Mods(mask_mod=jflex.masks.causal()), jflex.scores.softcap(30.0)
        >>> causal.replaced_by(score_mod=softcap).mask_mod is causal.mask_mod
        True
    """

    score_mod: jflex.ScoreMod | None = None
    mask_mod: jflex.MaskMod | None = None
    block_mask: jflex.BlockMask | None = None
    selection: BlockSelection | None = None

    def replaced_by(
        self,
        score_mod: jflex.ScoreMod | None = None,
        mask_mod: jflex.MaskMod | None = None,
        block_mask: jflex.BlockMask | BlockSelection | None = None,
    ) -> Mods:
        """Replaces these by the mods of a call. Either form of a mask replaces both."""
        score_mod = self.score_mod if score_mod is None else score_mod
        if mask_mod is None and block_mask is None:
            return self._replace(score_mod=score_mod)
        if isinstance(block_mask, BlockSelection):
            return Mods(score_mod, mask_mod, None, block_mask)
        return Mods(score_mod, mask_mod, block_mask)

    def mask_for(self, query: Float[Array, "B T Hq D"], key: Float[Array, "B T Hkv D"]) -> jflex.BlockMask | None:
        """The BlockMask of a call, made of its queries and keys if they select blocks."""
        return self.block_mask if self.selection is None else self.selection.block_mask(query, key)

    def for_decoding(self, tokens: int | None = None) -> Mods:
        """Replaces the BlockMask by its mask_mod, which takes positions in the whole sequence.

        Where each sequence gets one token, a causal mask is dropped: the last token attends to all keys.

        Args:
            tokens: Tokens of each sequence, if all get as many.

        Raises:
            ValueError: The BlockMask masks more than its mask_mod, or is a selection.
        """
        if self.selection is not None:
            raise ValueError(
                "The `block_mask` of this layer's constructor is a BlockSelection, which selects blocks in calls on "
                "whole sequences, so it cannot be used for decoding. Pass `mask_mod` to this call: with "
                "`jflex.masks.causal()`, tokens attend to all keys before them."
            )
        mask_mod = self.mask_mod if self.block_mask is None else self.block_mask.mask_mod
        if self.block_mask is not None and (self.mask_mod is not None or not self.block_mask.lists_follow_mod):
            raise ValueError(
                "The `block_mask` of this layer's constructor masks more than its mask_mod, so it cannot be used for "
                "decoding. Pass `mask_mod` to this call, a mask of positions in the whole sequence."
            )
        return Mods(self.score_mod, None if tokens == 1 and mask_mod == jflex.masks.causal() else mask_mod)

    def at(self, first: Int32[Array, ""] | Int32[Array, " B"]) -> Mods:
        """The mods for queries whose positions begin at `first`; they must have no BlockMask."""
        move = lambda mod: None if mod is None else jflex.with_offset(mod, first)
        return Mods(move(self.score_mod), move(self.mask_mod))


class VectorModOptions(TypedDict, total=False):
    """Keyword arguments for the vector mods of a call, as in `jflex.flex_attention`."""

    query_mod: jflex.VectorMod | None
    key_mod: jflex.VectorMod | None
    value_mod: jflex.VectorMod | None
    output_mod: jflex.OutputMod | None


class VectorMods(NamedTuple):
    """The mods of queries, keys, values and outputs.

    Example:
        >>> rope = jflex.rope(10000.0)
        >>> VectorMods(query_mod=rope, key_mod=rope).any
        True
    """

    query_mod: jflex.VectorMod | None = None
    key_mod: jflex.VectorMod | None = None
    value_mod: jflex.VectorMod | None = None
    output_mod: jflex.OutputMod | None = None

    @classmethod
    def from_options(cls, options: Mapping) -> VectorMods:
        """The mods among the keywords of a call that are left. Raises TypeError for any other keyword."""
        for name in options.keys() - set(cls._fields):
            raise TypeError(
                f"`{name}` is not an argument of this call. Pass a dense mask as `mask_mod=lambda b, h, q_idx, kv_idx: "
                "mask[b, 0, q_idx, kv_idx]`, and the source of dropout's key as `rngs`, in linen as `dropout_rng`."
            )
        return cls(**options)

    @property
    def any(self) -> bool:
        """Tests whether there is one."""
        return any(mod is not None for mod in self)

    def for_cached_keys(self, first: Int32[Array, " B"]) -> VectorMods:
        """The mods of queries and outputs alone, for queries whose positions begin at `first`."""
        move = lambda mod: None if mod is None else jflex.with_offset(mod, first)
        return VectorMods(query_mod=move(self.query_mod), output_mod=move(self.output_mod))

    def stored(
        self,
        key: Float[Array, "*rows H D"],
        value: Float[Array, "*rows H Dv"],
        positions: Int32[Array, "*rows"],
        requests: Int32[Array, "*rows"],
    ) -> tuple[Float[Array, "*rows H D"], Float[Array, "*rows H Dv"]]:
        """Keys and values as they are written into a cache, at their positions in the whole sequence."""

        def modified(mod: jflex.VectorMod | None, x: Array) -> Array:
            if mod is None:
                return x
            packed = x.reshape(-1, *x.shape[-2:])
            return jflex.apply_vector_mod(mod, packed, positions.reshape(-1), requests.reshape(-1)).reshape(x.shape)

        return modified(self.key_mod, key), modified(self.value_mod, value)

    def examples(self, head_dim: int) -> list[tuple[str, jflex.VectorMod | jflex.OutputMod | None, tuple[Array, ...]]]:
        """Name, mod and example arguments of each."""
        vector, index = jnp.zeros(head_dim), (jnp.int32(0),) * 3
        return [
            (name, mod, (vector, jnp.float32(0), *index) if name == "output_mod" else (vector, *index))
            for name, mod in self._asdict().items()
        ]


def check_mods(
    score_mod: jflex.ScoreMod | None, mask_mod: jflex.MaskMod | None, heads: int, check_state: Callable[..., None]
) -> None:
    """Raises ValueError for mods of a constructor made for another number of heads; ``check_state(name, mod)``, too."""
    for name, mod in (("score_mod", score_mod), ("mask_mod", mask_mod)):
        check_state(name, mod)
        jflex.check_mod_sizes(mod, heads=heads, caller="a layer")


def captures(mod: object) -> Iterator[object]:
    """Yields each object that a mod can reach, itself first.

    They are in closures and defaults, the owner of a method, and arguments of a `functools.partial`.

    Example:
        >>> def scaled(factor):  # the function that it returns holds the factor
        ...     return lambda score, b, h, q_idx, kv_idx: score * factor
        >>> list(captures(scaled(0.5)))[1:]
        [0.5]
    """
    empty_cell = types.CellType()
    pending: list[object] = [mod]
    seen: set[int] = set()
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        yield value
        if isinstance(value, tuple | list):
            pending += value
        elif isinstance(value, dict):
            pending += value.values()
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):  # such as the result of `jflex.and_masks`
            names = vars(value) if hasattr(value, "__dict__") else [field.name for field in dataclasses.fields(value)]
            pending += [getattr(value, name, None) for name in names]
        elif isinstance(value, functools.partial):
            pending += [value.func, *value.args, *value.keywords.values()]
        elif inspect.ismethod(value):
            pending += [value.__self__, value.__func__]
        elif inspect.isfunction(value):
            # The cell of a variable that is not assigned yet is empty.
            pending += [cell.cell_contents for cell in value.__closure__ or () if cell != empty_cell]
            pending += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]

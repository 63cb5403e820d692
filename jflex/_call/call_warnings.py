"""Warnings of calls: new Python numbers that compile again, and masks of a decoding step that hide its keys.

Numbers are part of the program of a mod. Programs are counted in the caches of this module, under their text without
its numbers: no array is kept.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Hashable

from jax.extend.core import jaxpr_as_fun

from jflex._check.arguments import largest_value
from jflex._check.user_warnings import warn_user
from jflex.mods.trace import TracedMod, trace_mask
from pallas_kernels.block_intervals import hides_all
from pallas_kernels.spec import AttentionSpec

_MODS = ("score_mod", "mask_mod", "key_mod", "value_mod")
_MOST = 4  # programs: the first, and three that were compiled for other numbers
_NUMBER = re.compile(r"(?<= )-?(\d[\w.+-]*|inf|nan)(?=:)")  # a literal in a fingerprint


@functools.lru_cache(maxsize=1024)
def count_call(spec: AttentionSpec) -> None:
    """Counts an eager call once; warns at the last program that differs from others in numbers alone."""
    numbered = {"scale": spec.scale, **{name: getattr(spec, name) for name in _MODS}}
    without_mods = spec.replace(scale=1.0, **dict.fromkeys(_MODS))
    programs = _programs(tuple(map(_without_numbers, numbered.values())), without_mods)
    programs.append({name: hash(x) for name, x in numbered.items()})
    if len(programs) != _MOST:
        return
    differing = [name for name in numbered if len({program[name] for program in programs}) > 1]
    sources = [f"`{name}` {x.source}" for name in differing if isinstance(x := numbered[name], TracedMod)]
    fault = f"{_MOST} programs were compiled that differ in Python numbers alone"
    if sources:
        remedy = "Capture a number that changes as an array, `jnp.float32(x)`: a new value then compiles nothing."
        warn_user(f"{fault}, of {' and '.join(sources)}. {remedy}")
    else:
        warn_user(f"{fault}, of `scale`. Multiply `query` by an array in place of a scale that changes.")


@functools.lru_cache(maxsize=256)
def _programs(numbered: tuple[Hashable, ...], without_mods: AttentionSpec) -> list[dict[str, int]]:
    """The record of the programs that are equal but for their numbers: hashes of what may differ in them."""
    del numbered, without_mods  # the keys of the record
    return []


def _without_numbers(x: object) -> Hashable:
    return (_NUMBER.sub("", x.fingerprint), x.operands) if isinstance(x, TracedMod) else x is None


def warn_of_alignment(mask: TracedMod, sizes: tuple[int, int, int, int], kv_lengths: object) -> None:
    """Warns of a decoding step whose mask takes its query for the first one, so that it attends to one key alone.

    `sizes` are ``(B, Hq, T, S)``.
    """
    longest = largest_value(kv_lengths)
    if (sizes[3] if longest is None else longest) > 1 and _hides_after_first(mask, sizes):
        warn_user(
            f"The mask {mask.source} hides all keys but the first: `q_idx` of the one query is 0, also at the end of "
            "`kv_lengths` keys. For a decoding step, pass `jflex.with_offset(mask_mod, kv_lengths - 1)`."
        )


@functools.lru_cache(maxsize=256)
def _hides_after_first(mask: TracedMod, sizes: tuple[int, int, int, int]) -> bool:
    after_first = lambda b, h, q, k, *operands: jaxpr_as_fun(mask.jaxpr)(b, h, q, k + 1, *operands)[0]
    program = dataclasses.replace(
        mask, jaxpr=trace_mask(after_first, mask.operands), fingerprint=f"after the first key: {mask.fingerprint}"
    )
    return hides_all(program, sizes[:2], (1, sizes[3] - 1))

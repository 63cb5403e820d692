"""Eager calls that compile again for each new Python number, since numbers are part of the program of a mod.

Programs are counted in the caches of this module, under their text without its numbers: no array is kept.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Hashable

from jflex._check.user_warnings import warn_user
from jflex.mods.trace import TracedMod
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

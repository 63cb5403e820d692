"""A random mod as data: typed steps over captured arrays, and the Python source that they stand for."""

from __future__ import annotations

import dataclasses
import linecache
import re
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.support.random_mods.derivatives import HELPERS

ARGUMENTS = ("score", "b", "h", "q_idx", "kv_idx")


@dataclasses.dataclass(frozen=True)
class Capture:
    """An array that a mod closes over.

    Attributes:
      name: Of the array in the source.
      shape: Letters of sizes, and numbers.
      kind: ``"f"`` float32, ``"g"`` the 16-bit float of the program, ``"i"`` int32, ``"u"`` uint8, ``"p"`` bool.
      high: Bound of the magnitude of integers, which are also negative where `signed`.
      signed: Whether integers may be negative.
    """

    name: str
    shape: tuple[str | int, ...]
    kind: str
    high: int = 8
    signed: bool = False


@dataclasses.dataclass(frozen=True)
class Step:
    """One line of a mod: ``name = text.format(*args)``.

    Attributes:
      name: Of the value.
      type: ``"f"`` float32, ``"g"`` 16-bit float, ``"i"`` int32, ``"p"`` bool, ``"v3"`` vector of 3 float32, ``"u3"``
        of 3 16-bit floats.
      text: An expression of `jax.numpy`, with places for the arguments.
      args: Names of arguments of the mod, of earlier steps, or of captured arrays.
    """

    name: str
    type: str
    text: str
    args: tuple[str, ...]

    def line(self) -> str:
        return f"{self.name} = {self.text.format(*self.args)}"

    @property
    def rounds(self) -> bool:
        """Whether the result is rounded to 16 bits: all of them are but those that are as they were loaded."""
        if "jnp.sum({0}" in self.text and ".astype(F32)" in self.text:
            return True
        loaded = self.args and self.args[0][0] in "cm" and not any(x in self.text for x in ("tanh", "0.5 *"))
        return self.type[0] in "gu" and not loaded


@dataclasses.dataclass(frozen=True)
class Program:
    """A mod.

    Attributes:
      role: ``"score"`` or ``"mask"``.
      half: The 16-bit float dtype that it computes in, if it does.
      captures: The arrays that it closes over.
      steps: In order.
      output: Name of the result.
    """

    role: str
    half: str
    captures: tuple[Capture, ...]
    steps: tuple[Step, ...]
    output: str

    def pruned(self) -> Program:
        """Without steps and captured arrays that the output does not need."""
        needed, kept = {self.output}, []
        for step in reversed(self.steps):
            if step.name in needed:
                needed.update(step.args)
                kept.append(step)
        captures = tuple(capture for capture in self.captures if capture.name in needed)
        return dataclasses.replace(self, captures=captures, steps=tuple(reversed(kept)))

    @property
    def uses_half(self) -> bool:
        return any(step.type[0] in "gu" or ".astype(G)" in step.text for step in self.steps)

    def helpers(self) -> list[str]:
        """The functions with derivative rules of their own that the program calls."""
        return [name for name in HELPERS if any(re.search(rf"\b{name}\b", step.text) for step in self.steps)]

    def source(self, *, disturbed: bool = False) -> str:
        """Defines `make`, from captured arrays to the mod.

        Args:
          disturbed: Whether values of 16 bits pass through ``rounded(value, number of the step)``.
        """
        arguments = ARGUMENTS if self.role == "score" else ARGUMENTS[1:]
        lines = [HELPERS[name] for name in self.helpers()]
        lines += [f"def make({', '.join(capture.name for capture in self.captures)}):"]
        lines += [f"    def {self.role}_mod({', '.join(arguments)}):"]
        for i, step in enumerate(self.steps):
            line = f"        {step.line()}"
            if disturbed and step.rounds:
                name, value = line.split(" = ", 1)
                line = f"{name} = rounded({value}, {i})"
            lines.append(line)
        lines += [f"        return {self.output}", f"    return {self.role}_mod", ""]
        return "\n".join(lines)

    def build(
        self, sizes: Any, *, wide: bool = False, select: bool = False, rounded: Callable[..., Any] | None = None
    ) -> Callable[..., Callable[..., Any]]:
        """Runs the source.

        Args:
          sizes: For the letters B, Hq, T and S in it.
          wide: Floating point of 64 bits, whatever the program says.
          select: Branches as selects: `vmap` of `cond` broadcasts all that the branches capture. Chains of indices as
            one: `vmap` of ``c[h][q]`` holds a row for each element, 35 GB of some mods.
          rounded: Through which values of 16 bits pass, with the number of their step.
        """
        name = f"<random {self.role}_mod {id(self)}>"
        source = self.source(disturbed=rounded is not None)
        source = re.sub(r"(\[[^][:]+\]){2,}", lambda m: m[0].replace("][", ", "), source) if select else source
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        dtypes = (jnp.float64, jnp.float64) if wide else (jnp.float32, jnp.dtype(self.half).type)
        names = {letter: getattr(sizes, letter) for letter in ("B", "Hq", "T", "S")}
        space = {"jax": jax, "jnp": jnp, "lax": SELECTING if select else jax.lax, "F32": dtypes[0], "G": dtypes[1]}
        space |= {"rounded": rounded} | names
        exec(compile(source, name, "exec"), space)
        return space["make"]

    def draw(self, rng: np.random.Generator, sizes: Any) -> dict[str, np.ndarray]:
        """Draws the captured arrays."""
        return {capture.name: _draw(capture, self.half, rng, sizes) for capture in self.captures}


def _draw(capture: Capture, half: str, rng: np.random.Generator, sizes: Any) -> np.ndarray:
    shape = tuple(axis if isinstance(axis, int) else getattr(sizes, axis) for axis in capture.shape)
    if capture.kind in "fg":
        return np.asarray(np.clip(rng.normal(size=shape), -3, 3), np.float32 if capture.kind == "f" else half)
    if capture.kind == "p":
        return np.asarray(rng.random(shape) < 0.6)
    low = -capture.high if capture.signed else 0
    return np.asarray(rng.integers(low, capture.high + 1, shape), np.int32 if capture.kind == "i" else np.uint8)


class _Selecting(types.SimpleNamespace):
    """`jax.lax`, but for branches."""

    def __getattr__(self, name: str) -> Any:
        return getattr(jax.lax, name)


def _cond(which, true, false, *operands):
    return jax.tree.map(lambda x, y: jnp.where(which, x, y), true(*operands), false(*operands))


def _switch(which, branches, *operands):
    results = [branch(*operands) for branch in branches]
    which = jnp.clip(which, 0, len(branches) - 1)
    found = results[0]
    for number, result in enumerate(results):
        found = jax.tree.map(lambda x, y, number=number: jnp.where(which == number, y, x), found, result)
    return found


SELECTING = _Selecting(cond=_cond, switch=_switch)

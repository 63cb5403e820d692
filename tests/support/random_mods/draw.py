"""Draws random mods: each is a function of its seed alone."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from tests.support.random_mods.operations import GUARDED, MASK_OPERATIONS, SCORE_OPERATIONS, Operation
from tests.support.random_mods.program import Capture, Program, Step

POSITIONS = {"b": "B", "h": "Hq", "q_idx": "T", "kv_idx": "S"}
_AXES = {"H": "Hq", "Q": "T", "K": "S"}
_LARGEST = {"f": 6.0, "g": 6.0, "v": 4.0, "u": 3.0}
_MOST_INTEGERS = 50_000


@dataclasses.dataclass
class _Value:
    """What is known of a value: its type, how large it gets, whether it was loaded as it is, whether it is used."""

    name: str
    type: str
    bound: float = 1.0
    exact: bool = False
    used: bool = False


class Drawing:
    """One mod while it is drawn.

    Args:
      rng: Where everything is drawn from.
      role: ``"score"`` or ``"mask"``.
      half: The 16-bit float dtype.
      sizes: Of the arrays.
      guarded: Whether a mask hides what is not finite above the diagonal.
    """

    def __init__(self, rng: np.random.Generator, role: str, half: str, sizes: Any, *, guarded: bool = False) -> None:
        self.rng, self.role, self.half, self.sizes, self.guarded = rng, role, half, sizes, guarded
        self.length = int(rng.integers(2, 7))
        self.values = [_Value(name, "i", getattr(sizes, of), used=True) for name, of in POSITIONS.items()]
        if role == "score":
            self.values.insert(0, _Value("score", "f", 4.0))
        self.captures: list[Capture] = []
        self.steps: list[Step] = []

    def program(self, operations: int) -> Program:
        """Draws so many operations, and ends in what depends on all of them."""
        table = SCORE_OPERATIONS if self.role == "score" else MASK_OPERATIONS
        if self.guarded and self.role == "score":
            table = [*table, *(operation._replace(weight=30) for operation in GUARDED)]
        weights = np.array([operation.weight for operation in table])
        for number in self.rng.choice(len(table), operations, p=weights / weights.sum()):
            self.apply(table[number])
        output = self.joined_score() if self.role == "score" else self.joined_mask()
        return Program(self.role, self.half, tuple(self.captures), tuple(self.steps), output).pruned()

    def apply(self, operation: Operation) -> _Value:
        """Adds an operation on values that are there, or that are loaded for it."""
        args = [self.argument(letter) for letter in operation.args]
        numbers = {"n": str(self.rng.integers(2, 8)), "c": f"{self.rng.uniform(0.3, 1.5):.2f}", "L": str(self.length)}
        text = operation.text
        for name, number in numbers.items():
            text = text.replace(f"{{{name}}}", number)
        bound = operation.bound(*(arg.bound for arg in args))
        kind = operation.result
        if kind == "i" and bound > _MOST_INTEGERS:
            text, bound = f"({text}) % 97", 97.0
        elif kind in _LARGEST and bound > _LARGEST[kind]:
            factor = 2.0 ** -math.ceil(math.log2(bound / _LARGEST[kind]))
            text, bound = f"({text}) * {factor}", bound * factor
        return self.step(kind, text, args, bound)

    def step(self, kind: str, text: str, args: list[_Value] | list[str], bound: float, **more: Any) -> _Value:
        names = []
        for arg in args:
            if isinstance(arg, _Value):
                arg.used = True
            names.append(arg.name if isinstance(arg, _Value) else arg)
        value = _Value(f"x{len(self.steps)}", kind, bound, **more)
        self.steps.append(Step(value.name, f"{kind}{self.length}" if kind in "uv" else kind, text, tuple(names)))
        self.values.append(value)
        return value

    def argument(self, letter: str) -> _Value:
        """A value of a type: rather one that nothing uses yet, or one that is loaded or converted for it."""
        if letter in _AXES:
            return _Value(self.capture("f", [_AXES[letter]]), "f", 2.0)
        exact, kind = letter in "xyw", {"x": "f", "y": "g", "w": "v"}.get(letter, letter)
        found = [v for v in self.values if v.type == kind and (v.exact or not exact)]
        fresh = {"f": 0.25, "i": 0.15, "p": 0.2}.get(kind, 0.4)
        if not found or self.rng.random() < fresh:
            return self.load(kind) if letter in "xy" else self.row(kind) if letter == "w" else self.fresh(kind)
        weights = np.array([1.0 if v.used else 3.0 for v in found])
        return found[self.rng.choice(len(found), p=weights / weights.sum())]

    def fresh(self, kind: str) -> _Value:
        if kind == "p" and self.rng.random() < 0.7:
            text = ["{0} < {1}", "{0} >= {1}", "({0} + {1}) % 3 != 0", "(({0} ^ {1}) & 1) == 0"][self.rng.integers(4)]
            return self.step("p", text, [self.position(), self.position()], 1.0)
        if kind in "uv":
            return self.vector(kind)
        return self.load(kind)

    def position(self) -> _Value:
        """An integer: mostly a query or a key."""
        values = [v for v in self.values if v.type == "i"]
        weights = np.array([4.0 if v.name in ("q_idx", "kv_idx") else 1.0 for v in values])
        return values[self.rng.choice(len(values), p=weights / weights.sum())]

    # --- loads

    def load(self, kind: str) -> _Value:
        """One element of a captured array of rank 0 to 4."""
        rank = int(self.rng.choice(5, p=[0.12, 0.36, 0.28, 0.14, 0.1]))
        names = [str(x) for x in self.rng.choice(list(POSITIONS), rank, replace=False, p=[0.15, 0.2, 0.325, 0.325])]
        shape: list[str | int] = [POSITIONS[name] for name in names]
        indices: list[str | _Value] = list(names)
        if self.rng.random() < 0.15:  # a constant index
            at, size = int(self.rng.integers(rank + 1)), int(self.rng.integers(1, 4))
            shape.insert(at, size)
            indices.insert(at, f"{int(self.rng.integers(-size, size))}")
        elif rank and self.rng.random() < 0.45:
            return self.gather(kind, shape, indices)
        name, args = self.capture(kind, shape), []
        text = self.spelled(name, [str(index) for index in indices], kind)
        return self.loaded(kind, text, args, name)

    def spelled(self, name: str, indices: list[str], kind: str) -> str:
        """One of the ways to index an array by positions; ``{0}`` stands for the array."""
        if not indices:
            return "{0}"
        way = self.rng.random()
        if len(indices) > 1 and way < 0.25:
            return "{0}" + "".join(f"[{index}]" for index in indices)
        if len(indices) == 2 and way < 0.4:
            return f"{{0}}.T[{indices[1]}, {indices[0]}]"
        if len(indices) == 2 and way < 0.5:
            return f"{{0}}[:, {indices[1]}][{indices[0]}]"
        if len(indices) == 1 and way < 0.2:
            return f"lax.dynamic_index_in_dim({{0}}, {indices[0]}, keepdims=False)"
        if kind in "fg" and 0.5 < way < 0.6:
            return f"jnp.tanh({{0}})[{', '.join(indices)}]"
        if kind in "fg" and 0.6 < way < 0.65:
            return f"(0.5 * {{0}})[{', '.join(indices)}]"
        return f"{{0}}[{', '.join(indices)}]"

    def gather(self, kind: str, shape: list[str | int], indices: list[Any]) -> _Value:
        """A load at an index that is computed, or loaded itself."""
        at = int(self.rng.integers(len(shape)))
        if self.rng.random() < 0.7:
            shape[at] = int(self.rng.integers(3, 12))
        size = f"{shape[at]}"
        index = self.position() if self.rng.random() < 0.7 else self.load("i")
        if self.rng.random() < 0.5:
            other = self.position()
            text = ["{0} - {1}", "{0} * 3 - {1}", "{0} + {1}", "{0} ^ {1}"][self.rng.integers(4)]
            index = self.step("i", text, [index, other], 4 * index.bound + other.bound)
        name = self.capture(kind, shape)
        # A position itself must be within an array, or clamped on purpose.
        beyond = f"jnp.minimum({{1}}, {size} - 1)" if index.name in POSITIONS else "{1}"
        before, after = [", ".join(indices[:at]), ", ".join(indices[at + 1 :])]
        around = lambda i: f"{before}{', ' if before else ''}{i}{', ' if after else ''}{after}"
        one = len(shape) == 1
        ways = [
            f"{{0}}[{around(f'{{1}} % {size}')}]",
            f"{{0}}[{around(f'jnp.clip({{1}}, 0, {size} - 1)')}]",
            f"{{0}}[{around(beyond)}]",
            f"{{0}}.at[{around(beyond)}].get(mode='clip')",
            *([f"jnp.take({{0}}, {{1}}, mode='{mode}')" for mode in ("wrap", "clip")] if one else []),
            *([f"jnp.take({{0}}, {{1}} % {size})"] if one else []),
            *([f"looked({{0}}, {{1}} % {size})"] if one and kind == "f" and isinstance(shape[0], int) else []),
            *([f"{{0}}.at[{around('{1}')}].get(mode='fill', fill_value=0.25)"] if kind in "fg" else []),
            *([f"{{0}}.at[{around('{1}')}].get(mode='fill', fill_value=1)"] if kind == "i" else []),
        ]
        return self.loaded(kind, ways[self.rng.integers(len(ways))], [index], name)

    def vector(self, kind: str) -> _Value:
        """A vector: a row of a captured array, a product with a matrix, or numbers side by side."""
        way, length = self.rng.random(), self.length
        if kind == "v" and way < 0.15:
            args = [self.argument("f") for _ in range(length)]
            text = "jnp.stack([" + ", ".join(f"{{{i}}}" for i in range(length)) + "])"
            return self.step("v", text, args, max(arg.bound for arg in args))
        if kind == "v" and way < 0.3:
            matrix = self.capture("f", [length, length])
            vector = self.vector("v")
            return self.step("v", "({0} @ {1}) * 0.25", [matrix, vector], vector.bound)
        if kind == "v" and way < 0.45:
            table, start = self.capture("f", [length + int(self.rng.integers(1, 40))]), self.position()
            text = f"lax.dynamic_slice({{0}}, ({{1}},), ({length},))"
            return self.step("v", text, [table, start], 2.0)
        return self.row(kind)

    def row(self, kind: str) -> _Value:
        """A row of a captured array."""
        rank = int(self.rng.choice([0, 1, 2], p=[0.1, 0.6, 0.3]))
        names = [str(x) for x in self.rng.choice(list(POSITIONS), rank, replace=False, p=[0.1, 0.2, 0.35, 0.35])]
        of = "f" if kind == "v" else "g"
        name = self.capture(of, [*(POSITIONS[name] for name in names), self.length])
        text = f"{{0}}[{', '.join(names)}]" if names else "{0}"
        if names and self.rng.random() < 0.2:
            text = f"{{0}}[{', '.join(names)}, :]"
        return self.loaded(kind, text, [], name)

    def loaded(self, kind: str, text: str, args: list[_Value], name: str) -> _Value:
        args = [name, *args]
        if kind in "gu":
            text += ".astype(G)"
        capture = next(capture for capture in self.captures if capture.name == name)
        if capture.kind == "u":
            text += ".astype(jnp.int32)"
        exact = kind in "fgv" and "0.25" not in text and "0.5" not in text and "tanh" not in text
        return self.step(kind, text, args, capture.high if kind == "i" else 2.0, exact=exact)

    def capture(self, kind: str, shape: list[str | int]) -> str:
        """Makes a captured array, or takes one again."""
        same = [c for c in self.captures if c.kind == kind and list(c.shape) == shape]
        if same and self.rng.random() < 0.4:
            return same[self.rng.integers(len(same))].name
        name = f"{'c' if self.role == 'score' else 'm'}{len(self.captures)}"
        if kind == "i":
            kind = "u" if self.rng.random() < 0.15 else "i"
        high, signed = int(self.rng.integers(2, 40)), bool(self.rng.random() < 0.3) and kind == "i"
        self.captures.append(Capture(name, tuple(shape), kind, high, signed))
        return name

    # --- ends

    def joined_score(self) -> str:
        """A score that depends on all that nothing uses yet."""
        score = self.values[0]
        loose = [v for v in self.values if not v.used and v is not score]
        terms = [v if v.type == "f" else self.as_float(v) for v in loose]
        keeps = self.rng.random() < 0.95 or not terms
        if keeps and (not score.used or self.rng.random() < 0.5):
            terms.append(score)
        total = terms[0]
        for term in terms[1:]:
            factor = [1.0, 0.5, -0.7][self.rng.integers(3)]
            total = self.step("f", f"{{0}} + {factor} * {{1}}", [total, term], total.bound + term.bound)
        if total.bound > 12:
            total = self.step("f", f"{{0}} * {2.0 ** -math.ceil(math.log2(total.bound / 12))}", [total], 12.0)
        return total.name

    def as_float(self, value: _Value) -> _Value:
        text, bound = {
            "i": ("({0} % 7).astype(F32) * 0.1", 0.7),
            "p": ("jnp.where({0}, F32(0.3), F32(-0.2))", 0.3),
            "g": ("{0}.astype(F32)", value.bound),
            "v": ("jnp.sum({0}) * 0.5", 2 * value.bound),
            "u": ("jnp.sum({0}).astype(F32) * 0.5", 2 * value.bound),
        }[value.type]
        return self.step("f", text, [value], bound)

    def joined_mask(self) -> str:
        """A mask that depends on all that nothing uses yet, and mostly shows something."""
        loose = [v for v in self.values if not v.used and v.type == "p"] or [self.apply_comparison()]
        for value in [v for v in self.values if not v.used and v.type == "i"]:
            loose.append(self.step("p", "{0} % 5 != 2", [value], 1.0))
        mask = loose[0]
        for value in loose[1:]:
            mask = self.step("p", ["{0} | {1}", "{0} & {1}", "{0} ^ {1}"][self.rng.integers(3)], [mask, value], 1.0)
        if self.rng.random() < 0.6:
            mask = self.step("p", "{0} | ((q_idx - kv_idx) % 5 == 0)", [mask], 1.0)
        if self.guarded:
            mask = self.step("p", "(kv_idx < q_idx) & {0}", [mask], 1.0)
        return mask.name

    def apply_comparison(self) -> _Value:
        return self.step("p", "jnp.abs({0} - {1}) < 23", [self.position(), self.position()], 1.0)

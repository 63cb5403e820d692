"""Triton source as text: names of dtypes, numbers, shapes, and the values that names stand for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from jax.typing import ArrayLike, DTypeLike

DTYPES = {
    "float16": "tl.float16", "bfloat16": "tl.bfloat16", "float32": "tl.float32", "float64": "tl.float64",
    "int8": "tl.int8", "int16": "tl.int16", "int32": "tl.int32", "int64": "tl.int64",
    "uint8": "tl.uint8", "uint16": "tl.uint16", "uint32": "tl.uint32", "uint64": "tl.uint64", "bool": "tl.int1",
    "float8_e4m3fn": "tl.float8e4nv", "float8_e5m2": "tl.float8e5",  # of caches: loaded and widened, nothing else
}  # fmt: skip


class Value(NamedTuple):
    """Value of an expression of the source."""

    text: str  # a name, or a number
    shape: tuple[int, ...]
    dtype: np.dtype
    # of Python, to which Triton gives a dtype of its own choice; None for a value that has a name
    number: np.ndarray | None = None

    @property
    def is_number(self) -> bool:
        """True if the text is a number."""
        return self.number is not None


def number_of(x: ArrayLike, dtype: DTypeLike = "int32") -> Value:
    """A constant of a jaxpr, a scalar."""
    x = np.asarray(x, np.dtype(dtype))
    return Value(number(x), (), x.dtype, x)


def number(x: np.ndarray) -> str:
    """A scalar as source.

    >>> number(np.float32(-0.5)), number(np.float32(-np.inf)), number(np.int32(3)), number(np.True_)
    ('(-0.5)', 'float("-inf")', '3', 'True')
    """
    plain = x.astype(np.float64).item() if is_float(x.dtype) else x.item()
    if isinstance(plain, float) and not math.isfinite(plain):
        return f'float("{plain}")'
    negative = not isinstance(plain, bool) and math.copysign(1, plain) < 0
    return f"({plain!r})" if negative else repr(plain)


def is_float(dtype: np.dtype) -> bool:
    """True for a dtype with floating point; numpy does not count bfloat16."""
    return dtype.kind == "f" or dtype.name == "bfloat16"


def of_shape(shape: Sequence[int]) -> str:
    """A shape as a tuple.

    >>> of_shape((64,)), of_shape((64, 32))
    ('(64,)', '(64, 32)')
    """
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"


def axes_of(rank: int, kept: Iterable[int]) -> str:
    """The index that gives an array more axes, so that its own become those that are `kept`.

    >>> axes_of(2, [0]), axes_of(2, [0, 1])
    ('[:, None]', '')
    """
    kept = list(kept)
    return "" if len(kept) == rank else f"[{', '.join(':' if i in kept else 'None' for i in range(rank))}]"


def spread(text: str, sizes: Sequence[int], shape: Sequence[int]) -> str:
    """An array with axes of these sizes, some of them 1, broadcast to a shape."""
    return text if tuple(sizes) == tuple(shape) else f"tl.broadcast_to({text}, {of_shape(shape)})"

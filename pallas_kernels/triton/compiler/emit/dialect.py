"""Differences between the targets of official Triton."""

from __future__ import annotations

import dataclasses

import numpy as np

from pallas_kernels.triton.compiler.emit.text import DTYPES


@dataclasses.dataclass(frozen=True)
class Dialect:
    """Triton as a target understands it; its methods give source."""

    ptx: bool = True  # whether there is inline PTX, and the libdevice of NVIDIA
    tf32: bool = True  # whether `tl.dot` knows "tf32", which is an error elsewhere

    def dtype(self, dtype: np.dtype) -> str:
        """The dtype in which values of a dtype are held."""
        return DTYPES[dtype.name]

    def cast(self, text: str, dtype: np.dtype) -> str:
        """A value in another dtype, rounded to nearest."""
        return f"{text}.to({DTYPES[dtype.name]})"

    def load(self, arguments: str, dtype: np.dtype) -> str:
        """A load, with what `tl.load` takes."""
        return f"tl.load({arguments})"

    def stored(self, text: str, dtype: np.dtype) -> str:
        """A value as it is stored."""
        return text

    def mask(self, text: str) -> str:
        """A mask of a load or a store."""
        return text

    def math(self, name: str, *args: str) -> str:
        """A function of float32, by its name in libdevice."""
        if name == "cbrt" and not self.ptx:  # the one that AMD's lacks
            return f"libdevice.copysign(tl.exp2(tl.log2(tl.abs({args[0]})) * {1 / 3}), {args[0]})"
        return f"libdevice.{name}({', '.join(args)})"

    def counter(self, name: str) -> str | None:
        """Operation on the counter of a loop; None for nothing."""
        del name

    def extreme(self, name: str) -> str:
        """The function that reduces an axis of floating point by ``"maximum"`` or ``"minimum"``; NaN counts."""
        return f"_reduce_{name}"


CUDA = Dialect()
GFX942 = Dialect(ptx=False)
OTHER_AMD = Dialect(ptx=False, tf32=False)

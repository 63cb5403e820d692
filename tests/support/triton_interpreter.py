"""Official Triton's interpreter, on numpy arrays and without torch: what kernels compute, without a GPU.

Triton decides when it is imported whether it interprets (`TRITON_INTERPRET=1`), so tests that need this run in a
process of their own: `tests/kernels/test_official_triton.py` starts them.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.interpreters import mlir

from pallas_kernels.triton.compiler.compile import jit_function
from pallas_kernels.triton.compiler.emit import emit
from pallas_kernels.triton.compiler.emit.dialect import Dialect
from pallas_kernels.triton.compiler.launch import launch
from pallas_kernels.triton.compiler.launch.installed import Launcher

_LOCK = threading.Lock()  # the interpreter keeps its place in the grid in a global, and patches `triton.language`
_FORMULAS = {  # the interpreter has no libdevice
    "exp": "tl.exp({0})", "log": "tl.log({0})", "log2": "tl.log2({0})", "sin": "tl.sin({0})", "cos": "tl.cos({0})",
    "erf": "tl.erf({0})", "log1p": "tl.log(1.0 + {0})", "expm1": "(tl.exp({0}) - 1.0)",
    "pow": "tl.exp2({1} * tl.log2({0}))", "tan": "(tl.sin({0}) / tl.cos({0}))",
    "tanh": "(2.0 / (1.0 + tl.exp(-2.0 * {0})) - 1.0)", "sinh": "(0.5 * (tl.exp({0}) - tl.exp(-{0})))",
    "cosh": "(0.5 * (tl.exp({0}) + tl.exp(-{0})))",
    "cbrt": "tl.where({0} < 0, -1.0, 1.0) * tl.exp2(tl.log2(tl.abs({0})) / 3.0)",
    "asinh": "tl.log({0} + tl.sqrt({0} * {0} + 1.0))", "acosh": "tl.log({0} + tl.sqrt({0} * {0} - 1.0))",
    "atanh": "(0.5 * tl.log((1.0 + {0}) / (1.0 - {0})))",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Interpreted(Dialect):
    """Without bfloat16 arithmetic, libdevice or PTX; masks are booleans of numpy, and loops count in Python."""

    ptx: bool = False

    def dtype(self, dtype: np.dtype) -> str:
        return "tl.float32" if dtype.name == "bfloat16" else super().dtype(dtype)

    def cast(self, text: str, dtype: np.dtype) -> str:
        if dtype.name == "bfloat16":  # of an integer it would take the bits
            return f"{text}.to(tl.float32).to(tl.bfloat16).to(tl.float32)"
        return super().cast(text, dtype)

    def load(self, arguments: str, dtype: np.dtype) -> str:
        loaded = super().load(arguments, dtype)
        return f"{loaded}.to(tl.float32)" if dtype.name == "bfloat16" else loaded

    def stored(self, text: str, dtype: np.dtype) -> str:
        return f"{text}.to(tl.bfloat16)" if dtype.name == "bfloat16" else text

    def mask(self, text: str) -> str:
        return f"{text} != 0"

    def math(self, name: str, *args: str) -> str:
        if name not in _FORMULAS:
            raise emit.UnknownPrimitiveError(f"`libdevice.{name}`, which the interpreter lacks")
        return _FORMULAS[name].format(*(f"({x})" for x in args))

    def counter(self, name: str) -> str:
        return f"{name} = tl.full((), {name}, tl.int32)"

    def extreme(self, name: str) -> str:
        return {"maximum": "tl.max", "minimum": "tl.min"}[name]


class _Array:
    """A numpy array as the interpreter takes arguments: an address, and the name of a dtype."""

    def __init__(self, x: np.ndarray) -> None:
        self.x, self.dtype = x, str(x.dtype)

    def data_ptr(self) -> int:
        return self.x.ctypes.data


def run(source: emit.Source, *arrays: np.ndarray) -> None:
    """Runs a kernel on numpy arrays, which it reads and writes."""
    from triton.runtime import interpreter

    class Executor(interpreter.GridExecutor):
        """Without the copies to a device and back, which want torch."""

        def _init_args_hst(self, args, kwargs):
            return list(args), dict(kwargs)

        def _restore_args_dev(self, *_):
            pass

    assert all(x.flags.c_contiguous for x in arrays)
    with _LOCK, np.errstate(all="ignore"):
        function = jit_function(source)
        Executor(function.rewrite(), function.arg_names, source.grid)(*map(_Array, arrays))


def call(
    source: emit.Source,
    args: Sequence[jax.Array],
    tiles: Any,
    target: Any,
    outputs: Sequence[jax.ShapeDtypeStruct],
    aliases: dict[int, int],
) -> list[jax.Array]:
    """In place of `launch.call`."""

    def on_host(*arrays: Any) -> list[np.ndarray]:
        arrays = [np.array(x, order="C") for x in arrays]  # copies: some are written
        # What a kernel does not write must not matter: 77 would.
        outs = [arrays[aliases[n]] if n in aliases else np.full(x.shape, 77, x.dtype) for n, x in enumerate(outputs)]
        run(source, *arrays, *(x for n, x in enumerate(outs) if n not in aliases))
        return outs

    return jax.pure_callback(on_host, list(outputs), *args, vmap_method="sequential")


class _Host:
    """In place of a `Target`."""

    dialect = Interpreted()


def _lowering(ctx, *args, jaxpr, names, tiles, device_kind):
    del device_kind
    return mlir.lower_fun(lambda *xs: launch._run(jaxpr, xs, names, tiles, _Host()), multiple_results=True)(ctx, *args)


@functools.cache
def install() -> None:
    """Has CPUs run kernels by Triton's interpreter."""
    mlir.register_lowering(launch._call_p, _lowering, platform="cpu")


def replaced(monkeypatch: Any) -> None:
    """Makes every call one for a GPU, which is this CPU."""
    install()
    monkeypatch.setattr(launch, "call", call)
    monkeypatch.setattr("pallas_kernels.triton.plan.limits.launcher", lambda: Launcher("direct", "an interpreter"))
    monkeypatch.setattr("jflex.entry.current_device", lambda *_: ("gpu", "NVIDIA H200"))

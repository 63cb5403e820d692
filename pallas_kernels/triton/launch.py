"""Runners of Triton kernels: Pallas' interpreter, Pallas' own Triton with and without PTX, and official Triton.

A kernel is traced by Pallas. Its runner launches it, and has what Pallas' core has not: masked loads and stores,
functions of the SFU. This is the one place that needs `jax.experimental.pallas.triton`, and only where that compiles a
kernel, or interprets it.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.extend.core import jaxpr_as_fun
from jax.interpreters import mlir
from jax.ref import get as ref_get
from jax.ref import set as ref_set

from pallas_kernels.config import Tiles
from pallas_kernels.plan import limit_of_pallas
from pallas_kernels.spec import AttentionSpec, Route, is_amd
from pallas_kernels.triton.compiler.launch import launch as official
from pallas_kernels.triton.compiler.rules import primitives
from pallas_kernels.types import Ref


@dataclasses.dataclass(frozen=True)
class Runner(abc.ABC):
    """Launches a kernel for a device, and says in it what Pallas' core does not."""

    device_kind: str
    is_interpreter: ClassVar[bool] = False

    @abc.abstractmethod
    def load(self, ref: Ref, *, mask: jax.Array | None = None, other: float = 0) -> jax.Array:
        """Loads a ref, or an index of one, where `mask` is True (None: everywhere); elsewhere `other`."""

    @abc.abstractmethod
    def store(self, ref: Ref, x: jax.Array, *, mask: jax.Array | None = None) -> None:
        """Stores to what a ref refers to, where a mask is true.

        The interpreter also writes the elements that are masked, with their old values.
        """

    def element(self, name: str, *args: jax.Array) -> jax.Array:
        """One of `primitives.FUNCTIONS` on each element of arrays of one shape, by JAX where there is no PTX."""
        return _PORTABLE[name](*args)

    def multiply_add(self, a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
        """``a * b + c`` of float32 arrays of one shape, as one FMA instruction."""
        return self.element("multiply_add", a, b, c)

    def relu(self, x: jax.Array) -> jax.Array:
        """The positive elements of a float32 array, zeros for the others, and NaN, which Triton's maximum drops."""
        return self.element("relu", x)

    def exp2_of_multiple(self, x: jax.Array, factor: float, subtracted: jax.Array) -> jax.Array:
        """``2 ** (factor * x - subtracted)``; with PTX by one FMA and one ``ex2.approx`` (relative error 2 ** -22)."""
        return jnp.exp2(x * factor - subtracted)

    def opaque(self, x: jax.Array) -> jax.Array:
        """A float32 tile as it is, which LLVM cannot see through: costs no instruction.

        Of ``where(mask, x, 0)`` rounded to 16 bits it would make a select of 16 bits, between numbers that are packed
        in pairs: in SASS PRMT and SEL for each score, instead of FSEL.
        """
        return self.element("opaque", x)

    def computed_once(self, compute: Callable[[], jax.Array]) -> jax.Array:
        """A tile for two dots, computed once although one of them transposes it."""
        return compute()

    def launch(
        self,
        kernel: Callable[..., None],
        inputs: Sequence[object],  # pytrees of arrays; the kernel gets pytrees of refs
        outputs: Sequence[jax.ShapeDtypeStruct],
        *,
        name: str,
        grid: tuple[int, ...],  # programs along each axis; the first varies fastest
        tiles: Tiles,
        aliases: dict[int, int] | None = None,  # numbers of (flattened) inputs that are also the memory of outputs
    ) -> list[jax.Array]:
        """Runs ``kernel(*input refs, *output refs)`` on a grid."""
        # A `jax.shard_map` around this call requires outputs to say, in this form, that nothing varies over its mesh.
        nowhere = jax.typeof(jax.tree.leaves(inputs)[0]).manual_axis_type
        outputs = [jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=nowhere) for x in outputs]
        call = functools.partial(
            pl.pallas_call,
            kernel,
            out_shape=outputs,
            grid=grid,
            interpret=self.is_interpreter,
            name=name,
            input_output_aliases=aliases or {},
        )
        return self._run(call, kernel, inputs, len(outputs), tiles)

    def launch_in_place(
        self,
        kernel: Callable[..., None],
        inputs: Sequence[object],
        results: object,
        *,
        name: str,
        grid: tuple[int, ...],
        tiles: Tiles,
    ) -> list[jax.Array]:
        """Runs ``kernel(*input refs, refs to the old results, *refs to the new ones)``, in the same memory."""
        old, first = jax.tree.leaves(results), len(jax.tree.leaves(inputs))
        outputs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in old]
        aliases = {first + n: n for n in range(len(old))}
        return self.launch(kernel, (*inputs, results), outputs, name=name, grid=grid, tiles=tiles, aliases=aliases)

    @abc.abstractmethod
    def _run(
        self,
        call: Callable[..., Callable[..., list[jax.Array]]],
        kernel: Callable[..., None],
        inputs: Sequence[object],
        outputs: int,
        tiles: Tiles,
    ) -> list[jax.Array]:
        """Runs a kernel by `call`, `pl.pallas_call` with all but the parameters of a compiler."""


def runner_of(spec: AttentionSpec) -> Runner:
    """The runner of a call."""
    return runner_for(spec.route, spec.device_kind)


def runner_for(route: Route, device_kind: str) -> Runner:
    """The runner of a kernel that computes no attention."""
    pallas = PortableTriton if is_amd(device_kind) else PallasTriton
    return {"interpreted": Interpreter, "pallas": pallas, "official": OfficialTriton}[route](device_kind)


class Interpreter(Runner):
    """Pallas' interpreter; masked loads and stores by index, on a JAX whose Pallas has none of its own.

    A slice becomes an array of indices: the interpreter refuses a slice that is longer than its array, which a kernel
    traces, and never loads, where an array is shorter than a tile.
    """

    is_interpreter = True

    def load(self, ref: Ref, *, mask: jax.Array | None = None, other: float = 0) -> jax.Array:  # noqa: D102
        if limit_of_pallas() is None:
            return _load_by_pallas(ref, mask, other)
        return self.load_by_index(ref, mask, other)

    def store(self, ref: Ref, x: jax.Array, *, mask: jax.Array | None = None) -> None:  # noqa: D102
        if limit_of_pallas() is None:
            return _pallas().store(ref, x, mask=mask)
        return self.store_by_index(ref, x, mask)

    @staticmethod
    def load_by_index(ref: Ref, mask: jax.Array | None, other: float) -> jax.Array:
        """Loads by index arrays."""
        x = ref_get(*by_arrays(ref))
        return x if mask is None else jnp.where(mask, x, jnp.full_like(x, other))

    @staticmethod
    def store_by_index(ref: Ref, x: jax.Array, mask: jax.Array | None) -> None:
        """Stores by index arrays; masked elements are written with their old values."""
        whole, index = by_arrays(ref)
        ref_set(whole, index, x if mask is None else jnp.where(mask, x, ref_get(whole, index)))

    def relu(self, x: jax.Array) -> jax.Array:  # noqa: D102
        return jnp.maximum(x, 0.0)

    def _run(self, call, kernel, inputs, outputs, tiles) -> list[jax.Array]:
        return call()(*inputs)


def by_arrays(ref: Ref) -> tuple[Ref, tuple[jax.Array, ...] | None]:
    """The whole ref, and the index by arrays of one shape; None for all of it."""
    view = cast(Any, ref)
    if not getattr(view, "transforms", ()):
        return ref, None
    (indexer,) = view.transforms
    slices = [x for x in indexer.indices if isinstance(x, pl.Slice)]
    shape, index, before = (*indexer.int_indexer_shape, *(x.size for x in slices)), [], 0
    for x in indexer.indices:
        if isinstance(x, pl.Slice):
            axis = len(indexer.int_indexer_shape) + before
            positions = x.start + jnp.arange(x.size, dtype=jnp.int32)
            index.append(positions.reshape([-1 if i == axis else 1 for i in range(len(shape))]))
            before += 1
        else:
            x = jnp.asarray(x, jnp.int32)
            index.append(x.reshape(*x.shape, *[1] * len(slices)) if x.ndim else x)
    return view.ref, tuple(jnp.broadcast_to(x, shape) if x.ndim else x for x in index)


class OfficialTriton(Runner):
    """Official Triton: operations are primitives of ours, of which its emitter makes source."""

    def load(self, ref: Ref, *, mask: jax.Array | None = None, other: float = 0) -> jax.Array:  # noqa: D102
        return ref_get(ref) if mask is None else primitives.masked_load(ref, mask, other)

    def store(self, ref: Ref, x: jax.Array, *, mask: jax.Array | None = None) -> None:  # noqa: D102
        return ref_set(ref, None, x) if mask is None else primitives.masked_store(ref, x, mask)

    def element(self, name: str, *args: jax.Array) -> jax.Array:  # noqa: D102
        return primitives.element(name, *args)

    def exp2_of_multiple(self, x: jax.Array, factor: float, subtracted: jax.Array) -> jax.Array:  # noqa: D102
        addend = jnp.broadcast_to(-subtracted, x.shape)
        return jnp.exp2(self.multiply_add(x, jnp.full_like(x, factor), addend))

    def _run(self, call, kernel, inputs, outputs, tiles) -> list[jax.Array]:
        return official.launch(call(), inputs, official.names_of(kernel, inputs, outputs), tiles, self.device_kind)


class PallasTriton(Runner):
    """The Triton inside Pallas, deprecated since JAX 0.11."""

    def load(self, ref: Ref, *, mask: jax.Array | None = None, other: float = 0) -> jax.Array:  # noqa: D102
        return _load_by_pallas(ref, mask, other)

    def store(self, ref: Ref, x: jax.Array, *, mask: jax.Array | None = None) -> None:  # noqa: D102
        _pallas().store(ref, x, mask=mask)

    def element(self, name: str, *args: jax.Array) -> jax.Array:  # noqa: D102
        function = primitives.FUNCTIONS[name]
        return _inline_ptx(function.ptx, *args, dtype=function.dtype)

    def exp2_of_multiple(self, x: jax.Array, factor: float, subtracted: jax.Array) -> jax.Array:
        """Inline PTX, because XLA's code rounds product and difference separately.

        Its exponential guards numbers below 2 ** -126, which here become 0: together seven SASS instructions for each
        score.
        """
        addend = jnp.broadcast_to(-subtracted, x.shape)
        bits = np.float32(factor).view(np.uint32)
        return _inline_ptx(f"{{ fma.rn.f32 $0, $1, 0f{bits:08X}, $2; ex2.approx.ftz.f32 $0, $0; }}", x, addend)

    def computed_once(self, compute: Callable[[], jax.Array]) -> jax.Array:
        """In a loop of one step.

        XLA's compiler of Triton moves the transpose before casts and products, and so computes the tile in either
        order, to two buffers. It moves none into a loop, and unrolls this one later. Compiled for sm_90a, 64 rows by 32
        latent vectors of eight bits: 1108 SASS instructions of the mainloop, 1299 without.
        """
        tile = jax.eval_shape(compute)
        return lax.fori_loop(0, 1, lambda _, __: compute(), jnp.zeros(tile.shape, tile.dtype))

    def _run(self, call, kernel, inputs, outputs, tiles) -> list[jax.Array]:
        params = _pallas().CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages)
        return official.bind(_quiet_p, call(compiler_params=params), inputs)


class PortableTriton(PallasTriton):
    """Pallas' Triton on AMD's GPUs, which have no PTX. Lowered in tests, and never run."""

    element, exp2_of_multiple = Runner.element, Runner.exp2_of_multiple


_PORTABLE: dict[str, Callable[..., jax.Array]] = {  # without words of bytes, which are refused on AMD's GPUs
    "multiply_add": lambda a, b, c: a * b + c,
    "opaque": lambda x: x,
    "relu": lambda x: jnp.where(x < 0.0, jnp.zeros_like(x), x),  # NaN stays
    "tanh": jnp.tanh,
    "sin": jnp.sin,
    "cos": jnp.cos,
    "logistic": lambda x: 1.0 / (1.0 + jnp.exp2(x)),
}


def _pallas() -> ModuleType:
    """`jax.experimental.pallas.triton`, which later versions of JAX lack."""
    from jax.experimental.pallas import triton

    return triton


def _load_by_pallas(ref: Ref, mask: jax.Array | None, other: float) -> jax.Array:
    """`pallas.triton.load`, which takes a number of the kind of the array, and none without a mask."""
    other = other if jnp.issubdtype(ref.dtype, jnp.integer) else float(other)
    return _pallas().load(ref, mask=mask, other=None if mask is None else other)


def _inline_ptx(ptx: str, *args: jax.Array, dtype: str = "float32") -> jax.Array:
    """Runs PTX on each element, or each two of 16 bits: ``$0`` is the result, ``$1`` the first argument."""
    [out] = _pallas().elementwise_inline_asm(
        ptx,
        args=args,
        constraints=primitives.constraints(dtype, len(args)),
        pack=primitives.pack(dtype),
        result_shape_dtypes=[jax.ShapeDtypeStruct(args[0].shape, jnp.dtype(dtype))],
    )
    return out


# JAX >= 0.11 warns at each lowering of a kernel through Triton, which is inside of a user's own jit, where no context
# of ours reaches. So the call is a primitive whose lowering lowers the kernel with this one warning off.
_MESSAGE = "The Pallas Triton backend is deprecated"
_quiet_p = official.call_primitive("jflex_triton_call")


def _quiet_lowering(ctx, *args, jaxpr):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=_MESSAGE, category=DeprecationWarning)
        return mlir.lower_fun(jaxpr_as_fun(jaxpr), multiple_results=True)(ctx, *args)


mlir.register_lowering(_quiet_p, _quiet_lowering)

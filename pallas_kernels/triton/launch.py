"""Launching a Triton kernel. The one place that knows who compiles it, and how JAX treats that."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import jax
from jax.experimental import pallas as pl
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir

from pallas_kernels.config import Tiles
from pallas_kernels.spec import Route
from pallas_kernels.triton.compiler.launch import launch as official


class Launched(Protocol):
    """What `launch` asks of a call: a spec of attention, or a `Target`."""

    @property
    def route(self) -> Route: ...  # noqa: D102
    @property
    def device_kind(self) -> str: ...  # noqa: D102


class Target(NamedTuple):
    """Who runs a kernel that computes no attention.

    Attributes:
      route: Who runs it.
      device_kind: Of the device.
    """

    route: Route
    device_kind: str


def launch(
    kernel: Callable[..., None],
    inputs: Sequence[object],
    outputs: Sequence[jax.ShapeDtypeStruct],
    *,
    name: str,
    grid: tuple[int, ...],
    tiles: Tiles,
    spec: Launched,
    aliases: dict[int, int] | None = None,
) -> list[jax.Array]:
    """Runs ``kernel(*input refs, *output refs)`` on a grid.

    Args:
      kernel: The kernel.
      inputs: Pytrees of arrays; the kernel gets pytrees of refs.
      outputs: List of ``jax.ShapeDtypeStruct``.
      name: In profiles.
      grid: Programs along each axis; the first varies fastest.
      tiles: Warps and stages.
      spec: The call: it says who runs the kernel, and on which device.
      aliases: Numbers of (flattened) inputs that are also the memory of outputs.
    """
    # A `jax.shard_map` around this call requires outputs to say, in this form, that nothing varies over its mesh.
    nowhere = jax.typeof(jax.tree.leaves(inputs)[0]).manual_axis_type
    outputs = [jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=nowhere) for x in outputs]
    call = functools.partial(
        pl.pallas_call,
        kernel,
        out_shape=outputs,
        grid=grid,
        interpret=spec.route == "interpreted",
        name=name,
        input_output_aliases=aliases or {},
    )
    if spec.route == "interpreted":
        return call()(*inputs)
    if spec.route == "official":
        names = official.names_of(kernel, inputs, len(outputs))
        return official.launch(call(), inputs, names, tiles, spec.device_kind)
    from jax.experimental.pallas import triton as plgpu

    params = plgpu.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages)
    return _without_warning(call(compiler_params=params), inputs)


# JAX >= 0.11 warns at each lowering of a kernel through Triton, which is inside of a user's own jit, where no context
# of ours reaches. So the call is a primitive whose lowering lowers the kernel with this one warning off.
_MESSAGE = "The Pallas Triton backend is deprecated"
_quiet_p = Primitive("jflex_triton_call")
_quiet_p.multiple_results = True


def _without_warning(call: Callable[..., list[jax.Array]], inputs: Sequence[object]) -> list[jax.Array]:
    flat, tree = jax.tree.flatten(tuple(inputs))
    jaxpr = jax.make_jaxpr(lambda *xs: call(*jax.tree.unflatten(tree, xs)))(*flat)
    return _quiet_p.bind(*flat, jaxpr=jaxpr)


@_quiet_p.def_effectful_abstract_eval
def _quiet_abstract(*_, jaxpr):
    opened = getattr(jaxpr, "jaxpr", jaxpr)
    return [v.aval for v in opened.outvars], opened.effects


def _quiet_lowering(ctx, *args, jaxpr):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=_MESSAGE, category=DeprecationWarning)
        return mlir.lower_fun(jaxpr_as_fun(jaxpr), multiple_results=True)(ctx, *args)


mlir.register_lowering(_quiet_p, _quiet_lowering)
_quiet_p.def_impl(lambda *args, jaxpr: jax.jit(lambda *xs: _quiet_p.bind(*xs, jaxpr=jaxpr))(*args))


def _quiet_batching(args, dims, *, jaxpr):
    batched = jax.vmap(jaxpr_as_fun(jaxpr), in_axes=tuple(dims))
    new = jax.make_jaxpr(batched)(*args)
    outs = _quiet_p.bind(*args, jaxpr=new)
    return outs, [0] * len(outs)


batching.primitive_batchers[_quiet_p] = _quiet_batching

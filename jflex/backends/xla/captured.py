"""Gradients of captured arrays in blockwise attention: each load of a score mod, summed to its own shape."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun

from jflex.backends.xla.blockwise import INDEX_OF_AXIS, Unit, Walk, over_block
from jflex.backends.xla.loads import Load, LoadedMod
from jflex.mods.batchable import Factored, batchable, factored


class CapturedGradients(NamedTuple):
    """Inputs for the gradients of the captured arrays of a score mod."""

    walk: Walk
    loaded: LoadedMod
    operands: Sequence[jax.Array]

    def through_mod(
        self,
        unit: Unit,
        column: jax.Array,
        raw: jax.Array,
        d_s: jax.Array,
        visible: jax.Array | None,
        grads: Sequence[jax.Array | None],
    ) -> tuple[jax.Array, list[jax.Array | None]]:
        """Cotangents of the raw scores of a block, and those of the captured arrays, flat, added to `grads`."""
        loaded, operands, spec, indices = self.loaded, self.operands, self.walk.spec, self.walk.indices(unit, column)

        def pull(score, cotangent, *scalars):
            values = loaded.values(operands, score, *scalars)
            _, vjp = jax.vjp(lambda s, xs: loaded.evaluate(xs, operands, s, *scalars), score, values)
            d_score, d_values = vjp(cotangent)
            return [d_score, *d_values]

        dtype = raw.dtype
        raw, d_s = raw.astype(jnp.float32), d_s.astype(jnp.float32)
        d_score, *d_loads = _over_block(pull, (raw, d_s), indices, self.walk.axes)
        grads = list(grads)
        for load, cotangent in zip(loaded.loads, d_loads, strict=True):
            gradient = grads[load.operand]
            if gradient is not None:
                cotangent = _summed(cotangent, load, self.walk.axes, visible)
                grads[load.operand] = _scatter(
                    loaded, load, operands, indices, cotangent, gradient, self.walk.axes,
                    ordered=spec.config.deterministic and spec.platform != "cpu",
                )  # fmt: skip
        for number in loaded.whole:
            gradient = grads[number]
            if gradient is not None:
                grads[number] = gradient + self._of_whole(loaded.traced, number, raw, d_s, indices, visible)
        return d_score.array.astype(dtype), grads

    def _of_whole(self, mod, number, raw, d_s, indices, visible) -> jax.Array:
        """Flat gradient of an operand that the mod reads as a slice, or at an index that depends on the score.

        A mod may be NaN where masked, and so is 0 times its derivative: there it is evaluated at a visible position.
        """
        operands, axes = self.operands, self.walk.axes
        places = (raw, *over_block(lambda *scalars: scalars, (), indices, axes))
        if visible is not None:
            seen = jnp.argmax(jnp.broadcast_to(visible, raw.shape))
            places = tuple(jnp.where(visible, x, x.reshape(-1)[seen]) for x in places)

        def whole(x: jax.Array) -> jax.Array:
            of_scalars = functools.partial(mod, [*operands[:number], x, *operands[number + 1 :]])
            return functools.reduce(lambda f, _: jax.vmap(f), axes, of_scalars)(*places)

        pull = lambda x, cotangent: jax.vjp(whole, x)[1](cotangent)
        [gradient] = jaxpr_as_fun(batchable(jax.make_jaxpr(pull)(operands[number], d_s)))(operands[number], d_s)
        gradient = gradient.astype(jnp.float32).reshape(-1)
        return gradient if visible is None else jnp.where(jnp.any(visible), gradient, 0.0)


def _over_block(
    function: Callable[..., Sequence[jax.Array]], blocks: Sequence[jax.Array], indices: Sequence[jax.Array], axes: str
) -> list[Factored]:
    """`over_block` of a function of several results, each `factored`; factors are not broadcast over the block."""
    depends: list[frozenset[int]] = []

    def pairs(*args):
        factors = factored(function, *args)
        depends[:] = [x.depends for x in factors]
        return [(x.scale, x.array) for x in factors]

    factors = over_block(pairs, blocks, indices, axes)
    first = len(blocks)

    def reduced(array: jax.Array, depends: frozenset[int]) -> jax.Array:
        if depends & set(range(first)):
            return array
        varies = lambda axis: first + INDEX_OF_AXIS[axis] in depends
        return array[tuple(slice(None) if varies(axis) else slice(0, 1) for axis in axes)]

    return [
        Factored(scale, array if scale is None else reduced(array, kept_axes), kept_axes)
        for (scale, array), kept_axes in zip(factors, depends, strict=True)
    ]


def _summed(cotangent: Factored, load: Load, axes: str, visible: jax.Array | None) -> jax.Array:
    """The cotangent of a load, summed over the axes of a block on which the load does not depend."""
    scale, array, _ = cotangent
    if visible is not None:  # a mod may give NaN where masked
        of_elements = array if scale is None else scale
        seen = jnp.broadcast_to(visible, of_elements.shape[: len(axes)])
        shared = tuple(i for i in range(len(axes)) if array.shape[i] < seen.shape[i])
        is_seen = jnp.expand_dims(jnp.any(seen, axis=shared, keepdims=True), tuple(range(len(axes), array.ndim)))
        array = jnp.where(is_seen, array, jnp.zeros_like(array))
        scale = None if scale is None else jnp.where(seen, scale, jnp.zeros_like(scale))
    kept = [axis for axis in axes if INDEX_OF_AXIS[axis] in load.axes]
    if scale is None:
        return jnp.sum(array.astype(jnp.float32), axis=tuple(i for i, axis in enumerate(axes) if axis not in kept))
    own_axes = "".join(axis for i, axis in enumerate(axes) if array.shape[i] == scale.shape[i])
    array = array.reshape(
        *(n for n, m in zip(array.shape, scale.shape, strict=False) if n == m), *array.shape[len(axes) :]
    )
    more = "".join(chr(ord("A") + i) for i in range(array.ndim - len(own_axes)))
    return jnp.einsum(
        f"{axes},{own_axes}{more}->{''.join(kept)}{more}", scale, array.astype(jnp.float32), precision="highest",
        preferred_element_type=jnp.float32,
    )  # fmt: skip


def _scatter(
    loaded: LoadedMod,
    load: Load,
    operands: Sequence[jax.Array],
    indices: Sequence[jax.Array],
    cotangent: jax.Array,
    gradient: jax.Array,
    axes: str,
    *,
    ordered: bool,
) -> jax.Array:
    """Adds the summed cotangent of a load to the flat gradient of its operand."""
    position = lambda *scalars: loaded.positions(load, operands, jnp.float32(0), *scalars)
    for index in [INDEX_OF_AXIS[axis] for axis in reversed(axes)]:
        if index in load.axes:
            position = jax.vmap(position, in_axes=tuple(0 if a == index else None for a in range(4)))
    at = [x if a in load.axes else x.reshape(-1)[0] for a, x in enumerate(indices)]
    positions = position(*at).reshape(-1)
    positions = jnp.where(positions < 0, gradient.size, positions)
    if ordered:
        from pallas_kernels.ordered_add import ordered_add

        return ordered_add(gradient, positions, cotangent.reshape(-1))
    return gradient.at[positions].add(cotangent.reshape(-1), mode="drop")

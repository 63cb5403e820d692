"""Converts parameters between NNX and linen models."""

from collections.abc import Mapping
from typing import Any, TypeVar

import flax.core
import jax.numpy as jnp
from flax import linen, nnx, traverse_util

Module = TypeVar("Module", bound=nnx.Module)


def params_from_nnx(source: nnx.Module | nnx.State) -> dict[str, Any]:
    """Converts the parameters of an NNX module to linen.

    Names are kept, so the linen module must name its children as the NNX module does its attributes. The two
    FlexAttention layers do, and so do `nnx.Linear` and `linen.Dense`, the norms, and modules built of them.

    Args:
        source: A module, such as `flax_layers.nnx.FlexAttention` or a model; or its gradients, a State.

    Returns:
        Nested dicts of arrays: the collection "params".

    Raises:
        TypeError: `source` is neither a module nor a State.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax_layers.linen import FlexAttention
        >>> from flax_layers.nnx import FlexAttention as OfNNX
        >>> of_nnx, of_linen = OfNNX(32, 4, rngs=nnx.Rngs(0)), FlexAttention(32, 4)
        >>> inputs = jnp.ones((1, 8, 32))
        >>> print(jnp.allclose(of_linen.apply({"params": params_from_nnx(of_nnx)}, inputs), of_nnx(inputs)))
        True
    """
    if not isinstance(source, nnx.Module | nnx.State):
        raise TypeError(f"`source` must be an nnx.Module or an nnx.State. Got {type(source).__name__}.")
    state = source if isinstance(source, nnx.State) else nnx.state(source, nnx.Param)
    return nnx.to_pure_dict(state)


def params_to_nnx(params: Mapping[str, Any], module: Module) -> Module:
    """An NNX module with the parameters of a linen module.

    Args:
        params: The collection "params"; metadata such as `linen.Partitioned` is removed.
        module: An NNX module with parameters of the same names and shapes. It is not changed.

    Returns:
        A copy with these parameters; it shares all other state with `module`.

    Raises:
        ValueError: Names or shapes differ; the message lists them.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from flax_layers.linen import FlexAttention
        >>> from flax_layers.nnx import FlexAttention as OfNNX
        >>> of_linen, inputs = FlexAttention(32, 4), jnp.ones((1, 8, 32))
        >>> params = of_linen.init(jax.random.key(0), inputs)["params"]
        >>> of_nnx = params_to_nnx(params, OfNNX(32, 4, rngs=nnx.Rngs(1)))
        >>> print(jnp.allclose(of_linen.apply({"params": params}, inputs), of_nnx(inputs)))
        True
    """
    given = traverse_util.flatten_dict(linen.meta.unbox(flax.core.unfreeze(dict(params))), sep="/")
    graph, state, rest = nnx.split(module, nnx.Param, ...)
    wanted = traverse_util.flatten_dict(nnx.to_pure_dict(state), sep="/")
    shapes = lambda tree: {name: jnp.shape(leaf) for name, leaf in tree.items()}
    _check_same(shapes(given), shapes(wanted))
    nnx.replace_by_pure_dict(state, traverse_util.unflatten_dict(given, sep="/"))
    return nnx.merge(graph, state, rest)


def _check_same(given: dict[str, tuple[int, ...]], wanted: dict[str, tuple[int, ...]]) -> None:
    wrong = [f"{name} is missing" for name in sorted(wanted.keys() - given.keys())]
    wrong += [f"{name} is not in the module" for name in sorted(given.keys() - wanted.keys())]
    for name in sorted(given.keys() & wanted.keys()):
        if given[name] != wanted[name]:
            wrong.append(f"{name} has shape {given[name]}, not {wanted[name]}")
    if wrong:
        raise ValueError(
            "`params` must have the names and shapes of the parameters of `module`: "
            + "; ".join(wrong)
            + ". Construct the module with the arguments of the linen one, mods with parameters included."
        )

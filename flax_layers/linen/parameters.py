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
        >>> from flax_layers.nnx import FlexAttention as NNXAttention
        >>> nnx_layer, linen_layer = NNXAttention(32, 4, rngs=nnx.Rngs(0)), FlexAttention(32, 4)
        >>> inputs = jnp.ones((1, 8, 32))
        >>> print(jnp.allclose(linen_layer.apply({"params": params_from_nnx(nnx_layer)}, inputs), nnx_layer(inputs)))
        True
    """
    if not isinstance(source, nnx.Module | nnx.State):
        raise TypeError(f"`source` must be an nnx.Module or an nnx.State. Got {type(source).__name__}.")
    state = source if isinstance(source, nnx.State) else nnx.state(source, nnx.Param)
    return nnx.to_pure_dict(state)


def params_to_nnx(params: Mapping[str, object], module: Module) -> Module:
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
        >>> from flax_layers.nnx import FlexAttention as NNXAttention
        >>> linen_layer, inputs = FlexAttention(32, 4), jnp.ones((1, 8, 32))
        >>> params = linen_layer.init(jax.random.key(0), inputs)["params"]
        >>> nnx_layer = params_to_nnx(params, NNXAttention(32, 4, rngs=nnx.Rngs(1)))
        >>> print(jnp.allclose(linen_layer.apply({"params": params}, inputs), nnx_layer(inputs)))
        True
    """
    source = traverse_util.flatten_dict(linen.meta.unbox(flax.core.unfreeze(dict(params))), sep="/")
    graph, state, other = nnx.split(module, nnx.Param, ...)
    target = traverse_util.flatten_dict(nnx.to_pure_dict(state), sep="/")
    shapes = lambda tree: {name: jnp.shape(leaf) for name, leaf in tree.items()}
    _check_same(shapes(source), shapes(target))
    nnx.replace_by_pure_dict(state, traverse_util.unflatten_dict(source, sep="/"))
    return nnx.merge(graph, state, other)


def _check_same(source: dict[str, tuple[int, ...]], target: dict[str, tuple[int, ...]]) -> None:
    wrong = [f"{name} is missing" for name in sorted(target.keys() - source.keys())]
    wrong += [f"{name} is not in the module" for name in sorted(source.keys() - target.keys())]
    for name in sorted(source.keys() & target.keys()):
        if source[name] != target[name]:
            wrong.append(f"{name} has shape {source[name]}, not {target[name]}")
    if wrong:
        raise ValueError(
            "`params` must have the names and shapes of the parameters of `module`: "
            + "; ".join(wrong)
            + ". Construct the module with the arguments of the linen one, mods with parameters included."
        )

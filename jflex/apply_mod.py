"""`apply_vector_mod`: a vector mod on packed vectors, as keys need it before they are written into a cache."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jflex._call.vector_mods import check_vector_mod
from jflex._check.arguments import describe_array, known_values
from jflex.backends.vector_mods import modified_rows
from jflex.mods.array_sizes import CallSizes, check_requirements, last_plus_one, requirements_of
from jflex.mods.dependence import index_requirements
from jflex.mods.trace import describe
from jflex.mods.types import VectorMod
from jflex.types import AnyArray


def apply_vector_mod(
    vector_mod: VectorMod,
    vectors: Float[AnyArray, "N H D"],
    positions: Int32[AnyArray, " N"],
    requests: Int32[AnyArray, " N"] | None = None,
) -> Float[Array, "N H D"]:
    """Applies a `query_mod`, `key_mod` or `value_mod` to packed vectors, as `flex_attention` would.

    Keys and values in a cache that every call modifies alike are best modified once, before they are written: a
    `key_mod` of `paged_attention` is evaluated again in each call.

    Args:
      vector_mod: ``(vector[D], b, h, idx) -> [D]``, as in `flex_attention`.
      positions: ``idx`` of each token; `jflex.paged.token_positions` computes them. Those of padding, -1, become 0.
      requests: ``b`` of each token; `jflex.paged.token_requests` computes them. 0 for None, and for padding.

    Returns:
      The modified vectors, in the same dtype.

    Raises:
      TypeError: The mod takes or returns something else than it must, or positions or requests are not int32.
      ValueError: The mod returns another size or was made for other sizes, or shapes disagree.

    >>> import jflex
    >>> keys, positions = jnp.ones((3, 2, 8)), jnp.array([7, 8, 0], jnp.int32)  # of three tokens
    >>> jflex.apply_vector_mod(jflex.rope(10000.0), keys, positions).shape
    (3, 2, 8)
    """
    rule = "`vectors` must be a floating-point array [N, H, D], its tokens packed"
    if not (hasattr(vectors, "shape") and hasattr(vectors, "dtype")):
        raise TypeError(f"{rule}. Got {type(vectors).__name__}.")
    if not jnp.issubdtype(vectors.dtype, jnp.floating):
        raise TypeError(f"{rule}. Got {describe_array(vectors)}. Cast it.")
    if len(vectors.shape) != 3:
        raise ValueError(f"{rule}. Got {describe_array(vectors)}. Reshape [B, T, H, D] to [B * T, H, D].")
    program = check_vector_mod("vector", vector_mod, vectors.shape[2], vectors.dtype)
    at = _rows("positions", positions, vectors.shape[0])
    batch, queries = 1 if requests is None else None, last_plus_one(known_values(positions))
    required = (*requirements_of(vector_mod), *index_requirements(program, "vector", describe(vector_mod)))
    check_requirements(required, CallSizes(batch, vectors.shape[1], queries))
    b = jnp.zeros_like(at) if requests is None else _rows("requests", requests, vectors.shape[0])
    return modified_rows(vector_mod, jnp.asarray(vectors), b, at)


def _rows(name: str, x: AnyArray, count: int) -> Int32[Array, " N"]:
    rule = f"`{name}` must be int32 [N], one for each of the {count} tokens"
    if not (hasattr(x, "shape") and hasattr(x, "dtype")):
        raise TypeError(f"{rule}. Got {type(x).__name__}. Make an array of it, with `jnp.asarray`.")
    if x.dtype != jnp.int32:
        raise TypeError(f"{rule}. Got {describe_array(x)}. Cast it with `.astype(jnp.int32)`.")
    if x.shape != (count,):
        raise ValueError(f"{rule}. Got {describe_array(x)}. Reshape it.")
    return jnp.maximum(jnp.asarray(x), 0)

"""Vector mods of a call: what it makes of each query, key, value and output, one vector at a time; their checks."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.typing import ArrayLike, DTypeLike

from jflex._check.arguments import EIGHT_BITS, describe_array
from jflex.backends.vector_mods import exact_dtype
from jflex.errors import UnsupportedError
from jflex.mods.array_sizes import CallSizes, check_requirements, requirements_of
from jflex.mods.dependence import check_integer_powers, index_requirements, used_inputs
from jflex.mods.signature import accept_numpy
from jflex.mods.trace import describe, explained
from jflex.mods.types import OutputMod, VectorMod

_SIGNATURES = {
    "query": "(query[D], b, h, q_idx) -> [D]",
    "key": "(key[D], b, h_kv, kv_idx) -> [D]",
    "value": "(value[Dv], b, h_kv, kv_idx) -> [Dv]",
    "output": "(out[Dv], lse, b, h, q_idx) -> [Dv]",
    "vector": "(vector[D], b, h, idx) -> [D]",
}
_BATCH = 1  # the argument `b` of a vector mod


class VectorMods(NamedTuple):
    """The vector mods of a call, checked by `check`."""

    query: VectorMod | None = None
    key: VectorMod | None = None
    value: VectorMod | None = None
    output: OutputMod | None = None

    @property
    def any(self) -> bool:
        """True if there is a mod."""
        return any(mod is not None for mod in self)

    def check(
        self, D: int, Dv: int, dtype: DTypeLike, *, sizes: CallSizes, kv_heads: int | None, has_lse: bool = True
    ) -> None:
        """Traces each mod once, on one vector; of arrays of eight bits, `dtype` is that of query and key."""
        for role, mod, size in zip(self._fields, self, (D, D, Dv, Dv), strict=True):
            if mod is not None and role in ("query", "key") and str(dtype) in EIGHT_BITS:
                raise TypeError(
                    f"`{role}_mod` must be None where `query` and `key` have eight bits: its result would be rounded "
                    f"to {dtype}. Apply it before they are quantized."
                )
            if mod is not None:
                program = check_vector_mod(role, mod, size, dtype, has_lse=has_lse)
                of_keys = role in ("key", "value")
                check_requirements(
                    (*requirements_of(mod), *index_requirements(program, role, describe(mod))),
                    sizes._replace(heads=kv_heads, queries=None) if of_keys else sizes._replace(keys=None),
                )

    def needs_batch(self, D: int, Dv: int, dtype: DTypeLike) -> bool:
        """True if keys or values that the batch shares become different for each batch entry."""
        mods = (("key", self.key, D), ("value", self.value, Dv))
        return any(mod is not None and _uses_batch(role, mod, size, dtype) for role, mod, size in mods)

    def refuse_batch(self, D: int, Dv: int, dtype: DTypeLike, caller: str) -> None:
        """Raises where keys belong to several requests."""
        for role, mod, size in (("key", self.key, D), ("value", self.value, Dv)):
            if mod is not None and _uses_batch(role, mod, size, dtype):
                raise UnsupportedError(
                    f"`{role}_mod` of `{caller}` cannot use `b`: several requests share a key. {describe(mod)} does. "
                    "Use `kv_idx` and `h_kv`, or `paged_attention`."
                )


def check_vector_mod(
    role: str, mod: Callable[..., ArrayLike], size: int, dtype: DTypeLike, *, has_lse: bool = True
) -> core.ClosedJaxpr:
    """Traces a mod on one vector of an array of this dtype, and returns the jaxpr."""
    source = describe(mod)
    _check_signature(role, mod, source)
    vector, index = jax.ShapeDtypeStruct((size,), exact_dtype(dtype)), jax.ShapeDtypeStruct((), jnp.int32)
    lse = (jax.ShapeDtypeStruct((), vector.dtype) if has_lse else None,) if role == "output" else ()
    with explained(role, source):
        try:
            traced, out = jax.make_jaxpr(accept_numpy(mod), return_shape=True)(vector, *lse, index, index, index)
        except (TypeError, AttributeError) as error:
            if role == "output" and not has_lse and _runs_with_lse(mod, vector, index):
                raise ValueError(
                    f"`output_mod` uses the lse, which is that of a softmax, and with `normalize='none'` there is "
                    f"none: {source} gets None in its place. Leave the lse out of it, or `normalize`."
                ) from error
            raise
    _check_result(role, out, vector, source)
    check_integer_powers(traced, role, source)
    return traced


def _runs_with_lse(mod: Callable[..., ArrayLike], vector: jax.ShapeDtypeStruct, index: jax.ShapeDtypeStruct) -> bool:
    try:
        jax.eval_shape(mod, vector, jax.ShapeDtypeStruct((), vector.dtype), index, index, index)
    except (TypeError, AttributeError):  # so the lse is not what is wrong with it
        return False
    return True


def _uses_batch(role: str, mod: VectorMod, size: int, dtype: DTypeLike) -> bool:
    return _BATCH in used_inputs(check_vector_mod(role, mod, size, dtype).jaxpr, [True])


def _check_signature(role: str, mod: Callable[..., ArrayLike], source: str) -> None:
    rule = f"`{role}_mod` must be a function {_SIGNATURES[role]}"
    if not callable(mod):
        raise TypeError(f"{rule}. Got {type(mod).__name__}.")
    try:
        signature = inspect.signature(mod)
    except (TypeError, ValueError):  # builtins have none; tracing reports a wrong call
        return
    try:
        signature.bind(*range(5 if role == "output" else 4))
    except TypeError:
        raise TypeError(f"{rule}. {source} takes {signature}.") from None


def _check_result(role: str, out: ArrayLike, vector: jax.ShapeDtypeStruct, source: str) -> None:
    rule = f"`{role}_mod` must return one vector like the one it gets, {describe_array(vector)}"
    if not isinstance(out, jax.ShapeDtypeStruct):
        raise TypeError(f"{rule}; {source} returned {type(out).__name__}.")
    if out.shape != vector.shape:
        raise ValueError(
            f"{rule}; {source} returned {describe_array(out)}. It is called on one vector: index captured arrays "
            "with its position, and change the head size outside of the call."
        )
    if out.dtype != vector.dtype:
        raise TypeError(
            f"{rule}; {source} returned {describe_array(out)}. Cast it with `.astype({vector.dtype})`; the result is "
            "rounded to the dtype of the array afterwards."
        )

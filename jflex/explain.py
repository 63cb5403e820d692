"""`explain`: reports how a call of attention would run, from the checks and the plan of the call itself."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, overload

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jflex import attention, entry, varlen
from jflex._call.account import Account
from jflex._call.dispatch import Implementation
from jflex._check.keywords import check_keywords
from jflex.cascade import attention as cascade
from jflex.cascade.level import CascadeLevel
from jflex.context_parallel.account import ContextAccount
from jflex.context_parallel.attention import context_parallel_attention
from jflex.context_parallel.prepare import Checked, Division
from jflex.context_parallel.prepare import prepare as prepare_context_parallel
from jflex.latent import attention as latent
from jflex.latent import sparse
from jflex.options import Settings, checked
from jflex.paged import attention as paged
from jflex.paged.account import CascadeAccount, PagedAccount
from jflex.paged.batch import PagedBatch
from jflex.paged.cache import PagedCache
from jflex.paged.latent import LatentCache

PagedFunction = (
    Callable[Concatenate[Any, PagedCache, PagedBatch, ...], object]
    | Callable[Concatenate[Any, LatentCache, PagedBatch, ...], object]
)
CascadeFunction = Callable[Concatenate[Any, Sequence[CascadeLevel], ...], object]


@overload
def explain(call: PagedFunction, /, *args: Any, **kwargs: Any) -> PagedAccount: ...
@overload
def explain(call: CascadeFunction, /, *args: Any, **kwargs: Any) -> CascadeAccount: ...
@overload
def explain(*args: Any, **kwargs: Any) -> Account: ...
def explain(*args: Any, **kwargs: Any) -> Account | PagedAccount | CascadeAccount | ContextAccount:
    """Reports how a call of attention would run, without running it.

    ``explain(query, key, value, ...)`` takes the arguments of `flex_attention`. For the other calls, the function comes
    first: ``explain(paged_attention, q, cache, batch, ...)``, and likewise `flex_attention_varlen`, `mla_attention`,
    `sparse_mla_attention`, `cascade_attention`, `context_parallel_attention` and `flex_attention` itself.

    Arrays may be ``jax.ShapeDtypeStruct``: all arguments, and the fields of a `PagedCache`, `PagedBatch` or
    `CascadeLevel` (``jax.eval_shape`` makes them). Fields that follow from unknown values are None. For
    `flex_attention_varlen` without a `block_mask`, the mask is made, as in each call, to count its blocks. Vector mods
    are checked, but run outside of the kernels: FLOPs and bytes are without them.

    Args:
      *args: The arguments of the call, with the function before them if it is not `flex_attention`.
      **kwargs: Its keyword arguments; `return_lse` changes nothing here, `return_stats` may change the backend.

    Returns:
      A printable account with readable fields. For every call: the backend and why others do not run, kernels and tiles
      and where the tiles come from, the backend of the gradients, the settings, FLOPs and bytes. For `flex_attention`
      and `flex_attention_varlen`, also blocks visited (full, partial); for `paged_attention`, tokens, pages and splits;
      for `cascade_attention`, an account of each level, and the merge; for `context_parallel_attention`, what each
      device computes and sends.

    Raises:
      TypeError: As the call; or the function is not one of these.
      ValueError: As the call.

    >>> import jflex
    >>> x = jax.ShapeDtypeStruct((1, 256, 4, 64), jnp.float32)
    >>> jflex.explain(x, x, x, implementation="xla").backend
    'xla'

    Two sequences, packed; the boundaries are known, so blocks are counted:

    >>> x, ends = jax.ShapeDtypeStruct((512, 4, 64), jnp.float32), jnp.array([0, 200, 456], jnp.int32)
    >>> account = jflex.explain(jflex.flex_attention_varlen, x, x, x, cu_seqlens_q=ends, cu_seqlens_k=ends)
    >>> account.visited, account.full, account.blocks
    (48, 8, 64)

    A decoding step of two requests, which share their first page:

    >>> cache = jax.eval_shape(lambda: jflex.paged.PagedCache.create(8, 16, 2, 64, dtype=jnp.float32))
    >>> batch = jflex.paged.PagedBatch(jnp.array([0, 1, 2]), jnp.array([20, 33]), jnp.array([[5, 2, 0], [5, 7, 3]]))
    >>> q = jax.ShapeDtypeStruct((2, 8, 64), jnp.float32)
    >>> account = jflex.explain(jflex.paged_attention, q, cache, batch)
    >>> account.keys, account.pages, account.different_pages, account.bytes
    (53, 5, 4, 62464)

    A causal mask over the tokens of four devices, in their natural order and balanced:

    >>> x, mesh = jax.ShapeDtypeStruct((1, 1024, 4, 64), jnp.bfloat16), jax.sharding.AbstractMesh((4,), ("context",))
    >>> causal = functools.partial(jflex.explain, jflex.context_parallel_attention, x, x, x, mesh=mesh,
    ...     mask_mod=jflex.masks.causal(), implementation="xla")
    >>> causal().visited, causal(order=jflex.context_parallel.zigzag_order(4)).visited
    ((12.0, 28.0, 44.0, 60.0), (36.0, 36.0, 36.0, 36.0))
    """
    while args and isinstance(args[0], functools.partial):
        partial = args[0]
        args, kwargs = (partial.func, *partial.args, *args[1:]), {**partial.keywords, **kwargs}
    call: Callable[..., object] = attention.flex_attention
    if args and callable(args[0]):
        call, args = args[0], args[1:]
    call = inspect.unwrap(call)  # of `jax.jit`, or of a decorator
    if not (inspect.isfunction(call) and call in _BY_FUNCTION):
        known = ", ".join(f"`jflex.{function.__name__}`" for function in _CALLS)
        raise TypeError(
            f"`explain` takes one of {known} before the arguments of the call. Got "
            f"{getattr(call, '__name__', type(call).__name__)}."
        )
    arguments = _arguments(call, args, kwargs)
    settings = checked(**{name: arguments.pop(name) for name in Settings._fields if name in arguments})
    prepare, account = _BY_FUNCTION[call]
    explained = lambda both: account(prepare(settings=both[0], **both[1]), settings.implementation)
    return _with_tracers(explained, (settings, arguments))


def _dense(call: entry.Call, implementation: Implementation) -> Account:
    return Account.from_call(call.spec, call.inputs, implementation)


def _prepare_context_parallel(settings: Settings, **arguments: Any) -> Checked:
    division = Division(**{name: arguments.pop(name) for name in Division._fields})
    return prepare_context_parallel(settings=settings, division=division, **arguments)


# The checks of each call, and the account of their result.
_CALLS: dict[Callable[..., object], tuple[Callable[..., object], Callable[[Any, Implementation], Any]]] = {
    attention.flex_attention: (entry.prepare, _dense),
    varlen.flex_attention_varlen: (varlen.prepare, lambda packed, how: _dense(packed.call, how)),
    paged.paged_attention: (paged.prepare, PagedAccount.from_call),
    latent.mla_attention: (latent.prepare, PagedAccount.from_call),
    sparse.sparse_mla_attention: (sparse.prepare, PagedAccount.from_call),
    context_parallel_attention: (_prepare_context_parallel, ContextAccount.from_call),
    cascade.cascade_attention: (cascade.prepare, lambda call, how: CascadeAccount.from_levels(call.levels, how)),
}
_BY_FUNCTION = {inspect.unwrap(call): explained for call, explained in _CALLS.items()}  # without decorators


def _arguments(call: Callable[..., object], args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments by name; raises as the call if they do not match its signature."""
    signature = inspect.signature(call)
    check_keywords(call.__name__, signature.parameters, kwargs)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{call.__name__}() {error}") from None
    bound.apply_defaults()
    return bound.arguments


def _with_tracers(explained: Callable[[Any], Any], arguments: Any) -> Any:
    """Calls a function with tracers in place of the shapes of integers and random keys.

    Mods capture lengths and tables, so these must be arrays; of queries, keys and values the shape is enough.
    """
    leaves, structure = jax.tree.flatten(arguments)
    is_unknown = [isinstance(x, jax.ShapeDtypeStruct) and _is_of_mods(x.dtype) for x in leaves]
    if not any(is_unknown):
        return explained(arguments)
    accounts = []

    def trace(unknown: list[jax.Array]) -> None:
        values = iter(unknown)
        filled = [next(values) if missing else x for x, missing in zip(leaves, is_unknown, strict=True)]
        accounts.append(explained(jax.tree.unflatten(structure, filled)))

    jax.eval_shape(trace, [x for x, missing in zip(leaves, is_unknown, strict=True) if missing])
    return accounts[0]


def _is_of_mods(dtype: DTypeLike) -> bool:
    return jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jax.dtypes.prng_key)

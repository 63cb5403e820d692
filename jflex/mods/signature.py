"""Signatures: arguments and results of score mods and mask mods, and keywords of public functions."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Literal, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jflex._check.keywords import check_keywords
from jflex.mods.numpy_captures import indexable

P = ParamSpec("P")
R = TypeVar("R")
ScalarRole = Literal["score", "mask"]
_INDICES = ("b", "h", "q_idx", "kv_idx")
_ARGUMENTS = {"score": ("score", *_INDICES), "mask": _INDICES}
_READY = ("jflex.masks.", "jflex.scores.")
_VECTOR = "jflex.rotary."
_LAYERS_OF_FLAX = ("flax.linen.attention", "flax.nnx.nn.attention")


def check_signature(mod: object, role: ScalarRole, source: str) -> None:
    """Raises TypeError unless `mod` can be called as a mod of its role."""
    rule = (
        f"`{role}_mod` must be a function ({', '.join(_ARGUMENTS[role])}) -> {'score' if role == 'score' else 'bool'}"
    )
    if not callable(mod):
        kind = "an array" if isinstance(mod, (jax.Array, np.ndarray)) else type(mod).__name__
        raise TypeError(f"{rule}. Got {kind}.{_instead(mod, role)}")
    try:
        signature = inspect.signature(mod)
    except ValueError:  # builtins have none; tracing reports a wrong call
        return
    try:
        signature.bind(*_ARGUMENTS[role])
    except TypeError:
        other = "mask" if role == "score" else "score"
        if getattr(mod, "__module__", "").startswith(_READY) and "<locals>" not in mod.__qualname__:
            raise TypeError(f"{rule}. {source} makes one: call it, as `{mod.__name__}(...)`.") from None
        if type(mod).__module__.startswith(_VECTOR):
            raise TypeError(f"{rule}. {source} is a vector mod: pass it as `query_mod` and `key_mod`.") from None
        hint = ""
        with contextlib.suppress(TypeError):
            signature.bind(*_ARGUMENTS[other])
            hint = f" It fits a {other}_mod: pass it as `{other}_mod`."
        raise TypeError(f"{rule}. {source} takes {signature}.{hint}") from None


def _instead(x: object, role: ScalarRole) -> str:
    """Names the argument that a value belongs to, if that is known."""
    if hasattr(x, "kv_num_blocks"):  # a BlockMask, of a room above this one
        return " Pass it as `block_mask`."
    if not isinstance(x, (jax.Array, np.ndarray)):
        return ""
    if role == "score":
        return " To add a bias [B or 1, H or 1, T, S], pass `jflex.scores.bias(array)`."
    return " To mask by an array [T, S], pass `lambda b, h, q_idx, kv_idx: array[q_idx, kv_idx]`."


def checked_result(out: ArrayLike, role: ScalarRole, source: str) -> jax.Array:
    """Returns what a mod returned, as an array: float32 of a score mod, bool of a mask mod."""
    expected = "one boolean" if role == "mask" else "one floating-point number"
    if len(jax.tree.leaves(out)) != 1 or not jax.tree.structure(out) == jax.tree.structure(0):
        raise TypeError(f"`{role}_mod` must return {expected}; {source} returned {type(out).__name__}.")
    try:
        shape, dtype = jnp.shape(out), jax.dtypes.result_type(out)
    except TypeError:
        raise TypeError(f"`{role}_mod` must return {expected}; {source} returned {type(out).__name__}.") from None
    returned = f"{source} returned {dtype}[{','.join(map(str, shape))}]"
    if shape != ():
        raise TypeError(
            f"`{role}_mod` must return {expected}; {returned}. It is called on scalars: index captured "
            "arrays with `b`, `h`, `q_idx`, `kv_idx` until one number is left."
        )
    if role == "mask" and dtype != jnp.bool_:
        raise TypeError(
            f"`mask_mod` must return {expected}; {returned}. Compare (`q_idx >= kv_idx`) or cast with "
            "`.astype(bool)`; to change scores rather than hide them, pass it as `score_mod`."
        )
    if role == "score" and not jnp.issubdtype(dtype, jnp.floating):
        hide = " To hide scores rather than change them, pass it as `mask_mod`."
        hint = hide if dtype == jnp.bool_ else " Cast it with `.astype(jnp.float32)`."
        raise TypeError(f"`score_mod` must return {expected}; {returned}.{hint}")
    return jnp.asarray(out, jnp.bool_ if role == "mask" else jnp.float32)


def accept_numpy(mod: Callable[..., R]) -> Callable[..., R]:
    """The mod; if numpy refuses a tracer, or `jax.shard_map` an array, the mod with captures that tracers may index.

    >>> slopes = np.array([0.5, 0.25])
    >>> mod = accept_numpy(lambda score, b, h, q_idx, kv_idx: score * slopes[h])
    >>> float(jax.jit(mod)(1.0, 0, 1, 0, 0))
    0.25
    """

    def call(*args: object) -> R:
        try:
            return (indexable(mod) if jax.sharding.get_abstract_mesh().explicit_axes else mod)(*args)
        except (jax.errors.TracerArrayConversionError, jax.errors.TracerIntegerConversionError, NotImplementedError):
            return indexable(mod)(*args)

    return call


def answers_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a public function: a keyword that another library has is answered with the way to write it here.

    A layer of Flax that calls the function is answered, too: linen leaves out keywords that the function does not have.

    >>> @answers_keywords
    ... def attend(query, *, scale=None): ...
    >>> attend(1, softmax_scale=0.1)
    Traceback (most recent call last):
    TypeError: `attend` has no argument `softmax_scale`. Pass `scale`.
    """
    parameters = inspect.signature(function).parameters.keys()

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        frame = inspect.currentframe()
        if frame and frame.f_back and frame.f_back.f_globals.get("__name__") in _LAYERS_OF_FLAX:
            raise TypeError(
                "`attention_fn` of a layer of Flax must be what `flax_layers.attention_fn()` returns. Got "
                f"`{function.__name__}`, which has other arguments: linen would leave out the rest, as dropout or a "
                "mask. Pass mods to `flax_layers.attention_fn(score_mod, mask_mod)`."
            )
        if "dropout_key" in kwargs or not kwargs.keys() <= parameters:
            check_keywords(function.__name__, parameters, kwargs)
            for name in kwargs.keys() - parameters:
                raise TypeError(f"{function.__name__}() got an unexpected keyword argument {name!r}")
        return function(*args, **kwargs)

    return call

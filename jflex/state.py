"""Attention states: attention over some of the keys, in a form that merges exactly with that over others.

A state is the output over a set of keys and the logsumexp of their scores. Merging the states of disjoint sets gives
the state of their union, in any order and grouping, so keys may be split (among decoding kernels, pages, levels of
shared prefixes, devices) without error. The neutral element is the state of no keys, ``(0, -inf)``. Without a softmax
(``normalize="none"``) outputs add up, and there is no lse.

After FlashInfer (Ye et al., 2025, https://arxiv.org/abs/2501.01005, "Attention Composition"), with natural logarithms.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jflex._call.checks import DTYPES, LAYOUTS, check_normalize, describe_array
from jflex.types import AnyArray, Lse, Out

Normalize = Literal["softmax", "none"]
_LSE_DTYPES = ("float32", "float64")
_FEW = 8  # up to so many states are merged elementwise, on a GPU in one kernel; stacking them would be another


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class AttentionState:
    """Attention over a set of keys: a pytree that passes through ``jit``, ``grad``, ``vmap`` and ``scan``.

    Heads are the last axis but one of `out` and the last of `lse`, after batch and query axes; so packed queries
    ([N, Hq, Dv], [N, Hq]) and padded ones ([B, T, Hq, Dv], [B, T, Hq]) merge alike. `flex_attention` returns its lse as
    [B, Hq, T]: `from_attention` and `to_attention` are where the order changes, in both layouts.

    The arrays are checked when states are merged, not when a state is made: JAX makes pytrees of other things than
    arrays, too.

    Attributes:
      out: The output, normalised: the softmax over these keys, times their values. Zeros where no key is visible.
      lse: Natural logarithm of the sum of ``exp(score)`` over these keys, float32 (float64 for a float64 `out`);
        ``-inf`` where no key is visible. `lse_from_base2` and `lse_from_flash` convert from other libraries. Zeros
        without a softmax.
      normalize: As in `flex_attention`. States of one kind do not merge with those of the other.

    >>> seen, nothing = AttentionState(jnp.ones((4, 2, 8)), jnp.zeros((4, 2))), AttentionState.empty((4, 2, 8))
    >>> jnp.array_equal(merge(seen, nothing).out, seen.out).item()
    True
    """

    out: Float[Array, "*rows Hq Dv"]
    lse: Float[Array, "*rows Hq"]
    normalize: Normalize = dataclasses.field(default="softmax", metadata={"static": True})

    @classmethod
    def empty(
        cls, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32, normalize: Normalize = "softmax"
    ) -> AttentionState:
        """The state of no keys: merging with it changes nothing. A carry of ``scan`` starts with it.

        Args:
          shape: Of `out`, ``(*rows, Hq, Dv)``.
          dtype: Of `out`.
          normalize: As in `flex_attention`.

        Returns:
          Zeros, and an lse of ``-inf``; of zeros without a softmax.

        >>> AttentionState.empty((4, 2, 8), jnp.bfloat16).lse[0].tolist()
        [-inf, -inf]
        """
        lse_dtype = jnp.float64 if jnp.dtype(dtype) == jnp.float64 else jnp.float32
        lse = -jnp.inf if normalize == "softmax" else 0.0
        return cls(jnp.zeros(shape, dtype), jnp.full(shape[:-1], lse, lse_dtype), normalize)

    @classmethod
    def from_attention(cls, out: Out, lse: Lse, layout: str = "BTNH") -> AttentionState:
        """The state from the results of ``flex_attention(..., return_lse=True)``.

        Args:
          out: In the order of `layout`.
          lse: [B, Hq, T] in both layouts.
          layout: That of the call: ``"BTNH"``, or ``"BNTH"`` for [B, Hq, T, Dv].

        Returns:
          A state with `out` [B, T, Hq, Dv] and `lse` [B, T, Hq].

        Raises:
          TypeError: An argument is no array, or of a wrong dtype.
          ValueError: The shapes do not fit one another, or `layout` is unknown.

        >>> import jflex
        >>> query, key, value = jax.random.normal(jax.random.key(0), (3, 1, 16, 4, 8))
        >>> state = AttentionState.from_attention(*jflex.flex_attention(query, key, value, return_lse=True))
        >>> state.out.shape, state.lse.shape
        ((1, 16, 4, 8), (1, 16, 4))
        """
        _check_layout(layout)
        out, lse = _checked_array("out", out, DTYPES), _checked_array("lse", lse, _LSE_DTYPES)
        heads, rows = (2, 1) if layout == "BTNH" else (1, 2)
        if out.ndim != 4 or lse.shape != (out.shape[0], out.shape[heads], out.shape[rows]):
            axes = "[B, T, Hq, Dv]" if layout == "BTNH" else "[B, Hq, T, Dv]"
            raise ValueError(
                f"`out` must be {axes} in the layout {layout!r}, and `lse` [B, Hq, T]. Got out: {describe_array(out)}, "
                f"lse: {describe_array(lse)}. Pass both as `flex_attention(..., return_lse=True)` returned them, with "
                "the `layout` of that call."
            )
        return cls(out if layout == "BTNH" else out.swapaxes(1, 2), lse.swapaxes(1, 2))

    def to_attention(self, layout: str = "BTNH") -> tuple[Out, Lse]:
        """Output and lse as ``flex_attention(..., return_lse=True)`` returns them.

        Args:
          layout: ``"BTNH"``, or ``"BNTH"`` for an output [B, Hq, T, Dv].

        Returns:
          The output in `layout`, and the lse [B, Hq, T].

        Raises:
          TypeError: A field is no array, or of a wrong dtype.
          ValueError: The state does not have the axes [B, T, Hq, Dv], or `layout` is unknown.

        >>> out, lse = AttentionState.empty((1, 16, 4, 8)).to_attention("BNTH")
        >>> out.shape, lse.shape
        ((1, 4, 16, 8), (1, 4, 16))
        """
        _check_layout(layout)
        state = _checked_state("self", self)
        if state.out.ndim != 4:
            raise ValueError(
                f"`to_attention` needs a state with `out` [B, T, Hq, Dv]. Got out: {describe_array(state.out)}. Take "
                "the fields `out` and `lse` of a state of packed or stacked rows."
            )
        return state.out if layout == "BTNH" else state.out.swapaxes(1, 2), state.lse.swapaxes(1, 2)


def merge(a: AttentionState, b: AttentionState) -> AttentionState:
    """Attention over the keys of both states, which must have no key in common.

    Exact, and up to rounding associative and commutative. `AttentionState.empty` is neutral, and so is every row whose
    lse is ``-inf``, whatever its `out` holds, NaN too; where both are empty, so is the result. Sums are formed in
    float32 (float64 if a field is), and `out` is rounded to its dtype once: to merge many states of a 16-bit dtype use
    `merge_all`, which rounds once in all. Differentiable, to any order: what is empty gets zero gradients, never NaN.

    Without a softmax, outputs are added.

    An lse of ``+inf`` means an infinite score, over which attention is not defined: out and lse become NaN. Some
    libraries mark empty rows by it; see `lse_from_flash`.

    Args:
      a: A state.
      b: A state of the same shapes and dtypes.

    Returns:
      A state of these shapes and dtypes.

    Raises:
      TypeError: An argument is no state, its fields are no arrays of floating point, or the dtypes differ.
      ValueError: The shapes differ, those of `out` and `lse` do not fit one another, or one state is without a softmax.

    References:
      Ye et al. 2025, FlashInfer: Efficient and Customizable Attention Engine for LLM Inference Serving,
      arXiv:2501.01005, "Attention Composition".

    >>> one, other = (AttentionState(jnp.full((1, 2), x), jnp.log(jnp.array([x]))) for x in (1.0, 3.0))
    >>> merged = merge(one, other)  # the other keys weigh three times as much
    >>> merged.out.round(4).tolist(), jnp.exp(merged.lse).round(4).tolist()
    ([[2.5, 2.5]], [4.0])
    """
    a, b = _checked_state("a", a), _checked_state("b", b)
    _check_alike("b", b, "a", a)
    return _merge_few((a, b))


def merge_all(states: Sequence[AttentionState] | AttentionState) -> AttentionState:
    """Attention over the keys of all states, no two of which may have a key in common; see `merge`.

    Args:
      states: A sequence of states of the same shapes and dtypes; or one state whose leading axis counts them, as
        ``vmap`` and ``scan`` make it: `out` [N, ..., Hq, Dv], `lse` [N, ..., Hq]. With N = 0 the result is empty.

    Returns:
      A state of the shapes of one of them.

    Raises:
      TypeError: `states` holds something else than states, their fields are no arrays of floating point, or the
        dtypes differ.
      ValueError: The sequence is empty, the shapes differ, those of `out` and `lse` do not fit one another, or some
        states are without a softmax and others with one.

    >>> splits = AttentionState(jnp.ones((8, 4, 2, 16)), jnp.zeros((8, 4, 2)))  # eight splits of the keys
    >>> merge_all(splits).out.shape, jnp.exp(merge_all(splits).lse[0]).round(4).tolist()
    ((4, 2, 16), [8.0, 8.0])
    """
    if isinstance(states, AttentionState):
        stacked = _checked_state("states", states)
        if stacked.lse.ndim < 2:
            raise ValueError(
                "`states`, if a single state, must have a leading axis that counts the states: `out` [N, ..., Hq, "
                f"Dv]. Got out: {describe_array(stacked.out)}. Add it with `x[None]`, or pass a sequence of states."
            )
        return _merge_stacked(stacked)
    if not isinstance(states, Sequence):
        raise TypeError(
            f"`states` must be a sequence of `AttentionState`, or one with a leading axis. Got {type(states).__name__}."
        )
    if not states:
        raise ValueError(
            "`states` must hold at least one state, which tells the shapes; the sequence is empty. Begin it with "
            "`AttentionState.empty(shape, dtype)`."
        )
    checked = [_checked_state(f"states[{position}]", state) for position, state in enumerate(states)]
    for position, state in enumerate(checked):
        _check_alike(f"states[{position}]", state, "states[0]", checked[0])
    return _merge_few(checked) if len(checked) <= _FEW else _merge_stacked(_stack(checked))


def with_sinks(state: AttentionState, sinks: Float[AnyArray, " Hq"]) -> AttentionState:
    """A state with attention sinks: one more logit in the denominator of each query head, without a value.

    That is `merge` with one key whose score is the sink and whose value is zero. So it belongs to the end, once: where
    states are merged, merge them first. A row that attends to no key stays zero, and its lse becomes the sink.

    Args:
      state: The state over all keys.
      sinks: Natural logits, one for each query head; cast to the dtype of the lse. ``-inf`` changes nothing.

    Returns:
      A state of the same shapes and dtypes. Gradients flow into the sinks.

    Raises:
      TypeError: `state` is no state, or `sinks` is no array of floating point.
      ValueError: `sinks` does not have one logit for each query head, or the state is one without a softmax.

    References:
      OpenAI 2025, gpt-oss-120b & gpt-oss-20b Model Card, arXiv:2508.10925 (a learned sink for each head); Xiao et al.
      2023, StreamingLLM, arXiv:2309.17453, section 3.3 (a sink of 0).

    >>> one_key = AttentionState(jnp.full((1, 2), 4.0), jnp.zeros(1))
    >>> with_sinks(one_key, jnp.zeros(1)).out.tolist()  # the sink takes half of the weight
    [[2.0, 2.0]]
    """
    state, sinks = _checked_state("state", state), checked_sinks(sinks, state.lse.shape[-1])
    check_normalize(state.normalize, sinks)
    lse = jnp.broadcast_to(sinks.astype(state.lse.dtype), state.lse.shape)
    return _merge_few((state, AttentionState(jnp.zeros_like(state.out), lse)))


def checked_sinks(sinks: object, heads: int) -> jax.Array:
    """Returns `sinks` as a JAX array.

    Raises:
      TypeError: They are no array, or not floating-point.
      ValueError: They are not one logit for each query head.
    """
    rule = f"`sinks` must be a floating-point array with one logit for each of the {heads} query heads, [{heads}]."
    x: Any = sinks
    if not (hasattr(x, "shape") and hasattr(x, "dtype")):
        raise TypeError(f"{rule} Got {type(x).__name__}. Make one with `jnp.full({heads}, logit)`.")
    if str(x.dtype) not in DTYPES:
        raise TypeError(f"{rule} Got {describe_array(x)}. Cast it with `.astype(jnp.float32)`.")
    if x.shape != (heads,):
        raise ValueError(f"{rule} Got {describe_array(x)}. Index or broadcast it to one number for each head.")
    return jnp.zeros(heads, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else jnp.asarray(x)


def lse_to_base2(lse: Float[Array, "*axes"]) -> Float[Array, "*axes"]:
    """From the natural logarithm, which jflex uses, to base 2, which FlashInfer uses.

    >>> lse_to_base2(jnp.log(jnp.array([8.0, 0.0]))).tolist()
    [3.0, -inf]
    """
    return lse * math.log2(math.e)


def lse_from_base2(lse: Float[Array, "*axes"]) -> Float[Array, "*axes"]:
    """From base 2, which FlashInfer uses, to the natural logarithm, which jflex uses.

    >>> jnp.exp(lse_from_base2(jnp.array([3.0, -jnp.inf]))).round(4).tolist()
    [8.0, 0.0]
    """
    return lse * math.log(2)


def lse_from_flash(lse: Float[Array, "*axes"]) -> Float[Array, "*axes"]:
    """From FlashAttention and FlashMLA, whose lse is ``+inf`` where no key is visible, to ``-inf`` there.

    >>> lse_from_flash(jnp.array([2.0, jnp.inf])).tolist()
    [2.0, -inf]
    """
    return jnp.where(lse == jnp.inf, -jnp.inf, lse)


def _stack(states: Sequence[AttentionState]) -> AttentionState:
    outs, lses = (jnp.stack([getattr(state, field) for state in states]) for field in ("out", "lse"))
    return AttentionState(outs, lses, states[0].normalize)


def _merge_few(states: Sequence[AttentionState]) -> AttentionState:
    """As `_merge_stacked`, without copying the states."""
    first = states[0]
    exact = jnp.float64 if jnp.float64 in (first.out.dtype, first.lse.dtype) else jnp.float32
    if first.normalize == "none":
        out = functools.reduce(jnp.add, (state.out.astype(exact) for state in states))
        return dataclasses.replace(first, out=out.astype(first.out.dtype))
    lses = [state.lse.astype(exact) for state in states]
    top = jax.lax.stop_gradient(functools.reduce(jnp.maximum, lses))
    top = jnp.where(top == -jnp.inf, 0, top)
    weights = [jnp.exp(lse - top) for lse in lses]
    total = functools.reduce(jnp.add, weights)
    sees_nothing = total == 0
    safe_total = jnp.where(sees_nothing, 1, total)
    terms = [
        weight[..., None] * jnp.where((state.lse == -jnp.inf)[..., None], 0, state.out.astype(exact))
        for weight, state in zip(weights, states, strict=True)
    ]
    out = functools.reduce(jnp.add, terms) / safe_total[..., None]
    merged_lse = jnp.where(sees_nothing, -jnp.inf, top + jnp.log(safe_total))
    return AttentionState(out.astype(first.out.dtype), merged_lse.astype(first.lse.dtype))


def _merge_stacked(states: AttentionState) -> AttentionState:
    """Merges over the leading axis.

    Nothing here divides by 0 or subtracts infinities, even in a branch that `where` discards: there the value would be
    right, but its gradient NaN.
    """
    exact = jnp.float64 if jnp.float64 in (states.out.dtype, states.lse.dtype) else jnp.float32
    if states.normalize == "none":
        out = states.out.astype(exact).sum(axis=0).astype(states.out.dtype)
        return AttentionState(out, jnp.zeros(states.lse.shape[1:], states.lse.dtype), "none")
    lse, empty = states.lse.astype(exact), states.lse == -jnp.inf
    # The result does not depend on `top`, so no gradient passes through it.
    top = jax.lax.stop_gradient(jnp.max(lse, axis=0, initial=-jnp.inf))
    top = jnp.where(top == -jnp.inf, 0, top)
    weights = jnp.exp(lse - top[None])
    total = weights.sum(axis=0)
    sees_nothing = total == 0  # and not `~(total > 0)`, which would turn a NaN into an empty row
    safe_total = jnp.where(sees_nothing, 1, total)
    values = jnp.where(empty[..., None], 0, states.out.astype(exact))
    out = (weights[..., None] * values).sum(axis=0) / safe_total[..., None]
    merged_lse = jnp.where(sees_nothing, -jnp.inf, top + jnp.log(safe_total))
    return AttentionState(out.astype(states.out.dtype), merged_lse.astype(states.lse.dtype))


def _checked_state(name: str, state: object) -> AttentionState:
    """A state of JAX arrays, whose shapes fit one another."""
    if not isinstance(state, AttentionState):
        raise TypeError(
            f"`{name}` must be an `AttentionState`. Got {type(state).__name__}. Make one from output and lse with "
            "`AttentionState.from_attention(out, lse)`."
        )
    out = _checked_array(f"{name}.out", state.out, DTYPES)
    lse = _checked_array(f"{name}.lse", state.lse, _LSE_DTYPES)
    if out.ndim < 1 or out.shape[:-1] != lse.shape:
        raise ValueError(
            f"`{name}` must have `out` [..., Hq, Dv] and `lse` [..., Hq]. Got out: {describe_array(out)}, lse: "
            f"{describe_array(lse)}. What `flex_attention` returns has its lse in another order: "
            "`AttentionState.from_attention(out, lse)` changes it."
        )
    return AttentionState(out, lse, state.normalize)


def _checked_array(name: str, x: AnyArray, dtypes: Sequence[str]) -> jax.Array:
    x = jnp.asarray(x) if isinstance(x, np.ndarray) else x
    if not (hasattr(x, "shape") and hasattr(x, "dtype")):
        raise TypeError(f"`{name}` must be an array. Got {type(x).__name__}.")
    if str(x.dtype) not in dtypes:
        raise TypeError(
            f"`{name}` must be floating-point ({', '.join(dtypes)}). Got {describe_array(x)}. Cast it with `.astype`."
        )
    return x


def _check_layout(layout: str) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"`layout` must be one of {', '.join(map(repr, LAYOUTS))}. Got {layout!r}.")


def _check_alike(name: str, state: AttentionState, first_name: str, first: AttentionState) -> None:
    """Raises unless two states have the same shapes and dtypes: nothing is broadcast or promoted in silence."""
    if state.normalize != first.normalize:
        raise ValueError(
            f"`{first_name}` and `{name}` must be of one kind: outputs of a softmax are averaged, others added. Got "
            f"normalize={first.normalize!r} and normalize={state.normalize!r}."
        )
    got = ", ".join(
        f"{which}.{field}: {describe_array(getattr(of, field))}"
        for which, of in ((first_name, first), (name, state))
        for field in ("out", "lse")
    )
    if state.out.shape != first.out.shape:
        raise ValueError(
            f"`{first_name}` and `{name}` must have equal shapes. Got {got}. States merge row by row: bring them to "
            "the same rows, heads and head size, with `jnp.broadcast_to` where one state serves several."
        )
    if (state.out.dtype, state.lse.dtype) != (first.out.dtype, first.lse.dtype):
        raise TypeError(
            f"`{first_name}` and `{name}` must have equal dtypes. Got {got}. Cast `out` with `.astype` to the dtype "
            "of the result; sums are in float32 in any case."
        )

"""Merging attention states: `merge`, `merge_all` and `with_sinks`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float

from jflex._check.arguments import check_normalize, checked_sinks, describe_array
from jflex.states.lse import log_weight
from jflex.states.state import AttentionState, check_alike, checked_state
from jflex.types import AnyArray

_FEW = 8  # up to so many states are merged elementwise, on a GPU in one kernel; stacking them would be another


def merge(a: AttentionState, b: AttentionState) -> AttentionState:
    """Attention over the keys of both states, which must have no key in common.

    Exact, and up to rounding associative and commutative. `AttentionState.empty` is neutral, and so is every row whose
    lse is ``-inf``, whatever its `out` holds, NaN too; where both are empty, so is the result. Sums are formed in
    float32 (float64 if a field is), and `out` is rounded to its dtype once: to merge many states of a 16-bit dtype use
    `merge_all`, which rounds once in all. Differentiable, to any order: what is empty gets zero gradients, never NaN.

    Without a softmax, outputs are added. The `max` of both is the larger one, without a gradient. The `entropy` is the
    mean of both by the weights of the states, plus the entropy of these weights: all its terms are at least 0.

    An lse of ``+inf`` means an infinite score, over which attention is not defined: out and lse become NaN. Some
    libraries mark empty rows by it; see `lse_from_flash`.

    Args:
      b: A state of the same shapes and dtypes.

    Returns:
      A state of these shapes and dtypes.

    Raises:
      TypeError: An argument is no state, its fields are no arrays of floating point, or the dtypes differ.
      ValueError: The shapes or the statistics that are held differ, the fields do not fit one another, or one state is
        without a softmax.

    References:
      Ye et al. 2025, FlashInfer: Efficient and Customizable Attention Engine for LLM Inference Serving,
      arXiv:2501.01005, "Attention Composition".

    >>> one, other = (AttentionState(jnp.full((1, 2), x), jnp.log(jnp.array([x]))) for x in (1.0, 3.0))
    >>> merged = merge(one, other)  # the other keys weigh three times as much
    >>> merged.out.round(4).tolist(), jnp.exp(merged.lse).round(4).tolist()
    ([[2.5, 2.5]], [4.0])
    >>> one_key = AttentionState(jnp.ones((1, 2)), jnp.zeros(1), entropy=jnp.zeros(1))
    >>> jnp.exp(merge(one_key, one_key).entropy).round(4).tolist()  # two keys of equal weights
    [2.0]
    """
    a, b = checked_state("a", a), checked_state("b", b)
    check_alike("b", b, "a", a)
    return _merged((a, b))


def merge_all(states: Sequence[AttentionState] | AttentionState) -> AttentionState:
    """Attention over the keys of all states; a key must be in one state only. See `merge`.

    Args:
      states: A sequence of states of the same shapes and dtypes; or one state whose leading axis counts them, as
        ``vmap`` and ``scan`` make it: `out` [N, ..., Hq, Dv], the others [N, ..., Hq]. With N = 0 the result is empty.

    Returns:
      A state of the shapes of one of them.

    Raises:
      TypeError: `states` holds something else than states, their fields are no arrays of floating point, or the
        dtypes differ.
      ValueError: The sequence is empty, the shapes or the statistics that are held differ, the fields do not fit one
        another, or some states are without a softmax and others with one.

    >>> splits = AttentionState(jnp.ones((8, 4, 2, 16)), jnp.zeros((8, 4, 2)))  # eight splits of the keys
    >>> merge_all(splits).out.shape, jnp.exp(merge_all(splits).lse[0]).round(4).tolist()
    ((4, 2, 16), [8.0, 8.0])
    """
    if isinstance(states, AttentionState):
        stacked = checked_state("states", states)
        if stacked.lse.ndim < 2:
            raise ValueError(
                "`states`, if a single state, must have a leading axis that counts the states: `out` [N, ..., Hq, "
                f"Dv]. Got out: {describe_array(stacked.out)}. Add it with `x[None]`, or pass a sequence of states."
            )
        return _merged([stacked], _STACKED)
    if not isinstance(states, Sequence):
        raise TypeError(
            f"`states` must be a sequence of `AttentionState`, or one with a leading axis. Got {type(states).__name__}."
        )
    if not states:
        raise ValueError(
            "`states` must hold at least one state, which tells the shapes; the sequence is empty. Begin it with "
            "`AttentionState.empty(shape, dtype)`."
        )
    checked = [checked_state(f"states[{position}]", state) for position, state in enumerate(states)]
    for position, state in enumerate(checked):
        check_alike(f"states[{position}]", state, "states[0]", checked[0])
    if len(checked) <= _FEW:
        return _merged(checked)
    return _merged([jax.tree.map(lambda *xs: jnp.stack(xs), *checked)], _STACKED)


def merge_over(state: AttentionState, axis: str) -> AttentionState:
    """Attention over the keys of all devices along an axis of a mesh, inside of `jax.shard_map`; see `merge`.

    A maximum and one sum over the devices; another maximum if the state holds one.

    Returns:
      The same state on each device, with an `out` of float32 (float64 if a field is).
    """
    exact = jnp.float64 if jnp.float64 in (state.out.dtype, state.lse.dtype) else jnp.float32
    if state.normalize == "none":
        out = jax.lax.psum(state.out.astype(exact), axis)
        return AttentionState(out, jnp.zeros(state.lse.shape, state.lse.dtype), "none")
    lse = state.lse.astype(exact)
    row_max = None if state.max is None else jax.lax.pmax(_row_max(state), axis)
    lse_max = jax.lax.pmax(lse, axis)
    lse_max = jnp.where(lse_max == -jnp.inf, 0, lse_max)
    weight = jnp.exp(lse - lse_max)
    value = jnp.where((lse == -jnp.inf)[..., None], 0, state.out.astype(exact))
    columns = [weight[..., None] * value, weight[..., None]]
    if state.entropy is not None:  # of unnormalized weights w: sum w (entropy - log w) / sum w + log sum w
        entropy_of_state = jnp.where(lse == -jnp.inf, 0, state.entropy.astype(exact))
        columns.append((weight * (entropy_of_state - log_weight(lse, lse_max)))[..., None])
    sums = jax.lax.psum(jnp.concatenate(columns, axis=-1), axis)
    size = state.out.shape[-1]
    weights = sums[..., size]
    sees_nothing = weights == 0
    safe = jnp.where(sees_nothing, 1, weights)
    entropy = None
    if state.entropy is not None:
        entropy = jnp.where(sees_nothing, 0, sums[..., size + 1] / safe + jnp.log(safe)).astype(state.lse.dtype)
    merged_lse = jnp.where(sees_nothing, -jnp.inf, lse_max + jnp.log(safe)).astype(state.lse.dtype)
    return AttentionState(sums[..., :size] / safe[..., None], merged_lse, max=row_max, entropy=entropy)


def with_sinks(state: AttentionState, sinks: Float[AnyArray, " Hq"]) -> AttentionState:
    """A state with attention sinks: one more logit in the denominator of each query head, without a value.

    That is `merge` with one key whose score is the sink and whose value is zero. So it belongs to the end, once: where
    states are merged, merge them first. A row that attends to no key stays zero, and its lse becomes the sink. The
    weight of the sink enters an `entropy`, but the sink is no `max`.

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
    state, sinks = checked_state("state", state), checked_sinks(sinks, state.lse.shape[-1])
    check_normalize(state.normalize, sinks)
    lse = jnp.broadcast_to(sinks.astype(state.lse.dtype), state.lse.shape)
    row_max = None if state.max is None else jnp.full_like(state.max, -jnp.inf)
    entropy = None if state.entropy is None else jnp.zeros_like(state.entropy)
    return _merged((state, AttentionState(jnp.zeros_like(state.out), lse, max=row_max, entropy=entropy)))


class _Fold(NamedTuple):
    """Reductions over states: separate ones, which are not copied, or those of a leading axis."""

    add: Callable[[Sequence[jax.Array]], jax.Array]
    largest: Callable[[Sequence[jax.Array]], jax.Array]
    spread: Callable[[jax.Array], jax.Array]  # a result beside each state


_SEPARATE = _Fold(
    functools.partial(functools.reduce, jnp.add), functools.partial(functools.reduce, jnp.maximum), lambda x: x
)
_STACKED = _Fold(lambda xs: xs[0].sum(axis=0), lambda xs: jnp.max(xs[0], axis=0, initial=-jnp.inf), lambda x: x[None])


def _merged(states: Sequence[AttentionState], fold: _Fold = _SEPARATE) -> AttentionState:
    """Merges checked states.

    Nothing here divides by 0 or subtracts infinities, even in a branch that `where` discards: there the value would be
    right, but its gradient NaN.
    """
    first = states[0]
    exact = jnp.float64 if jnp.float64 in (first.out.dtype, first.lse.dtype) else jnp.float32
    if first.normalize == "none":
        out = fold.add([state.out.astype(exact) for state in states]).astype(first.out.dtype)
        lse = fold.add([state.lse for state in states])  # zeros, that vary over the axes of a mesh as `out` does
        return AttentionState(out, lse, "none")
    lses = [state.lse.astype(exact) for state in states]
    top = jax.lax.stop_gradient(fold.largest(lses))  # the result does not depend on it
    top = jnp.where(top == -jnp.inf, 0, top)
    weights = [jnp.exp(lse - fold.spread(top)) for lse in lses]
    total = fold.add(weights)
    sees_nothing = total == 0  # and not `~(total > 0)`, which would turn a NaN into an empty row
    safe_total = jnp.where(sees_nothing, 1, total)
    terms = [
        weight[..., None] * jnp.where((state.lse == -jnp.inf)[..., None], 0, state.out.astype(exact))
        for weight, state in zip(weights, states, strict=True)
    ]
    out = fold.add(terms) / safe_total[..., None]
    merged_lse = jnp.where(sees_nothing, -jnp.inf, top + jnp.log(safe_total))
    row_max = None if first.max is None else fold.largest([_row_max(state) for state in states])
    entropy = None
    if first.entropy is not None:
        shares = [_share_of_entropy(state, fold.spread(merged_lse)) for state in states]
        entropy = fold.add(shares).astype(first.lse.dtype)
    return AttentionState(out.astype(first.out.dtype), merged_lse.astype(first.lse.dtype), max=row_max, entropy=entropy)


def _row_max(state: AttentionState) -> jax.Array:
    """The largest score; ``-inf`` for an empty row, whatever the field holds."""
    assert state.max is not None  # the states hold it
    return jax.lax.stop_gradient(jnp.where(state.lse == -jnp.inf, -jnp.inf, state.max))


def _share_of_entropy(state: AttentionState, merged_lse: jax.Array) -> jax.Array:
    """Share of a state in the merged entropy, by the chain rule: ``w * (entropy - log w)`` for its weight w.

    Not ``merged lse - sum p * score``, a difference of numbers as large as the scores.
    """
    assert state.entropy is not None  # the states hold it
    log_w = log_weight(state.lse.astype(merged_lse.dtype), merged_lse)
    entropy = jnp.where(state.lse == -jnp.inf, 0, state.entropy.astype(merged_lse.dtype))
    return jnp.exp(log_w) * (entropy - log_w)

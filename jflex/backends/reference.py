"""The definition of attention, in dense float32 jnp: slow, clear, and differentiable to any order."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp

from jflex._call.kv_lengths import inputs_without_lengths, spec_without_lengths
from jflex.backends import paged_reference
from jflex.backends.base import Backend, Gradients, Inputs, PagedInputs, Plan, Saved, SavedCotangents
from jflex.backends.xla.containment import all_finite, cleared
from jflex.block_mask.lists import FULL, PARTIAL, BlockLists, states_from_lists
from pallas_kernels.plan import GradientRequest
from pallas_kernels.spec import AttentionSpec, Blocks, Mod


class Reference(Backend):
    """Holds all T x S scores of every head; never selected automatically.

    Masked NaN reaches no result, with one exception: a NaN cotangent with finite inputs reaches the gradients of values
    that its query does not attend to.
    """

    name: ClassVar[str] = "reference"
    differentiable: ClassVar[bool] = True

    def plan(self, spec: AttentionSpec, requested: GradientRequest | None) -> Plan:
        """Supports every call."""
        del spec, requested
        return Plan(lambda: "no tiles")

    def forward(self, spec: AttentionSpec, inputs: Inputs | PagedInputs) -> Saved:
        """Follows the definition line by line."""
        if isinstance(inputs, PagedInputs):
            return paged_reference.attend(spec, inputs)
        spec, inputs = spec_without_lengths(spec, None), inputs_without_lengths(spec, inputs, None)
        exact = jnp.dtype(spec.exact)
        by_heads = lambda x: (x if spec.layout == "BNTH" else x.swapaxes(1, 2)).astype(exact)
        query, key, value = (by_heads(x) for x in (inputs.query, inputs.key, inputs.value))
        key, value = (self._per_query_head(spec, x) for x in (key, value))
        visible = jnp.ones((spec.B, spec.Hq, spec.T, spec.S), bool)
        if spec.mask_mod is not None:
            visible = over_indices(spec.mask_mod, inputs.mask_operands, visible.shape)
        if spec.blocks is not None and inputs.lists is not None:
            states = _states_of_elements(spec, spec.blocks, inputs.lists)
            visible = jnp.broadcast_to((states == FULL) | ((states == PARTIAL) & visible), visible.shape)
        kept = None
        if spec.dropout is not None:
            kept = over_indices(spec.dropout.mod, inputs.dropout_operands, visible.shape)

        def attend(scores: _Scores, outputs: _Outputs, query, key, value, operands) -> tuple[jax.Array, jax.Array]:
            score = scores(query, key) * jnp.asarray(spec.scale, exact)
            if spec.score_mod is not None:
                score = _modified(spec.score_mod, operands, score.astype(jnp.float32), visible).astype(exact)
            weights, lse = _softmax(score, visible)
            weights = weights if kept is None else jnp.where(kept, weights * spec.kept_scale, 0)
            return outputs(weights, value), lse

        dense = functools.partial(attend, _scores, lambda weights, value: _einsum("bnts,bnsh->bnth", weights, value))
        if spec.mask_mod is None and spec.blocks is None:
            out, lse = dense(query, key, value, inputs.score_operands)
        else:  # masked elements may be NaN
            contained = jax.checkpoint(functools.partial(attend, _contained_scores, _contained_outputs(visible)))
            finite = functools.reduce(jnp.logical_and, map(all_finite, jax.lax.stop_gradient([query, key, value])))
            out, lse = jax.lax.cond(finite, dense, contained, query, key, value, inputs.score_operands)
        out = out if spec.layout == "BNTH" else out.swapaxes(1, 2)
        return Saved(out.astype(spec.dtype), lse.astype(jnp.float32))

    def backward(
        self,
        spec: AttentionSpec,
        inputs: Inputs,
        saved: Saved,
        d_saved: SavedCotangents,
        requested: GradientRequest,
    ) -> Gradients:
        """Differentiates `forward`, to complete the interface."""
        floats = (inputs.query, inputs.key, inputs.value, inputs.score_operands)
        _, pull = jax.vjp(
            lambda q, k, v, s: self.forward(spec, inputs._replace(query=q, key=k, value=v, score_operands=s)),
            *floats,
        )
        lse = jnp.zeros_like(saved.lse) if d_saved.lse is None else d_saved.lse
        return Gradients(*pull(Saved(d_saved.out, lse)))

    def not_preferred(self, spec: AttentionSpec, requested: GradientRequest | None) -> str | None:
        """It is never selected automatically."""
        del spec, requested
        return None

    def _per_query_head(self, spec: AttentionSpec, x: jax.Array) -> jax.Array:
        return jnp.repeat(jnp.broadcast_to(x, (spec.B, *x.shape[1:])), spec.group, axis=1)


_Scores = Callable[[jax.Array, jax.Array], jax.Array]  # [B, H, T, D], [B, H, S, D] -> [B, H, T, S]
_Outputs = Callable[[jax.Array, jax.Array], jax.Array]  # [B, H, T, S], [B, H, S, Dv] -> [B, H, T, Dv]
_ELEMENTS_AT_ONCE = 1 << 22  # of values repeated for each query


def _einsum(axes: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(axes, a, b, precision=jax.lax.Precision.HIGHEST)


def _scores(query: jax.Array, key: jax.Array) -> jax.Array:
    return _einsum("bnth,bnsh->bnts", query, key)


@jax.custom_jvp
def _values_cleared(x: jax.Array) -> jax.Array:
    """Replaces NaN and infinity by 0; the derivative is that of the identity."""
    return cleared(x)


_values_cleared.defjvp(lambda primals, tangents: (cleared(*primals), *tangents))


def _contained_scores(query: jax.Array, key: jax.Array) -> jax.Array:
    """The scores; the derivative takes NaN in query and key as 0, because a masked dS is 0, and 0 times NaN is NaN.

    A visible NaN score still makes dS itself NaN.
    """
    clean = _scores(_values_cleared(query), _values_cleared(key))
    return clean + jax.lax.stop_gradient(_scores(query, key) - clean)


def _contained_outputs(visible: jax.Array) -> _Outputs:
    """Sums over visible keys alone: masked values, and cotangents of queries that they are masked from, may be NaN."""

    def outputs(weights: jax.Array, value: jax.Array) -> jax.Array:
        S, per_key = weights.shape[3], weights.size // weights.shape[3] * value.shape[3]
        count = max(1, min(S, _ELEMENTS_AT_ONCE // max(per_key, 1)))
        pad = lambda x, axis: jnp.pad(x, [(0, -S % count if a == axis else 0) for a in range(4)])
        chunks = lambda x, axis: jnp.stack(jnp.split(pad(x, axis), -(-S // count), axis))

        @jax.checkpoint
        def add(total: jax.Array, chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
            weights, seen, value = chunk
            values = jnp.where(seen[..., None], value[:, :, None], 0)  # [B, H, T, chunk, Dv]
            return total + _einsum("bnts,bntsh->bnth", weights, values), None

        start = jnp.zeros((*weights.shape[:3], value.shape[3]), weights.dtype)
        return jax.lax.scan(add, start, (chunks(weights, 3), chunks(visible, 3), chunks(value, 2)))[0]

    return outputs


def over_indices(mod: Mod, operands: tuple[jax.Array, ...], shape: tuple[int, ...]) -> jax.Array:
    """Evaluates a mask mod, or that of dropout, for every (b, h, q_idx, kv_idx) of a dense array [B, Hq, T, S]."""
    call = lambda *args: mod(operands, *args)
    for axis in reversed(range(4)):
        call = jax.vmap(call, in_axes=tuple(0 if i == axis else None for i in range(4)))
    return call(*(jnp.arange(n, dtype=jnp.int32) for n in shape))


def _modified(mod: Mod, operands: tuple[jax.Array, ...], score: jax.Array, visible: jax.Array) -> jax.Array:
    """The score mod on all scores.

    Where masked, it is evaluated at a visible position of the same head: a mod may be NaN or infinite where masked
    (``log(q_idx - kv_idx)``), and 0 times its NaN derivative would reach captured arrays.
    """
    b, h, q_idx, kv_idx = (jax.lax.broadcasted_iota(jnp.int32, score.shape, axis) for axis in range(4))
    visible = jnp.broadcast_to(visible, score.shape)
    seen = jnp.argmax(visible.reshape(*score.shape[:2], -1), axis=-1)[..., None]

    def instead(x: jax.Array) -> jax.Array:
        return jnp.where(visible, x, jnp.take_along_axis(x.reshape(*x.shape[:2], -1), seen, axis=-1)[..., None])

    call = lambda *args: mod(operands, *args)
    for _ in range(4):
        call = jax.vmap(call)
    return call(instead(score), b, h, instead(q_idx), instead(kv_idx))


def _states_of_elements(spec: AttentionSpec, blocks: Blocks, lists: BlockLists) -> jax.Array:
    """The state of each element's block, [B or 1, Hq or 1, T, S]."""
    states = states_from_lists(lists)
    Bq, Bk = blocks.size
    return jnp.repeat(jnp.repeat(states, Bq, axis=2), Bk, axis=3)[:, :, : spec.T, : spec.S]


def _softmax(score: jax.Array, visible: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Softmax over the visible keys, and its logsumexp; 0 and -inf for a row without any.

    Masked scores are replaced before anything is computed from them, so that neither they nor their derivatives (of
    ``1 / score``, say) can introduce NaN.
    """
    score = jnp.where(visible, score, -jnp.inf)
    top = jax.lax.stop_gradient(jnp.max(score, axis=-1, keepdims=True))
    empty = top == -jnp.inf
    shifted = jnp.exp(score - jnp.where(empty, 0, top))
    total = jnp.sum(shifted, axis=-1, keepdims=True)
    safe = jnp.where(empty, 1, total)
    lse = jnp.where(empty, -jnp.inf, jnp.where(empty, 0, top) + jnp.log(safe))
    return shifted / safe, lse[..., 0]

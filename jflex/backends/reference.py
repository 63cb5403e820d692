"""The definition of attention, in dense float32 jnp: slow, clear, and differentiable to any order."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp

from jflex._mesh import vary, varying_axes
from jflex.backends import paged_reference
from jflex.backends.base import Backend, Gradients, Inputs, PagedInputs, Plan, Saved, SavedCotangents
from jflex.backends.dense_scores import contained_scores, einsum, modified, scores, softmax, stats_of
from jflex.backends.lengths import inputs_without_lengths, spec_without_lengths
from jflex.backends.xla.containment import all_finite
from jflex.block_mask.lists import FULL, PARTIAL, BlockLists, states_from_lists
from pallas_kernels.plan import GradientRequest, Refusal
from pallas_kernels.spec import AttentionSpec, Blocks, Mod


class Reference(Backend):
    """Holds all T x S scores of every head; never selected automatically.

    Masked NaN reaches no result, with one exception: a NaN cotangent with finite inputs reaches the gradients of values
    that its query does not attend to.
    """

    name: ClassVar[str] = "reference"
    differentiable: ClassVar[bool] = True

    def plan(self, spec: AttentionSpec, requested: GradientRequest | None) -> Plan | Refusal:
        """Supports every call, but not every promise of a `Config`, because XLA chooses the order of its sums."""
        del requested  # JAX differentiates it
        if spec.config.batch_invariant:
            return Refusal("it sums over as many keys as the longest request has, and so is not batch invariant")
        if spec.platform != "cpu" and spec.config.deterministic and _captures_floats(spec.score_mod):
            return Refusal("JAX adds the gradients of captured arrays in no fixed order")
        return Plan(lambda: "no tiles")

    def forward(self, spec: AttentionSpec, inputs: Inputs | PagedInputs) -> Saved:
        """Follows the definition line by line."""
        if isinstance(inputs, PagedInputs):
            return paged_reference.attend(spec, inputs)
        spec, inputs = spec_without_lengths(spec, None), inputs_without_lengths(spec, inputs, None)
        exact = jnp.dtype(spec.exact)
        by_heads = lambda x: (x if spec.layout == "BNTH" else x.swapaxes(1, 2)).astype(exact)
        query, key, value = (by_heads(x) for x in (inputs.query, inputs.key, inputs.value))
        per_query_head = lambda x: jnp.repeat(jnp.broadcast_to(x, (spec.B, *x.shape[1:])), spec.group, axis=1)
        key, value = map(per_query_head, (key, value))
        visible = jnp.ones((spec.B, spec.Hq, spec.T, spec.S), bool)
        if spec.mask_mod is not None:
            visible = over_indices(spec.mask_mod, inputs.captured.mask, visible.shape)
        if spec.blocks is not None and inputs.lists is not None:
            states = _states_of_elements(spec, spec.blocks, inputs.lists)
            visible = jnp.broadcast_to((states == FULL) | ((states == PARTIAL) & visible), visible.shape)
        kept = None
        if spec.dropout is not None:
            kept = over_indices(spec.dropout.mod, inputs.captured.dropout, visible.shape)

        def attend(scores_of: _Scores, outputs: _Outputs, query, key, value, operands, sinks) -> tuple[jax.Array, ...]:
            score = scores_of(query, key) * jnp.asarray(spec.scale, exact)
            if spec.score_mod is not None:
                positions = [jax.lax.broadcasted_iota(jnp.int32, score.shape, axis) for axis in range(4)]
                score = modified(spec.score_mod, operands, score.astype(jnp.float32), positions, visible).astype(exact)
            if spec.normalize == "none":
                weights, lse = jnp.where(visible, score, 0), jnp.zeros(spec.lse_shape(), exact)
            else:
                weights, lse = softmax(score, visible, sinks)
            stats = stats_of(score, visible, weights, lse, sinks) if spec.stats else ()
            weights = weights if kept is None else jnp.where(kept, weights * spec.kept_scale, 0)
            return outputs(weights, value), lse, *stats

        dense = functools.partial(attend, scores, lambda weights, value: einsum("bnts,bnsh->bnth", weights, value))
        if spec.mask_mod is None and spec.blocks is None:
            out, *rows = dense(query, key, value, inputs.captured.score, inputs.sinks)
        else:  # masked elements may be NaN
            contained = jax.checkpoint(functools.partial(attend, contained_scores, _contained_outputs(visible)))
            finite = functools.reduce(jnp.logical_and, map(all_finite, jax.lax.stop_gradient([query, key, value])))
            arrays = (query, key, value, inputs.captured.score, inputs.sinks)
            out, *rows = jax.lax.cond(finite, dense, contained, *arrays)
        out = out if spec.layout == "BNTH" else out.swapaxes(1, 2)
        lse, *stats = (x.astype(jnp.float32) for x in rows)
        named_stats = {name: x for name, x in zip(("max", "entropy"), stats, strict=False) if name in spec.stats}
        return Saved(out.astype(spec.dtype), lse, **named_stats)

    def backward(
        self, spec: AttentionSpec, inputs: Inputs, saved: Saved, d_saved: SavedCotangents, requested: GradientRequest
    ) -> Gradients:
        """Differentiates `forward`, to complete the interface."""
        floats = (inputs.query, inputs.key, inputs.value, inputs.captured.score, inputs.sinks)

        def forward(query, key, value, score, sinks) -> Saved:
            captured = inputs.captured._replace(score=score)
            return self.forward(
                spec, inputs._replace(query=query, key=key, value=value, captured=captured, sinks=sinks)
            )

        _, pull = jax.vjp(forward, *floats)
        lse = jnp.zeros_like(saved.lse) if d_saved.lse is None else d_saved.lse
        rows = jax.tree.map(jnp.zeros_like, saved)._replace(out=d_saved.out, lse=lse)
        return Gradients(*pull(rows if d_saved.entropy is None else rows._replace(entropy=d_saved.entropy)))


def _captures_floats(mod: Mod | None) -> bool:
    return mod is not None and any(jnp.issubdtype(dtype, jnp.floating) for _, dtype in mod.operands)


_Scores = Callable[[jax.Array, jax.Array], jax.Array]  # [B, H, T, D], [B, H, S, D] -> [B, H, T, S]
_Outputs = Callable[[jax.Array, jax.Array], jax.Array]  # [B, H, T, S], [B, H, S, Dv] -> [B, H, T, Dv]
_ELEMENTS_AT_ONCE = 1 << 22  # of values repeated for each query


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
            return total + einsum("bnts,bntsh->bnth", weights, values), None

        start = jnp.zeros((*weights.shape[:3], value.shape[3]), weights.dtype)
        start = vary(start, varying_axes(weights, visible, value))
        return jax.lax.scan(add, start, (chunks(weights, 3), chunks(visible, 3), chunks(value, 2)))[0]

    return outputs


def over_indices(mod: Mod, operands: tuple[jax.Array, ...], shape: tuple[int, ...]) -> jax.Array:
    """Evaluates a mask mod, or that of dropout, for every (b, h, q_idx, kv_idx) of a dense array [B, Hq, T, S]."""
    call = lambda *args: mod(operands, *args)
    for axis in reversed(range(4)):
        call = jax.vmap(call, in_axes=tuple(0 if i == axis else None for i in range(4)))
    return call(*(jnp.arange(n, dtype=jnp.int32) for n in shape))


def _states_of_elements(spec: AttentionSpec, blocks: Blocks, lists: BlockLists) -> jax.Array:
    """The state of each element's block, [B or 1, Hq or 1, T, S]."""
    states = states_from_lists(lists)
    Bq, Bk = blocks.size
    return jnp.repeat(jnp.repeat(states, Bq, axis=2), Bk, axis=3)[:, :, : spec.T, : spec.S]

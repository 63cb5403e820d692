"""The definition of attention, in dense float32 jnp: slow, clear, and differentiable to any order."""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp

from jflex.backends.base import Backend, Gradients, Inputs, Saved, SavedCotangents, Wanted
from jflex.block_lists import FULL, PARTIAL, BlockLists, kinds_from_lists
from jflex.kv_lengths import without_lengths
from jflex.problem import Blocks, Problem
from jflex.trace import TracedMod


class Reference(Backend):
    """Holds all T x S scores of every head; never chosen by itself."""

    name: ClassVar[str] = "reference"
    own_derivatives: ClassVar[bool] = True

    def unsupported(self, problem: Problem) -> str | None:
        """Runs everything."""
        del problem
        return None

    def forward(self, problem: Problem, inputs: Inputs) -> Saved:
        """Follows the definition line by line."""
        if problem.kv_lengths:
            problem, inputs = without_lengths(problem, inputs, None)
        axes = "btnh,bsnh" if problem.layout == "BTNH" else "bnth,bnsh"
        key, value = (self._per_query_head(problem, x) for x in (inputs.key, inputs.value))
        precision = jax.lax.Precision.HIGHEST
        exact = jnp.dtype(problem.exact)
        score = jnp.einsum(f"{axes}->bnts", inputs.query.astype(exact), key.astype(exact), precision=precision)
        score = score * jnp.asarray(problem.scale, exact)
        visible = jnp.ones(score.shape, bool)
        if problem.mask is not None:
            visible = over_indices(problem.mask, inputs.mask_operands, score.shape)
        if problem.blocks is not None:
            kinds = _kinds_of_elements(problem, problem.blocks, inputs.lists)
            visible = (kinds == FULL) | ((kinds == PARTIAL) & visible)
        if problem.score is not None:
            score = _modified(problem.score, inputs.score_operands, score.astype(jnp.float32), visible).astype(exact)
        weights, lse = _softmax(score, visible)
        axes = "bsnh->btnh" if problem.layout == "BTNH" else "bnsh->bnth"
        out = jnp.einsum(f"bnts,{axes}", weights, value.astype(exact), precision=precision)
        return Saved(out.astype(problem.dtype), lse.astype(jnp.float32))

    def backward(
        self, problem: Problem, inputs: Inputs, saved: Saved, d_saved: SavedCotangents, wanted: Wanted
    ) -> Gradients:
        """Differentiates `forward`; here for completeness of the interface."""
        floats = (inputs.query, inputs.key, inputs.value, inputs.score_operands)
        _, pull = jax.vjp(
            lambda q, k, v, s: self.forward(problem, inputs._replace(query=q, key=k, value=v, score_operands=s)),
            *floats,
        )
        lse = jnp.zeros_like(saved.lse) if d_saved.lse is None else d_saved.lse
        return Gradients(*pull(Saved(d_saved.out, lse)))

    def _per_query_head(self, problem: Problem, x: jax.Array) -> jax.Array:
        x = jnp.broadcast_to(x, (problem.B, *x.shape[1:]))
        return jnp.repeat(x, problem.group, axis=2 if problem.layout == "BTNH" else 1)


def over_indices(mod: TracedMod, operands: tuple[jax.Array, ...], shape: tuple[int, ...]) -> jax.Array:
    """Evaluates a mask mod for every (b, h, q_idx, kv_idx) of a dense array [B, Hq, T, S]."""
    call = lambda *args: mod(operands, *args)
    for axis in reversed(range(4)):
        call = jax.vmap(call, in_axes=tuple(0 if i == axis else None for i in range(4)))
    return call(*(jnp.arange(n, dtype=jnp.int32) for n in shape))


def _modified(mod: TracedMod, operands: tuple[jax.Array, ...], score: jax.Array, visible: jax.Array) -> jax.Array:
    """The score mod on all scores.

    Where nothing is seen, it is evaluated on the arguments of some place of that head that is seen: there a mod may be
    NaN or infinite (``log(q_idx - kv_idx)``), and 0 times a derivative that is NaN would reach what it captures.
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


def _kinds_of_elements(problem: Problem, blocks: Blocks, lists: BlockLists) -> jax.Array:
    """The kind of the block in which each element lies, [B or 1, Hq or 1, T, S]."""
    kinds = kinds_from_lists(lists)
    Bq, Bk = blocks.size
    return jnp.repeat(jnp.repeat(kinds, Bq, axis=2), Bk, axis=3)[:, :, : problem.T, : problem.S]


def _softmax(score: jax.Array, visible: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Softmax over the keys that are visible, and its logsumexp: 0 and -inf where there is none.

    Scores that are not visible are replaced before anything is computed from them, so that neither they nor their
    derivatives (of ``1 / score``, say) can bring NaN.
    """
    score = jnp.where(visible, score, -jnp.inf)
    top = jax.lax.stop_gradient(jnp.max(score, axis=-1, keepdims=True))
    empty = top == -jnp.inf
    shifted = jnp.exp(score - jnp.where(empty, 0, top))
    total = jnp.sum(shifted, axis=-1, keepdims=True)
    safe = jnp.where(empty, 1, total)
    lse = jnp.where(empty, -jnp.inf, jnp.where(empty, 0, top) + jnp.log(safe))
    return shifted / safe, lse[..., 0]

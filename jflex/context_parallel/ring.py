"""Context parallel attention over a ring: keys and values pass from device to device, and states are merged.

After Ring Attention (Liu et al. 2023, arXiv:2310.01889). The next keys are sent before the kernel runs on those at
hand, so that a compiler may overlap both. In the backward pass keys and values go round once more, and the sums of
their gradients follow one step behind; each kernel takes weights from the lse over all keys, so that the gradients of
steps add up. Steps at which no device attends to anything are left out where the mask is known, by a longer hop; at the
others a device that attends to nothing computes nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import PyTree

from jflex._call.dispatch import get_backend, select_forward, select_passes
from jflex._jax.custom_vjp import (
    BackwardOp,
    BackwardPass,
    ForwardOp,
    input_cotangents,
    primals,
    requested_gradients,
    reverse_only,
    saved_cotangents,
)
from jflex._jax.primitive import call_as_primitive
from jflex._jax.shard import Shard, Where, shard_of
from jflex._mesh import compiled_in_shard_map, match_manual_axes
from jflex.backends.base import Gradients, Inputs, Saved
from jflex.backends.results import fold_sinks
from jflex.backends.vector_mods import exact_dtype
from jflex.block_mask.lists import BlockLists
from jflex.context_parallel.call import CALLER, ContextCall
from jflex.states.merging import merge
from jflex.states.state import AttentionState
from jflex.states.stats import AttentionStats

KeyAndValue = tuple[jax.Array, jax.Array]


class _Local(NamedTuple):
    """Arrays of one device; `lists` have an axis of the devices whose keys are visited, and `sees` None for all."""

    inputs: Inputs
    where: Where
    sees: jax.Array | None
    me: jax.Array


@dataclasses.dataclass(frozen=True)
class _Ring:
    """The static part of a call."""

    call: ContextCall
    # the steps at which any device attends to anything; at step ``s``, device ``i`` holds the keys of ``i - s``
    steps: tuple[int, ...]

    def hop(self, tree: PyTree, distance: int) -> PyTree:
        """Sends arrays to the device `distance` steps further.

        XLA has one transfer under way at a time, and only that one is hidden by a kernel: so keys and values, and their
        gradients, travel as one array where they are alike.
        """
        n = self.call.placement.shards
        if distance % n == 0:
            return tree
        pairs = [(i, (i + distance) % n) for i in range(n)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.call.placement.axis, pairs), tree)

    def at(self, local: _Local, keys: KeyAndValue, owner: jax.Array) -> Shard:
        """The call of this device on the keys of another one."""
        spec, lists = self.call.spec, local.inputs.lists
        lists = None if lists is None else BlockLists(*(x[owner] for x in lists))
        inputs = local.inputs._replace(key=keys[0], value=keys[1], lists=lists)
        shard = shard_of(spec, inputs, local.where._replace(keys=self.call.span(spec.S, owner)))
        return shard._replace(inputs=match_manual_axes(shard.inputs))

    def owner(self, local: _Local, step: jax.Array) -> jax.Array:
        """Whose keys this device holds at a step."""
        return lax.rem(local.me - step + self.call.placement.shards, jnp.int32(self.call.placement.shards))


Visit = Callable[[PyTree, KeyAndValue, jax.Array], tuple[PyTree, PyTree]]


def attend_in_ring(call: ContextCall, inputs: Inputs, where: Where, sees: jax.Array | None) -> Saved:
    """The attention of one device, inside of its program; `inputs` are local.

    Args:
      sees: Whether this device attends to the keys of each device; None if not known.
    """
    me = call.placement.shard()
    where = where._replace(queries=call.span(call.spec.T, me))
    known = None if call.sees is None else np.array(call.sees)
    ring = _Ring(call, steps_of(known, call.placement.shards))
    if known is not None and _all_see(known, ring.steps):
        sees = None
    local = match_manual_axes(_Local(inputs._replace(sinks=None), where, sees, me))
    shard = ring.at(local, (local.inputs.key, local.inputs.value), me)
    name = select_forward(call.implementation, shard.spec, CALLER)
    if get_backend(name).differentiable:
        saved = _forward(ring, name, local)
    else:
        saved = cast(Saved, _call(ring, name, local._replace(inputs=reverse_only(local.inputs))))
    return fold_sinks(shard.spec, saved, inputs.sinks)


def steps_of(sees: np.ndarray | None, n: int) -> tuple[int, ...]:
    """The steps at which any device attends to anything; the first one in any case."""
    if sees is None:
        return tuple(range(n))
    devices = np.arange(n)
    return tuple(s for s in range(n) if s == 0 or sees[devices, (devices - s) % n].any())


def _all_see(sees: np.ndarray, steps: tuple[int, ...]) -> bool:
    devices = np.arange(len(sees))
    return all(sees[devices, (devices - s) % len(sees)].all() for s in steps)


def _walk(ring: _Ring, local: _Local, visit: Visit, sums: PyTree) -> tuple[PyTree, PyTree]:
    """Visits the keys of all steps.

    Args:
      visit: ``(carry, keys, owner) -> (carry, addition)``; the carry stays on this device, and is None at first.
      sums: Zeros, to which the additions are added: a tree like theirs. They travel with the keys that they belong to.
    """

    def step(state: PyTree, number: jax.Array, arrived: int, leaves: int) -> PyTree:
        carry, keys, sums = state
        onward = ring.hop(keys, leaves)  # neither hop waits for the kernel, nor it for them
        sums = ring.hop(sums, arrived)
        carry, addition = visit(carry, _unpacked(keys, pair), ring.owner(local, number))
        addition = jax.tree.map(lambda x, zero: x.astype(zero.dtype), addition, zeros)
        return carry, onward, jax.tree.map(jnp.add, sums, _packed(addition))

    pair = (local.inputs.key, local.inputs.value)
    zeros, sums = sums, _packed(sums)
    steps = ring.steps
    hops = [after - before for before, after in itertools.pairwise(steps)]
    leaves = [*hops, 0]
    # The sums of this device's own keys stay, so that those of others set out at the second step.
    arrived = [0, 0, *hops[1:]] if jax.tree.leaves(sums) else [0] * len(steps)
    state = step((None, _packed(pair), sums), jnp.int32(0), 0, leaves[0])
    own_sums, state = state[2], (*state[:2], sums)
    for (come, go), alike in itertools.groupby(range(1, len(steps)), lambda i: (arrived[i], leaves[i])):
        state = _repeated(functools.partial(step, arrived=come, leaves=go), state, [steps[i] for i in alike])
    if len(steps) > 1:
        own_sums = jax.tree.map(jnp.add, own_sums, ring.hop(state[2], -steps[-1]))
    return state[0], _unpacked(own_sums, zeros)


def _repeated(step: Callable[[PyTree, jax.Array], PyTree], state: PyTree, numbers: list[int]) -> PyTree:
    """Takes several steps, in a loop if there is more than one: a ring that leaves none out compiles four kernels."""
    if len(numbers) == 1:
        return step(state, jnp.int32(numbers[0]))
    becomes = jax.eval_shape(step, state, jnp.int32(numbers[0]))  # the first step's carry is narrower
    state = jax.tree.map(lambda x, after: x.astype(after.dtype), state, becomes)
    return lax.scan(lambda state, number: (step(state, number), None), state, jnp.array(numbers, jnp.int32))[0]


def _packed(tree: PyTree) -> tuple[jax.Array, ...]:
    """The arrays of a tree, stacked if they are alike."""
    leaves = jax.tree.leaves(tree)
    alike = len({(x.shape, x.dtype) for x in leaves}) == 1
    return (jnp.stack(leaves),) if alike and len(leaves) > 1 else tuple(leaves)


def _unpacked(packed: tuple[jax.Array, ...], like: PyTree) -> PyTree:
    """The inverse of `_packed`, for a tree like `like`."""
    leaves, tree = jax.tree.flatten(like)
    return jax.tree.unflatten(tree, packed if len(packed) == len(leaves) else list(packed[0]))


def _where_attended(
    local: _Local, owner: jax.Array, compute: Callable[[PyTree], PyTree], keys: PyTree, nothing: PyTree
) -> PyTree:
    """``compute(keys)`` if this device attends to any key of the owner, else zeros or the state of no keys."""
    if local.sees is None:
        return compute(keys)
    computed = jax.eval_shape(compute, keys)  # gradients are of 16 bits or of 32, by the backend
    nothing = jax.tree.map(lambda x, like: x.astype(like.dtype), nothing, computed)
    nothing, seen = match_manual_axes((nothing, local.sees[owner]))
    return lax.cond(seen, compute, lambda _: nothing, keys)


def _forward(ring: _Ring, backend: str, local: _Local) -> Saved:
    spec, exact = ring.call.spec, ring.call.spec.exact
    layout, normalize = spec.layout, spec.normalize

    def attend(keys: KeyAndValue, owner: jax.Array) -> AttentionState:
        shard = ring.at(local, keys, owner)
        if get_backend(backend).differentiable:
            saved = get_backend(backend).forward(shard.spec, shard.inputs)
        else:
            saved = call_as_primitive(ForwardOp(backend, shard.spec), shard.inputs)
        stats = AttentionStats(saved.lse, saved.max, saved.entropy)
        return dataclasses.replace(AttentionState.from_attention(saved.out, stats, layout), normalize=normalize)

    axis, heads = (1, 2) if layout == "BTNH" else (2, 1)
    query = local.inputs.query
    shape = (query.shape[0], query.shape[axis], query.shape[heads], spec.Dv)
    empty = _typed_like(local, AttentionState.empty(shape, spec.dtype, normalize, spec.stats))
    wide = lambda state: dataclasses.replace(state, out=state.out.astype(exact))

    def visit(state: AttentionState | None, keys: KeyAndValue, owner: jax.Array) -> tuple[AttentionState, None]:
        attended = _where_attended(local, owner, lambda keys: attend(keys, owner), keys, empty)
        return attended if state is None else merge(wide(state), wide(attended)), None

    state, _ = _walk(ring, local, visit, None)
    out, lse = state.to_attention(layout)
    stats = {name: checkpoint_name(getattr(state, name).swapaxes(1, 2), f"jflex_{name}") for name in spec.stats}
    return Saved(checkpoint_name(out.astype(spec.dtype), "jflex_out"), checkpoint_name(lse, "jflex_lse"), **stats)


def _typed_like(local: _Local, tree: PyTree) -> PyTree:
    """Types a tree as varying over the axes of the arrays of this device."""
    return match_manual_axes((tree, local.me, local.inputs.query))[0]


_attend = jax.custom_vjp(_forward, nondiff_argnums=(0, 1))


def _attend_fwd(ring: _Ring, backend: str, perturbed: _Local) -> tuple[Saved, tuple[_Local, Saved, BackwardPass]]:
    local, requested = primals(perturbed), requested_gradients(perturbed.inputs)
    shard = ring.at(local, (local.inputs.key, local.inputs.value), local.me)
    passes = select_passes(ring.call.implementation, shard.spec, shard.requested(requested))
    saved = _forward(ring, passes.forward, local)
    return saved, (local, saved._replace(max=None), BackwardPass(passes.backward, requested))


class _OfQueries(NamedTuple):
    """The gradients that stay on a device; None where not requested."""

    query: jax.Array | None
    captured: tuple[jax.Array | None, ...]


_OfKeys = tuple[jax.Array | None, jax.Array | None]
"""The gradients that travel with keys and values, likewise."""


def _attend_bwd(
    ring: _Ring, backend: str, residuals: tuple[_Local, Saved, BackwardPass], cotangents: Saved
) -> tuple[_Local]:
    local, saved, backward = residuals
    requested, inputs = backward.requested, local.inputs
    d_saved = saved_cotangents(saved, cotangents)

    def pull(keys: KeyAndValue, owner: jax.Array) -> tuple[_OfQueries, _OfKeys]:
        shard = ring.at(local, keys, owner)
        operation = BackwardOp(backward.backend, shard.spec, shard.requested(requested))
        gradients = call_as_primitive(operation, match_manual_axes((shard.inputs, saved, d_saved)))
        captured = tuple(
            None if not want else jnp.zeros_like(x) if number is None else gradients.score_operands[number]
            for number, want, x in zip(shard.operands, requested.score_operands, inputs.captured.score, strict=True)
        )
        return _typed_like(local, (_OfQueries(gradients.query, captured), (gradients.key, gradients.value)))

    zeros = lambda x, want: jnp.zeros_like(x) if want else None
    none = _typed_like(local, (
        _OfQueries(
            zeros(inputs.query, requested.query), tuple(map(zeros, inputs.captured.score, requested.score_operands))
        ),
        (zeros(inputs.key, requested.key), zeros(inputs.value, requested.value)),
    ))  # fmt: skip
    widened = lambda x: x.astype(exact_dtype(x.dtype))

    def visit(sums: _OfQueries | None, keys: KeyAndValue, owner: jax.Array) -> tuple[_OfQueries, _OfKeys]:
        of_queries, of_keys = _where_attended(local, owner, lambda keys: pull(keys, owner), keys, none)
        if sums is not None:
            of_queries = jax.tree.map(lambda x, more: widened(x) + widened(more), sums, of_queries)
        return of_queries, of_keys

    of_queries, of_keys = _walk(ring, local, visit, jax.tree.map(widened, none[1]))
    gradients = Gradients(of_queries.query, of_keys[0], of_keys[1], of_queries.captured)
    return (jax.tree.map(lambda _: None, local)._replace(inputs=input_cotangents(inputs, gradients)),)


_attend.defvjp(_attend_fwd, _attend_bwd, symbolic_zeros=True)
_call = compiled_in_shard_map(_attend, (0, 1))

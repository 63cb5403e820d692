"""Loads of captured arrays in a traced mod.

For the `xla` backend, which evaluates any mod that `jax.vmap` can, also one that no GPU kernel supports. A load is a
chain of indexing operations from an operand to a few values. The derivative of a mod with respect to its loads is
elementwise. So masked elements can be cleared before anything is summed, and sums over the axes on which a load does
not depend are added into the gradient of the operand in place.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.extend import core

from jflex.mods.batchable import SMALL, VIEWS
from jflex.mods.fingerprint import aval_of, bind, open_jaxpr
from jflex.mods.trace import TracedMod, batchable_program


@dataclasses.dataclass(frozen=True, eq=False)
class Load:
    """A value that a mod reads from one operand."""

    variable: core.Var
    operand: int
    axes: tuple[int, ...]  # which of b, h, q_idx, kv_idx (0 to 3) it depends on


@dataclasses.dataclass(frozen=True, eq=False)
class LoadedMod:
    """A score mod, split into loads of few values at once, operands read as a whole, and the rest."""

    traced: TracedMod
    jaxpr: core.Jaxpr
    loads: tuple[Load, ...]
    whole: tuple[int, ...]

    def values(self, operands: Sequence[jax.Array], *arguments: jax.Array) -> list[jax.Array]:
        """The values that the loads read at scalars ``score, b, h, q_idx, kv_idx``."""
        env = self._run(operands, arguments, {}, [load.variable for load in self.loads])
        return [env[load.variable] for load in self.loads]

    def evaluate(self, values: Sequence[jax.Array], operands: Sequence[jax.Array], *arguments: jax.Array) -> jax.Array:
        """The mod as a function of what its loads read."""
        known = {load.variable: x for load, x in zip(self.loads, values, strict=True)}
        [out] = self.jaxpr.outvars
        if isinstance(out, core.Literal):
            return jnp.asarray(out.val)
        return self._run(operands, arguments, known, [out])[out]

    def positions(self, load: Load, operands: Sequence[jax.Array], *arguments: jax.Array) -> jax.Array:
        """Flat positions that a load reads: the same indexing, applied to an iota."""
        shape = operands[load.operand].shape
        numbered = list(operands)
        numbered[load.operand] = jnp.arange(math.prod(shape), dtype=jnp.int32).reshape(shape)
        return self._run(numbered, arguments, {}, [load.variable], numbered=load.operand)[load.variable]

    def _run(
        self,
        operands: Sequence[jax.Array],
        arguments: Sequence[jax.Array],
        known: dict[core.Var, jax.Array],
        outputs: Sequence[core.Var],
        *,
        numbered: int | None = None,
    ) -> dict[core.Var, jax.Array]:
        jaxpr = self.jaxpr
        env = dict(zip(jaxpr.invars, (*arguments, *operands), strict=True)) | known
        needed = _needed(jaxpr, outputs, set(known))
        views = set() if numbered is None else {jaxpr.invars[len(arguments) + numbered]}
        for number in needed:
            eqn = jaxpr.eqns[number]
            values = [v.val if isinstance(v, core.Literal) else env[v] for v in eqn.invars]
            if eqn.primitive.name in VIEWS and not isinstance(eqn.invars[0], core.Literal) and eqn.invars[0] in views:
                views.add(eqn.outvars[0])  # of the iota; a load that computes an index keeps its own fill value
                if eqn.primitive.name == "gather":
                    eqn = eqn.replace(params={**eqn.params, "fill_value": -1})  # out of range: dropped later
            outs = bind(eqn, values)
            env.update((v, x) for v, x in zip(eqn.outvars, outs, strict=True) if v not in known)
        return env


@functools.lru_cache(maxsize=256)
def split_loads(traced: TracedMod) -> LoadedMod:
    """Finds the loads of a score mod."""
    jaxpr = open_jaxpr(batchable_program(traced)).jaxpr
    count = len(jaxpr.invars) - len(traced.operands)
    axes: dict[core.Var, frozenset[int]] = {v: frozenset({i - 1}) for i, v in enumerate(jaxpr.invars[:count])}
    origin = {v: i for i, v in enumerate(jaxpr.invars[count:]) if jnp.issubdtype(aval_of(v).dtype, jnp.floating)}
    ends: dict[core.Var, None] = {}
    for eqn in jaxpr.eqns:
        inputs = [v for v in eqn.invars if not isinstance(v, core.Literal)]
        depends = frozenset().union(*(axes.get(v, frozenset()) for v in inputs))
        is_view = eqn.primitive.name in VIEWS and bool(inputs) and inputs[0] is eqn.invars[0] and inputs[0] in origin
        if is_view:
            origin[eqn.outvars[0]] = origin[inputs[0]]
        for v in inputs[1:] if is_view else inputs:
            if v in origin:
                ends[v] = None
        axes.update(dict.fromkeys(eqn.outvars, depends))
    ends.update((v, None) for v in jaxpr.outvars if not isinstance(v, core.Literal) and v in origin)
    by_score = lambda v: -1 in axes.get(v, ())  # its index depends on the score, not on b, h, q_idx, kv_idx alone
    whole = {origin[v] for v in ends if math.prod(aval_of(v).shape) > SMALL or by_score(v)}
    loads = [Load(v, origin[v], tuple(sorted(axes.get(v, ())))) for v in ends if origin[v] not in whole]
    return LoadedMod(traced, jaxpr, tuple(loads), tuple(sorted(whole)))


def _needed(jaxpr: core.Jaxpr, outputs: Sequence[core.Var], known: set[core.Var]) -> list[int]:
    """Indices of the equations on which the outputs depend, in order."""
    needed, numbers = set(outputs) - known, []
    for number in reversed(range(len(jaxpr.eqns))):
        eqn = jaxpr.eqns[number]
        if any(v in needed for v in eqn.outvars):
            numbers.append(number)
            needed |= {v for v in eqn.invars if not isinstance(v, core.Literal)} - known
    return numbers[::-1]

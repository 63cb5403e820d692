"""Which of its indices the result of a mod depends on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend import core

from jflex.mods.fingerprint import open_jaxpr, sub_jaxpr
from jflex.mods.trace import TracedMod

_INDEX_POSITIONS = {"b": 0, "h": 1, "q_idx": 2, "kv_idx": 3}


def uses_index(traced: TracedMod, index: str) -> bool:
    """Whether the result of a mask_mod can depend on one of its indices: ``"b"``, ``"h"``, ``"q_idx"`` or ``"kv_idx"``.

    Loops and branches count as using whatever enters them.

    >>> from jflex.mods.trace import trace_mask_mod
    >>> traced, _ = trace_mask_mod(lambda b, h, q_idx, kv_idx: q_idx - h >= kv_idx)
    >>> uses_index(traced, "h"), uses_index(traced, "b")
    (True, False)
    """
    jaxpr = open_jaxpr(traced.jaxpr).jaxpr
    return _INDEX_POSITIONS[index] in used_inputs(jaxpr, [True])


def used_inputs(jaxpr: Any, wanted: Sequence[bool]) -> set[int]:
    """Indices of the inputs of a jaxpr on which its `wanted` outputs can depend."""
    live = {v for v, want in zip(jaxpr.outvars, wanted, strict=True) if want and not isinstance(v, core.Literal)}
    for eqn in reversed(jaxpr.eqns):
        outputs = [v in live for v in eqn.outvars]
        if not any(outputs):
            continue
        inner = sub_jaxpr(eqn)
        inputs = range(len(eqn.invars))
        if inner is not None and len(inner.jaxpr.invars) == len(eqn.invars) and eqn.primitive.name in ("jit", "pjit"):
            inputs = used_inputs(inner.jaxpr, outputs)
        live |= {eqn.invars[i] for i in inputs if not isinstance(eqn.invars[i], core.Literal)}
    return {i for i, v in enumerate(jaxpr.invars) if v in live}

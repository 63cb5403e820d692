"""Tangents by kernels: what the adapters of both backends do around these."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax

from jflex.backends import lengths as kv_lengths
from jflex.backends.base import Gradients, Inputs, Saved, SavedCotangents
from pallas_kernels.spec import AttentionSpec, Operands

if TYPE_CHECKING:
    from pallas_kernels.tangents import Moved, Pushed


def push_forward(
    spec: AttentionSpec,
    arrays: Operands[jax.Array],
    inputs: Inputs,
    saved: Saved,
    tangents: Gradients,
    kernel: Callable[[Operands, Moved[jax.Array]], Pushed[jax.Array]],
) -> SavedCotangents:
    """The tangents of the results by a kernel for calls without lengths; `arrays` are the inputs of one."""
    from pallas_kernels.tangents import Moved, of_sinks, with_tangents

    lengths = inputs.kv_lengths
    clear = lambda x: x if x is None or lengths is None else kv_lengths.cleared(spec, lengths, x)
    d_lse = logs = None
    if inputs.sinks is not None and tangents.sinks is not None:
        d_lse, logs = of_sinks(inputs.sinks, tangents.sinks, saved.lse)
    moved = Moved(tangents.query, clear(tangents.key), clear(tangents.value), saved.out, saved.lse, d_lse)
    pushed = kernel(with_tangents(arrays, tangents.score_operands), moved)
    d_entropy = None
    if saved.entropy is not None:
        assert pushed.logs is not None  # the kernel has seen that statistic in the spec
        d_entropy = -(pushed.logs if logs is None else pushed.logs + logs) - pushed.lse * saved.entropy
    return SavedCotangents(pushed.out, pushed.lse, d_entropy)

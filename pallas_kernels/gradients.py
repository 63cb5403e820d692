"""State of the backward passes: requested and computed gradients, row statistics, and the VJP of the score mod."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, NoReturn

import jax
import jax.numpy as jnp

from pallas_kernels.config import Tiles
from pallas_kernels.program.build import Derivative
from pallas_kernels.program.cotangents import LoadGroups, scatter
from pallas_kernels.program.ir import Node
from pallas_kernels.softmax import ScoreTile
from pallas_kernels.spec import LOG2_E, AttentionSpec, Operands
from pallas_kernels.types import A


class RequestedGradients(NamedTuple):
    """The requested gradients; `derivative` has the loads of captured arrays among them, None without a score mod."""

    query: bool
    key_or_value: bool
    derivative: Derivative | None


class Gradients(NamedTuple):
    """The gradients; None where not requested, and in `score_operands` also where the captured array is not read."""

    query: jax.Array | None
    key: jax.Array | None
    value: jax.Array | None
    score_operands: tuple[jax.Array | None, ...]


class RowOperands(NamedTuple, Generic[A]):
    """Per query: dO (in the layout of the spec), lse and delta, both [B, Hq, T], and dH like them, or None.

    dH is the cotangent of the entropy, whose derivative with respect to P is ``-log P`` up to a number: so
    ``dP = dO V^T - dH log P``, and delta = rowsum(P * dP) - dlse.
    """

    d_out: A
    lse: A
    delta: A
    d_entropy: A | None = None

    def load_d_entropy(self, vector: Callable[..., jax.Array]) -> jax.Array | None:
        """Loads dH of a tile of queries by ``vector(ref, other=)``; None without."""
        return None if self.d_entropy is None else vector(self.d_entropy, other=0.0)


class KernelStatics(NamedTuple):
    """Static arguments of a Triton kernel of the backward pass."""

    spec: AttentionSpec
    tiles: Tiles
    derivative: Derivative | None  # of the score mod; None without one
    groups: LoadGroups | None = None  # loads of captured arrays with requested gradients; None for a repair


class Repairs(NamedTuple):
    """Repair of the backward pass of one backend by the kernels of another."""

    # ``(dQ, marks of queries) -> dQ``; marks are float32 [B, Hq, T], or [B, Hq, 1] for all of a head
    query: Callable[[jax.Array, jax.Array], jax.Array]
    # ``(dK and dV, marks of keys) -> dK and dV``; marks are float32 [B, Hkv, S]
    key_value: Callable[[tuple[jax.Array, jax.Array], jax.Array], tuple[jax.Array, jax.Array]]


class Entropy(NamedTuple):
    """The entropy of each row and its cotangent dH, float32 [B, Hq, T]."""

    value: jax.Array
    cotangent: jax.Array


def row_statistics(
    spec: AttentionSpec,
    saved: tuple[jax.Array, jax.Array],
    d_saved: tuple[jax.Array, jax.Array | None],
    entropy: Entropy | None = None,
) -> RowOperands[jax.Array]:
    """dO, lse, delta = rowsum(dO * O) + dH * H - dlse, and dH."""
    (out, lse), (d_out, d_lse) = saved, d_saved
    delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1)
    delta = delta.swapaxes(1, 2) if spec.layout == "BTNH" else delta
    delta = delta if d_lse is None else delta - d_lse
    if entropy is None:
        return RowOperands(d_out, lse, delta)
    return RowOperands(d_out, lse, delta + entropy.cotangent * entropy.value, entropy.cotangent)


def log2_lse(lse: jax.Array) -> jax.Array:
    """The lse in base 2, to subtract from exponents; inf for a fully masked row, so that its weights are 0."""
    return jnp.where(lse == -jnp.inf, jnp.inf, lse * LOG2_E)


def weights_vjp(spec: AttentionSpec, tile: ScoreTile, d_p: jax.Array) -> jax.Array:
    """The VJP of dropout: cotangents of the weights of a tile, from dO V^T."""
    return d_p if tile.kept is None else tile.drop(d_p * spec.kept_scale)


def score_mod_vjp(
    derivative: Derivative | None, tile: ScoreTile, d_s: jax.Array
) -> tuple[jax.Array, Callable[[Node], jax.Array]]:
    """The VJP of the score mod: cotangents of the raw scores, and a function ``load -> cotangents``; tile values."""
    if derivative is None:
        return d_s, _no_cotangent
    assert tile.score is not None  # it is the derivative of a mod
    evaluation = tile.score.child({derivative.cotangent: d_s})
    # The derivative of a mod may be NaN where masked, and so 0 times that.
    d_load = lambda load: tile.clear(evaluation.tile(derivative.d_loads[load]))
    return tile.clear(evaluation.tile(derivative.d_score)), d_load


def _no_cotangent(load: Node) -> NoReturn:
    raise AssertionError("without a derivative no load is asked for")


def collect(
    spec: AttentionSpec,
    derivative: Derivative | None,
    arrays: Operands[jax.Array],
    loads: Sequence[Node],
    cotangents: Sequence[jax.Array],
    gradients: dict[int, list[jax.Array]],
) -> None:
    """Scatters cotangents of row or column loads into gradients of captured arrays, appended to `gradients`."""
    if derivative is None:
        return  # no gradient of a captured array is requested
    for load, cotangent in zip(loads, cotangents, strict=True):
        operands, ordered = arrays.captured.score, spec.config.deterministic
        gradients[load.value].append(scatter(spec, derivative, operands, load, cotangent, deterministic=ordered))


def sum_gradients(parts: list[jax.Array]) -> jax.Array | None:
    """The sum of the gradients that the loads of an array contribute; None if there are none."""
    return functools.reduce(lambda x, y: x.astype(jnp.float32) + y.astype(jnp.float32), parts) if parts else None


def sum_batch(spec: AttentionSpec, x: jax.Array) -> jax.Array:
    """Sums the gradient of a key or value over a batch that shares it."""
    return x.sum(axis=0, keepdims=True) if spec.Bkv < spec.B else x

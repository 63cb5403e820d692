"""Runs a random call by the library, in float64 and by plain jnp attention, and compares as `tolerance` says.

The float64 results are JAX's own derivatives of dense attention, of the mods as they stand with 64-bit floats in the
place of all others: nothing of the library. Float32 and 16-bit roundings of a mod are judged by those that plain
attention makes with the same mod.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tests.support import drawn_arrays, evaluation, plain_attention, tolerance
from tests.support.drawn_arrays import Drawn
from tests.support.evaluation import Results, compiled_in_haste
from tests.support.random_mods.case import EXACTLY, WITHOUT_ALGSIMP, Case

EPS = float(np.finfo(np.float32).eps)


class Noise(NamedTuple):
    """How many roundings disturb scores, rows of the backward pass, steps of a mod in 16 bits, captured gradients."""

    scores: Any
    rows: Any
    halves: Any
    remains: Any


class Wrong(AssertionError):
    """A result is too far from float64."""


class Miscompiled(Wrong):
    """It is right without XLA's pass `algsimp`, which makes plain JAX wrong, too."""


TANGENTS = ("tangent of out", "tangent of lse")


def tangents_by_library(case: Case, backend: str, options: dict[str, Any] | None = None) -> dict[str, np.ndarray]:
    """The tangents of out and lse by name; none of a mod that has a rule for reverse mode alone."""
    if "custom_vjp" in case.score.source():
        return {}
    call, in_haste = case.call, jax.default_backend() != "gpu"
    _, found = evaluation.pushed(call, backend, drawn_arrays.poisoned(call), in_haste=in_haste, options=options)
    return dict(zip(TANGENTS, map(np.asarray, found), strict=True))


def by_library(case: Case, backend: str, options: dict[str, Any] | None = None) -> Results:
    """Out, lse, all gradients, and tangents with these, compiled with these options.

    Raises:
      jflex.UnsupportedError: The implementation refuses the mods.
    """
    call, in_haste = case.call, jax.default_backend() != "gpu"
    attend = lambda x, blocks, q, k, v, c: evaluation.call(call, backend, q, k, v, {**x.score, **c}, x.mask, blocks)
    drawn, blocks = drawn_arrays.poisoned(call), drawn_arrays.block_mask(call)
    how: dict[str, Any] = {"in_haste": in_haste, "compiled": "emulated" not in backend, "options": options}
    with evaluation.emulation(backend):
        results = evaluation.differentiated(call, drawn, attend, blocks, **how)
    results = results._replace(captures={**results.captures, **tangents_by_library(case, backend, options)})
    return jax.tree.map(np.asarray, results)


def _scores(case: Case, make, x: Drawn, visible, places, noise, query, key, floats):
    mod = make(**{**x.score, **floats})
    return plain_attention.scores(query, key, mod, visible, places, case.call.scale, noise)


def _softmax(visible, dtype, s, value):
    weights, lse = plain_attention.weights(s, visible)
    return plain_attention.output(weights, value, dtype), lse


def plain(case: Case, visible, places) -> Results:
    """Plain jnp attention of the same precision, on the CPU.

    Captured arrays of 16 bits are float32 until they are read: JAX would add up their gradients in 16 bits, which is
    far worse than needed.
    """
    make, drawn = case.score.build(case.call.sizes, select=True), drawn_arrays.draw(case.call)

    def run(x, floats, visible, places):
        scores = functools.partial(_scores, case, make, x, visible, places, jnp.float32(0))
        s, pull_s = jax.vjp(scores, x.query, x.key, {name: a.astype(jnp.float32) for name, a in floats.items()})
        out, pull = jax.vjp(functools.partial(_softmax, visible, x.query.dtype), s, x.value)
        d_s, d_value = pull((x.d_out, x.d_lse))
        d_query, d_key, d_floats = pull_s(d_s)
        return Results(
            *out, d_query, d_key, d_value, {name: a.astype(floats[name].dtype) for name, a in d_floats.items()}
        )

    with jax.default_device(jax.devices("cpu")[0]), compiled_in_haste(True):
        found = jax.jit(run, compiler_options=EXACTLY)(drawn, drawn.floats(), visible, places)
        # Their precision is that of the definition: the roundings of plain attention are made for cotangents.
        tangents = tangents_by_library(case, "reference", EXACTLY)
        return jax.tree.map(np.asarray, found._replace(captures={**found.captures, **tangents}))


def exact(case: Case, visible, places) -> Callable[[float], Results]:
    """Returns a function to the results in float64, with what is rounded on the way disturbed by so many roundings."""
    n, half = case.call.sizes, tolerance.half_rounding(case.call.dtype)
    scale = n.D**-0.5 if case.call.scale is None else case.call.scale
    of_mod = 4 * EPS
    if jax.default_backend() == "gpu" and case.call.dtype != "float32":  # where the hardware's tanh may be used
        of_mod += 2.0**-11 * any(word in case.score.source() for word in ("tanh", "sigmoid", "silu", "gelu", "bent"))

    def run(x, floats, visible, places, noise):
        rounded = lambda value, step: value * (1 + noise.halves[step])
        make = case.score.build(n, wide=True, select=True, rounded=rounded)
        masses = plain_attention.scores(jnp.abs(x.query), jnp.abs(x.key), None, True, (), 1.0)
        rough = EPS * scale * masses.max(-1, keepdims=True)
        scores = functools.partial(_scores, case, make, x, visible, places, noise.scores * rough)
        s, pull_s = jax.vjp(scores, x.query, x.key, floats)
        s = s + noise.scores * of_mod * jnp.maximum(jnp.abs(jnp.where(visible, s, 0)), 1)
        (out, lse), pull = jax.vjp(functools.partial(_softmax, visible, s.dtype), s, x.value)
        d_s, _ = pull((x.d_out, x.d_lse))
        # A fused backward pass starts from the lse in float32 and from the output in its dtype.
        finite = jnp.where(jnp.isfinite(lse), lse, 0.0)[..., None]
        weights = jnp.where(visible, jnp.exp(s - finite), 0.0)
        by_output = half * jnp.sqrt(((out * x.d_out) ** 2).sum(-1)).swapaxes(1, 2)[..., None]
        factor = 1 + noise.rows * EPS * jnp.abs(finite)
        _, d_value = pull((x.d_out * factor.swapaxes(1, 2), x.d_lse))
        d_query, d_key, d_floats = pull_s(jnp.where(visible, d_s * factor + noise.rows * weights * by_output, 0.0))
        # Where the derivative of a mod cancels, as that of ``sum(softmax(x))``, roundings remain.
        remain = (of_half if case.score.uses_half else EPS) * jnp.sqrt(jnp.sum(jnp.where(visible, d_s, 0) ** 2))
        d_floats = {name: a + remain * noise.remains for name, a in d_floats.items()}
        if "custom_vjp" not in case.score.source():
            along = jax.tree.map(wide, drawn_arrays.drawn_tangents((*drawn[:3], drawn.floats())))
            _, moved = jax.jvp(scores, (x.query, x.key, floats), (along[0], along[1], along[3]))
            d_floats |= _pushed(visible, s, moved, (x.value, along[2]), (EPS, half), noise)
        return Results(out, lse, d_query, d_key, d_value, d_floats)

    wide = lambda a: a.astype(np.float64) if jnp.issubdtype(a.dtype, jnp.floating) else a
    drawn, rng = drawn_arrays.draw(case.call), np.random.default_rng(0)
    x, floats = jax.tree.map(wide, (drawn, drawn.floats()))
    compiled = jax.jit(run, compiler_options=EXACTLY)
    of_half = float(jnp.finfo(case.score.half).eps)

    def at(level: float) -> Results:
        signs = lambda *shape: level * rng.choice([-1.0, 1.0], shape)
        by_step = of_half * signs(len(case.score.steps))
        noise = Noise(signs(*visible.shape), signs(*visible.shape[:3], 1), by_step, level)
        with jax.enable_x64(True), compiled_in_haste(True), jax.default_device(jax.devices("cpu")[0]):
            return jax.tree.map(np.asarray, compiled(x, floats, visible, places, noise))

    return at


def _pushed(visible, s, d_s, values, roundings, noise) -> dict[str, Any]:
    """Tangents of out and lse; a kernel starts from a rounded lse and output, and rounds ``P dS``."""
    softmax = functools.partial(_softmax, visible, s.dtype)
    (out, lse), (d_out, d_lse) = jax.jvp(softmax, (s, values[0]), (d_s, values[1]))
    finite = jnp.where(jnp.isfinite(lse), lse, 0.0)[..., None]
    terms = jnp.abs(jnp.where(visible, jnp.exp(s - finite) * d_s, 0.0))
    (of_lse, of_half), around = roundings, plain_attention.output(terms, jnp.abs(values[0]), s.dtype)
    of_lse = of_lse * jnp.abs(finite)
    by_lse = jnp.swapaxes(noise.rows * (of_lse + of_half), 1, 2) * around
    by_out = jnp.swapaxes(noise.rows * (of_half * d_lse[..., None]), 1, 2) * out
    d_lse = d_lse + (noise.rows * of_lse * terms.sum(-1, keepdims=True))[..., 0]
    return dict(zip(TANGENTS, (d_out + by_lse + by_out, d_lse), strict=True))


# --- the comparison


def compare(found: Results, by_plain: Results, right: Results, moves: Results) -> list[str]:
    """What is wrong, a line for each result that is; `moves` is by how much roundings may move each."""
    messages = []
    pick = lambda results, name: getattr(results, name) if hasattr(results, name) else results.captures[name]
    for name in ("out", "lse", "query", "key", "value", *right.captures):
        true, got = pick(right, name), pick(found, name)
        rounding = tolerance.one_rounding(true, got.dtype) + pick(moves, name)
        try:
            tolerance.check(name, got, pick(by_plain, name), true, rounding)
        except AssertionError as error:
            messages.append(str(error))
    return messages


class Expected(NamedTuple):
    """All that the results of a call are compared with."""

    by_plain: Results
    right: Results
    disturbed: Callable[[float], Results]

    def moves(self, roundings: float, samples: int) -> Results:
        """By how much so many roundings move each result, at most."""
        difference = lambda a, b: np.abs(np.where(np.isfinite(b), a, 0) - np.where(np.isfinite(b), b, 0))
        found = [jax.tree.map(difference, self.disturbed(roundings), self.right) for _ in range(samples)]
        return jax.tree.map(lambda *xs: np.max(xs, axis=0), *found)


@functools.lru_cache(maxsize=8)
def expected(case: Case) -> Expected:
    """What a call must return."""
    visible, places = drawn_arrays.visible_places(case.call)
    disturbed = exact(case, visible, places)
    return Expected(plain(case, visible, places), disturbed(0.0), disturbed)


def judge(case: Case, backend: str) -> None:
    """Fails unless a call is right.

    Raises:
      Wrong: A result is not near enough to float64.
      Miscompiled: Likewise, but it is without a pass of XLA.
      jflex.UnsupportedError: The implementation refuses the mods.
    """
    found, (by_plain, right, _) = by_library(case, backend), expected(case)
    messages = compare(found, by_plain, right, expected(case).moves(2.0, 2))
    if messages:  # perhaps a kink of the mod stands where a rounding decides
        messages = compare(found, by_plain, right, expected(case).moves(8.0, 4))
    if messages:
        # Jit makes a plain sum of the derivative of ``jnp.cumsum(x)[1]``: jaxlib 0.10.2 on CPUs, 0.11.2 on an H200.
        again = by_library(case, backend, options=WITHOUT_ALGSIMP)
        if not compare(again, by_plain, right, expected(case).moves(8.0, 4)):
            raise Miscompiled("\n".join(messages))
    if messages:
        raise Wrong("\n".join(messages))

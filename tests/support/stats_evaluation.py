"""Runs a case with `return_stats`: by a backend, by plain jnp attention, by the oracle, with the same cotangents."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jflex import AttentionStats
from tests.cases.table import Case
from tests.support import evaluation, oracle, tolerance
from tests.support.hopper_emulator import emulated

ALL = ("lse", "max", "entropy")


class Found(NamedTuple):
    """Of one evaluation: the output BTNH, the statistics, and all gradients."""

    out: Any
    stats: AttentionStats
    gradients: evaluation.Results


@functools.cache
def cotangents(case: Case, names: tuple[str, ...]) -> AttentionStats:
    """Those of the statistics; that of the max must not matter."""
    rng, shape = np.random.default_rng(zlib.crc32(f"stats of {case.name}".encode())), evaluation.draw(case).d_lse.shape
    drawn = {name: rng.normal(size=shape).astype(np.float32) for name in ALL}
    return AttentionStats(**{name: drawn[name] for name in names})


@functools.cache
def found_by(case: Case, backend: str, names: tuple[str, ...] = ALL) -> Found:
    """Output, statistics and gradients by a backend."""
    turn = (lambda x: x) if case.layout == "BTNH" else lambda x: x.swapaxes(1, 2)

    def attend(x, blocks, q, k, v, floats):
        captures, returned = {**x.score, **floats}, {"return_stats": names}
        out, stats = evaluation.call_for(case, backend, (q, k, v), captures, x.mask, blocks, returned)
        return turn(out), stats

    drawn, is_emulated = evaluation.poisoned(case), "emulated" in backend
    with emulated() if is_emulated else contextlib.nullcontext():
        return _differentiated(case, drawn, attend, evaluation.block_mask(case), names, compiled=not is_emulated)


def _differentiated(case: Case, drawn, attend, more, names: tuple[str, ...], *, compiled: bool = True) -> Found:
    x, d_stats = jax.tree.map(jnp.asarray, (drawn, cotangents(case, names)))

    def run(x, d_stats, more, floats):
        results, pull = jax.vjp(functools.partial(attend, x, more), x.query, x.key, x.value, floats)
        return *results, pull((x.d_out, d_stats))

    floats = {name: x.score[name] for name in evaluation.draw(case).floats()}
    in_haste = evaluation.compiled_in_haste(jax.default_backend() != "gpu")
    with jax.default_matmul_precision(evaluation.precision(case)), in_haste:
        out, stats, gradients = (jax.jit(run) if compiled else run)(x, d_stats, more, floats)
    return Found(out, stats, evaluation.Results(out, stats.lse, *gradients))


@functools.cache
def plain(case: Case, names: tuple[str, ...] = ALL) -> Found:
    """By plain jnp attention of the same precision, on the CPU."""
    (visible, places), factors = evaluation._where_visible(case), evaluation.exact(case).found.factors

    def attend(x, more, q, k, v, floats):
        captures = {**x.score, **floats}
        out, lse = evaluation._plain(case, q, k, v, captures, *more)
        p, _ = evaluation._plain_weights(case, q, k, captures, *more[:2])
        s, _ = evaluation._plain_weights(dataclasses.replace(case, normalize="none"), q, k, captures, *more[:2])
        if case.sinks:
            safe = jnp.where(lse == -jnp.inf, jnp.inf, lse)
            p = jnp.concatenate([p, jnp.exp(captures["sinks"][None, :, None] - safe)[..., None]], axis=-1)
        row_max = jnp.max(jnp.where(more[0], s, -jnp.inf), axis=-1, initial=-jnp.inf)
        found = {
            "lse": lse,
            "max": jax.lax.stop_gradient(row_max),
            "entropy": -jnp.sum(p * jnp.log(jnp.where(p > 0, p, 1.0)), -1),
        }
        return out, AttentionStats(**{name: found[name] for name in names})

    with jax.default_device(jax.devices("cpu")[0]):
        return _differentiated(case, evaluation.draw(case), attend, (visible, places, np.float32(factors)), names)


@functools.cache
def exact(case: Case, names: tuple[str, ...] = ALL) -> tuple[AttentionStats, evaluation.Exact]:
    """By the oracle, in float64."""
    x, found = evaluation.draw(case), evaluation.exact(case).found
    wide = lambda a: a.astype(np.float64)
    captures = {name: wide(a) if name in x.floats() else a for name, a in x.score.items()}
    score, sinks = None if case.score is None else case.score.exact, captures.get("sinks")
    scale = case.sizes.D**-0.5 if case.scale is None else case.scale
    given = cotangents(case, names)
    d_lse, d_entropy = (None if d is None else wide(d) for d in (given.lse, given.entropy))
    grads = oracle.gradients(
        *map(wide, x[:3]), scale, score, found, captures, wide(x.d_out), np.zeros(found.lse.shape) if d_lse is None
        else d_lse, sinks, d_entropy,
    )  # fmt: skip
    right = {"lse": found.lse, "max": oracle.row_max(found, score, captures), "entropy": oracle.entropy(found, sinks)}
    results = evaluation.Results(found.out, found.lse, *grads[:4])
    return AttentionStats(**right), evaluation.Exact(results, grads.masses, grads.output_masses, found)


def check(case: Case, backend: str, names: tuple[str, ...] = ALL) -> None:
    """Fails unless the statistics and all gradients are right."""
    found, by_plain, (right, by_oracle) = found_by(case, backend, names), plain(case, names), exact(case, names)
    moved = tolerance.score_rounding(evaluation.draw(case), by_oracle.found, case)
    finite = lambda x: np.where(np.isfinite(x), np.abs(x), 0)
    rounding = finite(moved) + 2 * tolerance.one_rounding(right.max, np.float32)
    more = {"lse": right.lse, "max": right.max, "entropy": right.entropy}
    for name in ALL:
        got = getattr(found.stats, name)
        assert (got is not None) == (name in names)
        if got is not None:
            own = rounding + 2 * tolerance.one_rounding(more[name], np.float32)
            tolerance.check(name, got, getattr(by_plain.stats, name), more[name], own)
    gradients = ("query", "key", "value", *evaluation.draw(case).floats())
    evaluation.compare_gradients(case, found.gradients, by_plain.gradients, by_oracle, gradients)

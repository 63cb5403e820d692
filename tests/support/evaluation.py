"""Runs a case: by a backend, by plain jnp attention, by the oracle. Results are kept, for the tests that share them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jflex
from jflex import AttentionStats
from pallas_kernels.triton.compiler.launch.installed import launcher
from tests.cases.table import CASES, Case
from tests.support import dropout_bits, oracle, plain_attention, tolerance
from tests.support.drawn_arrays import Drawn, block_mask, draw, drawn_tangents, poisoned, visible, visible_places
from tests.support.haste import compiled_in_haste
from tests.support.hopper_emulator import emulated

# Of the parameters of tests: a backend as `implementation=` knows it, but for the interpreted one.
NO_TRITON = launcher() if isinstance(launcher(), str) else ""
OFFICIAL_TRITON = pytest.param(
    "official_triton", marks=[pytest.mark.gpu, pytest.mark.skipif(bool(NO_TRITON), reason=NO_TRITON)]
)
BACKENDS = ["xla", "triton-interpret", pytest.param("triton", marks=pytest.mark.gpu), OFFICIAL_TRITON]
STATS = ("lse", "max", "entropy")
FIRST = ("softcap", "slopes", "sinks")


def runs(cases: Sequence[Case]) -> list[Any]:
    """Parameters ``backend, case``: `FIRST` in the default tier; a case of the full tier on one backend, in turn."""
    rows = []
    for case in cases:
        others = BACKENDS[CASES.index(case) % 2], *BACKENDS[2:]
        for backend in others if case.tier == "full" else BACKENDS:
            name, marks = (backend, []) if isinstance(backend, str) else (*backend.values, list(backend.marks))
            marks = marks if case.name in FIRST else [*marks, pytest.mark.full]
            rows.append(pytest.param(name, case, id=f"{name}-{case}", marks=marks))
    return rows


class Results(NamedTuple):
    """Of one evaluation; gradients are None where only the forward pass ran, statistics where none are requested."""

    out: Any
    lse: Any
    query: Any = None
    key: Any = None
    value: Any = None
    captures: Any = None
    stats: AttentionStats | None = None


class Exact(NamedTuple):
    """What the oracle says."""

    results: Results
    masses: dict[str, np.ndarray]
    output_masses: dict[str, np.ndarray]
    found: oracle.Forward


@functools.cache
def cotangents(case: Case, stats: tuple[str, ...]) -> AttentionStats:
    """Those of the statistics; that of the max must not matter."""
    rng, shape = np.random.default_rng(zlib.crc32(f"stats of {case.name}".encode())), draw(case).d_lse.shape
    drawn = {name: rng.normal(size=shape).astype(np.float32) for name in STATS}
    return AttentionStats(**{name: drawn[name] for name in stats})


def _with_cotangents(case: Case, drawn: Drawn, stats: tuple[str, ...]) -> Drawn:
    return drawn._replace(d_lse=cotangents(case, stats)) if stats else drawn


# --- by a backend


def call(
    case: Case, backend: str, query, key, value, score_captures, mask_captures, blocks, function=jflex.flex_attention
) -> tuple[Any, Any]:
    """Calls `flex_attention`, or another function, with arrays BTNH; returns the output BTNH and the lse."""
    turn = (lambda x: x) if case.layout == "BTNH" else lambda x: x.swapaxes(1, 2)
    returned = {"return_lse": case.normalize == "softmax"}
    result = call_for(case, backend, (query, key, value), score_captures, mask_captures, blocks, returned, function)
    shape = case.sizes.B, case.sizes.Hq, case.sizes.T
    out, lse = result if case.normalize == "softmax" else (result, jnp.zeros(shape, jnp.float32))
    return turn(out), lse


def call_for(
    case: Case, backend: str, arrays, score_captures, mask_captures, blocks, returned: dict[str, Any],
    function=jflex.flex_attention,
) -> Any:  # fmt: skip
    """What `flex_attention` returns of arrays BTNH, with the arguments `returned` that say what that is."""
    turn = (lambda x: x) if case.layout == "BTNH" else lambda x: x.swapaxes(1, 2)
    score_mod = None if case.score is None else case.score.jax(score_captures)
    mask_mod = None if case.mask is None or blocks is not None else case.mask.jax(mask_captures)
    implementation, _, manner = backend.partition("-")
    return function(
        *map(turn, arrays),
        score_mod,
        blocks,
        mask_mod=mask_mod,
        kv_lengths=None if case.kv_lengths is None else jnp.asarray(case.kv_lengths, jnp.int32),
        sinks=score_captures.get("sinks"),
        scale=case.scale,
        layout=case.layout,
        normalize=case.normalize,
        dropout_rate=case.dropout_rate,
        dropout_key=_dropout_key(case),
        implementation=implementation,
        config=config_of(case, manner),
        **returned,
    )


def config_of(case: Case, manner: str) -> jflex.Config:
    """The configuration of a backend that runs in some manner, as that of ``triton-interpret``."""
    repairs = case.name.startswith(("causal", "seed"))  # they take as long as the kernels; test_containment has more
    config = {
        "interpret": jflex.Config(interpret=True, contain_nan=repairs),
        "emulated": jflex.Config(interpret=True, contain_nan=repairs),
        "no_repair": jflex.Config(contain_nan=False),
        "one_pass": one_pass(case),
        "three_groups": jflex.Config(forward=jflex.Tiles(192, 128, num_warps=12)),
        "four_groups": jflex.Config(forward=jflex.Tiles(256, 64, num_warps=16)),
        "emulated_three_groups": jflex.Config(interpret=True, forward=jflex.Tiles(192, 128, num_warps=12)),
        "emulated_four_groups": jflex.Config(interpret=True, forward=jflex.Tiles(256, 64, num_warps=16)),
        "emulated_one_pass": dataclasses.replace(one_pass(case), interpret=True, contain_nan=False),
    }.get(manner, jflex.Config())
    return config if case.tiles is None else dataclasses.replace(config, **dict.fromkeys(_PASSES, case.tiles))


def emulation(backend: str) -> contextlib.AbstractContextManager[None]:
    """The emulator of the Hopper kernels, for a backend that runs in it."""
    return emulated() if "emulated" in backend else contextlib.nullcontext()


_PASSES = ("forward", "dkv", "dq")


def one_pass(case: Case) -> jflex.Config:
    """Tiles with which the Hopper kernels compute dK, dV and dQ in one pass, however short the sequences."""
    block = case.block if isinstance(case.block, tuple) else (case.block or 128,) * 2
    if any(size % 128 for size in block):
        return jflex.Config(dkv=jflex.Tiles(64, 64, num_warps=4))
    widest = max(case.sizes.D, case.sizes.Dv)
    return jflex.Config(dkv=jflex.Tiles(128 if widest <= 64 else 64, 128, num_warps=8))


def _dropout_key(case: Case) -> jax.Array | None:
    key = jax.random.key(dropout_bits.KEY[1])
    return None if not case.dropout_rate else key[None, None] if case.shared_dropout else key


@functools.cache
def everything(case: Case, backend: str, stats: tuple[str, ...] = ()) -> Results:
    """Out, lse or statistics, and all gradients by a backend."""
    turn = (lambda x: x) if case.layout == "BTNH" else lambda x: x.swapaxes(1, 2)

    def attend(x, blocks, q, k, v, floats):
        captures = {**x.score, **floats}
        if not stats:
            return call(case, backend, q, k, v, captures, x.mask, blocks)
        out, rows = call_for(case, backend, (q, k, v), captures, x.mask, blocks, {"return_stats": stats})
        return turn(out), rows

    drawn = _with_cotangents(case, poisoned(case), stats)
    # `xla` as users run it in one case; it takes twice as long to compile.
    optimized = jax.default_backend() == "gpu" or (backend == "xla" and case.name == "causal")
    with emulation(backend):
        return differentiated(
            case, drawn, attend, block_mask(case), in_haste=not optimized, compiled="emulated" not in backend
        )


def everything_by(case: Case, attend: Any, *, compiled: bool = True) -> Results:
    """Out, lse and all gradients by ``attend(drawn, blocks, query, key, value, captures) -> (out, lse)``, BTNH."""
    return differentiated(case, poisoned(case), attend, block_mask(case), in_haste=True, compiled=compiled)


def differentiated(
    case: Case, drawn: Drawn, attend, more, *, in_haste: bool, compiled: bool = True, options: dict | None = None
) -> Results:
    """Runs ``attend(drawn, more, query, key, value, captures) -> (out, lse or statistics)``, and its derivative."""
    x, floats = jax.tree.map(jnp.asarray, (drawn, draw(case).floats()))

    def run(x, more, floats):
        out, pull = jax.vjp(functools.partial(attend, x, more), x.query, x.key, x.value, floats)
        return *out, pull((x.d_out, x.d_lse))

    run = jax.jit(run, compiler_options=options) if compiled else run
    with jax.default_matmul_precision(precision(case)), compiled_in_haste(in_haste):
        out, rows, gradients = run(x, more, floats)
    has_stats = isinstance(rows, AttentionStats)
    return Results(out, rows.lse if has_stats else rows, *gradients, stats=rows if has_stats else None)


def pushed(case: Case, backend: str, drawn: Drawn, *, in_haste: bool = True, options: dict | None = None) -> Any:
    """Out and lse of a backend, and their tangents along random tangents of all floating-point arrays."""
    (run, *arguments), is_emulated = tangent_program(case, backend, drawn), "emulated" in backend
    run = run if is_emulated else jax.jit(run, compiler_options=options)
    with jax.default_matmul_precision("highest"), compiled_in_haste(in_haste), emulation(backend):
        return run(*arguments)


def tangent_program(case: Case, backend: str, drawn: Drawn) -> tuple[Any, ...]:
    """Out and lse with their tangents, and the arguments."""

    def flex_attention(*args, config, **how):
        return jflex.flex_attention(*args, config=dataclasses.replace(config, forward_mode=True), **how)

    def attend(x, blocks, q, k, v, floats):
        return call(case, backend, q, k, v, {**x.score, **floats}, x.mask, blocks, flex_attention)

    x = jax.tree.map(jnp.asarray, drawn)
    arrays = (*x[:3], x.floats())
    run = lambda x, blocks, xs, ts: jax.jvp(functools.partial(attend, x, blocks), xs, ts)
    return run, x, block_mask(case), arrays, drawn_tangents(arrays)


def program_of(case: Case, backend: str) -> tuple[Any, ...]:
    """Forward and backward pass, with all gradients, and the shapes of its arguments."""
    x = draw(case)

    def run(x, blocks, floats):
        attend = lambda q, k, v, c: call(case, backend, q, k, v, {**x.score, **c}, x.mask, blocks)
        out, pull = jax.vjp(attend, x.query, x.key, x.value, floats)
        return out, pull((x.d_out, x.d_lse))

    shapes = lambda tree: jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tree)
    with jax.default_matmul_precision(case.precision):
        return run, shapes(x), shapes(block_mask(case)), shapes(x.floats())


def precision(case: Case) -> str | None:
    """Of products of float32: on a GPU JAX's default is TF32, which no CPU has; see `test_tf32`."""
    return case.precision or ("highest" if jax.default_backend() == "gpu" else None)


# --- by plain attention and by the oracle


@functools.cache
def plain(case: Case, stats: tuple[str, ...] = ()) -> Results:
    """Out, lse or statistics, and all gradients by plain jnp attention, of the same precision.

    On the CPU, always: on a GPU XLA keeps more digits than the dtypes say, where it fuses.
    """
    attend = lambda x, more, q, k, v, floats: plain_call(case, q, k, v, {**x.score, **floats}, *more, stats=stats)
    with jax.default_device(jax.devices("cpu")[0]):
        drawn = _with_cotangents(case, draw(case), stats)
        return differentiated(case, drawn, attend, (*visible_places(case), _factors(case)), in_haste=True)


def plain_call(case: Case, query, key, value, captures, shown, places, factors=None, stats: Sequence[str] = ()) -> Any:
    """Output, and lse or statistics, of plain attention."""
    mod, sinks = None if case.score is None else case.score.jax(captures), captures.get("sinks")
    s = plain_attention.scores(query, key, mod, shown, places, case.scale)
    weights, lse = plain_attention.weights(s, shown, case.normalize, sinks)
    out = plain_attention.output(weights, value, query.dtype, factors)
    if not stats:
        return out, lse
    entropy = plain_attention.entropy(weights, lse, sinks)
    rows = dict(zip(STATS, (lse, plain_attention.row_max(s, shown), entropy), strict=True))
    return out, AttentionStats(**{name: rows[name] for name in stats})


@functools.cache
def plain_weights(case: Case) -> np.ndarray:
    """The softmax weights [B, Hq, T, S] by plain jnp attention, of the same precision, on the CPU."""
    shown, places = visible_places(case)

    def run(x):
        mod = None if case.score is None else case.score.jax(x.score)
        s = plain_attention.scores(x.query, x.key, mod, shown, places, case.scale)
        return plain_attention.weights(s, shown, case.normalize, x.score.get("sinks"))[0]

    with jax.default_device(jax.devices("cpu")[0]), compiled_in_haste(True):
        return np.asarray(jax.jit(run)(jax.tree.map(jnp.asarray, draw(case))))


@functools.cache
def exact(case: Case, stats: tuple[str, ...] = ()) -> Exact:
    """The oracle's results."""
    x, wide = draw(case), lambda a: a.astype(np.float64)
    q, k, v, d_out = map(wide, x[:4])
    captures = {name: wide(a) if name in x.floats() else a for name, a in x.score.items()}
    score = None if case.score is None else case.score.exact
    scale, sinks = case.sizes.D**-0.5 if case.scale is None else case.scale, captures.get("sinks")
    mask, factors = functools.partial(visible, case), factors_of(case)
    found = oracle.forward(q, k, v, scale, score, mask, captures, sinks, factors, case.normalize, case.places)
    cotangent = cotangents(case, stats) if stats else AttentionStats(lse=x.d_lse)
    d_lse, d_entropy = (None if d is None else wide(d) for d in (cotangent.lse, cotangent.entropy))
    d_lse = np.zeros(found.lse.shape) if d_lse is None else d_lse
    grads = oracle.gradients(q, k, v, scale, score, found, captures, d_out, d_lse, sinks, d_entropy)
    rows = found.lse, oracle.row_max(found, score, captures), oracle.entropy(found, sinks)
    return Exact(
        Results(found.out, found.lse, *grads[:4], AttentionStats(*rows)), grads.masses, grads.output_masses, found
    )


def factors_of(case: Case) -> Any:
    """The factors of dropout, for the oracle; None without dropout."""
    if not case.dropout_rate:
        return None
    own = 0 if case.shared_dropout else 1
    return lambda b, h, q, k: dropout_bits.factors(case.dropout_rate, dropout_bits.KEY, own * b, own * h, q, k)


def _factors(case: Case) -> np.ndarray | None:
    return np.float32(factors_of(case)(*case.places)) if case.dropout_rate else None


# --- the comparison


def check_forward(case: Case, backend: str) -> None:
    """Fails unless out and lse are right."""
    compare_forward(case, everything(case, backend), plain(case), exact(case))


def compare_forward(case: Case, found: Results, by_plain: Results, by_oracle: Exact) -> None:
    """Fails unless out and lse are as near to those of the oracle as they must be."""
    right = by_oracle.results
    out_rounding = tolerance.one_rounding(right.out, np.asarray(found.out).dtype)
    lse_rounding = tolerance.one_rounding(right.lse, np.float32)
    if jax.default_backend() == "gpu" or case.dtype == "float32":
        of_out, of_lse = tolerance.forward_rounding(draw(case), by_oracle.found, case)
        out_rounding, lse_rounding = out_rounding + of_out, lse_rounding + of_lse
    tolerance.check("out", found.out, by_plain.out, right.out, out_rounding)
    tolerance.check("lse", found.lse, by_plain.lse, right.lse, lse_rounding)


def check_gradients(case: Case, backend: str, names: tuple[str, ...]) -> None:
    """Fails unless the named gradients (``query``, ``key``, ``value``, or names of captured arrays) are right."""
    compare_gradients(case, everything(case, backend), plain(case), exact(case), names)


def compare_gradients(case: Case, found: Results, by_plain: Results, by_oracle: Exact, names: tuple[str, ...]) -> None:
    """Fails unless the named gradients are as near to those of the oracle as their kind allows."""
    pick = lambda results, name: results.captures[name] if name in results.captures else getattr(results, name)
    moved = 0.0
    if case.dtype == "float32":  # as in `check_forward`: a weight moves with its score, and so does each term of a sum
        moves = tolerance.score_rounding(draw(case), by_oracle.found, case)
        moved = float(np.max(moves, initial=0, where=np.isfinite(moves)))
    for name in names:
        right, mass = pick(by_oracle.results, name), by_oracle.masses[name]
        dtype = np.asarray(pick(by_plain, name)).dtype
        # A captured array may sum thousands of terms of either sign into one number, by which nothing can be judged.
        rounding = tolerance.gradient_rounding(
            mass if name in draw(case).score else right, mass, by_oracle.results.lse, dtype
        )
        rounding = rounding + tolerance.half_rounding(case.dtype) * by_oracle.output_masses[name] + moved * mass
        tolerance.check(name, pick(found, name), pick(by_plain, name), right, rounding)


@functools.cache
def _tangents_by_definition(case: Case) -> Any:
    return pushed(case, "reference", draw(case), in_haste=False)[1]


def check_tangents(case: Case, backend: str) -> None:
    """Fails unless the tangents of out and lse along random tangents are right."""
    in_haste = backend.endswith(("interpret", "emulated"))
    (out, lse), found = pushed(case, backend, draw(case), in_haste=in_haste)
    largest = np.abs(lse, where=np.isfinite(lse), out=np.zeros(lse.shape)).max(initial=0)
    error = (1e-4 if case.dtype == "float32" else 0.02) + 4 * np.finfo(np.float32).eps * largest  # weights by the lse
    wanted = [np.asarray(x, np.float64) for x in _tangents_by_definition(case)]
    # The tangent of the softmax, ``(P * tS) V - mu O``, begins with the output in its dtype; mu is the tangent of lse.
    by_output = np.abs(np.asarray(out, np.float64) * wanted[1].swapaxes(1, 2)[..., None])
    for x, y, rounded in zip(found, wanted, (tolerance.half_rounding(case.dtype) * by_output, 0.0), strict=True):
        x = np.asarray(x, np.float64)
        assert np.isfinite(x).all()
        assert (np.abs(x - y) - rounded).max(initial=0) <= error * (1e-3 + np.abs(y).max(initial=0)), case.name
    product = lambda *xs: np.prod([np.asarray(x, np.float64) for x in xs], 0)
    x, right = draw(case), exact(case).results
    gradients = (*right[2:5], {name: right.captures[name] for name in x.floats()})
    products = jax.tree.leaves(jax.tree.map(product, gradients, drawn_tangents((*x[:3], x.floats()))))
    pairs = [product(*pair) for pair in zip(found, (x.d_out, x.d_lse), strict=True)]
    scale = sum(np.sqrt((p**2).sum()) for p in [*pairs, *products])
    assert abs(sum(p.sum() for p in pairs) - sum(p.sum() for p in products)) <= 5 * error * scale


def having_tangents(cases: Sequence[Case]) -> list[Case]:
    """The cases with tangents: eight bits have none, nor a mod with a rule for reverse mode alone."""
    return [case for case in cases if not case.qk_dtype and case.name != "own_derivative"]


def gradients_of(case: Case) -> tuple[str, ...]:
    """The names of all gradients."""
    return "query", "key", "value", *draw(case).floats()


def check_stats(case: Case, backend: str, names: tuple[str, ...] = STATS) -> None:
    """Fails unless the statistics and all gradients are right."""
    found, by_plain, by_oracle = everything(case, backend, names), plain(case, names), exact(case, names)
    right, moved = by_oracle.results.stats, tolerance.score_rounding(draw(case), by_oracle.found, case)
    rounding = np.where(np.isfinite(moved), np.abs(moved), 0) + 2 * tolerance.one_rounding(right.max, np.float32)
    for name in STATS:
        of_call, of_plain, true = (getattr(x, name) for x in (found.stats, by_plain.stats, right))
        assert (of_call is not None) == (name in names)
        if of_call is not None:
            tolerance.check(name, of_call, of_plain, true, rounding + 2 * tolerance.one_rounding(true, np.float32))
    compare_gradients(case, found, by_plain, by_oracle, gradients_of(case))


def refused(case: Case, backend: str) -> bool:
    """Checks that a backend refuses the cases that it must refuse, with the reason; False for the others."""
    reason = case.unsupported.get(backend.partition("-")[0].removeprefix("official_"))
    if reason is None:
        return False
    with pytest.raises(jflex.UnsupportedError, match=reason):
        everything(case, backend)
    return True

"""Runs a case: by a backend, by plain jnp attention, by the oracle. Results are kept, for the tests that share them."""

from __future__ import annotations

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
from pallas_kernels.triton.compiler.launch.installed import launcher
from tests.cases.table import CASES, Case
from tests.support import dropout_bits, oracle, tolerance
from tests.support.haste import compiled_in_haste
from tests.support.hopper_emulator import emulated

# Of the parameters of tests: a backend as `implementation=` knows it, but for the interpreted one.
NO_TRITON = launcher() if isinstance(launcher(), str) else ""
OFFICIAL_TRITON = pytest.param(
    "official_triton", marks=[pytest.mark.gpu, pytest.mark.skipif(bool(NO_TRITON), reason=NO_TRITON)]
)
BACKENDS = ["xla", "triton-interpret", pytest.param("triton", marks=pytest.mark.gpu), OFFICIAL_TRITON]


def runs(cases: Sequence[Case]) -> list[Any]:
    """Parameters ``backend, case``. Without a GPU, a case of the full tier runs on one backend, in turn."""
    rows = []
    for case in cases:
        others = BACKENDS[CASES.index(case) % 2], *BACKENDS[2:]
        for backend in others if case.tier == "full" else BACKENDS:
            name, marks = (backend, []) if isinstance(backend, str) else (*backend.values, list(backend.marks))
            marks = [*marks, pytest.mark.full] if case.tier == "full" else marks
            rows.append(pytest.param(name, case, id=f"{name}-{case}", marks=marks))
    return rows


class Drawn(NamedTuple):
    """The arrays of a case, in numpy; query, key, value and d_out in the layout BTNH."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    d_out: np.ndarray
    d_lse: np.ndarray
    score: dict[str, np.ndarray]
    mask: dict[str, np.ndarray]

    def floats(self) -> dict[str, np.ndarray]:
        """The captured arrays that get gradients: numbers, but for those that are called fixed."""
        wanted = lambda name, x: jnp.issubdtype(x.dtype, jnp.floating) and not name.startswith("fixed")
        return {name: x for name, x in self.score.items() if wanted(name, x)}


class Results(NamedTuple):
    """Of one evaluation; gradients are None where only the forward pass ran."""

    out: Any
    lse: Any
    query: Any = None
    key: Any = None
    value: Any = None
    captures: Any = None


class Exact(NamedTuple):
    """What the oracle says."""

    results: Results
    masses: dict[str, np.ndarray]
    output_masses: dict[str, np.ndarray]
    found: oracle.Forward


@functools.cache
def draw(case: Case) -> Drawn:
    """Draws the arrays in their own dtype."""
    n, rng = case.sizes, np.random.default_rng(zlib.crc32(case.name.encode()))
    shapes = [(n.B, n.T, n.Hq, n.D), (n.Bkv, n.S, n.Hkv, n.D), (n.Bkv, n.S, n.Hkv, n.Dv), (n.B, n.T, n.Hq, n.Dv)]
    q, k, v, d_out = (rng.normal(size=shape) for shape in shapes)
    if case.positive:
        q, k = np.abs(q) + 0.3, np.abs(k) + 0.3
    dtype = jnp.dtype(case.dtype)
    d_lse = rng.normal(size=(n.B, n.Hq, n.T)).astype(np.float32)
    captured = [
        {} if pair is None else {name: np.asarray(x) for name, x in pair.captures(rng, n).items()}
        for pair in (case.score, case.mask)
    ]
    if case.sinks:  # far below, among and far above the scores
        captured[0]["sinks"] = np.linspace(-20.0, 5.0, n.Hq, dtype=np.float32)
    qk_dtype = jnp.dtype(case.qk_dtype or dtype)
    return Drawn(q.astype(qk_dtype), k.astype(qk_dtype), v.astype(dtype), d_out.astype(dtype), d_lse, *captured)


@functools.cache
def exact(case: Case) -> Exact:
    """The oracle's results."""
    x = draw(case)
    wide = lambda a: a.astype(np.float64)
    q, k, v = wide(x.query), wide(x.key), wide(x.value)
    captures = {name: wide(a) if name in x.floats() else a for name, a in x.score.items()}
    score = None if case.score is None else case.score.exact
    scale = case.sizes.D**-0.5 if case.scale is None else case.scale
    sinks, mask = captures.get("sinks"), functools.partial(_visible, case)
    found = oracle.forward(q, k, v, scale, score, mask, captures, sinks, factors_of(case), case.normalize)
    grads = oracle.gradients(q, k, v, scale, score, found, captures, wide(x.d_out), wide(x.d_lse), sinks)
    return Exact(Results(found.out, found.lse, *grads[:4]), grads.masses, grads.output_masses, found)


def factors_of(case: Case) -> Any:
    """The factors of dropout, for the oracle; None without dropout."""
    if not case.dropout_rate:
        return None
    own = 0 if case.shared_dropout else 1
    return lambda b, h, q, k: dropout_bits.factors(case.dropout_rate, dropout_bits.KEY, own * b, own * h, q, k)


def _dropout_key(case: Case) -> jax.Array | None:
    key = jax.random.key(dropout_bits.KEY[1])
    return None if not case.dropout_rate else key[None, None] if case.shared_dropout else key


def _visible(case: Case, b, h, q, k, _) -> Any:
    return _visible_of_all(case, b, h, q, k) & (True if case.kv_lengths is None else k < np.array(case.kv_lengths)[b])


def _visible_of_all(case: Case, b, h, q, k) -> Any:
    visible = True if case.mask is None else case.mask.exact(b, h, q, k, draw(case).mask)
    if case.states is None:
        return visible
    states = np.kron(case.states, np.ones((1, 1, case.block, case.block), int))[:, :, : case.sizes.T, : case.sizes.S]
    return (states == 2) | ((states == 1) & visible)


def block_mask(case: Case) -> jflex.BlockMask | None:
    """The BlockMask of a case, or None."""
    if case.block is None:
        return None
    n, captures = case.sizes, jax.tree.map(jnp.asarray, draw(case).mask)
    if case.max_blocks is not None:
        return jax.jit(lambda captures: _made_mask(case, case.mask.jax(captures)))(captures)
    mod = None if case.mask is None else case.mask.jax(captures)
    if case.states is None:
        return _made_mask(case, mod)
    lists = []
    for kind in (1, 2):
        is_kind = case.states == kind
        lists += [is_kind.sum(-1), np.argsort(~is_kind, axis=-1, stable=True)]
    return jflex.BlockMask.from_kv_blocks(*lists, block_size=case.block, mask_mod=mod, seq_lengths=(n.T, n.S))


def _made_mask(case: Case, mod: Any) -> jflex.BlockMask:
    n = case.sizes
    by_batch, by_head = n.B if case.by_batch else None, n.Hq if case.by_head else None
    return jflex.create_block_mask(mod, by_batch, by_head, n.T, n.S, block_size=case.block, max_blocks=case.max_blocks)


def call(case: Case, backend: str, query, key, value, score_captures, mask_captures, blocks) -> tuple[Any, Any]:
    """Calls `flex_attention` with arrays BTNH; returns the output BTNH and the lse."""
    turn = (lambda x: x) if case.layout == "BTNH" else lambda x: x.swapaxes(1, 2)
    returned = {"return_lse": case.normalize == "softmax"}
    result = call_for(case, backend, (query, key, value), score_captures, mask_captures, blocks, returned)
    out, lse = result if case.normalize == "softmax" else (result, jnp.zeros(_lse_shape(case), jnp.float32))
    return turn(out), lse


def call_for(case: Case, backend: str, arrays, score_captures, mask_captures, blocks, returned: dict[str, Any]) -> Any:
    """What `flex_attention` returns of arrays BTNH, with the arguments `returned` that say what that is."""
    turn = (lambda x: x) if case.layout == "BTNH" else lambda x: x.swapaxes(1, 2)
    score_mod = None if case.score is None else case.score.jax(score_captures)
    mask_mod = None if case.mask is None or blocks is not None else case.mask.jax(mask_captures)
    implementation, _, manner = backend.partition("-")
    repairs = str(case).startswith("causal")  # they take as long as the kernels; test_containment has the others
    configs = {
        "interpret": jflex.Config(interpret=True, contain_nan=repairs),
        "emulated": jflex.Config(interpret=True, contain_nan=repairs),
        "no_repair": jflex.Config(contain_nan=False),
        "one_pass": one_pass(case),
        "emulated_one_pass": dataclasses.replace(one_pass(case), interpret=True, contain_nan=False),
    }
    return jflex.flex_attention(
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
        config=configs.get(manner),
        **returned,
    )


def _lse_shape(case: Case) -> tuple[int, int, int]:
    return case.sizes.B, case.sizes.Hq, case.sizes.T


def one_pass(case: Case) -> jflex.Config:
    """Tiles with which the Hopper kernels compute dK, dV and dQ in one pass, however short the sequences."""
    block = case.block if isinstance(case.block, tuple) else (case.block or 128,) * 2
    if any(size % 128 for size in block):
        return jflex.Config(dkv=jflex.Tiles(64, 64, num_warps=4))
    widest = max(case.sizes.D, case.sizes.Dv)
    return jflex.Config(dkv=jflex.Tiles(128 if widest <= 64 else 64, 128, num_warps=8))


@functools.cache
def everything(case: Case, backend: str) -> Results:
    """Out, lse and all gradients by a backend."""
    attend = lambda x, blocks, q, k, v, floats: call(case, backend, q, k, v, {**x.score, **floats}, x.mask, blocks)
    drawn = poisoned(case)
    # `xla` as users run it in one case; it takes twice as long to compile.
    optimised = jax.default_backend() == "gpu" or (backend == "xla" and case.name == "causal")
    if "emulated" in backend:
        with emulated():
            return _differentiated(case, drawn, attend, block_mask(case), in_haste=True, compiled=False)
    return _differentiated(case, drawn, attend, block_mask(case), in_haste=not optimised)


def everything_by(case: Case, attend: Any, *, compiled: bool = True) -> Results:
    """Out, lse and all gradients by ``attend(drawn, blocks, query, key, value, captures) -> (out, lse)``, BTNH."""
    return _differentiated(case, poisoned(case), attend, block_mask(case), in_haste=True, compiled=compiled)


def poisoned(case: Case) -> Drawn:
    """The arrays of a case, with NaN in all keys and values that no length reaches."""
    x, n = draw(case), case.sizes
    if case.kv_lengths is None:
        return x
    lengths = np.array(case.kv_lengths if n.Bkv == n.B else [max(case.kv_lengths)])
    inside = (np.arange(n.S) < lengths[:, None])[:, :, None, None]
    nan = lambda a: np.where(inside, a, np.array(np.nan, a.dtype))
    return x._replace(key=nan(x.key), value=nan(x.value))


@functools.cache
def plain(case: Case) -> Results:
    """Out, lse and all gradients by plain jnp attention, of the same precision.

    On the CPU, always: on a GPU XLA keeps more digits than the dtypes say, where it fuses.
    """
    (visible, where), factors = _where_visible(case), exact(case).found.factors
    attend = lambda x, blocks, q, k, v, floats: _plain(case, q, k, v, {**x.score, **floats}, *blocks)
    with jax.default_device(jax.devices("cpu")[0]):
        return _differentiated(case, draw(case), attend, (visible, where, np.float32(factors)), in_haste=True)


@functools.cache
def plain_weights(case: Case) -> np.ndarray:
    """The softmax weights [B, Hq, T, S] by plain jnp attention, of the same precision, on the CPU."""
    visible, where = _where_visible(case)
    run = lambda x: _plain_weights(case, x.query, x.key, x.score, visible, where)[0]
    with jax.default_device(jax.devices("cpu")[0]), compiled_in_haste(True):
        return np.asarray(jax.jit(run)(jax.tree.map(jnp.asarray, draw(case))))


def _where_visible(case: Case) -> tuple[np.ndarray, list[np.ndarray]]:
    """The dense mask, and b, h, q_idx, kv_idx of every element: of a visible one of its head where masked.

    What a mod makes of masked elements shall not disturb its derivative.
    """
    visible = exact(case).found.visible
    places = [np.broadcast_to(x, visible.shape) for x in oracle.grids(visible.shape)]
    seen = visible.reshape(*visible.shape[:2], -1).argmax(-1)[..., None, None]
    at_q, at_kv = (
        np.where(visible, places[2], seen // visible.shape[3]),
        np.where(visible, places[3], seen % visible.shape[3]),
    )
    return visible, [x.astype(np.int32) for x in (places[0], places[1], at_q, at_kv)]


def _plain(case: Case, query, key, value, captures, visible, places, factors=1.0) -> tuple[Any, Any]:
    n = case.sizes
    weights, lse = _plain_weights(case, query, key, captures, visible, places)
    v = jnp.repeat(jnp.broadcast_to(value, (n.B, *value.shape[1:])), n.Hq // n.Hkv, axis=2)
    weights = (weights * factors if case.dropout_rate else weights).astype(query.dtype)
    out = jnp.einsum("bhts,bshd->bthd", weights, v, preferred_element_type=jnp.float32)
    return out.astype(query.dtype), lse


def _plain_weights(case: Case, query, key, captures, visible, places) -> tuple[Any, Any]:
    n = case.sizes
    k = jnp.repeat(jnp.broadcast_to(key, (n.B, *key.shape[1:])), n.Hq // n.Hkv, axis=2)
    s = _rounded_back(jnp.einsum("bthd,bshd->bhts", query, k, preferred_element_type=jnp.float32), query.dtype)
    s = jnp.where(visible, s * (n.D**-0.5 if case.scale is None else case.scale), 1.0)
    if case.score is not None:
        mod = case.score.jax(captures)
        for _ in range(4):
            mod = jax.vmap(mod)
        s = mod(s, *places)
    if case.normalize == "none":
        return jnp.where(visible, s, 0.0), jnp.zeros(_lse_shape(case), jnp.float32)
    s = jnp.where(visible, s, -jnp.inf)
    sink = captures["sinks"][None, :, None, None] if case.sinks else jnp.full((), -jnp.inf)
    top = jax.lax.stop_gradient(jnp.maximum(s.max(-1, keepdims=True), sink))
    top = jnp.where(top == -jnp.inf, 0.0, top)
    weights = jnp.exp(s - top)
    total = weights.sum(-1, keepdims=True) + jnp.exp(sink - top)
    empty = total == 0
    lse = jnp.where(empty, -jnp.inf, top + jnp.log(jnp.where(empty, 1.0, total)))[..., 0]
    return weights / jnp.where(empty, 1.0, total), lse


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _rounded_back(x, dtype):
    """The same; its cotangent passes through `dtype`, as it must to enter products of that precision."""
    del dtype
    return x


_rounded_back.defvjp(lambda x, dtype: (x, None), lambda dtype, _, ct: (ct.astype(dtype).astype(jnp.float32),))


def _differentiated(case: Case, drawn: Drawn, attend, more, *, in_haste: bool, compiled: bool = True) -> Results:
    x = jax.tree.map(jnp.asarray, drawn)

    def run(x, more, floats):
        out, pull = jax.vjp(functools.partial(attend, x, more), x.query, x.key, x.value, floats)
        return Results(*out, *pull((x.d_out, x.d_lse)))

    with jax.default_matmul_precision(precision(case)), compiled_in_haste(in_haste):
        return (jax.jit(run) if compiled else run)(x, more, {name: x.score[name] for name in draw(case).floats()})


def precision(case: Case) -> str | None:
    """Of products of float32: on a GPU JAX's default is TF32, which no CPU has; test_tf32.py tests that."""
    return case.precision or ("highest" if jax.default_backend() == "gpu" else None)


def check_forward(case: Case, backend: str) -> None:
    """Fails unless out and lse are right."""
    compare_forward(case, everything(case, backend), plain(case), exact(case))


def compare_forward(case: Case, found: Results, by_plain: Results, by_oracle: Exact) -> None:
    """Fails unless out and lse are as near to those of the oracle as they must be."""
    right = by_oracle.results
    out_rounding = tolerance.one_rounding(right.out, np.asarray(found.out).dtype)
    lse_rounding = tolerance.one_rounding(right.lse, np.float32)
    if jax.default_backend() == "gpu" or case.dtype == "float32":
        moved = tolerance.score_rounding(draw(case), by_oracle.found, case)
        around = np.einsum(
            "bhts,bshd->bthd", np.abs(by_oracle.found.weights) * by_oracle.found.factors, np.abs(_values(case))
        )
        lse_rounding = lse_rounding + moved
        out_rounding = out_rounding + 2 * np.where(np.isfinite(moved), moved, 0).swapaxes(1, 2)[..., None] * around
    tolerance.check("out", found.out, by_plain.out, right.out, out_rounding)
    tolerance.check("lse", found.lse, by_plain.lse, right.lse, lse_rounding)


def _values(case: Case) -> np.ndarray:
    x, n = draw(case), case.sizes
    return np.repeat(np.broadcast_to(x.value, (n.B, *x.value.shape[1:])), n.Hq // n.Hkv, axis=2).astype(np.float64)


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


def refused(case: Case, backend: str) -> bool:
    """Checks that a backend refuses the cases that it must refuse, with the reason; False for the others."""
    reason = case.unsupported.get(backend.partition("-")[0].removeprefix("official_"))
    if reason is None:
        return False
    with pytest.raises(jflex.UnsupportedError, match=reason):
        everything(case, backend)
    return True

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

import jflex
from tests.support import gpu_compile, tolerance
from tests.support.evaluation import Results, _rounded_back, compiled_in_haste
from tests.support.random_mods.case import Case

# Without the first, XLA's CPU compiler (jaxlib 0.10.2) computes sums of products over a small axis wrongly in float32;
# without the second (0.10.2 to 0.12) it makes a plain sum of a padded cumulative sum of 3 numbers, as in the derivative
# of ``jnp.cumsum(x)[1]``; without the third it leaves out roundings to 16 bits.
_WITHOUT_ALGSIMP = {"xla_disable_hlo_passes": "algsimp"}
_EXACTLY = {"xla_cpu_experimental_ynn_fusion_type": "", **_WITHOUT_ALGSIMP, "xla_allow_excess_precision": False}
EPS = float(np.finfo(np.float32).eps)


class Drawn(NamedTuple):
    """The arrays of a call, in numpy; query, key, value and d_out in the layout BTNH."""

    query: Any
    key: Any
    value: Any
    d_out: Any
    d_lse: Any
    floats: dict[str, Any]
    rest: dict[str, Any]
    mask: dict[str, Any]


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


def draw_arrays(case: Case) -> Drawn:
    """Draws the arrays in their own dtype."""
    n, rng = case.sizes, np.random.default_rng(case.seed + (1 << 32))
    shapes = [(n.B, n.T, n.Hq, n.D), (n.Bkv, n.S, n.Hkv, n.D), (n.Bkv, n.S, n.Hkv, n.Dv), (n.B, n.T, n.Hq, n.Dv)]
    arrays = [np.asarray(rng.normal(size=shape), jnp.dtype(case.dtype)) for shape in shapes]
    d_lse = rng.normal(size=(n.B, n.Hq, n.T)).astype(np.float32)
    captures = case.score.draw(rng, n)
    is_float = lambda x: jnp.issubdtype(x.dtype, jnp.floating)
    floats = {name: x for name, x in captures.items() if is_float(x)}
    rest = {name: x for name, x in captures.items() if not is_float(x)}
    return Drawn(*arrays, d_lse, floats, rest, {} if case.mask is None else case.mask.draw(rng, n))


# --- the library


def by_library(
    case: Case, x: Drawn, implementation: str, *, interpret: bool, in_haste: bool, options: dict[str, Any] | None = None
) -> Results:
    """Out, lse and all gradients, compiled with these options.

    Raises:
      jflex.UnsupportedError: The implementation refuses the mods.
    """
    run = _everything(case, implementation, interpret=interpret)
    precision = "highest" if jax.default_backend() == "gpu" else None
    with jax.default_matmul_precision(precision), compiled_in_haste(in_haste):
        return jax.tree.map(np.asarray, jax.jit(run, compiler_options=options)(jax.tree.map(jnp.asarray, x)))


def compiled_without_gpu(case: Case, implementation: str) -> None:
    """Compiles the same program for a GPU that is not there; raises what the compilers raise when they refuse it."""
    with jax.default_matmul_precision("highest"):
        gpu_compile.memory_of(_everything(case, implementation), jax.tree.map(jnp.asarray, draw_arrays(case)))


def _everything(case: Case, implementation: str, *, interpret: bool = False) -> Callable[[Drawn], Results]:
    attend = call_of(case, jflex.flex_attention, implementation, interpret=interpret, return_lse=True)
    turn = (lambda a: a) if case.layout == "BTNH" else lambda a: a.swapaxes(1, 2)

    def attended(x, *args):
        out, lse = attend(x._replace(query=args[0], key=args[1], value=args[2], floats=args[3]))
        return turn(out), lse

    def run(x):
        out, pull = jax.vjp(functools.partial(attended, x), x.query, x.key, x.value, x.floats)
        return Results(*out, *pull((x.d_out, x.d_lse)))

    return run


def call_of(case: Case, function: Callable[..., Any], implementation: str, *, interpret: bool = False, **more: Any):
    """Returns a function of the arrays that calls `flex_attention`, or another function of the same arguments."""
    turn = (lambda a: a) if case.layout == "BTNH" else lambda a: a.swapaxes(1, 2)
    make_score = case.score.build(case.sizes)
    make_mask = None if case.mask is None else case.mask.build(case.sizes)
    n, tiles = case.sizes, None if case.tiles is None else jflex.Tiles(*case.tiles)

    def call(x: Drawn):
        mask_mod, blocks = None if make_mask is None else make_mask(**x.mask), None
        if case.block is not None:
            by = [size if wanted else None for size, wanted in zip((n.B, n.Hq), case.lists_by, strict=True)]
            blocks, mask_mod = jflex.create_block_mask(mask_mod, *by, n.T, n.S, block_size=case.block), None
        return function(
            turn(x.query), turn(x.key), turn(x.value), make_score(**x.floats, **x.rest), blocks, mask_mod=mask_mod,
            kv_lengths=None if case.kv_lengths is None else jnp.asarray(case.kv_lengths, jnp.int32), scale=case.scale,
            layout=case.layout, implementation=implementation,
            config=jflex.Config(forward=tiles, dkv=tiles, dq=tiles, interpret=interpret), **more,
        )  # fmt: skip

    return call


def refusal(case: Case, implementation: str) -> str | None:
    """Why an implementation refuses a call, without running it; None if it does not."""
    explain, accounts = call_of(case, jflex.explain, implementation), []
    jax.eval_shape(lambda x: accounts.append(explain(x)), draw_arrays(case))
    return accounts[0].reasons.get(implementation)


# --- dense attention


def visible_of(case: Case, x: Drawn) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    """What the mask shows, and where the score mod is asked: what is not visible may not even be finite."""
    n = case.sizes
    places = np.meshgrid(*(np.arange(size, dtype=np.int32) for size in (n.B, n.Hq, n.T, n.S)), indexing="ij")
    visible = np.ones(places[0].shape, bool)
    if case.mask is not None:
        with jax.default_device(jax.devices("cpu")[0]):
            mod = case.mask.build(n, select=True)(**jax.tree.map(jnp.asarray, x.mask))
        with jax.default_device(jax.devices("cpu")[0]):
            visible = np.asarray(jax.jit(_over_all(mod), compiler_options=_EXACTLY)(*places))
    if case.kv_lengths is not None:
        visible = visible & (places[3] < np.array(case.kv_lengths)[:, None, None, None])
    flat = visible.reshape(n.B, n.Hq, -1)
    seen = np.where(flat.any(-1), flat.argmax(-1), n.S if n.T > 1 else 0)[..., None, None]
    at_q, at_k = np.where(visible, places[2], seen // n.S), np.where(visible, places[3], seen % n.S)
    return visible, (places[0], places[1], at_q.astype(np.int32), at_k.astype(np.int32))


def _over_all(mod):
    for _ in range(4):
        mod = jax.vmap(mod)
    return mod


def _scores(case: Case, make, rest, visible, places, noise, query, key, floats):
    n = case.sizes
    k = jnp.repeat(jnp.broadcast_to(key, (n.B, *key.shape[1:])), n.Hq // n.Hkv, axis=2)
    wide = jnp.float64 if query.dtype == jnp.float64 else jnp.float32
    raw = jnp.einsum("bthd,bshd->bhts", query, k, preferred_element_type=wide)
    raw = raw if wide == jnp.float64 else _rounded_back(raw, query.dtype)
    raw = raw * (n.D**-0.5 if case.scale is None else case.scale)
    return _over_all(make(**floats, **rest))(jnp.where(visible, raw, 1.0) + noise, *places)


def _softmax(case: Case, visible, dtype, s, value):
    n = case.sizes
    v = jnp.repeat(jnp.broadcast_to(value, (n.B, *value.shape[1:])), n.Hq // n.Hkv, axis=2)
    s = jnp.where(visible, s, -jnp.inf)
    top = jax.lax.stop_gradient(s.max(-1, keepdims=True))
    top = jnp.where(top == -jnp.inf, 0.0, top)
    weights = jnp.exp(s - top)
    total = weights.sum(-1, keepdims=True)
    empty = total == 0
    lse = jnp.where(empty, -jnp.inf, top + jnp.log(jnp.where(empty, 1.0, total)))[..., 0]
    weights = (weights / jnp.where(empty, 1.0, total)).astype(dtype)
    out = jnp.einsum("bhts,bshd->bthd", weights, v, preferred_element_type=s.dtype)
    return out.astype(dtype), lse


def plain(case: Case, x: Drawn, visible, places) -> Results:
    """Plain jnp attention of the same precision, on the CPU.

    Captured arrays of 16 bits are float32 until they are read: JAX would add up their gradients in 16 bits, which is
    far worse than needed.
    """
    make = case.score.build(case.sizes, select=True)

    def run(x, visible, places):
        scores = functools.partial(_scores, case, make, x.rest, visible, places, jnp.float32(0))
        s, pull_s = jax.vjp(scores, x.query, x.key, {name: a.astype(jnp.float32) for name, a in x.floats.items()})
        out, pull = jax.vjp(functools.partial(_softmax, case, visible, x.query.dtype), s, x.value)
        d_s, d_value = pull((x.d_out, x.d_lse))
        d_query, d_key, floats = pull_s(d_s)
        floats = {name: a.astype(x.floats[name].dtype) for name, a in floats.items()}
        return Results(*out, d_query, d_key, d_value, floats)

    with jax.default_device(jax.devices("cpu")[0]), compiled_in_haste(True):
        return jax.tree.map(np.asarray, jax.jit(run, compiler_options=_EXACTLY)(x, visible, places))


def exact(case: Case, x: Drawn, visible, places) -> Callable[[float], Results]:
    """Returns a function to the results in float64, with what is rounded on the way disturbed by so many roundings."""
    n, half = case.sizes, tolerance.half_rounding(case.dtype)
    scale = n.D**-0.5 if case.scale is None else case.scale
    of_mod = 4 * EPS
    if jax.default_backend() == "gpu" and case.dtype != "float32":  # where the hardware's tanh may be used
        of_mod += 2.0**-11 * any(word in case.score.source() for word in ("tanh", "sigmoid", "silu", "gelu", "bent"))

    def run(x, visible, places, noise):
        rounded = lambda value, step: value * (1 + noise.halves[step])
        make = case.score.build(n, wide=True, select=True, rounded=rounded)
        masses = jnp.einsum("bthd,bshd->bhts", jnp.abs(x.query), jnp.abs(_per_head(case, x.key)))
        rough = EPS * scale * masses.max(-1, keepdims=True)
        scores = functools.partial(_scores, case, make, x.rest, visible, places, noise.scores * rough)
        s, pull_s = jax.vjp(scores, x.query, x.key, x.floats)
        s = s + noise.scores * of_mod * jnp.maximum(jnp.abs(jnp.where(visible, s, 0)), 1)
        (out, lse), pull = jax.vjp(functools.partial(_softmax, case, visible, s.dtype), s, x.value)
        d_s, d_value = pull((x.d_out, x.d_lse))
        # A fused backward pass starts from the lse in float32 and from the output in its dtype.
        finite = jnp.where(jnp.isfinite(lse), lse, 0.0)[..., None]
        weights = jnp.where(visible, jnp.exp(s - finite), 0.0)
        by_output = half * jnp.sqrt(((out * x.d_out) ** 2).sum(-1)).swapaxes(1, 2)[..., None]
        factor = 1 + noise.rows * EPS * jnp.abs(finite)
        d_query, d_key, floats = pull_s(jnp.where(visible, d_s * factor + noise.rows * weights * by_output, 0.0))
        # Where the derivative of a mod cancels, as that of ``sum(softmax(x))``, roundings remain.
        remain = (of_half if case.score.uses_half else EPS) * jnp.sqrt(jnp.sum(jnp.where(visible, d_s, 0) ** 2))
        floats = {name: a + remain * noise.remains for name, a in floats.items()}
        return Results(out, lse, d_query, d_key, d_value, floats)

    wide = lambda a: a.astype(np.float64) if jnp.issubdtype(a.dtype, jnp.floating) else a
    x, rng = jax.tree.map(wide, x), np.random.default_rng(0)
    compiled = jax.jit(run, compiler_options=_EXACTLY)
    of_half = float(jnp.finfo(case.score.half).eps)

    def at(level: float) -> Results:
        signs = lambda *shape: level * rng.choice([-1.0, 1.0], shape)
        by_step = of_half * signs(len(case.score.steps))
        noise = Noise(signs(*visible.shape), signs(*visible.shape[:3], 1), by_step, level)
        with jax.enable_x64(True), compiled_in_haste(True), jax.default_device(jax.devices("cpu")[0]):
            return jax.tree.map(np.asarray, compiled(x, visible, places, noise))

    return at


def _per_head(case: Case, x):
    n = case.sizes
    return jnp.repeat(jnp.broadcast_to(x, (n.B, *x.shape[1:])), n.Hq // n.Hkv, axis=2)


# --- the comparison


def compare(found: Results, by_plain: Results, right: Results, moves: Results) -> list[str]:
    """What is wrong, a line for each result that is.

    Args:
      found: Results of the library.
      by_plain: Those of plain attention.
      right: Those in float64.
      moves: By how much roundings may move each.
    """
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


@functools.lru_cache(maxsize=64)
def expected(case: Case) -> Expected:
    """What a call must return."""
    x = draw_arrays(case)
    visible, places = visible_of(case, x)
    disturbed = exact(case, x, visible, places)
    return Expected(plain(case, x, visible, places), disturbed(0.0), disturbed)


def judge(case: Case, implementation: str, *, interpret: bool = False, in_haste: bool = False) -> None:
    """Fails unless a call is right.

    Raises:
      Wrong: A result is not near enough to float64.
      Miscompiled: Likewise, but it is without a pass of XLA.
      jflex.UnsupportedError: The implementation refuses the mods.
    """
    run = functools.partial(by_library, case, draw_arrays(case), implementation, interpret=interpret, in_haste=in_haste)
    found = run()
    by_plain, right, _ = wanted = expected(case)
    messages = compare(found, by_plain, right, wanted.moves(2.0, 2))
    if messages:  # perhaps a kink of the mod stands where a rounding decides
        messages = compare(found, by_plain, right, wanted.moves(8.0, 4))
    if messages and jax.default_backend() == "gpu":
        # On an H200 (jaxlib 0.11.2) jit makes a plain sum of the derivative of ``jnp.cumsum(x)[1]``, as on a CPU.
        again = compare(run(options=_WITHOUT_ALGSIMP), by_plain, right, wanted.moves(8.0, 4))
        if not again:
            raise Miscompiled("\n".join(messages))
    if messages:
        raise Wrong("\n".join(messages))

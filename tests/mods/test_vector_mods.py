"""Vector mods in every form of a call: out, lse and all gradients against numpy float64; messages in test_errors."""

from __future__ import annotations

import dataclasses
import functools
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jflex
from tests.cases import vector_pairs as pairs
from tests.cases.features import BACKENDS
from tests.support import oracle, tolerance
from tests.support.dense_masks import causal
from tests.support.rows import tiers

backends = pytest.mark.parametrize("backend", BACKENDS)
assert_close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5)
ROLES = ("query", "key", "value", "output")


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """One call."""

    name: str
    query: Any = None
    key: Any = None
    value: Any = None
    output: Any = None
    B: int = 2
    T: int = 37
    S: int = 45
    Hq: int = 4
    Hkv: int = 2
    D: int = 16
    Dv: int = 24
    Bkv: int = 2
    dtype: str = "float32"
    layout: str = "BTNH"
    kv_lengths: tuple[int, ...] | None = None
    normalize: str = "softmax"

    def __str__(self) -> str:
        return self.name


EVERY = {"query": pairs.norm, "key": pairs.project, "value": pairs.by_batch, "output": pairs.gate}
CASES = [
    Case("rotated", pairs.rope, pairs.rope),
    Case("every", **EVERY),
    Case("every_bfloat16", **EVERY, dtype="bfloat16"),
    Case("every_bnth", **EVERY, layout="BNTH"),
    Case("shared_keys", pairs.rope, pairs.rope, pairs.project, Bkv=1),
    Case("shared_keys_by_batch", pairs.norm, pairs.by_batch, Bkv=1, layout="BNTH", dtype="bfloat16"),
    Case("lengths", pairs.norm, pairs.norm, pairs.project, pairs.gate, kv_lengths=(7, 41)),
    Case("lengths_shared", None, pairs.norm, None, pairs.gate, kv_lengths=(0, 41), Bkv=1),
]


@functools.cache
def drawn(case: Case):
    """Arrays BTNH in their dtype, cotangents, and the captured arrays of each role."""
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))
    shapes = [
        (case.B, case.T, case.Hq, case.D), (case.Bkv, case.S, case.Hkv, case.D), (case.Bkv, case.S, case.Hkv, case.Dv),
        (case.B, case.T, case.Hq, case.Dv),
    ]  # fmt: skip
    arrays = [rng.normal(size=shape).astype(jnp.dtype(case.dtype)) for shape in shapes]
    d_lse = rng.normal(size=(case.B, case.Hq, case.T)).astype(np.float32)
    sizes = {"query": (case.Hq, case.T, case.D), "key": (case.Hkv, case.S, case.D)}
    sizes |= {"value": (case.Hkv, case.S, case.Dv), "output": (case.Hq, case.T, case.Dv)}
    captures = {
        role: {n: x.astype(np.float32) for n, x in pair.captures(rng, case.B, *sizes[role]).items()}
        for role in ROLES
        if (pair := getattr(case, role)) is not None
    }
    return (*arrays, d_lse), captures


def mods_of(case: Case, captures) -> dict[str, Any]:
    captures = jax.tree.map(jnp.asarray, captures)
    return {f"{role}_mod": getattr(case, role).jax(captures[role]) for role in captures}


def call(case: Case, how, q, k, v, captures):
    """Out BTNH and lse of the library."""
    turn = (lambda x: x) if case.layout == "BTNH" else lambda x: x.swapaxes(1, 2)
    lengths = None if case.kv_lengths is None else jnp.array(case.kv_lengths, jnp.int32)
    out, lse = jflex.flex_attention(
        *map(turn, (q, k, v)), mask_mod=causal, kv_lengths=lengths, layout=case.layout, return_lse=True,
        **mods_of(case, captures), **how,
    )  # fmt: skip
    return turn(out), lse


def poisoned(case: Case, arrays):
    """NaN in padding, which no result may hold."""
    q, k, v, *rest = arrays
    if case.kv_lengths:
        lengths = np.array(case.kv_lengths if case.Bkv == case.B else [max(case.kv_lengths)])
        inside = (np.arange(case.S) < lengths[:, None])[:, :, None, None]
        k, v = (np.where(inside, x, np.nan) for x in (k, v))
    return *(x.astype(jnp.dtype(case.dtype)) for x in (q, k, v)), *rest


def differentiated(case: Case, attend, arrays, captures):
    q, k, v, d_out, d_lse = arrays
    (out, lse), pull = jax.vjp(attend, q, k, v, captures)
    d_lse = jnp.where(jnp.isfinite(lse), d_lse, 0)  # -inf has no gradient
    return (out, lse), pull((d_out, d_lse))


@functools.cache
def exact(case: Case):
    """Out, lse, gradients of the arrays and of the captured ones, in float64."""
    arrays, captures = drawn(case)
    q, k, v, d_out, d_lse = (x.astype(np.float64) for x in arrays)
    c = jax.tree.map(lambda x: x.astype(np.float64), captures)
    if case.Bkv < case.B:
        k, v = (np.repeat(x, case.B, 0) for x in (k, v))
    limit = np.array(case.kv_lengths or [case.S] * case.B)
    out, lse, (dq, dk, dv), dc = dense(case, q, k, v, d_out, d_lse, c, np.arange(case.B), limit)
    if case.Bkv < case.B:
        dk, dv = (x.sum(0, keepdims=True) for x in (dk, dv))
    return (out, lse), (dq, dk, dv, dc)


def dense(case: Case, q, k, v, d_out, d_lse, c, b, limit):
    """The oracle between the mods."""
    grid = lambda x: (b[:, None, None], np.arange(x.shape[2])[None, None], np.arange(x.shape[1])[None, :, None])
    before = [
        x if role not in c else getattr(case, role).exact(x, *grid(x), c[role])
        for role, x in zip(ROLES, (q, k, v), strict=False)
    ]
    scale = case.D**-0.5
    mask = lambda b, h, i, j, _: (i >= j) & (j < limit[b])
    found = oracle.forward(*before, scale, None, mask, {})
    out, lse, pulled, dc = found.out, found.lse.swapaxes(1, 2), d_out, {}
    if "output" in c:
        out = case.output.exact(found.out, lse, *grid(q), c["output"])
        pulled, more, dc["output"] = case.output.pull(found.out, lse, d_out, *grid(q), c["output"])
        d_lse = d_lse + more.swapaxes(1, 2)
    d_lse = np.where(np.isfinite(found.lse), d_lse, 0)
    grads = list(oracle.gradients(*before, scale, None, found, {}, pulled, d_lse)[:3])
    for n, (role, x) in enumerate(zip(ROLES, (q, k, v), strict=False)):
        if role in c:
            grads[n], dc[role] = getattr(case, role).pull(x, grads[n], *grid(x), c[role])
    return out, found.lse, grads, dc


@functools.cache
def plain(case: Case):
    """The reference on arrays that are modified with explicit grids: it sets the error that is allowed."""
    arrays, captures = drawn(case)

    def over(mod, x, *more):
        b, i, h = (jnp.asarray(a, jnp.int32) for a in np.indices(x.shape[:3]))
        function = lambda x, *rest: mod(x.astype(jnp.float32), *rest).astype(x.dtype)
        for _ in range(3):
            function = jax.vmap(function)
        return function(x, *more, b, h, i)

    def attend(q, k, v, captures):
        if case.Bkv < case.B:
            k, v = (jnp.broadcast_to(x, (case.B, *x.shape[1:])) for x in (k, v))
        mods = mods_of(case, captures)
        q, k, v = (
            over(mods[f"{role}_mod"], x) if role in captures else x
            for role, x in zip(ROLES, (q, k, v), strict=False)
        )  # fmt: skip
        lengths = None if case.kv_lengths is None else jnp.array(case.kv_lengths, jnp.int32)
        options = {"kv_lengths": lengths, "return_lse": True, "implementation": "reference"}
        out, lse = jflex.flex_attention(q, k, v, mask_mod=causal, **options)
        return over(mods["output_mod"], out, lse.swapaxes(1, 2)) if "output" in captures else out, lse

    return jax.jit(functools.partial(differentiated, case, attend))(arrays, captures)


def check(case: Case, found) -> None:
    names = ("query", "key", "value")
    (out, lse), (*grads, captures) = found
    (right_out, right_lse), (*right_grads, right_captures) = exact(case)
    results = {"out": (out, right_out), "lse": (lse, right_lse)}
    results |= {name: (x, y) for name, x, y in zip(names, grads, right_grads, strict=True)}
    flat = jax.tree_util.tree_leaves_with_path
    for (path, x), (_, y) in zip(flat(captures), flat(right_captures), strict=True):
        results[jax.tree_util.keystr(path)] = x, y
    if case.dtype == "float32":
        for name, (x, y) in results.items():
            size = np.abs(y[np.isfinite(y)]).max(initial=0)
            np.testing.assert_allclose(np.asarray(x, np.float64), y, rtol=2e-5, atol=2e-5 * size, err_msg=name)
        return
    by_plain = jax.tree.leaves(plain(case))
    for (name, (x, y)), allowed in zip(results.items(), by_plain, strict=True):
        # The cotangents that captured gradients are summed from are of modified arrays, in their dtype.
        rounding = tolerance.one_rounding(y, jnp.dtype(case.dtype)) if name.startswith("[") else None
        tolerance.check(name, x, allowed, y, rounding)


@tiers({"case": ["every", "lengths"], "backend": "xla"}, {"case": "rotated"}, in_turns=True, rest="full")
@backends
@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_float64(case, backend):
    arrays, captures = drawn(case)
    attend = functools.partial(call, case, BACKENDS[backend])
    run = jax.jit(functools.partial(differentiated, case, attend))
    check(case, run(poisoned(case, arrays), captures))


@tiers(rest="full")
@pytest.mark.parametrize(("backend", "dtype"), [("xla", "float32"), ("triton-interpret", "bfloat16")])
def test_packed_sequences_are_as_each_alone(backend, dtype):
    """With all gradients; indices are those of a sequence and in it, and padding is NaN."""
    ends, case = (0, 23, 23, 50), Case("packed", **EVERY, B=3, T=60, S=60, Bkv=1, dtype=dtype)
    (q, k, v, *_), captures = drawn(case)
    q, k, v = (x[0] for x in (q, k, v))

    def packed(q, k, v, captures):
        how = {"cu_seqlens_q": jnp.array(ends), "cu_seqlens_k": jnp.array(ends), "mask_mod": causal}
        return jflex.flex_attention_varlen(q, k, v, **how, **mods_of(case, captures), **BACKENDS[backend])[:50]

    def alone(q, k, v, captures):
        outs = []
        for number in (0, 2):
            at = slice(*ends[number : number + 2])
            mods = mods_of(case, captures)  # `by_batch` is the mod of values; others do not read b
            value_mod = lambda x, b, h, i, mod=mods["value_mod"], b_of=number: mod(x, b + b_of, h, i)
            own = [x[None, at] for x in (q, k, v)]
            how = {"mask_mod": causal, "implementation": "reference", **mods, "value_mod": value_mod}
            outs.append(jflex.flex_attention(*own, **how)[0])
        return jnp.concatenate(outs)

    def run(attend, *arrays):
        total = lambda *xs: (jnp.sum(jnp.sin(attend(*xs).astype(jnp.float32))), attend(*xs))
        return jax.jit(jax.grad(total, argnums=range(4), has_aux=True))(*arrays, captures)

    padded = [x.at[50:].set(jnp.nan) for x in map(jnp.asarray, (q, k, v))]
    exact = [x.at[50:].set(0) for x in map(functools.partial(jnp.asarray, dtype=jnp.float32), (q, k, v))]
    rtol = {"float32": 2e-5, "bfloat16": 2e-2}[dtype]
    for x, y in zip(*map(jax.tree.leaves, (run(packed, *padded), run(alone, *exact))), strict=True):
        x, y = (np.asarray(a, np.float64) for a in (x, y))
        np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol * np.abs(y).max())


@pytest.mark.skipif(jax.device_count() < 4, reason="shards over four devices")
@tiers(rest="full")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_captures_are_indexed_in_an_explicit_mesh(compiled):
    """By indices that are sharded, and sharded themselves; results and gradients are those without a mesh."""
    case = CASES[1]
    (q, k, v, d_out, d_lse), captures = drawn(case)
    run = functools.partial(differentiated, case, functools.partial(call, case, BACKENDS["xla"]))
    right = run((q, k, v, d_out, d_lse), captures)
    run = jax.jit(run) if compiled else run
    with jax.set_mesh(jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)):
        arrays = [jax.device_put(x, P("data", None, "model")) for x in (q, k, v, d_out)]
        placed = jax.tree.map(lambda x: jax.device_put(x, P("model" if x.shape[0] % 2 == 0 else None)), captures)
        got = run((*arrays, jax.device_put(d_lse, P("data", "model"))), placed)
    jax.tree.map(lambda x, y: assert_close(np.asarray(x), np.asarray(y)), got, right)


def test_rows_without_keys_come_as_zeros_and_minus_infinity():
    q = k = v = jnp.ones((1, 3, 1, 4))
    shown = lambda out, lse, b, h, q_idx: out + jnp.where(jnp.isneginf(lse), 7.0, 0.0)
    out, lse = jflex.flex_attention(
        q, k, v, mask_mod=lambda b, h, i, j: i > j, output_mod=shown, return_lse=True, implementation="xla"
    )
    np.testing.assert_array_equal(out[0, :, 0, 0], [7, 1, 1])
    np.testing.assert_array_equal(np.isneginf(lse[0, 0]), [True, False, False])


@pytest.mark.full
def test_the_lse_is_the_unmodified_one_and_there_may_be_none():
    case = CASES[1]
    (q, k, v, *_), captures = drawn(case)
    lse = call(case, BACKENDS["xla"], q, k, v, captures)[1]
    without = {role: x for role, x in captures.items() if role != "output"}
    np.testing.assert_array_equal(lse, call(case, BACKENDS["xla"], q, k, v, without)[1])
    got = []
    mod = lambda out, lse, b, h, i: got.append(lse) or out * 2.0
    score = jflex.scores.sigmoid(0.0)
    options = {"normalize": "none", "implementation": "xla"}
    doubled = jflex.flex_attention(q, k, v, score, output_mod=mod, **options)
    assert_close(doubled, 2 * jflex.flex_attention(q, k, v, score, **options))
    assert got
    assert all(lse is None for lse in got)


@pytest.mark.parametrize("shapes", [(0, 5), (5, 0), (0, 0)])
def test_nothing_to_modify(shapes):
    T, S = shapes
    q, k = jnp.ones((2, T, 2, 4)), jnp.ones((2, S, 2, 4))
    mod = lambda x, b, h, i: x * 2
    out = jflex.flex_attention(q, k, k, query_mod=mod, key_mod=mod, output_mod=lambda x, lse, b, h, i: x + 1.0)
    np.testing.assert_array_equal(out, np.ones((2, T, 2, 4)))


@pytest.mark.full
def test_weights_and_explain_take_them():
    (q, k, v, *_), captures = drawn(CASES[1])
    mods = mods_of(CASES[1], captures)
    only = {name: mods[name] for name in ("query_mod", "key_mod")}
    weights = jflex.attention_weights(q, k, mask_mod=causal, **only)
    out = jflex.flex_attention(q, k, v, mask_mod=causal, **only, implementation="xla")
    assert_close(jnp.einsum("bhts,bshd->bthd", weights, jnp.repeat(v, 2, axis=2)), out)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v)]
    assert jflex.explain(*shapes, **mods, implementation="xla").backend == "xla"
    with pytest.raises(ValueError, match="`query_mod` must return one vector"):
        jflex.explain(*shapes, query_mod=lambda x, b, h, i: x[1:])

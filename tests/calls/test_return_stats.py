"""`return_stats`: the statistics of rows and their gradients, against float64; what they cost; what refuses them."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jflex
from tests.calls.test_transforms import shapes_made
from tests.cases.features import BACKENDS, REFERENCE
from tests.cases.hopper_cases import HOPPER
from tests.cases.table import CASES, LENGTHS
from tests.support import evaluation, gpu_compile
from tests.support.rows import tiers

TABLE = {case.name: case for case in [*CASES, *LENGTHS]}
NAMES = [
    "alibi_like", "bnth", "causal_mask_mod", "decode", "decode_sees_nothing", "dropout", "extreme_logits",
    "grouped_causal", "head_sizes_40_16", "length_many_mask_mod", "length_sinks", "negative_scale", "one_key",
    "own_derivative", "rows_that_see_nothing", "shared_keys_bias", "sinks", "sinks_see_nothing", "slopes", "softcap",
    "softcap_dropout_sinks", "squared_through_causal_blocks", "table",
]  # fmt: skip
ON_HOPPER = {case.name: case for case in HOPPER if case.name in (
    "even_bias", "length_many_sinks", "negative_scale", "rows_that_see_nothing", "sinks_bounded", "softcap_far",
    "two_groups_causal", "two_groups_dropout", "two_groups_empty_rows",
)}  # fmt: skip
EMULATED = ["even_bias", "length_many_sinks", "sinks_bounded", "two_groups_dropout", "two_groups_empty_rows"]
OPTIONS = {"reference": REFERENCE, **BACKENDS}
kernels = pytest.mark.parametrize("backend", BACKENDS)
assert_close = functools.partial(np.testing.assert_allclose, rtol=3e-5, atol=3e-5)
ALL = evaluation.STATS


# --- against float64


@tiers(full={"backend": "triton-interpret", "case": "slopes"}, in_turns=True, share=2, rest="full")
@pytest.mark.parametrize("case", [TABLE[name] for name in NAMES], ids=str)
@pytest.mark.parametrize("backend", ["reference", *evaluation.BACKENDS])
def test_against_float64(case, backend):
    evaluation.check_stats(case, backend)


@tiers(rest="full", share=4)
@pytest.mark.parametrize(
    ("name", "names"), [*((name, ALL) for name in EMULATED), ("two_groups_causal", ("lse", "max"))]
)
def test_the_hopper_kernel(name, names):
    """Emulated; `triton` computes a gradient of the entropy. Without a running max where scores are bounded."""
    evaluation.check_stats(ON_HOPPER[name], "mosaic_gpu-emulated", names)


@pytest.mark.gpu
@pytest.mark.parametrize("case", ON_HOPPER.values(), ids=str)
@pytest.mark.parametrize("names", [("lse", "max"), ALL], ids=str)
def test_on_hopper(case, names):
    evaluation.check_stats(case, "mosaic_gpu", names)


@tiers(full={"backend": "triton-interpret"}, rest="long")
@kernels
def test_packed_sequences(backend):
    """Each sequence alone; NaN in all padding."""
    rng, ends, kv_ends = np.random.default_rng(0), [0, 23, 23, 50], [0, 17, 30, 58]
    arrays = [rng.normal(size=(60, heads, 16)).astype(np.float32) for heads in (4, 2, 2)]
    padded = [np.where(np.arange(60)[:, None, None] < n, x, np.nan) for x, n in zip(arrays, (50, 58, 58), strict=True)]
    stats, causal = ("max", "entropy"), lambda b, h, q_idx, kv_idx: q_idx >= kv_idx

    def packed(q, k, v):
        bounds = {"cu_seqlens_q": jnp.array(ends, jnp.int32), "cu_seqlens_k": jnp.array(kv_ends, jnp.int32)}
        how = {"mask_mod": causal, "return_stats": stats, **OPTIONS[backend]}
        return jax.tree.map(lambda x: x[:50], jflex.flex_attention_varlen(q, k, v, **bounds, **how)[1])

    def alone(q, k, v):
        parts = []
        for (first, last), (begin, end) in zip(*map(itertools.pairwise, (ends, kv_ends)), strict=True):
            own = q[None, first:last], k[None, begin:end], v[None, begin:end]
            how = {"mask_mod": causal, "return_stats": stats, "implementation": "reference"}
            parts.append(jax.tree.map(lambda x: x[0].T, jflex.flex_attention(*own, **how)[1]))
        return jax.tree.map(lambda *xs: jnp.concatenate(xs), *parts)

    def run(attend, arrays):
        total = lambda *arrays: (jnp.sum(jnp.sin(attend(*arrays).entropy)), attend(*arrays))
        return jax.jit(jax.grad(total, argnums=(0, 1, 2), has_aux=True))(*arrays)

    jax.tree.map(assert_close, run(packed, padded), run(alone, arrays))


# --- forms of a call


def drawn(T=40, S=40):
    rng = np.random.default_rng(1)
    return [jnp.asarray(rng.normal(size=(2, n, h, 16)), jnp.float32) for n, h in ((T, 4), (S, 2), (S, 2))]


def loss(options, q, k, v, bias):
    score_mod = lambda score, b, h, q_idx, kv_idx: score + bias[h] * (q_idx - kv_idx).astype(jnp.float32)
    mask_mod = lambda b, h, q_idx, kv_idx: q_idx > kv_idx  # the first row is empty
    out, stats = jflex.flex_attention(q, k, v, score_mod, mask_mod=mask_mod, return_stats=ALL, **options)
    finite = lambda x: jnp.where(x == -jnp.inf, 0.0, x)
    rows = jnp.sin(stats.entropy) * jnp.cos(finite(stats.lse)) + finite(stats.max)
    return jnp.sum(jnp.sin(out)) + jnp.sum(rows), stats


@pytest.mark.full
@kernels
def test_masked_nan_reaches_neither_statistics_nor_gradients(backend):
    q, k, v = drawn(T=48, S=48)
    mask_mod = lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (kv_idx < 40)

    def run(k, v):
        def entropy(q, k, v):
            _, stats = jflex.flex_attention(q, k, v, mask_mod=mask_mod, return_stats=ALL, **OPTIONS[backend])
            return jnp.sum(jnp.sin(stats.entropy)), stats

        return jax.jit(jax.grad(entropy, argnums=(0, 1, 2), has_aux=True))(q, k, v)

    jax.tree.map(assert_close, run(*(x.at[:, 40:].set(jnp.nan) for x in (k, v))), run(k, v))


@pytest.mark.full
def test_forward_mode_and_second_derivatives_of_the_reference():
    arrays = (*drawn(T=12, S=12), jnp.linspace(-0.2, 0.3, 4))
    total = lambda *xs: loss(OPTIONS["reference"], *xs)[0]
    slopes = tuple(jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape) for x in arrays)
    gradient = jax.grad(total, argnums=range(4))
    along = jax.jit(lambda *xs: sum(jnp.sum(g * s) for g, s in zip(gradient(*xs), slopes, strict=True)))
    assert_close(jax.jit(lambda *xs: jax.jvp(total, xs, slopes)[1])(*arrays), along(*arrays), rtol=1e-4)
    twice = jax.jit(lambda *xs: jax.jvp(along, xs, slopes)[1])(*arrays)
    step = lambda size: along(*(x + size * s for x, s in zip(arrays, slopes, strict=True)))
    np.testing.assert_allclose(twice, (step(1e-2) - step(-1e-2)) / 2e-2, rtol=2e-2)


@pytest.mark.full
@pytest.mark.parametrize("implementation", ["xla", "reference", None])
@pytest.mark.parametrize("sinks", [None, [-1.0, 0.0, 2.0, -np.inf]])
def test_without_keys(implementation, sinks):
    q, k, v = drawn(S=0)
    sinks = None if sinks is None else jnp.array(sinks)

    def call(sinks):
        _, stats = jflex.flex_attention(q, k, v, sinks=sinks, return_stats=ALL, implementation=implementation)
        return stats.entropy.sum(), stats

    entropy, stats = call(sinks)
    np.testing.assert_array_equal(stats.max, np.full((2, 4, 40), -np.inf))
    np.testing.assert_array_equal(stats.entropy, np.zeros((2, 4, 40)))
    assert entropy == 0
    if sinks is not None:
        np.testing.assert_array_equal(jax.grad(call, has_aux=True)(sinks)[0], np.zeros(4))


# --- which kernels compute them, and what calls without them compute


def outputs_of_forward(implementation, returned):
    """The shapes that the forward kernel writes, from the traced program."""
    x = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16)
    call = lambda q: jax.tree.leaves(jflex.flex_attention(q, q, q, implementation=implementation, **returned))
    with gpu_compile.absent_gpu():
        return [shape for shape in shapes_made(jax.make_jaxpr(call)(x)) if shape == (1, 2, 256)]


def test_nothing_is_added_to_other_calls():
    lse = outputs_of_forward("triton", {"return_lse": True})
    assert outputs_of_forward("triton", {}) == lse
    assert outputs_of_forward("triton", {"return_stats": ("lse",)}) == lse
    assert len(outputs_of_forward("triton", {"return_stats": ("max",)})) > len(lse)


X = jax.ShapeDtypeStruct((1, 4096, 8, 64), jnp.bfloat16)
NEEDS_011 = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="Mosaic GPU is used from JAX 0.11 on")


@NEEDS_011
@pytest.mark.parametrize(("stats", "gradients"), [(("lse", "max"), "mosaic_gpu"), (("entropy",), "triton")])
def test_dispatch_and_explain(stats, gradients):
    with gpu_compile.absent_gpu():
        account = jflex.explain(X, X, X, return_stats=stats)
    assert (account.backend, account.gradients) == ("mosaic_gpu", gradients)
    assert ("no derivative of the entropy" in account.gradients_reason) == (gradients == "triton")


def test_few_queries_run_the_split_kv_kernel():
    q, k = jax.ShapeDtypeStruct((2, 1, 8, 64), jnp.bfloat16), jax.ShapeDtypeStruct((2, 4096, 2, 64), jnp.bfloat16)
    plan = lambda **how: jflex.explain(q, k, k, implementation="triton", config=jflex.Config(interpret=True), **how)
    for stats in ((), ("lse",), ("max",), ALL):
        assert plan(return_stats=stats).tiles.startswith("decode")

"""`Config(deterministic=True)`: the same bits in each run, or a refusal by name."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jflex
from jflex import Config, UnsupportedError, entry
from jflex._call.dispatch import get_backend
from jflex.options import Settings
from pallas_kernels.plan import Refusal, all_gradients
from tests.support import evaluation
from tests.support.invariance import causal
from tests.support.rows import in_turns, tiers
from tests.support.specs import spec_of

GPU = pytest.param("triton", marks=pytest.mark.gpu)
MOSAIC = pytest.param("mosaic_gpu", marks=pytest.mark.gpu)
backends_ = pytest.mark.parametrize(
    "backend", ["xla", "reference", "triton-interpret", GPU, MOSAIC, evaluation.OFFICIAL_TRITON]
)
B, T, HQ, HKV, D = 2, 96, 4, 2, 64
RUNS = 3

# Score mods by how the gradient of what they capture is added: one value for each head, by rows whose positions repeat,
# by columns, each element once, elements that the batch shares, and elements at positions that repeat.
SCORES = {
    "slopes": lambda x: lambda s, b, h, q, k: s + x[h] * (k - q).astype(jnp.float32),
    "rows": lambda x: lambda s, b, h, q, k: s + x[q % 3, 0] * (k % 2).astype(jnp.float32),
    "columns": lambda x: lambda s, b, h, q, k: s + x[k // 7, h],
    "bias": lambda x: lambda s, b, h, q, k: s + x[b, h, q, k],
    "shared_bias": lambda x: lambda s, b, h, q, k: s + x[h, q, k],
    "distances": lambda x: lambda s, b, h, q, k: s + x[h, q - k + T],
}
SHAPES = {
    "slopes": (HQ,), "rows": (3, 2), "columns": (T, HQ), "bias": (B, HQ, T, T), "shared_bias": (HQ, T, T),
    "distances": (HQ, 2 * T),
}  # fmt: skip
UNORDERED = {"distances"}  # of the kernels
MISSING = re.compile(r"needs JAX 0\.11|needs the package")


def options(backend, **settings):
    """With `deterministic`."""
    interpret = {"interpret": True} if backend.endswith("-interpret") else {}
    config = Config(**({"deterministic": True} | interpret | settings))
    return {"implementation": backend.removesuffix("-interpret"), "config": config}


def gradients(backend, score, **settings):
    """A function of query, key, value and the captured array, and its arguments."""
    rng, long = np.random.default_rng(0), 16 if backend == "mosaic_gpu" else 1  # one pass is for long sequences
    dtype = jnp.bfloat16 if backend == "mosaic_gpu" else jnp.float32
    length = T * long if score in ("slopes", "rows") else T
    q, k, v = (jnp.asarray(rng.normal(size=(B, length, heads, D)), dtype) for heads in (HQ, HKV, HKV))
    captured = jnp.asarray(rng.normal(size=SHAPES[score]), jnp.float32)

    @jax.jit
    def pull(q, k, v, captured):
        out, back = jax.vjp(
            lambda q, k, v, captured: jflex.flex_attention(
                q, k, v, SCORES[score](captured), mask_mod=causal, **options(backend, **settings)
            ),
            q, k, v, captured,
        )  # fmt: skip
        return out, *back(jnp.sin(out))

    return pull, (q, k, v, captured)


@tiers(default={"score": "rows", "backend": "xla"}, in_turns=True)
@backends_
@pytest.mark.parametrize("score", SCORES)
def test_the_same_bits_in_each_run(backend, score):
    pull, arguments = gradients(backend, score)
    if score in UNORDERED and backend not in ("xla", "reference"):
        with pytest.raises(UnsupportedError, match=r"added by atomics, in no fixed order.*deterministic"):
            pull(*arguments)
        return
    first = pull(*arguments)
    for _ in range(RUNS - 1):
        for x, y in zip(first, pull(*arguments), strict=True):
            np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))


@pytest.mark.full
@in_turns
@pytest.mark.parametrize("backend", ["xla", "triton-interpret"])
@pytest.mark.parametrize("score", ["slopes", "rows", "columns"])
def test_the_order_changes_no_gradient(backend, score):
    pull, arguments = gradients(backend, score)
    plain, _ = gradients(backend, score, deterministic=False)
    for x, y in zip(pull(*arguments), plain(*arguments), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)


# --- what is refused


def spec_with(score, platform="gpu", **fields):
    """A call with a traced score mod."""
    spec = []

    def keep(q, captured):
        call = entry.prepare(q, q, q, Settings(SCORES[score](captured)))
        spec.append(call.spec)
        return q

    jax.eval_shape(keep, jax.ShapeDtypeStruct((B, T, HQ, D), jnp.bfloat16), jnp.zeros(SHAPES[score]))
    device = {"platform": platform, "device_kind": "NVIDIA H200" if platform == "gpu" else ""}
    return spec[0].replace(config=Config(deterministic=True), **device, **fields)


@tiers(default={"score": "distances"}, in_turns=True)
@pytest.mark.parametrize("backend", ["triton", "official_triton", "mosaic_gpu", "reference"])
@pytest.mark.parametrize("score", SCORES)
def test_what_has_no_order_is_refused_by_name(backend, score):
    spec = spec_with(score)
    found = get_backend(backend).plan(spec, all_gradients(spec))
    reason = found.reason if isinstance(found, Refusal) else ""
    if backend == "reference":
        assert "no fixed order" in reason
    elif score in UNORDERED:
        assert "in no fixed order, which `Config(deterministic=True)` excludes" in reason or MISSING.search(reason)
    else:
        assert "order" not in reason


def test_the_forward_pass_is_never_refused():
    """It adds in a fixed order in any case."""
    found = get_backend("triton").plan(spec_with("distances"), None)
    assert not isinstance(found, Refusal)


@pytest.mark.full
def test_xla_refuses_what_it_cannot_sort():
    """On a GPU, the gradient of an array of which the score chooses the element."""
    mod = lambda x: lambda s, b, h, q, k: s + x[jnp.clip(s, 0, 2).astype(jnp.int32), 0]
    SCORES["of_score"], SHAPES["of_score"] = mod, (3, 2)
    try:
        spec = spec_with("of_score")
        on_cpu = spec.replace(platform="cpu")
    finally:
        del SCORES["of_score"], SHAPES["of_score"]
    xla, requested = get_backend("xla"), all_gradients(spec)
    assert "is added in no fixed order" in xla.plan(spec, requested).reason
    assert not isinstance(xla.plan(spec, None), Refusal)
    assert not isinstance(xla.plan(on_cpu, requested), Refusal)


@pytest.mark.full
def test_one_pass_is_left_out():
    spec = spec_of(T=4096, platform="gpu", device_kind="NVIDIA H200", config=Config(deterministic=True))
    found = get_backend("mosaic_gpu").plan(spec, all_gradients(spec))
    if isinstance(found, Refusal):
        pytest.skip(found.reason)  # an old JAX, or a CUDA that it refuses
    assert found.kernels.backward.tiles.dq is not None

"""Queries and keys of eight bits: results against float64, what refuses them, and that no gradient is computed."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jflex
from jflex._call.dispatch import select
from tests.cases import mask_pairs as masks
from tests.cases import score_pairs as scores
from tests.cases.score_pairs import ScorePair
from tests.cases.table import Case, Sizes
from tests.support import evaluation, gpu_compile
from tests.support.haste import compiled_in_haste
from tests.support.hopper_emulator import emulated
from tests.support.oracle import Score
from tests.support.rows import tiers
from tests.support.specs import spec_of

E4M3 = {"dtype": "bfloat16", "qk_dtype": "float8_e4m3fn"}
E5M2 = {"dtype": "float16", "qk_dtype": "float8_e5m2"}
HOPPER = {"platform": "gpu", "device_kind": "NVIDIA H200"}
AMPERE = {"platform": "gpu", "device_kind": "NVIDIA A100-SXM4-80GB"}
NEEDS_011 = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="Mosaic GPU is used from JAX 0.11 on")

scale_of_heads = ScorePair(
    lambda c: lambda s, b, h, q, k: s * c["scale"][h],
    Score(lambda s, b, h, q, k, c: s * c["scale"][h], lambda s, b, h, q, k, c: c["scale"][h], lambda *_: {}),
    lambda rng, n: {"scale": rng.uniform(0.5, 2.0, n.Hq).astype(np.float32)},
)

CASES = [
    Case("eight_no_mask", sizes=Sizes(T=130, S=200, Hq=4, Hkv=2, D=64), **E4M3),
    Case("eight_causal", mask=masks.causal, sizes=Sizes(T=300, Hq=4, Hkv=2, D=128), block=128, **E4M3),
    Case("eight_sizes", scores.alibi, masks.causal, Sizes(T=130, S=210, D=80, Dv=40), block=64, layout="BNTH", **E5M2),
    Case("eight_scales", scale_of_heads, masks.causal, Sizes(T=200, Hq=4, Hkv=2, D=96), block=64, **E4M3),
    Case("eight_softcap", scores.softcap, masks.window, Sizes(T=260, D=128, Dv=64), block=128, scale=2.0, **E4M3),
    Case("eight_head_size_1", sizes=Sizes(T=70, D=1), scale=0.5, **E5M2),
    Case("eight_sinks", mask=masks.first_half_only, sizes=Sizes(T=140, Hq=4, D=64), block=64, sinks=True, **E4M3),
    Case("eight_dropout", mask=masks.causal, sizes=Sizes(T=140, D=64), block=64, dropout_rate=0.2, **E4M3),
    Case("eight_sigmoid", scores.sigmoid, sizes=Sizes(T=140, D=64), normalize="none", **E5M2),
    Case("eight_lengths", mask=masks.causal, sizes=Sizes(3, 140, 200, Hq=2, D=64), kv_lengths=(99, 0, 200), **E4M3),
]
DECODING = [
    Case("eight_decode", sizes=Sizes(T=1, S=300, Hq=8, Hkv=2, D=64), kv_lengths=(129, 300), **E4M3),
    Case("eight_decode_even", sizes=Sizes(T=1, S=320, Hq=8, Hkv=2, D=64), kv_lengths=(129, 320), **E4M3),
    Case("eight_shared", sizes=Sizes(T=3, S=300, Hq=4, Hkv=2, Bkv=1, D=40), **E5M2),
]
BACKENDS = [
    "reference", *evaluation.BACKENDS, pytest.param("mosaic_gpu-emulated", marks=NEEDS_011),
    pytest.param("mosaic_gpu", marks=[pytest.mark.gpu, NEEDS_011]),
]  # fmt: skip


def program_of(case, backend):
    """The forward pass, and its arguments."""

    def run(x, blocks):
        return evaluation.call(case, backend, x.query, x.key, x.value, x.score, x.mask, blocks)

    return run, evaluation.poisoned(case), evaluation.block_mask(case)


def results_of(case, backend):
    run, drawn, blocks = program_of(case, backend)
    x, is_emulated = jax.tree.map(jnp.asarray, drawn), "emulated" in backend
    with emulated() if is_emulated else contextlib.nullcontext(), compiled_in_haste(jax.default_backend() != "gpu"):
        return evaluation.Results(*(run if is_emulated else jax.jit(run))(x, blocks))


@functools.cache
def plain(case):
    """By plain jnp attention of the dtype of the values, on the CPU."""
    more = *evaluation.visible_places(case), evaluation.exact(case).found.factors
    with jax.default_device(jax.devices("cpu")[0]):
        x = jax.tree.map(jnp.asarray, evaluation.draw(case))
        q, k = (a.astype(case.dtype) for a in (x.query, x.key))
        return evaluation.Results(*evaluation.plain_call(case, q, k, x.value, x.score, *more))


@tiers(
    default=[
        {"case": "eight_no_mask", "backend": "xla"},
        {"case": "eight_head_size_1", "backend": ["triton-interpret", "mosaic_gpu-emulated"]},
    ],
    in_turns=True,
    share=2,
)
@pytest.mark.parametrize("case", [*CASES, *DECODING], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_against_float64(case, backend):
    found = results_of(case, backend)
    assert found.out.dtype == case.dtype
    evaluation.compare_forward(case, found, plain(case), evaluation.exact(case))


@pytest.mark.full
def test_packed_and_mapped_calls():
    q, k, v = arrays(heads=2)
    alone = jflex.flex_attention(q, k, v, implementation="xla")
    ends = jnp.array([0, 64], jnp.int32)
    packed = jflex.flex_attention_varlen(q[0], k[0], v[0], cu_seqlens_q=ends, cu_seqlens_k=ends, implementation="xla")
    assert packed.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(packed, np.float32), np.asarray(alone[0], np.float32), atol=0.02)
    mapped = jax.vmap(lambda q: jflex.flex_attention(q, k, v, implementation="xla"))(jnp.stack([q, q]))
    np.testing.assert_array_equal(np.asarray(mapped[1], np.float32), np.asarray(alone, np.float32))


@tiers(full={"case": ["eight_causal-mosaic_gpu", "eight_dropout-mosaic_gpu", "eight_decode-triton"]}, rest="long")
@NEEDS_011
@pytest.mark.skipif(gpu_compile.missing() is not None, reason="compiles for a GPU")
@pytest.mark.parametrize(
    ("case", "backend"),
    [*((case, "mosaic_gpu") for case in CASES), *((case, "triton") for case in (*CASES[1:3], DECODING[0]))],
    ids=str,
)
def test_compiles(case, backend):
    run, drawn, blocks = program_of(case, backend)
    shapes = lambda tree: jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tree)
    kernels = gpu_compile.compile_kernels(run, shapes(drawn), shapes(blocks))
    own = [x for x in kernels if "repair" not in x.name and ("sm90" in x.name) == (backend == "mosaic_gpu")]
    assert own
    assert max(x.spill for x in own) <= (48 if backend == "mosaic_gpu" else 256), own


# --- no gradients


@pytest.mark.parametrize("backend", ["reference", "xla", None])
def test_gradients_are_refused(backend):
    q, k, v = arrays()
    scale = jnp.ones(2)
    loss = lambda q, v, scale: (
        jflex.flex_attention(q, k, v, lambda s, b, h, i, j: s * scale[h], implementation=backend)
        .astype(jnp.float32)
        .sum()
    )
    for argument in range(3):
        with pytest.raises(
            jflex.UnsupportedError,
            match=r"^This call has no gradients: `query` and `key` of float8_e4m3fn are for inference \(cast both to "
            r"bfloat16\)\.",
        ):
            jax.grad(loss, argument)(q, v, scale)


@pytest.mark.full
@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("backend", ["reference", "xla"])
def test_forward_mode_names_what_works(backend, jitted):
    """Wider arrays: `reference` refuses eight bits too."""
    q, k, v = arrays()
    pushed = lambda q, k: jax.jvp(lambda v: jflex.flex_attention(q, k, v, implementation=backend), (v,), (v,))[1]
    derive = jax.jit(pushed) if jitted else pushed
    with pytest.raises(
        jflex.UnsupportedError,
        match=r"^This call has no (derivatives|gradients): `query` and `key` of float8_e4m3fn are for inference \(cast "
        r"both to bfloat16\)\.",
    ):
        derive(q, k)
    if backend == "reference":
        wide = derive(q.astype(v.dtype), k.astype(v.dtype))
        assert np.isfinite(np.asarray(wide, np.float32)).all()


def test_explain():
    q, k, v = arrays()
    account = jflex.explain(q, k, v, implementation="xla")
    assert account.gradients is None
    assert account.gradients_reason == "`query` and `key` of float8_e4m3fn are for inference (cast both to bfloat16)"
    assert account.bytes == (1 + 2) * 16 * 2 * 2 * 64


# --- selection


def test_hopper_is_preferred():
    spec = spec_of(B=2, T=4096, Hq=8, D=128, qk_dtype="float8_e4m3fn", **HOPPER)
    if jax.__version_info__ >= (0, 11):
        selection = select(None, spec)
        assert selection.name == "mosaic_gpu"
        assert "QK^T in float8_e4m3fn" in selection.plan.describe()


@NEEDS_011
def test_few_queries_on_hopper():
    """The kernel for few queries of 16 bits would read them wrongly: `triton` is preferred, and else `forward` runs."""
    spec = spec_of(T=1, S=512, D=64, qk_dtype="float8_e4m3fn", **HOPPER)
    chosen, named = select(None, spec), select("mosaic_gpu", spec)
    assert chosen.name == "triton"
    reason = "takes no eight bits, and query and key are float8_e4m3fn"
    assert reason in chosen.rejections["mosaic_gpu"]
    assert named.plan.describe().startswith("forward ")


@pytest.mark.parametrize(("dtype", "refuses"), [("float8_e4m3fn", True), ("float8_e5m2", False)])
def test_what_ampere_lacks(dtype, refuses):
    assert select("triton", spec_of(T=512, qk_dtype=dtype, **AMPERE)).name == "triton"
    spec = spec_of(T=1, S=512, kv_lengths=True, qk_dtype=dtype, **AMPERE)
    reason = select("triton", spec).rejections.get("triton", "")
    assert ("converts float8_e4m3fn from Ada and Hopper on, and this is NVIDIA A100-SXM4-80GB (take float8_e5m2)"
            in reason) == refuses  # fmt: skip


# --- wrong calls


def arrays(q="float8_e4m3fn", k="float8_e4m3fn", v="bfloat16", heads=2):
    rng = np.random.default_rng(0)
    return tuple(jnp.asarray(rng.normal(size=(1, 64, heads, 16)), jnp.float32).astype(x) for x in (q, k, v))

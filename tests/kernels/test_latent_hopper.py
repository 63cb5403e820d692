"""The latent kernel for Hopper: in the emulator against float64, compiled for an H200 without one, and its refusals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jflex
from pallas_kernels.mosaic_gpu import smem
from pallas_kernels.mosaic_gpu.latent import kernel, step
from pallas_kernels.mosaic_gpu.latent import plan as latent_plan
from pallas_kernels.mosaic_gpu.latent.sizes import Heads
from tests.cases import mask_pairs, score_pairs
from tests.cases.paged_cases import MIXED, slopes, window
from tests.latent.test_mla import latent_case
from tests.support import gpu_compile, hopper_emulator, hopper_faults, paged_evaluation
from tests.support.hopper_emulator import emulated
from tests.support.rows import tiers

NEEDS_011 = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="Mosaic GPU is used from JAX 0.11 on")
BACKEND = "mosaic_gpu"
INT = functools.partial(jnp.asarray, dtype=jnp.int32)

in_bfloat16 = functools.partial(latent_case, dtype="bfloat16")
CASES = [
    in_bfloat16("hopper_decode", Hq=16),
    in_bfloat16("hopper_one_head", (1, 2), (33, 20), Hq=1),
    in_bfloat16("hopper_mixed", **MIXED, Hq=3, mask=mask_pairs.causal, score=slopes),
    in_bfloat16("hopper_63_heads", (2, 1), (20, 35), Hq=63, mask=mask_pairs.causal),
    in_bfloat16("hopper_128_heads", (1, 2), (20, 135), Hq=128, mask=mask_pairs.causal, page_size=64),
    in_bfloat16("hopper_126_heads", (2,), (70,), Hq=126, page_size=128),
    in_bfloat16("hopper_window", (1, 1, 20), (8, 9, 70), Hq=8, mask=window, page_size=8),
    in_bfloat16("hopper_softcap", (1, 4), (48, 20), Hq=16, score=score_pairs.softcap, factor=8.0, page_size=32),
    in_bfloat16("hopper_divided", (1, 1, 2), (1500, 40, 700), Hq=8, page_size=64, mask=mask_pairs.causal),
    in_bfloat16("hopper_layers", (1, 2), (20, 33), Hq=4, layers=2),
    in_bfloat16("hopper_padding_and_empty", (0, 1, 0, 20, 2), (0, 30, 9, 24, 0), 5, slopes, Hq=8),
    in_bfloat16("hopper_float16", (1, 2), (70, 33), Hq=16, page_size=128, dtype="float16"),
    in_bfloat16("hopper_deepseek", (1, 2), (70, 33), Hq=16, D=576, Dv=512, rope=64, scale=192**-0.5, page_size=64),
    in_bfloat16("hopper_window_divided", (1, 2), (1500, 700), Hq=8, page_size=64, mask=window),
]


def attend(case, seed=0):
    """Out and lse of a case in the emulator."""
    x, (cache, table) = paged_evaluation.draw(case), paged_evaluation.placed(case, seed)
    layer = None if case.layers is None else jnp.int32(paged_evaluation.LAYER)
    captured = jax.tree.map(jnp.asarray, x.captured)
    batch = paged_evaluation.batch_of(case, table)
    with emulated():
        return paged_evaluation.call(case, f"{BACKEND}-interpret", jnp.asarray(x.query), cache, batch, captured, layer)


@tiers(default={"case": "hopper_softcap_bfloat16"})
@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_float64(case):
    paged_evaluation.check(case, attend(case))


@pytest.mark.full
def test_where_pages_lie_changes_no_bit():
    first, second = (attend(CASES[4], seed) for seed in (0, 1))
    for x, y in zip(first, second, strict=True):
        np.testing.assert_array_equal(np.asarray(x.astype(jnp.float32)), np.asarray(y.astype(jnp.float32)))


@pytest.mark.full
def test_in_time_whatever_tma_takes(monkeypatch):
    monkeypatch.setattr(hopper_emulator, "TMA_IS_LATE", True)
    case = CASES[8]
    paged_evaluation.check(case, attend(case))


@pytest.mark.full
@pytest.mark.parametrize(("method", "held"), [("_add_received", "_publish"), ("_start_near_scores", None)])
def test_the_emulator_notices_a_wait_that_is_left_out(monkeypatch, method, held):
    """Of weights that the other warp group has not published, and of keys that TMA has not written."""
    monkeypatch.setattr(hopper_emulator, "TMA_IS_LATE", held is None)
    hopper_faults.leave_out_waits(monkeypatch, step.LatentStep, method, held=held and (step.LatentStep, held))
    with pytest.raises(AssertionError):
        paged_evaluation.check(CASES[8], attend(CASES[8]))


@pytest.mark.full
@pytest.mark.parametrize("out_of", ["mask", "length", "length_of_sigmoid"])
def test_nan_that_no_query_sees(out_of):
    """In rows that a window hides, which the kernels of Triton repair, and in rows past the length, also an odd one."""
    rng, lengths, page = np.random.default_rng(2), (171, 301), 16
    per = [-(-n // page) for n in lengths]
    rows = jnp.asarray(rng.normal(size=(sum(per) + 1, page, 1, 80)), jnp.bfloat16)
    table = np.full((2, max(per) + 2), 2147480000, np.int32)
    table[0, : per[0]], table[1, : per[1]] = np.arange(1, per[0] + 1), np.arange(per[0] + 1, sum(per) + 1)
    batch = jflex.paged.PagedBatch(INT([0, 1, 4]), INT(lengths), jnp.asarray(table))
    q = jnp.asarray(rng.normal(size=(4, 8, 80)), jnp.bfloat16)
    mask = (lambda b, h, i, j: (i >= j) & (i - j < 20)) if out_of == "mask" else None
    score = (lambda s, b, h, i, j: 4 * jax.nn.sigmoid(s)) if out_of == "length_of_sigmoid" else None

    def found(value):
        filled = rows
        for row, length in zip(table, lengths, strict=True):
            at = np.arange(64, 128) if out_of == "mask" else np.arange(length, -(-length // page) * page)
            filled = filled.at[row[at // page], at % page].set(value)
        cache = jflex.paged.LatentCache(filled, 16)
        options = {
            "mask_mod": mask,
            "score_mod": score,
            "scale": 0.2,
            "return_lse": True,
            **paged_evaluation.options_of(f"{BACKEND}-interpret"),
        }
        with emulated():
            return jflex.mla_attention(q, cache, batch, **options)

    for x, y in zip(found(np.nan), found(0), strict=True):
        np.testing.assert_allclose(np.asarray(x, np.float32), np.asarray(y, np.float32), rtol=1e-2, atol=1e-2)


@pytest.mark.full
def test_sinks_join_after_the_merge():
    case = CASES[8]
    x, (cache, table) = paged_evaluation.draw(case), paged_evaluation.placed(case)
    sinks = jnp.linspace(-1.0, 2.0, case.Hq)
    call = functools.partial(
        jflex.mla_attention, jnp.asarray(x.query), cache, paged_evaluation.batch_of(case, table), scale=case.scale,
        mask_mod=jflex.masks.causal(), return_lse=True, **paged_evaluation.options_of(f"{BACKEND}-interpret"),
    )  # fmt: skip
    with emulated():
        (out, lse), (plain, lse_of_plain) = call(sinks=sinks), call()
    right = jflex.with_sinks(jflex.AttentionState(plain, lse_of_plain), sinks)
    np.testing.assert_allclose(out.astype(jnp.float32), right.out.astype(jnp.float32), rtol=1e-2, atol=1e-2)
    np.testing.assert_allclose(lse, right.lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("heads", "groups", "count", "padded", "queries"),
    [
        (1, 1, 1, 8, 8),
        (9, 1, 9, 16, 4),
        (63, 1, 63, 64, 1),
        (96, 2, 48, 48, 1),
        (126, 2, 63, 64, 1),
        (128, 2, 64, 64, 1),
    ],
)
def test_heads_fill_tiles(heads, groups, count, padded, queries):
    of = Heads.from_count(heads)
    assert (of.groups, of.count, of.padded_count, of.queries) == (groups, count, padded, queries)


# --- compiled for a GPU


def program(T=1, Hq=128, page=64, latent=512, rope=64, dtype=jnp.bfloat16, sinks=False, **options):
    """A call over 128 requests of up to 4096 keys, and the shapes of its arguments."""
    integers = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
    cache = jflex.paged.LatentCache(jax.ShapeDtypeStruct((8193, page, 1, latent + rope), dtype), rope)
    batch = jflex.paged.PagedBatch(integers(129), integers(128), integers(128, 4096 // page))
    options["sinks"] = jnp.zeros(Hq) if sinks else None
    call = functools.partial(jflex.mla_attention, qk_head_dim=192, **{"implementation": BACKEND, **options})
    return call, jax.ShapeDtypeStruct((128 * T, Hq, latent + rope), dtype), cache, batch


SLOPES = jnp.linspace(0.0, 1.0, 128)
COMPILED = {
    "decode": {},
    "two_tokens": {"T": 2, "mask_mod": jflex.masks.causal()},
    "16_heads": {"Hq": 16, "return_lse": True},
    "9_heads": {"Hq": 9, "T": 3},
    "126_heads": {"Hq": 126},
    "softcap": {"score_mod": lambda s, b, h, q, k: 30 * jnp.tanh(s / 30)},
    "alibi": {"score_mod": lambda s, b, h, q, k: s - SLOPES[h] * (q - k).astype(jnp.float32)},
    "window": {"T": 2, "mask_mod": lambda b, h, q, k: (q >= k) & (q - k < 256)},
    "pages_of_16": {"page": 16},
    "pages_of_128": {"page": 128},
    "sinks": {"sinks": True},
    "float16": {"dtype": jnp.float16},
    "small": {"latent": 64, "rope": 16},
}


# The producer warp group has 24 registers: it spills addresses, those of queries once for each tile of them.
KNOWN_SPILLS = {"16_heads": 48, "9_heads": 48, "pages_of_16": 80}


@tiers(full={"name": ["9_heads", "pages_of_16"]}, rest="long")
@NEEDS_011
@pytest.mark.skipif(gpu_compile.missing() is not None, reason="compiles for a GPU")
@pytest.mark.parametrize("name", COMPILED)
def test_spills_nothing(name):
    kernels = gpu_compile.compile_kernels(*program(**COMPILED[name]))
    [found] = [x for x in kernels if "latent_sm90" in x.name]
    assert found.spill <= KNOWN_SPILLS.get(name, 0)
    assert found.tensor == "wgmma"
    assert found.shared <= smem.LIMIT
    assert {x.name for x in kernels} >= {"jflex_paged_plan", "jflex_paged_merge"}


def test_shared_memory_is_known_from_what_is_declared():
    """The figure of the compiled kernel: two tiles of keys and the queries, 72 KiB each, and vectors."""
    spec = paged_spec()
    declared = jax.tree.leaves(kernel.declare(spec, Heads.from_count(128), jnp.bfloat16))
    assert smem.bytes_of(declared) == 224336
    assert smem.CONSUMER_REGISTERS * 2 + smem.PRODUCER_REGISTERS <= 65536 // 128


def paged_spec():
    from pallas_kernels.spec import Paging
    from tests.support.specs import spec_of

    spec = spec_of(T=1, S=4096, Hq=128)
    return spec.replace(D=576, Dv=512, paging=Paging(64, 8193), values_in_keys=True)


# --- what is selected, and what is refused


@NEEDS_011
@pytest.mark.parametrize(
    ("sizes", "slower"),
    [
        ({}, None),
        ({"Hq": 16}, "below 32 query rows to a request (here 16) loading keys bounds the time"),
        ({"Hq": 16, "T": 2}, None),
        ({"T": 2, "mask_mod": jflex.masks.causal()}, None),
        ({"mask_mod": COMPILED["window"]["mask_mod"]}, None),
        ({"mask_mod": lambda b, h, q, k: SLOPES[k % 128] > 0.5}, None),
    ],
    ids=["128 heads", "16 heads", "two tokens", "causal", "window", "captured"],
)
def test_is_preferred_where_products_take_longer_than_loading(sizes, slower):
    call, *arrays = program(implementation=None, **sizes)
    with gpu_compile.absent_gpu():
        account = jflex.explain(call.func, *arrays, **call.keywords)
    assert account.backend == (BACKEND if slower is None else "triton")
    assert slower is None or slower in account.reasons[BACKEND]


@pytest.mark.full
@NEEDS_011
def test_explain_names_the_tiles():
    call, *arrays = program()
    with gpu_compile.absent_gpu():
        own = jflex.explain(call.func, *arrays, **call.keywords)
    assert own.backend == BACKEND
    assert own.tiles == "latent 64 x 64 (8 warps that compute, 2 stages, 64 heads)"
    assert (own.query_tiles, own.splits) == (None, None)  # of lengths that are not known


REFUSALS = [
    ("dtype", {"dtype": jnp.float32}, "compute in bfloat16 or float16, not float32"),
    (
        "latent size",
        {"latent": 640},
        "a multiple of 32 up to 512 and rotated keys of a multiple of 16 .* not 640 and 64",
    ),
    ("rope size", {"rope": 24}, "not 512 and 24"),
    ("page size", {"page": 4}, "takes pages of 8, 16 or 32 keys or of a multiple of 64, not of 4"),
    ("tiles", {"config": jflex.Config(decode=jflex.Tiles(64, 32, 8))}, "`config` sets tiles, .*: 64 rows by 64 keys"),
    (
        "a primitive",
        {"score_mod": lambda s, b, h, q, k: s + jax.lax.population_count(q ^ k).astype(jnp.float32)},
        "`score_mod` .* primitive `population_count` has no lowering for Mosaic GPU",
    ),
    (
        "repairs",
        {"latent": 480, "mask_mod": jflex.masks.causal()},
        "the kernels of Triton merge its partial results and repair them, and .* not 480",
    ),
    ("shared memory", {"rope": 128}, r"need \d+ bytes of shared memory, and a CTA has 232448"),
]


@NEEDS_011
@pytest.mark.parametrize(("sizes", "message"), [row[1:] for row in REFUSALS], ids=[row[0] for row in REFUSALS])
def test_refuses(sizes, message):
    call, *arrays = program(**sizes)
    with pytest.raises(jflex.UnsupportedError, match=message), gpu_compile.absent_gpu():
        jax.jit(call).trace(*arrays)


@pytest.mark.parametrize("option", [{"normalize": "none"}, {"stats": ("max",)}])
def test_plan_refuses_what_mla_attention_does_not_take(option):
    spec = paged_spec().replace(dtype="bfloat16", **option)
    assert "neither dropout, statistics of rows nor weights without a softmax" in latent_plan.plan(spec).reason

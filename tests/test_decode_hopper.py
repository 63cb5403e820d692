"""The decoding kernel for Hopper, over contiguous keys and over pages: emulated, compiled without a GPU, refused."""

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jflex
from pallas_kernels.mosaic_gpu import smem
from pallas_kernels.mosaic_gpu.decode import kernel, step
from tests import evaluation, gpu_compile, hopper_emulator, paged_evaluation
from tests.decode_hopper_cases import DENSE, PAGED
from tests.hopper_emulator import emulated
from tests.paged_cases import PagedCase

NEEDS_011 = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="Mosaic GPU is used from JAX 0.11 on")
BACKEND = "mosaic_gpu"
DIVIDED = PAGED[1]
LONG = PagedCase("hopper_long", (1,), (1600,), Hq=2, Hkv=2, D=128, page_size=64, dtype="bfloat16")


def attend(case, seed=0):
    """Out and lse of a paged case in the emulator."""
    x, (cache, table) = paged_evaluation.draw(case), paged_evaluation.placed(case, seed)
    layer = None if case.layers is None else jnp.int32(paged_evaluation.LAYER)
    captured = jax.tree.map(jnp.asarray, x.captured)
    batch = paged_evaluation.batch_of(case, table)
    with emulated():
        return paged_evaluation.call(case, f"{BACKEND}-interpret", jnp.asarray(x.query), cache, batch, captured, layer)


# --- results


@pytest.mark.parametrize("case", PAGED, ids=str)
def test_pages_against_float64(case):
    paged_evaluation.check(case, attend(case))


@pytest.mark.gpu
@pytest.mark.parametrize("case", PAGED, ids=str)
def test_pages_on_a_gpu(case):
    paged_evaluation.check(case, paged_evaluation.run(case, BACKEND))


def contiguous(case, backend):
    """Out and lse of a dense case, without gradients."""
    x = jax.tree.map(jnp.asarray, evaluation.poisoned(case))
    return evaluation.Results(*evaluation.call(case, backend, x.query, x.key, x.value, x.score, x.mask, None))


@pytest.mark.parametrize("case", DENSE, ids=str)
def test_contiguous_keys_against_float64(case):
    with emulated():
        found = contiguous(case, f"{BACKEND}-emulated")
    evaluation.compare_forward(case, found, evaluation.plain(case), evaluation.exact(case))


@pytest.mark.gpu
@pytest.mark.parametrize("case", DENSE, ids=str)
def test_contiguous_keys_on_a_gpu(case):
    found = jax.jit(functools.partial(contiguous, case, BACKEND))()
    evaluation.compare_forward(case, found, evaluation.plain(case), evaluation.exact(case))


@pytest.mark.parametrize("case", [DENSE[3], DENSE[11]], ids=str)
def test_gradients_are_of_the_same_forward_pass(case):
    """The backward kernels take the lse of the decoding kernel."""
    names = ("query", "key", "value", *evaluation.draw(case).floats())
    evaluation.check_gradients(case, f"{BACKEND}-emulated", names)


def test_where_pages_lie_changes_no_bit():
    first, second = (attend(DIVIDED, seed) for seed in (0, 1))
    for x, y in zip(first, second, strict=True):
        np.testing.assert_array_equal(np.asarray(x.astype(jnp.float32)), np.asarray(y.astype(jnp.float32)))


# --- order


@pytest.mark.parametrize("case", [DIVIDED, DENSE[0]], ids=str)
def test_in_time_whatever_tma_takes(monkeypatch, case):
    monkeypatch.setattr(hopper_emulator, "TMA_DELAY", 0.02)
    if case is DIVIDED:
        paged_evaluation.check(case, attend(case))
    else:
        test_contiguous_keys_against_float64(case)


@pytest.mark.parametrize(
    ("owner", "method", "case"),
    [(step.Step, "__call__", "divided"), (kernel, "_load", "long"), (kernel, "_finish", "divided")],
    ids=["keys", "empty stages", "merge"],
)
def test_the_emulator_notices_a_wait_that_is_left_out(monkeypatch, owner, method, case):
    """For keys that TMA has not written, for stages that are still read, for the state of the other consumer."""
    kept, wait_for, impatient = getattr(owner, method), hopper_emulator.Cta.wait_for, threading.local()

    def without_waits(*args):
        impatient.now = True  # this warp group alone: each is a thread
        try:
            return kept(*args)
        finally:
            impatient.now = False

    monkeypatch.setattr(hopper_emulator, "SECONDS", 2.0)
    monkeypatch.setattr(hopper_emulator, "TMA_DELAY", 0.05 if method == "__call__" else 0.0)
    monkeypatch.setattr(
        hopper_emulator.Cta, "wait_for", lambda *x: None if getattr(impatient, "now", False) else wait_for(*x)
    )
    monkeypatch.setattr(owner, method, without_waits)
    case = DIVIDED if case == "divided" else LONG
    with pytest.raises((AssertionError, TimeoutError, RuntimeError)):
        paged_evaluation.check(case, attend(case))


# --- compiled for a GPU


def paged_program(T=1, B=32, Hq=32, Hkv=8, D=128, Dv=None, page=64, dtype=jnp.bfloat16, **options):
    """A call over requests of up to 4096 keys, and the shapes of its arguments."""
    integers = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
    pages = lambda size: jax.ShapeDtypeStruct((8193, page, Hkv, size), dtype)
    batch = jflex.paged.PagedBatch(integers(B + 1), integers(B), integers(B, 4096 // page))
    call = functools.partial(jflex.paged_attention, **{"implementation": BACKEND, **options})
    cache = jflex.paged.PagedCache(pages(D), pages(Dv or D))
    return call, jax.ShapeDtypeStruct((B * T, Hq, D), dtype), cache, batch


def dense_program(T=1, B=8, Hq=32, Hkv=8, S=16384, D=128, Dv=None, dtype=jnp.bfloat16, lengths=False, **options):
    """A call over contiguous keys, and the shapes of its arguments."""
    array = lambda length, heads, size: jax.ShapeDtypeStruct((B, length, heads, size), dtype)
    options = {"implementation": BACKEND, **options}
    call = lambda q, k, v, *lengths: jflex.flex_attention(
        q, k, v, kv_lengths=lengths[0] if lengths else None, **options
    )
    given = [jax.ShapeDtypeStruct((B,), jnp.int32)] if lengths else []
    return call, array(T, Hq, D), array(S, Hkv, D), array(S, Hkv, Dv or D), *given


SLOPES = jnp.linspace(0.0, 1.0, 32)
WINDOW = lambda b, h, q, k: (q >= k) & (q - k < 256)
ALIBI = lambda s, b, h, q, k: s - SLOPES[h] * (q - k).astype(jnp.float32)
COMPILED = {
    "paged": (paged_program, {}),
    "paged_causal": (paged_program, {"T": 4, "mask_mod": jflex.masks.causal(), "return_lse": True}),
    "paged_alibi": (paged_program, {"score_mod": ALIBI}),
    "paged_window": (paged_program, {"T": 2, "mask_mod": WINDOW}),
    "paged_64": (paged_program, {"D": 64, "Hq": 16, "Hkv": 16, "dtype": jnp.float16}),
    "paged_192_128": (paged_program, {"D": 192, "Dv": 128}),
    "paged_256": (paged_program, {"D": 256}),
    "pages_of_8": (paged_program, {"page": 8}),
    "pages_of_16": (paged_program, {"page": 16}),
    "dense": (dense_program, {}),
    "dense_64": (dense_program, {"D": 64, "Hq": 16, "Hkv": 16, "B": 4}),
    "dense_softcap": (dense_program, {"score_mod": lambda s, b, h, q, k: 30 * jnp.tanh(s / 30)}),
    "dense_lengths": (dense_program, {"lengths": True, "score_mod": ALIBI, "mask_mod": WINDOW, "T": 4}),
}
KNOWN_SPILLS = {"paged_256": 84}


@NEEDS_011
@pytest.mark.skipif(gpu_compile.missing() is not None, reason="compiles for a GPU")
@pytest.mark.parametrize("name", COMPILED)
def test_spills_nothing(name):
    program, options = COMPILED[name]
    kernels = gpu_compile.compile_kernels(*program(**options))
    [found] = [x for x in kernels if "decode_sm90" in x.name]
    assert found.spill <= KNOWN_SPILLS.get(name, 0)
    assert found.tensor == "wgmma"
    assert found.shared <= smem.LIMIT
    merged_and_planned = {x.name for x in kernels} - {found.name}
    planned = {"jflex_paged_plan"} if "paged" in name or name.startswith("pages") or "lengths" in name else set()
    assert {"jflex_paged_merge", *planned} <= merged_and_planned
    assert bool(planned) == ("jflex_paged_plan" in merged_and_planned)  # without lengths and a mask, the host plans

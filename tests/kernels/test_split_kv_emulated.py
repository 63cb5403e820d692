"""The kernels for Hopper that split keys, in the emulator: few queries, requests over pages, latent vectors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jflex
from pallas_kernels.mosaic_gpu.decode import kernel
from pallas_kernels.mosaic_gpu.decode.step import DecodeStep
from pallas_kernels.mosaic_gpu.latent.step import LatentStep
from pallas_kernels.split_kv import items as hopper_items
from pallas_kernels.split_kv.work import RequestExtents
from tests.cases.decode_hopper_cases import (
    BY_NAME,
    DENSE,
    DIVIDED,
    HIDING,
    LATENT,
    LATENT_DIVIDED,
    LATENT_HIDING,
    PAGED,
    PROMPTS,
)
from tests.cases.paged_cases import PagedCase
from tests.support import evaluation, hopper_emulator, hopper_faults, paged_evaluation
from tests.support.hopper_emulator import emulated
from tests.support.rows import in_turns, tiers
from tests.support.specs import spec_of

BACKEND = "mosaic_gpu"
INTERPRETED = f"{BACKEND}-interpret"
LONG = PagedCase("hopper_long", (1,), (1600,), Hq=2, Hkv=2, D=128, page_size=64, dtype="bfloat16")
LONG_TILES = 20  # that the producer of a CTA loads, and more: a barrier of six stages passes a third phase


def contiguous(case, backend):
    """Out and lse of a dense case, without gradients."""
    x = jax.tree.map(jnp.asarray, evaluation.poisoned(case))
    return evaluation.Results(*evaluation.call(case, backend, x.query, x.key, x.value, x.score, x.mask, None))


def attend(case, seed=0, fill=lambda cache, table: cache):
    """Out and lse of a case in the emulator."""
    if not isinstance(case, PagedCase):
        with emulated():
            return contiguous(case, f"{BACKEND}-emulated")
    x, (cache, table) = paged_evaluation.draw(case), paged_evaluation.placed(case, seed)
    layer = paged_evaluation.layer_of(case)
    captured, batch = jax.tree.map(jnp.asarray, x.captured), paged_evaluation.batch_of(case, table)
    arrays = jnp.asarray(x.query), fill(cache, table), batch, captured
    with emulated():
        return paged_evaluation.call(case, INTERPRETED, *arrays, layer)


def check(case, found):
    """Fails unless out and lse are those of float64."""
    if isinstance(case, PagedCase):
        paged_evaluation.check(case, found)
    else:
        evaluation.compare_forward(case, found, evaluation.plain(case), evaluation.exact(case))


def same_bits(one, other):
    for x, y in zip(one, other, strict=True):
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))


# --- results


@tiers(
    default={"case": ["hopper_head_sizes_80_48_bfloat16", "latent_softcap_bfloat16"]},
    full={"case": [
        "dense_sinks", "dense_sees_nothing", "dense_bnth", "dense_lengths_window", "dense_shared_keys",
        "hopper_mixed_bfloat16", "hopper_pages_of_8_bfloat16", "hopper_padding_and_empty_bfloat16",
        "hopper_layers_float16", "latent_mixed_bfloat16", "latent_63_heads_bfloat16", "hopper_126_heads_bfloat16",
        "hopper_odd_sigmoid_bfloat16", "hopper_prompts_bfloat16", "hopper_prompt_alone_bfloat16",
        "hopper_prompt_bias_bfloat16", "hopper_prompt_pages_of_1_bfloat16", "dense_one_tile",
    ]},
)  # fmt: skip
@pytest.mark.parametrize("case", [*DENSE, *PAGED, *PROMPTS, *LATENT], ids=str)
def test_against_float64(case):
    check(case, attend(case))


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*DENSE, *PAGED, *PROMPTS], ids=str)
def test_on_a_gpu(case):
    """Latent vectors: see `tests/latent/test_mla.py`."""
    if isinstance(case, PagedCase):
        check(case, paged_evaluation.run(case, BACKEND))
    else:
        check(case, jax.jit(functools.partial(contiguous, case, BACKEND))())


@tiers(full={"name": "dense_shared_keys"}, rest="long")
@pytest.mark.parametrize("name", ["dense_alibi", "dense_shared_keys"])
def test_gradients_are_of_the_same_forward_pass(name):
    """The backward kernels take the lse of the decoding kernel."""
    case = BY_NAME[name]
    evaluation.check_gradients(case, f"{BACKEND}-emulated", evaluation.gradients_of(case))


@pytest.mark.full
@pytest.mark.parametrize("case", [DIVIDED, LATENT_DIVIDED], ids=str)
def test_where_pages_lie_changes_no_bit(case):
    same_bits(*(attend(case, seed) for seed in (0, 1)))


def nan_in_hidden_keys(value):
    """Fills some keys of each request that the window of all its queries hides."""

    def fill(cache, table):
        page_size, at = jax.tree.leaves(cache)[0].shape[1], np.arange(64, 128)
        for row in table:
            cache = jax.tree.map(lambda x, row=row: x.at[row[at // page_size], at % page_size].set(value), cache)
        return cache

    return fill


@pytest.mark.full
@pytest.mark.parametrize("case", [HIDING, LATENT_HIDING], ids=str)
def test_nan_that_a_window_hides(case):
    """The kernels of Triton repair what it reaches."""
    for x, y in zip(*(attend(case, fill=nan_in_hidden_keys(value)) for value in (np.nan, 0)), strict=True):
        assert np.isfinite(np.asarray(x, np.float32)).all()
        np.testing.assert_allclose(np.asarray(x, np.float32), np.asarray(y, np.float32), rtol=1e-2, atol=1e-2)


@pytest.mark.full
def test_nan_that_a_window_hides_in_contiguous_keys():
    rng, S = np.random.default_rng(2), 192
    q, k, v = (jnp.asarray(rng.normal(size=(1, n, h, 64)), jnp.bfloat16) for n, h in ((2, 4), (S, 2), (S, 2)))
    mask = jflex.with_offset(lambda b, h, i, j: (i >= j) & (i - j < 20), S - 2)
    options = {"mask_mod": mask, "return_lse": True, **paged_evaluation.options_of(INTERPRETED)}
    with emulated():
        attended = [
            jflex.flex_attention(q, *(x.at[:, 128:170].set(value) for x in (k, v)), **options) for value in (np.nan, 0)
        ]
    for x, y in zip(*attended, strict=True):
        assert np.isfinite(np.asarray(x, np.float32)).all()
        np.testing.assert_allclose(np.asarray(x, np.float32), np.asarray(y, np.float32), rtol=1e-2, atol=1e-2)


@pytest.mark.full
def test_sinks_join_latents_after_the_merge():
    case, sinks = LATENT_DIVIDED, jnp.linspace(-1.0, 2.0, LATENT_DIVIDED.Hq)
    x, (cache, table) = paged_evaluation.draw(case), paged_evaluation.placed(case)
    arrays = jnp.asarray(x.query), cache, paged_evaluation.batch_of(case, table)
    options = {"scale": case.scale, "mask_mod": jflex.masks.causal(), "return_lse": True}
    call = functools.partial(jflex.mla_attention, *arrays, **options, **paged_evaluation.options_of(INTERPRETED))
    with emulated():
        (out, lse), state = call(sinks=sinks), jflex.AttentionState(*call())
    right = jflex.with_sinks(state, sinks)
    np.testing.assert_allclose(out.astype(jnp.float32), right.out.astype(jnp.float32), rtol=1e-2, atol=1e-2)
    np.testing.assert_allclose(lse, right.lse, rtol=1e-6, atol=1e-6)


# --- order


@pytest.mark.full
@pytest.mark.parametrize("case", [DIVIDED, BY_NAME["dense_sinks"], LATENT_DIVIDED], ids=str)
def test_in_time_whatever_tma_takes(monkeypatch, case):
    monkeypatch.setattr(hopper_emulator, "TMA_IS_LATE", True)
    check(case, attend(case))


# What is not waited for, in which case and method; whether TMA is late; what is held until the method has run so often.
FAULTS = {
    "keys": (LONG, (DecodeStep, "__call__"), True, None, 1),
    "stages that are filled while read": (LONG, (kernel, "_load"), False, (DecodeStep, "__call__"), LONG_TILES),
    "latents": (LATENT_DIVIDED, (LatentStep, "_start_near_scores"), True, None, 1),
    "weights of the other warp group": (
        LATENT_DIVIDED, (LatentStep, "_add_received"), False, (LatentStep, "_publish"), 1
    ),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("name", FAULTS)
def test_the_emulator_notices_what_is_not_waited_for(monkeypatch, name):
    case, method, is_late, held, runs = FAULTS[name]
    monkeypatch.setattr(hopper_emulator, "TMA_IS_LATE", is_late)
    hopper_faults.leave_out_waits(monkeypatch, *method, held=held, runs=runs)
    with pytest.raises(AssertionError):
        check(case, attend(case))


# --- what CTAs compute


@pytest.mark.full
@in_turns
@pytest.mark.parametrize("lengths", [(4096,) * 8, (16384,), (64, 0, 4096, 700)])
@pytest.mark.parametrize("queries", [1, 4])
def test_items_of_the_host_are_those_of_the_kernel(lengths, queries):
    """Of lengths that are known, without a mask: items, splits, slots."""
    R, indptr = len(lengths), np.arange(len(lengths) + 1, dtype=np.int32) * queries
    config = jflex.Config(interpret=True)
    spec = spec_of(B=R, T=R * queries, S=max(lengths), Hq=32, Hkv=8).replace(config=config)
    work = hopper_items.work_of(16, 64, queries)
    extents = RequestExtents(indptr, np.array(lengths, np.int32))
    items, slots = hopper_items.items_on_host(spec, work, extents)
    planned = np.asarray(hopper_items.work_items(spec, work, RequestExtents(*map(jnp.asarray, extents)), ()))
    np.testing.assert_array_equal(planned[: len(items)], items)
    assert slots == 1 + max(items[:, 6].max(), -1)
    assert slots <= work.slots(spec)

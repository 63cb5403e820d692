"""The Hopper kernels on a CPU, by `tests.support.hopper_emulator`: results and gradients of the table of cases."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jflex
from jflex.block_mask import limits
from pallas_kernels.mosaic_gpu import smem
from pallas_kernels.mosaic_gpu.schedule import MAX_STATIC_TILES
from tests.cases import mask_pairs as masks
from tests.cases.hopper_cases import HOPPER, LIMITED, MANY, MORE_GROUPS, ONE_PASS, TWO_GROUPS
from tests.cases.table import Case, Sizes
from tests.kernels.test_hopper import WIDE_TILES, check_wide_tiles
from tests.support import evaluation, hopper_emulator
from tests.support.hopper_emulator import emulated
from tests.support.rows import tiers

# So many tiles that they are drawn from a counter.
DRAWN = Case("two_groups_drawn", None, masks.causal, Sizes(B=1, T=128 * MAX_STATIC_TILES + 8, Hq=1, D=64), block=128,
             dtype="bfloat16")  # fmt: skip
# Those of many tiles are left out: with two CTAs, each computes several tiles anyway.
EMULATED = [case for case in HOPPER if not case.unsupported and case not in MANY]


@tiers(
    default={"case": "head_size_80"},
    full={"case": [
        "bnth_shared_keys", "length_many_sinks", "narrow_cut_to_one", "two_groups_small", "two_groups_drawn",
        "shortest", "shortest_hidden_key", "two_groups_192_128",
    ]},
)  # fmt: skip
@pytest.mark.parametrize("case", [*EMULATED, TWO_GROUPS, DRAWN], ids=str)
def test_results_and_gradients(case):
    evaluation.check_forward(case, "mosaic_gpu-emulated")
    evaluation.check_gradients(case, "mosaic_gpu-emulated", evaluation.gradients_of(case))


@tiers(
    full={"case": ["alibi_like", "range_of_window", "plane_no_mask", "causal_mask_mod", "shortest_hidden_key"]},
    rest="long",
)
@pytest.mark.parametrize("groups", ["three", "four"])
@pytest.mark.parametrize("case", [case for case in MORE_GROUPS if case in EMULATED], ids=str)
def test_three_and_four_warp_groups(case, groups):
    evaluation.check_forward(case, f"mosaic_gpu-emulated_{groups}_groups")


@pytest.mark.full
@pytest.mark.parametrize(("tiles", "length", "size"), WIDE_TILES)
def test_wide_tiles_walk_the_range_of_a_mask_in_place_of_its_lists(monkeypatch, tiles, length, size):
    check_wide_tiles(monkeypatch, "mosaic_gpu-emulated", tiles, length, size)


@tiers(full={"case": ["negative_scale", "two_groups_192_128", "length_sees_nothing"]}, rest="long")
@pytest.mark.parametrize("case", [case for case in ONE_PASS if case in EMULATED], ids=str)
def test_gradients_in_one_pass(case):
    evaluation.check_gradients(case, "mosaic_gpu-emulated_one_pass", evaluation.gradients_of(case))


@tiers(full={"case": ["limits", "limits_unknown"], "one_pass": [True]}, rest="long")
@pytest.mark.parametrize("one_pass", [False, True])
@pytest.mark.parametrize("case", LIMITED, ids=str)
def test_limits_of_rows(monkeypatch, case, one_pass):
    monkeypatch.setattr(limits, "MIN_ELEMENTS", 1)
    evaluation.check_forward(case, "mosaic_gpu-emulated")
    evaluation.check_gradients(case, f"mosaic_gpu-emulated{'_one_pass' * one_pass}", evaluation.gradients_of(case))


@tiers(full={"case": ["head_size_80", "bnth_shared_keys"], "is_late": [True]}, rest="long")
@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("case", evaluation.having_tangents([*EMULATED, TWO_GROUPS, DRAWN, *LIMITED]), ids=str)
def test_tangents(monkeypatch, case, is_late):
    monkeypatch.setattr(limits, "MIN_ELEMENTS", 1)
    monkeypatch.setattr(hopper_emulator, "TMA_IS_LATE", is_late)
    evaluation.check_tangents(case, "mosaic_gpu-emulated")


@pytest.mark.full
def test_the_emulator_notices_arrivals_of_two_phases(monkeypatch):
    """At a barrier these are an illegal instruction: the tangent kernel ended while queries were on their way."""
    monkeypatch.setattr(hopper_emulator, "TMA_IS_LATE", True)
    barrier = hopper_emulator.Barrier(count=1, arrivals=2, cta=hopper_emulator.Cta())
    source, target = (hopper_emulator.Memory(np.zeros(8)) for _ in range(2))
    for _ in range(2):
        hopper_emulator.copy_to_smem(source, target, barrier)
    with pytest.raises(AssertionError, match="arrivals of two phases at once"):
        hopper_emulator.arrive(barrier)
    assert barrier.is_past(0, 1)
    hopper_emulator.arrive(barrier)  # of the next phase


@pytest.mark.full
def test_tangents_of_values_that_are_not_finite():
    """Two causal documents: NaN of the first in values and their tangents reaches no row of the second."""
    x, moved = jax.random.normal(jax.random.key(0), (2, 3, 1, 256, 2, 64), jnp.bfloat16)
    mask = lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & ((q_idx < 100) == (kv_idx < 100))
    blocks = jflex.create_block_mask(mask, None, None, 256, 256)
    attend = lambda *qkv: jflex.flex_attention(
        *qkv, block_mask=blocks, implementation="mosaic_gpu", config=jflex.Config(forward_mode=True, interpret=True)
    )
    with emulated():
        run = lambda at: jax.jvp(attend, tuple(x.at[at].set(jnp.nan)), tuple(moved.at[at].set(jnp.nan)))[1]
        clean, found = run((2, 0, slice(0, 0))), run((2, 0, slice(0, 3)))
    np.testing.assert_allclose(*(np.asarray(d_out[:, 100:], np.float32) for d_out in (found, clean)), atol=2e-2)
    assert np.isnan(found[:, 3:100]).all()


def root_of_distance(q, k):
    return jnp.sqrt((q - k).astype(jnp.float32) + 0.5)


# Mods, the length, and `normalize`: what a logistic must not have of the element that it shares a reciprocal with.
PAIRS = {
    "padding_key": (lambda s, b, h, q, k: jax.nn.sigmoid(s * jnp.log(s)), 129, "none"),  # NaN where s is 0
    "dropped_by_select": (
        lambda s, b, h, q, k: jnp.where(q >= k, jax.nn.sigmoid(s * root_of_distance(q, k)), -1.0), 128, "softmax"
    ),
    "logarithm": (lambda s, b, h, q, k: jnp.log(jax.nn.sigmoid(10 * s - 100)), 128, "softmax"),
    "factor": (lambda s, b, h, q, k: jnp.exp(100 - 20 * s) * jax.nn.sigmoid(20 * s - 100), 128, "softmax"),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize(("mod", "length", "normalize"), PAIRS.values(), ids=PAIRS)
def test_logistics_are_those_of_single_elements(mod, length, normalize):
    """Of output and d_value: the others are NaN by the rules of JAX for a select."""
    rng = np.random.default_rng(0)
    q, k, v, d_out = (jnp.asarray(np.abs(rng.normal(size=(1, length, 1, 64))), jnp.bfloat16) for _ in range(4))

    def run(implementation):
        attend = lambda v: jflex.flex_attention(q, k, v, mod, normalize=normalize, implementation=implementation)
        out, pull = jax.vjp(attend, v)
        return out, *pull(d_out)

    with emulated():
        found = run("mosaic_gpu")
    for x, y in zip(found, run("reference"), strict=True):
        np.testing.assert_allclose(np.asarray(x, np.float32), np.asarray(y, np.float32), rtol=2e-2, atol=2e-2)


@pytest.mark.full
@pytest.mark.parametrize(("method", "error"), [("wait", AssertionError), ("release", TimeoutError)])
def test_the_emulator_notices_a_barrier_that_is_left_out(monkeypatch, method, error):
    """Without the wait a consumer reads what TMA has not written; without the release the producer waits for ever."""
    evaluation.everything.cache_clear()
    monkeypatch.setattr(smem.Ring, method, lambda *_: None)
    if method == "wait":
        monkeypatch.setattr(hopper_emulator, "TMA_IS_LATE", True)
    else:
        monkeypatch.setattr(hopper_emulator, "SECONDS", 2.0)
    with pytest.raises(error):
        evaluation.check_forward(TWO_GROUPS, "mosaic_gpu-emulated")
    evaluation.everything.cache_clear()

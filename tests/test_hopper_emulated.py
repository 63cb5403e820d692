"""The Hopper kernels on a CPU, by `tests.hopper_emulator`: results and gradients of the table of cases."""

import threading

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mosaic_gpu import pipeline
from tests import evaluation, hopper_emulator
from tests.hopper_cases import HOPPER, MANY, ONE_PASS
from tests.hopper_emulator import Barrier, Cta, Memory

# What `.ci/run` takes; `-m long` takes all others, in ten minutes.
USUAL = {
    "bnth", "causal_dropout_repaired", "even_bias", "head_sizes_16_40", "length_many_sinks",
    "log_as_weights", "narrow_cut_wide", "negative_scale", "plane_gradient", "rows_that_see_nothing", "sigmoid",
    "sinks_bounded", "slopes", "softcap_far",
    "two_groups_causal", "two_groups_dropout", "two_groups_table",
}  # fmt: skip
USUAL_IN_ONE_PASS = {"negative_scale"}


def marked(cases, usual):
    """Cases for the emulator. Those of many tiles are left out: with two CTAs, each computes several tiles anyway."""
    taken = [case for case in cases if not case.unsupported and case not in MANY]
    return [pytest.param(x, id=str(x), marks=() if x.name in usual else pytest.mark.long) for x in taken]


@pytest.mark.parametrize("case", marked(HOPPER, USUAL))
def test_results_and_gradients(case):
    evaluation.check_forward(case, "mosaic_gpu-emulated")
    evaluation.check_gradients(case, "mosaic_gpu-emulated", ("query", "key", "value", *evaluation.draw(case).floats()))


@pytest.mark.parametrize("case", marked(ONE_PASS, USUAL_IN_ONE_PASS))
def test_gradients_in_one_pass(case):
    names = ("query", "key", "value", *evaluation.draw(case).floats())
    evaluation.check_gradients(case, "mosaic_gpu-emulated_one_pass", names)


def case_named(name):
    return next(case for case in HOPPER if case.name == name)


@pytest.mark.parametrize(("method", "error"), [("wait", AssertionError), ("release", TimeoutError)])
def test_the_emulator_notices_a_barrier_that_is_left_out(monkeypatch, method, error):
    """Without the wait a consumer reads what TMA has not written; without the release the producer waits for ever."""
    evaluation.everything.cache_clear()
    monkeypatch.setattr(hopper_emulator, "SECONDS", 2.0)
    monkeypatch.setattr(pipeline.Ring, method, lambda *_: None)
    if method == "wait":  # and TMA takes its time
        monkeypatch.setattr(hopper_emulator, "TMA_DELAY", 0.05)
    with pytest.raises(error):
        evaluation.check_forward(case_named("two_groups_causal"), "mosaic_gpu-emulated")
    evaluation.everything.cache_clear()


def test_tma_fills_with_zeros_and_drops_what_is_outside():
    memory = Memory(np.arange(12.0).reshape(3, 4))
    assert memory.at[1:3, 2][:].tolist() == [6.0, 10.0]
    tail = Memory(memory.array, ((2, 2, True), (3, 2, True)))
    assert tail.read().tolist() == [[11.0, 0.0], [0.0, 0.0]]
    tail.write(jnp.full((2, 2), 5.0), add=True)
    assert memory.array.sum() == np.arange(12.0).sum() + 5.0
    assert Memory(memory.array).T.at[1].read().tolist() == [1.0, 5.0, 9.0]


def test_a_phase_of_a_barrier_ends_with_its_last_arrival():
    cta, passed = Cta(), []
    barrier = Barrier(2, 2, cta)

    def consume():
        hopper_emulator.here.group = 0
        for phase in range(2):
            hopper_emulator.wait(barrier.at[1])
            passed.append(phase)

    thread = threading.Thread(target=consume)
    thread.start()
    for arrivals in range(4):
        hopper_emulator.arrive(barrier.at[1])
        if arrivals % 2:
            thread.join(0.2 if arrivals < 3 else None)
        assert len(passed) <= (arrivals + 1) // 2
    assert passed == [0, 1]

"""Random mods against float64: a short run by default, a long one with `-m long`, both kernels with `-m gpu`."""

import dataclasses
import sys

import jax
import numpy as np
import pytest

from tests.support import drawn_arrays, gpu_compile
from tests.support.random_mods import judge
from tests.support.random_mods.__main__ import main
from tests.support.random_mods.case import Case, draw_case
from tests.support.random_mods.program import Capture, Program, Step
from tests.support.random_mods.run import reason_not_to_run, run

SHORT, LONG, ON_GPU = range(2, 4), range(1000), range(60)
COMPILED = [1037]  # what cotangents depend on was held twice by Triton, in more shared memory than there is


# One test for both, which share what is expected.
@pytest.mark.full
@pytest.mark.parametrize("seed", SHORT)
def test_short(seed):
    check(seed, "xla", "triton-interpret", profile="quick")


@pytest.mark.long
@pytest.mark.parametrize("seed", LONG)
def test_long(seed):
    check(seed, "xla", "triton-interpret", profile="small")
    if seed % 25 == 24:
        jax.clear_caches()
        drawn_arrays.draw.cache_clear()


@pytest.mark.gpu
@pytest.mark.parametrize("seed", ON_GPU)
@pytest.mark.parametrize("backend", ["triton", "mosaic_gpu"])
def test_on_gpu(seed, backend):
    check(seed, backend)


@pytest.mark.long
@pytest.mark.skipif(gpu_compile.missing() is not None, reason="compiles for a GPU")
@pytest.mark.parametrize("seed", COMPILED)
def test_compiles(seed):
    check(seed, "triton-compile", profile="hopper")


def check(seed, *backends, profile=None):
    results = [run(seed, backend, profile) for backend in backends]
    failed = [result for result in results if result["verdict"] not in ("passed", "refused", "miscompiled")]
    messages = [f"{result['backend']}: {result['message']}" for result in failed]
    assert not failed, "\n".join([*messages, failed[0]["report"]])


# So many of 8 mods may be refused, lest the runs say nothing: one has a derivative that scatters into a captured array,
# and Mosaic GPU computes in no small integers.
MOST_REFUSED = {"triton": 1, "mosaic_gpu": 2}


@pytest.mark.full
@pytest.mark.parametrize("backend", MOST_REFUSED)
def test_few_are_refused(backend):
    if backend == "mosaic_gpu" and jax.__version_info__ < (0, 11):
        pytest.skip("Mosaic GPU is used from JAX 0.11 on")
    with gpu_compile.absent_gpu():
        reasons = {seed: reason_not_to_run(seed, backend) for seed in range(8)}
    refused = {seed: reason for seed, reason in reasons.items() if reason is not None}
    assert len(refused) <= MOST_REFUSED[backend], refused


def test_a_mod_is_a_function_of_its_seed():
    assert draw_case(5) == draw_case(5)
    assert draw_case(5).report() == draw_case(5).report() != draw_case(6).report()


@pytest.mark.full
def test_most_operations_are_drawn():
    from tests.support.random_mods.operations import SCORE_OPERATIONS

    sources = "".join(draw_case(seed).report() for seed in range(400))
    assert "{" not in sources.replace("{'seed'", "").split("make", 1)[1].split("#")[0]
    words = ["stop_gradient", "lax.cond", "lax.switch", "fori_loop", "lax.scan", "astype(G)", "jnp.dot", "//", "<<"]
    words += [f"{name}(" for name in ("bent", "pulled", "stepped", "doubly", "length", "looked", "halved")]
    assert not [word for word in words if sources.count(word) < 10]
    assert len(SCORE_OPERATIONS) > 150


STEPS = (
    Step("x0", "f", "{0}[q_idx]", ("c0",)),
    Step("x1", "f", "jnp.tanh({0})", ("score",)),
    Step("x2", "f", "{0} + lax.stop_gradient({0} * {1})", ("x1", "x0")),
    Step("x3", "f", "bent({0}) + {1}", ("x2", "score")),
)
KNOWN = Case(0, draw_case(4).sizes, Program("score", "bfloat16", (Capture("c0", ("T",), "f"),), STEPS, "x3"))
FAULTS = {
    "stop_gradient passed over": ("lax.stop_gradient({0} * {1})", "{0} * {1}"),
    "rule passed over": ("bent({0})", "jnp.tanh({0})"),
    "another index": ("{0}[q_idx]", "{0}[q_idx - 1]"),
    "one position is wrong": ("+ {1}", "+ jnp.where((q_idx == 3) & (kv_idx == 7), {1} * 1.001, {1})"),
}


def faulty(case, fault):
    old, new = FAULTS[fault]
    steps = [dataclasses.replace(step, text=step.text.replace(old, new)) for step in case.score.steps]
    return dataclasses.replace(case, score=dataclasses.replace(case.score, steps=tuple(steps)))


def messages_of(case, found):
    wanted = judge.expected(case)
    return judge.compare(found, wanted.by_plain, wanted.right, wanted.moves(8.0, 4))


@pytest.mark.full
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_seen(fault):
    assert messages_of(KNOWN, judge.by_library(faulty(KNOWN, fault), "xla"))


@pytest.mark.full
def test_not_a_number_is_seen():
    found = judge.by_library(KNOWN, "xla")
    assert not messages_of(KNOWN, found)
    out = np.where(np.arange(found.out.size).reshape(found.out.shape) == 5, np.nan, found.out)
    assert messages_of(KNOWN, found._replace(out=out))


@pytest.mark.full
def test_command_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["random_mods", "--seeds", "2", "--profile", "quick"])
    assert main() == 0
    printed = capsys.readouterr().out
    assert "def score_mod(score, b, h, q_idx, kv_idx):" in printed
    assert printed.endswith("xla: 1 mods, {'passed': 1}\n")

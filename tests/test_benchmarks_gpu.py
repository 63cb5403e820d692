"""The questions to a GPU, asked of a CPU at tiny sizes and without processes of their own."""

import importlib
import subprocess

import jax
import numpy as np
import pytest

from benchmarks import children, environment, numerics
from benchmarks.gpu import asking, block_mask, first_call, memory, numerics_cases
from benchmarks.gpu.asking import Question
from benchmarks.results import Figure
from tests import oracle


def ask_here(question: Question):
    if "torch" in question.module:
        raise ImportError("No module named 'torch'")
    # jax.nn promotes. Each thread has such settings of its own, so they are set here.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return getattr(importlib.import_module(question.module), question.function)(**question.arguments)


def by_name(figures: list[Figure]) -> dict[str, Figure]:
    found = {figure.name: figure for figure in figures}
    assert len(found) == len(figures)
    return found


def test_memory():
    figures, remarks = memory.measure(memory.Sizes((256, 512), 2, 16, "xla"), ask_here)
    found = by_name(figures)
    planned = [found[f"planned by XLA, jflex triton, S {length}"].value for length in (256, 512)]
    assert planned[1] > found["of which the results themselves, out and three gradients, S 512"].value
    growth = found["bytes per token relative to S 256, planned by XLA, jflex triton, S 512"]
    assert growth.at_most == 1.1
    assert growth.value == pytest.approx(planned[1] / planned[0] / 2, abs=0.1)
    assert remarks == [f"torch FlexAttention at S {x} is left out: No module named 'torch'" for x in (256, 512)]


def test_block_mask():
    figures, remarks = block_mask.measure(block_mask.Sizes(512, 3), ask_here)
    found = by_name(figures)
    assert found["time, jflex, documents"].runs == 3
    assert found["time, jflex, causal"].at_most == 100
    assert found["planned by XLA, jflex, causal"].at_most == 1000
    assert found["sparsity, jflex, causal"].value == 37.5
    assert len(remarks) == 4


def test_first_call(monkeypatch):
    # The persistent cache is a setting of the whole process, and this one goes on.
    monkeypatch.setattr(first_call, "_use_cache", lambda jax, folder: {"hits": 0, "misses": 0})
    figures, remarks = first_call.measure(first_call.Sizes(128, 1, 16, "xla"), ask_here)
    found = by_name(figures)
    steps = ("start of Python", "import", "start of the GPU and inputs", "create_block_mask", "trace and lower",
             "compile", "run")  # fmt: skip
    for peer in ("jflex", "jflex, filling JAX's persistent cache", "jflex, reading JAX's persistent cache"):
        parts = sum(found[f"{peer}: {step}"].value for step in steps)
        assert parts == pytest.approx(found[f"{peer}: in all"].value, abs=0.01)
    assert "jflex, reading JAX's persistent cache: 0 hits, 0 misses" in remarks


def test_numerics():
    sizes = numerics.Sizes(64, 2, (16,), ("bfloat16",), ("jflex xla", "jax.nn xla", "torch FlexAttention"))
    figures, remarks = numerics.measure(sizes, ask_here)
    found = by_name(figures)
    for variant in numerics.VARIANTS:
        assert 1e-5 < found[f"out, RMSE, {variant}, bfloat16, D 16, jflex xla"].value < 5e-3
        assert 1e-4 < found[f"gradients, RMSE, {variant}, bfloat16, D 16, jflex xla"].value < 2e-2
    assert "out, RMSE, causal, bfloat16, D 16, jax.nn xla" in found
    assert "jax.nn xla; softcap: NotImplementedError: there is no soft capping." in remarks
    assert any("torch FlexAttention (4 of 4) is left out" in remark for remark in remarks)
    assert len(numerics.table(figures)) == 2 * (3 + len(numerics.VARIANTS))


def test_numerics_are_told_relative_to_torch():
    errors = lambda rmse: {name: numerics_cases.Errors(rmse, rmse, 1.0) for name in numerics_cases.RESULTS}
    by_peer = {
        "jflex triton": {"a": errors(1.0), "b": errors(2.0), "c": errors(9.0)},
        "torch FlexAttention": {"a": errors(2.0), "b": errors(2.0)},
    }
    figures = numerics._summary(by_peer)
    assert [(figure.value, figure.runs) for figure in figures] == [(0.75, 2), (0.75, 2)]


@pytest.mark.parametrize("variant", numerics_cases.VARIANTS)
def test_exact_attention_is_that_of_the_oracle(variant: str, tmp_path):
    case = numerics_cases.Case(variant, "float32", 8, 32, 2)
    [path] = numerics_cases.prepare([case], tmp_path)
    arrays = numerics_cases.load(path)
    query, key, value, cotangent = (arrays[name].astype(np.float64) for name in numerics_cases.INPUTS)
    scores = {
        "alibi": oracle.Score(lambda s, b, h, q, k, c: s + c["slopes"][h] * (k - q)),
        "softcap": oracle.Score(
            lambda s, b, h, q, k, c: numerics_cases.CAP * np.tanh(s / numerics_cases.CAP),
            lambda s, b, h, q, k, c: 1 - np.tanh(s / numerics_cases.CAP) ** 2,
        ),
    }
    mask = None if variant == "noop" else lambda b, h, q, k, c: q >= k
    captures = {"slopes": numerics_cases.slopes(2)}
    score, scale = scores.get(variant), case.D**-0.5
    found = oracle.forward(query, key, value, scale, score, mask, captures)
    pulled = oracle.gradients(query, key, value, scale, score, found, captures, cotangent, np.zeros_like(found.lse))
    for name, expected in zip(numerics_cases.RESULTS, (found.out, *pulled[:3]), strict=True):
        np.testing.assert_allclose(arrays[name], expected, rtol=1e-10, atol=1e-12)


def test_a_child_that_fails_becomes_a_remark():
    ask = lambda argument: Question(str(argument), "benchmarks.environment", "results_folder", argument)
    found, remarks = asking.answers([ask({"device": "NVIDIA L4"}), ask({"device": 3})])
    assert found == {"{'device': 'NVIDIA L4'}": "nvidia-l4"}
    assert remarks == ["{'device': 3} is left out: TypeError: argument of type 'int' is not iterable"]


def test_a_child_that_does_not_end_is_ended():
    with pytest.raises(RuntimeError, match=r"it ran for 0\.01 s"):
        children.called("benchmarks.environment", "describe", {}, {}, 0.01)


def test_facts_of_the_gpu(monkeypatch):
    text = "NVIDIA H200, 580.159.04, 1650 MHz, 1980 MHz, 3201 MHz, 700.00 W\nNVIDIA H200, the second one\n"
    done = subprocess.CompletedProcess([], 0, text)
    monkeypatch.setattr(subprocess, "run", lambda *words, **options: done)
    facts = environment.gpu_facts()
    assert facts["device"] == "NVIDIA H200"
    assert facts["power.limit"] == "700.00 W"
    assert environment.results_folder(facts["device"]) == "h200"


def test_without_a_gpu_there_are_no_facts(monkeypatch):
    def missing(*words, **options):
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(subprocess, "run", missing)
    assert environment.gpu_facts() == {}

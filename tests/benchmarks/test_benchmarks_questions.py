"""Questions to a CPU and a GPU, at tiny sizes; those to a GPU are answered here and by a CPU."""

import importlib
import subprocess

import jax
import numpy as np
import pytest

from benchmarks import environment
from benchmarks.__main__ import main, parse
from benchmarks.questions import gpu, numerics, question
from benchmarks.questions.question import Measured, Question
from benchmarks.results import schema
from benchmarks.results.schema import Record
from tests.support import oracle


def run_here(job):
    if job.function.startswith("torch"):
        raise ImportError("No module named 'torch'")
    # jax.nn promotes. Each thread has such settings of its own, so they are set here.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return getattr(importlib.import_module(job.module), job.function)(**job.arguments)


def by_name(records: list[Record]) -> dict[str, Record]:
    found = {record.name: record for record in records}
    assert len(found) == len(records)
    return found


def value(records: dict[str, Record], name: str) -> float:
    return records[name].value.median


def test_first_call(monkeypatch):
    # The persistent cache is a setting of the whole process, and this one goes on.
    monkeypatch.setattr(gpu, "use_cache", lambda folder: None)
    records, remarks, *_ = gpu.first_call(128, 1, 16, "xla", "reference", run_here)
    found = by_name(records)
    caches = ("filling", "reading")
    cached = [f"{peer}, {x} JAX's persistent cache" for peer in ("jflex", "jflex reference") for x in caches]
    for peer in ("jflex", *cached):
        total = value(found, f"{peer}: in all")
        parts = [x.value.median for x in records if x.name.startswith(f"{peer}: ")]
        assert sum(parts) - value(found, f"{peer}: second call") == pytest.approx(2 * total, abs=0.01)
    ratios = [f"trace, lower, compile and run, reference over xla, {x} JAX's persistent cache" for x in caches]
    assert all(value(found, name) > 0 for name in ratios)
    assert remarks == [
        f"torch FlexAttention, {x} is left out: No module named 'torch'" for x in ("empty caches", "reading its caches")
    ]


def test_eight_bits(monkeypatch):
    """At a small size: bfloat16 is best, a scale of each token is not worse than one."""
    monkeypatch.setattr(numerics, "DTYPES", ("float8_e4m3fn",))
    records, remarks, *_ = numerics.eight_bits(512, 3, run_here)
    found = by_name(records)
    assert not remarks
    of = lambda cache, what: value(found, f"keys, {cache}: {what}")
    measures = list(numerics.UNITS)
    token, one = numerics.SCALES["token"], numerics.SCALES["tensor"]
    for name in numerics.DTYPES:
        for what in measures[:2]:
            assert of("bfloat16, paged", what) > of(f"{name}, {token}, paged", what) > 20
            assert of(f"{name}, {token}, paged", what) > of(f"{name}, {one}, paged", what) - 1
        assert abs(of(f"{name}, {token}, paged", measures[4]) - of("float64", measures[4])) < 2
        assert of(f"{name}, {token}, paged", measures[2]) < 7
    latent = ("bfloat16", "float8_e4m3fn, a scale for each token and 128 columns")
    ratios = [value(found, f"latent vectors, {x}, paged: {measures[0]}") for x in latent]
    assert ratios[0] > 50 > ratios[1] > 30


def test_the_needle_is_what_float64_finds():
    x = numerics.haystack(512, 3)
    out, weights = numerics.exact(x)
    s = np.einsum("nhd,shd->nhs", x.query.astype(np.float64), x.key) * 128**-0.5
    assert (s[:3].argmax(-1) == x.places).all()
    np.testing.assert_allclose(s[:3].max(-1), 14, rtol=0.01)
    arrays = (a[None].astype(np.float64) for a in (x.query, x.key, x.value))
    right = oracle.forward(*arrays, 128**-0.5, None, None, {})
    np.testing.assert_allclose(out, right.out[0], rtol=1e-10, atol=1e-12)
    assert (weights > 0.99).all()


def answered(tmp_path, parts: list[Measured], *words: str) -> schema.ResultFile:
    one = Question("gpu", "one", "a title")
    question.answer(one, lambda: iter(parts), parse(["gpu", "--out", str(tmp_path), *words]))
    result = schema.read(tmp_path / "one.json")
    assert result is not None
    return result


def test_a_question_is_written_after_each_part(tmp_path, capsys):
    it, other = Record.single("it", 3.0, "MB"), Record.single("other", 1.0, "s")
    parts = [Measured([it], ["a remark"]), Measured([other], about={"title": "another"}, machine={"devices": 2})]
    result = answered(tmp_path, parts)
    assert result.records == (it, other)
    assert (result.about["title"], result.about["remarks"]) == ("another", ["a remark"])
    assert result.about["machine"]["devices"] == 2
    assert "it: 3 MB\n" in capsys.readouterr().out
    assert answered(tmp_path, [Measured([other])]).records == (other,)


def test_earlier_records_stay_with_add(tmp_path):
    """A ratio and a remark of a case that is measured again do not."""
    single = lambda *names: [Record.single(name, 1.0, "s") for name in names]
    first = answered(tmp_path, [Measured(single("a, x: time", "a: ratio", "b: ratio"), ["a, y is left out", "b"])])
    again = answered(tmp_path, [Measured(single("a, x: time"), [], "a", ": ratio")], "--add")
    assert [x.name for x in again.records] == ["b: ratio", "a, x: time"]
    assert again.about["remarks"] == ["b"]
    assert again.about["before"] == [{x: first.about[x] for x in ("date", "command", "commit")}]


def test_wrong_commands(monkeypatch, capsys):
    for words, message in (
        (["gpu", "two"], "unknown: two; known are first_call"),
        (["engine", "peers"], "unknown: peers; known are clients, launches, users, transformers"),
        (["engine", "--cache-dtype", "fp8"], "invalid choice: 'fp8'"),
        (["bars"], "invalid choice: 'bars'"),
    ):
        with pytest.raises(SystemExit):
            main(words)
        assert message in capsys.readouterr().err
    monkeypatch.setattr(question, "gpu_facts", dict)
    with pytest.raises(SystemExit, match="`nvidia-smi` finds no GPU"):
        main(["engine"])


def test_facts_of_the_gpu(monkeypatch):
    text = "NVIDIA H200, 580.159.04, 1650 MHz, 1980 MHz, 3201 MHz, 700.00 W\nNVIDIA H200, the second one\n"
    monkeypatch.setattr(subprocess, "run", lambda *words, **options: subprocess.CompletedProcess([], 0, text))
    facts = environment.gpu_facts()
    assert (facts["device"], facts["power.limit"]) == ("NVIDIA H200", "700.00 W")
    assert environment.results_folder(facts["device"]) == "h200"

    def missing(*words, **options):
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(subprocess, "run", missing)
    assert environment.gpu_facts() == {}


def test_clocks_are_those_of_the_busy_gpu(monkeypatch, tmp_path):
    script = tmp_path / "nvidia-smi"
    lines = ("97, 1980, 3201, 400.5, 50", "[N/A], 1, 1, 1, 1", "3, 345, 3201, 80, 30", "99, 1965, 3201, 600.5, 52")
    script.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines))
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with environment.ClockWatch() as watch:
        watch._process.wait()
        assert watch.seen()["clocks.sm (MHz)"] == [1965.0, 1972.5, 1980.0]

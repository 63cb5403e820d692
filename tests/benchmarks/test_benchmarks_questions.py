"""Questions to a CPU and to GPUs, at tiny sizes; those to a GPU are answered here and by a CPU."""

import importlib

import jax
import pytest

from benchmarks import environment
from benchmarks.__main__ import main, parse
from benchmarks.questions import context, gpu, numerics, question
from benchmarks.questions.question import Measured, Question
from benchmarks.results import schema
from benchmarks.results.schema import Record


def run_here(job):
    if job.function.startswith("torch"):
        raise ImportError("No module named 'torch'")
    # jax.nn promotes. Each thread has such settings of its own, so they are set here.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return getattr(importlib.import_module(job.module), job.function)(**job.arguments)


def by_name(records: list[Record]) -> dict[str, float]:
    found = {record.name: record.value.median for record in records}
    assert len(found) == len(records)
    return found


def test_first_call(monkeypatch):
    # The persistent cache is a setting of the whole process, and this one goes on.
    monkeypatch.setattr(gpu, "use_cache", lambda folder: None)
    records, remarks, *_ = gpu.first_call(128, 1, 16, "xla", "reference", run_here)
    found, caches = by_name(records), ("filling", "reading")
    cached = [f"{peer}, {x} JAX's persistent cache" for peer in ("jflex", "jflex reference") for x in caches]
    for peer in ("jflex", *cached):
        parts = [seconds for name, seconds in found.items() if name.startswith(f"{peer}: ")]
        assert sum(parts) - found[f"{peer}: second call"] == pytest.approx(2 * found[f"{peer}: in all"], abs=0.01)
    assert all(found[f"trace, lower, compile and run, reference over xla, {x} JAX's persistent cache"] for x in caches)
    assert [x.partition(" is left out: ")[2] for x in remarks] == ["No module named 'torch'"] * 2


@pytest.mark.long
def test_eight_bits(monkeypatch):
    """At a small size: bfloat16 is best, a scale of each token is not worse than one."""
    monkeypatch.setattr(numerics, "DTYPES", ("int8",))
    records, remarks, *_ = numerics.eight_bits(512, 3, run_here)
    found = by_name(records)
    assert not remarks
    of = lambda cache, what: found[f"keys, {cache}: {what}"]
    measures, token, one = list(numerics.UNITS), numerics.SCALES["token"], numerics.SCALES["tensor"]
    for what in measures[:2]:
        assert of("bfloat16, paged", what) > of(f"int8, {token}, paged", what) > 20
        assert of(f"int8, {token}, paged", what) > of(f"int8, {one}, paged", what) - 1
    assert abs(of(f"int8, {token}, paged", measures[4]) - of("float64", measures[4])) < 2
    assert of(f"int8, {token}, paged", measures[2]) < 7
    latent = ("bfloat16", "float8_e4m3fn, a scale for each token and 128 columns")
    ratios = [found[f"latent vectors, {x}, paged: {measures[0]}"] for x in latent]
    assert ratios[0] > 50 > ratios[1] > 30


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices; tests/conftest.py simulates them")
@pytest.mark.long
def test_several_devices_beside_one(tmp_path):
    sizes = ("length=512", "heads=4", "kv-heads=2", "head-size=16", "documents=3", "implementation=xla", "runs=2")
    tiny = ["context", *(f"--{size}" for size in sizes), "--devices=2", f"--out={tmp_path}"]
    main([*tiny, "--masks=causal", "--strategies=ring", "--orders=balanced"])
    main([*tiny, "--masks=documents", "--strategies=all_gather", "--orders=natural", "--add"])
    result = schema.read(tmp_path / "context.json")
    assert result.about["machine"]["devices"] == 2
    assert "B 1, S 512, H 4/2, D 16" in result.about["title"]
    assert not result.about["remarks"]  # of an output that is wrong, say
    found = by_name(result.records)
    for case, how in (("causal", "ring, balanced"), ("documents", "all_gather, natural")):
        for direction in context.DIRECTIONS:
            assert found[f"{case}, {direction}, one GPU: time"] > 0
            assert found[f"{case}, {direction}, 2 GPUs, {how}: speed-up"] > 0


def answered(tmp_path, parts: list[Measured], *words: str) -> schema.ResultFile:
    one = Question("gpu", "one", "a title")
    question.answer(one, lambda: iter(parts), parse(["gpu", "--out", str(tmp_path), *words]))
    return schema.read(tmp_path / "one.json")


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
        (["engine", "peers"], "unknown: peers; known are clients, http, launches, users, transformers"),
        (["engine", "--cache-dtype", "fp8"], "invalid choice: 'fp8'"),
        (["bars"], "invalid choice: 'bars'"),
    ):
        with pytest.raises(SystemExit):
            main(words)
        assert message in capsys.readouterr().err
    monkeypatch.setattr(question, "gpu_facts", dict)
    with pytest.raises(SystemExit, match="`nvidia-smi` finds no GPU"):
        main(["engine"])


def test_facts_and_clocks_of_the_busy_gpu(monkeypatch, tmp_path):
    script = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    printing = lambda *lines: script.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines))
    printing("NVIDIA H200, 580.159.04, 1650 MHz, 1980 MHz, 3201 MHz, 700.00 W", "NVIDIA H200, the second one")
    script.chmod(0o755)
    facts = environment.gpu_facts()
    assert (facts["device"], facts["power.limit"]) == ("NVIDIA H200", "700.00 W")
    assert environment.results_folder(facts["device"]) == "h200"
    printing("97, 1980, 3201, 400.5, 50", "[N/A], 1, 1, 1, 1", "3, 345, 3201, 80, 30", "99, 1965, 3201, 600.5, 52")
    with environment.ClockWatch() as watch:
        watch._process.wait()
        assert watch.seen()["clocks.sm (MHz)"] == [1965.0, 1972.5, 1980.0]
    script.unlink()
    monkeypatch.setattr(environment, "_SMI", ("nvidia-smi-that-is-not-there",))
    assert environment.gpu_facts() == {}

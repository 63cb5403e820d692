"""The benchmark of the engine, at tiny sizes on a CPU."""

import pytest

from benchmarks.__main__ import main
from benchmarks.questions import engine, generation, question
from benchmarks.questions.engine import PARTS, Results, Roof, Sizes, Step
from benchmarks.questions.generation import Shape
from benchmarks.questions.question import Measured
from benchmarks.results import schema
from benchmarks.results.schema import Record
from benchmarks.run import jax_runner
from benchmarks.run.timing import Span

TINY = Shape(1, 64, 128, 4, 2, 16, 300)
SIZES = Sizes(12, 6, (2,), users=2, shared=16, suffix=8, page_size=8, step_tokens=16, shares=(0.5,))


def run_here(job):
    return getattr(engine, job.function)(**job.arguments)


def test_clients():
    records, remarks, *_ = engine.measured_part(TINY, SIZES, "clients", run=run_here)
    found = {record.name: record.value.median for record in records}
    assert remarks == []
    assert len(found) == len(records) == 2 + 1 + 2 * 8
    assert found["2 clients: failed"] == 0
    assert found["2 clients: output"] == pytest.approx(6 * found["2 clients: requests"], rel=1e-2)
    assert found["Poisson arrivals at 50% of 2 clients: requests"] < found["2 clients: requests"]
    assert found["2 clients: first token"] > found["2 clients: between tokens"] > 0
    assert all(0 < value < 100 for name, value in found.items() if "roof" in name)


def test_users_and_names_of_a_cache_of_eight_bits():
    """Names tell the cache, so that both stand in one file. The roof counts bytes of keys, values and scales."""
    sizes = SIZES._replace(cache_dtype="int8")
    records, remarks, *_ = engine.measured_part(TINY, sizes, "users", run=run_here)
    assert len(records) == 3 * (1 + 8)
    assert all(", int8 cache: " in record.name for record in records)
    cascades = {remark.partition(":")[0]: int(remark.split()[-6]) for remark in remarks}
    name = "2 users share 16 tokens, {}, int8 cache"
    assert cascades[name.format("no prefix cache")] == cascades[name.format("prefix cache")] == 0
    assert cascades[name.format("prefix cache and cascade")] > 0
    assert Roof.from_shape(Shape(), 1.0, 1.0, "int8").key_bytes == 32 * 2 * 8 * (128 + 4)
    names = [name for name, _, _ in sizes.cases("launches")]
    assert names == ["2 clients, no command buffers, int8 cache"]


def test_flags_join_those_of_the_user(monkeypatch):
    """XLA reads them once, when a process begins."""
    jobs = []
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=folder")
    for part in ("clients", "launches"):
        engine.measured_part(TINY, SIZES, part, run=lambda job: jobs.append(job) or Measured([]))
    assert "XLA_FLAGS" not in jobs[0].variables
    assert jobs[1].variables["XLA_FLAGS"] == "--xla_dump_to=folder --xla_gpu_enable_command_buffer="


def test_the_profile_of_a_load(monkeypatch):
    """The engine has ended when the profile ends, and the middle counts: CUPTI must not end while graphs run."""
    spans = [Span(0.0, 1.0, False), Span(4.5, 0.5, False), Span(5.0, 0.5, False, in_graph=True), Span(9.0, 1.0, False)]
    monkeypatch.setattr(jax_runner, "profile_of", lambda run: run())
    monkeypatch.setattr(jax_runner, "gpu_spans", lambda _: spans)
    [(_, load, options)] = SIZES.cases("clients")
    running = engine.metered(generation.jax_model(TINY), options)
    running.start()
    results = Results()
    engine.record_launches(running, "load", load, TINY.vocabulary, results)
    assert not running._thread.is_alive()
    assert sum(x.tokens for x in running.computed) == load.requests * (SIZES.prompt + SIZES.output - 1)
    assert {x.name: x.value.median for x in results} == {
        "load: idle GPU": 0.0,
        "load: kernels in CUDA graphs": 50.0,
    }


def test_the_roof():
    """Of two steps of Llama 3 8B: one token with 1,000 keys reads 15 GB; 2,048 tokens of a prompt compute."""
    roof = Roof.from_shape(Shape(), bytes_rate=4e12, flops_rate=7e14)
    decoding, prompt = Step(1, 1000, 1000), Step(2048, 2048 * 2049 // 2, 2048)
    read = (Shape().weight_bytes + 1000 * 131_072) / 4e12
    computed = (2048 * Shape().weight_bytes + prompt.pairs * 4 * 32 * 32 * 128) / 7e14
    assert roof.seconds([decoding, prompt]) == pytest.approx(read + computed)


def test_parts_keep_the_commands_of_others(monkeypatch, tmp_path):
    """Each part adds its records to the file, which names all runs. The peers have no cache of eight bits."""
    caches = []

    def part(shape, sizes, name, limit):
        caches.append((sizes.cache_dtype, name))
        return Measured([Record.single(name, 1.0, "s")], [f"of {name}"])

    monkeypatch.setattr(question, "gpu_facts", lambda: {"device": "NVIDIA H200"})
    monkeypatch.setattr(engine, "measured_part", part)
    for parts in (["clients"], ["users", "transformers"], ["clients"]):
        main(["engine", *parts, "--out", str(tmp_path)])
    result = schema.read(tmp_path / "engine.json")
    assert {x.name for x in result.records} == {"clients", "users", "transformers"}
    assert result.about["remarks"] == ["of clients", "of users", "of transformers"]
    assert len(result.about["before"]) == 2
    main(["engine", "--cache-dtype", "int8", "--out", str(tmp_path)])
    assert caches[4:] == [("int8", name) for name in PARTS[:3]]
    with pytest.raises(SystemExit, match="leave out the part transformers"):
        main(["engine", "transformers", "--cache-dtype", "int8"])

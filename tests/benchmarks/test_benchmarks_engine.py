"""The benchmark of the engine, at tiny sizes on a CPU."""

import pytest

from benchmarks.__main__ import main
from benchmarks.questions import engine, generation, question
from benchmarks.questions.engine import Results, Roof, Sizes, Step
from benchmarks.questions.generation import Shape
from benchmarks.questions.question import Measured
from benchmarks.results import schema
from benchmarks.results.schema import Record
from benchmarks.run import jax_runner
from benchmarks.run.timing import Span

TINY = Shape(2, 64, 128, 4, 2, 16, 300)
SIZES = Sizes(
    prompt=20, output=6, clients=(1, 4), users=4, shared=32, suffix=8, page_size=8, step_tokens=32, gemm=64
)  # fmt: skip


@pytest.fixture(autouse=True)
def _small_copy(monkeypatch):
    monkeypatch.setattr(generation, "COPIED_BYTES", 1 << 20)


def run_here(job):
    return getattr(engine, job.function)(**job.arguments)


def test_clients():
    records, remarks, *_ = engine.measured_part(TINY, SIZES, "clients", run=run_here)
    found = {record.name: record.value.median for record in records}
    assert remarks == []
    assert len(found) == len(records) == 2 + 2 + 4 * 8
    assert found["4 clients: failed"] == found["1 clients: failed"] == 0
    assert found["4 clients: output"] == pytest.approx(6 * found["4 clients: requests"], rel=1e-2)
    assert found["Poisson arrivals at 50% of 4 clients: requests"] < found["4 clients: requests"]
    assert found["4 clients: first token"] > found["4 clients: between tokens"] > 0
    assert all(0 < value < 100 for name, value in found.items() if "roof" in name)


def test_launches_are_those_of_clients_without_command_buffers():
    records, *_ = engine.measured_part(TINY, SIZES._replace(clients=(2,)), "launches", run=run_here)
    assert len(records) == 2 + 1 + 8
    assert {record.name.partition(":")[0] for record in records[2:]} == {"2 clients, no command buffers"}


def test_names_tell_a_cache_of_eight_bits():
    """So that both stand in one file. The roof counts bytes of keys, values and scales."""
    sizes = SIZES._replace(clients=(2,), cache_dtype="int8", shares=(0.5,))
    for part, loads in (
        ("clients", {"2 clients, int8 cache", "Poisson arrivals at 50% of 2 clients, int8 cache"}),
        ("launches", {"2 clients, no command buffers, int8 cache"}),
    ):
        records, *_ = engine.measured_part(TINY, sizes, part, run=run_here)
        assert {record.name.partition(":")[0] for record in records[2:]} == loads
        rates = {record.name for record in records[:2]}
        assert rates == {f"{of} rate{min(loads, key=len).removeprefix('2 clients')}" for of in ("copy", "GEMM")}
    records, remarks, *_ = engine.measured_part(TINY, sizes, "users", run=run_here)
    assert all(", int8 cache: " in record.name for record in records)
    assert all(", int8 cache: " in remark for remark in remarks)
    assert Roof.from_shape(Shape(), 1.0, 1.0, "int8").key_bytes == 32 * 2 * 8 * (128 + 4)


def test_flags_join_those_of_the_user(monkeypatch):
    """XLA reads them once, when a process begins."""
    jobs = []
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=folder")
    for part in ("clients", "launches"):
        engine.measured_part(TINY, SIZES, part, run=lambda job: jobs.append(job) or {"records": [], "remarks": []})
    assert "XLA_FLAGS" not in jobs[0].variables
    assert jobs[1].variables["XLA_FLAGS"] == "--xla_dump_to=folder --xla_gpu_enable_command_buffer="


def test_the_profile_of_a_load(monkeypatch):
    """The engine has ended when the profile ends, and the middle counts: CUPTI must not end while graphs run."""
    spans = [Span(0.0, 1.0, False), Span(4.5, 0.5, False), Span(5.0, 0.5, False, in_graph=True), Span(9.0, 1.0, False)]
    monkeypatch.setattr(jax_runner, "profile_of", lambda run: run())
    monkeypatch.setattr(jax_runner, "gpu_spans", lambda _: spans)
    running = engine.metered(generation.jax_model(TINY), engine._options(2, SIZES))
    running.start()
    results, load = Results(), engine._load(2, SIZES)
    engine.record_launches(running, "load", load, TINY.vocabulary, results)
    assert not running._thread.is_alive()
    assert sum(x.tokens for x in running.computed) == load.requests * (SIZES.prompt + SIZES.output - 1)
    assert {x.name: x.value.median for x in results.records} == {
        "load: idle GPU": 0.0,
        "load: kernels in CUDA graphs": 50.0,
    }


def test_users():
    records, remarks, *_ = engine.measured_part(TINY, SIZES, "users", run=run_here)
    assert len(records) == 3 * 8
    cascades = {remark.partition(":")[0]: int(remark.split()[-6]) for remark in remarks}
    assert cascades["no prefix cache"] == cascades["prefix cache"] == 0
    assert cascades["prefix cache and cascade"] > 0


def test_the_roof():
    """Of two steps of Llama 3 8B: one token with 1,000 keys reads 15 GB; 2,048 tokens of a prompt compute."""
    roof = Roof.from_shape(Shape(), bytes_rate=4e12, flops_rate=7e14)
    decoding, prompt = Step(1, 1000, 1000), Step(2048, 2048 * 2049 // 2, 2048)
    read = (Shape().weight_bytes + 1000 * 131_072) / 4e12
    computed = (2048 * Shape().weight_bytes + prompt.pairs * 4 * 32 * 32 * 128) / 7e14
    assert roof.seconds([decoding, prompt]) == pytest.approx(read + computed)


def test_parts_keep_the_commands_of_others(monkeypatch, tmp_path):
    """Each part adds its records to the file, which names all runs that it holds."""
    part = lambda shape, sizes, name, limit: Measured([Record.single(name, 1.0, "s")], [f"of {name}"])
    monkeypatch.setattr(question, "gpu_facts", lambda: {"device": "NVIDIA H200"})
    monkeypatch.setattr(engine, "measured_part", part)
    for parts in (["clients"], ["users", "transformers"], ["clients"]):
        main(["engine", *parts, "--out", str(tmp_path)])
    result = schema.read(tmp_path / "engine.json")
    assert {x.name for x in result.records} == {"clients", "users", "transformers"}
    assert result.about["remarks"] == ["of clients", "of users", "of transformers"]
    assert len(result.about["before"]) == 2


def test_the_cache_of_a_command(monkeypatch, tmp_path):
    """The peers have none of eight bits."""
    measured = []
    part = lambda shape, sizes, name, limit: measured.append((sizes.cache_dtype, name)) or Measured([])
    monkeypatch.setattr(question, "gpu_facts", lambda: {"device": "NVIDIA H200"})
    monkeypatch.setattr(engine, "measured_part", part)
    main(["engine", "--cache-dtype", "int8", "--out", str(tmp_path)])
    assert measured == [("int8", name) for name in ("clients", "launches", "users")]

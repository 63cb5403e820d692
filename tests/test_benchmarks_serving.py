"""The harness where queries continue sequences: problems, lengths, work, both libraries' calls, bars."""

import dataclasses
import itertools
import json
import pathlib
import time

import numpy as np
import pytest
from flax import nnx

from benchmarks import attention, bars, jax_serving, jax_side, problems, records, report, roofline, tables
from benchmarks.cpu import demo_decode, paged_scaling
from benchmarks.deadline import Deadline
from benchmarks.peers import FIRST, asked, peers_of
from benchmarks.problems import SERVED, Problem, parts_of_mixed, suite
from benchmarks.records import Record, SuiteResult
from benchmarks.requests import requests_of
from benchmarks.side import as_message
from benchmarks.summary import Summary
from benchmarks.team import Team


def small(**more) -> Problem:
    tiny = {"B": 4, "T": 1, "S": 64, "Hq": 4, "Hkv": 2, "D": 16, "variant": "noop", "dtype": "float32"}
    return Problem(**tiny | more)


MIXED = small(T=16, variant="causal", lengths="mixed", page=8)
TINY = {
    "decode": (small(), small(lengths="even"), small(lengths="uniform"), small(lengths="skewed"),
               small(variant="alibi")),
    "paged": (small(page=8), small(page=1)),
    "mixed": (MIXED, *parts_of_mixed(MIXED)),
    "cascade": (small(prefix=32, page=8),),
}  # fmt: skip


@pytest.mark.parametrize("problem", [problem for name in SERVED for problem in suite(name)], ids=lambda x: x.name)
def test_requests_fit_the_problem(problem: Problem):
    queries, keys = requests_of(problem)
    assert problem.served
    assert queries.shape == keys.shape == (problem.B,)
    assert queries.max() == problem.T
    assert (queries <= keys).all()
    assert keys.max() <= problem.S
    assert problem.page == 0 or problem.prefix % problem.page == 0


def test_uneven_lengths_have_as_many_keys_as_even_ones():
    counts = {}
    for problem in suite("decode"):
        if problem.lengths:
            counts[problem.lengths] = requests_of(problem).keys
    even = counts["even"].sum()
    assert counts["uniform"].sum() == even
    assert abs(counts["skewed"].sum() - even) < 32
    assert (counts["skewed"] == 16384).sum() == 4


def test_work_counts_visible_keys_and_shared_ones_once():
    mixed = roofline.served_work(MIXED)
    chunk, steps = (roofline.served_work(x) for x in parts_of_mixed(MIXED))
    assert mixed.visited == chunk.visited + steps.visited == 16 * 64 - 16 * 15 // 2 + 3 * 32
    shared, own = (roofline.served_work(small(prefix=prefix)) for prefix in (32, 0))
    assert own.forward_bytes - shared.forward_bytes == 3 * 32 * 2 * 2 * 16 * 4
    assert own.forward_flops == shared.forward_flops == 4 * 16 * 4 * 4 * 64


@pytest.mark.parametrize("name", SERVED)
def test_the_jax_side_runs_what_serves(name: str):
    side = jax_side.JaxSide()
    for problem in TINY[name]:
        peers = [x for x in asked(problem, peers_of(name))["jax"] if x != "jax-cudnn"]
        answer = side.prepare(as_message(problem), peers, ["forward"])
        assert not answer["unable"]
        outputs = {peer: side._prepared[peer].calls["forward"]() for peer in peers}
        rows = int(requests_of(problem).queries.sum())
        assert {x.size for x in outputs.values()} == {rows * problem.Hq * problem.D}
    side.release()


def test_a_wrong_output_is_doubted():
    right = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
    assert not jax_serving.doubts({"jflex": right[:, None], "jflex-flat": right * 1.001, "jflex-copies": 2 * right})
    wrong = jax_serving.doubts({"jflex": right, "jax-cudnn": 1.1 * right})
    assert wrong == {"jflex": "its output differs from that of jax-cudnn, by 0.091 of its norm"}
    assert list(jax_serving.doubts({"jflex": right, "jflex-flat": right * np.nan})) == ["jflex-flat"]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", ["decode", "paged"])
def test_the_torch_side_runs_what_serves(name: str):
    torch_side = pytest.importorskip("benchmarks.torch_side")
    side = torch_side.TorchSide()
    for problem in TINY[name]:
        answer = side.prepare(as_message(problem), asked(problem, peers_of(name)).get("torch", []), ["forward"])
        assert not answer["unable"].keys() - {"flashinfer", "sdpa-cudnn", "sdpa-flash"}


def test_suites_are_measured_in_one_command(tmp_path: pathlib.Path, monkeypatch, capsys):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setattr(attention, "gpu_facts", dict)
    for name in ("decode", "paged"):
        monkeypatch.setitem(problems._SUITES, name, lambda name=name: TINY[name][:1])
    attention.main(["--suite", "decode", "paged", "--peers", "jflex", "jflex-contiguous", "--out", str(tmp_path),
                    "--runs", "2", "--limit", "300"])  # fmt: skip
    decode, paged = (records.read("cpu", name, tmp_path) for name in ("decode", "paged"))
    assert [record.key for record in decode.records] == [(TINY["decode"][0], "jflex", "forward")]
    assert [record.peer for record in paged.records] == ["jflex", "jflex-contiguous"]
    assert paged.records[0].problem == TINY["paged"][0]
    assert "TB/s" in capsys.readouterr().out


def test_nothing_is_begun_when_the_time_is_over(tmp_path: pathlib.Path, monkeypatch, capsys):
    monkeypatch.setattr(attention, "gpu_facts", dict)
    started = time.monotonic()
    with pytest.raises(SystemExit, match=r"Nothing was measured of mixed, cascade\."):
        attention.main(["--suite", "mixed", "cascade", "--out", str(tmp_path), "--limit", "0"])
    assert time.monotonic() - started < 60
    assert "not measured: the time was over" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_a_process_whose_gpu_is_broken_is_started_again(tmp_path: pathlib.Path, monkeypatch):
    class Broken:
        closed = False

        def __init__(self, *arguments):
            pass

        def send(self, method, **arguments):
            pass

        def receive(self, seconds):
            return {"unable": {FIRST: "JaxRuntimeError: INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS"}}

        def close(self):
            self.closed = True

    monkeypatch.setattr("benchmarks.team.Worker", Broken)
    with Team(["jax"], tmp_path) as team:
        assert team.ask("jax", "prepare", 1.0)["lost"]
        assert not team._workers


def test_a_wait_does_not_outlast_the_deadline():
    assert Deadline(1000.0, 0.25).patience(90.0) == 90.0
    assert Deadline(40.0, 0.25).patience(90.0) <= 15.0
    assert Deadline(5.0, 0.25).patience(90.0) <= 5.0


def made(name: str, seconds: dict[str, float] | None = None) -> list[Record]:
    """A record of each peer at each problem; one second, unless it is told for a peer."""
    found = []
    for problem, peer in itertools.product(suite(name), peers_of(name)):
        if peer.refuses(problem) is None:
            time_of = (seconds or {}).get(peer.name, 1e-4)
            summary = Summary(time_of, time_of, time_of, 10)
            work = roofline.served_work(problem)
            found.append(
                Record(problem, peer.name, "forward", summary, "made up", work.forward_flops, work.forward_bytes)
            )
    return found


def test_bars_of_serving(tmp_path: pathlib.Path):
    slow = {"jflex-flat": 16e-4, "jflex-copies": 32e-4}
    for name in SERVED:
        records.write(tmp_path / bars.DEVICE, name, made(name, slow), {"title": name, "machine": {}, "remarks": []})
    found = [reading for reading in bars.readings(tmp_path) if reading.file in SERVED]
    assert not [reading for reading in found if not reading.holds]
    asked_for = {reading.figure.name: reading.figure for reading in found if reading.figure.holds is not None}
    assert len(asked_for) == 1 + 2 + 2 + 5 + 4 + 1
    assert asked_for["pages of 64"].value == 100.0
    assert asked_for["cascade, 32/32 heads, prefix 8192 and suffix 128, over flat"].value == 16.0


def test_missing_records_and_files_fall_short(tmp_path: pathlib.Path):
    found = [x for x in made("paged") if x.problem.page != 64]
    records.write(tmp_path / bars.DEVICE, "paged", found, {"title": "paged", "machine": {}, "remarks": []})
    read = [reading for reading in bars.readings(tmp_path) if reading.file in SERVED and not reading.holds]
    assert [reading.missing for reading in read if reading.file != "paged"] == [
        f"{name}.json is missing" for name in ("decode", "cascade", "mixed")
    ]
    assert [reading.missing for reading in read if reading.file == "paged"] == [
        "pages of 64: 1 of 1 are missing", "pages of 64 over contiguous keys, time: 1 of 1 are missing"
    ]  # fmt: skip


def test_tables_say_who_is_not_installed():
    about = {"remarks": ["flashinfer: ModuleNotFoundError: No module named 'flashinfer' [everywhere]"],
             "rates": {"jax": {"copy_bytes": 4e12, "matmul_flops": 8e14}}}  # fmt: skip
    found = [dataclasses.replace(x) for x in made("paged") if x.peer != "flashinfer"]
    result = SuiteResult("paged", tuple(found), json.loads(json.dumps(about)))
    assert tables.served_header(result) == ["", "jflex", "jflex, contiguous", "FlashInfer"]
    row = tables.served_rows(result)[0]
    assert row[1] == "100 µs, 5.37 TB/s, 134%"
    assert row[3] == "not installed there"


def test_scaling_on_the_cpu():
    figures = paged_scaling.measure(paged_scaling.Sizes((16, 32), (32, 64), 0.1))
    assert len({figure.name for figure in figures}) == len(figures) == 6
    assert [figure.at_most for figure in figures] == [None, None, 1.3] * 2


def test_a_question_to_the_cpu_without_an_answer_falls_short(monkeypatch):
    monkeypatch.setattr(report, "read", lambda device, name: None)
    lines, reached = report.bar_lines()
    assert "cpu/paged_scaling: **missing**: paged_scaling.json is missing" in lines
    assert not reached


@pytest.mark.parametrize("make", [demo_decode._dense, demo_decode._paged])
def test_a_step_of_the_demo_can_be_repeated(make):
    sizes = demo_decode.ModelSizes(width=16, layers=1, heads=2, kv_heads=1)
    step = make(demo_decode.ByteDecoder(sizes, "xla", rngs=nnx.Rngs(0)), 16, 32)
    first, again = step(), step()
    assert first.shape[-1] == 256
    np.testing.assert_array_equal(first, again)

"""The harness: problems, variants in both libraries, counted work, workers, result files, bars."""

import dataclasses
import importlib.util
import itertools
import json
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import attention, bars, jax_side, records, report, roofline, tables, timing
from benchmarks.peers import FIRST, FIRST_OF, PEERS, asked, peers_of
from benchmarks.problems import SERVED, SUITES, TITLES, Problem, square, suite
from benchmarks.records import Record
from benchmarks.side import DIRECTIONS, as_message
from benchmarks.spans import Span, busy_per_call
from benchmarks.summary import Summary
from benchmarks.variants import VARIANTS, Operations
from benchmarks.workers import Worker, WorkerError

NUMPY = Operations(np.tanh, lambda x: np.asarray(x, np.float32), np.clip)
SMALL = square(1, 256, 4, 16, "noop")


@pytest.mark.parametrize("name", SUITES)
def test_a_suite_names_each_problem_once(name: str):
    problems = suite(name)
    assert name in TITLES
    assert len({problem.name + problem.source for problem in problems}) == len(problems)
    for problem in problems:
        assert problem.variant in VARIANTS
        assert problem.Hq % problem.Hkv == 0
        assert problem.form == "split" or VARIANTS[problem.variant].make(problem, {}, NUMPY).mask
        assert not problem.differentiated or VARIANTS[problem.variant].captured(dataclasses.replace(problem, T=8, S=8))
        peers = peers_of(name)
        assert peers[0].name == FIRST_OF.get(name, FIRST)
        assert peers[0].name in asked(problem, peers)[peers[0].library]
        assert Problem.read(json.loads(json.dumps(as_message(problem)))) == problem


def test_kv_of_the_paper_is_256_mebibytes():
    sizes = {2 * 2 * p.B * p.Hkv * p.S * p.D for p in suite("paper") if not (p.B == 1 and p.D == 128 and p.S == 65536)}
    assert sizes == {256 * 2**20}


def evaluated(problem: Problem, operations: Operations, array) -> list[np.ndarray]:
    """Mask and scores of all heads, on grids of indices: the mods are made of elementwise operators."""
    variant = VARIANTS[problem.variant]
    captured = {name: array(x.astype(np.float32)) for name, x in variant.captured(problem).items()}
    indices = {name: array(x) for name, x in variant.indices(problem).items()}
    mask, score = variant.make(problem, captured | indices, operations)
    q_idx, kv_idx = array(np.arange(problem.T, dtype=np.int32)[:, None]), array(np.arange(problem.S, dtype=np.int32))
    scores = np.random.default_rng(0).normal(size=(problem.T, problem.S)).astype(np.float32)
    values = [] if mask is None else [mask(0, 0, q_idx, kv_idx)]
    values += [] if score is None else [score(array(scores), 0, h, q_idx, kv_idx) for h in range(problem.Hq)]
    return [np.asarray(x) for x in values]


@pytest.mark.parametrize("library", ["jax", "torch"])
@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "noop"])
def test_a_variant_is_the_same_in_every_library(name: str, library: str):
    problem = dataclasses.replace(SMALL, variant=name)
    if library == "torch":
        torch = pytest.importorskip("torch")
        operations, array = Operations(torch.tanh, lambda x: x.to(torch.float32), torch.clamp), torch.as_tensor
    else:
        operations, array = jax_side.OPERATIONS, jnp.asarray
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        found = evaluated(problem, operations, array)
    for ours, wanted in zip(found, evaluated(problem, NUMPY, np.asarray), strict=True):
        assert ours.dtype == wanted.dtype
        np.testing.assert_allclose(ours, wanted, rtol=1e-6, atol=1e-6)


def test_the_neighborhoods_show_the_same_in_other_orders():
    forms = ["neighborhood", "neighborhood_tiled", "neighborhood_morton"]
    problems = [square(1, 1024, 1, 16, name) for name in forms]
    counts = [np.sort(evaluated(problem, NUMPY, np.asarray)[0].sum(1)) for problem in problems]
    assert (np.array(counts) == 13 * 13).all()


def test_documents_are_uneven_and_all_there():
    ids = VARIANTS["document_mask"].indices(square(1, 4096, 1, 16, "document_mask"))["document"]
    lengths = np.bincount(ids)
    assert len(lengths) == 12
    assert lengths.min() > 50
    assert lengths.max() > 2 * lengths.min()
    assert (np.diff(ids) >= 0).all()


@pytest.mark.parametrize("name", ["causal", "sliding_window", "document_mask", "neighborhood"])
def test_visited_elements_are_those_of_the_blocks_with_any_visible(name: str):
    problem = dataclasses.replace(SMALL, variant=name, T=400, S=400)
    [visible] = evaluated(problem, NUMPY, np.asarray)
    wanted = sum(visible[q : q + 128, kv : kv + 128].size * visible[q : q + 128, kv : kv + 128].any()
                 for q, kv in itertools.product(range(0, 400, 128), repeat=2))  # fmt: skip
    variant = VARIANTS[name]
    indices = {name: jnp.asarray(x) for name, x in variant.indices(problem).items()}
    _, visited = jax_side._block_mask(problem, variant.make(problem, indices, jax_side.OPERATIONS))
    assert visited == wanted


def test_work_is_that_of_the_products_and_the_arrays():
    problem = square(2, 256, (4, 2), 16, "pair_bias", differentiated=True)
    work = roofline.work(problem, 256 * 256, [(4, 256, 256)])
    assert work.flops("forward") == 2 * 2 * 16 * 256 * 256 * 4 * 2
    assert work.flops("backward") == 2.5 * work.flops("forward")
    query, key, bias, lse = 2 * 2 * 4 * 256 * 16, 2 * 2 * 2 * 256 * 16, 2 * 4 * 256 * 256, 4 * 2 * 4 * 256
    assert work.moved("forward") == 2 * query + 2 * key + bias + lse
    assert work.moved("backward") == work.moved("forward") + query + (query + 2 * key + bias)


def test_spans_belong_to_the_call_after_their_separator():
    spans = [Span(3.0, 1.0, True), Span(0.0, 1.0, True), Span(1.0, 0.5, False), Span(4.0, 0.25, False),
             Span(5.0, 0.5, False)]  # fmt: skip
    assert busy_per_call(spans, 2) == [0.5, 0.75]
    with pytest.raises(ValueError, match="saw 2 calls, 2 with kernels, out of 3"):
        busy_per_call(spans, 3)


PROFILE = """
planes { name: "/device:GPU:0"
  lines { id: 1 name: "Stream #13(Compute)" timestamp_ns: 1000
    events { metadata_id: 1 duration_ps: 1000000 stats { metadata_id: 7 str_value: "jit_evict_l2_cache" } }
    events { metadata_id: 2 offset_ps: 2000000 duration_ps: 500000 } }
  lines { id: 2 name: "XLA Ops" timestamp_ns: 1000 events { metadata_id: 2 offset_ps: 0 duration_ps: 99000000 } }
  event_metadata { key: 1 value { id: 1 name: "wrapped" } }
  event_metadata { key: 2 value { id: 2 name: "attend" } }
  stat_metadata { key: 7 value { id: 7 name: "hlo_module" } } }
planes { name: "/host:CPU" }"""


def test_the_profile_of_a_gpu_is_read():
    data = jax.profiler.ProfileData
    profile = data.from_serialized_xspace(data.text_proto_to_serialized_xspace(PROFILE))
    assert busy_per_call(timing.gpu_spans(profile), 1) == [pytest.approx(5e-7)]


def test_the_jax_side_computes_each_form_and_gradient():
    side = jax_side.JaxSide()
    for problem in suite("tiny"):
        answer = side.prepare(as_message(problem), [FIRST], DIRECTIONS)
        assert list(answer["ready"]) == [FIRST]
        assert not answer["unable"]
        gradients = jax.tree.leaves(side._prepared[FIRST].calls["backward"]())
        assert len(gradients) == 3 + problem.differentiated
        measured = side.measure(FIRST, "backward", 3, queue=True)
        assert [len(measured[name]) for name in ("seconds", "queue")] == [3, 3]
    side.release()


def test_a_peer_that_cannot_is_said_to_be_unable():
    side = jax_side.JaxSide()
    missing = importlib.util.find_spec("tokamax") is None
    answer = side.prepare(as_message(suite("tiny")[0]), [FIRST, "tokamax"], ["forward"], ahead=True)
    assert FIRST in answer["ready"]
    assert ("tokamax" in answer["unable"]) == missing


def test_a_worker_that_ends_or_hangs_is_an_error(tmp_path: pathlib.Path):
    worker = Worker("nothing", {}, tmp_path / "log")
    with pytest.raises(WorkerError, match="ended: KeyError: 'nothing'"):
        worker.ask("rates", 60)
    worker = Worker("jax", {"JAX_PLATFORMS": "cpu"}, tmp_path / "log")
    with pytest.raises(WorkerError, match="did not answer within 0 s"):
        worker.ask("rates", 0)


def test_a_suite_is_measured_written_and_shown(tmp_path: pathlib.Path, monkeypatch, capsys):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # plots are left out without it
    monkeypatch.setattr(attention, "gpu_facts", dict)
    attention.main(["--suite", "tiny", "--variants", "noop", "--peers", "jflex", "jax-xla", "--out", str(tmp_path),
                    "--runs", "2"])  # fmt: skip
    result = records.read("cpu", "tiny", tmp_path)
    assert [record.key[1:] for record in result.records] == [
        (peer, direction) for direction in DIRECTIONS for peer in ("jflex", "jax-xla")
    ]
    assert all(record.seconds.runs == 2 and record.queue for record in result.records)
    assert "jflex is" in capsys.readouterr().out


def made(name: str, faster: float = 2.0) -> list[Record]:
    """Records of a suite in which jflex takes a second, its peers `faster` ones, and other forms twice as long."""
    found, first = [], FIRST_OF.get(name, FIRST)
    for problem, direction in itertools.product(suite(name), DIRECTIONS):
        for peer in itertools.chain(*asked(problem, tuple(PEERS.values())).values()):
            slow = {"split": 1.0}.get(problem.form, 2.0) * (1.0 if peer == first else faster)
            seconds = Summary(slow, slow * 0.9, slow * 1.1, 10)
            found.append(Record(problem, peer, direction, seconds, "made up", 1e12 * problem.D, 1e9))
    return found


def write(folder: pathlib.Path, name: str, found: list[Record]) -> None:
    records.write(folder / bars.DEVICE, name, found, {"title": TITLES[name], "machine": {}, "remarks": []})


def test_result_files_hold_what_was_written(tmp_path: pathlib.Path):
    found = made("short")
    write(tmp_path, "short", found)
    result = records.read(bars.DEVICE, "short", tmp_path)
    assert list(result.records) == found
    assert result.ratio(found[0].problem, "forward", FIRST, "torch-flex") == 2.0
    assert len(tables.rows(result, "forward")) == len(suite("short"))
    again = dataclasses.replace(found[0], method="again")
    assert records.merged(result, [again]) == [*found[1:], again]


def test_bars_are_read_from_the_files(tmp_path: pathlib.Path):
    for name in bars._SUITES:
        write(tmp_path, name, made(name))
    found = bars.readings(tmp_path)
    assert [reading.file for reading in found if reading.missing] == list(bars.QUESTIONS)
    short = {reading.figure.name: reading.figure.value for reading in found
             if reading.figure and not reading.holds and reading.file not in (*SERVED, "hopper")}  # fmt: skip
    assert set(short.values()) == {0.625, 0.75}  # head sizes 80 and 96 at the same time as 128
    assert sum(reading.holds for reading in found) > 15


@pytest.mark.parametrize("change", ["slower", "incomplete"])
def test_bars_fall_short(tmp_path: pathlib.Path, change: str):
    found = made("main", faster=0.8) if change == "slower" else made("main")[4:]
    write(tmp_path, "main", found)
    main = [reading for reading in bars.readings(tmp_path) if reading.file == "main"]
    assert len(main) == 5
    assert any(not reading.holds for reading in main)


def test_the_command_exits_1_when_a_bar_falls_short(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["report", "--bars"])
    monkeypatch.setattr(bars, "readings", lambda: [bars.Reading("main", None, "main.json is missing")])
    with pytest.raises(SystemExit) as ended:
        report.main()
    assert ended.value.code == 1
    assert "missing" in capsys.readouterr().out


def test_plots_are_written(tmp_path: pathlib.Path):
    pytest.importorskip("matplotlib")
    from benchmarks import plots

    for name, count in (("blocks", 1), ("captured", 1), ("pair_bias", 0)):
        write(tmp_path, name, made(name))
        assert len(plots.draw(records.read(bars.DEVICE, name, tmp_path), tmp_path)) == count


@pytest.mark.parametrize("module", ["problems", "variants", "peers", "roofline", "spans", "side", "workers", "bars"])
def test_what_both_processes_use_loads_neither_library(module: str):
    words = f"import sys, benchmarks.{module}; assert not {{'jax', 'torch'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", words], check=True, cwd=report.ROOT)


def test_the_readme_shows_suites_in_tables(tmp_path: pathlib.Path, monkeypatch):
    for name in ("main", "short", "paper"):
        write(tmp_path, name, made(name))
    monkeypatch.setattr(records.read, "__defaults__", (tmp_path,))
    monkeypatch.setattr(bars.readings, "__defaults__", (tmp_path,))
    text = report.block()
    assert "| noop; B 4, H 16, S 16384, D 64 |" in text
    assert "| forward over torch FlexAttention, geometric mean of 21 | 2 x | at least 1 |" in text
    assert "is 2.00 times as fast as torch FlexAttention in the geometric mean of" in text
    assert "S 65536" not in text  # the paper's suite is drawn

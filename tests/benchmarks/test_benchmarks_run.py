"""How suites are measured: jobs, workers, turns and deadlines with fake libraries; the JAX and torch runners."""

import dataclasses
import math
import pathlib

import jax
import pytest

from benchmarks.__main__ import parse
from benchmarks.peers.table import by_library, peers_of
from benchmarks.problems import requests_of, square
from benchmarks.results import schema
from benchmarks.run import jobs
from benchmarks.run import suite as suite_command
from benchmarks.run.check_outputs import mismatches
from benchmarks.run.jax_runner import JaxRunner, gpu_spans
from benchmarks.run.jobs import Deadline, Job, WorkerPool
from benchmarks.run.library_runner import DIRECTIONS
from benchmarks.run.timing import QUEUE, Communication, Timer, busy_per_call, spans_per_call
from benchmarks.suites import SUITES
from tests.benchmarks.test_benchmarks import INDEXER, LATENT, MIXED, PARTS, SPARSE, small
from tests.support.rows import tiers

FAKE = dict.fromkeys(("jax", "mosaic", "torch"), "tests.benchmarks.fake_runner:FakeRunner")
TINY = {
    "decode": (small(lengths="skewed"), small(variant="alibi")),
    "paged": (small(page=8), small(page=1)),
    "mixed": (MIXED, *PARTS),
    "cascade": (small(prefix=32, page=8),),
    "mla": (LATENT, dataclasses.replace(LATENT, T=2, variant="causal")),
    "sparse_mla": (dataclasses.replace(SPARSE, T=3), dataclasses.replace(INDEXER, T=3)),
    "streaming_llm": (small(page=8, keys="rolling"),),
}


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch):
    monkeypatch.setattr(suite_command, "gpu_facts", dict)


def measure(words: str, folder: pathlib.Path) -> dict[str, schema.ResultFile]:
    """Results of suites, with fake libraries."""
    suite_command.run(parse(["attention", *words.split(), "--out", str(folder), "--runs", "3"]), FAKE)
    return {path.stem: schema.read(path) for path in folder.glob("*.json")}


def test_peers_that_fail_become_remarks_and_others_keep_their_times(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(suite_command, "_MEASURE_SECONDS", 2.0)
    peers = "jflex jflex-mosaic jax-cudnn jax-xla torch-flex tokamax"
    words = f"--suite tiny --variants noop --peers {peers} --compile-workers 1 --limit 400"
    result = measure(words, tmp_path)["tiny"]
    assert {(x.direction, x.peer) for x in result.records} == {
        *(("forward", peer) for peer in ("jflex", "jax-cudnn", "jax-xla", "torch-flex")),
        ("backward", "jax-cudnn"),
    }
    own = result.find(result.problems[0], "jflex", "forward")
    assert (own.seconds, own.value.runs, own.queue.median, own.backend) == (1.0, 4, 2.0, "triton")
    assert own.flops == 2 * 2 * 16 * 2 * 256 * 256
    remarks = "\n".join(result.about["remarks"])
    for remark in (
        "mosaic: the mosaic process ended: a fault [noop; ",
        "jax-xla: ValueError: no backward [backward: noop; ",
        "tokamax: ModuleNotFoundError: No module named 'tokamax' [noop; ",
        "jflex: array 0 differs from that of jax-cudnn, by 1.6 of its norm [backward: noop; ",
        "torch-flex: the torch process was ended, since it did not answer within 2 s: ",
    ):
        assert remark in remarks
    assert result.about["rates"].keys() == {"jax", "torch", "mosaic"}
    assert "jflex is 1.00 times as fast as jax.nn XLA in the geometric mean of 1" in capsys.readouterr().out


def test_suites_are_measured_in_one_command_and_added_to(tmp_path):
    words = "--suite tiny paged --peers jax-xla jflex-contiguous --pass forward"
    first = measure(words, tmp_path)
    assert [(x.problem.page, x.peer) for x in first["paged"].records][:2] == [(x, "jflex-contiguous") for x in (64, 16)]
    assert [x.peer for x in first["tiny"].records] == ["jax-xla"]
    kept, stale = "torch: no GPU [noop]", "not measured: the time was over [noop]"
    about = {**first["tiny"].about, "remarks": [kept, stale], "versions": {"a-peer": "1.0"}}
    schema.write(tmp_path / "tiny.json", first["tiny"].records, about)
    first = {path.stem: schema.read(path) for path in tmp_path.glob("*.json")}
    again = measure(f"{words} --add".replace("jax-xla", "jax-cudnn"), tmp_path)["tiny"]
    assert again.about["remarks"] == [kept]
    assert again.about["versions"].items() >= {"a-peer": "1.0", "jax": jax.__version__}.items()
    assert [x.peer for x in again.records] == ["jax-xla", "jax-cudnn"]
    assert again.about["before"] == [{x: first["tiny"].about[x] for x in ("date", "command", "commit")}]


def test_nothing_is_begun_when_the_time_is_over(tmp_path, capsys):
    with pytest.raises(SystemExit, match=r"Nothing was measured of mixed, cascade\."):
        measure("--suite mixed cascade --limit 0", tmp_path)
    assert "not measured: the time was over" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_a_process_whose_gpu_is_broken_is_started_again(tmp_path):
    request = {"problem": SUITES["tiny"].problems[0], "directions": ["forward"]}
    with WorkerPool({"torch": FAKE["torch"]}, {}, tmp_path, Deadline()) as pool:
        answer = pool.request("torch", "prepare", 60.0, peers=["sdpa-flash"], **request)
        assert answer["lost"]
        assert not pool._workers
        assert pool.request("torch", "prepare", 60.0, peers=["torch-flex"], **request)["ready"]


def test_a_job_that_fails_or_does_not_end_becomes_a_remark(capfd):
    job = lambda device: Job(str(device), "benchmarks.environment", "results_folder", {"device": device})
    found, remarks = jobs.run_jobs([job("NVIDIA L4"), job(3), job("A100")._replace(seconds=0.0)])
    assert found == {"NVIDIA L4": "nvidia-l4"}
    assert remarks[0].startswith("3 is left out: the job's process ended: AttributeError: 'int' object")
    assert remarks[1].startswith("A100 is left out: the job's process was ended, since it did not answer within 0 s")
    assert "AttributeError: 'int' object" in capfd.readouterr().out


def test_a_wrong_result_is_a_mismatch():
    right, wrong, broken = [[1.0, 2.0, 3.0]], [[1.0, 2.0, -3.0]], [[1.0, math.nan, 3.0]]
    both = lambda arrays: dict.fromkeys(("forward", "backward"), arrays)
    assert mismatches({"jflex": both(right), "jax-cudnn": both(right), "jflex-copies": both(wrong)}) == {}
    found = mismatches({"jflex": {"forward": right, "backward": wrong}, "jax-cudnn": both(right)})
    assert found == {"jflex": {"backward": "array 0 differs from that of jax-cudnn, by 1.6 of its norm"}}
    found = mismatches({"jflex": both(right), "jax-cudnn": both(broken), "jax-xla": both(wrong)})
    assert [sorted(found[x]) for x in ("jax-cudnn", "jflex")] == [["backward", "forward"]] * 2
    assert found["jflex"]["forward"].startswith("array 0 differs from that of jax-xla")
    assert mismatches({"jflex": both([[math.nan]])})["jflex"] == both("array 0 is not finite")
    assert "other sizes" in mismatches({"jflex": both([[1.0]]), "jax-xla": both([[1.0, 2.0]])})["jflex"]["forward"]
    close = {"jflex": both([[1.0]]), "jax-xla": both([[1.03]])}
    assert not mismatches(close)
    assert mismatches(close, 0.02)


@pytest.mark.long
def test_the_jax_runner_computes_each_form_and_gradient():
    runner = JaxRunner()
    partial = square(1, 256, (2, 1), 16, "alibi", differentiated=True, form="partial")
    selected = square(1, 256, (4, 2), 16, "causal", block=32, selected=3)
    rotated = square(1, 256, 2, 32, "causal", keys="raw", Dv=16)
    for problem in (partial, selected, rotated):
        answer = runner.prepare(problem, ["jflex"], DIRECTIONS)
        assert (answer["ready"], answer["unable"]) == (["jflex"], {})
        assert answer["backends"]["jflex"] == "xla"
        assert runner._prepared["jflex"]["forward"].call().shape == (1, 256, problem.Hq, problem.value_size)
        assert len(answer["samples"]["jflex"]["backward"]) == 3 + problem.differentiated
        measured = runner.measure("jflex", "backward", 3, queue=True)
        assert [len(measured[name]) for name in ("seconds", "queue")] == [3, 3]
    runner.release()


@tiers(rest="full", share=2)
@pytest.mark.parametrize("name", TINY)
def test_the_jax_runner_serves(name: str):
    runner = JaxRunner()
    for problem in TINY[name]:
        peers = [x for x in by_library(problem, peers_of(name))["jax"] if x != "jax-cudnn"]
        answer = runner.prepare(problem, peers, ["forward"])
        assert not answer["unable"]
        assert not mismatches({x: y for x, y in answer["samples"].items() if x != "jflex-copies"}, 1e-3)
        rows = int(requests_of(problem).queries.sum())
        sizes = {runner._prepared[peer]["forward"].call().size for peer in peers}
        assert sizes == {rows * (problem.selected if problem.keys == "indexer" else problem.Hq * problem.value_size)}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", ["decode", "paged", "tiny"])
def test_the_torch_runner_runs_what_a_cpu_can(name: str):
    pytest.importorskip("torch")
    from benchmarks.peers.torch import attention as torch_attention
    from benchmarks.run.torch_runner import TorchRunner

    runner = TorchRunner()
    for problem in TINY.get(name, SUITES["tiny"].problems):
        peers = by_library(problem, peers_of(name)).get("torch", [])
        answer = runner.prepare(problem, peers, ["forward"])
        assert not answer["unable"].keys() - {"fa4", "flashinfer", "sdpa-cudnn", "sdpa-flash"}
    bound = torch_attention.bind(square(2, 64, 4, 16, "alibi"), "cpu")
    assert torch_attention._materialized(bound).shape == (1, 4, 64, 64)  # cuDNN takes the first of three for the batch


def test_a_failed_profile_is_said_and_never_taken_for_device_time():
    def profiled(call, runs):
        raise ValueError("The profiler saw 0 calls")

    timer = Timer(lambda result: None, profiled)
    seconds, method = timer.timed(lambda: None, 2)
    assert (len(seconds), method) == (2, f"{QUEUE}: The profiler saw 0 calls")


PROFILE = """
planes { name: "/device:GPU:0"
  lines { name: "Stream #13(Compute)" timestamp_ns: 1000
    events { metadata_id: 1 duration_ps: 1000000 stats { metadata_id: 7 str_value: "jit_evict_l2_cache" } }
    events { metadata_id: 2 offset_ps: 2000000 duration_ps: 500000 } }
  lines { name: "XLA Ops" timestamp_ns: 1000 events { metadata_id: 2 offset_ps: 0 duration_ps: 99000000 } }
  event_metadata { key: 1 value { id: 1 name: "wrapped" } } event_metadata { key: 2 value { id: 2 name: "attend" } }
  stat_metadata { key: 7 value { id: 7 name: "hlo_module" } } }
planes { name: "/device:GPU:1"
  lines { name: "Stream #13(Compute)" timestamp_ns: 1000
    events { metadata_id: 1 duration_ps: 1000000 } events { metadata_id: 2 offset_ps: 1000000 duration_ps: 3000000 } }
  lines { name: "Stream #14(Compute)" timestamp_ns: 1000
    events { metadata_id: 3 offset_ps: 2000000 duration_ps: 2000000 }
    events { metadata_id: 2 offset_ps: 4000000 duration_ps: 2000000
             stats { metadata_id: 8 str_value: "all-gather.1" } } }
  event_metadata { key: 1 value { id: 1 name: "wrapped_popcnt" } } event_metadata { key: 2 value { id: 2 name: "x" } }
  event_metadata { key: 3 value { id: 3 name: "ncclDevKernel_SendRecv" } }
  stat_metadata { key: 8 value { id: 8 name: "hlo_op" } } }
planes { name: "/host:CPU" }"""


def test_the_profile_of_gpus_is_read():
    """On the second one, half of a transfer of 4 µs has a kernel beside it."""
    data = jax.profiler.ProfileData
    profile = data.from_serialized_xspace(data.text_proto_to_serialized_xspace(PROFILE))
    assert busy_per_call(gpu_spans(profile), 1) == [pytest.approx(5e-7)]
    with pytest.raises(ValueError, match="saw 1 calls, 1 with kernels, out of 3"):
        busy_per_call(gpu_spans(profile), 3)
    [spans] = spans_per_call(gpu_spans(profile, 1), 1)
    assert Communication.from_spans(spans) == pytest.approx((4e-6, 2e-6))
    assert Communication.from_spans(spans).hidden == pytest.approx(0.5)

"""Several GPUs: the measurement on simulated devices."""

import types

import jax
import pytest

from benchmarks.__main__ import main
from benchmarks.questions import context
from benchmarks.results import schema
from benchmarks.run.jax_runner import gpu_spans
from benchmarks.run.timing import Communication, spans_per_call

SIZES = ("length=512", "heads=4", "kv-heads=2", "head-size=16", "documents=3", "implementation=xla", "runs=2")
TINY = ["context", *(f"--{size}" for size in SIZES), "--devices=2"]


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices; tests/conftest.py simulates them")
def test_several_devices_beside_one(tmp_path):
    main([*TINY, f"--out={tmp_path}", "--masks=causal", "--strategies=ring", "--orders=balanced"])
    main([*TINY, f"--out={tmp_path}", "--masks=documents", "--strategies=all_gather", "--orders=natural", "--add"])
    found = schema.read(tmp_path / "context.json")
    assert found is not None
    assert found.about["machine"]["devices"] == 2
    assert "B 1, S 512, H 4/2, D 16" in found.about["title"]
    assert not found.about["remarks"]  # of an output that is wrong, say
    names = [record.name for record in found.records]
    for case, how in (("causal", "ring, balanced"), ("documents", "all_gather, natural")):
        for direction in context.DIRECTIONS:
            assert f"{case}, {direction}, one GPU: time" in names
            assert f"{case}, {direction}, 2 GPUs, {how}: speed-up" in names


def test_communication_that_kernels_hide():
    """Of two GPUs: on the second one, half of a transfer of 4 s has a kernel beside it."""
    event = lambda name, start, seconds, **stats: types.SimpleNamespace(
        name=name, start_ns=start * 1e9, duration_ns=seconds * 1e9, stats=list(stats.items())
    )
    line = lambda name, *events: types.SimpleNamespace(name=name, events=events)
    streams = [
        line("Stream #1(Compute)", event("wrapped_popcnt", 0, 1), event("attention", 1, 3)),
        line("Stream #2(Compute)", event("ncclDevKernel_SendRecv", 2, 2), event("copy", 4, 2, hlo_op="all-gather.1")),
        line("XLA Ops", event("attention", 1, 9)),
    ]
    lines = {0: [], 1: streams, 10: streams}
    planes = [types.SimpleNamespace(name=f"/device:GPU:{i}", lines=x) for i, x in lines.items()]
    profile = types.SimpleNamespace(planes=planes)
    assert gpu_spans(profile) == []
    [spans] = spans_per_call(gpu_spans(profile, 1), 1)
    assert Communication.from_spans(spans) == Communication(4.0, 2.0)
    assert Communication.from_spans(spans).hidden == 0.5

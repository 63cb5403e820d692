"""Several GPUs: the measurement on simulated devices, and the cost model, whose picture says what it is."""

import dataclasses
import types

import jax
import pytest

from benchmarks.questions import context, devices
from benchmarks.questions.devices import UNCHECKED, Network, Rates, modelled
from benchmarks.results import schema, targets
from benchmarks.run.jax_runner import gpu_spans
from benchmarks.run.timing import Communication, communication_of, spans_per_call

RATES = Rates(7e14, 5e14)


@pytest.mark.parametrize("strategy", devices.STRATEGIES)
@pytest.mark.parametrize("count", [2, 8, 64])
def test_kernels_bound_the_time_and_faster_links_shorten_it(strategy, count):
    found = [
        modelled(strategy, count, 2**18, RATES, dataclasses.replace(Network(), inside=x, between=x))
        for x in (1e9, 1e10, 1e20)
    ]
    if strategy == "ulysses" and count > 8:
        assert found == [None] * 3
        return
    slow, faster, fastest = (x for x in found if x is not None)
    assert slow.total > faster.total >= fastest.total >= fastest.kernels == slow.kernels
    assert slow.efficiency < faster.efficiency <= 1


def test_a_ring_hides_what_is_shorter_than_its_kernels():
    hidden = modelled("ring", 8, 2**20, RATES, Network())
    assert hidden is not None
    assert hidden.total == pytest.approx(hidden.kernels)


def test_rates_are_those_of_the_committed_results():
    forward, backward = Rates.measured()
    assert 1e14 < backward < forward < 989e12


def test_the_picture_and_the_table_say_what_they_are(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    devices.main([f"--out={tmp_path}/model.png", f"--measured={tmp_path}/none.json"])
    assert (tmp_path / "model.png").stat().st_size > 1000
    text = capsys.readouterr().out
    assert UNCHECKED in text
    assert "1024 GPUs" in text
    assert UNCHECKED in devices.draw(RATES, Network()).get_suptitle()


SIZES = ("length=512", "heads=4", "kv-heads=2", "head-size=16", "documents=3", "implementation=xla", "runs=2")
TINY = [*(f"--{size}" for size in SIZES), "--devices=2"]


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices; tests/conftest.py simulates them")
def test_a_measurement_stands_beside_the_model(tmp_path, capsys):
    context.main([*TINY, f"--out={tmp_path}", "--masks=causal", "--strategies=ring", "--orders=balanced"])
    context.main(
        [*TINY, f"--out={tmp_path}", "--masks=documents", "--strategies=all_gather", "--orders=natural", "--add"]
    )
    found = schema.read(tmp_path / "context.json")
    assert found is not None
    assert found.about["machine"]["devices"] == 2
    assert not found.about["remarks"]  # of an output that is wrong, say
    names = [record.name for record in found.records]
    for case, how in (("causal", "ring, balanced"), ("documents", "all_gather, natural")):
        for direction in context.DIRECTIONS:
            assert f"{case}, {direction}, one GPU: time" in names
            assert f"{case}, {direction}, 2 GPUs, {how}: speed-up" in names
    assert "2 GPUs, collective-permute alone: sent by each" in names
    capsys.readouterr()
    devices.main([f"--out={tmp_path}/model.png", f"--measured={tmp_path}/context.json"])
    text = capsys.readouterr().out
    assert "checked against measurements of 2 GPUs of one host alone" in text
    assert "512 tokens, ring, 2 GPUs: model" in text
    outcomes = targets.outcomes({"a-gpu": {"context": found}})
    assert len([x for x in outcomes if x.file == "a-gpu/context" and x.value is not None]) == 2


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
    planes = [
        types.SimpleNamespace(name=f"/device:GPU:{i}", lines=x) for i, x in ((0, []), (1, streams), (10, streams))
    ]
    profile = types.SimpleNamespace(planes=planes)
    assert gpu_spans(profile) == []
    [spans] = spans_per_call(gpu_spans(profile, 1), 1)
    assert communication_of(spans) == Communication(4.0, 2.0)
    assert communication_of(spans).hidden == 0.5

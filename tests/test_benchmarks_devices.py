"""The cost model of many GPUs: what must hold of it, and that its picture says what it is."""

import dataclasses

import pytest

from benchmarks.questions import devices
from benchmarks.questions.devices import LABEL, Network, Rates, modelled

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
    devices.main([f"--out={tmp_path}/model.png"])
    assert (tmp_path / "model.png").stat().st_size > 1000
    text = capsys.readouterr().out
    assert LABEL in text
    assert "1024 GPUs" in text
    assert LABEL in devices.draw(RATES, Network()).get_suptitle()

"""The load on a server: what is sent, what is measured, and what fails."""

import asyncio
import contextlib
import itertools
import re
import time

import httpx
import pytest

from benchmarks.__main__ import main
from benchmarks.questions import serving
from benchmarks.questions.serving import Load, Timing, records_of, send, started
from tests.support.served import app_of, idle, running

SMALL = Load(requests=6, concurrency=2, lengths=((20, 5), (9, 3)), shared=8, warm_up=1)


def test_prompts_have_the_lengths_and_the_prefix():
    prompts = SMALL.prompts(256)
    assert [(len(tokens), output) for tokens, output in prompts] == [(20, 5), (9, 3)] * 3 + [(20, 5)]
    assert len({tuple(tokens[:8]) for tokens, _ in prompts}) == 1
    assert len({tuple(tokens) for tokens, _ in prompts}) == 7
    assert prompts == SMALL.prompts(256)


def test_both_kinds_of_load_and_refused_requests():
    with running() as engine:
        transport = httpx.ASGITransport(app_of(engine), raise_app_exceptions=False)
        measured = lambda load: asyncio.run(send("http://server", load, transport=transport))
        for load in (SMALL, Load(requests=5, rate=200.0, lengths=((12, 4),))):
            timings = measured(load)
            expected = itertools.islice(itertools.cycle(load.lengths), load.warm_up, load.warm_up + load.requests)
            assert [(timing.error, timing.tokens) for timing in timings] == [("", output) for _, output in expected]
            records, remarks, *_ = records_of(timings, load)
            assert (len(records), remarks) == (7, [])
            # Tokens that arrive in one event have no time between them.
            assert all(record.value.median > 0 for record in records if not re.search("failed|between", record.name))
        timings = measured(Load(requests=3, lengths=((2000, 5),), warm_up=0))
        idle(engine)
    records, remarks, *_ = records_of(timings, SMALL)
    assert records == []
    assert "status 400" in remarks[0]


def test_percentiles():
    timings = [Timing(sent=0.0, arrivals=[0.1 * n, 0.1 * n + 0.9], tokens=10) for n in range(1, 101)]
    found = {record.name: record.value.median for record in records_of(timings, SMALL)[0]}
    assert found["2 clients: first token"] == pytest.approx(5.05)
    assert found["2 clients: first token, 99th percentile"] == pytest.approx(9.901)
    assert found["2 clients: between tokens"] == pytest.approx(0.1)


def test_a_server_that_does_not_start():
    with pytest.raises(RuntimeError, match="ended with status 2"), started(["--devices=0"]):
        pass


def test_the_command(tmp_path, monkeypatch, capsys):
    with running() as engine:
        transport = httpx.ASGITransport(app_of(engine))
        real = serving.send
        monkeypatch.setattr(serving, "send", lambda *arguments: real(*arguments, transport=transport))
        (tmp_path / "lengths.txt").write_text("10 3\n4 2\n")
        main(["serving", "--requests", "3", f"--lengths={tmp_path / 'lengths.txt'}", "--out", str(tmp_path)])
        text = capsys.readouterr().out
        assert "16 clients: output" in text
        assert "start to" not in text

        @contextlib.contextmanager
        def start(options):
            assert options == ["--model", "a"]
            time.sleep(0.5)
            yield "http://server"

        monkeypatch.setattr(serving, "started", start)
        main(["serving", "--requests", "3", "--out", str(tmp_path), "--start", "--model", "a"])
    text = capsys.readouterr().out
    [seconds] = re.findall(r"start to the first token: (\S+) s", text)
    assert 0.5 < float(seconds) < 60
    assert "16 clients: output" in text
    assert (tmp_path / "serving.json").exists()

"""The soak of the engine, for a moment on a CPU."""

import pytest

from flax_layers.serving import Engine, EngineOptions
from tests.serving.soak import Client, Soak
from tests.support import served

pytestmark = pytest.mark.full
SIZES = EngineOptions(
    max_requests=4, max_step_tokens=32, num_pages=33, page_size=8, context=160, cascade_bytes=None, poison=True
)


@pytest.fixture(scope="module")
def small():
    engine = Engine(served.model(), SIZES)
    engine.warm_up()
    return engine


def test_nothing_is_wrong(small):
    soak, lines = Soak(small, seed=0), []
    has_seen_all = lambda: soak.counts["rescored tokens"] > 100 and soak.counts["cancelled"]
    assert soak.run(lambda _: has_seen_all() and small.stats().preemptions > 0, lines.append), soak.problems
    assert "preemptions" in lines[-1]


def test_a_wrong_output_and_a_lost_page_are_seen(small, monkeypatch):
    take = Client.__call__
    monkeypatch.setattr(Client, "__call__", lambda self, event: take(self, event._replace(tokens=event.tokens[:-1])))
    soak = Soak(small, seed=1)
    assert not soak.run(lambda _: bool(soak.problems), lambda line: None)
    assert "output length" in "".join(soak.problems)
    small._pages._cache.alloc(1)  # which drops a cached page if none is free
    with pytest.raises(RuntimeError, match="leaked"):
        soak.run(lambda _: True, lambda line: None)

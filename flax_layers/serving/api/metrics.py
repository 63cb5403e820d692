"""Metrics for Prometheus."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

from flax_layers.models.checkpoint.optional import needs
from flax_layers.serving.engine.requests import Stats

with needs("prometheus_client", "serve"):
    from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector

_FIRST_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_NEXT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28)
_COUNTERS = {
    "prompt_tokens": "Tokens of admitted prompts",
    "hit_tokens": "Tokens of prompts that were found in the prefix cache, or that another sample computed",
    "generated_tokens": "Sampled tokens that were delivered",
    "drafted_tokens": "Drafted tokens that were verified",
    "accepted_tokens": "Drafted tokens that were accepted",
    "steps": "Steps that were dispatched",
    "preemptions": "How often a request lost its pages and was computed again",
    "failures": "Steps that failed",
}


class _EngineCollector(Collector):
    """Reads the engine when Prometheus asks."""

    def __init__(self, stats: Callable[[], Stats]):
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        """The gauges and counters of this moment."""
        stats = self._stats()
        yield GaugeMetricFamily("jflex_requests_running", "Requests that have pages", stats.running)
        yield GaugeMetricFamily("jflex_requests_waiting", "Requests that have no pages yet", stats.waiting)
        pages = GaugeMetricFamily("jflex_pages", "Pages of the cache by state", labels=["state"])
        for state in ("free", "cached", "used"):
            pages.add_metric([state], getattr(stats, f"{state}_pages"))
        yield pages
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"jflex_{name}", text, getattr(stats, name))


class Metrics:
    """Metrics of one server, in a registry of its own."""

    def __init__(self, stats: Callable[[], Stats]):
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_EngineCollector(stats))
        histogram = functools.partial(Histogram, registry=self._registry)
        text = "From the request to the first token"
        self.first_token = histogram("jflex_time_to_first_token_seconds", text, buckets=_FIRST_SECONDS)
        text = "From a token to the next one"
        self.next_token = histogram("jflex_inter_token_latency_seconds", text, buckets=_NEXT_SECONDS)
        text = "Choices that ended, by reason"
        self._ended = Counter("jflex_requests", text, ["finish_reason"], registry=self._registry)

    def ended(self, reason: str) -> None:
        """Counts a choice that ended with `stop`, `length`, `cancelled` or `error`."""
        self._ended.labels(finish_reason=reason).inc()

    def text(self) -> bytes:
        """All of them, in the text format of Prometheus."""
        return generate_latest(self._registry)

"""Serving: continuous batching over a paged cache, with shared prefixes."""

from flax_layers.serving.engine import Closed, Engine, QueueFull, Ticket
from flax_layers.serving.options import EngineOptions
from flax_layers.serving.requests import Event, FinishReason, Request, TokenLogprobs
from flax_layers.serving.stats import Stats

__all__ = [
    "Closed",
    "Engine",
    "EngineOptions",
    "Event",
    "FinishReason",
    "QueueFull",
    "Request",
    "Stats",
    "Ticket",
    "TokenLogprobs",
]

"""Serving: continuous batching over a paged cache, with shared prefixes."""

from flax_layers.attention.streaming import Streaming
from flax_layers.serving.device.options import EngineOptions
from flax_layers.serving.device.step import TokenLogprobs
from flax_layers.serving.engine.constraints import Constraint, Guides
from flax_layers.serving.engine.engine import Engine
from flax_layers.serving.engine.requests import Closed, Event, FinishReason, QueueFull, Request, Stats
from flax_layers.serving.engine.sequence import Ticket

__all__ = [
    "Closed",
    "Constraint",
    "Engine",
    "EngineOptions",
    "Event",
    "FinishReason",
    "Guides",
    "QueueFull",
    "Request",
    "Stats",
    "Streaming",
    "Ticket",
    "TokenLogprobs",
]

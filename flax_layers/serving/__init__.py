"""Serving: continuous batching over a paged cache, with shared prefixes."""

from flax_layers.attention.streaming import Streaming
from flax_layers.serving.constraints import Constraint
from flax_layers.serving.engine.engine import Engine
from flax_layers.serving.engine.options import EngineOptions
from flax_layers.serving.engine.requests import Event, FinishReason, Request, TokenLogprobs
from flax_layers.serving.engine.stats import Stats
from flax_layers.serving.engine.ticket import Closed, QueueFull, Ticket
from flax_layers.serving.guides import Guides

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

"""Serving: continuous batching over a paged cache, with shared prefixes."""

from flax_layers.serving.constraints import Constraint
from flax_layers.serving.engine import Engine
from flax_layers.serving.guides import Guides
from flax_layers.serving.options import EngineOptions
from flax_layers.serving.requests import Event, FinishReason, Request, TokenLogprobs
from flax_layers.serving.stats import Stats
from flax_layers.serving.ticket import Closed, QueueFull, Ticket
from flax_layers.streaming_llm import Streaming

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

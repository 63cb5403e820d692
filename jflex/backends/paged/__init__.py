"""The backends of paged attention, by the names of those of `flex_attention`."""

from __future__ import annotations

import importlib

from jflex.backends.paged.base import PagedBackend

_CLASSES = {"mosaic_gpu": "PagedMosaicGpu", "triton": "PagedTriton", "xla": "PagedXla", "reference": "PagedReference"}


def get(name: str) -> PagedBackend:
    """Loads a backend by its name."""
    return getattr(importlib.import_module(f"jflex.backends.paged.{name}"), _CLASSES[name])()

"""The backends of paged attention, by the names of those of `flex_attention`."""

from __future__ import annotations

import importlib

from jflex.backends.paged_base import PagedBackend

_CLASSES = {
    "mosaic_gpu": ("gpu.paged_mosaic_gpu", "PagedMosaicGpu"),
    "triton": ("gpu.paged_triton", "PagedTriton"),
    "xla": ("xla.paged", "PagedXla"),
    "reference": ("paged_reference", "PagedReference"),
}


def get(name: str) -> PagedBackend:
    """Loads a backend by its name."""
    module, backend = _CLASSES[name]
    return getattr(importlib.import_module(f"jflex.backends.{module}"), backend)()

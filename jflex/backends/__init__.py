"""The backends, by name and in the order in which they are tried."""

from __future__ import annotations

import importlib

from jflex.backends.base import Backend

ORDER = ("mosaic_gpu", "triton", "official_triton", "xla")
KNOWN = (*ORDER, "reference")
_CLASSES = {
    "mosaic_gpu": ("gpu.mosaic_gpu", "MosaicGpu"),
    "triton": ("gpu.triton", "Triton", "pallas"),
    "official_triton": ("gpu.triton", "Triton", "official"),
    "xla": ("xla.attention", "Xla"),
    "reference": ("reference", "Reference"),
}


def get(name: str) -> Backend:
    """Loads a backend by its name."""
    module, backend, *compiler = _CLASSES[name]
    return getattr(importlib.import_module(f"jflex.backends.{module}"), backend)(*compiler)

"""Device and precision of a call."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.typing import DTypeLike


def current_device(*arrays: object) -> tuple[str, str]:
    """Platform and kind of the device that will run the call.

    An abstract device that the user set takes precedence (lowering for an absent GPU), then the devices of concrete
    arrays and of ShapeDtypeStructs with a sharding, then JAX's default.
    """
    mesh = jax.sharding.get_abstract_mesh()
    abstract = getattr(mesh, "abstract_device", None)
    if abstract is not None:
        platform = getattr(abstract, "platform", None) or "gpu"
        return _platform(platform), abstract.device_kind
    for device in map(device_of, arrays):
        if device is not None:
            return _platform(device.platform), device.device_kind
    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]  # made at run time
    device = device if isinstance(device, jax.Device) else jax.local_devices(backend=device)[0]
    return _platform(device.platform), device.device_kind


def device_of(x: Any) -> Any:
    """A device of an array, or of a shape with a sharding; None without one, and for tracers."""
    if isinstance(x, jax.Array):
        return None if isinstance(x, Tracer) else next(iter(x.devices()))
    sharding = x.sharding if isinstance(x, jax.ShapeDtypeStruct) else None
    if sharding is None or isinstance(getattr(sharding, "mesh", None), jax.sharding.AbstractMesh):
        return None
    return next(iter(sharding.device_set))


def _platform(name: str) -> str:
    return "gpu" if name in ("cuda", "rocm", "gpu") else name


def current_precision(dtype: DTypeLike) -> str | None:
    """Precision of float32 GEMMs: that of ``jax.default_matmul_precision``, None for JAX's default."""
    if jnp.dtype(dtype) != jnp.float32:
        return None
    precision = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]  # likewise
    return None if precision is None else str(precision)

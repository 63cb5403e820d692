"""The backends, by name and in the order in which they are tried, and the first that supports a call in each pass."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
from jax.core import Tracer

from jflex._call.call_warnings import count_call
from jflex._check.user_warnings import warn_user
from jflex.backends.base import Backend, Plan
from jflex.errors import UnsupportedError
from pallas_kernels.plan import GradientRequest, Refusal
from pallas_kernels.spec import AttentionSpec

ORDER = ("mosaic_gpu", "triton", "official_triton", "xla")
KNOWN = (*ORDER, "reference")
_CLASSES = {
    "mosaic_gpu": ("gpu.mosaic_gpu", "MosaicGpu"),
    "triton": ("gpu.triton", "Triton", "pallas"),
    "official_triton": ("gpu.triton", "Triton", "official"),
    "xla": ("xla.attention", "Xla"),
    "reference": ("reference", "Reference"),
}

Implementation = str | Sequence[str] | None
Requested = str | tuple[str, ...] | None
"""An `Implementation` that can be hashed."""


def get_backend(name: str) -> Backend:
    """Loads a backend by its name."""
    module, backend, *compiler = _CLASSES[name]
    return getattr(importlib.import_module(f"jflex.backends.{module}"), backend)(*compiler)


class Selection(NamedTuple):
    """The selected backend, and the rejected ones."""

    name: str | None
    plan: Plan | None
    rejections: dict[str, str]


def hashable(implementation: Implementation) -> Requested:
    """An argument `implementation` that can be hashed; one that is no sequence counts as a wrong name."""
    if isinstance(implementation, str | None):
        return implementation
    return tuple(implementation) if isinstance(implementation, Iterable) else (implementation,)


def names_of(implementation: Implementation) -> tuple[str, ...]:
    """The backend names of an argument `implementation`."""
    known = ", ".join(map(repr, KNOWN))
    if implementation is None:
        return ORDER
    names = (implementation,) if isinstance(implementation, str) else tuple(hashable(implementation) or ())
    if not names:
        raise ValueError(f"`implementation` must name at least one backend; the sequence is empty. Known are {known}.")
    for name in names:
        if name not in KNOWN:
            raise ValueError(f"`implementation` must be one of {known}, a sequence of them, or None. Got {name!r}.")
    return names


def select(implementation: Implementation, spec: AttentionSpec, requested: GradientRequest | None = None) -> Selection:
    """Selects a backend for a call with these gradients, None for forward only, without raising or warning.

    If none was named, a backend that is slower than the next one of GPU kernels is skipped, if one supports the call.
    """
    rejections: dict[str, str] = {}
    for name in names_of(implementation):
        backend = get_backend(name)
        plan = backend.plan(spec, requested)
        if isinstance(plan, Refusal):
            rejections[name] = plan.sentence(spec)
            continue
        faster = _faster(name, spec, None, requested) if implementation is None else None
        if faster is None:
            return Selection(name, plan, rejections)
        _, rejections[name] = faster
    return Selection(None, None, rejections)


def select_forward(implementation: Implementation, spec: AttentionSpec, caller: str = "flex_attention") -> str:
    """The name of the backend that runs the forward pass.

    Warns if no backend was named and a GPU would run 'xla', which is made for CPUs.
    """
    selection = check_supported(implementation, spec)
    assert selection.name is not None  # it is supported
    if implementation is None and selection.name == "xla" and spec.platform == "gpu":
        warn_user(
            f"{caller} runs on the slower implementation 'xla' on this GPU. {text_of(selection)}. Pass "
            "implementation='xla' to accept that."
        )
    return selection.name


def warn_of_new_numbers(spec: AttentionSpec, arrays: object) -> None:
    """Warns once of eager calls that compile for each Python number. Calls of traced arrays are parts of a program."""
    if not any(isinstance(x, Tracer) for x in jax.tree.leaves(arrays)):
        count_call(spec)


def check_supported(implementation: Implementation, spec: AttentionSpec) -> Selection:
    """Selects the backend of the forward pass without a warning, which the call itself gives."""
    selection = select(implementation, spec)
    if selection.name is None:
        raise UnsupportedError(_refusal(selection, spec, None))
    return selection


class Passes(NamedTuple):
    """The backends of the two passes, and the reason if they differ."""

    forward: str
    backward: str
    reason: str = ""


def select_passes(implementation: Implementation, spec: AttentionSpec, requested: GradientRequest) -> Passes:
    """The backends of both passes of a differentiated call.

    If none was named, the next backend in the order runs the backward pass where it is known to be faster.
    """
    if spec.qk_dtype is not None:
        raise UnsupportedError(f"This call has no gradients: {no_gradients(spec)}.")
    selection = select(implementation, spec, requested)
    if selection.name is None:
        raise UnsupportedError(_refusal(selection, spec, requested))
    name = selection.name
    faster = _faster(name, spec, requested, requested) if implementation is None else None
    return Passes(name, name) if faster is None else Passes(name, *faster)


def select_tangent(implementation: Implementation, spec: AttentionSpec, requested: GradientRequest) -> Selection:
    """Selects the backend of the tangent along these inputs: of the requested ones and those after them in the order.

    'xla' is the last of these, and has the tangent of every call.
    """
    names = [name for name in names_of(implementation) if name in ORDER]
    later = ORDER[ORDER.index(names[-1]) + 1 :] if names else ORDER[-1:]
    rejections: dict[str, str] = {}
    for name in dict.fromkeys((*names, *later)):
        plan = get_backend(name).plan_tangent(spec, requested)
        if not isinstance(plan, Refusal):
            return Selection(name, plan, rejections)
        rejections[name] = plan.sentence(spec)
    raise AssertionError("'xla' refused a tangent")


def no_gradients(spec: AttentionSpec) -> str:
    """Why no backend computes gradients of a call with eight bits, as part of a sentence."""
    return f"`query` and `key` of {spec.qk_dtype} are for inference (cast both to {spec.dtype})"


def _faster(
    name: str, spec: AttentionSpec, judged: GradientRequest | None, requested: GradientRequest | None
) -> tuple[str, str] | None:
    """The next backend in the order that supports the call, if it is known to be faster than `name`; not `xla`.

    Returns its name and why. The backward pass with the `judged` gradients is compared; for None, the forward pass.
    """
    reason = get_backend(name).not_preferred(spec, judged)
    if reason is None:
        return None
    later = ORDER[ORDER.index(name) + 1 : ORDER.index("xla")]
    able = (other for other in later if not isinstance(get_backend(other).plan(spec, requested), Refusal))
    other = next(able, None)
    return None if other is None else (other, reason)


def _refusal(selection: Selection, spec: AttentionSpec, requested: GradientRequest | None) -> str:
    others = [name for name in KNOWN if name not in selection.rejections]
    able = [name for name in others if not isinstance(get_backend(name).plan(spec, requested), Refusal)]
    what = "this call" if requested is None else "this call with its gradients"
    return (
        f"None of the requested implementations supports {what}. {text_of(selection)}. These do: "
        f"{', '.join(map(repr, able))}; pass implementation=None to let jflex choose."
    )


def text_of(selection: Selection) -> str:
    """Why each rejected backend does not run, as a part of a sentence."""
    return "; ".join(f"{name}: {reason}" for name, reason in selection.rejections.items())

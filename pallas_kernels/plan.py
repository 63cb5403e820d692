"""What a plan of kernels is made of: the request, tiles with their source, or a refusal.

``plan(spec, requested) -> Plan | Refusal`` stands beside each set of kernels (`pallas_kernels.triton.plan.plan`,
`pallas_kernels.mosaic_gpu.plan.plan`). It is pure and cached. Dispatch, errors, `jflex.explain` and execution
read the same plan.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.config import Tiles
from pallas_kernels.spec import AttentionSpec, Role

Kernel = Literal["forward", "decode", "dkv", "dq"]


class GradientRequest(NamedTuple):
    """Which gradients are requested: no others are computed. None in its place means forward only."""

    query: bool
    key: bool
    value: bool
    score_operands: tuple[bool, ...]
    sinks: bool = False


def all_gradients(spec: AttentionSpec) -> GradientRequest:
    """The request of every gradient there is."""
    captured = () if spec.score_mod is None else spec.score_mod.operands
    captured = tuple(jnp.issubdtype(dtype, jnp.floating) for _, dtype in captured)
    return GradientRequest(True, True, True, captured, spec.sinks)


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Why a call cannot run.

    Attributes:
      reason: One sentence without a full stop.
      mod: The mod that stands in the way, which then begins the sentence. It is named by `sentence` and not here:
        equal specs share a plan, and their mods may come from different functions.
    """

    reason: str
    mod: Role | None = None

    def sentence(self, spec: AttentionSpec) -> str:
        """The reason, with the user's function."""
        if self.mod is None:
            return self.reason
        mods = {"score": spec.score_mod, "mask": spec.mask_mod, "key": spec.key_mod, "value": spec.value_mod}
        mod = mods[self.mod]
        assert mod is not None  # it was refused
        return f"`{self.mod}_mod` {mod.source} {self.reason}"


@dataclasses.dataclass(frozen=True)
class TileChoice:
    """The tiles of one kernel.

    Attributes:
      tiles: The tiles.
      source: Who chose them: the user's `Config`, a measured table or a rule.
    """

    tiles: Tiles
    source: Literal["config", "table", "rule"]


def unreached_by_pallas(elements: int) -> bool:
    """Whether Pallas' Triton does not reach the last elements of an array of 8 bits.

    It counts elements in 32 bits, with a sign, up to 2 ** 32 bytes, and in 64 bits from there on.
    """
    return 1 << 31 < elements <= 1 << 32


def limit_of_pallas() -> str | None:
    """Why Pallas cannot compile for Triton here, or None."""
    lacking = lacking_in_pallas()
    return None if lacking is None else f"{lacking}; implementation='official_triton' runs the same kernels"


@functools.cache
def lacking_in_pallas() -> str | None:
    """What Pallas lacks to compile for Triton, or None."""
    try:
        importlib.import_module("jax.experimental.pallas.triton")
    except ImportError:
        return f"JAX {jax.__version__} has no `jax.experimental.pallas.triton`"
    return None

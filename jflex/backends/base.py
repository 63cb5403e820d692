"""What a backend is."""

from __future__ import annotations

import abc
from typing import Any, ClassVar, NamedTuple

import jax

from jflex._call.problem import Problem


class Inputs(NamedTuple):
    """The arrays of one call.

    Attributes:
      query: In the layout of the problem.
      key: Likewise.
      value: Likewise.
      lists: The index lists of the BlockMask (`jflex.block_mask.Lists`), or None.
      score_operands: The arrays that `score_mod` captures.
      mask_operands: The arrays that the mask captures.
      kv_lengths: How many keys each batch entry has, int32 [B]; None where all have S.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    lists: Any
    score_operands: tuple[jax.Array, ...]
    mask_operands: tuple[jax.Array, ...]
    kv_lengths: jax.Array | None = None


class Gradients(NamedTuple):
    """Cotangents; None where none was wanted. Those of captured arrays are float32 or of their array's dtype."""

    query: jax.Array | None
    key: jax.Array | None
    value: jax.Array | None
    score_operands: tuple[jax.Array | None, ...]


class Wanted(NamedTuple):
    """Which gradients are asked for: a backend computes no others."""

    query: bool
    key: bool
    value: bool
    score_operands: tuple[bool, ...]


class Saved(NamedTuple):
    """What the forward pass leaves for the backward pass.

    Attributes:
      out: In the layout of the problem.
      lse: float32 [B, Hq, T], natural log.
    """

    out: jax.Array
    lse: jax.Array


class SavedCotangents(NamedTuple):
    """Cotangents of `Saved`; that of lse is None where it is zero."""

    out: jax.Array
    lse: jax.Array | None


class Backend(abc.ABC):
    """One way of computing attention.

    Implementations are final, and hold no state.

    Attributes:
      name: What `implementation=` calls it.
      own_derivatives: True if JAX differentiates `forward` as it stands; then `backward` is never called.
    """

    name: ClassVar[str]
    own_derivatives: ClassVar[bool] = False

    @abc.abstractmethod
    def unsupported(self, problem: Problem) -> str | None:
        """Why this backend cannot run `problem`, as one sentence without a full stop, or None if it can."""

    @abc.abstractmethod
    def forward(self, problem: Problem, inputs: Inputs) -> Saved:
        """Computes out and lse."""

    @abc.abstractmethod
    def backward(
        self, problem: Problem, inputs: Inputs, saved: Saved, d_saved: SavedCotangents, wanted: Wanted
    ) -> Gradients:
        """Pulls the cotangents of out and lse back to the inputs."""

    def slower(self, problem: Problem) -> str | None:
        """Why another backend is faster at `problem`, as `unsupported` says it; asked where none was named."""
        del problem
        return None

    def faster_gradients(self, problem: Problem) -> tuple[str, str] | None:
        """Which backend is faster at `backward` alone, and why, as `slower` says it; asked where none was named."""
        del problem
        return None

    def describe(self, problem: Problem, *, forward_alone: bool = False) -> str:
        """Says with which tiles it would run `problem`, or its forward pass alone, for `explain`."""
        del problem, forward_alone
        return "no tiles"

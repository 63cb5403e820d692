"""The interface of a backend, for dense and paged calls."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np

from jflex.block_mask.lists import BlockLists
from pallas_kernels.plan import GradientRequest, Refusal
from pallas_kernels.spec import AttentionSpec, Captured


class Inputs(NamedTuple):
    """The arrays of one dense call."""

    query: jax.Array  # in `spec.layout`
    key: jax.Array
    value: jax.Array
    lists: BlockLists | None  # the index lists of the BlockMask, or None
    captured: Captured[jax.Array]
    kv_lengths: jax.Array | None = None  # how many keys each batch entry has, int32 [B]; None if all have S
    sinks: jax.Array | None = None  # float32 [Hq], a logit in the denominator of each query head; None without


class PagedInputs(NamedTuple):
    """The arrays of one paged call, of N packed queries and R requests."""

    query: jax.Array  # [N, Hq, D]
    key: jax.Array  # [pages of all layers, page_size, Hkv, D]
    value: jax.Array  # [pages of all layers, page_size, Hkv, Dv]
    indptr: jax.Array  # int32 [R + 1], where the queries of each request begin
    lengths: jax.Array  # int32 [R], keys of each request
    table: jax.Array  # int32 [R, max_pages], the page table
    first_page: jax.Array  # int32 [1], the first page of the layer
    captured: Captured[jax.Array]
    # of keys of eight bits, float32: [Hkv], or [pages of all layers, page_size, Hkv]; None for others
    key_scale: jax.Array | None = None
    value_scale: jax.Array | None = None
    # of latent vectors of eight bits, the rotated columns of the keys, [pages of all layers, page_size, 1, D - Dv];
    # `key` then has Dv columns, and `key_scale` is [pages of all layers, page_size, tiles]. None for others
    rope_key: jax.Array | None = None


class Gradients(NamedTuple):
    """Cotangents or tangents, None where not requested; of captured arrays in float32 or the dtype of the array."""

    query: jax.Array | None
    key: jax.Array | None
    value: jax.Array | None
    score_operands: tuple[jax.Array | None, ...]
    sinks: jax.Array | None = None

    @property
    def requested(self) -> GradientRequest:
        """The request of these."""
        query, key, value = (x is not None for x in self[:3])
        captured = tuple(x is not None for x in self.score_operands)
        return GradientRequest(query, key, value, captured, self.sinks is not None)


class Saved(NamedTuple):
    """The results of the forward pass, which the backward pass needs."""

    out: jax.Array
    lse: jax.Array  # float32 [B, Hq, T], natural log; [N, Hq] for a paged call
    # like the lse, the largest score of each row, -inf for an empty one; None if not in `spec.stats`
    max: jax.Array | None = None
    # like the lse, that of the softmax weights and the sink's, in nats; None if not in `spec.stats`
    entropy: jax.Array | None = None


class SavedCotangents(NamedTuple):
    """Cotangents of `Saved`; those of lse and entropy are None where they are zero. The max has no derivative."""

    out: jax.Array
    lse: jax.Array | None
    entropy: jax.Array | None = None


class Splits(NamedTuple):
    """Query tiles of a paged call under split-KV, and the splits of their keys, per key head."""

    tiles: int
    splits: int


class GradientsBy(NamedTuple):
    """The backend that computes gradients, and the reason."""

    backend: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Plan:
    """The plan of a backend for a call."""

    describe: Callable[[], str]  # describes kernels and tiles, for `jflex.explain`
    kernels: Any = None
    gradients: GradientsBy | None = None
    # counts the splits of a paged call from its `indptr` [R + 1] and `lengths` [R]; None if keys are not split
    count_splits: Callable[[np.ndarray, np.ndarray], Splits] | None = None
    # counts tiles of the forward kernel of a dense call: visited, full, all; None if it has lists or visits all
    count_tiles: Callable[[], tuple[int, int, int] | None] = lambda: None


class Backend(abc.ABC):
    """One way of computing attention.

    Implementations are final, and hold no state.
    """

    name: ClassVar[str]
    # True if JAX differentiates `forward` itself; then `backward` is never called
    differentiable: ClassVar[bool] = False

    @abc.abstractmethod
    def plan(self, spec: AttentionSpec, requested: GradientRequest | None) -> Plan | Refusal:
        """The plan of a call, or the refusal. Dispatch, `jflex.explain` and both passes read it."""

    @abc.abstractmethod
    def forward(self, spec: AttentionSpec, inputs: Inputs | PagedInputs) -> Saved:
        """Computes out, lse and `spec.stats`."""

    @abc.abstractmethod
    def backward(
        self, spec: AttentionSpec, inputs: Inputs, saved: Saved, d_saved: SavedCotangents, requested: GradientRequest
    ) -> Gradients:
        """Pulls the cotangents of out, lse and entropy of a dense call back to the inputs."""

    def plan_tangent(self, spec: AttentionSpec, requested: GradientRequest) -> Plan | Refusal:
        """The plan of the tangent of a dense call along these inputs, or the refusal."""
        return Refusal("it has no kernel for tangents")

    def tangent(self, spec: AttentionSpec, inputs: Inputs, saved: Saved, tangents: Gradients) -> SavedCotangents:
        """Pushes tangents of some inputs of a dense call forward to out, lse and entropy."""
        raise NotImplementedError(f"'{self.name}' plans no tangent.")

    def not_preferred(self, spec: AttentionSpec, requested: GradientRequest | None) -> str | None:
        """Why the next backend of GPU kernels in the order is faster at a call that this one supports, or None.

        Used if no backend was named. With `requested`, it is about the backward pass alone.
        """
        return None

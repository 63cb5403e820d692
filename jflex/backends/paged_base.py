"""What a backend of paged attention is."""

from __future__ import annotations

import abc
from typing import ClassVar

import jax

from jflex.paged.problem import PagedInputs, PagedProblem


class PagedBackend(abc.ABC):
    """One way of computing attention over pages.

    Implementations are final, and hold no state.

    Attributes:
      name: What `implementation=` calls it.
      own_derivatives: True if JAX differentiates `attend` as it stands; else there is no gradient.
    """

    name: ClassVar[str]
    own_derivatives: ClassVar[bool] = False

    @abc.abstractmethod
    def unsupported(self, problem: PagedProblem) -> str | None:
        """Why this backend cannot run `problem`, as one sentence without a full stop, or None if it can."""

    def slower(self, problem: PagedProblem) -> str | None:
        """Why another backend is faster at `problem`; asked where none was named."""
        del problem
        return None

    @abc.abstractmethod
    def attend(self, problem: PagedProblem, inputs: PagedInputs) -> tuple[jax.Array, jax.Array]:
        """Computes out [N, Hq, Dv] in `problem.out_dtype`, and lse, float32 [N, Hq]."""

"""The place of Mosaic GPU among the backends of paged attention."""

from __future__ import annotations

from typing import ClassVar, NoReturn

from jflex.backends.paged_base import PagedBackend
from jflex.paged.problem import PagedInputs, PagedProblem


class PagedMosaicGpu(PagedBackend):
    """Refuses every problem: there is no such kernel."""

    name: ClassVar[str] = "mosaic_gpu"

    def unsupported(self, problem: PagedProblem) -> str:
        """Always."""
        del problem
        return "it has no kernel for pages"

    def attend(self, problem: PagedProblem, inputs: PagedInputs) -> NoReturn:
        """Is never called."""
        raise AssertionError("a backend was run that refuses every problem")

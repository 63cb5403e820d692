"""Compiles the programs of an engine ahead of time."""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Callable, Sequence

import jax
from jaxtyping import Int32

from flax_layers.serving.executor import Executor
from flax_layers.serving.options import Program
from jflex.types import AnyArray

Inputs = tuple[Int32[AnyArray, " words"], Program]
"""The packed inputs of a step without requests, and its program."""


def warm_up(executor: Executor, steps: Sequence[Inputs], report: Callable[[int, int], None]) -> None:
    """Compiles programs, as many at once as there are CPUs, then runs each once.

    They are lowered one after the other, since that is Python; XLA compiles without the GIL.

    Args:
        executor: What runs them.
        steps: The programs with inputs.
        report: Called with the number of programs that are compiled, and of all, after each. What it raises ends the
            warm-up.
    """
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        try:
            lowered = (executor.lower(*step) for step in steps)
            compiling = [pool.submit(x.compile) for x in lowered if x is not None]
            for done, future in enumerate(concurrent.futures.as_completed(compiling), 1):
                future.result()
                report(done, len(steps))
        finally:
            pool.shutdown(cancel_futures=True)
    for done, step in enumerate(steps, 1):
        jax.block_until_ready(executor.run(*step))
        if not compiling:
            report(done, len(steps))

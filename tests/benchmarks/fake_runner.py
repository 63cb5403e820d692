"""A library's runner that needs no library, for tests of the flow of jobs, turns and deadlines."""

import os
import time

from benchmarks import roofline
from benchmarks.run.library_runner import LibraryRunner
from benchmarks.run.timing import Timer


class FakeTimer(Timer):
    """A second each, in a queue two; "torch-flex" hangs in the backward."""

    def timed(self, call, runs):
        if call() == ("torch-flex", "backward"):
            time.sleep(600)
        return [1.0] * runs, "made up"

    def queue_seconds(self, call, runs):
        return [2.0] * runs


class FakeRunner(LibraryRunner):
    """Peers that fare differently.

    "torch-flex" hangs in the backward, "jax-xla" has none, "jflex-mosaic" ends the process, "sdpa-flash" breaks the
    GPU, "tokamax" is not installed, and the backward of "jflex" is wrong.
    """

    timer = FakeTimer(lambda result: None, None)

    def start(self, problem):
        """Counts the work."""
        visited = problem.T * problem.S
        return {"work": roofline.work(problem, visited), "backends": {"jflex": "triton"}}

    def build(self, peer, directions):
        """By the peer's name."""
        if peer == "tokamax":
            raise ModuleNotFoundError("No module named 'tokamax'")
        if peer == "jflex-mosaic":
            print("a fault", flush=True)
            os._exit(1)
        if peer == "sdpa-flash":
            raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")
        if peer == "jax-xla" and "backward" in directions:
            raise ValueError("no backward\nand more")
        return {direction: lambda direction=direction: (peer, direction) for direction in directions}

    fill_caches = build

    def samples(self, result):
        """Wrong for jflex's backward."""
        return [[1.0, 2.0, -3.0 if result == ("jflex", "backward") else 3.0]]

    def gemm_and_copy(self, side, count):
        """Nothing."""
        return (lambda: None), (lambda: None)

    def forget(self):
        """Nothing is held."""

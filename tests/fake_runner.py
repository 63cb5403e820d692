"""A library's runner that needs no library, for tests of the flow of jobs, turns and deadlines."""

import dataclasses
import os
import time

from benchmarks import roofline
from benchmarks.run.library_runner import LibraryRunner


class FakeRunner(LibraryRunner):
    """Peers that fare differently.

    "torch-flex" hangs in the backward, "jax-xla" has none, "jflex-mosaic" ends the process, "sdpa-flash" breaks the
    GPU, "tokamax" is not installed, and the backward of "jflex" is wrong.
    """

    def start(self, problem):
        """Counts the work."""
        visited = problem.T * problem.S
        return {"work": dataclasses.asdict(roofline.work(problem, visited)), "backends": {"jflex": "triton"}}

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

    def samples(self, call):
        """Wrong for jflex's backward."""
        return [[1.0, 2.0, -3.0 if call() == ("jflex", "backward") else 3.0]]

    def timed(self, call, runs):
        """A second each."""
        if call() == ("torch-flex", "backward"):
            time.sleep(600)
        return [1.0] * runs, "made up"

    def queue_seconds(self, call, runs):
        """Two seconds each."""
        return [2.0] * runs

    def wait(self, result):
        """Nothing is asynchronous."""

    def rates(self):
        """Round numbers."""
        return {"matmul_flops": 1e12, "copy_bytes": 1e12}

    def large_product(self):
        """Nothing."""
        return lambda: None

    def forget(self):
        """Nothing is held."""

"""Compiles and times the JAX peers."""

from __future__ import annotations

import dataclasses
import functools
import gc
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import roofline
from benchmarks.peers import jax_peers, jax_serving
from benchmarks.problems import Problem
from benchmarks.run import timing
from benchmarks.run.library_runner import Call, LibraryRunner


class JaxRunner(LibraryRunner):
    """Runs peers on JAX's default device."""

    def start(self, problem: Problem) -> dict[str, Any]:
        """Draws the arrays, makes the BlockMask and counts the work."""
        self._problem = problem
        self._mods, self._captured = jax_peers.mods_of(problem)
        if problem.served:
            return {"work": dataclasses.asdict(roofline.served_work(problem))}
        block_mask, visited = jax_peers.block_mask_of(problem, self._mods(self._captured))
        self._inputs = jax_peers.inputs_of(problem, self._captured, block_mask)
        done = roofline.work(problem, visited, [x.shape for x in self._captured.values()])
        backends = jax_peers.backends_of(problem, self._mods, self._inputs)
        return {"work": dataclasses.asdict(done), "backends": backends}

    def build(self, peer: str, directions: Sequence[str]) -> dict[str, Call]:
        """The forward is one program; so is the backward, from the residuals that `jax.vjp` keeps."""
        if self._problem.served:
            function, inputs = jax_serving.program(peer, self._problem, self._mods, self._captured)
            return {"forward": functools.partial(jax.jit(function), *inputs)}
        attend = jax_peers.attention(peer, self._problem, self._mods)
        calls: dict[str, Call] = {}
        if "forward" in directions:
            calls["forward"] = functools.partial(jax.jit(attend), *self._inputs)
        if "backward" in directions:
            out, pull = jax.jit(jax_peers.with_residuals(attend, self._problem))(*self._inputs)
            cotangent = jax.random.normal(jax.random.key(1), out.shape, out.dtype)
            calls["backward"] = functools.partial(jax.jit(lambda pull, cotangent: pull(cotangent)), pull, cotangent)
        return calls

    def fill_caches(self, peer: str, directions: Sequence[str]) -> None:
        """Lowers and compiles the same programs without running them."""
        if self._problem.served:
            function, inputs = jax_serving.program(peer, self._problem, self._mods, self._captured)
            jax.jit(function).lower(*inputs).compile()
            return
        attend = jax_peers.attention(peer, self._problem, self._mods)
        if "forward" in directions:
            jax.jit(attend).lower(*self._inputs).compile()
        if "backward" in directions:
            both = jax.jit(jax_peers.with_residuals(attend, self._problem))
            both.lower(*self._inputs).compile()
            out, pull = jax.eval_shape(both, *self._inputs)
            jax.jit(lambda pull, cotangent: pull(cotangent)).lower(pull, out).compile()

    def samples(self, call: Call) -> list[list[float]]:
        """Of what a call returns."""
        return timing.samples(call())

    def timed(self, call: Call, runs: int) -> tuple[list[float], str]:
        """By JAX's profiler."""
        found = timing.timed(call, runs, warmup=1)
        return found.seconds, found.method

    def queue_seconds(self, call: Call, runs: int) -> list[float]:
        """Launches included."""
        return timing.queue_seconds(call, runs)

    def wait(self, result: Any) -> None:
        """Until the device is idle."""
        jax.block_until_ready(result)

    def rates(self) -> dict[str, float]:
        """Of a GEMM of bfloat16 matrices of side 8192, and of reading and writing 1 GiB."""
        side, count = (8192, 2**28) if jax.default_backend() == "gpu" else (256, 2**16)
        left, right = jax.random.normal(jax.random.key(0), (2, side, side), jnp.bfloat16)
        numbers = jnp.arange(count, dtype=jnp.uint32)
        product = functools.partial(jax.jit(jnp.matmul), left, right)
        copy = functools.partial(jax.jit(jnp.invert), numbers)
        seconds = [float(np.median(timing.device_seconds(call))) for call in (product, copy)]
        return {"matmul_flops": 2 * side**3 / seconds[0], "copy_bytes": 2 * numbers.nbytes / seconds[1]}

    def large_product(self) -> Call:
        """A GEMM of bfloat16 matrices of side 8192."""
        x = jax.random.normal(jax.random.key(0), (8192, 8192), jnp.bfloat16)
        return functools.partial(jax.jit(jnp.matmul), x, x)

    def forget(self) -> None:
        """Drops the arrays and the programs."""
        for name in ("_problem", "_inputs", "_mods", "_captured"):
            vars(self).pop(name, None)
        gc.collect()

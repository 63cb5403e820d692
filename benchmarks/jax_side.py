"""The JAX peers."""

from __future__ import annotations

import dataclasses
import functools
import gc
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jflex
from benchmarks import agreement, jax_serving, roofline, timing
from benchmarks.problems import Problem
from benchmarks.side import Call, Side
from benchmarks.variants import LARGE, VARIANTS, WINDOW, Mods, Operations

OPERATIONS = Operations(jnp.tanh, lambda x: x.astype(jnp.float32), jnp.clip)
# (query, key, value, captured arrays, BlockMask or None) -> out
Attend = Callable[..., Any]


class Inputs(NamedTuple):
    """The arrays of a problem; all are arguments of what is jitted, so that none is a constant of the program."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    captured: dict[str, jax.Array]
    block_mask: jflex.BlockMask | None


class JaxSide(Side):
    """Peers that JAX runs, on its default device."""

    def start(self, problem: Problem) -> dict[str, Any]:
        """Draws the arrays, makes the BlockMask and counts the work."""
        self._problem = problem
        variant = VARIANTS[problem.variant]
        indices = {name: jnp.asarray(array) for name, array in variant.indices(problem).items()}
        captured = {name: jnp.asarray(array, problem.dtype if name in LARGE else jnp.float32)
                    for name, array in variant.captured(problem).items()}  # fmt: skip
        self._mods = lambda captured: variant.make(problem, {**indices, **captured}, OPERATIONS)
        self._captured = captured
        if problem.served:
            return {"work": dataclasses.asdict(roofline.served_work(problem))}
        block_mask, visited = _block_mask(problem, self._mods(captured))
        self._inputs = _draw(problem, captured, block_mask)
        done = roofline.work(problem, visited, [x.shape for x in captured.values()])
        return {"work": dataclasses.asdict(done), "backends": _backends(problem, self._mods, self._inputs)}

    def prepare(
        self, problem: dict[str, Any], peers: Sequence[str], directions: Sequence[str], ahead: bool = False
    ) -> dict[str, Any]:
        """Compares what peers compute where queries continue sequences, and tells of it otherwise; see `agreement`."""
        answer = super().prepare(problem, peers, directions, ahead)
        if self._problem.served:
            outputs = {name: prepared.calls["forward"]() for name, prepared in self._prepared.items()}
            for name, reason in jax_serving.doubts(outputs).items():
                answer["unable"][name] = {"forward": reason}
                del answer["ready"][name], self._prepared[name]
            return answer
        return answer | {"samples": {name: {direction: _samples(call()) for direction, call in prepared.calls.items()}
                                     for name, prepared in self._prepared.items()}}  # fmt: skip

    def build(self, peer: str, directions: Sequence[str]) -> dict[str, Call]:
        """The forward is one program; so is the backward, from the residuals that `jax.vjp` keeps."""
        if self._problem.served:
            function, inputs = jax_serving.program(peer, self._problem, self._mods, self._captured)
            return {"forward": functools.partial(jax.jit(function), *inputs)}
        attend = _ATTEND[peer](self._problem, self._mods)
        calls: dict[str, Call] = {}
        if "forward" in directions:
            calls["forward"] = functools.partial(jax.jit(attend), *self._inputs)
        if "backward" in directions:
            out, pull = jax.jit(_with_residuals(attend, self._problem))(*self._inputs)
            cotangent = jax.random.normal(jax.random.key(1), out.shape, out.dtype)
            calls["backward"] = functools.partial(jax.jit(lambda pull, cotangent: pull(cotangent)), pull, cotangent)
        return calls

    def compile_only(self, peer: str, directions: Sequence[str]) -> None:
        """Lowers and compiles the same programs without running them."""
        if self._problem.served:
            function, inputs = jax_serving.program(peer, self._problem, self._mods, self._captured)
            jax.jit(function).lower(*inputs).compile()
            return
        attend = _ATTEND[peer](self._problem, self._mods)
        if "forward" in directions:
            jax.jit(attend).lower(*self._inputs).compile()
        if "backward" in directions:
            both = jax.jit(_with_residuals(attend, self._problem))
            both.lower(*self._inputs).compile()
            out, pull = jax.eval_shape(both, *self._inputs)
            jax.jit(lambda pull, cotangent: pull(cotangent)).lower(pull, out).compile()

    def timed(self, call: Call, runs: int) -> tuple[list[float], str]:
        """By JAX's profiler."""
        return tuple(timing.timed(call, runs, warmup=1))

    def queue_seconds(self, call: Call, runs: int) -> list[float]:
        """Launches included."""
        return timing.queue_seconds(call, runs)

    def wait(self, result: Any) -> None:
        """Until the device has done all."""
        jax.block_until_ready(result)

    def rates(self) -> dict[str, float]:
        """Of a product of bfloat16 matrices of side 8192, and of reading and writing 1 GiB."""
        side, count = (8192, 2**28) if jax.default_backend() == "gpu" else (256, 2**16)
        left, right = jax.random.normal(jax.random.key(0), (2, side, side), jnp.bfloat16)
        numbers = jnp.arange(count, dtype=jnp.uint32)
        product = functools.partial(jax.jit(jnp.matmul), left, right)
        copy = functools.partial(jax.jit(jnp.invert), numbers)
        seconds = [float(np.median(timing.device_seconds(call))) for call in (product, copy)]
        return {"matmul_flops": 2 * side**3 / seconds[0], "copy_bytes": 2 * numbers.nbytes / seconds[1]}

    def forget(self) -> None:
        """Drops the arrays and the programs."""
        self._inputs = self._mods = self._captured = self._problem = None
        gc.collect()

    def check(self) -> dict[str, Any]:
        """Of a large product: seconds by the profiler, with the method, and by the wall."""
        x = jax.random.normal(jax.random.key(0), (8192, 8192), jnp.bfloat16)
        product = functools.partial(jax.jit(jnp.matmul), x, x)
        started = time.perf_counter()
        seconds, method = timing.timed(product)
        return {"profiler": seconds, "method": method, "queue": timing.queue_seconds(product),
                "took": time.perf_counter() - started}  # fmt: skip


def _samples(arrays: Any) -> list[list[float]]:
    found = []
    for x in jax.tree.leaves(arrays):
        step = (x.size // agreement.SAMPLES) | 1  # odd, so that not all are of one column
        found.append(np.asarray(x.reshape(-1)[::step], np.float64).round(7).tolist())
    return found


def _draw(problem: Problem, captured: dict[str, jax.Array], block_mask: jflex.BlockMask | None) -> Inputs:
    keys = jax.random.split(jax.random.key(0), 3)
    heads, lengths = (problem.Hq, problem.Hkv, problem.Hkv), (problem.T, problem.S, problem.S)
    sizes = (problem.D, problem.D, problem.value_size)
    arrays = [jax.random.normal(key, (problem.B, length, H, size), problem.dtype)
              for key, length, H, size in zip(keys, lengths, heads, sizes, strict=True)]  # fmt: skip
    return Inputs(*arrays, captured, block_mask)


def _block_mask(problem: Problem, mods: Mods) -> tuple[jflex.BlockMask | None, int]:
    """As the form of the problem wants it, and how many elements the BlockMask visits in any form."""
    if mods.mask is None:
        return None, problem.T * problem.S
    create = functools.partial(jflex.create_block_mask, mods.mask, None, None, problem.T, problem.S)
    counted = create()
    dense = counted.to_dense()
    visited = roofline.visited_elements(np.asarray(dense[0, 0]) > 0, (problem.T, problem.S), counted.block_size)
    block_mask = counted if problem.block == 128 else create(block_size=problem.block)
    if problem.form == "partial":
        block_mask = jflex.BlockMask.from_kv_blocks(
            dense.sum(-1), jnp.argsort(-dense, stable=True), mask_mod=mods.mask, seq_lengths=(problem.T, problem.S)
        )
    return (None if problem.form == "everywhere" else block_mask), visited


def _with_residuals(attend: Attend, problem: Problem) -> Callable[..., Any]:
    """``(*inputs) -> (out, pull)``; what is pulled back to depends on the problem."""

    def both(query: Any, key: Any, value: Any, captured: Any, block_mask: Any) -> Any:
        if problem.differentiated:
            return jax.vjp(lambda q, k, v, c: attend(q, k, v, c, block_mask), query, key, value, captured)
        return jax.vjp(lambda q, k, v: attend(q, k, v, captured, block_mask), query, key, value)

    return both


Bound = Callable[[Mapping[str, Any]], Mods]


def _jflex(problem: Problem, mods: Bound, implementation: str | None = None) -> Attend:
    def attend(query: Any, key: Any, value: Any, captured: Any, block_mask: Any) -> Any:
        mask, score = mods(captured)
        everywhere = mask if problem.form == "everywhere" else None
        return jflex.flex_attention(
            query, key, value, score, block_mask, mask_mod=everywhere, implementation=implementation
        )

    return attend


_IMPLEMENTATIONS = {"jflex": None, "jflex-mosaic": "mosaic_gpu", "jflex-triton": "triton"}


def _backends(problem: Problem, mods: Bound, inputs: Inputs) -> dict[str, str]:
    """Which backend of jflex runs a problem, for each peer that is jflex."""
    (mask, score), (query, key, value, _, block_mask) = mods(inputs.captured), inputs
    everywhere = mask if problem.form == "everywhere" else None
    account = jflex.explain(query, key, value, score, block_mask, mask_mod=everywhere)
    return {name: account.backend if wanted is None else wanted for name, wanted in _IMPLEMENTATIONS.items()}


def _jax_nn(problem: Problem, mods: Bound, implementation: str) -> Attend:
    window = (min(WINDOW, problem.S // 2) - 1, 0) if problem.variant == "sliding_window" else None
    causal = problem.variant in ("causal", "sliding_window")

    def attend(query: Any, key: Any, value: Any, captured: Any, block_mask: Any) -> Any:
        bias = captured["bias"][None] if "bias" in captured else None
        return jax.nn.dot_product_attention(query, key, value, bias, is_causal=causal, local_window_size=window,
                                            implementation=implementation)  # fmt: skip

    return attend


def _tokamax(problem: Problem, mods: Bound) -> Attend:
    import tokamax  # type: ignore

    return lambda query, key, value, captured, block_mask: tokamax.dot_product_attention(
        query, key, value, is_causal=problem.variant == "causal", implementation="mosaic"
    )


_ATTEND: dict[str, Callable[[Problem, Bound], Attend]] = {
    **{name: functools.partial(_jflex, implementation=wanted) for name, wanted in _IMPLEMENTATIONS.items()},
    "jax-cudnn": functools.partial(_jax_nn, implementation="cudnn"),
    "jax-xla": functools.partial(_jax_nn, implementation="xla"),
    "tokamax": _tokamax,
}

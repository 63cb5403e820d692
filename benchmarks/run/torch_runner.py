"""Compiles and times the torch peers. Imports torch, and not JAX."""

from __future__ import annotations

import contextlib
import functools
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._functorch import config as functorch_config

from benchmarks.peers import torch_peers
from benchmarks.problems import Problem
from benchmarks.run.device_time import (
    COLD_BYTES,
    PROFILER,
    QUEUED,
    WALL,
    WARM_SECONDS,
    Span,
    busy_per_call,
    wall_seconds,
)
from benchmarks.run.library_runner import PEER_ERRORS, Call, LibraryRunner, first_line

EVENTS = "CUDA events around a call, cold L2"
_EVICT = "bitwise_not"  # the kernel that empties the cache; no attention has it


class TorchRunner(LibraryRunner):
    """Runs peers on the GPU if there is one; without one nothing is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        # The backward is called again and again on what one forward has left.
        functorch_config.donated_buffer = False

    def start(self, problem: Problem) -> dict[str, Any]:
        """Draws the arrays."""
        self._problem = problem
        torch.manual_seed(0)
        dtype = getattr(torch, problem.dtype)
        if problem.page:  # who reads pages draws them
            self._arrays, self._leaves = [], []
            return {}
        heads, lengths = (problem.Hq, problem.Hkv, problem.Hkv), (problem.T, problem.S, problem.S)
        sizes = (problem.D, problem.D, problem.value_size)
        self._arrays = [
            torch.randn(problem.B, H, length, size, device=self._device, dtype=dtype)
            for H, length, size in zip(heads, lengths, sizes, strict=True)
        ]
        self._bound = torch_peers.bind(problem, self._device)
        self._leaves = [*self._arrays, *(self._bound.captured.values() if problem.differentiated else ())]
        return {}

    def build(self, peer: str, directions: Sequence[str]) -> dict[str, Call]:
        """The backward is `torch.autograd.grad` on the graph of one forward."""
        for leaf in self._leaves:
            leaf.requires_grad_("backward" in directions)
        attend = self._attend(peer)
        calls: dict[str, Call] = {}
        if "forward" in directions:
            detached = [x.detach() for x in self._arrays]  # a backward beside it must not change it
            calls["forward"] = functools.partial(_without_gradients, attend, detached)
        if "backward" in directions:
            out = attend(*self._arrays)
            calls["backward"] = functools.partial(
                torch.autograd.grad, out, self._leaves, torch.randn_like(out), retain_graph=True
            )
        return calls

    def _attend(self, peer: str) -> Callable[..., Any]:
        if peer == "flashinfer":
            return torch_peers.flashinfer_decode(self._problem, self._device)
        return torch_peers.attention(peer, self._bound)

    def fill_caches(self, peer: str, directions: Sequence[str]) -> None:
        """There is no other way than to run it."""
        for call in self.build(peer, directions).values():
            call()
        self.wait(None)

    def timed(self, call: Call, runs: int) -> tuple[list[float], str]:
        """By torch's profiler; by CUDA events if that fails."""
        if self._device == "cpu":
            return wall_seconds(call, self.wait, runs), WALL
        started = time.perf_counter()
        while time.perf_counter() < started + WARM_SECONDS:
            call()
            torch.cuda.synchronize()
        try:
            return _profiled_seconds(call, runs), PROFILER
        except PEER_ERRORS as error:
            return _event_seconds(call, runs), f"{EVENTS}: {first_line(error)}"

    def queue_seconds(self, call: Call, runs: int) -> list[float]:
        """Launches included."""
        self.wait(call())
        return wall_seconds(call, self.wait, runs, QUEUED)

    def wait(self, result: Any) -> None:
        """Until the device is idle."""
        if self._device == "cuda":
            torch.cuda.synchronize()

    def rates(self) -> dict[str, float]:
        """Of a GEMM of bfloat16 matrices of side 8192, and of reading and writing 1 GiB."""
        side, count = (8192, 2**28) if self._device == "cuda" else (256, 2**16)
        left, right = torch.randn(2, side, side, device=self._device).to(torch.bfloat16)
        numbers = torch.arange(count, device=self._device, dtype=torch.int32)
        seconds = [statistics.median(self.timed(call, 10)[0]) for call in (lambda: left @ right, numbers.clone)]
        return {"matmul_flops": 2 * side**3 / seconds[0], "copy_bytes": 2 * 4 * count / seconds[1]}

    def large_product(self) -> Call:
        """A GEMM of bfloat16 matrices of side 8192."""
        x = torch.randn(8192, 8192, device=self._device).to(torch.bfloat16)
        return lambda: x @ x

    def forget(self) -> None:
        """Drops the arrays and the programs."""
        for name in ("_problem", "_arrays", "_leaves", "_bound"):
            vars(self).pop(name, None)
        torch._dynamo.reset()
        gc.collect()
        if self._device == "cuda":
            torch.cuda.empty_cache()

    def errors(self) -> tuple[type[BaseException], ...]:
        """Triton's are of no common kind."""
        with contextlib.suppress(ImportError):
            from triton.errors import TritonError

            return (*PEER_ERRORS, TritonError)
        return PEER_ERRORS


def _without_gradients(attend: Callable[..., Any], arrays: Sequence[Any]) -> Any:
    with torch.no_grad():
        return attend(*arrays)


def _profiled_seconds(call: Call, runs: int) -> list[float]:
    buffer = torch.zeros(COLD_BYTES // 4, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(runs):
            buffer.bitwise_not_()
            call()
        torch.cuda.synchronize()
    return busy_per_call(_spans(profile.profiler.kineto_results.events()), runs)


def _spans(events: Sequence[Any]) -> Iterator[Span]:
    seen = [x for x in events if x.device_type() == torch.autograd.DeviceType.CUDA and not x.is_user_annotation()]
    first = min((x.start_ns() for x in seen), default=0)
    for x in seen:
        yield Span((x.start_ns() - first) * 1e-9, x.duration_ns() * 1e-9, _EVICT in x.name())


def _event_seconds(call: Call, runs: int) -> list[float]:
    buffer = torch.zeros(COLD_BYTES // 4, dtype=torch.int32, device="cuda")
    seconds = []
    for _ in range(runs):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        buffer.bitwise_not_()
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return seconds

"""Compiles and times the torch peers. Imports torch, and not JAX."""

import functools
import gc
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._functorch import config as functorch_config

from benchmarks.peers.torch import attention as torch_attention
from benchmarks.peers.torch.pages import pages_of
from benchmarks.problems import Problem
from benchmarks.run.library_runner import LibraryRunner
from benchmarks.run.timing import COLD_BYTES, Call, Span, Timer, busy_per_call

_EVICT = "bitwise_not"  # the kernel that empties the cache; no attention has it


class TorchRunner(LibraryRunner):
    """Runs peers on the GPU if there is one; without one nothing is compiled."""

    def __init__(self) -> None:
        super().__init__()
        on_gpu = torch.cuda.is_available()
        self._device = "cuda" if on_gpu else "cpu"
        self.timer = Timer(lambda result: torch.cuda.synchronize() if on_gpu else None, _profiled if on_gpu else None)
        # The backward is called again and again on what one forward has left.
        functorch_config.donated_buffer = False

    def start(self, problem: Problem) -> dict[str, Any]:
        """Draws the arrays."""
        self._problem = problem
        torch.manual_seed(0)
        if problem.page:
            self._pages = pages_of(problem, self._device)
            return {}
        keys, dtype = (problem.Hkv, problem.S), getattr(torch, problem.dtype)
        shapes = ((problem.Hq, problem.T, problem.D), (*keys, problem.D), (*keys, problem.value_size))
        self._arrays = [torch.randn(problem.B, *shape, device=self._device, dtype=dtype) for shape in shapes]
        self._bound = torch_attention.bind(problem, self._device)
        return {}

    def build(self, peer: str, directions: Sequence[str]) -> dict[str, Call]:
        """The backward is `torch.autograd.grad` on the graph of one forward."""
        if self._problem.page:
            return {"forward": torch.no_grad()(torch_attention.paged_attention(peer, self._problem, self._pages))}
        arrays = torch_attention.arranged(peer, self._problem, self._arrays)
        leaves = [*arrays, *(self._bound.captured.values() if self._problem.differentiated else ())]
        for leaf in leaves:
            leaf.requires_grad_("backward" in directions)
        attend = torch_attention.attention(peer, self._bound)
        calls: dict[str, Call] = {}
        if "forward" in directions:
            detached = [x.detach() for x in arrays]  # a backward beside it must not change it
            calls["forward"] = torch.no_grad()(functools.partial(attend, *detached))
        if "backward" in directions:
            out = attend(*arrays)
            pull = functools.partial(torch.autograd.grad, out, leaves, retain_graph=True)
            calls["backward"] = functools.partial(pull, torch.randn_like(out))
        return calls

    def gemm_and_copy(self, side: int, count: int) -> tuple[Call, Call]:
        first, second = torch.randn(2, side, side, device=self._device).to(torch.bfloat16)
        return lambda: first @ second, torch.arange(count, device=self._device, dtype=torch.int32).clone

    def forget(self) -> None:
        for name in ("_problem", "_arrays", "_pages", "_bound"):
            vars(self).pop(name, None)
        torch._dynamo.reset()
        gc.collect()
        if self._device == "cuda":
            torch.cuda.empty_cache()


def _profiled(call: Call, runs: int) -> list[float]:
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

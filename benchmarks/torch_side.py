"""The torch peers. Loads torch, and not JAX."""

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
from torch.nn.attention import SDPBackend, flex_attention, sdpa_kernel

from benchmarks import torch_serving
from benchmarks.problems import Problem
from benchmarks.side import PEER_ERRORS, Call, Side, first_line
from benchmarks.spans import Span, busy_per_call
from benchmarks.variants import CAP, LARGE, VARIANTS, WINDOW, Mods, Operations

PROFILER = "kernels seen by the profiler, cold L2"
EVENTS = "CUDA events around a call, cold L2"
WALL = "wall time of a call"
_COLD_BYTES = 256 * 2**20
_EVICT = "bitwise_not"  # the kernel that empties the cache; no attention has it
_QUEUED = 10
_WARM_SECONDS = 0.03
_MOST_EAGER = 2**28  # elements that `create_block_mask` may hold
OPERATIONS = Operations(torch.tanh, lambda x: x.to(torch.float32), torch.clamp)
_BACKENDS = {"sdpa-cudnn": SDPBackend.CUDNN_ATTENTION, "sdpa-flash": SDPBackend.FLASH_ATTENTION,
             "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION}  # fmt: skip


class TorchSide(Side):
    """Peers that torch runs, on the GPU if there is one; without one nothing is compiled."""

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
        self._arrays = [torch.randn(problem.B, H, length, size, device=self._device, dtype=dtype)
                        for H, length, size in zip(heads, lengths, sizes, strict=True)]  # fmt: skip
        variant = VARIANTS[problem.variant]
        self._captured = {
            name: torch.as_tensor(array).to(self._device, dtype if name in LARGE else torch.float32)
            for name, array in variant.captured(problem).items()
        }
        indices = {
            name: torch.as_tensor(array, device=self._device) for name, array in variant.indices(problem).items()
        }
        self._leaves = [*self._arrays, *(self._captured.values() if problem.differentiated else ())]
        self._mods = variant.make(problem, {**indices, **self._captured}, OPERATIONS)
        return {}

    def build(self, peer: str, directions: Sequence[str]) -> dict[str, Call]:
        """The backward is `torch.autograd.grad` on the graph of one forward."""
        for leaf in self._leaves:
            leaf.requires_grad_("backward" in directions)
        attend = self._attend(peer)
        calls: dict[str, Call] = {}
        if "forward" in directions:
            detached = [x.detach() for x in self._arrays]  # that a backward is wanted, too, must not change it
            calls["forward"] = functools.partial(_without_gradients, attend, detached)
        if "backward" in directions:
            out = attend(*self._arrays)
            calls["backward"] = functools.partial(
                torch.autograd.grad, out, self._leaves, torch.randn_like(out), retain_graph=True
            )
        return calls

    def _attend(self, peer: str) -> Callable[..., Any]:
        if peer in _BACKENDS:
            return self._sdpa(_BACKENDS[peer])
        if peer == "fa4":
            return _flash_attention_4(self._problem)
        if peer == "flashinfer":
            return torch_serving.flashinfer_decode(self._problem, self._device)
        if peer.startswith("torch-decode"):
            return torch_serving.flex_decode(self._problem, self._device, blocks=peer == "torch-decode-mask")
        return self._flex()

    def compile_only(self, peer: str, directions: Sequence[str]) -> None:
        """There is no other way than to run it."""
        for call in self.build(peer, directions).values():
            call()
        self.wait(None)

    def timed(self, call: Call, runs: int) -> tuple[list[float], str]:
        """By torch's profiler; by CUDA events if that fails."""
        if self._device == "cpu":
            return _wall_seconds(call, runs), WALL
        started = time.perf_counter()
        while time.perf_counter() < started + _WARM_SECONDS:
            call()
            torch.cuda.synchronize()
        try:
            return _profiled_seconds(call, runs), PROFILER
        except PEER_ERRORS as error:
            return _event_seconds(call, runs), f"{EVENTS}: {first_line(error)}"

    def queue_seconds(self, call: Call, runs: int) -> list[float]:
        """Launches included."""
        self.wait(call())
        seconds = []
        for _ in range(runs):
            started = time.perf_counter()
            for _ in range(_QUEUED):
                call()
            self.wait(None)
            seconds.append((time.perf_counter() - started) / _QUEUED)
        return seconds

    def wait(self, result: Any) -> None:
        """Until the device has done all."""
        if self._device == "cuda":
            torch.cuda.synchronize()

    def rates(self) -> dict[str, float]:
        """Of a product of bfloat16 matrices of side 8192, and of reading and writing 1 GiB."""
        side, count = (8192, 2**28) if self._device == "cuda" else (256, 2**16)
        left, right = torch.randn(2, side, side, device=self._device).to(torch.bfloat16)
        numbers = torch.arange(count, device=self._device, dtype=torch.int32)
        seconds = [statistics.median(self.timed(call, 10)[0]) for call in (lambda: left @ right, numbers.clone)]
        return {"matmul_flops": 2 * side**3 / seconds[0], "copy_bytes": 2 * 4 * count / seconds[1]}

    def forget(self) -> None:
        """Drops the arrays and the programs."""
        self._problem = self._arrays = self._captured = self._leaves = self._mods = None
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

    def check(self) -> dict[str, Any]:
        """Of a large product: seconds by the profiler, with the method, and by the wall."""
        x = torch.randn(8192, 8192, device=self._device).to(torch.bfloat16)
        started = time.perf_counter()
        seconds, method = self.timed(lambda: x @ x, 10)
        return {"profiler": seconds, "method": method, "queue": self.queue_seconds(lambda: x @ x, 10),
                "took": time.perf_counter() - started}  # fmt: skip

    def _flex(self) -> Callable[..., Any]:
        problem, (mask, score) = self._problem, self._mods
        block_mask = None
        if problem.form == "everywhere":
            score = _hiding(self._mods)
        elif mask is not None:
            block_mask = _block_mask(mask, problem, self._device)
        options = {"score_mod": score, "block_mask": block_mask, "enable_gqa": problem.Hq != problem.Hkv}
        compiled = self._device == "cuda"
        attend = (
            torch.compile(flex_attention.flex_attention, dynamic=False) if compiled else flex_attention.flex_attention
        )
        return lambda query, key, value: attend(query, key, value, **options)

    def _sdpa(self, backend: SDPBackend) -> Callable[..., Any]:
        problem = self._problem
        options = {"is_causal": problem.variant == "causal", "enable_gqa": problem.Hq != problem.Hkv}
        if problem.variant not in ("noop", "causal"):
            options = options | {"attn_mask": _itemised(problem, self._mods, self._captured, self._device)}

        def attend(query: Any, key: Any, value: Any) -> Any:
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(query, key, value, **options)

        return attend


def _flash_attention_4(problem: Problem) -> Callable[..., Any]:
    """FlashAttention's kernels in CuTe's Python, which know these variants without a mod.

    Raises:
      ImportError: They are not installed.
    """
    from flash_attn.cute import flash_attn_func  # type: ignore

    window = (min(WINDOW, problem.S // 2) - 1, 0) if problem.variant == "sliding_window" else (None, None)
    options = {"causal": problem.variant in ("causal", "softcap"), "window_size": window,
               "softcap": CAP if problem.variant == "softcap" else 0.0}  # fmt: skip

    def attend(query: Any, key: Any, value: Any) -> Any:
        found = flash_attn_func(*(x.transpose(1, 2) for x in (query, key, value)), **options)
        return found[0] if isinstance(found, tuple) else found  # with its lse, in some versions

    return attend


def _without_gradients(attend: Callable[..., Any], arrays: Sequence[Any]) -> Any:
    with torch.no_grad():
        return attend(*arrays)


def _block_mask(mask: Callable[..., Any], problem: Problem, device: str) -> Any:
    create = flex_attention.create_block_mask
    if device == "cuda" and problem.T * problem.S > _MOST_EAGER:
        create = torch.compile(create)
    block_mask = create(mask, None, None, problem.T, problem.S, device=device)
    if problem.form == "split":
        return block_mask
    dense = block_mask.to_dense()
    order = torch.argsort(dense, dim=-1, descending=True, stable=True).to(torch.int32)
    return flex_attention.BlockMask.from_kv_blocks(
        dense.sum(-1).to(torch.int32), order, mask_mod=mask, seq_lengths=(problem.T, problem.S)
    )


def _hiding(mods: Mods) -> Callable[..., Any]:
    """The mask as a score_mod, which is how torch takes one without a BlockMask."""

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        kept = score if mods.score is None else mods.score(score, b, h, q_idx, kv_idx)
        return torch.where(mods.mask(b, h, q_idx, kv_idx), kept, -float("inf"))

    return score_mod


def _itemised(problem: Problem, mods: Mods, captured: dict[str, Any], device: str) -> Any:
    """The mask or the bias as one array."""
    if "bias" in captured:
        return captured["bias"][None].expand(problem.B, -1, -1, -1)
    q_idx, kv_idx = torch.arange(problem.T, device=device)[:, None], torch.arange(problem.S, device=device)
    visible = mods.mask(0, 0, q_idx, kv_idx)
    if mods.score is None:
        return visible
    dtype = getattr(torch, problem.dtype)
    heads = [mods.score(torch.zeros((), device=device), 0, h, q_idx, kv_idx) for h in range(problem.Hq)]
    return torch.stack([torch.where(visible, x, -float("inf")).to(dtype) for x in heads])


def _wall_seconds(call: Call, runs: int) -> list[float]:
    seconds = []
    for _ in range(runs):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return seconds


def _profiled_seconds(call: Call, runs: int) -> list[float]:
    buffer = torch.zeros(_COLD_BYTES // 4, dtype=torch.int32, device="cuda")
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
    buffer = torch.zeros(_COLD_BYTES // 4, dtype=torch.int32, device="cuda")
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

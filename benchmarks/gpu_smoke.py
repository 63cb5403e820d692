"""One honest timing of causal attention on a GPU: ``python -m benchmarks.gpu_smoke [--rounds N]``.

Peers take turns. A round of a peer is a queue of calls, so long that the launches overlap with the kernels: CUDA events
around it for torch, wall time until the last result is there for JAX. The arrays are larger than the L2 cache. The
backward's time is that of forward and backward less that of the forward.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jflex
from benchmarks.baselines import forward_and_backward
from benchmarks.results import Figure, write
from benchmarks.timing import figure

SHAPES = ((4, 16, 16384, 64), (2, 16, 16384, 128))  # B, H, S, D
TITLE = "causal, bfloat16, (B, H, S, D); TFLOP/s count half of the square, and the backward as 2.5 forwards"
_QUEUE = 10  # calls of a round
_PEER_ERRORS = (ImportError, RuntimeError, ValueError, TypeError, AttributeError, OSError)

Rounds = Callable[[], float]  # seconds of one call


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_smoke", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9, help="repetitions of each figure")
    rounds = parser.parse_args().rounds
    if jax.default_backend() != "gpu":
        parser.error(f"JAX sees no GPU: its default backend is {jax.default_backend()!r}.")
    figures, remarks = [], []
    for shape in SHAPES:
        more_figures, more_remarks = measure(shape, rounds)
        figures, remarks = figures + more_figures, remarks + more_remarks
    device = jax.devices()[0].device_kind
    folder = "h200" if "H200" in device else device.lower().replace(" ", "-")
    path = write(folder, "smoke", TITLE, figures, remarks, {"device": device} | _clocks())
    print(f"{path}: {TITLE}")
    for x in figures:
        print(f"  {x.name}: {x.value:g} {x.unit} ({x.low:g} to {x.high:g})")
    print("\n".join(remarks))


def measure(shape: tuple[int, int, int, int], rounds: int) -> tuple[list[Figure], list[str]]:
    """The figures of all peers at one shape, and why a peer is left out."""
    peers: dict[str, tuple[Rounds, Rounds]] = {}
    remarks = []
    for name, prepare in (("jflex triton", _jflex), ("torch FlexAttention", _torch), ("jax.nn cuDNN", _cudnn)):
        started = time.perf_counter()
        try:
            calls = prepare(shape)
            [call() for call in calls]  # compiles, and warms up
        except _PEER_ERRORS as error:
            first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
            remarks.append(f"{name} at {shape} is left out: {type(error).__name__}: {first_line[:300]}")
        else:
            peers[name] = calls
        print(f"{name} at {shape}: ready after {time.perf_counter() - started:.1f} s", flush=True)
    times = {name: ([], []) for name in peers}
    for _ in range(rounds):
        for name, calls in peers.items():
            for values, call in zip(times[name], calls, strict=True):
                values.append(call())
    return [x for name in peers for x in _figures(name, shape, *times[name])], remarks


def _figures(name: str, shape: tuple[int, int, int, int], forward: list[float], both: list[float]) -> list[Figure]:
    B, H, S, D = shape
    flops = 4 * B * H * S * S * D / 2
    backward = [b - f for f, b in zip(forward, both, strict=True)]
    figures = []
    for part, seconds, work in (("forward", forward, flops), ("backward", backward, 2.5 * flops)):
        for values, unit in (([t * 1e3 for t in seconds], "ms"), ([work / t / 1e12 for t in seconds], "TFLOP/s")):
            figures.append(figure(f"{part} {shape}, {name}", values, unit))
    return figures


def _jflex(shape: tuple[int, int, int, int]) -> tuple[Rounds, Rounds]:
    S = shape[2]
    block_mask = jflex.create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, S, S)
    attend = functools.partial(jflex.flex_attention, implementation="triton")
    return _jax_rounds(shape, lambda q, k, v: attend(q, k, v, block_mask=block_mask))


def _cudnn(shape: tuple[int, int, int, int]) -> tuple[Rounds, Rounds]:
    attend = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
    return _jax_rounds(shape, lambda q, k, v: attend(q, k, v))


def _jax_rounds(shape: tuple[int, int, int, int], attention: Callable[..., Any]) -> tuple[Rounds, Rounds]:
    B, H, S, D = shape
    keys = jax.random.split(jax.random.key(0), 4)
    arrays = [jax.random.normal(key, (B, S, H, D), jnp.bfloat16) for key in keys]
    forward, both = jax.jit(attention), jax.jit(forward_and_backward(attention))

    def seconds(call: Callable[[], Any]) -> float:
        jax.block_until_ready(call())
        started = time.perf_counter()
        for _ in range(_QUEUE):
            result = call()
        jax.block_until_ready(result)
        return (time.perf_counter() - started) / _QUEUE

    return lambda: seconds(lambda: forward(*arrays[:3])), lambda: seconds(lambda: both(*arrays))


def _torch(shape: tuple[int, int, int, int]) -> tuple[Rounds, Rounds]:
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    B, H, S, D = shape
    query, key, value, cotangent = (torch.randn(B, H, S, D, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    leaves = [x.requires_grad_() for x in (query, key, value)]
    block_mask = create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, S, S, device="cuda")
    compiled = torch.compile(flex_attention, dynamic=False)

    def forward() -> Any:
        with torch.no_grad():
            return compiled(query, key, value, block_mask=block_mask)

    def both() -> Any:
        return torch.autograd.grad(compiled(query, key, value, block_mask=block_mask), leaves, cotangent)

    def seconds(call: Callable[[], Any]) -> float:
        call()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for _ in range(_QUEUE):
            call()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3 / _QUEUE

    return lambda: seconds(forward), lambda: seconds(both)


def _clocks() -> dict[str, str]:
    """Driver and clocks as `nvidia-smi` tells them, right after the measurement."""
    import subprocess

    fields = "driver_version,clocks.sm,clocks.max.sm,power.limit"
    try:
        done = subprocess.run(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"], capture_output=True,
                              text=True, check=True)  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return {}
    return dict(zip(fields.split(","), done.stdout.splitlines()[0].split(", "), strict=False))


if __name__ == "__main__":
    main()

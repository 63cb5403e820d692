"""A decoder with a static cache in torch, as one would write it after gpt-fast: the peer of generation."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.peers.torch.decoder import Block, rotary_angles
from benchmarks.questions.generation import Load, Shape, check_counts
from benchmarks.run.torch_runner import TorchRunner


class CachedBlock(Block):
    """A block that writes keys and values of new tokens to its cache, and attends to those or to the cache."""

    def __init__(self, shape: Shape, batch: int, room: int) -> None:
        heads = (shape.heads, shape.kv_heads)
        super().__init__(shape.width, shape.mlp_width, heads, shape.head_size, dtype=torch.bfloat16)
        for name in ("keys", "values"):
            cache = torch.zeros((batch, shape.kv_heads, room, self.size), dtype=torch.bfloat16)
            self.register_buffer(name, cache)

    def forward(self, stream: Tensor, angles: Tensor, positions: Tensor, seen: Tensor | None) -> Tensor:
        query, key, value = self.query_key_value(stream, angles)
        self.keys.index_copy_(2, positions, key)
        self.values.index_copy_(2, positions, value)
        if seen is None:
            attended = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        else:
            attended = scaled_dot_product_attention(query, self.keys, self.values, attn_mask=seen, enable_gqa=True)
        return self.after_attention(stream, attended)


class Model(nn.Module):
    """From tokens to the most probable next one."""

    def __init__(self, shape: Shape, batch: int, room: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocabulary, shape.width, dtype=torch.bfloat16)
        self.blocks = nn.ModuleList(CachedBlock(shape, batch, room) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, 1e-6, dtype=torch.bfloat16)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False, dtype=torch.bfloat16)
        self.register_buffer("angles", rotary_angles(room, shape.head_size, 500000.0))
        for weight in self.parameters():
            if weight.ndim > 1:
                nn.init.normal_(weight, std=0.02)

    def forward(self, tokens: Tensor, positions: Tensor, seen: Tensor | None) -> Tensor:
        stream, angles = self.embed(tokens), self.angles[positions]
        for block in self.blocks:
            stream = block(stream, angles, positions, seen)
        return self.head(self.norm(stream[:, -1:])).argmax(-1)


class Programs(NamedTuple):
    """Compiled functions."""

    prefill: Callable[[Tensor], Tensor]  # tokens [B, T] to the first token [B, 1]
    step: Callable[[Tensor, Tensor], Tensor]  # the last token [B, 1] and its position [1] to the next one


def programs(shape: Shape, load: Load) -> Programs:
    """The prompt, and a step over the cache; on a CPU nothing is compiled."""
    room = -(-(load.prompt + load.tokens) // 128) * 128
    model, places = Model(shape, load.batch, room), torch.arange(room)

    def prefill(tokens: Tensor) -> Tensor:
        return model(tokens, places[: load.prompt], None)

    def step(token: Tensor, position: Tensor) -> Tensor:
        return model(token, position, (places <= position)[None, None, None, :])

    if places.device.type == "cpu":
        return Programs(prefill, step)
    options: dict[str, Any] = {"fullgraph": True, "dynamic": False}
    return Programs(torch.compile(prefill, **options), torch.compile(step, mode="reduce-overhead", **options))


def torch_generation(shape: Shape, load: Load, runs: int, device: str = "cuda") -> dict[str, Any]:
    """Seconds of prompt and decoding of each run, after two that compile and record graphs; and the copy rate."""
    torch.manual_seed(0)
    with torch.no_grad():
        with torch.device(device):  # not around the calls: torch.compile does not trace all of them under it
            prompts = torch.randint(shape.vocabulary, (load.batch, load.prompt))
            compiled = programs(shape, load)
        times = [_seconds(compiled, prompts, load.tokens) for _ in range(runs + 2)][2:]
    prefill, decode = ([x[i] for x in times] for i in range(2))
    return {"prefill": prefill, "decode": decode, "copy": TorchRunner().rates()["copy_bytes"]}


def _seconds(compiled: Programs, prompts: Tensor, tokens: int) -> tuple[float, float]:
    """Until the first token, and of all others; greedy, without a look at the tokens before the end."""
    wait()
    started = time.perf_counter()
    token = compiled.prefill(prompts)
    wait()
    begun = time.perf_counter()
    position, written = torch.tensor([prompts.shape[1]], device=prompts.device), [token]
    for _ in range(tokens - 1):
        token = compiled.step(token, position).clone()  # a graph writes to the same memory again
        written.append(token)
        position += 1
    chosen = torch.cat(written, dim=1).tolist()
    ended = time.perf_counter()
    check_counts(chosen, tokens)
    return begun - started, ended - begun


def wait() -> None:
    """Until a GPU is idle, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()

"""A decoder with a static cache in torch, as one would write it after gpt-fast: the peer of generation."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.questions.generation import Load, Shape, check_counts
from benchmarks.run.torch_runner import TorchRunner

Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""Of the query, key and value of new tokens, and the keys and values of the cache."""


class Block(nn.Module):
    """Attention and a gated MLP; projections of one input are one matrix."""

    def __init__(self, shape: Shape, batch: int, room: int) -> None:
        super().__init__()
        self.heads, self.size = (shape.heads, shape.kv_heads, shape.kv_heads), shape.head_size
        linear = lambda inputs, outputs: nn.Linear(inputs, outputs, bias=False, dtype=torch.bfloat16)
        self.project = linear(shape.width, sum(self.heads) * self.size)
        self.out = linear(shape.heads * self.size, shape.width)
        self.gate_and_up = linear(shape.width, 2 * shape.mlp_width)
        self.down = linear(shape.mlp_width, shape.width)
        self.attention_norm = nn.RMSNorm(shape.width, 1e-6, dtype=torch.bfloat16)
        self.mlp_norm = nn.RMSNorm(shape.width, 1e-6, dtype=torch.bfloat16)
        for name in ("keys", "values"):
            cache = torch.zeros((batch, shape.kv_heads, room, self.size), dtype=torch.bfloat16)
            self.register_buffer(name, cache)

    def forward(self, stream: Tensor, angles: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        projected = self.project(self.attention_norm(stream)).view(*stream.shape[:2], sum(self.heads), self.size)
        query, key, value = projected.transpose(1, 2).split(self.heads, dim=1)
        query, key = rotate(query, angles), rotate(key, angles)
        self.keys.index_copy_(2, positions, key)
        self.values.index_copy_(2, positions, value)
        attended = attend(query, key, value, self.keys, self.values)
        stream = stream + self.out(attended.transpose(1, 2).flatten(2))
        gate, up = self.gate_and_up(self.mlp_norm(stream)).chunk(2, dim=-1)
        return stream + self.down(functional.silu(gate) * up)


def rotate(heads: Tensor, angles: Tensor) -> Tensor:
    """The rotary embedding, in float32."""
    first, second = heads.float().chunk(2, dim=-1)
    cosine, sine = angles.cos(), angles.sin()
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1).to(heads.dtype)


class Model(nn.Module):
    """From tokens to the most probable next one."""

    def __init__(self, shape: Shape, batch: int, room: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocabulary, shape.width, dtype=torch.bfloat16)
        self.blocks = nn.ModuleList(Block(shape, batch, room) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, 1e-6, dtype=torch.bfloat16)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False, dtype=torch.bfloat16)
        exponents = torch.arange(0, shape.head_size, 2) / shape.head_size
        self.register_buffer("angles", torch.outer(torch.arange(room).float(), 500000.0**-exponents))
        for weight in self.parameters():
            if weight.ndim > 1:
                nn.init.normal_(weight, std=0.02)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        stream, angles = self.embed(tokens), self.angles[positions]
        for block in self.blocks:
            stream = block(stream, angles, positions, attend)
        return self.head(self.norm(stream[:, -1:])).argmax(-1)


class Programs(NamedTuple):
    """Compiled functions."""

    prefill: Callable[[Tensor], Tensor]  # tokens [B, T] to the first token [B, 1]
    step: Callable[[Tensor, Tensor], Tensor]  # the last token [B, 1] and its position [1] to the next one


def programs(shape: Shape, load: Load, how: str) -> Programs:
    """The prompt, and a step that attends with SDPA or FlexAttention; on a CPU nothing is compiled."""
    room = -(-(load.prompt + load.tokens) // 128) * 128
    model, places = Model(shape, load.batch, room), torch.arange(room)
    sdpa, causal = functional.scaled_dot_product_attention, lambda b, h, q_idx, kv_idx: q_idx >= kv_idx
    block_mask = create_block_mask(causal, 1, 1, room, room, device=str(places.device))

    def prefill(tokens: Tensor) -> Tensor:
        attend = lambda query, key, value, *cache: sdpa(query, key, value, is_causal=True, enable_gqa=True)
        return model(tokens, places[: load.prompt], attend)

    def step_with_sdpa(token: Tensor, position: Tensor) -> Tensor:
        seen = (places <= position)[None, None, None, :]
        attend = lambda query, key, value, *cache: sdpa(query, *cache, attn_mask=seen, enable_gqa=True)
        return model(token, position, attend)

    def step_with_flex(token: Tensor, position: Tensor) -> Tensor:
        row = block_mask[:, :, position // block_mask.BLOCK_SIZE[0]]
        row.mask_mod = lambda b, h, q_idx, kv_idx: causal(b, h, q_idx + position[0], kv_idx)
        row.seq_lengths = (1, room)
        attend = lambda query, key, value, *cache: flex_attention(query, *cache, block_mask=row, enable_gqa=True)
        return model(token, position, attend)

    step = {"sdpa": step_with_sdpa, "flex": step_with_flex}[how]
    if places.device.type == "cpu":
        return Programs(prefill, step)
    options: dict[str, Any] = {"fullgraph": True, "dynamic": False}
    return Programs(torch.compile(prefill, **options), torch.compile(step, mode="reduce-overhead", **options))


def torch_generation(shape: Shape, load: Load, runs: int, how: str, device: str = "cuda") -> dict[str, Any]:
    """Seconds of prompt and decoding of each run, after two that compile and record graphs; and the copy rate."""
    torch.manual_seed(0)
    with torch.no_grad():
        with torch.device(device):  # not around the calls: torch.compile does not trace all of them under it
            prompts = torch.randint(shape.vocabulary, (load.batch, load.prompt))
            compiled = programs(shape, load, how)
        times = [_seconds(compiled, prompts, load.tokens) for _ in range(runs + 2)][2:]
    prefill, decode = ([x[i] for x in times] for i in range(2))
    return {"prefill": prefill, "decode": decode, "copy": TorchRunner().rates()["copy_bytes"]}


def _seconds(compiled: Programs, prompts: Tensor, tokens: int) -> tuple[float, float]:
    """Until the first token, and of all others; greedy, without a look at the tokens before the end."""
    _wait()
    started = time.perf_counter()
    token = compiled.prefill(prompts)
    _wait()
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


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()

"""`transformers` under the loads of the engine: `generate` with a static cache, and `generate_batch`."""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from benchmarks.peers.torch.generation import wait
from benchmarks.questions.engine import Results, Sizes
from benchmarks.questions.generation import Shape
from benchmarks.questions.question import Measured
from benchmarks.results.schema import Record
from benchmarks.run.timing import describe_error, failures


def torch_serving(shape: Shape, sizes: Sizes, device: str = "cuda") -> Measured:
    """Tokens a second of both for each number of clients; a job."""
    results, model = Results(), _model(shape, device)
    draw = torch.Generator().manual_seed(0)
    for clients in sizes.clients:
        requests = max(4, 2 * clients)
        prompts = torch.randint(model.config.vocab_size, (requests, sizes.prompt), generator=draw)
        for name, kind, count in (
            ("generate, static cache", _static, clients),
            ("generate_batch", _continuous, requests),
        ):
            label = f"{clients} clients, transformers: {name}"
            try:
                seconds = _seconds(functools.partial(kind, model, prompts[:count], sizes.output))
            except failures() as error:
                results.remarks.append(f"{label} is left out: {describe_error(error)}")
                continue
            results.add(Record.single(label, count * sizes.output / seconds, "tokens/s"))
        model.destroy_cached_continuous_batching_manager()  # it was sized for so many requests
    return results.measured()


def _model(shape: Shape, device: str) -> Any:
    config = LlamaConfig(
        vocab_size=shape.vocabulary, hidden_size=shape.width, intermediate_size=shape.mlp_width,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_size, max_position_embeddings=8192, rope_theta=500000.0,
    )  # fmt: skip
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def _seconds(generate: Callable[[], None]) -> float:
    """Time of the second run; the first one compiles and records graphs."""
    generate()
    wait()
    started = time.perf_counter()
    generate()
    wait()
    return time.perf_counter() - started


def _static(model: Any, prompts: torch.Tensor, tokens: int) -> None:
    inputs = prompts.to(model.device)
    options = GenerationConfig(
        max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, cache_implementation="static", pad_token_id=0
    )
    with torch.no_grad():
        tokens_out = model.generate(inputs, attention_mask=torch.ones_like(inputs), generation_config=options)
    _check([tokens_out.shape[1] - inputs.shape[1]], tokens)


def _continuous(model: Any, prompts: torch.Tensor, tokens: int) -> None:
    options = GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    with torch.no_grad():
        answers = model.generate_batch(  # the second run finds the manager, the cache and the graphs of the first
            prompts.tolist(), generation_config=options, progress_bar=False, persistent_manager=True
        )
    _check([len(one.generated_tokens) for one in answers.values()], tokens)


def _check(counts: Sequence[int], expected: int) -> None:
    if not counts or set(counts) != {expected}:
        raise RuntimeError(f"Generated {sorted(set(counts))} tokens, expected {expected} of each.")

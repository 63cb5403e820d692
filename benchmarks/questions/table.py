"""The questions besides the speed of attention: a row for each result file that is not a suite's."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.questions import context, eight_bits, engine, generation, gpu, serving, training
from benchmarks.questions.question import Question, one_of


def _choices(names: Mapping[str, object] | tuple[str, ...], **more: Any) -> dict[str, Any]:
    """Some of these, or all."""
    return {"nargs": "+", "choices": list(names), "default": list(names)} | more


def _number(default: float | None, text: str = "", **more: Any) -> dict[str, Any]:
    kind = float if isinstance(default, float) else int
    return {"type": kind, "default": default, "help": text} | more


def _numbers(*default: float, text: str = "", kind: type = int) -> dict[str, Any]:
    return {"type": kind, "nargs": "+", "default": default, "help": text}


QUESTIONS = (
    Question(
        "gpu",
        "first_call",
        "from a fresh process to the first result of causal forward and backward; B 1, H 16, S 4096, D 64, bfloat16",
        gpu.first_call,
        needs_gpu=True,
    ),
    Question(
        "numerics",
        "eight_bits",
        "caches of eight bits and of bfloat16 against float64: 65,536 normal keys and values of 128, 2 heads, the keys "
        "of the second 8 times as large, and as many latent vectors of 512 columns and 64 rotated ones; 16 needles in "
        "each head: keys that one query each matches with a score of 14; in % of the exact output, and of all weights",
        eight_bits.eight_bits,
    ),
    Question(
        "training",
        "training",
        "training steps of whole models, bfloat16 with float32 masters, 32,768 tokens; MFU of the dense bfloat16 peak",
        training.training,
        {
            "problems": _choices(training.PROBLEMS, default=[x for x in training.PROBLEMS if x != "tiny"]),
            "peers": _choices(training.ATTENTION),
            "meshes": {"nargs": "+", "default": ["data=1"], "help": "for jflex; peers have one device"},
            "steps": _number(10, "timed steps"),
            "limit": _number(240.0, "seconds of a process"),
        },
        keeps=True,
    ),
    Question(
        "generation",
        "generation",
        "generation with the shape of Llama 3 8B, random weights, bfloat16, greedy; prompts of 1024 tokens, 256 more",
        generation.generation,
        {
            "batches": _numbers(1, 32),
            "peers": _choices(generation.PEERS),
            "runs": _number(5),
            "limit": _number(240.0, "seconds of a process"),
        },
        needs_gpu=True,
        keeps=True,
    ),
    Question(
        "engine",
        "engine",
        "the serving engine with the shape of Llama 3 8B, random weights, bfloat16, greedy",
        engine.engine,
        {
            "parts": {"nargs": "*", "type": one_of(*engine.PARTS), "help": f"all without: {', '.join(engine.PARTS)}"},
            "clients": _numbers(*engine.Sizes().clients, text="of closed loops"),
            "step_tokens": _number(engine.Sizes().step_tokens, "tokens of a step, at most"),
            "shares": _numbers(*engine.Sizes().shares, text="of Poisson arrivals", kind=float) | {"nargs": "*"},
            "cache_dtype": {"choices": eight_bits.DTYPES, "help": "of keys and values; without: that of the model"},
            "limit": _number(560.0, "seconds of a part"),
        },
        needs_gpu=True,
        keeps=True,
    ),
    Question(
        "serving",
        "serving",
        "load on a server of OpenAI's completions API",
        serving.serving,
        {
            "url": {"default": "http://localhost:8000", "help": "of the server, without /v1"},
            "key": {"help": "API key"},
            "start": {"nargs": argparse.REMAINDER, "help": "starts flax_layers.serve with the options that follow"},
            "requests": _number(128, "measured requests"),
            "concurrency": _numbers(16, text="clients of a closed loop"),
            "rate": {"type": float, "nargs": "+", "default": [], "help": "requests a second, Poisson, instead"},
            "prompt_tokens": _number(128, "of each prompt"),
            "output_tokens": _number(64, "of each answer"),
            "lengths": {"type": Path, "metavar": "FILE", "help": "lines of two numbers: prompt and output tokens"},
            "shared": _number(0, "tokens that all prompts begin with"),
            "vocabulary": _number(256, "prompts are of tokens below it"),
            "seed": _number(0),
        },
    ),
    Question(
        "context",
        "context",
        context.Sizes().title,
        context.context,
        {
            "masks": _choices(context.MASKS),
            "strategies": _choices(context.STRATEGIES),
            "orders": _choices(context.ORDERS),
            **{name: _number(default) for name, default in context.Sizes()._asdict().items()},
            "devices": _number(None, "so many of the host's; without: all"),
            "implementation": {"help": "without: that which jflex takes"},
            "runs": _number(context.RUNS, "repetitions, two of a long call"),
            "limit": {"type": float, "metavar": "SECONDS", "help": "begin nothing after so many"},
        },
    ),
)
COMMANDS = {
    "gpu": "the first call on a GPU",
    "numerics": "errors of caches of eight bits against float64",
    "training": "training steps of whole models beside peers",
    "generation": "prefill and decoding with a whole model beside torch",
    "engine": "the serving engine under load, with a whole model",
    "serving": "load on a server of OpenAI's completions API",
    "context": "context parallel attention on several GPUs beside one",
}

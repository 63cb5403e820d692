"""Generation with a whole model beside torch: ``python -m benchmarks.questions.generation``.

The model has the shape of Llama 3 8B and random weights in bfloat16. jflex decodes with `flax_layers.generate`, from
the dense and from the paged cache; the peer is `benchmarks.peers.torch_generation`, with SDPA and with FlexAttention,
of which the faster counts. A step reads all weights but the embeddings, and the keys and values of all tokens: its
share of the copy rate is those bytes a second, over the bytes that a copy reads and writes a second in that process.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from benchmarks.questions import command
from benchmarks.questions.command import Measured, Questions
from benchmarks.results.schema import Record
from benchmarks.run.jobs import SHARED_GPU, Job, RunJob, run_job, run_jobs

_HERE, _PEER = "benchmarks.questions.generation", "benchmarks.peers.torch_generation"
_VARIABLES = {**SHARED_GPU, "TORCHINDUCTOR_COMPILE_THREADS": "8"}
_ITEM = 2  # bytes of bfloat16
COPIED_BYTES = 1 << 30  # bytes of the array that is copied
QUESTIONS = Questions()


class Shape(NamedTuple):
    """Sizes of a Llama."""

    layers: int = 32
    width: int = 4096
    mlp_width: int = 14336
    heads: int = 32
    kv_heads: int = 8
    head_size: int = 128
    vocabulary: int = 128256


class Load(NamedTuple):
    """What is generated."""

    batch: int
    prompt: int = 1024
    tokens: int = 256


def step_bytes(shape: Shape, load: Load) -> int:
    """Bytes that a decoding step must read, in the mean over all steps.

    >>> round(step_bytes(Shape(), Load(1)) / 1e9, 2), round(step_bytes(Shape(), Load(32)) / 1e9, 2)
    (15.16, 19.84)
    """
    attention = shape.width * shape.head_size * 2 * (shape.heads + shape.kv_heads)
    weights = shape.layers * (attention + 3 * shape.width * shape.mlp_width) + shape.width * shape.vocabulary
    keys = load.prompt + load.tokens / 2  # the first of `tokens` comes from the prompt
    cache = load.batch * keys * shape.layers * 2 * shape.kv_heads * shape.head_size
    return round(_ITEM * (weights + cache))


@QUESTIONS.of(
    "generation with the shape of Llama 3 8B, random weights, bfloat16, greedy; prompts of 1024 tokens, 256 tokens each"
)
def generation(
    shape: Shape = Shape(),  # noqa: B008  immutable
    loads: Sequence[Load] = (Load(1), Load(32)),
    runs: int = 5,
    run: RunJob = run_job,
) -> Measured:
    """How many tokens a second, which share of the copy rate, and how does it compare to torch?"""
    records, remarks = [], []
    for load in loads:
        shared = {"shape": list(shape), "load": list(load), "runs": runs}
        calls = [(f"jflex {cache}", _HERE, "jax_generation", {"cache": cache}) for cache in ("dense", "paged")]
        calls += [(f"torch {how}", _PEER, "torch_generation", {"how": how}) for how in ("sdpa", "flex")]
        jobs = [Job(label, module, function, shared | own, _VARIABLES, 400.0) for label, module, function, own in calls]
        found, failed = run_jobs(jobs, run, at_once=1)
        remarks += [f"batch {load.batch}: {remark}" for remark in failed]
        records += [record for peer, one in found.items() for record in _records(peer, one, shape, load)]
        records += _ratios(found, load)
    return records, remarks


def _records(peer: str, found: dict[str, Any], shape: Shape, load: Load) -> list[Record]:
    label = f"batch {load.batch}, {peer}"
    steps, moved = load.tokens - 1, step_bytes(shape, load)
    rates = [moved * steps / seconds for seconds in found["decode"]]
    return [
        Record.of(f"{label}: decode", [load.batch * steps / s for s in found["decode"]], "tokens/s"),
        Record.of(f"{label}: a step", [s / steps for s in found["decode"]], "s"),
        Record.of(f"{label}: share of the copy rate", [100 * rate / found["copy"] for rate in rates], "%"),
        Record.of(f"{label}: prompt", [load.batch * load.prompt / s for s in found["prefill"]], "tokens/s"),
        Record.single(f"{label}: copy rate", round(found["copy"] / 1e12, 3), "TB/s"),
    ]


def _ratios(found: dict[str, dict[str, Any]], load: Load) -> list[Record]:
    """Of the tokens per second of jflex to those of the faster torch."""
    decode = {peer: statistics.median(one["decode"]) for peer, one in found.items()}
    torch = [seconds for peer, seconds in decode.items() if peer.startswith("torch")]
    ours = {peer: seconds for peer, seconds in decode.items() if peer.startswith("jflex")}
    name = lambda peer: f"batch {load.batch}, {peer}: decode over that of the faster torch"
    return [Record.single(name(peer), round(min(torch) / s, 3), "x") for peer, s in ours.items() if torch]


def copy_rate(copy: Callable[[], Any], wait: Callable[[Any], Any]) -> float:
    """Bytes read and written a second, of the median of ten queues of ten copies."""
    seconds = []
    wait(copy())
    for _ in range(10):
        started = time.perf_counter()
        for _ in range(10):
            result = copy()
        wait(result)
        seconds.append((time.perf_counter() - started) / 10)
    return 2 * COPIED_BYTES / statistics.median(seconds)


def jax_generation(shape: Sequence[int], load: Sequence[int], runs: int, cache: str) -> dict[str, Any]:
    """Seconds of prompt and decoding of each run, after one that compiles; and the copy rate."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from flax_layers.generate import generate

    sizes, (batch, prompt, tokens) = Shape(*shape), load
    model = _jax_model(sizes)
    prompts = np.random.default_rng(0).integers(0, sizes.vocabulary, (batch, prompt)).tolist()
    found: dict[str, Any] = {"prefill": [], "decode": []}
    for number in range(runs + 1):
        generation = generate(model, prompts, max_tokens=tokens, cache=cache, stop_tokens=())
        if [len(result.tokens) for result in generation.results()] != [tokens] * batch:
            raise RuntimeError("There are not as many tokens as were asked for.")
        if number:
            found["prefill"].append(generation.speed.prefill_seconds)
            found["decode"].append(generation.speed.decode_seconds)
    copied, copy = jnp.arange(COPIED_BYTES // 4, dtype=jnp.uint32), jax.jit(jnp.invert)
    return {**found, "copy": copy_rate(lambda: copy(copied), jax.block_until_ready)}


def _jax_model(sizes: Shape) -> Any:
    import jax.numpy as jnp
    from flax import nnx

    from flax_layers.models import Decoder, LayerConfig, ModelConfig

    config = ModelConfig(
        vocabulary=sizes.vocabulary,
        width=sizes.width,
        mlp_width=sizes.mlp_width,
        num_heads=sizes.heads,
        num_kv_heads=sizes.kv_heads,
        head_dim=sizes.head_size,
        layers=(LayerConfig(rotary_base=500000.0),) * sizes.layers,
        max_positions=8192,
    )
    return Decoder(config, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))


def main(words: Sequence[str] | None = None) -> None:
    """The command."""
    command.run("generation", QUESTIONS, words, on_gpu=True)


if __name__ == "__main__":
    main()

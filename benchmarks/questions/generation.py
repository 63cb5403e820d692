"""Generation with a whole model beside torch: ``python -m benchmarks generation``.

The model has the shape of Llama 3 8B and random weights in bfloat16. jflex decodes with `flax_layers.generate`, from
the dense and from the paged cache; the peer is `benchmarks.peers.torch_generation`, with SDPA and with FlexAttention,
and the faster counts. A step reads all weights but the embeddings, and the keys and values of all tokens: its
share of the copy rate is those bytes a second, over the bytes that a copy reads and writes a second in that process.

In a limited time, one batch at a time: a file that is there keeps the records of others. With the variables
`JAX_COMPILATION_CACHE_DIR` and `TORCHINDUCTOR_CACHE_DIR`, a second call on the same machine need not compile again.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from benchmarks.environment import gpu_facts, results_folder
from benchmarks.questions.command import Measured
from benchmarks.results import schema
from benchmarks.results.schema import Record
from benchmarks.run.jobs import SHARED_GPU, Job, RunJob, run_job, run_jobs

_HERE, _PEER = "benchmarks.questions.generation", "benchmarks.peers.torch_generation"
_VARIABLES = {**SHARED_GPU, "TORCHINDUCTOR_COMPILE_THREADS": "8"}
_ITEM = 2  # bytes of bfloat16
COPIED_BYTES = 1 << 30  # bytes of the array that is copied
_TITLE = "generation with the shape of Llama 3 8B, random weights, bfloat16, greedy; prompts of 1024 tokens, 256 more"
_RATIO = ": decode over that of the faster torch"
_PEERS = {
    "jflex dense": (_HERE, "jax_generation", {"cache": "dense"}),
    "jflex paged": (_HERE, "jax_generation", {"cache": "paged"}),
    "torch sdpa": (_PEER, "torch_generation", {"how": "sdpa"}),
    "torch flex": (_PEER, "torch_generation", {"how": "flex"}),
}


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
    keys = load.prompt + load.tokens / 2  # the first of `tokens` comes from the prompt
    return round(weight_bytes(shape) + load.batch * keys * key_bytes(shape))


def weight_bytes(shape: Shape) -> int:
    """Bytes of all weights but the embeddings."""
    attention = shape.width * shape.head_size * 2 * (shape.heads + shape.kv_heads)
    block = attention + 3 * shape.width * shape.mlp_width
    return _ITEM * (shape.layers * block + shape.width * shape.vocabulary)


def key_bytes(shape: Shape) -> int:
    """Bytes of a key and its value, in all layers."""
    return _ITEM * shape.layers * 2 * shape.kv_heads * shape.head_size


def generation(
    shape: Shape,
    load: Load,
    peers: Sequence[str] = tuple(_PEERS),
    runs: int = 5,
    seconds: float = 240.0,
    run: RunJob = run_job,
) -> Measured:
    """How many tokens a second, which share of the copy rate, and how does it compare to torch?

    Args:
      shape: Of the model.
      load: What is generated.
      peers: Names in `_PEERS`, one after the other, each in a process of its own.
      runs: Of each, after one that compiles.
      seconds: After which a process is ended.
      run: Runs a job.
    """
    shared, jobs = {"shape": list(shape), "load": list(load), "runs": runs}, []
    for peer in peers:
        module, function, own = _PEERS[peer]
        jobs.append(Job(f"batch {load.batch}, {peer}", module, function, shared | own, _VARIABLES, seconds))
    found, remarks = run_jobs(jobs, run, at_once=1)
    records = [record for label, one in found.items() for record in _records(label, one, shape, load)]
    return [*records, *_ratios(found)], remarks


def _records(label: str, found: dict[str, Any], shape: Shape, load: Load) -> list[Record]:
    steps, moved = load.tokens - 1, step_bytes(shape, load)
    rates = [moved * steps / seconds for seconds in found["decode"]]
    return [
        Record.of(f"{label}: decode", [load.batch * steps / s for s in found["decode"]], "tokens/s"),
        Record.of(f"{label}: a step", [s / steps for s in found["decode"]], "s"),
        Record.of(f"{label}: share of the copy rate", [100 * rate / found["copy"] for rate in rates], "%"),
        Record.of(f"{label}: prompt", [load.batch * load.prompt / s for s in found["prefill"]], "tokens/s"),
        Record.single(f"{label}: copy rate", round(found["copy"] / 1e12, 3), "TB/s"),
    ]


def _ratios(found: dict[str, dict[str, Any]]) -> list[Record]:
    """Of the tokens per second of jflex to those of the faster torch."""
    decode = {label: statistics.median(one["decode"]) for label, one in found.items()}
    torch = [seconds for label, seconds in decode.items() if "torch" in label]
    ours = {label: seconds for label, seconds in decode.items() if "jflex" in label}
    return [Record.single(label + _RATIO, round(min(torch) / s, 3), "x") for label, s in ours.items() if torch]


def _is_ratio(record: Record, batch: int) -> bool:
    """Whether a record compares peers at this batch. One that a run did not measure would compare two runs."""
    return record.name.startswith(f"batch {batch}, ") and record.name.endswith(_RATIO)


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


def check_counts(texts: Sequence[Sequence[int]], expected: int) -> None:
    """Raises unless each text has the expected number of tokens, as the rates assume.

    >>> check_counts([[5] * 16, [5] * 12], 16)
    Traceback (most recent call last):
    RuntimeError: Generated 12 tokens, expected 16.
    """
    for tokens in texts:
        if len(tokens) != expected:
            raise RuntimeError(f"Generated {len(tokens)} tokens, expected {expected}.")


def jax_generation(shape: Sequence[int], load: Sequence[int], runs: int, cache: str) -> dict[str, Any]:
    """Seconds of prompt and decoding of each run, after one that compiles; and the copy rate."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from flax_layers.generate import generate

    sizes, (batch, prompt, tokens) = Shape(*shape), load
    model = jax_model(sizes)
    prompts = np.random.default_rng(0).integers(0, sizes.vocabulary, (batch, prompt)).tolist()
    found: dict[str, Any] = {"prefill": [], "decode": []}
    for number in range(runs + 1):
        generation = generate(model, prompts, max_tokens=tokens, cache=cache, stop_tokens=())
        check_counts([result.tokens for result in generation.results()], tokens)
        if number:
            found["prefill"].append(generation.speed.prefill_seconds)
            found["decode"].append(generation.speed.decode_seconds)
    copied, copy = jnp.arange(COPIED_BYTES // 4, dtype=jnp.uint32), jax.jit(jnp.invert)
    return {**found, "copy": copy_rate(lambda: copy(copied), jax.block_until_ready)}


def jax_model(sizes: Shape) -> Any:
    """A decoder with random weights in bfloat16, as the commands of flax_layers load one."""
    import jax.numpy as jnp
    from flax import nnx

    from flax_layers.models import Decoder, LayerConfig, ModelConfig, fuse_projections

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
    model = Decoder(config, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    fuse_projections(model)
    return model


def main(words: Sequence[str] | None = None) -> None:
    """The command: measures on a GPU, and writes `generation.json` after each batch."""
    form = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m benchmarks generation", formatter_class=form)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--peers", nargs="+", choices=list(_PEERS), default=list(_PEERS))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--limit", type=float, default=240.0, metavar="SECONDS", help="of a process")
    parser.add_argument("--out", type=pathlib.Path, metavar="DIR", help="default: benchmarks/results/<device>")
    options = parser.parse_args(words)
    if not (machine := gpu_facts()):
        parser.error("`nvidia-smi` finds no GPU.")
    path = (options.out or schema.FOLDER / results_folder(machine["device"])) / "generation.json"
    for batch in options.batches:
        records, remarks = generation(Shape(), Load(batch), options.peers, options.runs, options.limit)
        old = schema.read(path)
        kept = [] if old is None else [x for x in old.about["remarks"] if not x.startswith(f"batch {batch},")]
        about = {"title": _TITLE, "machine": gpu_facts(), "remarks": kept + remarks}
        merged = [x for x in schema.merged(old, records) if x in records or not _is_ratio(x, batch)]
        schema.write(path, merged, about)
        print("\n".join([f"{x.name}: {x.value.median:g} {x.unit}" for x in records] + remarks), flush=True)


if __name__ == "__main__":
    main()

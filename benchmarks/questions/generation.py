"""Generation with a whole model beside torch: ``python -m benchmarks generation``.

The model has the shape of Llama 3 8B and random weights in bfloat16. jflex decodes with `flax_layers.generate`, from
the dense and from the paged cache; the peer is `benchmarks.peers.torch.generation`, with SDPA. A step reads all weights
but the embeddings, and the keys and values of all tokens: its share of the copy rate is those bytes a second, over the
bytes that a copy reads and writes a second in that process. The rate of a prompt is by the wall, from the call of its
program to the first token on the host. Of jflex there are also the first token since `generate` was called, the device
time of a prompt, and the same model with projections of eight bits.

In a limited time, one batch at a time: a file that is there keeps the records of others. With the variables
`JAX_COMPILATION_CACHE_DIR` and `TORCHINDUCTOR_CACHE_DIR`, a second call on the same machine need not compile again.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.questions.question import Measured
from benchmarks.results.schema import Record
from benchmarks.run.jobs import SHARED_GPU, Job, RunJob, run_job, run_jobs

_VARIABLES = {**SHARED_GPU, "TORCHINDUCTOR_COMPILE_THREADS": "8"}
_ITEM = 2  # bytes of bfloat16
FIRST, DEVICE = "first token", "prompt, device time"
_RATIO = ": decode, over torch"
PEERS = {
    "jflex dense": (__name__, "jax_generation", {"cache": "dense"}, _ITEM),
    "jflex paged": (__name__, "jax_generation", {"cache": "paged"}, _ITEM),
    "jflex 8-bit weights": (__name__, "jax_generation", {"cache": "dense"}, 1),
    "torch sdpa": ("benchmarks.peers.torch.generation", "torch_generation", {}, _ITEM),
}
OPTIONS = {"peers": {"choices": list(PEERS)}, "limit": {"help": "seconds for each process"}}


class Shape(NamedTuple):
    """Sizes of a Llama."""

    layers: int = 32
    width: int = 4096
    mlp_width: int = 14336
    heads: int = 32
    kv_heads: int = 8
    head_size: int = 128
    vocabulary: int = 128256
    item: int = _ITEM  # bytes of a weight of a projection

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights but the embeddings."""
        attention = self.width * self.head_size * 2 * (self.heads + self.kv_heads)
        block = attention + 3 * self.width * self.mlp_width
        return self.item * self.layers * block + _ITEM * self.width * self.vocabulary

    @property
    def key_bytes(self) -> int:
        """Bytes of a key and its value, in all layers."""
        return _ITEM * self.layers * 2 * self.kv_heads * self.head_size


class Load(NamedTuple):
    """Prompts of a batch, and tokens that are generated."""

    batch: int
    prompt: int = 1024
    tokens: int = 256


def step_bytes(shape: Shape, load: Load) -> int:
    """Bytes that a decoding step must read, in the mean over all steps."""
    keys = load.prompt + load.tokens / 2  # the first of `tokens` comes from the prompt
    return round(shape.weight_bytes + load.batch * keys * shape.key_bytes)


def generation(
    batches: Sequence[int] = (1, 32), peers: Sequence[str] = (*PEERS,), runs: int = 5, limit: float = 240.0
) -> Iterator[Measured]:
    """Tokens a second and share of the copy rate, beside torch."""
    for batch in batches:
        yield generated(Shape(), Load(batch), peers, runs, limit)


def generated(
    shape: Shape,
    load: Load,
    peers: Sequence[str] = (*PEERS,),
    runs: int = 5,
    limit: float = 240.0,
    run: RunJob = run_job,
) -> Measured:
    """Measures the named peers, one after the other, each in a process of its own of at most `limit` seconds."""
    shapes, jobs = {}, []
    for peer in peers:
        (module, function, more, item), label = PEERS[peer], f"batch {load.batch}, {peer}"
        shapes[label] = shape._replace(item=item)
        arguments = {"shape": shapes[label], "load": load, "runs": runs} | more
        jobs.append(Job(label, module, function, arguments, _VARIABLES, limit))
    answers, remarks = run_jobs(jobs, run, at_once=1)
    records = [record for label, answer in answers.items() for record in _records(label, answer, shapes[label], load)]
    # Tokens per second: jflex over torch, with the same weights.
    same = [label for label in answers if shapes[label].item == _ITEM]
    decode = {label: statistics.median(answers[label]["decode"]) for label in same}
    torch = [seconds for label, seconds in decode.items() if "torch" in label]
    jflex = {label: seconds for label, seconds in decode.items() if "jflex" in label and torch}
    records += [Record.single(label + _RATIO, min(torch) / seconds, "x") for label, seconds in jflex.items()]
    return Measured(records, remarks, f"batch {load.batch}, ", _RATIO if same else "")


def _records(label: str, answer: Mapping[str, Any], shape: Shape, load: Load) -> list[Record]:
    steps, moved = load.tokens - 1, step_bytes(shape, load)
    shares = [100 * moved * steps / seconds / answer["copy"] for seconds in answer["decode"]]
    return [
        Record.from_values(f"{label}: decode", [load.batch * steps / s for s in answer["decode"]], "tokens/s"),
        Record.from_values(f"{label}: a step", [s / steps for s in answer["decode"]], "s"),
        Record.from_values(f"{label}: share of the copy rate", shares, "%"),
        Record.from_values(f"{label}: prompt", [load.batch * load.prompt / s for s in answer["prefill"]], "tokens/s"),
        Record.single(f"{label}: copy rate", answer["copy"] / 1e12, "TB/s"),
        *(Record.from_values(f"{label}: {name}", answer[name], "s") for name in (FIRST, DEVICE) if name in answer),
    ]


def check_counts(texts: Sequence[Sequence[int]], expected: int) -> None:
    """Raises unless each text has the expected number of tokens, as the rates assume."""
    for tokens in texts:
        if len(tokens) != expected:
            raise RuntimeError(f"Generated {len(tokens)} tokens, expected {expected}.")


def jax_generation(shape: Shape, load: Load, runs: int, cache: str) -> dict[str, Any]:
    """Seconds of prompt and decoding of each run, after one that compiles; and the copy rate."""
    import time

    import numpy as np

    from benchmarks.run.jax_runner import JaxRunner, timer
    from flax_layers.generate import generate

    (batch, prompt, tokens), model = load, jax_model(shape)
    prompts = np.random.default_rng(0).integers(0, shape.vocabulary, (batch, prompt)).tolist()
    prefill, decode, first = [], [], []
    for _ in range(runs + 1):
        started = time.perf_counter()
        generation = generate(model, prompts, max_tokens=tokens, cache=cache, stop_tokens=())
        next(generation)
        first.append(time.perf_counter() - started)
        check_counts([result.tokens for result in generation.results()], tokens)
        prefill.append(generation.speed.prefill_seconds)
        decode.append(generation.speed.decode_seconds)
    prompt = lambda: generate(model, prompts, max_tokens=1, cache=cache, stop_tokens=()).results()
    copy, device = JaxRunner().rates()["copy_bytes"], timer().device_seconds(prompt, runs)
    return {"prefill": prefill[1:], "decode": decode[1:], "copy": copy, FIRST: first[1:], DEVICE: device}


def jax_model(shape: Shape) -> Any:
    """A `Decoder` with random weights in bfloat16, like the commands of flax_layers; or projections of 8 bits."""
    import jax.numpy as jnp
    from flax import nnx

    from flax_layers.models import Decoder, LayerConfig, ModelConfig, fuse_projections, quantize_weights

    config = ModelConfig(
        vocabulary=shape.vocabulary, width=shape.width, mlp_width=shape.mlp_width, num_heads=shape.heads,
        num_kv_heads=shape.kv_heads, head_dim=shape.head_size,
        layers=(LayerConfig(rotary_base=500000.0),) * shape.layers, max_positions=8192,
    )  # fmt: skip
    model = Decoder(config, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    fuse_projections(model)
    if shape.item == 1:
        quantize_weights(model)
    return model

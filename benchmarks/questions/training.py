"""Training steps of whole models beside peers: ``python -m benchmarks training``.

Each case runs in a process of its own, so that its peak memory is its own; beside it stands what `flax_layers.train`
predicts. The JAX peers share the model, the optimizer and the loss of `flax_layers.train`; only the attention is
exchanged. So they need Flax and optax beside JAX; the torch peer needs them, too, for the sizes, and torch. A peer that
is not installed, or runs out of memory in every form of the step, gets a remark in place of figures.
"""

import dataclasses
import functools
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jflex
from benchmarks.environment import gpu_facts
from benchmarks.questions.question import Measured
from benchmarks.results.schema import Record
from benchmarks.run.jobs import Job, RunJob, WorkerError, run_job
from benchmarks.run.timing import describe_error, failures
from flax_layers.models import Decoder, ModelConfig
from flax_layers.train import Computation, Recipe, Rows, Trainer, create_model, make_mesh, parse_mesh
from flax_layers.train.flops import multiplied_parameters, peak_flops, step_flops
from flax_layers.train.memory import step_memory
from flax_layers.train.setup import SHAPES, resized
from flax_layers.train.trainer import parameter_shapes

Step = Callable[[np.ndarray, np.ndarray], Any]  # of tokens and documents, to the loss
_OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "OutOfMemory", "out of memory")

ATTENTION = {
    "jflex": "jflex.flex_attention with the BlockMask of the documents, made in every step; of one a row, causal",
    "cudnn": "jax.nn.dot_product_attention, cuDNN, causal: it attends across documents",
    "dense": "jax.nn.dot_product_attention on XLA with a dense mask of the documents",
    "torch": "torch.compile, FlexAttention with the BlockMask of the documents, made in every step",
}


@dataclasses.dataclass(frozen=True)
class Problem:
    """A training step."""

    shape: str  # in `flax_layers.train.setup.SHAPES`
    rows: int  # of a step
    length: int  # tokens of a row
    documents: int  # of a row
    sizes: tuple[tuple[str, int], ...] = ()  # replace those of the shape
    # `(remat, accumulate)`, tried in turn until one fits into the memory.
    forms: tuple[tuple[str, int], ...] = (("none", 1), ("products", 1), ("blocks", 1), ("blocks", 4))

    def batch(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Random tokens, and documents of random lengths, other ones in each step."""
        rng = np.random.default_rng(step)
        documents = np.zeros((self.rows, self.length), np.int32)
        for row in documents:
            row[rng.choice(self.length - 1, self.documents - 1, replace=False) + 1] = 1
        tokens = rng.integers(0, self.config().vocabulary, documents.shape)
        return tokens.astype(np.int32), np.cumsum(documents, axis=1, dtype=np.int32)

    @functools.cache  # noqa: B019  frozen, and few
    def config(self) -> ModelConfig:
        return resized(SHAPES[self.shape], dict(self.sizes))

    @functools.cache  # noqa: B019  frozen, and few
    def multiplied(self) -> int:
        """Parameters that each token is multiplied by."""
        return multiplied_parameters(parameter_shapes(self.config()), self.config())

    def flops(self, documents: np.ndarray) -> float:
        """Model FLOPs of a step. For all peers, only pairs within documents count, even if the peer computes more."""
        return step_flops(self.config(), self.multiplied(), documents)


PROBLEMS = {
    "llama3-1b": Problem("llama3-1b", 4, 8192, 12),
    "llama3-8b-4-layers": Problem("llama3-8b", 4, 8192, 12, (("layers", 4),)),
    "llama3-1b-8k": Problem("llama3-1b", 1, 8192, 1),
    "llama3-1b-32k": Problem("llama3-1b", 1, 32768, 1),
    "llama3-1b-128k": Problem("llama3-1b", 1, 131072, 1, forms=(("blocks", 1),)),  # without, 50 + 4 x 34 GB by 32k
    "tiny": Problem("tiny", 2, 256, 3, (("layers", 1), ("width", 32), ("head_dim", 8))),
}
# `tiny` tries the command out.
OPTIONS = {
    "problems": {"choices": list(PROBLEMS)},
    "peers": {"choices": list(ATTENTION)},
    "meshes": {"help": "meshes of jflex; peers have one device"},
    "steps": {"help": "timed steps"},
    "limit": {"help": "seconds for each process"},
}


def measure(problem: Problem, peer: str, mesh: str, remat: str, accumulate: int, steps: int) -> dict[str, Any]:
    """Runs a case in this process, `steps` timed steps after two that warm up."""
    step, memory = (torch_step if peer == "torch" else jax_step)(problem, peer, mesh, remat, accumulate)
    batches = [problem.batch(number) for number in range(steps + 2)]
    first = time.perf_counter()
    losses = [float(step(*batch)) for batch in batches[:2]]
    started = time.perf_counter()
    last = [step(*batch) for batch in batches[2:]]
    losses.append(float(last[-1]))  # waits
    seconds = (time.perf_counter() - started) / steps
    return {
        "seconds": seconds,
        "first_two_steps_seconds": started - first,
        "tokens_per_second": problem.rows * problem.length / seconds,
        "model_flops_per_second": np.mean([problem.flops(documents) for _, documents in batches[2:]]) / seconds,
        **memory(),
        "losses": losses,
    }


def measure_case(problem: str, **case: Any) -> dict[str, Any]:
    """Runs a case in a process of its own; ``"failed"`` is the reason if it has no figures."""
    try:
        return measure(PROBLEMS[problem], **case)
    except failures() as error:
        return {"failed": describe_error(error)}


def jax_step(problem: Problem, peer: str, mesh: str, remat: str, accumulate: int) -> tuple[Step, Callable]:
    """The step of `flax_layers.train`, with the attention of a peer; and its memory, to be read after steps."""
    if peer != "jflex":
        jflex.flex_attention = functools.partial(peers_attention, peer)  # in this process alone
    devices = make_mesh(parse_mesh(mesh))
    model = create_model(lambda: Decoder(problem.config(), dtype=jnp.bfloat16, rngs=nnx.Rngs(0)), devices)
    recipe = Recipe(1000, 1e-4, warmup=10)
    trainer = Trainer(model, recipe, Computation(accumulate, remat), mesh=devices)

    def step(tokens: np.ndarray, documents: np.ndarray) -> Any:
        return trainer.step(Rows(tokens, documents if problem.documents > 1 else None)).loss

    def memory() -> dict[str, Any]:
        stats = jax.local_devices()[0].memory_stats() or {}
        predicted = step_memory(trainer, problem.rows, problem.length, has_documents=problem.documents > 1).total
        return {"peak_bytes": stats.get("peak_bytes_in_use"), "predicted_bytes": predicted}

    return step, memory


def peers_attention(peer: str, query, key, value, score_mod=None, block_mask=None, *, scale=None, **_) -> Any:
    """Takes what the decoder passes to `jflex.flex_attention`, and calls the attention of JAX."""
    if score_mod is not None or block_mask is None:
        raise ValueError("The models that are measured here have a mask and no score_mod.")
    if peer == "cudnn":
        return jax.nn.dot_product_attention(query, key, value, is_causal=True, scale=scale, implementation="cudnn")
    mask = jflex.create_mask(block_mask.mask_mod, query.shape[0], None, query.shape[1], key.shape[1])
    return jax.nn.dot_product_attention(query, key, value, mask=mask, scale=scale, implementation="xla")


def torch_step(problem: Problem, peer: str, mesh: str, remat: str, accumulate: int) -> tuple[Step, Callable]:
    """The step in torch, and its memory: bfloat16 by autocast, float32 weights, a fused AdamW."""
    if mesh != "data=1" or remat == "products":
        raise NotImplementedError("the torch peer has one device, and remat of whole blocks or none")
    import torch

    from benchmarks.peers.torch.decoder import Decoder, document_mask, loss_of

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    config = problem.config()
    with torch.device("cuda"):
        model = Decoder(config, problem.length, remat == "blocks")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-5, (0.9, 0.95), weight_decay=0.1, fused=True)
    compiled = torch.compile(loss_of)
    rows = problem.rows // accumulate

    def step(tokens: np.ndarray, documents: np.ndarray) -> Any:
        tokens, documents = (torch.from_numpy(array.astype(np.int64)).cuda() for array in (tokens, documents))
        total = torch.zeros((), device="cuda")
        count = (documents[:, 1:] == documents[:, :-1]).sum()
        for start in range(0, problem.rows, rows):
            part = slice(start, start + rows)
            mask = document_mask(documents[part])
            with torch.autocast("cuda", torch.bfloat16):
                loss = compiled(model, tokens[part], documents[part], mask) / count
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return step, lambda: {"peak_bytes": torch.cuda.max_memory_allocated()}


def run_case(name: str, peer: str, mesh: str, steps: int, limit: float, run: RunJob = run_job) -> dict[str, Any]:
    """The case and its figures or a remark: of processes of its own, in the first form that fits into the memory."""
    case: dict[str, Any] = {"problem": name, "peer": peer, "mesh": mesh}
    variables = {"XLA_PYTHON_CLIENT_MEM_FRACTION": os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")}
    remarks = []
    for remat, accumulate in PROBLEMS[name].forms:
        case |= {"remat": remat, "accumulate": accumulate}
        try:
            answer = run(Job(name, __name__, "measure_case", {**case, "steps": steps}, variables, limit))
        except WorkerError as error:
            answer = {"failed": str(error)}
        if "failed" not in answer:
            return case | answer
        remarks.append(f"{remat}, {accumulate} parts: {answer['failed']}")
        if not any(word in answer["failed"] for word in (*_OUT_OF_MEMORY, "NotImplementedError")):
            break
    return case | {"remark": "; ".join(remarks)}


def training(
    problems: Sequence[str] = tuple(x for x in PROBLEMS if x != "tiny"),
    peers: Sequence[str] = (*ATTENTION,),
    meshes: Sequence[str] = ("data=1",),
    steps: int = 10,
    limit: float = 240.0,
) -> Iterator[Measured]:
    """Tokens a second and model FLOP utilisation in training."""
    device = gpu_facts().get("device", "cpu")
    for name in problems:
        for peer in peers:
            for mesh in meshes if peer == "jflex" else meshes[:1]:
                yield records_of(run_case(name, peer, mesh, steps, limit), device)


def records_of(case: dict[str, Any], device: str) -> Measured:
    """Records and a remark of a case that `run_case` returned; `device` has the peak rate of the utilisation."""
    mesh = "" if case["mesh"] == "data=1" else f", {case['mesh']}"
    title = f"{case['problem']}, {case['peer']}{mesh}: "
    if "seconds" not in case:
        return Measured([], [title + case["remark"]], title)
    devices = math.prod(int(part.partition("=")[2]) for part in case["mesh"].split(","))
    peak = peak_flops(device)
    values = {
        "tokens": (case["tokens_per_second"], "tokens/s"),
        "step": (case["seconds"], "s"),
        "model FLOP utilisation": (peak and 100 * case["model_flops_per_second"] / peak / devices, "%"),
        "peak memory": (case["peak_bytes"] and case["peak_bytes"] / 1e9, "GB"),
        "predicted memory": (case.get("predicted_bytes") and case["predicted_bytes"] / 1e9, "GB"),
        "first two steps": (case["first_two_steps_seconds"], "s"),
    }
    records = [Record.single(title + name, value, unit) for name, (value, unit) in values.items() if value is not None]
    parts = "" if case["accumulate"] == 1 else f", {case['accumulate']} parts of the batch"
    remark = f"{title}{ATTENTION[case['peer']]}; rematerialised: {case['remat']}{parts}"
    return Measured(records, [remark], title)

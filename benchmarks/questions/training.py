"""Training steps of whole models beside peers: ``python -m benchmarks training``.

Each case runs in a process of its own, so that its peak memory is its own. The JAX peers are one model, one optimizer
and one loss, those of `flax_layers.train`; only the attention is exchanged. So they need Flax and
optax beside JAX; the torch peer needs them, too, for the sizes, and torch. A peer that is not installed, or runs out of
memory in every form of the step, gets a remark in place of figures.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.environment import ROOT, gpu_facts, results_folder
from benchmarks.results import schema
from benchmarks.results.schema import Record

_TITLE = "training steps of whole models, bfloat16 with float32 masters, 32,768 tokens; MFU of the dense bfloat16 peak"

ATTENTION = {
    "jflex": "jflex.flex_attention with the BlockMask of the documents, made in every step",
    "cudnn": "jax.nn.dot_product_attention, cuDNN, causal: it attends across documents",
    "dense": "jax.nn.dot_product_attention on XLA with a dense mask of the documents",
    "torch": "torch.compile, FlexAttention with the BlockMask of the documents, made in every step",
}


@dataclasses.dataclass(frozen=True)
class Problem:
    """A training step.

    Attributes:
      shape: In `flax_layers.train.setup.SHAPES`.
      rows: Of a step.
      length: Tokens of a row.
      documents: Of a row.
      sizes: Replace those of the shape.
      forms: `(remat, accumulate)`, tried in turn until one fits into the memory.
    """

    shape: str
    rows: int
    length: int
    documents: int
    sizes: tuple[tuple[str, int], ...] = ()
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
    def config(self) -> Any:
        """The `ModelConfig`."""
        from flax_layers.train.setup import SHAPES, resized

        return resized(SHAPES[self.shape], dict(self.sizes))

    @functools.cache  # noqa: B019  frozen, and few
    def multiplied(self) -> int:
        """Parameters that each token is multiplied by."""
        from flax_layers.train.flops import multiplied_parameters
        from flax_layers.train.trainer import parameter_shapes

        return multiplied_parameters(parameter_shapes(self.config()), self.config())


BLOCKS = (("blocks", 1),)  # the same form for all lengths, so that memory compares
PROBLEMS = {
    "llama3-1b": Problem("llama3-1b", 4, 8192, 12),
    "llama3-8b-4-layers": Problem("llama3-8b", 4, 8192, 12, (("layers", 4),)),
    "llama3-1b-8k": Problem("llama3-1b", 1, 8192, 1, forms=BLOCKS),
    "llama3-1b-32k": Problem("llama3-1b", 1, 32768, 1, forms=BLOCKS),
    "llama3-1b-128k": Problem("llama3-1b", 1, 131072, 1, forms=BLOCKS),
    "tiny": Problem("tiny", 2, 256, 3, (("layers", 1), ("width", 32), ("head_dim", 8))),
}
"""By name; `tiny` tries the command out."""


def measure(problem: Problem, peer: str, mesh: str, remat: str, accumulate: int, steps: int) -> dict[str, Any]:
    """Runs a case in this process.

    Args:
      problem: The training step.
      peer: In `ATTENTION`.
      mesh: As `python -m flax_layers.train --mesh` takes it.
      remat: What the backward pass recomputes.
      accumulate: Parts of a step.
      steps: Timed steps, after two warm-up steps.

    Returns:
      Seconds of a step, losses of the first two, tokens/s, model FLOP/s, peak bytes of a device.
    """
    step, peak_bytes = (torch_step if peer == "torch" else jax_step)(problem, peer, mesh, remat, accumulate)
    batches = [problem.batch(number) for number in range(steps + 2)]
    first = time.perf_counter()
    losses = [float(step(*batch)) for batch in batches[:2]]
    started = time.perf_counter()
    last = [step(*batch) for batch in batches[2:]]
    losses.append(float(last[-1]))  # waits
    seconds = (time.perf_counter() - started) / steps
    tokens = problem.rows * problem.length
    flops = np.mean([flops_of(problem, documents) for _, documents in batches[2:]])
    return {
        "seconds": seconds,
        "first_two_steps_seconds": started - first,
        "tokens_per_second": tokens / seconds,
        "model_flops_per_second": flops / seconds,
        "peak_bytes": peak_bytes(),
        "losses": losses,
    }


def flops_of(problem: Problem, documents: np.ndarray) -> float:
    """Model FLOPs of a step. For all peers, only pairs within documents count, even if the peer computes more."""
    from flax_layers.train.flops import step_flops

    return step_flops(problem.config(), problem.multiplied(), documents)


def jax_step(problem: Problem, peer: str, mesh: str, remat: str, accumulate: int) -> tuple[Any, Any]:
    """The step of `flax_layers.train`, with the attention of a peer; and a function that returns the peak memory."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    import jflex
    from flax_layers.models import Decoder
    from flax_layers.train import Computation, Recipe, Rows, Trainer, create_model, make_mesh, parse_mesh

    if peer != "jflex":
        jflex.flex_attention = functools.partial(peers_attention, peer)  # in this process alone
    devices = make_mesh(parse_mesh(mesh))
    model = create_model(lambda: Decoder(problem.config(), dtype=jnp.bfloat16, rngs=nnx.Rngs(0)), devices)
    recipe = Recipe(1000, 1e-4, warmup=10)
    trainer = Trainer(model, recipe, Computation(accumulate, remat), mesh=devices)

    def step(tokens: np.ndarray, documents: np.ndarray) -> Any:
        return trainer.step(Rows(tokens, documents)).loss

    def peak_bytes() -> int | None:
        stats = jax.local_devices()[0].memory_stats()
        return None if stats is None else stats["peak_bytes_in_use"]

    return step, peak_bytes


def peers_attention(peer: str, query, key, value, score_mod=None, block_mask=None, *, scale=None, **_) -> Any:
    """Takes what the decoder passes to `jflex.flex_attention`, and calls the attention of JAX."""
    import jax

    import jflex

    if score_mod is not None or block_mask is None:
        raise ValueError("The models that are measured here have a mask and no score_mod.")
    if peer == "cudnn":
        return jax.nn.dot_product_attention(query, key, value, is_causal=True, scale=scale, implementation="cudnn")
    mask = jflex.create_mask(block_mask.mask_mod, query.shape[0], None, query.shape[1], key.shape[1])
    return jax.nn.dot_product_attention(query, key, value, mask=mask, scale=scale, implementation="xla")


def torch_step(problem: Problem, peer: str, mesh: str, remat: str, accumulate: int) -> tuple[Any, Any]:
    """The same model and step in torch: bfloat16 by autocast, float32 weights, a fused AdamW."""
    if mesh != "data=1" or remat == "products":
        raise Unsupported("the torch peer has one device, and remat of whole blocks or none")
    import torch

    from benchmarks.peers.torch_decoder import Decoder, document_mask, loss_of

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

    return step, torch.cuda.max_memory_allocated


class Unsupported(Exception):
    """A peer cannot run a case; the message says why."""


def run_case(name: str, peer: str, mesh: str, steps: int, limit: float) -> dict[str, Any]:
    """Runs a case in processes of its own, in the first form that fits into the memory.

    Args:
      name: Of the problem.
      peer: In `ATTENTION`.
      mesh: The devices.
      steps: That are timed.
      limit: Seconds of a process.

    Returns:
      A record: the case, its figures or a remark.
    """
    record: dict[str, Any] = {"problem": name, "peer": peer, "attention": ATTENTION[peer], "mesh": mesh}
    remarks = []
    for remat, accumulate in PROBLEMS[name].forms:
        case = {"problem": name, "peer": peer, "mesh": mesh, "remat": remat, "accumulate": accumulate, "steps": steps}
        words = [sys.executable, "-m", "benchmarks.questions.training", "--case", json.dumps(case)]
        environment = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95", **os.environ}
        try:
            done = subprocess.run(
                words, capture_output=True, text=True, check=False, timeout=limit, env=environment, cwd=ROOT
            )
        except subprocess.TimeoutExpired:
            return record | {"remark": f"{remat}, {accumulate} parts: no result in {limit:.0f} s"}
        if done.returncode == 0:
            return record | {"remat": remat, "accumulate": accumulate} | json.loads(done.stdout.splitlines()[-1])
        lines = done.stderr.strip().splitlines() or ["no message"]
        why = next((line for line in lines if "RESOURCE_EXHAUSTED" in line or "OutOfMemory" in line), None)
        why = why or next((line for line in reversed(lines) if "Error" in line), lines[-1])
        remarks.append(f"{remat}, {accumulate} parts: {why[:300]}")
        if not any(
            word in done.stderr for word in ("RESOURCE_EXHAUSTED", "OutOfMemory", "out of memory", "Unsupported")
        ):
            break
    return record | {"remark": "; ".join(remarks)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the cases and writes `training.json`, anew after each; what an earlier run measured of others is kept."""
    form = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m benchmarks training", description=__doc__, formatter_class=form)
    parser.add_argument("--problems", nargs="+", choices=list(PROBLEMS), default=[n for n in PROBLEMS if n != "tiny"])
    parser.add_argument("--peers", nargs="+", choices=list(ATTENTION), default=list(ATTENTION))
    parser.add_argument("--meshes", nargs="+", default=["data=1"], help="for jflex; peers have one device")
    parser.add_argument("--steps", type=int, default=10, help="that are timed")
    parser.add_argument("--limit", type=float, default=240, help="seconds of a process")
    parser.add_argument("--out", type=pathlib.Path, metavar="DIR", help="default: benchmarks/results/<device>")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.case is not None:
        case = json.loads(options.case)
        print(json.dumps(measure(PROBLEMS[case.pop("problem")], **case)))
        return
    device = gpu_facts().get("device", "cpu")
    path = (options.out or schema.FOLDER / results_folder(device)) / "training.json"
    for name in options.problems:
        for peer in options.peers:
            for mesh in options.meshes if peer == "jflex" else options.meshes[:1]:
                case = run_case(name, peer, mesh, options.steps, options.limit)
                records, remark = records_of(case, device)
                old = schema.read(path)
                kept = [] if old is None else [x for x in old.about["remarks"] if not x.startswith(title_of(case))]
                about = {"title": _TITLE, "machine": gpu_facts(), "remarks": [*kept, remark]}
                schema.write(path, schema.merged(old, records), about)
                print("\n".join([remark, *(f"  {x.name}: {x.value.median:g} {x.unit}" for x in records)]), flush=True)


def title_of(case: dict[str, Any]) -> str:
    """The problem, the peer and, of several devices, the mesh."""
    mesh = "" if case["mesh"] == "data=1" else f", {case['mesh']}"
    return f"{case['problem']}, {case['peer']}{mesh}: "


def records_of(case: dict[str, Any], device: str) -> tuple[list[Record], str]:
    """What `run_case` returned, as records of a result file and a remark.

    Args:
      case: Of `run_case`.
      device: Its name, for the peak rate that the utilisation is a share of.
    """
    from flax_layers.train.flops import peak_flops

    title = title_of(case)
    if "seconds" not in case:
        return [], title + case["remark"]
    values = [("tokens", case["tokens_per_second"], "tokens/s"), ("step", case["seconds"], "s")]
    devices = math.prod(int(part.partition("=")[2]) for part in case["mesh"].split(","))
    if (peak := peak_flops(device)) is not None:
        values.append(("model FLOP utilisation", 100 * case["model_flops_per_second"] / peak / devices, "%"))
    if case["peak_bytes"] is not None:
        values.append(("peak memory", case["peak_bytes"] / 1e9, "GB"))
    values.append(("first two steps", case["first_two_steps_seconds"], "s"))
    records = [Record.single(title + what, float(f"{value:.5g}"), unit) for what, value, unit in values]
    parts = "" if case["accumulate"] == 1 else f", {case['accumulate']} parts of the batch"
    return records, f"{title}{case['attention']}; rematerialised: {case['remat']}{parts}"


if __name__ == "__main__":
    main()

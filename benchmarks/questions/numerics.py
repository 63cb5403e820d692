"""Errors of 16-bit attention against float64, beside peers: ``python -m benchmarks numerics``.

The inputs are drawn from one seed, rounded to the dtype of the case, and the same for all. Errors are those against
attention in numpy float64 of these inputs. After figure 10 of Dong et al. 2024, arXiv:2412.05496. Importing this
imports neither JAX nor torch.
"""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from benchmarks.environment import gpu_facts
from benchmarks.peers.table import PEERS
from benchmarks.problems import Problem, square
from benchmarks.questions import command, eight_bits
from benchmarks.questions.command import Measured, Questions
from benchmarks.results.schema import Record
from benchmarks.run.jobs import SHARED_GPU, Job, RunJob, run_job, run_jobs
from benchmarks.run.timing import describe_error, failures
from benchmarks.variants import CAP, VARIANTS

TESTED = ("noop", "causal", "alibi", "softcap")  # all but noop are causal, too
INPUTS = ("query", "key", "value", "cotangent")
RESULTS = ("out", "query_gradient", "key_gradient", "value_gradient")
_REFERENCE = "torch-flex"
QUESTIONS = Questions()
# Among how many processes the cases of each peer are dealt: those that compile long, more.
_PROCESSES = {
    "jflex-mosaic": 4,
    "jflex-triton": 4,
    "jflex-xla": 2,
    "jax-xla": 2,
    "jax-cudnn": 2,
    "torch-flex": 4,
    "sdpa-flash": 1,
    "sdpa-cudnn": 1,
    "sdpa-efficient": 1,
}


class Errors(NamedTuple):
    """Of a result against the exact one."""

    rmse: float
    largest: float
    size: float  # root of the mean square of the exact one


ErrorsOfResults = dict[str, Errors]  # by `RESULTS`


def case_name(problem: Problem) -> str:
    """In words."""
    return f"{problem.variant}, {problem.dtype}, D {problem.D}"


@QUESTIONS.of(
    "errors against float64; B 1, S 2048, H 4, normal inputs of the dtype, all but noop causal, softcap 50; gradients: "
    "the worst of query, key and value, relative to the root mean square of the exact one",
)
def numerics(
    length: int = 2048,
    heads: int = 4,
    head_sizes: Sequence[int] = (64, 128),
    dtypes: Sequence[str] = ("bfloat16", "float16"),
    peers: Sequence[str] = tuple(_PROCESSES),
    run: RunJob = run_job,
) -> Measured:
    """How far is 16-bit attention from float64?"""
    cases = [
        square(1, length, heads, D, variant, dtype=dtype)
        for variant, dtype, D in itertools.product(TESTED, dtypes, head_sizes)
    ]
    with tempfile.TemporaryDirectory() as folder:
        paths = prepare(cases, pathlib.Path(folder))
        found, remarks = run_jobs(_jobs(peers, cases, paths), run)
    by_peer, refusals = _by_peer(peers, found)
    records = [
        Record.single(f"{what}, {case}, {PEERS[peer].title}", float(f"{value:.3g}"), "")
        for case, (peer, of_cases) in itertools.product(map(case_name, cases), by_peer.items())
        if case in of_cases
        for what, value in _of_results(of_cases[case]).items()
    ]
    return summary(by_peer) + records, remarks + refusals


def _jobs(peers: Sequence[str], cases: Sequence[Problem], paths: Sequence[str]) -> list[Job]:
    jobs, every = [], [dataclasses.asdict(case) for case in cases]
    variables = {**SHARED_GPU, "TORCHINDUCTOR_COMPILE_THREADS": "1"}  # there are enough processes
    for peer, part in ((x, part) for x in peers for part in range(_PROCESSES[x])):
        parts, function = _PROCESSES[peer], "torch_errors" if PEERS[peer].library == "torch" else "jax_errors"
        arguments = {"peer": peer, "cases": every[part::parts], "paths": paths[part::parts]}
        jobs.append(Job(f"{peer} ({part + 1} of {parts})", __name__, function, arguments, variables))
    return jobs


def _by_peer(peers: Sequence[str], found: dict[str, Any]) -> tuple[dict[str, dict[str, ErrorsOfResults]], list[str]]:
    """The errors by peer and case, and a remark for each reason of a peer to refuse cases."""
    by_peer: dict[str, dict[str, ErrorsOfResults]] = {peer: {} for peer in peers}
    refused: dict[str, tuple[dict[str, None], dict[str, None]]] = {}  # peers and variants, once each and in order
    for label, answer in found.items():
        peer = label.partition(" (")[0]
        for case, each in answer.items():
            if isinstance(each, str):
                who, what = refused.setdefault(each, ({}, {}))
                who[PEERS[peer].title] = what[case.partition(",")[0]] = None
            else:
                by_peer[peer][case] = {name: Errors(*x) for name, x in each.items()}
    remarks = [f"{', '.join(who)}; {', '.join(what)}: {reason}" for reason, (who, what) in refused.items()]
    return by_peer, remarks


def _of_results(errors: ErrorsOfResults) -> dict[str, float]:
    """What is reported of one peer in one case."""
    gradients = [errors[name] for name in RESULTS[1:]]
    return {
        "out, RMSE": errors["out"].rmse,
        "out, largest error": errors["out"].largest,
        "gradients, RMSE": max(x.rmse / x.size for x in gradients),
        "gradients, largest error": max(x.largest / x.size for x in gradients),
    }


def summary(by_peer: Mapping[str, Mapping[str, ErrorsOfResults]]) -> list[Record]:
    """Errors of jflex relative to torch FlexAttention's: the median of the cases of both, and the quartiles."""
    records = []
    for own, what in itertools.product([name for name in by_peer if name.startswith("jflex")], ("out", "gradients")):
        both = by_peer[own].keys() & by_peer.get(_REFERENCE, {}).keys()
        error = lambda name, case, what=what: _of_results(by_peer[name][case])[f"{what}, RMSE"]
        ratios = [error(own, case) / error(_REFERENCE, case) for case in both]
        if len(ratios) > 1:
            titles = f"{PEERS[own].title} relative to that of {PEERS[_REFERENCE].title}"
            records.append(Record.of(f"{what}, RMSE of {titles}, median of the cases", ratios, "x"))
    return records


def prepare(cases: Sequence[Problem], folder: pathlib.Path) -> list[str]:
    """Writes each case, inputs and exact results in float64, to a file of its own; returns the paths."""
    paths = [folder / f"{number}.npz" for number in range(len(cases))]
    with ThreadPoolExecutor() as pool:
        return list(pool.map(_prepare, cases, paths))


def _prepare(case: Problem, path: pathlib.Path) -> str:
    generator = np.random.default_rng(0)
    dtype = np.dtype(getattr(ml_dtypes, case.dtype, case.dtype))
    drawn = {name: generator.normal(size=(1, case.S, case.Hq, case.D)).astype(dtype) for name in INPUTS}
    exact = dict(zip(RESULTS, _exact(case, **{name: x.astype(np.float64) for name, x in drawn.items()}), strict=True))
    # 16-bit numbers are held exactly by float32, which every peer can read.
    np.savez(path, **{name: x.astype(np.float32) for name, x in drawn.items()}, **exact)
    return str(path)


def _exact(
    case: Problem, query: np.ndarray, key: np.ndarray, value: np.ndarray, cotangent: np.ndarray
) -> tuple[np.ndarray, ...]:
    results = tuple(np.empty_like(query) for _ in RESULTS)
    for h in range(case.Hq):
        query_h, key_h, value_h, cotangent_h = (x[0, :, h] for x in (query, key, value, cotangent))
        for whole, part in zip(results, _exact_head(case, h, query_h, key_h, value_h, cotangent_h), strict=True):
            whole[0, :, h] = part
    return results


def _exact_head(
    case: Problem, h: int, query: np.ndarray, key: np.ndarray, value: np.ndarray, cotangent: np.ndarray
) -> tuple[np.ndarray, ...]:
    scale = case.D**-0.5
    scores = scale * (query @ key.T)
    slope = 1.0
    places = np.arange(case.S)
    distance = places - places[:, None]  # kv_idx - q_idx
    if case.variant == "alibi":
        scores += VARIANTS["alibi"].captured(case)["slopes"][h] * distance
    if case.variant == "softcap":
        bent = np.tanh(scores / CAP)
        scores, slope = CAP * bent, 1 - bent**2
    if case.variant != "noop":
        scores[distance > 0] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out = weights @ value
    pulled = scale * slope * weights * (cotangent @ value.T - (out * cotangent).sum(-1, keepdims=True))
    return out, pulled @ key, pulled.T @ query, weights.T @ cotangent


def _errors(exact: Mapping[str, np.ndarray], results: Sequence[Any]) -> dict[str, Errors]:
    """How far results are from the exact ones, by name."""
    found = {}
    rms = lambda x: float(np.sqrt(np.mean(np.square(x))))
    for name, result in zip(RESULTS, results, strict=True):
        off = np.asarray(result, np.float64) - exact[name]
        found[name] = Errors(rms(off), float(np.abs(off).max()), rms(exact[name]))
    return found


def _each_case(
    results_of: Callable[[Problem, dict[str, np.ndarray]], Sequence[Any]],
    cases: Sequence[dict[str, Any]],
    paths: Sequence[str],
) -> dict[str, Any]:
    """Errors of each result by the case's name, or a sentence where it could not run."""
    found: dict[str, Any] = {}
    for fields, path in zip(cases, paths, strict=True):
        case = Problem(**fields)
        with np.load(path) as arrays:
            held = dict(arrays)
        try:
            found[case_name(case)] = _errors(held, results_of(case, held))
        except failures() as error:
            found[case_name(case)] = describe_error(error)
    return found


def jax_errors(peer: str, cases: Sequence[dict[str, Any]], paths: Sequence[str]) -> dict[str, Any]:
    """Those of a JAX peer, in a process of its own."""
    import jax
    import jax.numpy as jnp

    from benchmarks.peers import jax_peers

    def results_of(case: Problem, arrays: dict[str, np.ndarray]) -> Sequence[Any]:
        inputs = [jnp.asarray(arrays[name]).astype(case.dtype) for name in INPUTS]
        mods, captured = jax_peers.mods_of(case)
        block_mask, _ = jax_peers.block_mask_of(case, mods(captured))
        attend = jax_peers.attention(peer, case, mods)
        both = jax_peers.forward_and_backward(lambda q, k, v: attend(q, k, v, captured, block_mask))
        out, gradients = jax.jit(both)(*inputs)
        return jax.device_get((out, *gradients))

    return _each_case(results_of, cases, paths)


def torch_errors(peer: str, cases: Sequence[dict[str, Any]], paths: Sequence[str]) -> dict[str, Any]:
    """Those of a torch peer, in a process of its own; nothing here loads JAX."""
    import torch

    from benchmarks.peers import torch_peers

    device = "cuda" if torch.cuda.is_available() else "cpu"

    def results_of(case: Problem, arrays: dict[str, np.ndarray]) -> Sequence[Any]:
        dtype = getattr(torch, case.dtype)
        inputs = [torch.from_numpy(arrays[name]).to(device, dtype).transpose(1, 2).contiguous() for name in INPUTS]
        leaves = [x.requires_grad_() for x in inputs[:3]]
        torch.compiler.reset()  # each case compiles anew, and none counts as a recompilation of the one before
        out = torch_peers.attention(peer, torch_peers.bind(case, device))(*leaves)
        tensors = (out, *torch.autograd.grad(out, leaves, inputs[3]))
        return [x.detach().transpose(1, 2).float().cpu().numpy() for x in tensors]

    return _each_case(results_of, cases, paths)


def main(words: Sequence[str] | None = None) -> None:
    """The command."""
    command.run("numerics", {**QUESTIONS, **eight_bits.QUESTIONS}, words, on_gpu=bool(gpu_facts()))

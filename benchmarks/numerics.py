"""How far 16-bit attention is from float64, beside its peers: ``python -m benchmarks.numerics``.

The inputs are drawn from one seed, rounded to the dtype of the case, and the same for all. Errors are those against
attention in numpy float64 of these inputs. After figure 10 of Dong et al. 2024, arXiv:2412.05496.
"""

from __future__ import annotations

import argparse
import itertools
import pathlib
import statistics
import tempfile
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks.environment import gpu_facts, results_folder
from benchmarks.gpu.asking import Ask, Question, answers, ask
from benchmarks.gpu.numerics_cases import RESULTS, VARIANTS, Case, Errors, prepare
from benchmarks.results import Figure, write

TITLE = (
    "errors against float64; B 1, S 2048, H 4, normal inputs of the dtype, all but noop causal, softcap 50; gradients: "
    "the worst of query, key and value, relative to the root mean square of the exact one"
)
_JAX, _TORCH = "benchmarks.gpu.numerics_jax", "benchmarks.gpu.numerics_torch"
# Each with its module and among how many processes its cases are dealt: those that compile long, more.
PEERS = {
    "jflex mosaic_gpu": (_JAX, 4),
    "jflex triton": (_JAX, 4),
    "jflex xla": (_JAX, 2),
    "jax.nn xla": (_JAX, 2),
    "jax.nn cudnn": (_JAX, 2),
    "torch FlexAttention": (_TORCH, 4),
    "torch SDPA flash": (_TORCH, 1),
    "torch SDPA cuDNN": (_TORCH, 1),
    "torch SDPA mem-efficient": (_TORCH, 1),
}


Results = dict[str, Errors]


class Sizes(NamedTuple):
    """What is asked."""

    length: int = 2048
    heads: int = 4
    head_sizes: tuple[int, ...] = (64, 128)
    dtypes: tuple[str, ...] = ("bfloat16", "float16")
    peers: tuple[str, ...] = tuple(PEERS)


FULL = Sizes()


def main() -> None:
    argparse.ArgumentParser(prog="python -m benchmarks.numerics", description=__doc__.splitlines()[0]).parse_args()
    figures, remarks = measure()
    machine = gpu_facts()
    folder = results_folder(machine["device"]) if machine else "cpu"
    path = write(folder, "numerics", TITLE, figures, remarks, machine)
    print("\n".join([f"{path}: {TITLE}", *table(figures), *remarks]))


def measure(sizes: Sizes = FULL, ask_one: Ask = ask) -> tuple[list[Figure], list[str]]:
    cases = [
        Case(variant, dtype, D, sizes.length, sizes.heads)
        for variant, dtype, D in itertools.product(VARIANTS, sizes.dtypes, sizes.head_sizes)
    ]
    with tempfile.TemporaryDirectory() as folder:
        paths = prepare(cases, pathlib.Path(folder))
        found, remarks = answers(_questions(sizes.peers, cases, paths), ask_one)
    by_peer, refusals = _by_peer(sizes.peers, found)
    return _summary(by_peer) + _figures(cases, by_peer), remarks + refusals


def _questions(peers: Sequence[str], cases: list[Case], paths: list[str]) -> list[Question]:
    questions = []
    for peer in peers:
        module, parts = PEERS[peer]
        for part in range(parts):
            arguments = {"peer": peer, "cases": cases[part::parts], "paths": paths[part::parts]}
            variables = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}  # there are enough processes
            questions.append(Question(f"{peer} ({part + 1} of {parts})", module, "probe", arguments, variables))
    return questions


def _by_peer(peers: Sequence[str], found: dict[str, Any]) -> tuple[dict[str, dict[str, Results]], list[str]]:
    """The errors by peer and case, and a remark for each reason of a peer to refuse cases."""
    by_peer: dict[str, dict[str, Results]] = {peer: {} for peer in peers}
    refused: dict[str, tuple[dict[str, None], dict[str, None]]] = {}  # peers and variants, once each and in order
    for label, answer in found.items():
        peer = label.partition(" (")[0]
        for case, each in answer.items():
            if isinstance(each, str):
                peers_of_it, variants = refused.setdefault(each, ({}, {}))
                peers_of_it[peer] = variants[case.partition(",")[0]] = None
            else:
                by_peer[peer][case] = {name: Errors(*x) for name, x in each.items()}
    remarks = [f"{', '.join(who)}; {', '.join(what)}: {reason}" for reason, (who, what) in refused.items()]
    return by_peer, remarks


def _of_result(errors: Results) -> dict[str, float]:
    """What is told of one peer in one case."""
    gradients = [errors[name] for name in RESULTS[1:]]
    return {
        "out, RMSE": errors["out"].rmse,
        "out, largest error": errors["out"].largest,
        "gradients, RMSE": max(x.rmse / x.size for x in gradients),
        "gradients, largest error": max(x.largest / x.size for x in gradients),
    }


def _figures(cases: Sequence[Case], by_peer: dict[str, dict[str, Results]]) -> list[Figure]:
    return [
        Figure(f"{what}, {case.name}, {peer}", float(f"{value:.3g}"), "")
        for case in cases
        for peer, of_cases in by_peer.items()
        if case.name in of_cases
        for what, value in _of_result(of_cases[case.name]).items()
    ]


def _summary(by_peer: dict[str, dict[str, Results]], peer: str = "torch FlexAttention") -> list[Figure]:
    """Errors of jflex relative to a peer's: the median of the cases of both, and the quartiles."""
    figures = []
    for own, what in itertools.product([name for name in by_peer if name.startswith("jflex")], ("out", "gradients")):
        both = by_peer[own].keys() & by_peer.get(peer, {}).keys()
        told = lambda name, case, what=what: _of_result(by_peer[name][case])[f"{what}, RMSE"]
        ratios = [told(own, case) / told(peer, case) for case in both]
        if len(ratios) > 1:
            low, median, high = (round(x, 3) for x in statistics.quantiles(ratios, n=4, method="inclusive"))
            name = f"{what}, RMSE of {own} relative to that of {peer}, median of the cases"
            figures.append(Figure(name, median, "x", low, high, len(ratios)))
    return figures


def table(figures: Sequence[Figure], what: Sequence[str] = ("out, RMSE", "gradients, RMSE")) -> list[str]:
    """Lines for the terminal: a row for each case, a column for each peer."""
    lines = [f"{x.name}: {x.value:g} x" for x in figures if x.unit == "x"]
    for each in what:
        cells: dict[str, dict[str, str]] = {}
        for x in figures:
            if x.unit != "x" and x.name.startswith(f"{each}, "):
                case, _, peer = x.name.removeprefix(f"{each}, ").rpartition(", ")
                cells.setdefault(case, {})[peer] = f"{x.value:.2e}"
        peers = list(dict.fromkeys(peer for row in cells.values() for peer in row))
        width = max([len(case) for case in cells], default=0)
        lines += ["", each, " " * width + "".join(f"  {peer}" for peer in peers)]
        lines += [
            f"{case:{width}}" + "".join(f"  {row.get(peer, '-'):>{len(peer)}}" for peer in peers)
            for case, row in cells.items()
        ]
    return lines


if __name__ == "__main__":
    main()

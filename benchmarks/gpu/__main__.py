"""Asks a GPU: ``python -m benchmarks.gpu [question ...]``; all questions without one."""

from __future__ import annotations

import argparse
import importlib

from tqdm import tqdm

from benchmarks.environment import gpu_facts, results_folder
from benchmarks.results import Figure, write

QUESTIONS = ("memory", "block_mask", "first_call")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("questions", nargs="*", metavar="question", help=", ".join(QUESTIONS))
    asked = parser.parse_args().questions or QUESTIONS
    unknown = sorted(set(asked) - set(QUESTIONS))
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; known are {', '.join(QUESTIONS)}")
    if not gpu_facts():
        parser.error("`nvidia-smi` tells of no GPU here.")
    with tqdm(asked, unit="question", dynamic_ncols=True, disable=None) as bar:
        for question in bar:
            bar.set_postfix_str(question)
            module = importlib.import_module(f"benchmarks.gpu.{question}")
            figures, remarks = module.measure()
            machine = gpu_facts()  # right after the measurement, for the clocks
            path = write(results_folder(machine["device"]), question, module.TITLE, figures, remarks, machine)
            bar.write("\n".join([f"{path}: {module.TITLE}", *map(line, figures), *remarks]))


def line(figure: Figure) -> str:
    """A figure for the terminal."""
    spread = f" ({figure.low:g} to {figure.high:g})" if figure.runs > 1 else ""
    reached = {None: "", True: "  reached", False: "  FELL SHORT"}[figure.holds]
    return f"  {figure.name}: {figure.value:g} {figure.unit}{spread}{reached}"


if __name__ == "__main__":
    main()

"""Asks the CPU: ``python -m benchmarks.cpu [question ...]``; all questions without one."""

from __future__ import annotations

import argparse
import importlib

from tqdm import tqdm

from benchmarks.results import write

QUESTIONS = ("window", "noop", "mask_memory", "training_memory", "documents_compile", "first_call", "paged_scaling",
             "demo_decode")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu", description=__doc__)
    parser.add_argument("questions", nargs="*", metavar="question", help=", ".join(QUESTIONS))
    asked = parser.parse_args().questions or QUESTIONS
    unknown = sorted(set(asked) - set(QUESTIONS))
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; known are {', '.join(QUESTIONS)}")
    with tqdm(asked, unit="question", dynamic_ncols=True, disable=None) as bar:
        for question in bar:
            bar.set_postfix_str(question)
            module = importlib.import_module(f"benchmarks.cpu.{question}")
            figures = module.measure()
            path = write("cpu", question, module.TITLE, figures)
            lines = [f"  {x.name}: {x.value:g} {x.unit}" + (f" ({x.low:g} to {x.high:g})" if x.runs > 1 else "")
                     + {None: "", True: "  reached", False: "  FELL SHORT"}[x.holds] for x in figures]  # fmt: skip
            bar.write("\n".join([f"{path}: {module.TITLE}", *lines]))


if __name__ == "__main__":
    main()

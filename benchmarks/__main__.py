"""The command line: ``python -m benchmarks COMMAND ...``."""

from __future__ import annotations

import importlib
import sys

# Each is `main(words)` of a module, which is imported only if it is named.
COMMANDS = {
    "attention": ("benchmarks.run.suite", "speed of attention beside peers, by suites"),
    "gpu": ("benchmarks.questions.gpu", "memory, mask creation and the first call on a GPU"),
    "masks": ("benchmarks.questions.masks", "making BlockMasks of up to a million tokens, on a CPU or a GPU"),
    "numerics": ("benchmarks.questions.eight_bits", "errors of caches of eight bits against float64"),
    "training": ("benchmarks.questions.training", "training steps of whole models beside peers"),
    "generation": ("benchmarks.questions.generation", "prefill and decoding with a whole model beside torch"),
    "engine": ("benchmarks.questions.engine", "the serving engine under load, with a whole model"),
    "serving": ("benchmarks.questions.serving", "load on a server of OpenAI's completions API"),
    "context": ("benchmarks.questions.context", "context parallel attention on several GPUs beside one"),
    "tune": ("benchmarks.tune", "search tiles and write a table for the GPU at hand"),
    "report": ("benchmarks.results.report", "render the result files"),
}


def main() -> None:
    """Runs the named command."""
    name, *words = sys.argv[1:] or [""]
    if name in COMMANDS:
        importlib.import_module(COMMANDS[name][0]).main(words)
        return
    lines = [f"  {command:10} {what}" for command, (_, what) in COMMANDS.items()]
    usage = "\n".join(["usage: python -m benchmarks COMMAND ... (each has --help)", "", *lines])
    if name not in ("", "-h", "--help"):
        sys.exit(f"{usage}\n\nunknown command: {name}")
    print(usage)


if __name__ == "__main__":
    main()

"""The command line: ``python -m benchmarks COMMAND ...``."""

import argparse
import importlib
import sys
from collections.abc import Sequence

from benchmarks.questions import question

# Modules with `add_options(parser)` and `run(options)`, and those of questions; imported only if they are named.
COMMANDS = {
    "attention": ("benchmarks.run.suite", "speed of attention beside peers, by suites"),
    "tune": ("benchmarks.tune", "search tiles and write a table for the GPU at hand"),
    "report": ("benchmarks.results.report", "render the result files"),
    "gpu": ("benchmarks.questions.gpu", "the first call on a GPU"),
    "numerics": ("benchmarks.questions.numerics", "errors of caches of eight bits against float64"),
    "training": ("benchmarks.questions.training", "training steps of whole models beside peers"),
    "generation": ("benchmarks.questions.generation", "prefill and decoding with a whole model beside torch"),
    "engine": ("benchmarks.questions.engine", "the serving engine under load, with a whole model"),
    "serving": ("benchmarks.questions.serving", "load on a server of OpenAI's completions API"),
    "context": ("benchmarks.questions.context", "context parallel attention on several GPUs beside one"),
}


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The options of a command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Each command has --help.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (path, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, formatter_class=argparse.RawDescriptionHelpFormatter)
        if name in words[:1]:
            module = importlib.import_module(path)
            command.description = module.__doc__
            if rows := [row for row in question.QUESTIONS if row.command == name]:
                question.add_options(command, rows)
            else:
                module.add_options(command)
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    """Runs the named command."""
    options = parse(sys.argv[1:] if words is None else words)
    if rows := [row for row in question.QUESTIONS if row.command == options.command]:
        question.run(rows, options)
    else:
        importlib.import_module(COMMANDS[options.command][0]).run(options)


if __name__ == "__main__":
    main()

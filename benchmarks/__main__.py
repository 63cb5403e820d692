"""The command line: ``python -m benchmarks COMMAND ...``."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from benchmarks.questions import question, table

# Modules with `add_options(parser)` and `run(options)`, imported only if they are named.
_MODULES = {
    "attention": ("benchmarks.run.suite", "speed of attention beside peers, by suites"),
    "tune": ("benchmarks.tune", "search tiles and write a table for the GPU at hand"),
    "report": ("benchmarks.results.report", "render the result files"),
}


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The options of a command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Each command has --help.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (module, text) in _MODULES.items():
        command = commands.add_parser(name, help=text, formatter_class=argparse.RawDescriptionHelpFormatter)
        if name in words[:1]:
            command.description = importlib.import_module(module).__doc__
            importlib.import_module(module).add_options(command)
    for name, text in table.COMMANDS.items():
        rows = [row for row in table.QUESTIONS if row.command == name]
        about = sys.modules[rows[0].measure.__module__].__doc__
        command = commands.add_parser(
            name, help=text, description=about, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        question.add_options(command, rows)
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    """Runs the named command."""
    options = parse(sys.argv[1:] if words is None else words)
    if options.command in _MODULES:
        importlib.import_module(_MODULES[options.command][0]).run(options)
    else:
        question.run([row for row in table.QUESTIONS if row.command == options.command], options)


if __name__ == "__main__":
    main()

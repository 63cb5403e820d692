"""Compiles a grammar in a process of its own: `python -P grammar_check.py`, with the constraint as JSON on its input.

A grammar of a few kilobytes can take minutes and gigabytes to compile, and the compiler cannot be stopped. So it is
compiled first where the operating system bounds time and memory. This file imports nothing of the library, so that it
starts in 0.1 s; `flax_layers.serving.engine.constraints` runs it.
"""

import json
import sys

CPU_SECONDS = 2
MEMORY = 1 << 30
LIMITS = {"max_items_in_row": 10_000, "verbose_errors": False}
"""Limits of llguidance that differ from its own: the first one admits objects with thousands of optional properties."""


def main() -> None:
    """Prints the error of the grammar; nothing if it compiles."""
    import resource  # not on every system

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    from llguidance import LLMatcher, LLParserLimits

    constraint = json.loads(sys.stdin.buffer.read())
    grammar = getattr(LLMatcher, f"grammar_from_{constraint['kind']}")(constraint["text"])
    sys.stdout.buffer.write(LLMatcher.validate_grammar(grammar, None, limits=LLParserLimits(**LIMITS)).encode())


if __name__ == "__main__":
    main()

"""Counts of the engine."""

from __future__ import annotations

import dataclasses

COUNTED = ("generated_tokens", "drafted_tokens", "accepted_tokens", "steps", "cascade_steps", "failures")
"""What the engine itself counts."""


@dataclasses.dataclass(frozen=True)
class Stats:
    """The engine at one moment; counts are since it started.

    Attributes:
        running: Requests that have pages.
        waiting: Requests that have none yet.
        free_pages: Pages that nobody uses.
        cached_pages: Pages that the prefix cache holds.
        used_pages: Pages of running requests alone.
        prompt_tokens: Tokens of admitted prompts.
        hit_tokens: Those of them that were found in the prefix cache, or that another sample of the prompt computed.
        generated_tokens: Sampled tokens that were delivered.
        drafted_tokens: Drafted tokens that were verified.
        accepted_tokens: Those of them that were accepted.
        steps: Steps that were dispatched.
        cascade_steps: Those of them in which requests read the prefix that they share once for all.
        preemptions: How often a request lost its pages and was computed again.
        failures: Steps that failed.
    """

    running: int
    waiting: int
    free_pages: int
    cached_pages: int
    used_pages: int
    prompt_tokens: int
    hit_tokens: int
    generated_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    steps: int
    cascade_steps: int
    preemptions: int
    failures: int

"""One random mod, from its seed to a verdict."""

from __future__ import annotations

import re
import traceback
from typing import Any

import jax

import jflex
from tests.support.random_mods.case import Case, draw_case
from tests.support.random_mods.judge import Miscompiled, Wrong, compiled_without_gpu, judge, refusal
from tests.support.random_mods.shrink import shrunk

PROFILES = {"mosaic_gpu": "hopper", "triton": "wide"}


def run(
    seed: int,
    backend: str,
    profile: str | None = None,
    *,
    shrink: bool = False,
    optimised: bool = False,
    without: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Draws a call, runs it and says what came of it.

    Args:
      seed: Of the call.
      backend: As `implementation=`; ``"triton-interpret"``; or ``"triton-compile"`` and the like, which are compiled
        for a GPU that is not there, and not run.
      profile: What is drawn, as in `case.PROFILES`.
      shrink: Whether to make a failing call smaller.
      optimised: Whether to compile with all of XLA's optimisations on a CPU, too.
      without: Words; a mod whose source holds one of them is left out.
    """
    implementation, _, manner = backend.partition("-")
    case = draw_case(seed, profile or ("small" if manner == "interpret" else PROFILES.get(implementation, "small")))
    if any(word in case.report() for word in without):
        return {"seed": seed, "verdict": "left out", "message": ""}
    in_haste = not optimised and jax.default_backend() != "gpu"
    verdict = lambda case: _verdict(case, implementation, manner, in_haste)
    result = verdict(case)
    if result["verdict"] in ("wrong", "error"):
        if shrink:
            same = lambda other: _alike(verdict(other), result)
            case = shrunk(case, same)
            result["message"] += "\nsmaller: " + verdict(case)["message"]
        result["report"] = case.report()
    return {"seed": seed, "backend": backend, **result}


def _verdict(case: Case, implementation: str, manner: str, in_haste: bool) -> dict[str, Any]:
    try:
        with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
            if manner == "compile":
                compiled_without_gpu(case, implementation)
            else:
                judge(case, implementation, interpret=manner == "interpret", in_haste=in_haste)
    except jflex.UnsupportedError as error:
        return {"verdict": "refused", "message": str(error), "reason": reason_of(error)}
    except Miscompiled as error:
        return {"verdict": "miscompiled", "message": str(error)}
    except Wrong as error:
        return {"verdict": "wrong", "message": str(error)}
    except Exception as error:  # of whatever kind: this is what the fuzzer looks for; it reports it and goes on
        where = [
            f"{frame.filename.split('/')[-1]}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)
        ]
        message = f"{' '.join(where[-8:])}\n{type(error).__name__}: {str(error)[:600]}"
        return {"verdict": "error", "message": message}
    return {"verdict": "passed", "message": ""}


def reason_not_to_run(seed: int, implementation: str) -> str | None:
    """Why a GPU implementation refuses a random call, without running it; None if it does not."""
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        return refusal(draw_case(seed, PROFILES[implementation]), implementation)


def reason_of(error: jflex.UnsupportedError) -> str:
    """The reason without what differs between mods of one kind."""
    reason = re.sub(r"`?<random \w+ \d+>\S*|file .*?, line \d+|line \d+", "", str(error))
    return re.sub(r"\d+", "N", reason)[:200]


def _alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    kind = lambda result: result["message"].split("\n")[-1][:50] if result["verdict"] == "error" else ""
    return one["verdict"] == other["verdict"] and kind(one) == kind(other)

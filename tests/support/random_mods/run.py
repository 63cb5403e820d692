"""One random mod, from its seed to a verdict."""

from __future__ import annotations

import traceback
from typing import Any

import jax

import jflex
from tests.support import drawn_arrays, evaluation, gpu_compile
from tests.support.random_mods.case import Case, draw_case
from tests.support.random_mods.judge import Miscompiled, Wrong, judge

PROFILES = {"mosaic_gpu": "hopper", "triton": "wide"}


def run(seed: int, backend: str, profile: str | None = None) -> dict[str, Any]:
    """Draws a call, runs it and says what came of it.

    Args:
      seed: Of the call.
      backend: As `implementation=`; ``"triton-interpret"``, ``"mosaic_gpu-emulated"``; or ``"triton-compile"`` and the
        like, which are compiled for a GPU that is not there, and not run.
      profile: What is drawn, as in `case.PROFILES`.
    """
    implementation, _, manner = backend.partition("-")
    case = draw_case(seed, profile or ("small" if manner == "interpret" else PROFILES.get(implementation, "small")))
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        verdict, message = _verdict(case, backend, manner)
    return {"seed": seed, "backend": backend, "verdict": verdict, "message": message, "report": case.report()}


def _verdict(case: Case, backend: str, manner: str) -> tuple[str, str]:
    try:
        if manner == "compile":
            with jax.default_matmul_precision("highest"):
                gpu_compile.compiled_of(*evaluation.program_of(case.call, backend))
        else:
            judge(case, backend)
    except jflex.UnsupportedError as error:
        return "refused", str(error)
    except Miscompiled as error:
        return "miscompiled", str(error)
    except Wrong as error:
        return "wrong", str(error)
    except Exception as error:  # of whatever kind: this is what the fuzzer looks for; it reports it and goes on
        frames = traceback.extract_tb(error.__traceback__)[-8:]
        where = " ".join(f"{frame.filename.split('/')[-1]}:{frame.lineno}" for frame in frames)
        return "error", f"{where}\n{type(error).__name__}: {str(error)[:600]}"
    return "passed", ""


def reason_not_to_run(seed: int, implementation: str) -> str | None:
    """Why a GPU implementation refuses a random call, without running it; None if it does not."""
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        call, accounts = draw_case(seed, PROFILES[implementation]).call, []

        def account(x):
            blocks = drawn_arrays.block_mask(call)
            arrays = (x.query, x.key, x.value), x.score, x.mask, blocks, {}
            accounts.append(evaluation.call_for(call, implementation, *arrays, function=jflex.explain))

        jax.eval_shape(account, drawn_arrays.draw(call))
    return accounts[0].reasons.get(implementation)

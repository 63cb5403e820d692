"""What every kernel is told: the setting and the arrays, from a problem and its inputs."""

from __future__ import annotations

import functools
from typing import Any

from jflex._call.problem import Problem
from jflex.backends.base import Inputs
from jflex.backends.gpu.programs import Programs, programs_of


def known_programs(problem: Problem, *, heads_in_rows: bool = False) -> Programs:
    """The tile programs of a problem that is known to have them."""
    programs = programs_of(problem, heads_in_rows=heads_in_rows)
    assert isinstance(programs, Programs), programs
    return programs


@functools.lru_cache(maxsize=256)
def setting_of(problem: Problem, *, heads_in_rows: bool = False) -> Any:
    """The static facts."""
    from pallas_kernels.spec import Setting

    programs, p = known_programs(problem, heads_in_rows=heads_in_rows), problem
    lists = (1, 1) if p.blocks is None else (p.blocks.batch, p.blocks.heads)
    return Setting(
        p.B,
        p.T,
        p.S,
        p.Hq,
        p.Hkv,
        p.Bkv,
        p.D,
        p.Dv,
        p.layout,
        p.scale,
        programs.score,
        programs.mask,
        None if p.blocks is None else p.blocks.size,
        *lists,
        p.precision,
        p.config.interpret,
        () if p.score is None else tuple(shape for shape, _ in p.score.operands),
        p.config.contain_nan or heads_in_rows,  # decoding, as paged attention, always contains it
    )


def arrays_of(inputs: Inputs) -> Any:
    """The arrays; booleans that mods capture as int8."""
    from pallas_kernels.spec import Arrays, as_int8

    lists = None if inputs.lists is None else tuple(inputs.lists)
    captured = (tuple(map(as_int8, group)) for group in (inputs.score_operands, inputs.mask_operands))
    return Arrays(inputs.query, inputs.key, inputs.value, lists, *captured)

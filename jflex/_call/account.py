"""The report of `jflex.explain`: the base of all accounts, and the account of dense and packed calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jflex._call.dispatch import (
    Implementation,
    Selection,
    get_backend,
    no_gradients,
    select,
    select_passes,
    select_tangent,
    text_of,
)
from jflex._check.arguments import known_values
from jflex.backends.base import Inputs, Plan
from jflex.backends.lengths import bounded_lists
from jflex.block_mask.drawing import SKIPS_NOTHING, is_concrete, skips_nothing
from jflex.block_mask.lists import BlockLists, states_from_lists
from jflex.config import Config
from jflex.errors import UnsupportedError
from pallas_kernels.plan import Refusal, all_gradients
from pallas_kernels.spec import AttentionSpec

NOTHING = "nothing is computed: there are no queries or no keys"


@dataclasses.dataclass(frozen=True)
class Choice:
    """The implementation that runs a call, and its settings.

    Attributes:
      backend: The backend that runs it, or None if no requested one supports it.
      reasons: Why each backend before it in the order does not run it.
      tiles: Kernels and tile sizes of the passes and where the sizes come from, as text.
      gradients: The backend that computes the gradients, or None if there are none.
      gradients_reason: Why there are none, or why another backend than `backend` computes them; else empty.
      tangents: The backend of tangents, along all inputs; None without `Config.forward_mode`. ``"xla"``
        computes second derivatives, or ``"reference"`` where that runs the call.
      tangents_reason: Why backends before it in the order do not compute them; else empty.
      config: The settings of the call.
    """

    backend: str | None
    reasons: dict[str, str]
    tiles: str
    gradients: str | None
    gradients_reason: str
    tangents: str | None
    tangents_reason: str
    config: Config

    def lines(self) -> list[str]:
        """The account as lines."""
        lines = [f"backend   {self.backend or 'none of the requested'}"]
        lines += [f"  not {name}: {reason}" for name, reason in self.reasons.items()]
        if self.tiles:
            lines.append(f"tiles     {self.tiles}")
        if self.backend is not None:
            lines.append(f"gradients {self.gradients or 'none'}{_because(self.gradients_reason)}")
        lines += [f"tangents  {self.tangents}{_because(self.tangents_reason)}"] if self.tangents else []
        return [*lines, f"config    {_settings(self.config)}"]

    def __str__(self) -> str:
        return "\n".join(self.lines())


def _because(reason: str) -> str:
    return f", because {reason}" if reason else ""


@dataclasses.dataclass(frozen=True)
class Account(Choice):
    """The plan of a call of `flex_attention` or `flex_attention_varlen`; ``print`` it.

    Attributes:
      visited: Visited blocks, over batch and heads. Without a BlockMask, tiles of the forward kernel, where it bounds
        them by the program of the mask. None where all are visited, or lists or `kv_lengths` are not known.
      full: Visited blocks in which the mask is not evaluated.
      skips_nothing: Whether all of several blocks are visited, although the mask hides elements of some.
      flops: Floating-point operations of the forward pass over the visited blocks, 2 for a multiply-add; where
        these are not counted, over the keys within their lengths, where these are known.
      bytes: Lower bound on the bytes moved: query, key, value and out once each, keys and values up to their lengths.
    """

    visited: int | None
    full: int | None
    blocks: int | None
    skips_nothing: bool
    flops: int
    bytes: int

    @property
    def partial(self) -> int | None:
        """Visited blocks in which the mask is evaluated."""
        return None if self.visited is None or self.full is None else self.visited - self.full

    @classmethod
    def from_call(cls, spec: AttentionSpec, inputs: Inputs, implementation: Implementation) -> Account:
        """Makes the account of one call; query, key and value may be shapes."""
        lists = _known_lists(spec, inputs)
        visited, full, total = _count(spec, lists, select(implementation, spec).plan)
        lengths = known_values(inputs.kv_lengths)
        keys, longest = spec.B * spec.S, spec.S  # of the whole batch, and of one entry
        if lengths is not None:
            keys, longest = int(lengths.sum()), int(lengths.max(initial=0))
        pairs = spec.Hq * spec.T * keys
        if visited is not None and total:
            pairs = spec.B * spec.Hq * spec.T * spec.S * visited // total
        width, qk_width = (jnp.dtype(x).itemsize for x in (spec.dtype, spec.qk_dtype or spec.dtype))
        rows = spec.B * spec.Hq * spec.T, spec.Hkv * (longest if spec.Bkv < spec.B else keys)
        return cls(
            **dense_choice(spec, implementation),
            visited=visited,
            full=full,
            blocks=total,
            skips_nothing=total is not None and visited == total and _skips_nothing(spec, lists),
            flops=2 * pairs * (spec.D + spec.Dv),
            bytes=(qk_width * spec.D + width * spec.Dv) * sum(rows),
        )

    def lines(self) -> list[str]:
        """The account as lines."""
        lines = super().lines()
        if self.visited is not None and self.full is not None and self.blocks:
            lines.append(
                f"blocks    {self.visited} of {self.blocks} visited ({self.full} full, {self.partial} partial), "
                f"{100 * (1 - self.visited / self.blocks):.1f} % skipped"
            )
            lines += [f"  {SKIPS_NOTHING}"] if self.skips_nothing else []
        elif self.blocks is None:
            lines.append("blocks    not counted (all are visited, or the BlockMask is traced)")
        return [*lines, f"work      {work_of(self.flops, self.bytes)}"]


class Described(NamedTuple):
    """Kernels and tiles of the passes as text, the backends of gradients and tangents, and why these or none."""

    tiles: str
    gradients: str | None
    gradients_reason: str
    tangents: str | None = None
    tangents_reason: str = ""


def choice_of(spec: AttentionSpec, selection: Selection, describe: Callable[[str, Plan], Described]) -> dict[str, Any]:
    """The fields of a `Choice`; `describe` gets a backend and its plan, where something is computed."""
    passes = Described(NOTHING if spec.is_empty and selection.name is not None else "", None, "")
    if selection.name is not None and selection.plan is not None and not spec.is_empty:
        passes = describe(selection.name, selection.plan)
    return {"backend": selection.name, "reasons": selection.rejections, "config": spec.config, **passes._asdict()}


def dense_choice(spec: AttentionSpec, implementation: Implementation) -> dict[str, Any]:
    """The fields of the `Choice` of a dense call."""

    def describe(name: str, plan: Plan) -> Described:
        passes = _describe(spec, implementation, name, plan)
        if name == "reference":
            return passes._replace(tangents=name)
        if not spec.config.forward_mode or spec.qk_dtype is not None:
            return passes
        chosen = select_tangent(implementation, spec, all_gradients(spec))
        assert chosen.plan is not None  # 'xla' has every tangent
        tiles = f"{passes.tiles}; tangent {chosen.plan.describe()}"
        return passes._replace(tiles=tiles, tangents=chosen.name, tangents_reason=text_of(chosen))

    return choice_of(spec, select(implementation, spec), describe)


def work_of(flops: int | None, moved: int | None) -> str:
    """Work as text."""
    if flops is None or moved is None:
        return "not known"
    return f"{flops / 1e9:.3f} GFLOP forward, {moved / 1e6:.3f} MB"


def _settings(config: Config) -> str:
    """The fields that a user has set."""
    values = {field.name: (getattr(config, field.name), field.default) for field in dataclasses.fields(config)}
    changed = [f"{name}={value!r}" for name, (value, default) in values.items() if value != default]
    return ", ".join(changed) or "default"


def _describe(spec: AttentionSpec, implementation: Implementation, name: str, plan: Plan) -> Described:
    if spec.qk_dtype is not None:
        return Described(plan.describe(), None, no_gradients(spec))
    requested = all_gradients(spec)
    both = get_backend(name).plan(spec, requested)
    refusal = both.sentence(spec) if isinstance(both, Refusal) else ""
    try:
        passes = select_passes(implementation, spec, requested)
    except UnsupportedError:
        return Described(plan.describe(), None, refusal)
    if isinstance(both, Refusal):
        return Described(plan.describe(), passes.backward, f"{refusal}; with gradients, it runs both passes")
    if passes.backward != name:
        return Described(plan.describe(), passes.backward, passes.reason)
    return Described(both.describe(), *(both.gradients or (name, "")))


def _count(
    spec: AttentionSpec, lists: BlockLists | None, plan: Plan | None
) -> tuple[int | None, int | None, int | None]:
    """Counts of visited blocks, of full ones, and of all."""
    if lists is None:
        tiles = None if plan is None or spec.is_empty else plan.count_tiles()
        return tiles or (None, None, None)
    batch, heads, rows = lists.kv_num_blocks.shape
    repeat = (spec.B // batch) * (spec.Hq // heads)
    full = int(np.asarray(lists.full_kv_num_blocks).sum()) * repeat
    columns = lists.q_num_blocks.shape[-1]
    partial = int(np.asarray(lists.kv_num_blocks).sum()) * repeat
    return partial + full, full, rows * columns * spec.B * spec.Hq


def _skips_nothing(spec: AttentionSpec, lists: BlockLists | None) -> bool:
    if lists is None or spec.blocks is None:
        return False
    return skips_nothing(np.asarray(states_from_lists(lists)), (spec.T, spec.S), spec.blocks.size)


def _known_lists(spec: AttentionSpec, inputs: Inputs) -> BlockLists | None:
    """The lists that the call walks; None if their values are not known."""
    lists, lengths = inputs.lists, known_values(inputs.kv_lengths)
    if lists is None or spec.blocks is None or not is_concrete(lists):
        return None
    if inputs.kv_lengths is None:
        return lists
    if lengths is None:
        return None
    with jax.ensure_compile_time_eval():
        return bounded_lists(spec, lists, jnp.asarray(lengths), spec.blocks.size)

"""Attention states: attention over some of the keys, in a form that merges exactly with that over others.

A state is the output over a set of keys and the logsumexp of their scores. Merging the states of disjoint sets gives
the state of their union, in any order and grouping, so keys may be split (among decoding kernels, pages, levels of
shared prefixes, devices) without error. The neutral element is the state of no keys, ``(0, -inf)``. Without a softmax
(``normalize="none"``) outputs add up, and there is no lse.

After FlashInfer (Ye et al., 2025, https://arxiv.org/abs/2501.01005, "Attention Composition"), with natural logarithms.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jflex._check.arguments import DTYPES, check_is_array, check_layout, describe_array
from jflex.states.stats import AttentionStats, Stat
from jflex.types import AnyArray, Lse, Out

Normalize = Literal["softmax", "none"]
_LSE_DTYPES = ("float32", "float64")
_STATS: tuple[Literal["max", "entropy"], ...] = ("max", "entropy")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class AttentionState:
    """Attention over a set of keys: a pytree that passes through ``jit``, ``grad``, ``vmap`` and ``scan``.

    Heads are the last axis but one of `out` and the last of `lse`, after batch and query axes; so packed queries
    ([N, Hq, Dv], [N, Hq]) and padded ones ([B, T, Hq, Dv], [B, T, Hq]) merge alike. `flex_attention` returns its lse as
    [B, Hq, T]: `from_attention` and `to_attention` are where the order changes, in both layouts.

    The arrays are checked when states are merged, not when a state is made: JAX makes pytrees of other things than
    arrays, too.

    Attributes:
      out: The output, normalized: the softmax over these keys, times their values. Zeros where no key is visible.
      lse: Natural logarithm of the sum of ``exp(score)`` over these keys, float32 (float64 for a float64 `out`);
        ``-inf`` where no key is visible. `lse_from_base2` and `lse_from_flash` convert from other libraries. Zeros
        without a softmax.
      normalize: As in `flex_attention`. States of one kind do not merge with those of the other.
      max: The largest score over these keys, as in `AttentionStats`, of the shape and dtype of `lse`; None if the state
        does not hold it. States merge if they hold the same statistics.
      entropy: That of the softmax over these keys, likewise.

    >>> import jflex
    >>> seen, nothing = AttentionState(jnp.ones((4, 2, 8)), jnp.zeros((4, 2))), AttentionState.empty((4, 2, 8))
    >>> jnp.array_equal(jflex.merge(seen, nothing).out, seen.out).item()
    True
    """

    out: Float[Array, "*rows Hq Dv"]
    lse: Float[Array, "*rows Hq"]
    normalize: Normalize = dataclasses.field(default="softmax", metadata={"static": True})
    max: Float[Array, "*rows Hq"] | None = None
    entropy: Float[Array, "*rows Hq"] | None = None

    @classmethod
    def empty(
        cls,
        shape: tuple[int, ...],
        dtype: DTypeLike = jnp.float32,
        normalize: Normalize = "softmax",
        stats: tuple[Stat, ...] = (),
    ) -> AttentionState:
        """The state of no keys: merging with it changes nothing. A carry of ``scan`` starts with it.

        Args:
          shape: Of `out`, ``(*rows, Hq, Dv)``.
          dtype: Of `out`.
          normalize: As in `flex_attention`.
          stats: Statistics that the state holds, of those of `flex_attention`; the lse is there in any case.

        Returns:
          Zeros, and an lse of ``-inf``; of zeros without a softmax. The max is ``-inf``, the entropy 0.

        >>> AttentionState.empty((4, 2, 8), jnp.bfloat16).lse[0].tolist()
        [-inf, -inf]
        """
        lse_dtype = jnp.float64 if jnp.dtype(dtype) == jnp.float64 else jnp.float32
        fill = lambda x: jnp.full(shape[:-1], x, lse_dtype)
        stats_of_none = {name: fill(x) for name, x in (("max", -jnp.inf), ("entropy", 0.0)) if name in stats}
        return cls(
            jnp.zeros(shape, dtype), fill(-jnp.inf if normalize == "softmax" else 0.0), normalize, **stats_of_none
        )

    @classmethod
    def from_attention(cls, out: Out, lse: Lse | AttentionStats, layout: str = "BTNH") -> AttentionState:
        """The state from the results of ``flex_attention(..., return_lse=True)``, or with `return_stats`.

        Args:
          out: In the order of `layout`.
          lse: [B, Hq, T] in both layouts; or statistics with an lse, which the state then holds.
          layout: That of the call: ``"BTNH"``, or ``"BNTH"`` for [B, Hq, T, Dv].

        Returns:
          A state with `out` [B, T, Hq, Dv] and `lse` [B, T, Hq].

        Raises:
          TypeError: An argument is no array, or of a wrong dtype.
          ValueError: The shapes do not fit one another, the statistics have no lse, or `layout` is unknown.

        >>> import jflex
        >>> query, key, value = jax.random.normal(jax.random.key(0), (3, 1, 16, 4, 8))
        >>> state = AttentionState.from_attention(*jflex.flex_attention(query, key, value, return_lse=True))
        >>> state.out.shape, state.lse.shape
        ((1, 16, 4, 8), (1, 16, 4))
        """
        check_layout(layout)
        stats = lse if isinstance(lse, AttentionStats) else AttentionStats(lse)
        if stats.lse is None:
            raise ValueError(
                "`lse` must be an lse, or statistics with one. Got statistics without. Add 'lse' to the `return_stats` "
                "of the call."
            )
        out, lse = _checked_array("out", out, DTYPES), _checked_array("lse", stats.lse, _LSE_DTYPES)
        heads, rows = (2, 1) if layout == "BTNH" else (1, 2)
        if out.ndim != 4 or lse.shape != (out.shape[0], out.shape[heads], out.shape[rows]):
            axes = "[B, T, Hq, Dv]" if layout == "BTNH" else "[B, Hq, T, Dv]"
            raise ValueError(
                f"`out` must be {axes} in the layout {layout!r}, and `lse` [B, Hq, T]. Got out: {describe_array(out)}, "
                f"lse: {describe_array(lse)}. Pass both as `flex_attention(..., return_lse=True)` returned them, with "
                "the `layout` of that call."
            )
        row_max, entropy = (None if x is None else x.swapaxes(1, 2) for x in (stats.max, stats.entropy))
        state = cls(out if layout == "BTNH" else out.swapaxes(1, 2), lse.swapaxes(1, 2), max=row_max, entropy=entropy)
        return checked_state("lse", state)

    def to_attention(self, layout: str = "BTNH") -> tuple[Out, Lse]:
        """Output and lse as ``flex_attention(..., return_lse=True)`` returns them; statistics stay in the fields.

        Args:
          layout: ``"BTNH"``, or ``"BNTH"`` for an output [B, Hq, T, Dv].

        Returns:
          The output in `layout`, and the lse [B, Hq, T].

        Raises:
          TypeError: A field is no array, or of a wrong dtype.
          ValueError: The state does not have the axes [B, T, Hq, Dv], or `layout` is unknown.

        >>> out, lse = AttentionState.empty((1, 16, 4, 8)).to_attention("BNTH")
        >>> out.shape, lse.shape
        ((1, 4, 16, 8), (1, 4, 16))
        """
        check_layout(layout)
        state = checked_state("self", self)
        if state.out.ndim != 4:
            raise ValueError(
                f"`to_attention` needs a state with `out` [B, T, Hq, Dv]. Got out: {describe_array(state.out)}. Take "
                "the fields `out` and `lse` of a state of packed or stacked rows."
            )
        return state.out if layout == "BTNH" else state.out.swapaxes(1, 2), state.lse.swapaxes(1, 2)


def checked_state(name: str, state: object) -> AttentionState:
    """A state of JAX arrays, whose shapes fit one another."""
    if not isinstance(state, AttentionState):
        raise TypeError(
            f"`{name}` must be an `AttentionState`. Got {type(state).__name__}. Make one from output and lse with "
            "`AttentionState.from_attention(out, lse)`."
        )
    out = _checked_array(f"{name}.out", state.out, DTYPES)
    lse = _checked_array(f"{name}.lse", state.lse, _LSE_DTYPES)
    if out.ndim < 1 or out.shape[:-1] != lse.shape:
        raise ValueError(
            f"`{name}` must have `out` [..., Hq, Dv] and `lse` [..., Hq]. Got out: {describe_array(out)}, lse: "
            f"{describe_array(lse)}. What `flex_attention` returns has its lse in another order: "
            "`AttentionState.from_attention(out, lse)` changes it."
        )
    fields = {field: getattr(state, field) for field in _STATS}
    fields = {field: _checked_array(f"{name}.{field}", x, _LSE_DTYPES) for field, x in fields.items() if x is not None}
    for field, x in fields.items():
        if (x.shape, x.dtype) != (lse.shape, lse.dtype):
            raise ValueError(
                f"`{name}.{field}` must have the shape and dtype of `lse`. Got {describe_array(x)}, lse: "
                f"{describe_array(lse)}."
            )
    if fields and state.normalize == "none":
        raise ValueError(f"`{name}` must have no `max` or `entropy` without a softmax. Got {', '.join(fields)}.")
    return AttentionState(out, lse, state.normalize, **fields)


def _checked_array(name: str, x: AnyArray, dtypes: Sequence[str]) -> jax.Array:
    x = jnp.asarray(x) if isinstance(x, np.ndarray) else x
    check_is_array(x, name)
    if str(x.dtype) not in dtypes:
        raise TypeError(
            f"`{name}` must be floating-point ({', '.join(dtypes)}). Got {describe_array(x)}. Cast it with `.astype`."
        )
    return x


def check_alike(name: str, state: AttentionState, first_name: str, first: AttentionState) -> None:
    """Raises unless two states have the same shapes and dtypes: nothing is broadcast or promoted in silence."""
    if state.normalize != first.normalize:
        raise ValueError(
            f"`{first_name}` and `{name}` must be of one kind: outputs of a softmax are averaged, others added. Got "
            f"normalize={first.normalize!r} and normalize={state.normalize!r}."
        )
    names, first_names = (tuple(n for n in _STATS if getattr(x, n) is not None) for x in (state, first))
    if names != first_names:
        raise ValueError(
            f"`{first_name}` and `{name}` must hold the same statistics, to be merged. Got {first_names!r} and "
            f"{names!r}. Make both with one `return_stats`, or set the field to None with `dataclasses.replace`."
        )
    got = ", ".join(
        f"{which}.{field}: {describe_array(getattr(values, field))}"
        for which, values in ((first_name, first), (name, state))
        for field in ("out", "lse")
    )
    if state.out.shape != first.out.shape:
        raise ValueError(
            f"`{first_name}` and `{name}` must have equal shapes. Got {got}. States merge row by row: bring them to "
            "the same rows, heads and head size, with `jnp.broadcast_to` where one state serves several."
        )
    if (state.out.dtype, state.lse.dtype) != (first.out.dtype, first.lse.dtype):
        raise TypeError(
            f"`{first_name}` and `{name}` must have equal dtypes. Got {got}. Cast `out` with `.astype` to the dtype "
            "of the result; sums are in float32 in any case."
        )

"""Statistics of the rows of an attention, `AttentionStats`: what `return_stats` asks for, and its check."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from jaxtyping import Array, Float32

Stat = Literal["lse", "max", "entropy"]
STATS: tuple[Stat, ...] = ("lse", "max", "entropy")


class AttentionStats(NamedTuple):
    """Statistics of the softmax of each row (each query of each head), before dropout; None where not requested.

    All are float32 [B, Hq, T], in both layouts, or [N, Hq] where queries are packed: from `flex_attention_varlen`,
    `paged_attention` and `cascade_attention`.

    Attributes:
      lse: The logsumexp (natural log) of the scores, with the sink of the head. A row that attends to no key has
        ``-inf``, or its sink.
      max: The largest score, scaled and modified: in the unit of the lse, over visible keys alone, without the sink.
        ``-inf`` for a row that attends to no key. No gradient flows through it, as if by `jax.lax.stop_gradient`.
      entropy: ``-sum(p * log(p))`` of the softmax weights, in nats: 0 for a row that attends to one key or to none.
        With sinks, the weight of the sink is one of the ``p``, so that they sum up to 1.

    >>> import jax.numpy as jnp, jflex
    >>> x = jnp.ones((1, 8, 2, 16))
    >>> out, stats = jflex.flex_attention(x, x, x, return_stats=("max", "entropy"))
    >>> float(stats.max[0, 0, 0]), bool(jnp.allclose(jnp.exp(stats.entropy), 8.0)), stats.lse
    (4.0, True, None)
    """

    lse: Float32[Array, "*axes"] | None = None
    max: Float32[Array, "*axes"] | None = None
    entropy: Float32[Array, "*axes"] | None = None


def check_stats(return_stats: object, return_lse: bool, normalize: str) -> tuple[Stat, ...]:
    """Returns the names of the statistics, in the order of `STATS`."""
    known = ", ".join(map(repr, STATS))
    rule = f"`return_stats` must be a tuple of different names of {known}"
    if not isinstance(return_stats, tuple):
        one = return_stats if isinstance(return_stats, str) and return_stats in STATS else "max"
        raise TypeError(f"{rule}. Got {return_stats!r}. Pass `return_stats=({one!r},)`, say.")
    for name in return_stats:
        if not isinstance(name, str):
            raise TypeError(f"{rule}. Got one of type {type(name).__name__}. Pass names, as `({STATS[1]!r},)`.")
        if name not in STATS:
            raise ValueError(f"{rule}. Got {name!r}. Leave it out, or pass one of these.")
    if len(set(return_stats)) < len(return_stats):
        raise ValueError(f"{rule}. Got {return_stats!r}. Pass each name once.")
    if return_stats and return_lse:
        raise ValueError(
            "`return_lse` and `return_stats` cannot both be given: they return different pairs. Got "
            f"return_lse={return_lse!r}, return_stats={return_stats!r}. Put 'lse' into `return_stats`."
        )
    if return_stats and normalize == "none":
        raise ValueError(
            f"`return_stats` must be () with `normalize='none'`: they are those of a softmax. Got {return_stats!r}. "
            "Leave one of them out."
        )
    return tuple(name for name in STATS if name in return_stats)


def select_stats(results: Any, names: tuple[Stat, ...]) -> AttentionStats:
    """The named statistics of results with fields of these names: those of a backend, or an attention state."""
    return AttentionStats(**{name: getattr(results, name) for name in names})

"""Cases of `flex_attention_varlen`: of the table, with indices that each sequence counts from 0."""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jflex
from jflex.varlen import flex_attention_varlen, varlen_block_mask
from tests.cases import mask_pairs, score_pairs
from tests.cases.mask_pairs import same
from tests.cases.score_pairs import F32, ScorePair
from tests.cases.table import Case, Sizes
from tests.support import drawn_arrays, evaluation, oracle

OPTIONS = {
    "xla": {"implementation": "xla"},
    "reference": {"implementation": "reference"},
    "triton-interpret": {"implementation": "triton", "config": jflex.Config(interpret=True)},
    "triton": {"implementation": "triton"},
    "official_triton": {"implementation": "official_triton"},
}


alibi = ScorePair(
    lambda c: lambda s, b, h, q, k: s - c["slopes"][b, h] * jnp.abs(q - k).astype(F32),
    oracle.Score(
        lambda s, b, h, q, k, c: s - c["slopes"][b, h] * abs(q - k),
        None,
        lambda s, b, h, q, k, c: {"slopes": [(-abs(q - k) * 1.0, (b, h))]},
    ),
    lambda rng, n: {"slopes": rng.random((n.R, n.Hq)).astype(np.float32)},
)
bias_of_places = ScorePair(
    lambda c: lambda s, b, h, q, k: s + c["rows"][b, q] + c["columns"][k],
    oracle.Score(
        lambda s, b, h, q, k, c: s + c["rows"][b, q] + c["columns"][k],
        None,
        lambda s, b, h, q, k, c: {"rows": [(1.0, (b, q))], "columns": [(1.0, (k,))]},
    ),
    lambda rng, n: {
        "rows": rng.normal(size=(n.R, n.longest)).astype(np.float32),
        "columns": rng.normal(size=n.longest).astype(np.float32),
    },
)
window = same(lambda b, h, q, k, c: (q >= k) & (q - k < 7 + h))
bottom_right = same(lambda b, h, q, k, c: q + c["more"][b] >= k, lambda rng, n: {"more": n.more.astype(np.int32)})
odd_sequences = same(lambda b, h, q, k, c: (b % 2 == 1) | (q == k))


@dataclasses.dataclass(frozen=True, eq=False)
class Packed(Case):
    """A call of packed sequences.

    Attributes:
      lengths: Queries of each sequence, and its keys.
      padding: Queries and keys behind the last sequence.
      varlen_block: Block size of its BlockMask, or None.
    """

    lengths: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    padding: tuple[int, int] = (0, 0)
    varlen_block: int | None = 32

    @property
    def ends(self) -> tuple[np.ndarray, np.ndarray]:
        """Boundaries of the sequences among queries, and among keys."""
        return tuple(np.concatenate([[0], np.cumsum(x)]).astype(np.int32) for x in self.lengths)

    @property
    def tokens(self) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
        """Sequence and position of each query, and of each key."""
        return tuple(map(places_of, self.ends, (self.sizes.T, self.sizes.S)))

    @property
    def places(self) -> tuple[np.ndarray, ...]:
        """Open grids of sequences, heads, and positions in them; of padding the first one."""
        (b, q), (_, k) = self.tokens
        rows = [np.maximum(x, 0)[:, None] for x in (b, q)]
        return rows[0], np.arange(self.sizes.Hq)[:, None, None], rows[1], np.maximum(k, 0)[None]

    @property
    def within(self) -> np.ndarray:
        """What belongs to one sequence."""
        (b, _), (of_key, _) = self.tokens
        return (b[:, None] == of_key[None]) & (b >= 0)[:, None]

    @property
    def capture_sizes(self) -> SimpleNamespace:
        """The number of sequences, the longest of them, and by how many keys each has more than queries."""
        queries, keys = map(np.array, self.lengths)
        longest = max(queries.max(), keys.max())
        return SimpleNamespace(R=queries.size, Hq=self.sizes.Hq, longest=longest, more=keys - queries)


def places_of(ends: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """The sequence of each token and its position there, -1 in padding."""
    lengths = np.diff(ends)
    padding = np.full(length - ends[-1], -1)
    numbers = np.repeat(np.arange(lengths.size), lengths)
    return np.concatenate([numbers, padding]), np.concatenate([*map(np.arange, lengths), padding])


def packed(name: str, q, kv=None, score=None, mask=None, padding=(0, 0), heads=(2, 2), D=(16, 16), **more) -> Packed:
    """A case of queries and keys of these lengths; the same by default."""
    lengths = q, q if kv is None else kv
    T, S = (sum(x) + n for x, n in zip(lengths, padding, strict=True))
    return Packed(name, score, mask, Sizes(1, T, S, *heads, *D), lengths=lengths, padding=padding, **more)


LONG, SHORT = (37, 0, 50, 1, 40), (3, 70, 0, 33, 20)
CASES = [
    packed("whole", LONG, varlen_block=None),
    packed("causal_grouped", LONG, mask=mask_pairs.causal, heads=(4, 2), D=(16, 24), padding=(70, 70)),
    packed("window_by_head_bfloat16", LONG, mask=window, heads=(4, 1), padding=(3, 3), dtype="bfloat16"),
    packed("alibi_by_sequence", LONG, score=alibi, mask=mask_pairs.causal, padding=(5, 5)),
    packed("softcap", (0, 0, 90, 0), score=score_pairs.softcap, padding=(6, 40)),
    packed("cross", SHORT, LONG, padding=(40, 1)),
    packed("cross_bottom_right", SHORT, LONG, alibi, bottom_right, (2, 40), (4, 2), (16, 8)),
    packed("places", SHORT, LONG, bias_of_places, odd_sequences, (9, 9), varlen_block=16),
    packed("tiny", (1, 2, 3), (2, 0, 3), alibi, padding=(1, 1), varlen_block=None),
    packed("nothing_to_see", (0, 20, 0), (7, 0, 0), alibi, mask_pairs.causal, padding=(2, 30)),
]


def poisoned(case: Packed) -> drawn_arrays.Drawn:
    """The arrays of a case, with NaN in all padding."""
    x = drawn_arrays.draw(case)
    queries, keys = ((token[0] >= 0)[None, :, None, None] for token in case.tokens)
    inside = {"query": queries, "key": keys, "value": keys, "d_out": queries, "d_lse": queries[:, None, :, 0, 0]}
    return x._replace(**{name: drawn_arrays.nan_outside(where, getattr(x, name)) for name, where in inside.items()})


def attend(case: Packed, backend: str, drawn, ends, q, k, v, floats) -> tuple[jax.Array, jax.Array]:
    """Out [1, N, Hq, Dv] and lse [1, Hq, N], as `evaluation` wants them."""
    n = case.sizes
    score_mod = None if case.score is None else case.score.jax({**drawn.score, **floats})
    masks = {"mask_mod": None if case.mask is None else case.mask.jax(drawn.mask)}
    if case.varlen_block is not None:
        H = n.Hq if case.mask is window else None
        masks = {"block_mask": varlen_block_mask(*ends, n.T, n.S, **masks, H=H, block_size=case.varlen_block)}
    out, lse = flex_attention_varlen(
        q[0], k[0], v[0], cu_seqlens_q=ends[0], cu_seqlens_k=ends[1], score_mod=score_mod, **masks, return_lse=True,
        **OPTIONS[backend],
    )  # fmt: skip
    return out[None], lse.T[None]


def program_of(case: Packed, backend: str) -> Any:
    """Forward and backward pass, with all gradients, of `arguments_of`."""

    def program(drawn, ends, floats):
        call = functools.partial(attend, case, backend, drawn, ends)
        out, pull = jax.vjp(call, drawn.query, drawn.key, drawn.value, floats)
        return out, pull((drawn.d_out, drawn.d_lse))

    return program


def arguments_of(case: Packed) -> tuple[Any, ...]:
    return jax.tree.map(jnp.asarray, (poisoned(case), case.ends, drawn_arrays.draw(case).floats()))


@functools.cache
def found_by(case: Packed, backend: str) -> evaluation.Results:
    """Out, lse and all gradients; B is 1 in all of them."""
    run = functools.partial(attend, case, backend)
    return evaluation.differentiated(case, poisoned(case), run, case.ends, in_haste=backend != "triton")


def check(case: Packed, backend: str) -> None:
    """Fails unless out, lse and all gradients are right."""
    found, right = found_by(case, backend), (evaluation.plain(case), evaluation.exact(case))
    evaluation.compare_forward(case, found, *right)
    evaluation.compare_gradients(case, found, *right, evaluation.gradients_of(case))

"""Cases of `flex_attention_varlen`: evaluated packed, and by the oracle one sequence at a time."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import zlib
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jflex
from jflex.varlen import flex_attention_varlen, varlen_block_mask
from tests.cases import mask_pairs, score_pairs
from tests.cases.mask_pairs import MaskPair, same
from tests.cases.score_pairs import F32, ScorePair
from tests.cases.table import Case, Sizes
from tests.support import evaluation, oracle, tolerance

OPTIONS = {
    "xla": {"implementation": "xla"},
    "reference": {"implementation": "reference"},
    "triton-interpret": {"implementation": "triton", "config": jflex.Config(interpret=True)},
    "triton": {"implementation": "triton"},
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
class Packed:
    """A call: lengths of the queries of each sequence and of its keys (None: the same), and padding behind them."""

    name: str
    q: tuple[int, ...]
    kv: tuple[int, ...] | None = None
    score: ScorePair | None = None
    mask: MaskPair | None = None
    padding: tuple[int, int] = (0, 0)
    heads: tuple[int, int] = (2, 2)
    head_sizes: tuple[int, int] = (16, 16)
    block: int | None = 32
    dtype: str = "float32"

    def __str__(self) -> str:
        return self.name

    @property
    def ends(self) -> tuple[np.ndarray, np.ndarray]:
        return tuple(np.concatenate([[0], np.cumsum(x)]).astype(np.int32) for x in (self.q, self.kv or self.q))

    @functools.cached_property
    def as_one(self) -> Case:
        """What `evaluation` knows of it."""
        score = self.score and dataclasses.replace(self.score, captures=lambda rng, n: draw(self).score)
        (q, kv), (D, Dv) = self.ends, self.head_sizes
        sizes = Sizes(1, q[-1] + self.padding[0], kv[-1] + self.padding[1], *self.heads, D, Dv)
        return Case(self.name, score, sizes=sizes, dtype=self.dtype)


LONG, SHORT = (37, 0, 50, 1, 40), (3, 70, 0, 33, 20)
CASES = [
    Packed("whole", LONG, block=None),
    Packed("causal_grouped", LONG, mask=mask_pairs.causal, heads=(4, 2), head_sizes=(16, 24), padding=(70, 70)),
    Packed("window_by_head_bfloat16", LONG, mask=window, heads=(4, 1), padding=(3, 3), dtype="bfloat16"),
    Packed("alibi_by_sequence", LONG, score=alibi, mask=mask_pairs.causal, padding=(5, 5)),
    Packed("softcap", (0, 0, 90, 0), score=score_pairs.softcap, padding=(6, 40)),
    Packed("cross", SHORT, LONG, padding=(40, 1)),
    Packed("cross_bottom_right", SHORT, LONG, alibi, bottom_right, (2, 40), (4, 2), (16, 8)),
    Packed("places", SHORT, LONG, bias_of_places, odd_sequences, (9, 9), block=16),
    Packed("tiny", (1, 2, 3), (2, 0, 3), alibi, padding=(1, 1), block=None),
    Packed("nothing_to_see", (0, 20, 0), (7, 0, 0), alibi, mask_pairs.causal, padding=(2, 30)),
]


@functools.cache
def draw(case: Packed) -> evaluation.Drawn:
    rng, one = np.random.default_rng(zlib.crc32(case.name.encode())), case.as_one
    lengths = [np.diff(ends) for ends in case.ends]
    sizes = SimpleNamespace(R=len(case.q), Hq=case.heads[0], longest=np.max(lengths), more=lengths[1] - lengths[0])
    captured = [{} if pair is None else pair.captures(rng, sizes) for pair in (case.score, case.mask)]
    drawn = evaluation.draw(dataclasses.replace(one, score=None))
    tokens = zip((one.sizes.T, one.sizes.S), case.ends, strict=True)
    inside = [(np.arange(n) < ends[-1])[None, :, None, None] for n, ends in tokens]
    poison = lambda x, of: np.where(inside[of], x, np.array(np.nan, x.dtype))
    d_lse = np.where(inside[0][:, None, :, 0, 0], drawn.d_lse, np.float32(np.nan))
    return evaluation.Drawn(*map(poison, drawn[:4], (0, 1, 1, 0)), d_lse, *captured)


def attend(case: Packed, backend: str, drawn, ends, q, k, v, floats) -> tuple[jax.Array, jax.Array]:
    """Out [1, N, Hq, Dv] and lse [1, Hq, N], as `evaluation` wants them."""
    n = case.as_one.sizes
    score_mod = None if case.score is None else case.score.jax({**drawn.score, **floats})
    how = {"mask_mod": None if case.mask is None else case.mask.jax(drawn.mask)}
    if case.block is not None:
        H = n.Hq if case.mask is window else None
        how = {"block_mask": varlen_block_mask(*ends, n.T, n.S, **how, H=H, block_size=case.block)}
    out, lse = flex_attention_varlen(
        q[0], k[0], v[0], cu_seqlens_q=ends[0], cu_seqlens_k=ends[1], score_mod=score_mod, **how, return_lse=True,
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
    return jax.tree.map(jnp.asarray, (draw(case), case.ends, draw(case).floats()))


@functools.cache
def found_by(case: Packed, backend: str) -> evaluation.Results:
    """Out, lse and all gradients; B is 1 in all of them."""
    program = jax.jit(program_of(case, backend))
    with (
        jax.default_matmul_precision(evaluation.precision(case.as_one)),
        evaluation.compiled_in_haste(backend != "triton"),
    ):
        out, gradients = program(*arguments_of(case))
    return evaluation.Results(*out, *gradients)


@functools.cache
def plain(case: Packed) -> evaluation.Results:
    """By dense attention over all that is packed."""
    (b, q), (other, kv) = (
        places_of(ends, n) for ends, n in zip(case.ends, (case.as_one.sizes.T, case.as_one.sizes.S), strict=True)
    )
    shape = (1, case.heads[0], b.size, other.size)
    visible = (b[:, None] == other[None]) & (b >= 0)[:, None]
    places = [b[:, None], np.arange(shape[1])[:, None, None], q[:, None], kv[None]]
    if case.mask is not None:
        visible = visible & case.mask.exact(*places, draw(case).mask)
    visible = np.broadcast_to(visible, shape)
    places = [np.broadcast_to(np.maximum(x, 0), shape).astype(np.int32) for x in places]
    attend = lambda x, more, q, k, v, floats: evaluation._plain(case.as_one, q, k, v, {**x.score, **floats}, *more)
    clear = jax.tree.map(lambda a: np.where(np.isnan(a), np.zeros_like(a), a), draw(case))
    with jax.default_device(jax.devices("cpu")[0]):
        return evaluation._differentiated(case.as_one, clear, attend, (visible, places), in_haste=True)


def places_of(ends: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    lengths = np.diff(ends)
    padding = np.full(length - ends[-1], -1)
    numbers = np.repeat(np.arange(lengths.size), lengths)
    return np.concatenate([numbers, padding]), np.concatenate([*map(np.arange, lengths), padding])


@functools.cache
def exact(case: Packed) -> SimpleNamespace:
    """What the oracle says of each sequence, put side by side; and how far rounding may move what it says."""
    x, one, n = draw(case), case.as_one, case.as_one.sizes
    captures = {name: a.astype(np.float64) for name, a in x.score.items()}
    names = ("query", "key", "value")
    right = SimpleNamespace(out=np.zeros(x.d_out.shape), lse=np.full(x.d_lse.shape, -np.inf), moved=0.0)
    right.out_rounding, right.lse_rounding = np.zeros(right.out.shape), np.zeros(right.lse.shape)
    zeros = lambda: {k: np.zeros(a.shape) for k, a in ({name: getattr(x, name) for name in names} | captures).items()}
    right.gradients, right.masses, right.output_masses = zeros(), zeros(), zeros()
    for r, (q, kv) in enumerate(zip(*map(itertools.pairwise, case.ends), strict=True)):
        if q[0] == q[1] or kv[0] == kv[1]:
            continue
        rows, columns = np.s_[:, slice(*q)], np.s_[:, slice(*kv)]
        own = [np.asarray(a[at], np.float64) for a, at in zip(x[:4], (rows, columns, columns, rows), strict=True)]
        score, mask = _of_sequence(case, r)
        scale = n.D**-0.5
        found = oracle.forward(*own[:3], scale, score, mask, captures)
        d_lse = x.d_lse[:, :, slice(*q)].astype(np.float64)
        grads = oracle.gradients(*own[:3], scale, score, found, captures, own[3], d_lse)
        right.out[rows], right.lse[:, :, slice(*q)] = found.out, found.lse
        sums = {name: getattr(grads, name) for name in names} | grads.captures
        at = {"query": rows, "key": columns, "value": columns}
        for name in right.gradients:
            right.gradients[name][at.get(name, ())] += sums[name]
            right.masses[name][at.get(name, ())] += grads.masses[name]
        for name in names:
            right.output_masses[name][at[name]] += grads.output_masses[name]
        moved = tolerance.score_rounding(SimpleNamespace(query=x.query[rows], key=x.key[columns]), found, one)
        moved = np.where(np.isfinite(moved), moved, 0)
        values = np.repeat(np.abs(own[2]), n.Hq // n.Hkv, axis=2)
        around = np.einsum("bhts,bshd->bthd", found.weights, values)
        right.lse_rounding[:, :, slice(*q)] = moved
        right.out_rounding[rows] = 2 * moved.swapaxes(1, 2)[..., None] * around
        right.moved = max(right.moved, moved.max(initial=0))
    return right


def _of_sequence(case: Packed, r: int) -> tuple[oracle.Score | None, Any]:
    """The mods of the oracle for sequence r alone: b is 0 there."""
    at = lambda f: None if f is None else lambda s, b, *rest: f(s, b + r, *rest)
    score = case.score and oracle.Score(*map(at, dataclasses.astuple(case.score.exact)))
    return score, case.mask and (lambda b, h, q, k, _: case.mask.exact(b + r, h, q, k, draw(case).mask))


def check(case: Packed, backend: str) -> None:
    """Fails unless out, lse and all gradients are right."""
    found, by_plain, right = found_by(case, backend), plain(case), exact(case)
    rounding = tolerance.one_rounding
    tolerance.check("out", found.out, by_plain.out, right.out, rounding(right.out, case.dtype) + right.out_rounding)
    tolerance.check("lse", found.lse, by_plain.lse, right.lse, rounding(right.lse, np.float32) + right.lse_rounding)
    for name, gradient in right.gradients.items():
        pick = lambda results, name=name: results.captures[name] if name in results.captures else getattr(results, name)
        mass, captured = right.masses[name], name in found.captures
        allowed = tolerance.gradient_rounding(mass if captured else gradient, mass, right.lse, pick(by_plain).dtype)
        moved = right.moved * mass + tolerance.half_rounding(case.dtype) * right.output_masses[name]
        tolerance.check(name, pick(found), pick(by_plain), gradient, allowed + moved)

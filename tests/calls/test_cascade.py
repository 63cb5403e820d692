"""Levels of shared keys, merged: the same as attention over all keys at once, for every mod."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jflex
from jflex import CascadeLevel
from jflex.paged import PagedBatch, PagedCache, token_positions, token_requests
from tests.cases import features
from tests.support.dense_masks import causal
from tests.support.rows import tiers

BACKENDS = {"reference": features.REFERENCE, **features.BACKENDS, "triton": {"implementation": "triton"}}
backends = pytest.mark.parametrize(
    "backend", [pytest.param(name, marks=pytest.mark.gpu) if name == "triton" else name for name in BACKENDS]
)
HQ, HKV, D = 4, 2, 16
SLOPES = np.array([0.5, 0.25, 0.1, 0.05], np.float32)
BIAS = np.random.default_rng(5).normal(size=200).astype(np.float32)


class Mods(NamedTuple):
    """Mods of jflex, and what they do to scores [queries, keys] of one request and head in numpy."""

    given: dict
    score: object = lambda s, b, h, q, k: s
    mask: object = lambda b, h, q, k: np.broadcast_to(True, np.broadcast_shapes(q.shape, k.shape))


def window(b, h, q, k):
    return (q >= k) & (q - k < 12)


def alibi(s, b, h, q, k):
    return s - jnp.asarray(SLOPES)[h] * (q - k).astype(jnp.float32)


def by_request(s, b, h, q, k):
    return s + jnp.asarray(BIAS)[k] * (b + 1).astype(jnp.float32)


MODS = {
    "none": Mods({}),
    "causal": Mods({"mask_mod": causal}, mask=causal),
    "window": Mods({"mask_mod": window}, mask=window),
    "alibi": Mods({"score_mod": alibi, "mask_mod": causal}, lambda s, b, h, q, k: s - SLOPES[h] * (q - k), causal),
    "softcap": Mods({"score_mod": lambda s, b, h, q, k: 2 * jnp.tanh(s / 2)}, lambda s, b, h, q, k: 2 * np.tanh(s / 2)),
    "bias_by_key_and_request": Mods({"score_mod": by_request}, lambda s, b, h, q, k: s + BIAS[k] * (b + 1)),
    "prefix_by_request": Mods({"mask_mod": lambda b, h, q, k: (k < 3 * b + 2) | (q == k)},
                              mask=lambda b, h, q, k: (k < 3 * b + 2) | (q == k)),
}  # fmt: skip


class Tree(NamedTuple):
    """Requests in a tree of shared keys: the keys of a request are those of its levels, one after the other.

    Attributes:
      queries: Of each request.
      levels: For each level, its groups: (requests of the group, keys).
    """

    queries: tuple[int, ...]
    levels: tuple[tuple[tuple[tuple[int, ...], int], ...], ...]


TREES = {
    "decode": Tree((1, 1, 1), ((((0, 1, 2), 70),), (((0,), 5), ((1,), 30), ((2,), 1)))),
    "append": Tree((4, 20, 2), ((((0, 1, 2), 33),), (((0,), 4), ((1,), 25), ((2,), 2)))),
    "three_levels": Tree((1, 2, 1, 3), ((((0, 1, 2, 3), 40),), (((0, 1), 20), ((2, 3), 9)),
                                        (((0,), 3), ((1,), 2), ((2,), 17), ((3,), 4)))),
    "queries_within_the_shared_level": Tree((5, 3), ((((0, 1), 3),), (((0,), 2), ((1,), 0)))),
}  # fmt: skip


class Drawn(NamedTuple):
    """Queries, their requests and positions, and the keys of each group of each level, in numpy."""

    q: np.ndarray
    batch: PagedBatch
    keys: list[list[np.ndarray]]
    values: list[list[np.ndarray]]
    starts: list[list[int]]


@functools.cache
def drawn(tree: str) -> Drawn:
    rng, made = np.random.default_rng(3), TREES[tree]
    draw = lambda n: rng.normal(size=(n, HKV, D)).astype(np.float32)
    q = rng.normal(size=(sum(made.queries), HQ, D)).astype(np.float32)
    keys = [[draw(count) for _, count in level] for level in made.levels]
    values = [[draw(count) for _, count in level] for level in made.levels]
    length = [0] * len(made.queries)
    starts: list[list[int]] = []
    for level in made.levels:
        starts.append([length[members[0]] for members, _ in level])
        for members, count in level:
            for r in members:
                length[r] += count
    indptr = np.concatenate([[0], np.cumsum(made.queries)]).astype(np.int32)
    batch = PagedBatch(indptr, np.array(length, np.int32), np.ones((len(length), 1), np.int32))
    return Drawn(q, batch, keys, values, starts)


def group_indptr(tree: str, level: int) -> np.ndarray:
    indptr, groups = np.asarray(drawn(tree).batch.qo_indptr), TREES[tree].levels[level]
    return np.array([0, *(indptr[members[-1] + 1] for members, _ in groups)], np.int32)


def dense_levels(tree: str) -> list[CascadeLevel]:
    """Levels of arrays; what stands beyond the keys of a group is NaN."""
    x, levels = drawn(tree), []
    for number, groups in enumerate(TREES[tree].levels):
        lengths, starts = np.array([count for _, count in groups], np.int32), jnp.array(x.starts[number], jnp.int32)
        padded = [np.full((len(groups), lengths.max() + 3, HKV, D), np.nan, np.float32) for _ in range(2)]
        for array, of_group in zip(padded, (x.keys[number], x.values[number]), strict=True):
            for g, rows in enumerate(of_group):
                array[g, : len(rows)] = rows
        levels.append(CascadeLevel.dense(*map(jnp.asarray, padded), qo_indptr=group_indptr(tree, number),
                                         lengths=jnp.asarray(lengths), start=starts))  # fmt: skip
    return levels


def paged_levels(tree: str, page_size: int = 8) -> list[CascadeLevel]:
    """Levels of pages of one cache, in any order; unused slots hold NaN."""
    x, page = drawn(tree), iter(np.random.default_rng(1).permutation(np.arange(1, 60)))
    k, v = (np.full((60, page_size, HKV, D), np.nan, np.float32) for _ in range(2))
    tables = []
    for number in range(len(TREES[tree].levels)):
        table = np.zeros((len(x.keys[number]), 12), np.int32)
        for g, (keys, values) in enumerate(zip(x.keys[number], x.values[number], strict=True)):
            for p in range(-(-len(keys) // page_size)):
                table[g, p] = next(page)
                rows = slice(p * page_size, (p + 1) * page_size)
                k[table[g, p], : len(keys[rows])], v[table[g, p], : len(values[rows])] = keys[rows], values[rows]
        tables.append(table)
    cache, levels = PagedCache(jnp.asarray(k), jnp.asarray(v)), []
    for number, groups in enumerate(TREES[tree].levels):
        lengths = np.array([count for _, count in groups], np.int32)
        batch = PagedBatch(group_indptr(tree, number), lengths, tables[number])
        levels.append(CascadeLevel.paged(cache, batch, start=jnp.array(x.starts[number], jnp.int32)))
    return levels


def flat(tree: str, mods: Mods) -> tuple[np.ndarray, ...]:
    """Attention of each request over all its keys, in float64: out, lse, max and entropy."""
    x, made = drawn(tree), TREES[tree]
    out, (lse, row_max, entropy) = np.zeros((len(x.q), HQ, D)), np.zeros((3, len(x.q), HQ))
    for r in range(len(made.queries)):
        of = lambda arrays, r=r: np.concatenate([arrays[n][g] for n, level in enumerate(made.levels)
                                                 for g, (members, _) in enumerate(level) if r in members])  # fmt: skip
        keys, values = of(x.keys).astype(np.float64), of(x.values).astype(np.float64)
        rows = range(x.batch.qo_indptr[r], x.batch.qo_indptr[r + 1])
        position, k = np.array(rows)[:, None] - rows.stop + len(keys), np.arange(len(keys))[None]
        for h in range(HQ):
            at = slice(rows.start, rows.stop), h
            s = x.q[at].astype(np.float64) @ keys[:, h // 2].T * D**-0.5
            s = np.where(mods.mask(r, h, position, k), mods.score(s, r, h, position, k), -np.inf)
            with np.errstate(divide="ignore", invalid="ignore"):
                top = s.max(axis=1, keepdims=True)
                weights = np.exp(s - np.where(np.isfinite(top), top, 0))
                total = weights.sum(axis=1, keepdims=True)
                p = np.where(total > 0, weights / total, 0)
                out[at] = p @ values[:, h // 2]
                lse[at], row_max[at] = (top + np.log(total))[:, 0], top[:, 0]
                entropy[at] = -np.sum(p * np.log(np.where(p > 0, p, 1)), axis=1)
    return out, lse, row_max, entropy


def cascade(tree: str, levels, mods: Mods, **how):
    x = drawn(tree)
    rows = {"positions": token_positions(x.batch, len(x.q)), "requests": token_requests(x.batch, len(x.q))}
    with jax.default_matmul_precision("highest"):
        attend = functools.partial(jflex.cascade_attention, **rows, **mods.given, return_lse=True, **how)
        return jax.jit(attend)(jnp.asarray(x.q), levels)


def assert_right(found, right):
    for name, a, b in zip(("out", "lse"), found, right[:2], strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5, err_msg=name)


@tiers(rest="full", share=2)
@pytest.mark.parametrize(("tree", "mods"), [*(("append", mods) for mods in MODS),
                                           *((tree, "bias_by_key_and_request") for tree in TREES if tree != "append"),
                                           ("queries_within_the_shared_level", "causal")])  # fmt: skip
def test_equals_attention_over_all_keys(tree, mods):
    assert_right(cascade(tree, dense_levels(tree), MODS[mods], **BACKENDS["xla"]), flat(tree, MODS[mods]))


@tiers({"tree": "append-alibi", "backend": "reference"}, {"tree": "append-alibi"}, in_turns=True, rest="full")
@backends
@pytest.mark.parametrize(("tree", "mods"), [("append", "alibi"), ("three_levels", "window"), ("decode", "causal")])
def test_on_every_backend(tree, mods, backend):
    right = flat(tree, MODS[mods])
    for levels in (paged_levels(tree), dense_levels(tree))[: 1 if backend == "triton-interpret" else 2]:
        assert_right(cascade(tree, levels, MODS[mods], **BACKENDS[backend]), right)


@pytest.mark.full
def test_dense_levels_interpreted():
    found = cascade("append", dense_levels("append"), MODS["none"], **BACKENDS["triton-interpret"])
    assert_right(found, flat("append", MODS["none"]))


@pytest.mark.full
def test_16_bit_outputs_are_rounded_once():
    """Partial outputs are kept in float32: the merged one is no further off than that of one level."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
    q, k, v = draw(8, HQ, D), draw(1, 128, HKV, D), draw(1, 128, HKV, D)
    level = lambda a, b: CascadeLevel.dense(k[:, a:b], v[:, a:b], qo_indptr=jnp.array([0, 8]), start=a)
    attend = jax.jit(functools.partial(jflex.cascade_attention, q, implementation="xla"))
    exact = jflex.cascade_attention(
        q.astype(jnp.float32), [CascadeLevel.dense(k.astype(jnp.float32), v.astype(jnp.float32),
                                                   qo_indptr=jnp.array([0, 8]))], implementation="xla")  # fmt: skip
    error = lambda x: float(np.abs(np.asarray(x, np.float64) - np.asarray(exact, np.float64)).max())
    whole, parts = attend([level(0, 128)]), attend([level(i, i + 16) for i in range(0, 128, 16)])
    assert parts.dtype == jnp.bfloat16
    assert error(parts) <= 2 * error(whole)


# --- edges


@pytest.mark.full
def test_rows_of_no_group_see_nothing():
    k = jnp.ones((1, 4, 1, 8))
    level = CascadeLevel.dense(k, k, qo_indptr=jnp.array([0, 2]))
    out, lse = jflex.cascade_attention(jnp.ones((3, 1, 8)), [level], return_lse=True)
    assert (out[:2] == 1).all()
    assert not out[2].any()
    assert lse[2, 0] == -jnp.inf


@pytest.mark.full
def test_no_queries_no_groups_and_no_keys():
    """A level without room for keys is as if it were not there."""
    q, k, v = jnp.ones((3, 4, 8)), jnp.ones((1, 6, 2, 8)), jnp.full((1, 6, 2, 16), 2.0)
    level = CascadeLevel.dense(k, v, qo_indptr=jnp.array([0, 3]))
    no_groups = CascadeLevel.dense(k[:0], v[:0], qo_indptr=jnp.array([0]))
    no_keys = CascadeLevel.dense(k[:, :0], v[:, :0], qo_indptr=jnp.array([0, 3]), start=6)
    no_pages = PagedBatch(jnp.array([0, 3]), jnp.array([0]), jnp.zeros((1, 0), jnp.int32))
    no_pages = CascadeLevel.paged(PagedCache(k, v), no_pages, start=6)
    run = lambda q, *levels: jflex.cascade_attention(
        q, levels, positions=jnp.full(len(q), 9), mask_mod=causal, return_lse=True
    )
    out, lse = run(q, no_groups, level, no_keys, no_pages)
    np.testing.assert_array_equal(out, 2)
    np.testing.assert_array_equal(lse, run(q, level)[1])
    out, lse = run(q, no_keys)
    np.testing.assert_array_equal(out, np.zeros((3, 4, 16)))
    np.testing.assert_array_equal(lse, -np.inf)
    assert run(q[:0], CascadeLevel.dense(k, v, qo_indptr=jnp.array([0, 0])))[0].shape == (0, 4, 16)


@pytest.mark.full
def test_other_values_do_not_compile_again():
    traced = []

    @jax.jit
    def run(q, k, indptr, lengths, positions):
        traced.append(1)
        level = CascadeLevel.dense(k, k, qo_indptr=indptr, lengths=lengths, start=positions[0])
        return jflex.cascade_attention(q, [level, level], positions=positions, mask_mod=causal)

    q, k = jnp.ones((3, 1, 8)), jnp.ones((2, 4, 1, 8))
    for n in (1, 2):
        run(q, k, jnp.array([0, n, 3]), jnp.array([n, 4]), jnp.arange(3) + n)
    assert len(traced) == 1


@pytest.mark.full
def test_gradient_of_the_reference_is_that_of_one_level():
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    q, k, v = draw(3, 2, 8), draw(1, 12, 2, 8), draw(1, 12, 2, 8)

    def loss(cuts, q, k, v):
        levels = [CascadeLevel.dense(k[:, a:b], v[:, a:b], qo_indptr=jnp.array([0, 3]), start=a) for a, b in cuts]
        return jnp.sum(jnp.sin(jflex.cascade_attention(
            q, levels, positions=jnp.array([4, 8, 11]), mask_mod=causal, implementation="reference")))  # fmt: skip

    of = lambda cuts: jax.jit(jax.grad(functools.partial(loss, cuts), argnums=(0, 1, 2)))(q, k, v)
    for a, b in zip(of([(0, 5), (5, 12)]), of([(0, 12)]), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)


def test_no_gradient_elsewhere():
    k = jnp.ones((1, 4, 1, 8))
    level = CascadeLevel.dense(k, k, qo_indptr=jnp.array([0, 2]))
    loss = lambda q: jflex.cascade_attention(q, [level], implementation="xla").sum()
    with pytest.raises(jflex.UnsupportedError, match="`cascade_attention` has no derivative on 'xla'"):
        jax.grad(loss)(jnp.ones((2, 1, 8)))

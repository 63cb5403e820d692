"""States that hold statistics: they merge to those of the whole, with gradients; as algebra; at the edges."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jflex
from jflex import AttentionState
from tests.calls.test_return_stats import drawn
from tests.support.rows import tiers

ALL = ("lse", "max", "entropy")
assert_close = functools.partial(np.testing.assert_allclose, rtol=3e-5, atol=3e-5)


def merged(count, layout, sinks, q, k, v):
    """Output and statistics of a causal call whose keys are split."""
    turn = (lambda x: x) if layout == "BTNH" else lambda x: x.swapaxes(1, 2)
    states = []
    for n, (keys, values) in enumerate(zip(jnp.split(k, count, axis=1), jnp.split(v, count, axis=1), strict=True)):
        mask = lambda b, h, q_idx, kv_idx, first=n * keys.shape[1]: 10 * q_idx > kv_idx + first
        found = jflex.flex_attention(
            *map(turn, (q, keys, values)), mask_mod=mask, layout=layout, return_stats=ALL, implementation="xla"
        )
        states.append(AttentionState.from_attention(*found, layout))
    state = jflex.merge_all(states)
    state = state if sinks is None else jflex.with_sinks(state, sinks)
    return state.out, jflex.AttentionStats(*(x.swapaxes(1, 2) for x in (state.lse, state.max, state.entropy)))


@tiers(rest="full", in_turns=True, share=3)
@pytest.mark.parametrize("layout", ["BTNH", "BNTH"])
@pytest.mark.parametrize("count", [1, 4, 16])
@pytest.mark.parametrize("sinks", [None, [-1.0, 0.0, 2.0, -np.inf]], ids=["no_sinks", "sinks"])
def test_states_merge_to_the_whole_with_gradients(count, layout, sinks):
    """The first row attends to nothing, and so do many splits of others."""
    arrays, sinks = drawn(T=6, S=64), None if sinks is None else jnp.array(sinks)

    def loss(attend, *arrays):
        out, stats = attend(*arrays)
        finite = lambda x: jnp.where(x == -jnp.inf, 0.0, x)
        rows = jnp.sin(stats.entropy) * jnp.cos(finite(stats.lse)) + finite(stats.max)
        return jnp.sum(jnp.sin(out)) + jnp.sum(rows), (out, stats)

    whole = lambda sinks, q, k, v: jflex.flex_attention(
        q, k, v, mask_mod=lambda b, h, q_idx, kv_idx: 10 * q_idx > kv_idx, sinks=sinks, return_stats=ALL,
        implementation="reference",
    )  # fmt: skip
    argnums = range(2 if sinks is None else 1, 5)
    run = lambda attend: jax.jit(jax.value_and_grad(loss, argnums, has_aux=True), static_argnums=0)(
        attend, sinks, *arrays
    )
    jax.tree.map(assert_close, run(functools.partial(merged, count, layout)), run(whole))


# --- algebra

ROWS = 5
KEYS = st.lists(st.one_of(st.floats(-30, 30, width=32, allow_subnormal=False), st.just(-np.inf)), max_size=4)


def state_of(rows):
    """The state of rows of scores, in float64 until it is made; the output of each is its own row of a unit matrix."""
    stats = np.zeros((3, ROWS))
    for i, scores in enumerate(rows):
        stats[:, i] = exact(scores)
    lse, row_max, entropy = (jnp.asarray(x, jnp.float32) for x in stats)
    return AttentionState(jnp.asarray(np.isfinite(stats[0])[:, None] * np.eye(ROWS), jnp.float32), lse, "softmax",
                          row_max, entropy)  # fmt: skip


def exact(scores):
    """Lse, max and entropy of scores, in float64."""
    scores = np.array([x for x in scores if x > -np.inf], np.float64)
    if not scores.size:
        return -np.inf, -np.inf, 0.0
    weights = np.exp(scores - scores.max())
    p = weights / weights.sum()
    return scores.max() + np.log(weights.sum()), scores.max(), -np.sum(p * np.log(np.where(p > 0, p, 1)))


@pytest.mark.long
@settings(max_examples=40)
@given(st.lists(st.lists(KEYS, min_size=ROWS, max_size=ROWS), min_size=2, max_size=12))
def test_merging_is_that_of_all_scores(splits):
    """In any order and grouping, few states and many."""
    union = state_of([[x for split in splits for x in split[row]] for row in range(ROWS)])
    states = [state_of(split) for split in splits]
    empty = AttentionState.empty((ROWS, ROWS), stats=("max", "entropy"))
    for merged in (
        jflex.merge_all(states),
        jflex.merge_all(states[::-1]),
        functools.reduce(jflex.merge, states, empty),
        jflex.merge_all(jax.tree.map(lambda *xs: jnp.stack(xs), *states)),
    ):
        for name in ("lse", "max", "entropy"):
            assert_close(getattr(merged, name), getattr(union, name), atol=1e-4)


# --- edges


@pytest.mark.full
def test_states_and_empty_rows():
    empty = AttentionState.empty((3, 2, 8), stats=("max", "entropy"))
    assert (empty.max[0, 0], empty.entropy[0, 0]) == (-np.inf, 0)
    poisoned = AttentionState(jnp.full((3, 2, 8), jnp.nan), empty.lse, max=empty.max + np.inf, entropy=empty.lse)
    seen = AttentionState(jnp.ones((3, 2, 8)), jnp.ones((3, 2)), max=jnp.zeros((3, 2)), entropy=jnp.full((3, 2), 0.5))
    stacked = lambda *states: jflex.merge_all(jax.tree.map(lambda *xs: jnp.stack(xs), *states))
    for merge in (jflex.merge, stacked, lambda a, b: jflex.merge_all([a, b] * 5)):
        assert_close(merge(poisoned, empty).entropy, np.zeros((3, 2)))
        np.testing.assert_array_equal(merge(poisoned, empty).max, np.full((3, 2), -np.inf))
    for merge in (jflex.merge, stacked):
        assert_close(merge(poisoned, seen).entropy, seen.entropy)
        np.testing.assert_array_equal(merge(poisoned, seen).max, seen.max)
        assert_close(merge(seen, seen).entropy, seen.entropy + np.log(2))
    carry, _ = jax.lax.scan(lambda state, one: (jflex.merge(state, one), None), empty, jax.tree.map(
        lambda x: jnp.stack([x] * 4), seen))  # fmt: skip
    assert_close(carry.entropy, seen.entropy + np.log(4))

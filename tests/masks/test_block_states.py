"""States of blocks by bounds, the same as by every element; and tables that are narrower than the sequence."""

import functools
import inspect

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings

import jflex
from jflex import masks
from jflex.block_mask import lists, states
from jflex.block_mask.states import block_states
from jflex.mods.trace import trace_mask_mod
from tests.cases.ready_masks import READY
from tests.cases.table import CASES
from tests.kernels.test_intervals import LARGE, MASKS, evaluate
from tests.support import evaluation
from tests.support.dense_masks import causal, pooled_states
from tests.support.rows import tiers

SIZES = {"T": 61, "S": 83, "B": 2, "H": 2}
QUICK = settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def by_bounds(monkeypatch, mod, shape, block_size, few=False, per_step=1):
    """The states of a small mask by the way of a large one."""
    monkeypatch.setattr(states, "_FEW_ELEMENTS", 1 << 40 if few else 0)
    monkeypatch.setattr(states, "_ELEMENTS_PER_STEP", per_step)
    traced, operands = trace_mask_mod(mod)
    made = functools.partial(inspect.unwrap(block_states), traced, shape=shape, block_size=block_size)
    return np.asarray(jax.jit(lambda operands: made(operands))(operands))


def by_elements(mod, shape, block_size):
    """The oracle: numpy pools what the mod says of every element."""
    for axis in reversed(range(4)):
        mod = jax.vmap(mod, tuple(0 if axis == i else None for i in range(4)))
    dense = mod(*(jnp.arange(n, dtype=jnp.int32) for n in shape))
    return pooled_states(np.asarray(dense), block_size)


def mod_of(tree, by_q, by_b, by_k):
    def mod(b, h, q, k):
        return evaluate(tree, {"b": b, "h": h, "q": q, "k": k, "by_q": by_q[q], "by_b": by_b[b], "by_k": by_k[k]})

    return mod


@pytest.mark.full
@QUICK
@given(MASKS, st.sampled_from([(8, 16), (16, 8), (7, 32)]), st.booleans(), st.integers(0, 2**32 - 1))
@example(("eq", "by_q", "by_k"), (8, 16), False, 1)
@example(("and", ("ge", "q", "k"), ("lt", ("mod", ("sub", "q", "k"), 7), 3)), (16, 8), False, 0)
@example(("ge", ("add", "by_q", "by_b"), "k"), (8, 16), True, 2)
def test_random_masks_have_the_states_of_their_elements(tree, block_size, few, seed):
    rng = np.random.default_rng(seed)
    captured = [rng.integers(-60, 60, SIZES[n]).astype(np.int32) for n in "TBS"]
    captured[0].sort()
    for x in captured[: seed % 3]:
        x[rng.integers(0, len(x))] = rng.choice(LARGE)
    shape, mod = tuple(SIZES[n] for n in "BHTS"), mod_of(tree, *map(jnp.asarray, captured))
    with pytest.MonkeyPatch.context() as patch:
        found = by_bounds(patch, mod, shape, block_size, few, per_step=(1, 1 << 13)[seed % 2])
    np.testing.assert_array_equal(found, by_elements(mod, shape, block_size))


IDS = np.sort(np.random.default_rng(0).integers(0, 6, 512))
KNOWN = {
    "causal": causal,
    "window": masks.sliding_window(100),
    "documents": lambda b, h, q, k: (jnp.asarray(IDS)[q] == jnp.asarray(IDS)[k]) & (q >= k),
    "documents, both sides": lambda b, h, q, k: jnp.asarray(IDS)[q] == jnp.asarray(IDS)[k],
    "documents of large numbers": lambda b, h, q, k: jnp.asarray(IDS + 2**30)[q] == jnp.asarray(IDS + 2**30)[k],
    "small documents": lambda b, h, q, k: jnp.asarray(IDS, jnp.uint8)[q] == jnp.asarray(IDS, jnp.uint8)[k],
    "prefix": masks.prefix_lm(jnp.int32([70])),
    "padding": lambda b, h, q, k: k < jnp.int32([300])[b],
    "dilated": lambda b, h, q, k: (q >= k) & ((q - k) % 4 == 0),
    "sinks": lambda b, h, q, k: (k < 4) | (q >= k) & (q - k < 64),
    "not causal": jflex.not_mask(causal),
    "shifted by head": lambda b, h, q, k: (q >= k) & (q - k < 64 * (h + 1)),
}


@pytest.mark.full
def test_doubt_of_known_masks_is_settled(monkeypatch):
    monkeypatch.setattr(states, "_FEW_ELEMENTS", 0)
    monkeypatch.setattr(states, "_ELEMENTS_PER_STEP", 1 << 12)
    ids, shape = jnp.asarray((IDS * 536870909) % 2**31 - 2**30, jnp.int32), (1, 1, 480, 448)
    for mod in (causal, lambda b, h, q, k: ids[q] == ids[k], lambda b, h, q, k: jnp.sin((q * k).astype(float)) > 0.9):
        made = states.known_block_states(*trace_mask_mod(mod), shape, (32, 64))
        np.testing.assert_array_equal(made, by_elements(mod, shape, (32, 64)))
    block_states.clear_cache()  # of the sizes above


@tiers(rest="full")
@pytest.mark.parametrize("name", KNOWN)
def test_no_element_is_evaluated_of_masks_of_structure(name, monkeypatch):
    """Bounds and corners decide all blocks of these: the state of no block is in doubt."""
    shape = (1, 2, 512, 512)
    expected = by_elements(KNOWN[name], shape, (32, 32))
    monkeypatch.setattr(states, "settled", lambda traced, operands, found, *rest: found)
    np.testing.assert_array_equal(by_bounds(monkeypatch, KNOWN[name], shape, (32, 32)), expected)


@tiers(default={"name": ["causal documents", "causal documents by batch"]})
@pytest.mark.parametrize("name", READY)
def test_ready_masks(name, monkeypatch):
    mask_mod, dense = READY[name]
    dense = np.broadcast_to(dense, (2, *dense.shape[-2:]))[:, None]
    found = by_bounds(monkeypatch, mask_mod, dense.shape, (8, 16), per_step=1 << 12)
    np.testing.assert_array_equal(found, pooled_states(dense, (8, 16)))


MASKED = {case.mask: pytest.param(case, id=case.name) for case in reversed(CASES) if case.mask is not None}.values()


@tiers(default={"case": "squared_through_causal_blocks"})
@pytest.mark.parametrize("case", MASKED)
def test_masks_of_the_table(case, monkeypatch):
    n, captures = case.sizes, evaluation.draw(case).mask
    at = np.ix_(*map(np.arange, (n.B, n.Hq, n.T, n.S)))
    dense = np.broadcast_to(case.mask.exact(*at, captures), (n.B, n.Hq, n.T, n.S))
    mod = case.mask.jax(jax.tree.map(jnp.asarray, captures))
    found = by_bounds(monkeypatch, mod, dense.shape, (16, 32), few=True)
    np.testing.assert_array_equal(found, pooled_states(dense, (16, 32)))


def documents_of(ids):
    return lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k)


@pytest.mark.full
def test_inside_of_a_gradient(monkeypatch):
    """States are data: a captured array that is differentiated elsewhere goes through the loop over doubtful blocks."""
    monkeypatch.setattr(states, "_FEW_ELEMENTS", 0)
    monkeypatch.setattr(states, "_ELEMENTS_PER_STEP", 1)

    def loss(slope):
        mod = lambda b, h, q, k: ((q * k) % 7 < 3) & (q >= k) & (slope[0] * k.astype(jnp.float32) < 90.0)
        traced, operands = trace_mask_mod(mod)
        found = inspect.unwrap(block_states)(traced, operands, (1, 1, 64, 64), (16, 16))
        return jnp.sum(slope) * jnp.sum(found).astype(jnp.float32)

    total, gradient = jax.jit(jax.value_and_grad(loss))(jnp.ones(1))
    assert gradient.tolist() == [float(total)]


@pytest.mark.full
def test_under_vmap_and_inside_shard_map(monkeypatch):
    monkeypatch.setattr(states, "_FEW_ELEMENTS", 0)
    monkeypatch.setattr(states, "_ELEMENTS_PER_STEP", 1)
    ids = np.stack([np.roll(IDS, 40 * i) for i in range(8)]).astype(np.int32)
    shape = (1, 1, 512, 512)

    def of_row(row):
        traced, operands = trace_mask_mod(documents_of(row))
        return inspect.unwrap(block_states)(traced, operands, shape, (64, 64))

    expected = np.stack([by_elements(documents_of(jnp.asarray(row)), shape, (64, 64)) for row in ids[:2]])
    np.testing.assert_array_equal(jax.jit(jax.vmap(of_row))(jnp.asarray(ids[:2])), expected)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.shard_map(lambda x: of_row(x[0])[None], mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P("x"))
    np.testing.assert_array_equal(jax.jit(rows)(jnp.asarray(ids[:2])), expected)


# --- narrow tables


def random_states(seed, shape, share):
    rng = np.random.default_rng(seed)
    return np.where(rng.random(shape) < share, rng.integers(1, 3, shape), 0).astype(np.int8)


def walked(counts, table, blocks):
    """The blocks that a kernel visits in each row."""
    width = table.shape[-1]
    for at in np.ndindex(*counts.shape):
        n = counts[at]
        entries = [table[at][min(i, width - 1)] + max(i - width + 1, 0) for i in range(n)]
        assert len(set(entries)) == n
        assert all(0 <= x < blocks for x in entries)
        assert sorted(entries) == entries
        yield at, entries


@functools.partial(jax.jit, static_argnames="width")
def cut_lists(matrix, width):
    return lists.block_lists(matrix, follow_mod=True, max_blocks=width)


@pytest.mark.full
@given(
    st.sampled_from([(9, 40, 1), (40, 33, 3), (1, 70, 2), (5, 3, 4)]),
    st.sampled_from([0.05, 0.4, 0.95]),
    st.integers(0),
)
@settings(max_examples=15, deadline=None)
def test_rows_that_are_cut_list_every_block_once(sizes, share, seed):
    """Whatever a row lists beside its blocks is partial, where the mask_mod decides."""
    rows, columns, width = sizes
    matrix = random_states(seed, (1, 2, rows, columns), share)
    made = cut_lists(jnp.asarray(matrix), width)
    made = lists.BlockLists(*map(np.asarray, made))
    for side, part in ((matrix, made[:4]), (matrix.swapaxes(2, 3), made[4:])):
        assert part[1].shape[-1] == min(width, side.shape[-1])
        found = np.zeros(side.shape, int)
        for counts, table, state in ((part[0], part[1], 1), (part[2], part[3], 2)):
            for at, entries in walked(counts, table, side.shape[-1]):
                assert not found[at][entries].any()
                found[at][entries] = state
        assert np.all((found == side) | (found == 1))
    as_read = np.asarray(lists.states_from_lists(made))
    assert np.all((as_read == matrix) | (as_read == 1))


@tiers(rest="full")
@pytest.mark.parametrize("share", [0.05, 0.4, 0.95])
def test_known_tables_hold_the_states_exactly(share, monkeypatch):
    matrix = random_states(3, (2, 1, 50, 41), share)
    monkeypatch.setattr(lists, "WIDE", 0)
    for max_blocks in (None, 34):
        made = lists.block_lists(jnp.asarray(matrix), follow_mod=True, max_blocks=max_blocks)
        np.testing.assert_array_equal(lists.states_from_lists(made), matrix)
        assert made.kv_indices.shape[-1] == (34 if max_blocks else made.kv_indices.shape[-1])


def test_lists_that_mask_more_are_never_cut(monkeypatch):
    """A row of such lists must not visit other blocks: inside `jit` the tables stay as wide as the sequence."""
    monkeypatch.setattr(lists, "WIDE", 0)
    matrix = random_states(5, (1, 1, 300, 200), 0.5)
    made = jax.jit(lambda x: lists.block_lists(x, follow_mod=False))(jnp.asarray(matrix))
    np.testing.assert_array_equal(lists.states_from_lists(made), matrix)


@pytest.mark.full
def test_many_tokens_take_kilobytes():
    length = 1 << 18
    ids = jnp.sort(jax.random.randint(jax.random.key(0), (length,), 0, 64))
    mods = {"causal": causal, "window": masks.sliding_window(4096)}
    mods["documents"] = lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k)
    for name, mod in mods.items():
        block_mask = jflex.create_block_mask(mod, None, None, length, length)
        assert sum(x.nbytes for x in block_mask.lists) < 1 << 19, name
        counts = np.asarray(block_mask.kv_num_blocks + block_mask.full_kv_num_blocks)[0, 0]
        if name == "causal":
            np.testing.assert_array_equal(counts, np.arange(2048) + 1)
    known = jax.eval_shape(lambda: jflex.create_block_mask(causal, None, None, length, length))
    assert known.kv_indices.shape == (1, 1, 2048, lists.LEAST_WIDTH)

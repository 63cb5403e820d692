"""What intervals say of tiles of keys: never wrong for any mask, exact for those that compare positions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pallas_kernels.program import intervals
from pallas_kernels.program.build import IndexRanges
from pallas_kernels.program.evaluate import Evaluation
from tests.support import tile_programs
from tests.support.rows import in_turns

SIZES = IndexRanges(B=3, Hq=2, T=48, S=64, heads_in_rows=True)
TILE = 8
LARGE = [intervals.MAX_LOADED - 1, intervals.MAX_LOADED, intervals.MAX_LOADED + 1, 2**30, -(2**31), 2**31 - 1]


def program_of(mod, operands):
    return tile_programs.program_of(mod, operands, SIZES, role="mask")


class Rows(tile_programs.DenseSpace):
    """Values of rows as [rows], all others as they are."""

    def __init__(self, operands, count):
        super().__init__({"q": (count,)}, operands)

    def spread(self, x, kind, to):
        return super().spread(x, kind, to) if to == "q" else x


def judged(mod, b, q, h, *captured, tile=TILE):
    """Whether tiles of keys hold any visible element, and only visible ones, for rows of positions and heads."""
    first = jnp.arange(0, SIZES.S, tile, dtype=jnp.int32)
    operands = [jnp.asarray(x) for x in captured]
    program = program_of(mod, operands)
    indices = {"b": jnp.int32(b), "q": jnp.asarray(q, jnp.int32), "h": jnp.asarray(h, jnp.int32)}
    given = {node: indices[node.value] for node in program.arguments if node.value in indices}
    seen = intervals.visibility(program, Evaluation(Rows(operands, len(q)), given), first, first + tile - 1)
    return np.asarray(seen.some), np.asarray(seen.all)


def truth(mod, b, q, h, *captured, tile=TILE):
    """The same by a look at every element."""
    operands = [jnp.asarray(x) for x in captured]
    of_key = jax.vmap(lambda q, h, k: mod(jnp.int32(b), h, q, k, *operands), (None, None, 0))
    shown = jax.vmap(of_key, (0, 0, None))(
        jnp.asarray(q, jnp.int32), jnp.asarray(h, jnp.int32), jnp.arange(SIZES.S, dtype=jnp.int32)
    )
    tiles = np.split(np.asarray(shown), range(tile, SIZES.S, tile), axis=1)
    return np.array([x.any() for x in tiles]), np.array([x.all() for x in tiles])


# --- exact

BY_BATCH = np.array([5, 17, 40], np.int32)
BY_ROW = np.arange(SIZES.T, dtype=np.int32) * 2 - 20
TIGHT = {
    "everything": lambda b, h, q, k, by_b, by_q: True,
    "nothing": lambda b, h, q, k, by_b, by_q: False,
    "causal": lambda b, h, q, k, by_b, by_q: q >= k,
    "not causal": lambda b, h, q, k, by_b, by_q: ~(q >= k),
    "causal, by an offset": lambda b, h, q, k, by_b, by_q: q + (by_b[b] - 30) >= k,
    "window": lambda b, h, q, k, by_b, by_q: (q >= k) & (q - k < 10),
    "window by its distance": lambda b, h, q, k, by_b, by_q: jnp.abs(q - k) <= 6,
    "window by head": lambda b, h, q, k, by_b, by_q: (q >= k) & (q - k < 6 * (h + 1)),
    "prefix": lambda b, h, q, k, by_b, by_q: (k < by_b[b]) | (q >= k),
    "sinks": lambda b, h, q, k, by_b, by_q: (k < 4) | (q >= k) & (q - k < 10),
    "lengths": lambda b, h, q, k, by_b, by_q: k < by_b[b],
    "captured by row": lambda b, h, q, k, by_b, by_q: k <= by_q[q],
    "chunks": lambda b, h, q, k, by_b, by_q: q // 16 == k // 16,
    "rows alone": lambda b, h, q, k, by_b, by_q: q < 20,
    "where": lambda b, h, q, k, by_b, by_q: jnp.where(k < 16, q >= k, q - 20 >= k),
    "clipped": lambda b, h, q, k, by_b, by_q: jnp.clip(k - 8, 0, 30) < by_b[b],
}


@pytest.mark.full
@in_turns
@pytest.mark.parametrize("b", [0, 1, 2])
@pytest.mark.parametrize("rows", [[0], [7, 8], [13, 14, 15, 16], [40, 41, 47]], ids=str)
@pytest.mark.parametrize("name", TIGHT)
def test_exact_for_comparisons_of_positions(name, rows, b):
    """All heads of each position; the positions follow one another, so bounds of rows are exact."""
    q, h = np.repeat(rows, SIZES.Hq), np.tile(np.arange(SIZES.Hq), len(rows))
    given = TIGHT[name], b, q, h, BY_BATCH, BY_ROW
    for found, right in zip(judged(*given), truth(*given), strict=True):
        np.testing.assert_array_equal(found, right)


# --- undecided


@pytest.mark.parametrize("by_b", LARGE[2:])
def test_nothing_is_believed_of_large_captured_numbers(by_b):
    """A sum with one of them may wrap."""
    given = lambda b, h, q, k, by_b: q + by_b >= k, 0, [3, 4], [0, 0], np.int32(by_b)
    some, all_of = judged(*given)
    assert some.all()
    assert not all_of.any()


@pytest.mark.full
def test_what_is_decided_beside_something_undecided_still_counts():
    mod = lambda b, h, q, k, seen: (q >= k) & seen[k] | (k < 8)
    some, all_of = judged(mod, 0, [20, 21], [0, 1], np.arange(SIZES.S) % 3 == 0)
    assert some.tolist() == [True, True, True] + [False] * 5
    assert all_of.tolist() == [True] + [False] * 7


@pytest.mark.parametrize(
    "mod",
    [lambda b, h, q, k: 40 // (SIZES.S - k) >= 40, lambda b, h, q, k: k * (2**31 // SIZES.S - 1) > 2_000_000_000],
    ids=["quotient", "product"],
)
def test_keys_past_the_last_one_of_a_cut_tile_count_for_nothing(mod):
    """What is proven of numbers of keys holds of those alone: past them a divisor is negative, or a product wraps."""
    some, _ = judged(mod, 0, [3, 4], [0, 1], tile=24)
    assert some.tolist() == [False, False, True]


# --- any program

FUNCTIONS = {
    "add": jnp.add, "sub": jnp.subtract, "mul": jnp.multiply, "max": jnp.maximum, "min": jnp.minimum,
    "floor": jnp.floor_divide, "mod": jnp.remainder, "div": jax.lax.div, "rem": jax.lax.rem,
    "abs": jnp.abs, "neg": jnp.negative, "sign": jnp.sign, "clip": jnp.clip, "where": jnp.where,
    "number": lambda x: x.astype(jnp.int32),
    "lt": jnp.less, "le": jnp.less_equal, "gt": jnp.greater, "ge": jnp.greater_equal, "eq": jnp.equal,
    "ne": jnp.not_equal, "and": jnp.logical_and, "or": jnp.logical_or, "not": jnp.logical_not, "xor": jnp.logical_xor,
}  # fmt: skip
SMALL = st.integers(-70, 70)
LITERALS = st.one_of(SMALL, st.sampled_from(LARGE))
LEAVES = st.one_of(st.sampled_from("qqkkkkh"), st.sampled_from(["b", "by_q", "by_b", "by_k"]), LITERALS)
DIVISORS = st.sampled_from([1, 2, 3, 7, 16, 0, -1, -3, "q", "k", "by_b", ("sub", 64, "k")])


def nodes(names, *arguments):
    return st.tuples(st.sampled_from(names), *arguments)


def numbers_of(numbers):
    return st.one_of(
        nodes(["add", "sub", "mul", "max", "min"], numbers, numbers),
        nodes(["floor", "mod", "div", "rem"], numbers, DIVISORS),
        nodes(["abs", "neg", "sign"], numbers),
        nodes(["clip"], numbers, SMALL, SMALL),
        nodes(["where"], comparisons(numbers), numbers, numbers),
        nodes(["number"], comparisons(numbers)),
    )


def comparisons(numbers):
    return nodes(["lt", "le", "gt", "ge", "eq", "ne"], numbers, numbers)


NUMBERS = st.recursive(LEAVES, numbers_of, max_leaves=6)
MASKS = st.recursive(
    comparisons(NUMBERS),
    lambda masks: st.one_of(
        nodes(["and", "or", "xor"], masks, masks), nodes(["not"], masks), nodes(["where"], masks, masks, masks)
    ),
    max_leaves=4,
)


def evaluate(tree, leaves, functions=FUNCTIONS):
    if isinstance(tree, tuple):
        return functions[tree[0]](*(evaluate(x, leaves, functions) for x in tree[1:]))
    return leaves[tree] if isinstance(tree, str) else jnp.int32(tree)


def mod_of(tree):
    def mod(b, h, q, k, by_q, by_b, by_k):
        return evaluate(tree, {"b": b, "h": h, "q": q, "k": k, "by_q": by_q[q], "by_b": by_b[b], "by_k": by_k[k]})

    return mod


@pytest.mark.full
@settings(max_examples=30)
@given(
    MASKS, st.integers(0, 2), st.lists(st.integers(0, SIZES.T - 1), min_size=4, max_size=4), st.integers(0, 2**32 - 1)
)
@example(("ge", ("floor", 40, ("sub", 64, "k")), 40), 0, [0, 1, 2, 3], 1)
@example(("lt", ("mod", ("sub", "k", "q"), 7), 3), 0, [0, 1, 2, 3], 0)
@example(("le", ("floor", ("sub", "k", "q"), 3), "by_b"), 1, [9, 1, 30, 3], 1)
@example(("ge", ("mul", ("sub", "q", "k"), ("sub", "k", 20)), 0), 2, [0, 40, 2, 3], 2)
@example(("ge", ("abs", ("sub", "by_q", -(2**31))), "k"), 2, [0, 40, 2, 3], 2)
def test_never_wrong(tree, b, rows, seed):
    rng = np.random.default_rng(seed)
    captured = [rng.integers(-60, 60, size).astype(np.int32) for size in (SIZES.T, SIZES.B, SIZES.S)]
    for x in captured[: seed % 3]:
        x[rng.integers(0, len(x))] = rng.choice(LARGE)
    given = mod_of(tree), b, rows, [0, 1, 0, 1], *captured
    tile = (TILE, 24)[seed % 2]  # the last one of 24 reaches past the last key
    check_never_wrong(judged(*given, tile=tile), truth(*given, tile=tile))


def check_never_wrong(judged, truth):
    (some, every), (some_right, every_right) = judged, truth
    assert not (some_right & ~some).any(), "a tile that is skipped holds something visible"
    assert not (every & ~every_right).any(), "a tile that is taken for visible holds something hidden"

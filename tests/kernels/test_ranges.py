"""Walks that the program of a mask bounds: no visible tile is missed, and nothing is hidden in a full one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jflex
from pallas_kernels import block_walk
from pallas_kernels.config import Tiles
from pallas_kernels.program.build import IndexRanges
from pallas_kernels.program.intervals import Span
from pallas_kernels.program.ranges import is_prefix, is_range, visible_range
from pallas_kernels.spec import Blocks, Programs
from tests.kernels.test_intervals import evaluate
from tests.support import tile_programs
from tests.support.rows import tiers
from tests.support.specs import spec_of

B, H = 2, 2
TIGHT = {
    "causal": lambda b, h, q, k: q >= k,
    "hidden_rows": lambda b, h, q, k: q - 37 >= k,
    "window": lambda b, h, q, k: (q >= k) & (q - k < 50),
    "distance": lambda b, h, q, k: jnp.abs(q - k) <= 30,
    "not_outside": lambda b, h, q, k: ~((q < k) | (q - k >= 50)),
    "prefix": lambda b, h, q, k: (k < 70) | (q >= k),
    "chunks": lambda b, h, q, k: q // 48 == k // 48,
    "by_head": lambda b, h, q, k: jnp.where(h < 1, q >= k, (q >= k) & (q - k < 50)),
    "by_batch": lambda b, h, q, k: (k < 100 * (b + 1)) & (q < 80 * (b + 1)),
    "strided": lambda b, h, q, k: k * 3 + 1 < 2 * q - 7,
    "maximum": lambda b, h, q, k: k <= jnp.maximum(q, 70),
    "clipped": lambda b, h, q, k: jnp.clip(k - 8, 0, 90) < q,
    "everything": lambda b, h, q, k: k >= 0,
    "nothing": lambda b, h, q, k: q < 0,
}  # fmt: skip
LOOSE = {
    "sinks": lambda b, h, q, k: (k < 4) | (q >= k) & (q - k < 50),
    "outside": lambda b, h, q, k: jnp.abs(q - k) > 30,
    "not_equal": lambda b, h, q, k: q != k,
    "dilated": lambda b, h, q, k: (q >= k) & (q - k < 50) & ((q - k) % 4 == 0),
    "hidden_key": lambda b, h, q, k: (q >= k) & (k != 20),
    "gap": lambda b, h, q, k: (k < 10) | (k >= 64),
}
SUMS = {
    **{name: TIGHT[name] for name in ("causal", "hidden_rows", "window")},
    "heads_and_batch": lambda b, h, q, k: (q + h >= k - b) & (k + k < q + 90) & (-q - k > -150),
}
PREFIXES = ["causal", "hidden_rows", "heads_and_batch"]
UNBOUNDED = {
    "remainder": lambda b, h, q, k: q % 16 == k % 16,
    "wraps": lambda b, h, q, k: q * 2**30 >= k,
    "float": lambda b, h, q, k: q.astype(jnp.float32) * 1.5 >= k.astype(jnp.float32),
    "one of two": lambda b, h, q, k: (q > 30) ^ (q < 9),
}
MASKS = TIGHT | LOOSE | SUMS | UNBOUNDED


def program_of(mod, T, S):
    return tile_programs.program_of(mod, [], IndexRanges(B, H, T, S), role="mask")


def tiles_of(mod, T, S, tiles, walked):
    """First, end, full_first and full_end for each batch entry, head and tile, or None; and the truth of each tile."""
    program = program_of(mod, T, S)
    spec = spec_of(B=B, T=T, S=S, Hq=H).replace(programs=Programs(mask=program))
    rows, columns = ((tiles.block_q, T), (tiles.block_kv, S))[:: 1 if walked == "k" else -1]
    counts = tuple(-(-length // size) for size, length in (rows, columns))
    at = jnp.meshgrid(*(jnp.arange(n, dtype=jnp.int32) for n in (B, H, counts[0])), indexing="ij")
    found = block_walk.visible_tiles(spec, tiles, walked, tuple(at))
    seen = jflex.create_mask(mod, B, H, T, S)
    seen = np.asarray(seen if walked == "k" else seen.swapaxes(2, 3))
    cut = [[seen[:, :, i * rows[0] : (i + 1) * rows[0], j * columns[0] : (j + 1) * columns[0]]
            for j in range(counts[1])] for i in range(counts[0])]  # fmt: skip
    some, full = (
        np.moveaxis(np.array([[f(x, (2, 3)) for x in row] for row in cut]), (0, 1), (2, 3)) for f in (np.any, np.all)
    )
    full[..., columns[1] // columns[0] :] = False  # a tile with padding is partial
    return None if found is None else [np.broadcast_to(x, at[0].shape)[..., None] for x in found], some, full


def check(mod, T, S, tiles, walked, *, exact=False):
    found, some, full = tiles_of(mod, T, S, tiles, walked)
    if found is None:
        assert not exact
        return
    first, end, full_first, full_end = found
    i = np.arange(some.shape[-1])
    assert ((first >= 0) & (first <= full_first) & (full_first <= full_end) & (full_end <= end) & (end <= i.size)).all()
    visited, unmasked = (first <= i) & (i < end), (full_first <= i) & (i < full_end)
    assert not (some & ~visited).any()
    assert not (unmasked & ~full).any()
    if exact:
        np.testing.assert_array_equal(visited, some)
        np.testing.assert_array_equal(unmasked, full)


@tiers(default={"name": ["window", "by_head", "dilated"], "walked": "k"})
@pytest.mark.parametrize("walked", ["k", "q"])
@pytest.mark.parametrize("name", [*TIGHT, *LOOSE])
def test_tiles_of_masks(name, walked):
    for (T, S), sizes in zip([(200, 300), (300, 130), (1, 260)], [(128, 64), (64, 64), (64, 128)], strict=True):
        check((TIGHT | LOOSE)[name], T, S, Tiles(*sizes, 4, 2), walked, exact=name in TIGHT)


@pytest.mark.parametrize("name", UNBOUNDED)
def test_no_range_of_other_masks(name):
    assert tiles_of(UNBOUNDED[name], 128, 128, Tiles(64, 64, 4, 2), "k")[0] is None


@pytest.mark.parametrize("name", MASKS)
def test_masks_that_show_the_first_keys(name):
    assert is_prefix(program_of(MASKS[name], 200, 300)) == (name in PREFIXES)
    if name in PREFIXES:
        first, _, full_first, _ = tiles_of(MASKS[name], 200, 300, Tiles(64, 64, 4, 2), "k")[0]
        assert not np.any([first, full_first])


@pytest.mark.parametrize("walked", ["k", "q"])
@pytest.mark.parametrize("name", SUMS)
def test_ranges_that_are_masks(name, walked):
    """All of the range of a single index is visible, padding aside."""
    T, S = 100, 130
    program, seen = program_of(SUMS[name], T, S), jflex.create_mask(SUMS[name], B, H, T, S)
    assert is_range(program, walked)
    (axis, size), length = (("q", T), S) if walked == "k" else (("k", S), T)
    at = jnp.meshgrid(*(jnp.arange(n, dtype=jnp.int32) for n in (B, H, size)), indexing="ij")
    spans = {name: Span(x, x) for name, x in zip(f"bh{axis}", at, strict=True)}
    first, end, *_ = visible_range(program, walked, length, spans)
    i = np.arange(length)
    found = (np.expand_dims(first, -1) <= i) & (i < np.expand_dims(end, -1))
    np.testing.assert_array_equal(found, seen if walked == "k" else seen.swapaxes(2, 3))


@pytest.mark.parametrize("name", [*(name for name in TIGHT if name not in SUMS), *LOOSE, *UNBOUNDED])
def test_ranges_that_may_not_be_masks(name):
    assert not is_range(program_of((TIGHT | LOOSE | UNBOUNDED)[name], 100, 130), "k")


@pytest.mark.parametrize(("name", "blocks", "are_read"), [
    ("causal", Blocks((128, 256), 1, 1, follow_mod=True), False),
    ("window", Blocks((128, 128), B, H, follow_mod=True), False),
    ("window", Blocks((128, 128), B, H), True),  # these may mask more
    ("causal", Blocks((64, 128), 1, 1, follow_mod=True), True),
    ("prefix", Blocks((128, 128), 1, 1, follow_mod=True), True),
    ("by_batch", Blocks((128, 128), B, 1, follow_mod=True), True),  # to a key, its clauses of queries alone are none
])  # fmt: skip
def test_lists_are_read_unless_they_follow_from_a_range(name, blocks, are_read):
    spec = spec_of(B=B, T=400, Hq=H, blocks=blocks).replace(programs=Programs(mask=program_of(MASKS[name], 400, 400)))
    assert (block_walk.without_lists(spec, "k", "q").blocks is not None) == are_read


@pytest.mark.full
@pytest.mark.parametrize("name", ["window", "prefix", "by_head", "nothing"])
def test_walk(name):
    """Each tile of the range once: partial ones first, then full ones, as of lists; or in descending order."""
    tiles, at = Tiles(64, 64, 4, 2), (1, 0, 4)
    found, *_ = tiles_of(TIGHT[name], 400, 400, tiles, "k")
    first, end, full_first, full_end = (int(x[at][0]) for x in found)
    program = program_of(TIGHT[name], 400, 400)
    spec = spec_of(B=B, T=400, Hq=H).replace(programs=Programs(mask=program))
    step, at = lambda seen, key, is_partial: [*seen, (int(key), is_partial)], tuple(map(jnp.int32, at))
    with jax.disable_jit():
        seen = block_walk.over_keys(spec, tiles, None, at, [], step)
        assert int(block_walk.count_keys(spec, tiles, None, at)) == len(seen)
    partial = [i for i in range(first, end) if not full_first <= i < full_end]
    assert seen == [(64 * i, True) for i in partial] + [(64 * i, False) for i in range(full_first, full_end)]
    with jax.disable_jit():
        ascending, descending = (
            block_walk.over_queries(spec, tiles, None, at, [], step, descending=x) for x in (False, True)
        )
    assert descending == ascending[::-1]


TERMS = st.recursive(
    st.sampled_from("qkqkbh") | st.integers(-70, 70),
    lambda x: st.tuples(st.sampled_from(["+", "-", "*", "//", "max", "min", "abs"]), x, x),
    max_leaves=4,
)
CLAUSES = st.recursive(
    st.tuples(st.sampled_from(["<", "<=", ">", ">=", "==", "!="]), TERMS, TERMS),
    lambda x: st.tuples(st.sampled_from(["&", "|", "~", "where"]), x, x, x),
    max_leaves=4,
)
OPERATIONS = {
    "+": jnp.add, "-": jnp.subtract, "*": jnp.multiply, "max": jnp.maximum, "min": jnp.minimum,
    "//": lambda x, y: x // jnp.maximum(jnp.abs(y), 1), "abs": lambda x, _: jnp.abs(x),
    "<": jnp.less, "<=": jnp.less_equal, ">": jnp.greater, ">=": jnp.greater_equal,
    "==": jnp.equal, "!=": jnp.not_equal,
    "&": lambda x, y, _: x & y, "|": lambda x, y, _: x | y, "~": lambda x, *_: ~x, "where": jnp.where,
}  # fmt: skip


@pytest.mark.full
@settings(max_examples=60, deadline=None)
@given(CLAUSES, st.integers(1, 90), st.integers(1, 90), st.sampled_from(["k", "q"]))
def test_no_mask_loses_a_visible_tile(tree, T, S, walked):
    mod = lambda b, h, q, k: evaluate(tree, {"b": b, "h": h, "q": q, "k": k}, OPERATIONS)
    check(mod, T, S, Tiles(16, 8, 4, 2), walked)

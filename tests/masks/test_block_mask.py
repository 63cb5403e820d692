"""BlockMask: building, lists of the user, transformations, drawing; against dense numpy masks."""

import functools
import logging

import chex
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

import jflex
from jflex._call.checks import block_mask_mismatch
from jflex.block_mask.dense import create_mask
from jflex.block_mask.mask import BlockMask, create_block_mask
from tests.support.dense_masks import (
    causal,
    check_same_mask,
    dense_mod,
    dense_values,
    lists_of,
    packed,
    pooled_states,
    random_documents,
    random_mask,
)
from tests.support.rows import tiers

QUICK = settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
# Few sizes, so that programs are compiled once for many examples.
SIZES = [((64, 64), (32, 32)), ((100, 70), (32, 64)), ((33, 129), (16, 8))]

# --- building


@tiers(default={"lengths": "lengths2-block_size2"})
@pytest.mark.parametrize(("lengths", "block_size"), SIZES)
@pytest.mark.parametrize("name", ["causal", "window", "prefix", "everything", "nothing"])
def test_known_masks_match_dense(name, lengths, block_size):
    mod = {
        "causal": causal,
        "window": lambda b, h, q, kv: (q >= kv) & (q - kv < 20),
        "prefix": lambda b, h, q, kv: (q >= kv) | (kv < 40),
        "everything": lambda b, h, q, kv: True,
        "nothing": lambda b, h, q, kv: False,
    }[name]
    q_idx, kv_idx = np.arange(lengths[0])[:, None], np.arange(lengths[1])[None]
    dense = np.broadcast_to(mod(0, 0, q_idx, kv_idx), lengths)[None, None]
    block_mask = create_block_mask(mod, None, None, *lengths, block_size=block_size)
    check_same_mask(block_mask, dense)
    np.testing.assert_array_equal(create_mask(mod, None, None, *lengths), dense)


@pytest.mark.full
@given(st.integers(0, 999), st.sampled_from([(1, 1), (2, 3)]), st.sampled_from(SIZES))
@QUICK
def test_random_masks_match_dense(seed, leading, sizes):
    lengths, block_size = sizes
    values = dense_values(seed, (*leading, *lengths))
    block_mask = create_block_mask(dense_mod(values), *leading, *lengths, block_size=block_size)
    check_same_mask(block_mask, values)
    listed = pooled_states(values, block_size) > 0
    np.testing.assert_array_equal(block_mask.to_dense(), listed.astype(int))
    skipped = ~listed.repeat(block_size[0], 2).repeat(block_size[1], 3)[:, :, : lengths[0], : lengths[1]]
    assert block_mask.sparsity() == pytest.approx(100 * skipped.mean())


@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (0, 0)])
def test_empty_lengths_give_an_empty_mask(shape):
    block_mask = create_block_mask(causal, 2, None, *shape, block_size=32)
    assert block_mask.shape == (2, 1, *shape)
    assert block_mask.numel() == 0
    assert block_mask.sparsity() == 0.0
    assert block_mask.to_elements().shape == (2, 1, *shape)
    assert not block_mask.to_dense().any()
    assert str(block_mask).startswith("BlockMask(shape=")


def test_under_jit_with_traced_captures_as_eagerly():
    documents = random_documents(0)
    eager = packed(documents, block_size=16)
    traced = jax.jit(functools.partial(packed, block_size=16))(documents)
    chex.assert_trees_all_equal(eager, traced, strict=True)
    ids = np.asarray(documents)
    dense = (ids[:, :, None] == ids[:, None]) & (np.arange(100)[:, None] >= np.arange(100))
    check_same_mask(traced, dense[:, None])


def test_fresh_lambda_with_new_values_compiles_once(caplog):
    packed(random_documents(0), block_size=20)
    traces = []

    @jax.jit
    def use(block_mask):
        traces.append(block_mask.shape)
        return block_mask.to_dense().sum()

    with jax.log_compiles(), caplog.at_level(logging.WARNING, logger="jax"):
        counts = {int(use(packed(random_documents(seed), block_size=20))) for seed in range(6)}
    compiled = [line for line in caplog.messages if line.startswith("Compiling ")]
    assert len(counts) > 1
    assert any("jit(use)" in line for line in compiled)
    assert not any("jit(block_states)" in line for line in compiled)
    assert len(traces) == 1


def largest_value(jaxpr):
    largest = 0
    for eqn in jaxpr.eqns:
        largest = max([largest, *(v.aval.size for v in eqn.outvars)])
        for value in eqn.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    largest = max(largest, largest_value(inner))
    return largest


@pytest.mark.parametrize("length", [32768, 1 << 20])
def test_never_holds_the_whole_mask(length):
    documents = jax.ShapeDtypeStruct((1, length), jnp.int32)
    traced = jax.make_jaxpr(packed)(documents)
    assert largest_value(getattr(traced, "jaxpr", traced)) <= max(1 << 24, (length // 128) ** 2)


# --- user lists


@tiers(default={"lengths": "lengths1"})
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("lengths", [(96, 128), (90, 121)])
def test_from_kv_blocks_without_a_mod_shows_all_of_a_listed_block(jit, lengths):
    states = np.random.default_rng(3).integers(0, 3, (2, 1, 3, 4))

    def make(*given_lists):
        return BlockMask.from_kv_blocks(*given_lists, block_size=32, seq_lengths=lengths)

    block_mask = (jax.jit(make) if jit else make)(*map(jnp.asarray, lists_of(states)))
    dense = (states > 0).repeat(32, 2).repeat(32, 3)[:, :, : lengths[0], : lengths[1]]
    check_same_mask(block_mask, dense)
    assert block_mask.mask_mod is None


# --- transformations


def test_is_a_pytree():
    block_mask, values = random_mask(3)
    leaves, structure = jax.tree.flatten(block_mask)
    rebuilt = jax.tree.unflatten(structure, leaves)
    assert structure == jax.tree.structure(rebuilt)
    jax.tree.unflatten(structure, [object()] * len(leaves))
    assert "BlockMask(shape=" in repr(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), block_mask))
    assert "100, 70" in repr(jax.tree.unflatten(structure, [object()] * len(leaves)))
    moved = jax.device_put(block_mask, jax.devices()[-1])
    check_same_mask(moved, values)
    check_same_mask(jax.jit(lambda mask: mask)(block_mask), values)


@pytest.mark.full
def test_vmap_over_leaves_and_over_building():
    ids = jnp.stack([random_documents(seed) for seed in range(3)])
    masks = jax.vmap(functools.partial(packed, block_size=16))(ids)
    assert masks.kv_num_blocks.shape == (3, 2, 1, 7)
    assert "shape=(3, 2, 1, 100, 100)" in repr(masks)
    elements = jax.vmap(lambda mask: (mask & ~mask[:, :, :].with_lengths(100, 100)).to_elements())(masks)
    assert not elements.any()
    elements = jax.vmap(lambda mask: mask[1].to_elements())(masks)
    for documents, shown in zip(ids, elements, strict=True):
        np.testing.assert_array_equal(shown, packed(documents, block_size=16)[1].to_elements())


def test_a_mask_without_an_empty_block_says_so():
    """Once, in its picture and in `explain`; not of one block, of padding, or where something is skipped."""
    note = "no block is skipped, although elements are hidden: try a smaller block_size or another order of tokens"
    attend = lambda mask: jflex.explain(*[jax.ShapeDtypeStruct((1, 64, 2, 16), jnp.float32)] * 3, block_mask=mask)
    scattered = lambda b, h, q, k: (q + k) % 3 > 0
    mask = create_block_mask(scattered, None, None, 64, 64, block_size=16)
    lines = str(mask).splitlines()
    assert lines[0].endswith("sparsity=0.00%)")
    assert (lines[1], lines.count(note)) == (note, 1)
    assert (attend(mask).skips_nothing, str(attend(mask)).count(note)) == (True, 1)
    for mod, length, block in ((causal, 64, 16), (scattered, 64, 64), (jflex.noop_mask, 40, 16)):
        other = create_block_mask(mod, None, None, length, length, block_size=block)
        assert note not in str(other)
        if length == 64:
            assert note not in str(attend(other))


def test_mismatch_with_a_call():
    def sentence(*call):
        return block_mask_mismatch(*call) or ""

    shared = create_block_mask(causal, None, None, 64, 64)
    assert block_mask_mismatch(shared, 3, 5, 64, 64) is None
    assert "Crop it with `block_mask.with_lengths(32, 64)`" in sentence(shared, 3, 5, 32, 64)
    assert "extend it with `block_mask.with_lengths(32, 65)`" in sentence(shared, 3, 5, 32, 65)
    own = create_block_mask(lambda b, h, q, kv: q + b > kv + h, 2, 4, 64, 64)
    assert block_mask_mismatch(own, 2, 4, 64, 64) is None
    assert "batch 2, the query 4" in sentence(own, 4, 4, 64, 64)
    assert "batch 2, the query 1" in sentence(own, 1, 4, 64, 64)
    assert "`create_block_mask(mask_mod, H=8, ...)`" in sentence(own, 2, 8, 64, 64)
    single = create_block_mask(lambda b, h, q, kv: q + b > kv, 1, None, 64, 64)
    assert "uses `b`" in sentence(single, 2, 4, 64, 64)
    assert block_mask_mismatch(single[0], 2, 4, 64, 64) is None  # of batch entry 0, for all
    masks = jax.vmap(packed)(jnp.stack([random_documents(0)] * 2))
    assert "`jax.vmap`" in sentence(masks, 2, 4, 100, 100)


# --- drawing


def test_drawing():
    block_mask = create_block_mask(lambda b, h, q, kv: (q >= kv) & (h >= 0), 1, 6, 96, 90, block_size=32)
    picture = "░░    |\n██░░  |\n████░░|"
    expected = ["BlockMask(shape=(1, 6, 96, 90), block_size=(32, 32), sparsity=31.11%)"]
    expected += [f"batch 0, head {h}\n{picture}" for h in range(4)]
    assert str(block_mask) == "\n".join([*expected, "... and 2 more"])
    assert block_mask.to_string(limit=1) == "\n".join([*expected[:2], "... and 5 more"])


@pytest.mark.full
def test_image(tmp_path):
    pytest.importorskip("matplotlib")
    block_mask, values = random_mask(4)
    figure = block_mask.to_image(1, 0, zoom=(slice(10, 40), slice(None, 20)))
    assert f"elements, {values[1, 0, 10:40, :20].sum()} of 600 visible" == figure.axes[1].get_title()
    figure.savefig(tmp_path / "mask.png")
    assert (tmp_path / "mask.png").stat().st_size > 1000
    assert len(block_mask.to_image().axes) == 1
    with pytest.raises(IndexError):
        block_mask.to_image(2)

"""What context parallel attention sends between devices, and what `explain` says of it; narrow tables of blocks."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jflex
from jflex import context_parallel
from jflex.block_mask import lists
from jflex.context_parallel import call
from jflex.context_parallel import run as running
from tests.support.context_parallel_calls import (
    CUBE,
    MASKS,
    NEEDS_EIGHT_DEVICES,
    PAIR,
    STRATEGIES,
    assert_close,
    attend_in,
    collectives,
    drawn,
    mesh_of,
)
from tests.support.rows import tiers

pytestmark = NEEDS_EIGHT_DEVICES


# The collectives of a forward pass, and of one with a backward pass. `near` leaves out two of four steps, `own` all
# but the first. XLA sends keys and values once for both passes where the steps stand in no loop.
EXPECTED = {
    ("all_gather", "causal"): ({"all-gather": 2}, {"all-gather": 2, "reduce-scatter": 2}),
    ("ulysses", "causal"): ({"all-to-all": 4}, {"all-to-all": 8}),
    ("ring", "causal"): ({"collective-permute": 2}, {"collective-permute": 7}),
    ("ring", "near"): ({"collective-permute": 2}, {"collective-permute": 4}),
    ("ring", "own"): ({}, {}),
}


@tiers(full={"strategy": ["all_gather-causal", "ring-causal"]}, rest="long")
@pytest.mark.parametrize(("strategy", "mask"), EXPECTED)
def test_the_collectives_are_those_promised_and_no_others(strategy, mask):
    mesh, arrays = drawn()
    block_mask = jflex.create_block_mask(MASKS[mask], None, None, 256, 256, block_size=32)
    run = attend_in(mesh, strategy, block_mask=block_mask)

    def pulled(q, k, v, d_out):
        out, pull = jax.vjp(run, q, k, v)
        return out, *pull(d_out)

    forward = jax.jit(run).lower(*arrays).compile()
    both = jax.jit(pulled).lower(*arrays, arrays[0]).compile()
    assert (collectives(forward), collectives(both)) == EXPECTED[strategy, mask]
    for result in (forward(*arrays), *both(*arrays, arrays[0])):
        assert result.sharding.is_equivalent_to(arrays[0].sharding, 4)


@pytest.mark.full
def test_captured_gradients_are_summed_by_one_reduction():
    mesh, arrays = drawn()
    loss = lambda slopes, *x: attend_in(mesh, "ring")(
        *x, lambda s, b, h, q, k: s * slopes[h], mask_mod=MASKS["causal"]
    )[0, 0, 0, 0]
    text = jax.jit(jax.grad(loss)).lower(jnp.ones(4), *arrays).compile().as_text()
    assert not re.findall(r" (all-gather|reduce-scatter|all-to-all)(?:-start)?\(", text)
    assert len(re.findall(r"f32\[4\]\S* all-reduce\(", text)) == 1


@tiers(rest="full", in_turns=True, share=2)
@pytest.mark.parametrize(("strategy", "implementation"), [("all_gather", "xla"), ("ring", "xla"), ("ring", "triton")])
@pytest.mark.parametrize("traced", [False, True])
def test_tables_of_long_sequences_are_narrow(strategy, implementation, traced, monkeypatch):
    """As wide as the most crowded row of a device, in which blocks in sequence at the end take one entry."""
    monkeypatch.setattr(lists, "WIDE", 8)
    monkeypatch.setattr(lists, "TRACED_WIDTH", 2)
    monkeypatch.setattr(lists, "LEAST_WIDTH", 2)
    made, listed = [], call.divided
    monkeypatch.setattr(running, "divided", lambda *x: made.append(listed(*x)) or made[-1])
    mesh, arrays = drawn({"context": 2})
    ids = jnp.repeat(jnp.arange(4, dtype=jnp.int32), jnp.array([40, 100, 96, 20]), total_repeat_length=256)
    config = jflex.Config(interpret=True) if implementation == "triton" else None
    order = context_parallel.zigzag_order(2)

    def loss(ids, q, k, v, attend=jflex.flex_attention, **options):
        mod = jflex.and_masks(jflex.masks.causal(), jflex.masks.document(ids))
        block_mask = jflex.create_block_mask(mod, None, None, 256, 256, block_size=16)
        return jnp.sum(jnp.sin(attend(q, k, v, block_mask=block_mask, **options)))

    options = {"mesh": mesh, "strategy": strategy, "order": order, "implementation": implementation, "config": config}
    there = functools.partial(loss, attend=jflex.context_parallel_attention, **options)
    reordered = [context_parallel.reorder(x, order) for x in arrays]
    gradients = jax.grad(there, argnums=(1, 2, 3))
    run = jax.jit(gradients) if traced else jax.jit(functools.partial(gradients, ids))
    found = run(ids, *reordered) if traced else run(*reordered)
    right = jax.grad(functools.partial(loss, implementation="reference"), argnums=(1, 2, 3))(ids, *arrays)
    for a, b in zip(found, right, strict=True):
        assert_close(context_parallel.restore(a, order), b, rtol=1e-3, atol=1e-4)
    assert all(x.shape[-1] <= (2 if traced else 4) for x in made[-1].lists[1::2])  # of eight or more blocks


# --- explain


explained = functools.partial(jflex.explain, jflex.context_parallel_attention)
WIDTHS = {"f32": 4, "bf16": 2}


def sent(text, n):
    """Bytes of floating-point numbers that a device sends, by the collectives of a program without loops."""
    total = 0
    found = re.findall(r"= \(?(f32|bf16)\[([\d,]*)\]\S*(?:, \S+\))? ([a-z-]+?)(?:-start)?\(", text)
    parts = {"all-gather": (n - 1) / n, "reduce-scatter": n - 1, "collective-permute": 1, "all-to-all": (n - 1) / n}
    for dtype, shape, kind in found:
        if kind in parts:
            total += parts[kind] * WIDTHS[dtype] * np.prod([int(x) for x in shape.split(",")])
    return total


@pytest.mark.full
@pytest.mark.parametrize(("strategy", "mask"), [("all_gather", "causal"), ("ring", "near")])
def test_bytes_are_those_of_the_compiled_program(strategy, mask):
    """Of a ring that takes three of four steps, which stand in no loop."""
    mesh, arrays = drawn()
    block_mask = jflex.create_block_mask(MASKS[mask], None, None, 256, 256, block_size=32)
    account = explained(*arrays, mesh=mesh, batch_axes="data", block_mask=block_mask, strategy=strategy)
    run = attend_in(mesh, strategy, block_mask=block_mask)
    assert sent(jax.jit(run).lower(*arrays).compile().as_text(), 4) == account.bytes_sent
    if strategy == "all_gather":
        assert account.bytes_sent_backward == account.bytes_sent == 3 * (2 * 64 * 4 * 16 * 4)
    else:
        assert (account.steps, account.bytes_sent_backward) == (3, 2 * account.bytes_sent)


@tiers(default={"strategy": "ring"})
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_blocks_of_devices_are_those_of_the_mask(strategy):
    mesh, (q, k, v) = mesh_of(**CUBE), [jax.ShapeDtypeStruct((2, 256, 8, 16), jnp.float32)] * 3
    mask = jflex.create_block_mask(MASKS["causal"], None, None, 256, 256, block_size=32)
    order = context_parallel.zigzag_order(2)
    for given in (None, order):
        account = explained(
            q, k, v, block_mask=mask, mesh=mesh, batch_axes="data", head_axes="model", strategy=strategy, order=given
        )
        costs = context_parallel.device_costs(mask, 2, given) * 1 * 4  # a batch entry and four heads of a device
        right = costs if strategy != "ulysses" else [costs.sum() / 2] * 2
        np.testing.assert_array_equal(account.visited, right)
        np.testing.assert_allclose(account.flops, np.array(right) * 2 * 32 * 32 * 32)
        np.testing.assert_allclose(account.imbalance, max(right) / np.mean(right))


@pytest.mark.full
def test_ulysses_counts_the_heads_of_each_device():
    mesh, x = mesh_of(**PAIR), jax.ShapeDtypeStruct((2, 64, 4, 16), jnp.float32)
    rising = jflex.create_block_mask(lambda b, h, q, k: k < 16 * (h + 1), None, 4, 64, 64, block_size=16)
    account = explained(x, x, x, block_mask=rising, mesh=mesh, batch_axes="data", strategy="ulysses")
    assert account.visited == (4, 8, 12, 16)
    assert account.imbalance == 1.6


def test_an_account_is_printed_and_a_call_without_blocks_counts_all_keys():
    mesh, x = mesh_of(**PAIR), jax.ShapeDtypeStruct((2, 256, 4, 16), jnp.bfloat16)
    options = {"mesh": mesh, "batch_axes": "data", "implementation": "xla"}
    text = str(explained(x, x, x, strategy="ring", mask_mod=MASKS["own"], **options))
    assert text.splitlines() == [
        "strategy  ring over 4 devices along 'context', 1 of 4 steps",
        "backend   xla",
        "tiles     64 x 64, the blocks of the mask",
        "gradients xla",
        "config    default",
        "blocks    4, 4, 4, 4 visited by each device",
        "work      0.001, 0.001, 0.001, 0.001 GFLOP forward of each device; largest / mean: 1.00",
        "sent      0.000 MB forward, 0.000 MB backward, by a device",
    ]
    account = explained(x, x, x, **options)
    assert account.visited is None
    assert account.flops == (2 * 32 * 4 * 64 * 256.0,) * 4
    assert "not counted" in str(account)

"""What context parallel attention sends between devices: the collectives promised, and narrow tables of blocks."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

import jflex
from jflex import context_parallel
from jflex.block_mask import lists
from jflex.context_parallel import call
from jflex.context_parallel import run as running
from tests.support.context_parallel_calls import MASKS, NEEDS_EIGHT_DEVICES, assert_close, attend_in, collectives, drawn
from tests.support.rows import in_turns, tiers

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


@pytest.mark.full
@in_turns
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

"""`explain` of context parallel calls: what it counts is what the compiled program of a device computes and sends."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jflex
from jflex import context_parallel
from tests.support.context_parallel_calls import (
    CUBE,
    MASKS,
    NEEDS_EIGHT_DEVICES,
    PAIR,
    STRATEGIES,
    attend_in,
    drawn,
    mesh_of,
)
from tests.support.rows import tiers

pytestmark = NEEDS_EIGHT_DEVICES
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


@pytest.mark.full
def test_a_backend_that_cannot_run_is_said():
    mesh, x = mesh_of(**PAIR), jax.ShapeDtypeStruct((2, 64, 4, 16), jnp.float32)
    account = explained(x, x, x, mesh=mesh, implementation="mosaic_gpu")
    assert account.backend is None
    assert "Hopper" in account.reasons["mosaic_gpu"]

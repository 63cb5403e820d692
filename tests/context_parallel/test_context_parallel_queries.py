"""A call of `flex_attention` whose tokens are sharded: `jit` divides its queries, or says why it cannot."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jflex
from tests.support.context_parallel_calls import F32, MASKS, NEEDS_EIGHT_DEVICES, assert_close, collectives, drawn
from tests.support.rows import tiers

pytestmark = NEEDS_EIGHT_DEVICES


DENSE = {
    "nothing": {},
    "lists": {"block_mask": 32},
    "learned": {"block_mask": 16, "score_mod": lambda c: lambda s, b, h, q, k: s * c[h] + c[0] * (q - k).astype(F32)},
    "sinks and lengths": {"kv_lengths": jnp.array([100, 200], jnp.int32), "sinks": lambda c: c},
    "dropout in the other layout": {"layout": "BNTH", "dropout_rate": 0.3, "dropout_key": jax.random.key(0)},
}


@tiers(default={"name": "lists-xla"}, full={"name": ["nothing", "learned", "sinks and lengths"]})
@pytest.mark.parametrize(
    ("name", "implementation"), [*((name, "xla") for name in DENSE), ("lists", "triton"), ("learned", "triton")]
)
def test_plain_jit_divides_the_queries(name, implementation):
    """A call of `flex_attention` with tokens that are sharded: as by all-gather, and by itself."""
    mesh, arrays = drawn()
    given = dict(DENSE[name])
    bnth = given.get("layout") == "BNTH"
    if "block_mask" in given:
        size = given["block_mask"]
        given["block_mask"] = jflex.create_block_mask(MASKS["causal"], None, None, 256, 256, block_size=size)
    arrays = [
        jax.device_put(x.swapaxes(1, 2), NamedSharding(mesh, P("data", None, "context"))) if bnth else x for x in arrays
    ]
    config = jflex.Config(interpret=True) if implementation == "triton" else None

    def loss(implementation, config, q, k, v, captured):
        made = {n: x(captured) if callable(x) and not isinstance(x, jflex.BlockMask) else x for n, x in given.items()}
        out, lse = jflex.flex_attention(q, k, v, **made, return_lse=True, implementation=implementation, config=config)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(lse)), out

    run = lambda *how: jax.jit(jax.value_and_grad(functools.partial(loss, *how), argnums=range(4), has_aux=True))
    captured = jnp.linspace(0.1, 0.4, 4)
    compiled = run(implementation, config).lower(*arrays, captured).compile()
    (_, out), gradients = compiled(*arrays, captured)
    plain = [jnp.asarray(np.asarray(x)) for x in arrays]
    (_, right), right_gradients = run("reference", None)(*plain, captured)
    assert_close(out, right)
    jax.tree.map(functools.partial(assert_close, rtol=1e-3, atol=1e-4), gradients, right_gradients)
    assert out.sharding.is_equivalent_to(arrays[0].sharding, 4)
    assert collectives(compiled)["all-gather"] == 2  # of keys and values


@tiers(full={"divided": "queries that cut blocks"}, rest="long")
@pytest.mark.parametrize("divided", ["keys", "queries that cut blocks"])
def test_jit_of_tokens_that_it_cannot_divide_says_what_divides_the_work(divided):
    """XLA's partitioner tells how arrays are sharded too late for an error that Python could raise."""
    mesh, arrays = drawn(T=64)
    options = {"implementation": "xla"}
    if divided == "keys":
        arrays[0] = jax.device_put(arrays[0], NamedSharding(mesh, P("data")))
    else:
        options["block_mask"] = jflex.create_block_mask(MASKS["causal"], None, None, 64, 64, block_size=32)
    run = jax.jit(functools.partial(jflex.flex_attention, **options))
    with pytest.warns(
        UserWarning, match=r"gathers and computes all tokens\. They are sharded over 'context'\..*axis='con"
    ):
        found = run(*arrays)
    assert_close(found, jflex.flex_attention(*[np.asarray(x) for x in arrays], **options))


@pytest.mark.parametrize("layout", ["BTNH", "BNTH"])
def test_divided_tokens_of_an_explicit_mesh_are_refused(layout):
    mesh, arrays = drawn(T=64, kind=AxisType.Explicit)
    run = jax.jit(functools.partial(jflex.flex_attention, layout=layout, implementation="xla"))
    with jax.set_mesh(mesh):
        arrays = [x if layout == "BTNH" else x.swapaxes(1, 2) for x in arrays]
        with pytest.raises(ValueError, match=r"all their tokens on each.*jflex\.context_parallel_att"):
            run(*arrays)

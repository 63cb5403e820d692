"""The size of the programs of `implementation="xla"`: on a CPU, they take seconds to compile."""

import jax
import jax.numpy as jnp
import pytest

import jflex
from jflex import masks

X = jax.ShapeDtypeStruct((1, 1000, 2, 16), jnp.float32)  # no whole number of blocks


@pytest.mark.parametrize("is_masked", [False, True], ids=["dense", "causal"])
def test_partial_and_full_blocks_share_a_loop(is_masked):
    """A pass has one loop over rows with one over blocks, and each GEMM once, but for what counts NaN behind a mask."""
    mask = jflex.create_block_mask(masks.causal(), None, None, X.shape[1], X.shape[1]) if is_masked else None
    attend = lambda q, k, v: jflex.flex_attention(q, k, v, block_mask=mask, implementation="xla")
    gradient = jax.grad(lambda *x: jnp.sum(attend(*x)), (0, 1, 2))
    for function, loops, products in ((attend, 2, 5), (gradient, 4, 13)):
        program = jax.jit(function).lower(X, X, X).as_text()
        assert program.count("stablehlo.while") == loops
        assert program.count("stablehlo.dot_general") == products
        assert "stablehlo.sort" not in program  # lists of all blocks

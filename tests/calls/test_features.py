"""Features of calls: one program for all values, and the same under `jax.vmap` and `jax.checkpoint`; all gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.cases.features import BACKENDS, FEATURES, REFERENCE
from tests.support.rows import tiers
from tests.support.traces import Traced

assert_close = functools.partial(np.testing.assert_allclose, rtol=3e-5, atol=3e-5)


@tiers(default={"name": "sinks", "backend": "xla"}, in_turns=True)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FEATURES)
def test_new_values_vmap_and_remat(name, backend):
    feature, arrays = FEATURES[name], [FEATURES[name].draw(seed) for seed in range(2)]
    run = Traced(functools.partial(feature.differentiated, BACKENDS[backend]))
    once = jax.jit(run)
    alone = [once(x) for x in arrays]
    assert run.count == 1
    right = jax.jit(functools.partial(feature.differentiated, REFERENCE))
    jax.tree.map(assert_close, alone, [right(x) for x in arrays])

    stack = lambda *xs: jnp.stack(xs)
    mapped = jax.jit(jax.vmap(run))(jax.tree.map(stack, *arrays))
    jax.tree.map(assert_close, mapped, jax.tree.map(stack, *alone))

    if backend == "xla":
        attend = lambda options, **arrays: jax.checkpoint(lambda x: feature.attend(options, **x))(arrays)
        remat = functools.partial(feature._replace(attend=attend).differentiated, BACKENDS[backend])
        jax.tree.map(assert_close, jax.jit(remat)(arrays[0]), alone[0])

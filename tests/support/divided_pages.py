"""Pages of requests divided in turn among devices, and calls with them: what the tests of divided pages share."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jflex
from tests.cases import paged_cases
from tests.support import paged_evaluation
from tests.support.context_parallel_calls import mesh_of

ALL = ("lse", "max", "entropy")
BY_NAME = {case.name: case for case in paged_cases.CASES}


def in_turn(case, n):
    """The pages of a case in n runs, page j of a request in run j % n, and the table; everything else stays NaN."""
    cache, table = paged_evaluation.placed(case)
    needed = [case.pages_of(length) for length in case.lengths]
    own = 2 + sum(-(-x // n) for x in needed)
    free = [list(range(run * own + (run == 0), (run + 1) * own)) for run in range(n)]
    rng, source, to, turned = np.random.default_rng(0), [], [], table.copy()
    for run in free:
        rng.shuffle(run)
    for r, count in enumerate(needed):
        for j in range(count):
            turned[r, j] = free[j % n].pop()
            source.append(table[r, j])
            to.append(turned[r, j])
    axis = cache.k.ndim - 4

    def spread(x):
        if x is None or x.ndim < axis + 3:
            return x
        pages = np.moveaxis(np.asarray(x), axis, 0)
        unused = 127 if x.dtype == jnp.int8 else np.nan
        made = np.full((n * own, *pages.shape[1:]), unused, pages.dtype)
        made[to] = pages[source]
        return jnp.asarray(np.moveaxis(made, 0, axis))

    return jflex.paged.PagedCache(*map(spread, (cache.k, cache.v, *cache.scales))), turned


def options_of(case, backend, stats=()):
    captured = jax.tree.map(jnp.asarray, paged_evaluation.draw(case).captured)
    return paged_evaluation.arguments_of(case, backend, captured, paged_evaluation.layer_of(case), stats)


def check_in_turn(case, axes, backend):
    """Against float64, with all statistics that there are."""
    cache, table = in_turn(case, axes["context"])
    heads = {"head_axes": "model"} if "model" in axes else {}
    stats = ALL if case.normalize == "softmax" else ()
    run = functools.partial(
        jflex.context_parallel_paged_attention, mesh=mesh_of(**axes), **heads, **options_of(case, backend, stats)
    )
    batch = paged_evaluation.batch_of(case, table)
    found = jax.jit(run)(jnp.asarray(paged_evaluation.draw(case).query), cache, batch)
    if stats:
        out, found_stats = found
        paged_evaluation.check(case, (out, found_stats.lse))
        paged_evaluation.check_stats(case, found_stats)
    else:
        paged_evaluation.check(case, (found, jnp.zeros(found.shape[:2], jnp.float32)))

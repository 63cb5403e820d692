"""The kernels of the indexer for an H200, compiled to machine code without a GPU."""

import jax
import jax.numpy as jnp
import pytest

import jflex
from tests.support import gpu_compile

pytestmark = pytest.mark.full

SCORES, SELECT = "jflex_indexer_scores", "jflex_indexer_select"


def indexer(N, H, D, S, k, dtype=jnp.bfloat16):
    """Scores and selection of sequences of N queries; the shapes of their arguments."""

    def best(query, key, weights):
        scores = jflex.indexer_scores(query, key, weights, implementation="triton")
        return jflex.select_keys(scores, k, visible=jnp.arange(S)[None] < S - 1, implementation="triton")

    shape = jax.ShapeDtypeStruct
    return best, shape((N, H, D), dtype), shape((S, D), dtype), shape((N, H), jnp.float32)


CASES = {  # sequences, or None without `jax.vmap`; whether each has its keys; launches of the selection
    "decode": (32, True, (1, 64, 128, 65536, 2048), 2),
    "shared_keys": (32, False, (1, 64, 128, 65536, 2048), 2),
    "prefill": (None, True, (512, 64, 128, 8192, 2048), 1),
    "odd_sizes": (None, True, (7, 3, 80, 1000, 30), 1),
    "many_heads": (2, True, (3, 128, 256, 4096, 64), 1),
    "most_selected": (None, True, (2, 16, 64, 100_000, 16384), 3),
}


@pytest.mark.parametrize("name", CASES)
def test_compiles(name):
    sequences, has_keys, sizes, launches = CASES[name]
    best, *shapes = indexer(*sizes)
    if sequences is not None:
        best = jax.vmap(best, in_axes=(0, 0 if has_keys else None, 0))
        several = lambda x: jax.ShapeDtypeStruct((sequences, *x.shape), x.dtype)
        shapes = [x if n == 1 and not has_keys else several(x) for n, x in enumerate(shapes)]
    if gpu_compile.missing():
        gpu_compile.lower(best, *shapes)
        pytest.skip(f"lowered, but not compiled: {gpu_compile.missing()}")
    kernels = gpu_compile.compile_kernels(best, *shapes)
    names = [kernel.name.rstrip("_0123456789") for kernel in kernels]
    assert sorted(names) == [SCORES, *[SELECT] * launches]
    assert not {kernel.name: kernel.spill for kernel in kernels if kernel.spill}
    assert all(kernel.tensor == "wgmma" for kernel in kernels if SCORES in kernel.name)

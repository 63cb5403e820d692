"""What is measured: problems, variants in both libraries, counted work, peers in JAX."""

import dataclasses
import itertools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import roofline
from benchmarks.environment import ROOT
from benchmarks.peers.jax import attention as jax_attention
from benchmarks.peers.jax import served
from benchmarks.peers.table import PEERS, by_library, peers_of
from benchmarks.problems import Problem, requests_of, square
from benchmarks.suites import SUITES
from benchmarks.variants import VARIANTS, Operations

NUMPY = Operations(np.tanh, lambda x: np.asarray(x, np.float32), np.clip)
SMALL = square(1, 256, 4, 16, "noop")
EVERY = tuple(PEERS.values())


def small(**more) -> Problem:
    tiny = {"B": 4, "T": 1, "S": 64, "Hq": 4, "Hkv": 2, "D": 16, "variant": "noop", "dtype": "float32"}
    return Problem(**tiny | more)


MIXED = small(T=16, variant="causal", lengths="mixed", page=8)
PARTS = (dataclasses.replace(MIXED, B=1, lengths=""), dataclasses.replace(MIXED, B=3, T=1, S=32, lengths=""))


@pytest.mark.parametrize("name", SUITES)
def test_a_suite_names_each_problem_once(name: str):
    problems, peers = SUITES[name].problems, peers_of(name)
    assert len({problem.name + problem.source for problem in problems}) == len(problems)
    for problem in problems:
        assert problem.Hq % problem.Hkv == 0
        assert problem.served == SUITES[name].served
        assert problem.form == "split" or VARIANTS[problem.variant].make(problem, {}, NUMPY).mask
        assert not problem.differentiated or VARIANTS[problem.variant].captured(dataclasses.replace(problem, T=8, S=8))
        assert peers[0].name in by_library(problem, peers)[peers[0].library]
        assert Problem(**problem.to_json()) == problem
        queries, keys = requests_of(problem)
        assert (queries.max(), len(queries)) == (problem.T, problem.B)
        assert (queries <= keys).all()
        assert keys.max() <= problem.S
        assert not problem.page or problem.prefix % problem.page == 0


def evaluated(problem: Problem, operations: Operations, array) -> list[np.ndarray]:
    """Mask and scores of all heads, on grids of indices: the mods are made of elementwise operators."""
    variant = VARIANTS[problem.variant]
    captured = {name: array(x.astype(np.float32)) for name, x in variant.captured(problem).items()}
    indices = {name: array(x) for name, x in variant.indices(problem).items()}
    mask, score = variant.make(problem, captured | indices, operations)
    q_idx, kv_idx = array(np.arange(problem.T, dtype=np.int32)[:, None]), array(np.arange(problem.S, dtype=np.int32))
    scores = np.random.default_rng(0).normal(size=(problem.T, problem.S)).astype(np.float32)
    values = [] if mask is None else [mask(0, 0, q_idx, kv_idx)]
    values += [] if score is None else [score(array(scores), 0, h, q_idx, kv_idx) for h in range(problem.Hq)]
    return [np.asarray(x) for x in values]


@pytest.mark.parametrize("library", ["jax", "torch"])
@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "noop"])
def test_a_variant_is_the_same_in_every_library(name: str, library: str):
    problem = dataclasses.replace(SMALL, variant=name)
    if library == "torch":
        torch = pytest.importorskip("torch")
        operations, array = Operations(torch.tanh, lambda x: x.to(torch.float32), torch.clamp), torch.as_tensor
    else:
        operations, array = jax_attention.OPERATIONS, jnp.asarray
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        found = evaluated(problem, operations, array)
    for ours, expected in zip(found, evaluated(problem, NUMPY, np.asarray), strict=True):
        assert ours.dtype == expected.dtype
        np.testing.assert_allclose(ours, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["causal", "sliding_window", "document_mask", "neighborhood"])
def test_visited_elements_are_those_of_the_blocks_with_any_visible(name: str):
    problem = dataclasses.replace(SMALL, variant=name, T=400, S=400)
    [visible] = evaluated(problem, NUMPY, np.asarray)
    blocks = [visible[q : q + 128, kv : kv + 128] for q, kv in itertools.product(range(0, 400, 128), repeat=2)]
    mods, captured = jax_attention.mods_of(problem)
    visited = sum(x.size * x.any() for x in blocks)
    assert jax_attention.block_mask_of(problem, mods(captured))[1] == visited
    assert roofline.work(problem, visited).visible == (visible.sum() / visited if name == "document_mask" else 1.0)


def test_work_counts_gemms_and_arrays():
    problem = square(2, 256, (4, 2), 16, "pair_bias", differentiated=True)
    work = roofline.work(problem, 256 * 256, [(4, 256, 256)])
    assert work.forward_flops == 2 * 2 * 16 * 256 * 256 * 4 * 2
    assert work.backward_flops == 2.5 * work.forward_flops
    query, key, bias, lse = 2 * 2 * 4 * 256 * 16, 2 * 2 * 2 * 256 * 16, 2 * 4 * 256 * 256, 4 * 2 * 4 * 256
    assert work.forward_bytes == 2 * query + 2 * key + bias + lse
    assert work.backward_bytes == work.forward_bytes + query + (query + 2 * key + bias)
    other = roofline.work(square(1, 256, 2, 32, "noop", Dv=16), 100)
    assert other.forward_flops == 2 * (32 + 16) * 2 * 100
    assert other.backward_flops == 2 * (3 * 32 + 2 * 16) * 2 * 100


def test_work_of_serving_counts_visible_keys_and_shared_ones_once():
    mixed = roofline.served_work(MIXED)
    chunk, steps = (roofline.served_work(x) for x in PARTS)
    visible = 16 * 64 - 16 * 15 // 2 + 3 * 32
    assert mixed.forward_flops == chunk.forward_flops + steps.forward_flops == 4 * 16 * 4 * visible
    shared, own = (roofline.served_work(small(prefix=prefix)) for prefix in (32, 0))
    assert own.forward_bytes - shared.forward_bytes == 3 * 32 * 2 * 2 * 16 * 4
    assert own.forward_flops == shared.forward_flops == 4 * 16 * 4 * 4 * 64


def test_what_the_parent_process_uses_loads_no_library():
    modules = ("run.suite", "results.report", "__main__", "questions.question", "questions.gpu")
    words = f"import sys, {', '.join(f'benchmarks.{x}' for x in modules)}"
    words += "; assert not {'jax', 'torch', 'jflex'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", words], check=True, cwd=ROOT)


def forward(peer: str, problem: Problem) -> np.ndarray:
    mods, captured = jax_attention.mods_of(problem)
    if problem.served:
        attend, inputs = served.served_program(peer, problem, mods, captured)
    else:
        block_mask, _ = jax_attention.block_mask_of(problem, mods(captured))
        attend = jax_attention.ATTENTION[peer](problem, mods)
        inputs = jax_attention.inputs_of(problem, captured, block_mask)
    return np.asarray(attend(*inputs), np.float32)


@pytest.mark.parametrize(
    "fields", [{"weights": "sinks"}, {"weights": "dropout"}, {"weights": "sigmoid"}, {"stats": "lse max entropy"}]
)
def test_other_weights_and_statistics_are_of_jflex_alone(fields):
    """Other weights change the output, statistics do not."""
    problem = square(1, 64, 2, 16, "causal", **fields)
    plain, other = (forward("jflex-xla", x) for x in (square(1, 64, 2, 16, "causal"), problem))
    assert np.isfinite(other).all()
    assert np.allclose(plain, other, atol=0.05) == ("stats" in fields)
    names = {name for names in by_library(problem, EVERY).values() for name in names}
    assert all(name.startswith("jflex") for name in names)
    assert {"jflex", "jflex-mosaic", "jflex-triton"} <= names
    assert next(iter(fields.values())) in problem.name


LATENT = small(page=8, keys="latent", Hkv=1, D=48, Dv=32, Hq=16)
SPARSE, INDEXER = (dataclasses.replace(LATENT, selected=6), small(keys="indexer", Hkv=1, Hq=3, selected=6))


def test_work_counts_selected_keys_alone():
    rows, item = SPARSE.B * SPARSE.Hq, 4
    sparse, dense = roofline.served_work(SPARSE), roofline.served_work(LATENT)
    assert sparse.forward_flops == 2 * (48 + 32) * rows * 6
    assert sparse.forward_bytes == item * (rows * (48 + 32) + SPARSE.B * 6 * 48) + 4 * SPARSE.B * 6
    assert dense.forward_flops == 2 * (48 + 32) * rows * 64
    assert dense.forward_bytes == item * (rows * (48 + 32) + SPARSE.B * 64 * 48)
    # Three queries of a sequence select 18 keys, and with a longer selection no more than there are.
    for k, distinct in ((6, 18), (40, 64)):
        three = roofline.served_work(dataclasses.replace(SPARSE, T=3, selected=k))
        keys = three.forward_bytes - item * 3 * rows * (48 + 32) - 4 * 3 * SPARSE.B * k
        assert keys == item * SPARSE.B * distinct * 48
    indexer = roofline.served_work(INDEXER)
    assert indexer.forward_flops == 2 * 16 * 4 * 3 * 64
    assert indexer.forward_bytes == item * (4 * 3 * 16 + 4 * 64 * 16) + 4 * 4 * 3 + 4 * 4 * 6

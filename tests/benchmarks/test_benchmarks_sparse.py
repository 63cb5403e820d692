"""The suite of sparse latent attention: its peers against float64, counted work, what is said of a wrong result."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import roofline
from benchmarks.peers.jax import attention as jax_attention
from benchmarks.peers.jax import served
from benchmarks.peers.table import PEERS, by_library, peers_of
from benchmarks.problems import Problem
from benchmarks.run.check_outputs import SERVED_TOLERANCE, mismatches
from benchmarks.run.jax_runner import JaxRunner
from benchmarks.suites import SUITES
from tests.benchmarks.test_benchmarks import small

LATENT = small(page=8, keys="latent", Hkv=1, D=48, Dv=32, Hq=16)
SPARSE, INDEXER = (dataclasses.replace(LATENT, selected=6), small(keys="indexer", Hkv=1, Hq=3, selected=6))
PEERS_OF_SUITE = [peer.name for peer in peers_of("sparse_mla")]


def inputs_and_result(peer: str, problem: Problem) -> tuple[list[np.ndarray], np.ndarray]:
    function, (_, *inputs) = served.served_program(peer, problem, *jax_attention.mods_of(problem))
    return inputs, np.asarray(jax.jit(function)({}, *inputs))


@pytest.mark.parametrize("peer", PEERS_OF_SUITE)
def test_attention_is_over_the_selected_rows_alone(peer: str):
    problem = dataclasses.replace(SPARSE, T=3)
    query, cache, batch = served.paged_inputs(problem)
    rows = np.asarray(cache.rows, np.float64)[np.asarray(batch.page_table)].reshape(problem.B, problem.S, problem.D)
    chosen = rows[np.arange(problem.B).repeat(3)[:, None], served.selected_positions(problem)]
    scores = np.einsum("nhd,nkd->nhk", np.asarray(query, np.float64), chosen) / np.sqrt(192)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    expected = np.einsum("nhk,nkd->nhd", weights / weights.sum(-1, keepdims=True), chosen[..., : problem.Dv])
    _, found = inputs_and_result(peer, problem)
    np.testing.assert_allclose(found.reshape(expected.shape), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("peer", PEERS_OF_SUITE)
def test_the_indexer_selects_the_best_keys_that_are_seen(peer: str):
    problem = dataclasses.replace(INDEXER, T=3)
    (query, key, weights, positions), found = inputs_and_result(peer, problem)
    query, key, weights = (np.asarray(x, np.float64) for x in (query, key, weights))
    products = np.maximum(np.einsum("bthd,bsd->bths", query, key), 0)
    scores = np.einsum("bth,bths->bts", weights, products)
    scores[..., np.arange(problem.S) > np.asarray(positions)[:, None]] = -np.inf
    expected = np.argsort(-scores, axis=-1, kind="stable")[..., : problem.selected]  # of equal scores the lower first
    np.testing.assert_array_equal(found, expected)


def test_positions_are_distinct_and_seen():
    positions = served.selected_positions(dataclasses.replace(SPARSE, T=3))
    assert positions.shape == (SPARSE.B * 3, 6)
    assert all(len(set(row)) == 6 for row in positions.tolist())
    assert (positions <= np.tile([61, 62, 63], SPARSE.B)[:, None]).all()
    everything = served.selected_positions(dataclasses.replace(SPARSE, selected=64))
    np.testing.assert_array_equal(np.sort(everything), np.broadcast_to(np.arange(64), everything.shape))


def test_the_runner_compares_and_measures_each_problem():
    runner = JaxRunner()
    for problem in (LATENT, SPARSE, INDEXER):
        answer = runner.prepare(problem, PEERS_OF_SUITE, ["forward"])
        assert (answer["ready"], answer["unable"]) == (PEERS_OF_SUITE, {})
        assert not mismatches(answer["samples"], 1e-3)
        wrong = {"forward": [[-1.0 - x for x in array] for array in answer["samples"]["jflex"]["forward"]]}
        reasons = mismatches({**answer["samples"], "jflex": wrong}, SERVED_TOLERANCE)
        assert reasons["jflex"]["forward"].startswith("array 0 differs from that of jax-xla-latents")
        assert len(runner.measure("jflex", "forward", 3)["seconds"]) == 3
    runner.release()


def test_work_counts_selected_keys_alone():
    rows, item = SPARSE.B * SPARSE.Hq, 4
    sparse, dense = roofline.served_work(SPARSE), roofline.served_work(LATENT)
    assert sparse.forward_flops == 2 * (48 + 32) * rows * 6
    assert sparse.forward_bytes == item * (rows * (48 + 32) + SPARSE.B * 6 * 48) + 4 * SPARSE.B * 6
    assert dense.forward_flops == 2 * (48 + 32) * rows * 64
    # Three queries of a sequence select 18 keys, and with a longer selection no more than there are.
    for k, distinct in ((6, 18), (40, 64)):
        three = roofline.served_work(dataclasses.replace(SPARSE, T=3, selected=k))
        keys = three.forward_bytes - item * 3 * rows * (48 + 32) - 4 * 3 * SPARSE.B * k
        assert keys == item * SPARSE.B * distinct * 48
    indexer = roofline.served_work(INDEXER)
    assert indexer.forward_flops == 2 * 16 * 4 * 3 * 64
    assert indexer.forward_bytes == item * (4 * 3 * 16 + 4 * 64 * 16) + 4 * 4 * 3 + 4 * 4 * 6
    # In bfloat16: 576 columns of each key that is read.
    [whole] = (x for x in SUITES["sparse_mla"].problems if (x.B, x.Hq, x.selected) == (8, 16, 2048))
    assert roofline.served_work(whole).forward_bytes == 8 * 2048 * (2 * 576 + 4) + 2 * 8 * 16 * (576 + 512)


def test_peers_that_take_no_selection_are_left_out():
    names = lambda problem: {x for names in by_library(problem, tuple(PEERS.values())).values() for x in names}
    assert names(INDEXER) >= {*PEERS_OF_SUITE}
    for problem, refused in ((SPARSE, {"jflex-mosaic"}), (INDEXER, {"jflex-mosaic", "jflex-triton", "jflex-official"})):
        assert not names(problem) & (refused | {"jax-cudnn", "jax-xla", "flashinfer", "torch-decode", "sdpa-cudnn"})
    reason = r"jflex-flat is not measured with noop, latent keys, the best 6 keys"
    with pytest.raises(NotImplementedError, match=reason):
        inputs_and_result("jflex-flat", SPARSE)
    assert INDEXER.name == "noop, indexer queries and keys, the best 6 keys; B 4, H 3/1, T 1, S 64, D 16"


def test_scores_of_the_indexer_are_exact_in_bfloat16():
    """So that all peers select the same keys, whatever the order in which they add."""
    problem = dataclasses.replace(INDEXER, dtype="bfloat16", Hq=64, D=128)
    found = [inputs_and_result(peer, problem)[1] for peer in PEERS_OF_SUITE]
    np.testing.assert_array_equal(*found)
    assert jnp.issubdtype(found[0].dtype, jnp.integer)

"""Context parallel attention on eight simulated devices: every strategy, against the oracle and against its promises."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jflex
from jflex import context_parallel
from tests import captured_pairs as captured
from tests import dropout_bits, evaluation
from tests import mask_pairs as masks
from tests import score_pairs as scores
from tests.cases import Case
from tests.cases import Sizes as N

pytestmark = [
    pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices; tests/conftest.py simulates them"),
    pytest.mark.usefixtures("in_haste"),
]
STRATEGIES = ("all_gather", "ring", "ulysses")
strategies = pytest.mark.parametrize("strategy", STRATEGIES)
assert_close = functools.partial(np.testing.assert_allclose, rtol=3e-5, atol=3e-5)
ZIGZAG = context_parallel.zigzag_order(4)
SHUFFLED = np.random.default_rng(0).permutation(8)
F32 = jnp.float32


def mesh_of(**axes):
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


CUBE = {"data": 2, "context": 2, "model": 2}
GROUPED = N(T=128, Hq=8, Hkv=4, D=16)
# A case, the axes of the mesh, the order of the tokens.
CASES = {
    "causal": (Case("causal_context", mask=masks.causal, sizes=GROUPED, block=16), {"context": 4}, ZIGZAG),
    "documents": (
        Case("documents_context", captured.slopes, masks.documents, N(T=128, Hq=4, D=16)),
        {"context": 4},
        SHUFFLED,
    ),
    "window of eight": (
        Case("window_context", captured.bias_hqk, masks.window, N(B=1, T=256, Hq=8, D=16), block=32),
        {"context": 8},
        None,
    ),
    "mask of heads in a cube": (
        Case("heads_context", captured.bias_hqk, masks.window_by_head, GROUPED, block=32, by_head=True),
        CUBE,
        None,
    ),
    "lists of batch and heads": (
        Case(
            "lists_context", captured.bias_bq, masks.random_elements, GROUPED, block=32,
            states=np.random.default_rng(1).integers(0, 3, (2, 8, 4, 4)),
        ),
        CUBE,
        context_parallel.zigzag_order(2),
    ),
    "sinks and empty rows": (
        Case("sinks_context", captured.slopes, masks.strictly_causal, GROUPED, block=16, sinks=True),
        CUBE,
        context_parallel.zigzag_order(2),
    ),
    "without a softmax": (
        Case("sigmoid_context", scores.sigmoid, masks.causal, GROUPED, block=32, normalize="none"),
        {"context": 4},
        None,
    ),
    "dropout": (
        Case("dropout_context", captured.table, masks.causal, GROUPED, dropout_rate=0.3), CUBE, np.array([2, 0, 1, 3]),
    ),
    "bfloat16": (
        Case("bfloat16_context", scores.softcap, masks.both_sides, GROUPED, block=16, dtype="bfloat16"),
        {"context": 4},
        ZIGZAG,
    ),
    "other keys": (
        Case("cross_context", captured.bias_kv, sizes=N(T=36, S=100, Hq=4, D=16, Dv=24), layout="BNTH"),
        {"context": 4},
        None,
    ),
    "shared keys": (
        Case("shared_context", mask=masks.causal, sizes=N(T=64, Hq=4, D=16, Bkv=1), block=16),
        CUBE,
        None,
    ),
    "odd chunks": (
        Case("odd_context", captured.bias_q, masks.prefix, N(T=56, Hq=4, D=8)), {"context": 4}, SHUFFLED[:4].argsort(),
    ),
}  # fmt: skip


def attend_by(case, axes, order, strategy, implementation="xla"):
    """A function for `evaluation.everything_by`: queries, keys and values are in their natural order."""
    bnth = case.layout == "BNTH"
    length = 2 if bnth else 1
    named = {name: axis for name, axis in (("batch_axes", "data"), ("head_axes", "model")) if axis in axes}

    def attend(drawn, blocks, query, key, value, floats):
        arrays = (query, key, value)
        arrays = [x.swapaxes(1, 2) if bnth else x for x in arrays]
        arrays = arrays if order is None else [context_parallel.reorder(x, order, length) for x in arrays]
        found = {**drawn.score, **floats}
        softmax = case.normalize == "softmax"
        results = jflex.context_parallel_attention(
            *arrays,
            None if case.score is None else case.score.jax(found),
            blocks,
            mask_mod=None if case.mask is None or blocks is not None else case.mask.jax(drawn.mask),
            mesh=mesh_of(**axes), strategy=strategy, order=order, normalize=case.normalize,
            sinks=found.get("sinks"), scale=case.scale, layout=case.layout, return_lse=softmax,
            dropout_rate=case.dropout_rate,
            dropout_key=jax.random.key(dropout_bits.KEY[1]) if case.dropout_rate else None,
            implementation=implementation,
            config=jflex.Config(interpret=True) if implementation == "triton" else None, **named,
        )  # fmt: skip
        out, lse = results if softmax else (results, jnp.zeros((query.shape[0], query.shape[2], query.shape[1]), F32))
        if order is not None:
            out = context_parallel.restore(out, order, length)
            lse = context_parallel.restore(lse, order, 2) if softmax else lse
        return out.swapaxes(1, 2) if bnth else out, lse

    return attend


def check(name, strategy, implementation="xla"):
    case, axes, order = CASES[name]
    by_plain, exact = evaluation.plain(case), evaluation.exact(case)
    found = evaluation.everything_by(case, attend_by(case, axes, order, strategy, implementation))
    evaluation.compare_forward(case, found, by_plain, exact)
    names = ("query", "key", "value", *evaluation.draw(case).floats())
    evaluation.compare_gradients(case, found, by_plain, exact, names)


@strategies
@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_against_float64(name, strategy):
    check(name, strategy)


@strategies
@pytest.mark.parametrize(("name", "implementation"), [("documents", "triton"), ("sinks and empty rows", "reference")])
def test_other_implementations(name, implementation, strategy):
    check(name, strategy, implementation)

"""Context parallel attention on eight simulated devices: every strategy, against the oracle and its promises."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jflex
from jflex import context_parallel
from jflex.block_mask import tables
from jflex.context_parallel import call
from jflex.context_parallel import run as running
from tests import captured_pairs as captured
from tests import dropout_bits, evaluation
from tests import mask_pairs as masks
from tests import score_pairs as scores
from tests.cases import Case
from tests.cases import Sizes as N

pytestmark = [
    pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices; tests/conftest.py simulates them"),
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
    "values of another size": (
        Case("values_context", captured.slopes, masks.prefix, N(T=128, Hq=4, D=16, Dv=24), block=16),
        {"context": 4},
        SHUFFLED,
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


def attend_by(case, axes, order, strategy, implementation="xla", interpret=True):
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
            config=jflex.Config(interpret=True) if implementation == "triton" and interpret else None, **named,
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


# --- what is promised of the communication

PAIR = {"data": 2, "context": 4}
OPS = r" (all-gather|reduce-scatter|all-reduce|collective-permute|all-to-all)(?:-start)?\("


def drawn(axes=PAIR, T=256, heads=4, kind=AxisType.Auto):
    """A mesh, and query, key and value with their tokens and batch sharded over it."""
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes))
    place = NamedSharding(mesh, P("data" if "data" in axes else None, "context"))
    x = np.random.default_rng(0).normal(size=(3, 2, T, heads, 16)).astype(np.float32)
    return mesh, [jax.device_put(a, place) for a in x]


def near(b, h, q_idx, kv_idx):
    return jnp.abs(q_idx - kv_idx) < 33


# The collectives of a forward pass, and of one with a backward pass. `near` leaves out two of four steps, `early` all
# but the first. XLA sends keys and values once for both passes where the steps stand in no loop.
EXPECTED = {
    ("all_gather", "causal"): ({"all-gather": 2}, {"all-gather": 2, "reduce-scatter": 2}),
    ("ulysses", "causal"): ({"all-to-all": 4}, {"all-to-all": 8}),
    ("ring", "causal"): ({"collective-permute": 2}, {"collective-permute": 7}),
    ("ring", "near"): ({"collective-permute": 2}, {"collective-permute": 4}),
    ("ring", "own"): ({}, {}),
}
MASKS = {
    "causal": lambda b, h, q, k: q >= k,
    "near": near,
    "own": lambda b, h, q, k: q // 64 == k // 64,
}


def attend_in(mesh, strategy, **options):
    named = {"batch_axes": "data"} if "data" in mesh.shape else {}
    options = {"implementation": "xla", **named, **options}
    return functools.partial(jflex.context_parallel_attention, mesh=mesh, strategy=strategy, **options)


def collectives(compiled):
    text = compiled.as_text()
    return {name: len(re.findall(rf" {name}(?:-start)?\(", text)) for name in set(re.findall(OPS, text))}


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


def test_captured_gradients_are_summed_by_one_reduction():
    mesh, arrays = drawn()
    loss = lambda slopes, *x: attend_in(mesh, "ring")(
        *x, lambda s, b, h, q, k: s * slopes[h], mask_mod=MASKS["causal"]
    )[0, 0, 0, 0]
    text = jax.jit(jax.grad(loss)).lower(jnp.ones(4), *arrays).compile().as_text()
    assert not re.findall(r" (all-gather|reduce-scatter|all-to-all)(?:-start)?\(", text)
    assert len(re.findall(r"f32\[4\]\S* all-reduce\(", text)) == 1


@pytest.mark.parametrize("strategy", ["all_gather", "ring"])
def test_a_traced_mask(strategy):
    """Which steps are needed is data then: no hop is left out, but a device computes only where it attends."""
    mesh, (q, k, v) = drawn()
    ids = jnp.repeat(jnp.arange(8, dtype=jnp.int32), 32)

    @jax.jit
    def run(ids, q, k, v):
        mask = jflex.create_block_mask(lambda b, h, i, j: ids[i] == ids[j], None, None, 256, 256, block_size=32)
        return attend_in(mesh, strategy, block_mask=mask)(q, k, v)

    right = jflex.flex_attention(q, k, v, mask_mod=lambda b, h, i, j: ids[i] == ids[j], implementation="reference")
    assert_close(run(ids, q, k, v), right)
    if strategy == "ring":
        assert collectives(run.lower(ids, q, k, v).compile()) == {"collective-permute": 2}


@pytest.mark.parametrize(("strategy", "implementation"), [("all_gather", "xla"), ("ring", "xla"), ("ring", "triton")])
@pytest.mark.parametrize("traced", [False, True])
def test_tables_of_long_sequences_are_narrow(strategy, implementation, traced, monkeypatch):
    """As wide as the most crowded row of a device, in which blocks in sequence at the end take one entry."""
    monkeypatch.setattr(tables, "WIDE", 8)
    monkeypatch.setattr(tables, "TRACED_WIDTH", 2)
    monkeypatch.setattr(tables, "LEAST_WIDTH", 2)
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


# --- where it stands


@strategies
def test_inside_of_shard_map(strategy):
    """Arrays are those of the shard, and so are the indices of batch and heads; positions are absolute."""
    mesh, (q, k, v) = drawn(CUBE, T=64)
    rows, order = P("data", "context", "model"), context_parallel.zigzag_order(2)
    bias = jnp.asarray(np.random.default_rng(1).normal(size=(2, 4, 64)), F32)
    mask = jflex.create_block_mask(MASKS["causal"], None, None, 64, 64, block_size=16)

    def whole(q, k, v, bias):
        mod = lambda s, b, h, i, j: s + bias[b, h, i]
        return jflex.flex_attention(q, k, v, mod, mask, return_lse=True, implementation="reference")

    def local(q, k, v, bias):
        mod = lambda s, b, h, i, j: s + bias[b, h, i]
        return jflex.context_parallel_attention(
            q, k, v, mod, mask, strategy=strategy, order=order, return_lse=True, implementation="xla"
        )

    sharded = jax.shard_map(
        local, mesh=mesh, in_specs=(rows,) * 3 + (P("data", "model"),), out_specs=(rows, P("data", "model", "context"))
    )

    def turned(q, k, v, bias):
        out, lse = sharded(*(context_parallel.reorder(x, order) for x in (q, k, v)), bias)
        return context_parallel.restore(out, order), context_parallel.restore(lse, order, 2)

    loss = lambda attend, *x: sum(jnp.sum(jnp.sin(y)) for y in attend(*x))
    run = lambda attend: jax.jit(jax.value_and_grad(functools.partial(loss, attend), argnums=range(4)))(q, k, v, bias)
    jax.tree.map(functools.partial(assert_close, rtol=2e-4), run(turned), run(whole))


@strategies
def test_dropout_inside_of_shard_map_is_that_of_one_device(strategy):
    mesh, (q, k, v) = drawn({"context": 4}, T=64)
    options = {"dropout_rate": 0.5, "dropout_key": jax.random.key(3), "implementation": "xla"}
    local = functools.partial(jflex.context_parallel_attention, strategy=strategy, **options)
    tokens = P(None, "context")
    sharded = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(tokens,) * 3, out_specs=tokens))
    plain = [jnp.asarray(np.asarray(x)) for x in (q, k, v)]
    assert_close(sharded(q, k, v), jflex.flex_attention(*plain, **options))


@strategies
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_eagerly_in_the_mesh_of_the_context(strategy, kind):
    mesh, arrays = drawn(kind=kind, T=64)
    with jax.set_mesh(mesh):
        options = {"mesh": None, "batch_axes": "data", "mask_mod": MASKS["causal"], "implementation": "xla"}
        found = jflex.context_parallel_attention(*arrays, strategy=strategy, **options)
    assert found.sharding.is_equivalent_to(arrays[0].sharding, 4)
    plain = [jnp.asarray(np.asarray(x)) for x in arrays]
    assert_close(found, jflex.flex_attention(*plain, mask_mod=MASKS["causal"], implementation="xla"))


def test_a_new_value_compiles_nothing(monkeypatch):
    """Mods of eager calls with the same program and other values are the same program of a device."""
    mesh, arrays = drawn(T=64)
    traces, on_device = [], running._on_device
    monkeypatch.setattr(running, "_on_device", lambda *x: traces.append(1) or on_device(*x))
    scaled = lambda slope: lambda s, b, h, i, j: s * slope
    run = lambda slope: attend_in(mesh, "ring")(*arrays, scaled(slope), mask_mod=MASKS["causal"])
    first, count = run(jnp.float32(1)), len(traces)
    second = run(jnp.float32(2))
    assert len(traces) == count > 0
    assert not np.allclose(first, second)


@strategies
def test_without_tokens(strategy):
    mesh, (q, k, v) = drawn(T=64)
    out, lse = attend_in(mesh, strategy, return_lse=True)(q, k[:, :0], v[:, :0])
    assert not np.asarray(out).any()
    assert (np.asarray(lse) == -np.inf).all()


@strategies
def test_second_derivatives_are_refused(strategy):
    mesh, arrays = drawn(T=64)
    run = jax.jit(lambda *x: jax.jvp(attend_in(mesh, strategy), x, x)[1])
    with pytest.raises(NotImplementedError, match=r"first derivatives in reverse mode only"):
        run(*arrays)


# --- orders


@given(
    st.integers(1, 4).flatmap(
        lambda chunks: st.tuples(st.permutations(range(4 * chunks)), st.integers(1, 3), st.just(4 * chunks))
    )
)
def test_an_order_is_undone(drawn):
    order, size, chunks = np.array(drawn[0]), drawn[1], drawn[2]
    x = np.random.default_rng(0).normal(size=(2, chunks * size, 3)).astype(np.float32)
    turned = context_parallel.reorder(x, order)
    where = context_parallel.positions(order, chunks * size)
    np.testing.assert_array_equal(turned, x[:, where])
    np.testing.assert_array_equal(context_parallel.restore(turned, order), x)


@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 2**31))
def test_a_balanced_order_is_a_permutation_no_worse_than_the_natural_one(shards, chunks, seed):
    """And of one chunk for each device no order is better: the largest stays."""
    rng = np.random.default_rng(seed)
    rows = shards * chunks
    states = (rng.random((1, 1, rows, rows)) < rng.random()).astype(int)
    counts = states.sum(-1)
    mask = jflex.BlockMask.from_kv_blocks(counts, np.argsort(-states, axis=-1, stable=True), block_size=16)
    order = context_parallel.balanced_order(mask, shards)
    np.testing.assert_array_equal(np.sort(order), np.arange(rows))
    balanced, natural = (context_parallel.device_costs(mask, shards, x) for x in (order, None))
    assert balanced.sum() == natural.sum() == counts.sum()
    # Graham's bound, with as many chunks for each device: no device has more than the mean and one largest chunk.
    assert balanced.max() <= natural.sum() / shards + counts.max(initial=0)


@settings(max_examples=8)
@given(st.permutations(range(8)))
def test_any_permutation_gives_the_same_attention(order):
    """Of one compiled shape: the order is part of the program, so few examples."""
    order = np.array(order)
    mesh, (q, k, v) = drawn({"context": 4}, T=64, heads=1)
    turned = [context_parallel.reorder(x, order) for x in (q, k, v)]
    found = attend_in(mesh, "ring", order=order, mask_mod=MASKS["causal"])(*turned)
    right = jflex.flex_attention(q, k, v, mask_mod=MASKS["causal"], implementation="reference")
    assert_close(context_parallel.restore(found, order), right)


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_reordered_tokens_are_sharded_as_before(kind, jitted):
    mesh, (x, *_) = drawn(T=64, kind=kind)
    turn = functools.partial(context_parallel.reorder, order=ZIGZAG)
    back = functools.partial(context_parallel.restore, order=ZIGZAG)
    with jax.set_mesh(mesh):
        turned = jax.jit(turn)(x) if jitted else turn(x)
        restored = jax.jit(back)(turned) if jitted else back(turned)
    np.testing.assert_array_equal(turned, np.asarray(x)[:, context_parallel.positions(ZIGZAG, 64)])
    np.testing.assert_array_equal(restored, x)
    if kind == AxisType.Explicit:
        assert jax.typeof(turned) == jax.typeof(restored) == jax.typeof(x)


@pytest.mark.parametrize("shards", [1, 2, 8])
def test_zigzag_balances_a_causal_mask(shards):
    mask = jflex.create_block_mask(MASKS["causal"], None, None, 64 * shards, 64 * shards, block_size=16)
    costs = context_parallel.device_costs(mask, shards, context_parallel.zigzag_order(shards))
    assert len(set(costs.tolist())) == 1
    order = context_parallel.balanced_order(mask, shards)
    assert len(set(context_parallel.device_costs(mask, shards, order).tolist())) == 1


def test_a_picture_of_the_costs(tmp_path):
    pytest.importorskip("matplotlib")
    mask = jflex.create_block_mask(MASKS["causal"], None, None, 128, 128, block_size=16)
    orders = {"natural": None, "zigzag": context_parallel.zigzag_order(4)}
    figure = context_parallel.costs_to_image(mask, 4, orders)
    figure.savefig(tmp_path / "costs.png")
    heights = [[bar.get_height() for bar in axis.patches] for axis in figure.axes]
    assert heights[0] == list(range(1, 9))
    assert heights[1] == [3, 7, 11, 15]
    assert heights[2] == [1, 8, 2, 7, 3, 6, 4, 5]
    assert heights[3] == [9, 9, 9, 9]
    assert [axis.get_title() for axis in figure.axes[1::2]] == ["largest / mean: 1.67", "largest / mean: 1.00"]


# --- without it


DENSE = {
    "nothing": {},
    "lists": {"block_mask": 32},
    "learned": {"block_mask": 16, "score_mod": lambda c: lambda s, b, h, q, k: s * c[h] + c[0] * (q - k).astype(F32)},
    "sinks and lengths": {"kv_lengths": jnp.array([100, 200], jnp.int32), "sinks": lambda c: c},
    "dropout in the other layout": {"layout": "BNTH", "dropout_rate": 0.3, "dropout_key": jax.random.key(0)},
}


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

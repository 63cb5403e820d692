"""`explain` and the calls agree: what it names is what runs, in every case of the tables, and errors are the same."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jflex
from jflex import entry
from jflex._call.dispatch import get_backend
from jflex._jax import custom_vjp
from jflex.backends.base import Gradients, Saved
from jflex.backends.reference import Reference
from jflex.masks import causal
from jflex.paged import PagedBatch, PagedCache, token_positions, token_requests
from pallas_kernels.plan import all_gradients
from tests.calls import test_cascade
from tests.cases import paged_cases, ragged_cases
from tests.cases.errors import calls, mods, packed, paged
from tests.support import gpu_compile, paged_evaluation
from tests.support.rows import in_turns, tiers

INTERPRETED = {"implementation": "triton", "config": jflex.Config(interpret=True)}
BACKENDS = ["reference", "xla", "triton-interpret"]
CALLS = {name: getattr(jflex, name) for name in ("paged_attention", "flex_attention_varlen", "cascade_attention")}
explain = jflex.explain


class Run(NamedTuple):
    """A pass that ran."""

    backend: str
    spec: Any
    inputs: Any
    is_backward: bool


@pytest.fixture
def ran(monkeypatch) -> list[Run]:
    """The passes that run, in order; instead of them zeros are returned."""
    runs = []

    def zeros(spec):
        return Saved(jnp.zeros(spec.out_shape(), spec.out_dtype), jnp.zeros(spec.lse_shape(), jnp.float32))

    def run(op, arrays):
        is_backward = isinstance(op, custom_vjp.BackwardOp)
        runs.append(Run(op.backend, op.spec, arrays, is_backward))
        if not is_backward:
            return zeros(op.spec)
        given, _, _ = arrays
        captured = zip(given.captured.score, op.requested.score_operands, strict=True)
        grads = (jnp.zeros_like(x) for x in (given.query, given.key, given.value))
        return Gradients(*grads, tuple(jnp.zeros_like(x) if wanted else None for x, wanted in captured))

    def forward(self, spec, inputs):
        runs.append(Run(self.name, spec, inputs, False))
        return zeros(spec)

    monkeypatch.setattr(Reference, "forward", forward)
    for module in (custom_vjp, entry):
        monkeypatch.setattr(module, "call_as_primitive", run)
    return runs


def explained(monkeypatch, calls) -> list[Any]:
    """The accounts of the calls of attention that follow, taken before each is made."""
    accounts = []

    def spy(call, *args, **kwargs):
        accounts.append(explain(call, *args, **kwargs))
        return call(*args, **kwargs)

    for name, call in calls.items():
        monkeypatch.setattr(jflex, name, functools.partial(spy, call))
    return accounts


@pytest.fixture
def told(monkeypatch) -> list[Any]:
    accounts = explained(monkeypatch, CALLS)
    monkeypatch.setattr(ragged_cases, "flex_attention_varlen", jflex.flex_attention_varlen)
    return accounts


def as_shapes(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def agree(account, run: Run) -> None:
    """Fails unless the account is of the pass that ran."""
    assert account.backend == run.backend
    assert account.config == run.spec.config
    requested = None if run.spec.paging is not None else all_gradients(run.spec)
    assert account.tiles == get_backend(run.backend).plan(run.spec, requested).describe()


# --- the case tables


@tiers(rest="full", in_turns=True, share=2)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", ragged_cases.CASES, ids=str)
def test_packed_cases(case, backend, told, ran):
    drawn, ends, floats = ragged_cases.arguments_of(case)
    ragged_cases.attend(case, backend, drawn, ends, drawn.query, drawn.key, drawn.value, floats)
    [account], [run] = told, ran
    agree(account, run)
    lists, heads = run.inputs.lists, run.spec.Hq // run.inputs.lists.kv_num_blocks.shape[1]
    found = [heads * int(x.sum()) for x in (lists.kv_num_blocks, lists.full_kv_num_blocks)]
    assert [account.partial, account.full, account.visited] == [*found, sum(found)]
    jax.eval_shape(ragged_cases.program_of(case, backend), drawn, ends, floats)
    in_backward = [run.backend for run in ran if run.is_backward]
    assert in_backward == ([] if backend == "reference" else [account.gradients])
    assert told[1].tiles == account.tiles


@tiers(default={"case": "mixed", "backend": "triton-interpret"}, in_turns=True)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", paged_cases.CASES, ids=str)
def test_paged_cases(case, backend, told, ran):
    x, (cache, table) = paged_evaluation.draw(case), paged_evaluation.placed(case)
    layer = None if case.layers is None else paged_evaluation.LAYER
    captured = jax.tree.map(jnp.asarray, x.captured)
    paged_evaluation.call(case, backend, x.query, cache, paged_evaluation.batch_of(case, table), captured, layer)
    [account], [run] = told, ran
    agree(account, run)
    assert account.gradients == ("reference" if backend == "reference" else None)
    assert (account.requests, account.rows, account.queries) == (case.R, case.N, sum(case.queries))
    assert (account.keys, account.pages) == (sum(case.lengths), sum(map(case.pages_of, case.lengths)))
    assert account.different_pages == account.pages
    if backend == "triton-interpret":
        tiles_of_requests = sum(n > 0 for n in case.queries)
        assert account.splits >= account.query_tiles >= tiles_of_requests
    else:
        assert (account.query_tiles, account.splits) == (None, None)


@pytest.mark.full
@in_turns
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("levels", [test_cascade.dense_levels, test_cascade.paged_levels])
@pytest.mark.parametrize("tree", test_cascade.TREES)
def test_cascade_cases(tree, levels, backend, told, ran):
    x = test_cascade.drawn(tree)
    jflex.cascade_attention(
        jnp.asarray(x.q), levels(tree), positions=token_positions(x.batch, len(x.q)),
        requests=token_requests(x.batch, len(x.q)), **test_cascade.MODS["alibi"].given,
        **test_cascade.BACKENDS[backend],
    )  # fmt: skip
    [account] = told
    for level, run in zip(account.levels, ran, strict=True):
        agree(level, run)
    assert [level.keys for level in account.levels] == [
        sum(keys for _, keys in groups) for groups in test_cascade.TREES[tree].levels
    ]
    assert account.merged == len(ran)


def test_kernels_are_launched_with_the_tiles_that_are_named(told, ran, monkeypatch):
    from pallas_kernels.triton import launch

    launched, original = [], launch.Runner.launch
    monkeypatch.setattr(launch.Runner, "launch", lambda *args, **how: launched.append(how) or original(*args, **how))
    case = next(case for case in paged_cases.CASES if case.name == "mixed")
    x, (cache, table) = paged_evaluation.draw(case), paged_evaluation.placed(case)
    paged_evaluation.call(case, "triton-interpret", x.query, cache, paged_evaluation.batch_of(case, table), x.captured)
    [account], [run] = told, ran
    jax.eval_shape(lambda: get_backend("triton").forward(run.spec, run.inputs))
    tiles = [how["tiles"] for how in launched if how["name"] == "jflex_paged"]
    assert len(tiles) == account.tiles.count("paged") == 2
    for each in tiles:
        named = f"paged {each.block_q} x {each.block_kv} ({each.num_warps} warps, {each.num_stages} stages, by rule)"
        assert named in account.tiles


# --- errors


TABLES = [
    *(("paged", *row[:2]) for row in paged.ROWS),
    *(("packed", *row[:2]) for row in packed.ROWS),
    *(("dense", *row[:2]) for row in calls.ROWS if "call" in row[1].__code__.co_names),
    *(("mods", *row[:2]) for row in mods.ROWS),
]


@tiers(default={"provoke": ["paged-cpu", "packed-cascade_positions", "packed-plain_mask"]})
@pytest.mark.parametrize("provoke", [pytest.param(row[2], id=f"{row[0]}-{row[1]}") for row in TABLES])
def test_wrong_calls_give_the_errors_of_the_call(provoke, monkeypatch):
    with pytest.raises((TypeError, ValueError, jflex.UnsupportedError)) as by_call:
        provoke()
    accounts = explained(monkeypatch, {**CALLS, "flex_attention": jflex.flex_attention})
    with pytest.raises(by_call.type) as by_explain:
        provoke()
    assert str(by_explain.value) == str(by_call.value)
    if by_call.type is not jflex.UnsupportedError or "_mod` is not supported by" in str(by_call.value):
        assert not accounts  # what no implementation has is refused before one is asked
        return
    [account] = accounts
    assert account.backend is None
    assert all(f"{name}: {reason}" in str(by_call.value) for name, reason in account.reasons.items())


# --- shapes, tracers, partial functions

CACHE = PagedCache.create(12, 16, 2, 16, dtype=jnp.float32)
BATCH = PagedBatch(jnp.array([0, 3, 4]), jnp.array([20, 100]), jnp.array([[1, 2, *[0] * 5], [1, *range(3, 9)]]))
QUERY = jnp.zeros((5, 4, 16))


@pytest.mark.full
def test_shapes_of_arrays_give_the_account_of_arrays():
    attend = functools.partial(explain, jflex.paged_attention, mask_mod=causal(), **INTERPRETED)
    assert attend(as_shapes(QUERY), as_shapes(CACHE), BATCH) == attend(QUERY, CACHE, BATCH)
    ends = jnp.array([0, 40, 90], jnp.int32)
    packed = functools.partial(
        explain, jflex.flex_attention_varlen, cu_seqlens_q=ends, cu_seqlens_k=ends, mask_mod=causal()
    )
    x = jnp.zeros((100, 4, 16))
    assert packed(*as_shapes((x, x, x))) == packed(x, x, x) == packed(*map(np.asarray, (x, x, x)))
    dense = jnp.zeros((1, 32, 2, 16))
    level = functools.partial(jflex.CascadeLevel.dense, qo_indptr=jnp.array([0, 5]))
    cascade = functools.partial(explain, jflex.cascade_attention)
    assert cascade(as_shapes(QUERY), [level(as_shapes(dense), as_shapes(dense))]) == cascade(
        QUERY, [level(dense, dense)]
    )


@pytest.mark.full
@pytest.mark.parametrize("form", ["shapes", "traced"])
def test_what_is_not_known_is_said_to_be_so(form):
    accounts = []

    def attend(q, cache, batch, ends, levels, positions):
        how = {"mask_mod": causal(), **INTERPRETED}
        accounts.append(explain(jflex.paged_attention, q, cache, batch, **how))
        accounts.append(
            explain(jflex.flex_attention_varlen, q, q, q, cu_seqlens_q=ends, cu_seqlens_k=ends, score_mod=by_b, **how)
        )
        accounts.append(explain(jflex.cascade_attention, q, levels, positions=positions, **how))
        return q

    bias = jnp.zeros(2)
    by_b = lambda s, b, h, q, k: s + bias[b]
    k = jnp.zeros((1, 32, 2, 16))
    level = jflex.CascadeLevel.dense(k, k, qo_indptr=jnp.array([0, 5]))
    given = QUERY, CACHE, BATCH, jnp.array([0, 3, 5], jnp.int32), [level, level], jnp.arange(5)
    if form == "shapes":
        attend(*as_shapes(given))
    else:
        jax.eval_shape(attend, *given)
    attend(*given)
    for account, known in zip(accounts[:3], accounts[3:], strict=True):
        pairs = zip(*(getattr(x, "levels", (x,)) for x in (account, known)), strict=True)
        assert all((one.backend, one.tiles) == (other.backend, other.tiles) for one, other in pairs)
    paged, packed, cascade = accounts[:3]
    assert [paged.queries, paged.keys, paged.pages, paged.splits, paged.flops, paged.bytes] == [None] * 6
    assert [packed.visited, packed.full, packed.partial, packed.blocks] == [None] * 4
    assert [cascade.flops, cascade.bytes, cascade.levels[0].keys] == [None] * 3
    assert str(paged).count("not known") == 5
    assert "not counted" in str(packed)
    assert str(cascade).endswith("not known in all")


@pytest.mark.full
def test_counts_tiles_of_a_mask_that_bounds_the_walk():
    x, mask = jax.ShapeDtypeStruct((2, 512, 4, 64), jnp.bfloat16), jflex.masks.sliding_window(100, 0)
    of_tiles = explain(x, x, x, mask_mod=mask, **INTERPRETED)
    of_blocks = explain(
        x, x, x, block_mask=jflex.create_block_mask(mask, None, None, 512, 512, block_size=64), **INTERPRETED
    )
    counts = [(x.visited, x.full, x.partial, x.blocks, x.flops) for x in (of_tiles, of_blocks)]
    assert counts[0] == counts[1]
    assert "skipped" in str(of_tiles)
    assert explain(x, x, x, mask_mod=mask, implementation="xla").visited is None


@pytest.mark.full
def test_known_values_count_under_jit():
    """Arrays that a jitted function closes over, of which nothing may be computed by the program."""
    mask = jflex.create_block_mask(causal(), None, None, 256, 256)
    x, lengths = jnp.zeros((1, 256, 2, 16)), jnp.array([130], jnp.int32)
    taken = lambda: (
        explain(x, x, x, block_mask=mask, kv_lengths=lengths, implementation="xla"),
        explain(jflex.paged_attention, QUERY, CACHE, BATCH, **INTERPRETED),
    )
    found = []
    jax.eval_shape(lambda: found.append(taken()))
    assert found == [taken()]
    assert found[0][0].visited == 6
    assert found[0][1].splits == 3


def test_a_partial_function_is_looked_into():
    attend = functools.partial(functools.partial(jflex.paged_attention, mask_mod=causal()), cache=CACHE)
    assert explain(attend, QUERY, batch=BATCH).keys == 120
    x = jax.ShapeDtypeStruct((1, 64, 2, 16), jnp.float32)
    assert explain(jflex.flex_attention, x, x, value=x) == explain(query=x, key=x, value=x)


# --- what is said


@pytest.mark.full
def test_on_a_gpu():
    q, levels = jax.ShapeDtypeStruct((64, 32, 128), jnp.bfloat16), []
    for shape, start in (((1, 8192, 8, 128), 0), ((64, 256, 8, 128), 8192)):
        k = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        ends = jnp.arange(0, 65, 64 // shape[0], dtype=jnp.int32)
        levels.append(jflex.CascadeLevel.dense(k, k, qo_indptr=ends, start=start))
    with gpu_compile.absent_gpu():
        account = explain(jflex.cascade_attention, q, levels)
    first, second = account.levels
    assert (first.backend, first.splits, first.query_tiles) == ("triton", 32, 4)
    assert (second.backend, second.splits, second.query_tiles) == ("triton", 64, 64)
    out = 64 * 32 * 128
    assert first.bytes == 2 * out + 4 * out + 2 * 2 * 8192 * 8 * 128  # queries, outputs in float32, keys and values
    assert first.flops == 2 * 64 * 32 * 8192 * (128 + 128)
    assert account.merge_bytes == 2 * 4 * (out + 64 * 32) + 2 * out + 4 * 64 * 32
    assert account.bytes == first.bytes + second.bytes + account.merge_bytes
    is_new = jax.__version_info__ >= (0, 11)
    reason = "not mosaic_gpu: it" + ("s kernel for few queries takes up to" if is_new else " needs JAX 0.11")
    for part in ("level 1", reason, "stages, by rule)",
                 "gradients none, because `cascade_attention` has no derivative on 'triton'",
                 "splits    32 of the keys of 4 query tiles", "merge     2 partial outputs"):  # fmt: skip
        assert part in str(account)


def test_tiles_of_the_user():
    config = jflex.Config(decode=jflex.Tiles(16, 32, 8, 3), interpret=True)
    account = explain(jflex.paged_attention, QUERY, CACHE, BATCH, implementation="triton", config=config)
    assert "x 32 (8 warps, 3 stages, by config)" in account.tiles
    assert "config    decode=Tiles(block_q=16, block_kv=32, num_warps=8, num_stages=3), interpret=True" in str(account)
    both = explain(jflex.paged_attention, jnp.zeros((40, 4, 16)), CACHE, BATCH, implementation="triton", config=config)
    assert "by config) for up to 16 queries of a request, paged" in both.tiles
    assert both.tiles.endswith("by rule) for more")


def test_levels_and_calls_without_keys():
    empty = PagedBatch(jnp.zeros(1, jnp.int32), jnp.zeros(0, jnp.int32), jnp.zeros((0, 4), jnp.int32))
    account = explain(jflex.paged_attention, QUERY, CACHE, empty, implementation="xla")
    assert (account.backend, account.keys, account.bytes, account.gradients) == ("xla", 0, 4 * 2 * 5 * 4 * 16, None)
    assert "nothing is computed" in account.tiles
    k = jnp.zeros((1, 4, 2, 16))
    level = jflex.CascadeLevel.dense(k, k, qo_indptr=jnp.array([0, 5]))
    nothing = jflex.CascadeLevel.dense(k[:, :0], k[:, :0], qo_indptr=jnp.array([0, 5]), start=4)
    account = explain(jflex.cascade_attention, QUERY, [nothing, level])
    assert account.levels[0] is None
    assert (account.merged, account.merge_bytes) == (1, 0)
    assert "left out: nothing is computed" in str(account)
    assert "merge     none" in str(account)
    assert str(explain(jflex.cascade_attention, QUERY, [])).startswith("merge     none")

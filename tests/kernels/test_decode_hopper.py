"""The decoding kernel for Hopper, over contiguous keys and over pages: emulated, compiled without a GPU, refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jflex
from pallas_kernels.mosaic_gpu import smem, split_kv, work_items
from pallas_kernels.mosaic_gpu.decode import kernel, step
from pallas_kernels.mosaic_gpu.decode.sizes import Packing
from pallas_kernels.spec import Paging
from pallas_kernels.split_kv import items as hopper_items
from pallas_kernels.split_kv.work import RequestExtents
from tests.cases.decode_hopper_cases import DENSE, PAGED
from tests.cases.paged_cases import PagedCase
from tests.support import evaluation, gpu_compile, hopper_emulator, hopper_faults, paged_evaluation
from tests.support.hopper_emulator import emulated
from tests.support.rows import in_turns, tiers
from tests.support.specs import spec_of

NEEDS_011 = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="Mosaic GPU is used from JAX 0.11 on")
BACKEND = "mosaic_gpu"
DIVIDED = PAGED[1]
LONG = PagedCase("hopper_long", (1,), (1600,), Hq=2, Hkv=2, D=128, page_size=64, dtype="bfloat16")
LONG_TILES = 20  # that the producer of a CTA loads, and more: a barrier of six stages passes a third phase


def attend(case, seed=0):
    """Out and lse of a paged case in the emulator."""
    x, (cache, table) = paged_evaluation.draw(case), paged_evaluation.placed(case, seed)
    layer = None if case.layers is None else jnp.int32(paged_evaluation.LAYER)
    captured = jax.tree.map(jnp.asarray, x.captured)
    batch = paged_evaluation.batch_of(case, table)
    with emulated():
        return paged_evaluation.call(case, f"{BACKEND}-interpret", jnp.asarray(x.query), cache, batch, captured, layer)


# --- results


@tiers(default={"case": "hopper_head_sizes_80_48_bfloat16"})
@pytest.mark.parametrize("case", PAGED, ids=str)
def test_pages_against_float64(case):
    paged_evaluation.check(case, attend(case))


@pytest.mark.gpu
@pytest.mark.parametrize("case", PAGED, ids=str)
def test_pages_on_a_gpu(case):
    paged_evaluation.check(case, paged_evaluation.run(case, BACKEND))


def contiguous(case, backend):
    """Out and lse of a dense case, without gradients."""
    x = jax.tree.map(jnp.asarray, evaluation.poisoned(case))
    return evaluation.Results(*evaluation.call(case, backend, x.query, x.key, x.value, x.score, x.mask, None))


@tiers(default={"case": "dense_one_tile"})
@pytest.mark.parametrize("case", DENSE, ids=str)
def test_contiguous_keys_against_float64(case):
    with emulated():
        found = contiguous(case, f"{BACKEND}-emulated")
    evaluation.compare_forward(case, found, evaluation.plain(case), evaluation.exact(case))


@pytest.mark.gpu
@pytest.mark.parametrize("case", DENSE, ids=str)
def test_contiguous_keys_on_a_gpu(case):
    found = jax.jit(functools.partial(contiguous, case, BACKEND))()
    evaluation.compare_forward(case, found, evaluation.plain(case), evaluation.exact(case))


@pytest.mark.full
@pytest.mark.parametrize("case", [DENSE[3], DENSE[11]], ids=str)
def test_gradients_are_of_the_same_forward_pass(case):
    """The backward kernels take the lse of the decoding kernel."""
    names = evaluation.gradients_of(case)
    evaluation.check_gradients(case, f"{BACKEND}-emulated", names)


@pytest.mark.full
def test_where_pages_lie_changes_no_bit():
    first, second = (attend(DIVIDED, seed) for seed in (0, 1))
    for x, y in zip(first, second, strict=True):
        np.testing.assert_array_equal(np.asarray(x.astype(jnp.float32)), np.asarray(y.astype(jnp.float32)))


WINDOW_OF_20 = lambda b, h, i, j: (i >= j) & (i - j < 20)


@pytest.mark.full
@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "pages"])
def test_nan_that_a_window_hides(paged):
    """The kernels of Triton repair what it reaches."""
    rng, S = np.random.default_rng(2), 192
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
    q, k, v = draw(1, 2, 4, 64), draw(1, S, 2, 64), draw(1, S, 2, 64)
    options = {"return_lse": True, **paged_evaluation.options_of(f"{BACKEND}-interpret")}

    def found(value):
        keys, values = (x.at[:, 128:170].set(value) for x in (k, v))
        with emulated():
            if not paged:
                mask = jflex.with_offset(WINDOW_OF_20, S - 2)
                return jflex.flex_attention(q, keys, values, mask_mod=mask, **options)
            integers = lambda *x: jnp.asarray(x, jnp.int32)
            pages = (jnp.pad(x.reshape(-1, 16, 2, 64), ((1, 0), (0, 0), (0, 0), (0, 0))) for x in (keys, values))
            table = 1 + jnp.arange(S // 16, dtype=jnp.int32)[None]
            batch = jflex.paged.PagedBatch(integers(0, 2), integers(S), table)
            return jflex.paged_attention(q[0], jflex.paged.PagedCache(*pages), batch, mask_mod=WINDOW_OF_20, **options)

    for x, y in zip(found(np.nan), found(0), strict=True):
        assert np.isfinite(np.asarray(x, np.float32)).all()
        np.testing.assert_allclose(np.asarray(x, np.float32), np.asarray(y, np.float32), rtol=1e-2, atol=1e-2)


# --- order


@pytest.mark.full
@pytest.mark.parametrize("case", [DIVIDED, DENSE[0]], ids=str)
def test_in_time_whatever_tma_takes(monkeypatch, case):
    monkeypatch.setattr(hopper_emulator, "TMA_IS_LATE", True)
    if case is DIVIDED:
        paged_evaluation.check(case, attend(case))
    else:
        test_contiguous_keys_against_float64(case)


@pytest.mark.full
def test_the_emulator_notices_keys_that_are_not_waited_for(monkeypatch):
    monkeypatch.setattr(hopper_emulator, "TMA_IS_LATE", True)
    hopper_faults.leave_out_waits(monkeypatch, step.DecodeStep, "__call__")
    with pytest.raises(AssertionError):
        paged_evaluation.check(DIVIDED, attend(DIVIDED))


@pytest.mark.full
def test_the_emulator_notices_stages_that_are_filled_while_they_are_read(monkeypatch):
    hopper_faults.leave_out_waits(monkeypatch, kernel, "_load", held=(step.DecodeStep, "__call__"), runs=LONG_TILES)
    with pytest.raises(AssertionError):
        paged_evaluation.check(LONG, attend(LONG))


# --- compiled for a GPU


def paged_program(T=1, B=32, Hq=32, Hkv=8, D=128, Dv=None, page=64, dtype=jnp.bfloat16, **options):
    """A call over requests of up to 4096 keys, and the shapes of its arguments."""
    integers = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
    pages = lambda size: jax.ShapeDtypeStruct((8193, page, Hkv, size), dtype)
    batch = jflex.paged.PagedBatch(integers(B + 1), integers(B), integers(B, 4096 // page))
    call = functools.partial(jflex.paged_attention, **{"implementation": BACKEND, **options})
    cache = jflex.paged.PagedCache(pages(D), pages(Dv or D))
    return call, jax.ShapeDtypeStruct((B * T, Hq, D), dtype), cache, batch


def dense_program(T=1, B=8, Hq=32, Hkv=8, S=16384, D=128, Dv=None, dtype=jnp.bfloat16, lengths=False, **options):
    """A call over contiguous keys, and the shapes of its arguments."""
    array = lambda length, heads, size: jax.ShapeDtypeStruct((B, length, heads, size), dtype)
    options = {"implementation": BACKEND, **options}
    call = lambda q, k, v, *lengths: jflex.flex_attention(
        q, k, v, kv_lengths=lengths[0] if lengths else None, **options
    )
    given = [jax.ShapeDtypeStruct((B,), jnp.int32)] if lengths else []
    return call, array(T, Hq, D), array(S, Hkv, D), array(S, Hkv, Dv or D), *given


SLOPES = jnp.linspace(0.0, 1.0, 32)
WINDOW = lambda b, h, q, k: (q >= k) & (q - k < 256)
ALIBI = lambda s, b, h, q, k: s - SLOPES[h] * (q - k).astype(jnp.float32)
COMPILED = {
    "paged": (paged_program, {}),
    "paged_causal": (paged_program, {"T": 4, "mask_mod": jflex.masks.causal(), "return_lse": True}),
    "paged_alibi": (paged_program, {"score_mod": ALIBI}),
    "paged_window": (paged_program, {"T": 2, "mask_mod": WINDOW}),
    "paged_64": (paged_program, {"D": 64, "Hq": 16, "Hkv": 16, "dtype": jnp.float16}),
    "paged_192_128": (paged_program, {"D": 192, "Dv": 128}),
    "paged_256": (paged_program, {"D": 256}),
    "pages_of_8": (paged_program, {"page": 8}),
    "pages_of_16": (paged_program, {"page": 16}),
    "dense": (dense_program, {}),
    "dense_64": (dense_program, {"D": 64, "Hq": 16, "Hkv": 16, "B": 4}),
    "dense_softcap": (dense_program, {"score_mod": lambda s, b, h, q, k: 30 * jnp.tanh(s / 30)}),
    "dense_lengths": (dense_program, {"lengths": True, "score_mod": ALIBI, "mask_mod": WINDOW, "T": 4}),
}
KNOWN_SPILLS = {"paged_256": 84}


@tiers(full={"name": ["paged_causal", "pages_of_16", "dense", "dense_lengths"]}, rest="long")
@NEEDS_011
@pytest.mark.skipif(gpu_compile.missing() is not None, reason="compiles for a GPU")
@pytest.mark.parametrize("name", COMPILED)
def test_spills_nothing(name):
    program, options = COMPILED[name]
    kernels = gpu_compile.compile_kernels(*program(**options))
    [found] = [x for x in kernels if "decode_sm90" in x.name]
    assert found.spill <= KNOWN_SPILLS.get(name, 0)
    assert found.tensor == "wgmma"
    assert found.shared <= smem.LIMIT
    merged_and_planned = {x.name for x in kernels} - {found.name}
    planned = {"jflex_paged_plan"} if "paged" in name or name.startswith("pages") or "lengths" in name else set()
    assert {"jflex_paged_merge", *planned} <= merged_and_planned
    assert bool(planned) == ("jflex_paged_plan" in merged_and_planned)  # without lengths and a mask, the host plans


@pytest.mark.full
@NEEDS_011
@pytest.mark.skipif(gpu_compile.missing() is not None, reason="compiles for a GPU")
def test_shared_memory_is_known_from_what_is_declared(monkeypatch):
    known, launch = [], split_kv.launch

    def noted(*args, **more):
        known.append(smem.bytes_of(jax.tree.leaves(args[3])))
        return launch(*args, **more)

    monkeypatch.setattr(split_kv, "launch", noted)
    [found] = [x for x in gpu_compile.compile_kernels(*paged_program(Hkv=4)) if "decode_sm90" in x.name]
    assert known[-1] == found.shared
    registers = split_kv.CONSUMERS * kernel.CONSUMER_REGISTERS + kernel.PRODUCER_REGISTERS
    assert registers <= 65536 // smem.WARP_GROUP_THREADS


# --- what is selected, and what is refused


@pytest.mark.full
@NEEDS_011
@pytest.mark.parametrize("program", [paged_program, dense_program])
def test_triton_is_preferred(program):
    _, *arrays = program()
    with gpu_compile.absent_gpu():
        account = jflex.explain(attention_of(program), *arrays, implementation=None)
    assert account.backend == "triton"
    assert "up to 12 % longer" in account.reasons[BACKEND]


def attention_of(program):
    return jflex.paged_attention if program is paged_program else jflex.flex_attention


@NEEDS_011
@pytest.mark.parametrize(
    ("program", "sizes", "tiles"),
    [
        (paged_program, {}, "paged 64 x 64 (8 warps that compute, 4 stages, 4 heads)"),
        (dense_program, {"T": 4}, "decode 64 x 64 (8 warps that compute, 4 stages, 4 heads)"),
        (dense_program, {"D": 64}, "decode 64 x 64 (8 warps that compute, 8 stages, 4 heads)"),
    ],
)
def test_explain_names_the_tiles(program, sizes, tiles):
    _, *arrays = program(**sizes)
    with gpu_compile.absent_gpu():
        found = jflex.explain(attention_of(program), *arrays, implementation=BACKEND).tiles
    assert found.startswith(tiles)
    assert ("dkv" in found, "forward" in found) == (program is dense_program, False)  # gradients have kernels, too


ROTATED = {"key_mod": jflex.rope()}
REFUSALS = [
    ("dtype", {"dtype": jnp.float32}, "compute in bfloat16 or float16, not float32"),
    ("head size", {"D": 72}, "head sizes that are a multiple of 16 up to 256, not 72 and 72"),
    ("large head", {"D": 272}, "up to 256, not 272 and 272"),
    ("page size", {"page": 4}, "takes pages of 8, 16 or 32 keys or of a multiple of 64, not of 4"),
    ("odd page size", {"page": 48}, "not of 48"),
    ("group", {"Hq": 128, "Hkv": 1}, "tiles hold 64 query heads of a key head, not 128"),
    ("vector mod", ROTATED, "loads keys and values by TMA, and so applies no `key_mod` or `value_mod`"),
    ("statistics", {"return_stats": ("max",)}, "neither dropout, statistics of rows nor weights without a softmax"),
    ("sigmoid", {"normalize": "none"}, "nor weights without a softmax"),
    ("tiles", {"config": jflex.Config(decode=jflex.Tiles(64, 32, 8))}, "`config` sets tiles, .*: 64 rows by 64 keys"),
    ("invariant", {"config": jflex.Config(batch_invariant=True)}, "divide keys by the number of SMs"),
    (
        "a primitive",
        {"score_mod": lambda s, b, h, q, k: s + jax.lax.population_count(q ^ k).astype(jnp.float32)},
        "`score_mod` .* primitive `population_count` has no lowering for Mosaic GPU",
    ),
]


@NEEDS_011
@pytest.mark.parametrize(("sizes", "message"), [row[1:] for row in REFUSALS], ids=[row[0] for row in REFUSALS])
def test_refuses_pages(sizes, message):
    call, *arrays = paged_program(**sizes)
    with pytest.raises(jflex.UnsupportedError, match=message), gpu_compile.absent_gpu():
        jax.jit(call).trace(*arrays)


@NEEDS_011
def test_refuses_eight_bits():
    call, q, _, batch = paged_program()
    cache = jax.eval_shape(lambda: jflex.paged.PagedCache.create(9, 64, 8, 128, dtype=jnp.float8_e4m3fn))
    message = "takes no eight bits, and these have float8_e4m3fn"
    with pytest.raises(jflex.UnsupportedError, match=message), gpu_compile.absent_gpu():
        jax.jit(call).trace(q, cache, batch)


@NEEDS_011
@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"S": 1000 + 4}, "TMA loads 8 keys at once, and S is 1004"),
        ({"block_mask": jflex.BlockMask}, "takes no lists of blocks"),
        ({"return_stats": ("max",)}, "neither dropout, statistics of rows"),
        ({"config": jflex.Config(batch_invariant=True)}, "is not batch invariant"),
    ],
    ids=["odd length", "block mask", "statistics", "invariant"],
)
def test_of_contiguous_keys_the_forward_kernel_runs_the_rest(sizes, reason):
    _, *arrays = dense_program(**{"S": 1024, **({} if "block_mask" in sizes else sizes)})
    options = {name: x for name, x in sizes.items() if name != "S"}
    if "block_mask" in options:
        options["block_mask"] = jflex.create_block_mask(lambda b, h, q, k: k < 700, None, None, 1, 1024)
    with gpu_compile.absent_gpu():
        named = jflex.explain(jflex.flex_attention, *arrays, implementation=BACKEND, **options)
        chosen = jflex.explain(jflex.flex_attention, *arrays, **options)
    assert named.tiles.startswith("forward ")
    assert (chosen.backend, reason in chosen.reasons[BACKEND]) == ("triton", True)


def test_packing():
    spec = lambda **sizes: spec_of(S=4096).replace(**sizes)
    paged = {"paging": Paging(64, 8193)}
    assert Packing.from_spec(spec(Hq=32, Hkv=8, T=32, **paged)) == (4, 16)
    assert Packing.from_spec(spec(Hq=5, Hkv=1, T=32, **paged)) == (5, 12)
    assert Packing.from_spec(spec(Hq=32, Hkv=8, B=20, T=30, **paged)) == (4, 2)
    assert Packing.from_spec(spec(Hq=32, Hkv=8, T=3)) == (4, 3)
    assert [Packing(4, 1).rows, Packing(4, 16).rows, Packing(5, 12).rows] == [16, 64, 64]


@pytest.mark.full
@in_turns
@pytest.mark.parametrize("lengths", [(4096,) * 8, (16384,), (64, 0, 4096, 700)])
@pytest.mark.parametrize("queries", [1, 4])
def test_items_of_the_host_are_those_of_the_kernel(lengths, queries):
    """Of lengths that are known, without a mask: items, splits, slots."""
    R, indptr = len(lengths), np.arange(len(lengths) + 1, dtype=np.int32) * queries
    config = jflex.Config(interpret=True)
    spec = spec_of(B=R, T=R * queries, S=max(lengths), Hq=32, Hkv=8).replace(config=config)
    work = hopper_items.work_of(16, 64, queries)
    extents = RequestExtents(indptr, np.array(lengths, np.int32))
    items, slots = hopper_items.items_on_host(spec, work, extents)
    planned = np.asarray(hopper_items.work_items(spec, work, RequestExtents(*map(jnp.asarray, extents)), ()))
    np.testing.assert_array_equal(planned[: len(items)], items)
    assert slots == 1 + max(items[:, 6].max(), -1)
    assert slots <= work.slots(spec)


@pytest.mark.parametrize("total", [0, 1, 5, 6, 11, 12, 13])
def test_every_item_is_taken_once(monkeypatch, total):
    """Also of a last round that is not full, in either direction."""
    monkeypatch.setattr(work_items, "NUM_SMS", 3)
    items, taken = jnp.full((max(total, 1), work_items.FIELDS), total, jnp.int32), []
    items = items.at[:, 0].set(jnp.arange(max(total, 1)))

    def body(i, item, count):
        taken.append((int(item.request), int(item.group)))
        return count + 1

    with jax.disable_jit():
        counts = [int(work_items.over_items(items, 2, jnp.int32(cta), body)) for cta in range(3)]
    assert sorted(taken) == [(request, group) for request in range(total) for group in range(2)]
    assert max(counts) - min(counts) <= 1

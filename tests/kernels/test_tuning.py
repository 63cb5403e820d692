"""Measured tiles: the order in which they are looked for, their buckets, the committed tables, and the search."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

import jflex
from benchmarks import tune
from benchmarks.problems import square
from jflex.backends.gpu import triton
from jflex.mods.trace import trace_mask_mod, trace_score_mod
from pallas_kernels.config import Tiles
from pallas_kernels.mosaic_gpu.plan import plan as mosaic_plan
from pallas_kernels.plan import TileChoice, all_gradients
from pallas_kernels.program.build import IndexRanges, trace_program
from pallas_kernels.spec import Blocks, Paging
from pallas_kernels.split_kv import plan as paged_plan
from pallas_kernels.triton.plan import plan as triton_plan
from pallas_kernels.tuning import tables
from tests.support import gpu_compile
from tests.support.rows import in_turns
from tests.support.specs import forget_plans, spec_of

pytestmark = pytest.mark.full

CONFIG, GIVEN = jflex.Config(), jflex.Config(forward=jflex.Tiles(64, 64))
TABLES = sorted(path.stem for path in tune.TABLES.glob("*.json"))


def described(config=CONFIG, device="NVIDIA H200"):
    """What `explain` would say of the tiles on a device."""
    forget_plans()
    spec = spec_of(T=512, platform="gpu", device_kind=device, config=config)
    return triton.Triton().plan(spec, all_gradients(spec)).describe()


@pytest.mark.usefixtures("fresh_plans")
class TestLookUp:
    def test_config_then_table_then_rule(self, monkeypatch):
        key = tables.Key("forward", 64, 2, "none", "short")
        monkeypatch.setattr(tables, "entries", lambda name: {key: Tiles(32, 32, 4, 1)} if "h200" in name else {})
        given = described(jflex.Config(forward=jflex.Tiles(64, 32)))
        assert given.startswith("forward 64 x 32 (4 warps, 2 stages, by config), dkv ")
        assert described().startswith("forward 32 x 32 (4 warps, 1 stages, by table), dkv ")
        by_rule = described(device="NVIDIA Unheard Of")
        assert (by_rule.count("by rule"), by_rule.count("by table")) == (3, 0)

    @pytest.mark.parametrize(("blocks", "taken"), [(None, True), ((128, 128), True), ((64, 128), False)])
    def test_hopper_takes_measured_tiles_that_divide_blocks(self, monkeypatch, blocks, taken):
        key, tiles = tables.Key("forward_sm90", 64, 2, "none", "short"), Tiles(128, 64, 8, 3)
        monkeypatch.setattr(tables, "entries", lambda name: {key: tiles})
        given = None if blocks is None else Blocks(blocks, 1, 1)
        spec = spec_of(T=512, platform="gpu", device_kind="NVIDIA H200", blocks=given)
        choice = mosaic_plan.plan(spec, None).forward
        assert (choice.source, choice.tiles == tiles) == (("table", True) if taken else ("rule", False))
        by_user = mosaic_plan.plan(spec.replace(config=GIVEN), None).forward
        assert by_user == TileChoice(GIVEN.forward, "config")

    @pytest.mark.parametrize(("device", "name"), [
        ("NVIDIA H200", "nvidia-h200"), ("NVIDIA H100 80GB HBM3", "nvidia-h200"), ("NVIDIA A100-SXM4-40GB",
        "nvidia-a100-sxm4-40gb"), ("NVIDIA L4", "nvidia-l4"), ("cpu", None), ("", None),
    ])  # fmt: skip
    def test_table_of_a_device(self, device, name):
        assert tables.table_name(device) == name


@pytest.mark.parametrize(("requests", "keys", "D", "stages"), [
    (64, 1152, 128, 3), (32, 4096, 128, 7), (1, 9216, 128, 3), (64, 4608, 128, 7), (64, 1152, 64, 7), (64, 1024, 64, 3),
])  # fmt: skip
def test_pipelines_over_pages_are_shallow_where_a_program_walks_few_keys(requests, keys, D, stages):
    sizes = {"B": requests, "T": requests, "S": keys, "Hq": 32, "Hkv": 8, "D": D}
    spec = spec_of(**sizes, platform="gpu", device_kind="NVIDIA H200", paging=Paging(64, 8193))
    [work] = paged_plan.plan(spec).launches
    assert (work.tiles.block_kv, work.tiles.num_stages) == (64, stages)


@pytest.mark.parametrize("name", TABLES)
class TestCommittedTables:
    def test_entries_are_legal_and_in_their_buckets(self, name):
        content = tables.read(name)
        keys = [tables.Key(**entry["key"]) for entry in content["entries"]]
        assert len(keys) == len(set(keys)) > 0
        for key, tiles in tables.entries(name).items():
            assert key.kernel in (*tables.KERNELS, *tables.OFFICIAL_KERNELS, *tables.HOPPER_KERNELS)
            assert key.head_size in tables.HEAD_SIZES
            assert (key.mods in tables.MODS, key.length in tables.LENGTHS) == (True, True)
            if key.kernel in tables.HOPPER_KERNELS:
                assert tiles in tune.configurations(key.kernel, key.head_size)
                continue
            kernel = key.kernel.removesuffix("_official")
            by_element = (4 if kernel == "dkv" else 2) if key.mods == "elements" else 0
            loads = triton_plan.LoadBytes(by_element)
            assert tune.may_work(kernel, tiles, key.head_size, key.head_size, key.itemsize, loads)

    def test_provenance(self, name):
        content = tables.read(name)
        assert {"date", "command", "versions", "machine", "commit"} <= set(content)
        assert tables.table_name(content["machine"]["device"]) == name


BIAS, TABLE, BY_KEY = jnp.zeros((2, 64, 64), jnp.bfloat16), jnp.zeros((2, 128), jnp.bfloat16), jnp.zeros((2, 64))
WIDE_BIAS, SEEN = BIAS.astype(jnp.float32), jnp.ones((64, 64), bool)
SLOPE = lambda s, b, h, q, k: s - 0.5 * (q - k).astype(jnp.float32)


def polynomial(terms):
    return lambda s, b, h, q, k: sum((s * i + (q - k).astype(jnp.float32)) * s for i in range(terms))


def bucket_of(score, mask):
    sizes = IndexRanges(2, 2, 64, 64)
    traced = [score and trace_score_mod(score)[0], mask and trace_mask_mod(mask)[0]]
    return tables.mods_of(*(x and trace_program(x.jaxpr, x.operands, sizes) for x in traced))


@pytest.mark.parametrize(("score", "mask", "bucket"), [
    (None, None, "none"),
    (None, lambda b, h, q, k: (q >= k) & (q - k < 9), "none"),
    (SLOPE, None, "arithmetic"),
    (lambda s, b, h, q, k: 50 * jnp.tanh(s / 50), None, "functions"),
    (lambda s, b, h, q, k: 50 * jnp.tanh(SLOPE(s, b, h, q, k) / 50), None, "functions"),
    (lambda s, b, h, q, k: s + BIAS[h, q, k].astype(jnp.float32), None, "elements"),
    (None, lambda b, h, q, k: SEEN[q, k], "elements"),
    # Not like anything that was measured: rules know better.
    (polynomial(6), None, "other"),
    (lambda s, b, h, q, k: s + BY_KEY[b, k], None, "other"),
    (lambda s, b, h, q, k: s + WIDE_BIAS[h, q, k], None, "other"),
    (lambda s, b, h, q, k: s + TABLE[h, q - k + 64].astype(jnp.float32), None, "other"),
    (lambda s, b, h, q, k: jnp.tanh(s + BIAS[h, q, k].astype(jnp.float32)), None, "other"),
    (lambda s, b, h, q, k: s + BIAS[h, q, k].astype(jnp.float32), lambda b, h, q, k: SEEN[q, k], "other"),
])  # fmt: skip
def test_buckets_of_mods(score, mask, bucket):
    assert bucket_of(score, mask) == bucket


@pytest.mark.skipif(gpu_compile.missing() is not None, reason="compiles for a GPU")
@pytest.mark.usefixtures("fresh_plans")
@pytest.mark.parametrize(("kernel", "tiles", "D", "biases", "dtype"), [
    ("forward", Tiles(128, 64, 4, 3), 64, 0, "float32"),
    ("forward", Tiles(128, 64, 8, 2), 80, 1, "bfloat16"),
    ("dq", Tiles(64, 64, 4, 3), 96, 2, "float32"),
    ("dkv", Tiles(128, 64, 8, 2), 64, 0, "float32"),
    ("dkv", Tiles(64, 64, 4, 3), 128, 1, "float32"),
    ("tangent", Tiles(64, 32, 4, 3), 128, 0, "float32"),
    ("tangent", Tiles(128, 64, 8, 2), 64, 1, "bfloat16"),
])  # fmt: skip
def test_shared_memory_is_what_the_compiler_takes(kernel, tiles, D, biases, dtype, monkeypatch):
    S, loads = 256, triton_plan.LoadBytes(biases * jnp.dtype(dtype).itemsize)
    config = jflex.Config(forward_mode=True, **({} if kernel == "tangent" else {kernel: tiles}))
    monkeypatch.setattr(tables, "tangent_tiles", lambda need: tiles)  # which no `Config` sets

    def run(q, k, v, captured):
        mod = lambda s, b, h, i, j: sum((x[h, i, j].astype(jnp.float32) for x in captured), start=s)
        attend = lambda *qkv: jflex.flex_attention(*qkv, mod, implementation="triton", config=config)
        if kernel == "tangent":
            return jax.jvp(attend, (q, k, v), (q, k, v))
        out, pull = jax.vjp(attend, q, k, v)
        return out, pull(out)

    x = jax.ShapeDtypeStruct((1, S, 2, D), jnp.bfloat16)
    found = gpu_compile.compile_kernels(run, x, x, x, [jax.ShapeDtypeStruct((2, S, S), dtype)] * biases)
    [taken] = [one.shared for one in found if one.name.endswith(kernel)]
    assert taken == pytest.approx(triton_plan.shared_memory(kernel, tiles, D, D, 2, loads), rel=0.02)


@pytest.mark.skipif(gpu_compile.missing() is not None, reason="compiles for a GPU")
def test_mods_that_read_much_by_element_take_fewer_stages():
    x, pair = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16), jax.ShapeDtypeStruct((256, 256, 8), jnp.float32)

    def run(q, k, v, pair, weight):
        mod = lambda s, b, h, i, j: s + jnp.dot(pair[i, j], weight[h])
        return jflex.flex_attention(q, k, v, mod, implementation="triton")

    arrays = (x, x, x, pair, jax.ShapeDtypeStruct((2, 8), jnp.float32))
    [kernel] = gpu_compile.compile_kernels(run, *arrays)
    assert kernel.shared <= triton_plan.HOPPER_SHARED_MEMORY


@pytest.mark.skipif(gpu_compile.missing() is not None, reason="compiles for a GPU")
def test_what_mods_read_by_row_is_counted():
    """A random mod needed 512 bytes more than there are: tile loads of 20 bytes, and 20 for each query."""
    x, pair = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16), jax.ShapeDtypeStruct((256, 256, 5), jnp.float32)

    def run(q, k, v, pair, rows):
        mod = lambda s, b, h, i, j: s + jnp.dot(pair[i, j], rows[i])
        out, pull = jax.vjp(lambda *qkv: jflex.flex_attention(*qkv, mod, implementation="triton"), q, k, v)
        return out, pull(out)

    found = gpu_compile.compile_kernels(run, x, x, x, pair, jax.ShapeDtypeStruct((256, 5), jnp.float32))
    assert max(one.shared for one in found) <= triton_plan.HOPPER_SHARED_MEMORY


class TestSearch:
    def test_a_head_size_that_fails_keeps_the_others_and_the_old(self, monkeypatch, tmp_path):
        def entry(head_size, microseconds):
            key = tables.Key("dq", head_size, 2, "none", "long")._asdict()
            tiles = dataclasses.asdict(Tiles(64, 64, 4, 2))
            return {"key": key, "tiles": tiles, "microseconds": microseconds, "runner_up": None}

        def run_job(job):
            assert (job.module, job.function) == ("benchmarks.tune", "search")
            if job.arguments["head_size"] == 64:
                raise RuntimeError("out of memory")
            return [entry(job.arguments["head_size"], 2.0)]

        path = tmp_path / "nvidia-unheard-of.json"
        tune.write(path, {"date": "yesterday"}, [entry(64, 1.0), entry(80, 1.0), entry(128, 1.0)])
        monkeypatch.setattr(tune, "run_job", run_job)
        tune.tune([64, 128], tune.Scope(), {"device": "NVIDIA Unheard Of"}, tmp_path)
        found = {x["key"]["head_size"]: x for x in json.loads(path.read_text())["entries"]}
        assert {size: x["microseconds"] for size, x in found.items()} == {64: 1.0, 80: 1.0, 128: 2.0}
        assert [found[size]["date"] == "yesterday" for size in (64, 80, 128)] == [True, True, False]

    def test_search_at_a_tiny_size(self, monkeypatch):
        tiny, program = square(1, 32, 1, 16, "noop"), tune.program
        monkeypatch.setattr(tune, "attentions", lambda *condition: [tiny])
        monkeypatch.setattr(tune, "configurations", lambda *which: [Tiles(16, 32, 4, 2), Tiles(32, 16, 4, 2)])
        monkeypatch.setattr(tune, "program", lambda *args: program(*args, interpret=True))
        monkeypatch.setattr(
            tune, "_seconds", lambda calls: [float(call().size) / (i + 1) for i, call in enumerate(calls)]
        )
        scope = tune.Scope(["forward"], ["none"], ["short"])
        [entry] = tune.search(32, scope)
        assert tables.Key(**entry["key"]) == tables.Key("forward", 32, 2, "none", "short")
        assert (Tiles(**entry["tiles"]), entry["microseconds"]) == (Tiles(32, 16, 4, 2), 256e6)
        assert (Tiles(**entry["runner_up"]["tiles"]), entry["searched"]) == (Tiles(16, 32, 4, 2), 2)
        assert tune.search(32, scope._replace(deadline=0.0)) == []

    @in_turns
    @pytest.mark.parametrize("kernel", tables.KERNELS)
    @pytest.mark.parametrize("variant", [x for variants in tune.REPRESENTATIVES.values() for x in variants])
    def test_programs_compute(self, kernel, variant):
        attention = square(1, 64, 2, 32, variant)
        run = tune.program(attention, kernel, Tiles(32, 32, 4, 2), interpret=True)
        found = jax.jit(run)(*tune.inputs(attention))
        assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(found))

    def test_mods_fall_into_the_buckets_that_they_stand_for(self, monkeypatch, fresh_plans):
        buckets, mods_of = [], tables.mods_of
        monkeypatch.setattr(tables, "mods_of", lambda *programs: buckets.append(mods_of(*programs)) or buckets[-1])
        for mods, variants in tune.REPRESENTATIVES.items():
            buckets.clear()
            attention = square(1, 64, 2, 32, variants[0])
            run = tune.program(attention, "dq", Tiles(32, 32, 4, 2), interpret=True)
            jax.eval_shape(run, *jax.eval_shape(lambda a=attention: tune.inputs(a)))
            assert set(buckets) == {mods}

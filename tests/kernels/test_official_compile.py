"""Triton kernels compiled by official Triton for GPUs that are not here: each case, and every target."""

import functools
import importlib.util
import sys

import jax
import jax.numpy as jnp
import pytest

import jflex
from pallas_kernels.triton.compiler.compile import CompileError, compiled
from pallas_kernels.triton.compiler.emit import emit
from pallas_kernels.triton.compiler.launch import launch
from pallas_kernels.triton.compiler.launch.installed import Launcher, launcher
from pallas_kernels.triton.compiler.launch.target import AMD_TARGETS, CUDA_TARGETS
from pallas_kernels.triton.plan import limits
from tests.cases import official_primitives, paged_cases
from tests.kernels.test_compile import SUPPORTED
from tests.support import evaluation, gpu_compile, paged_evaluation

TARGETS = CUDA_TARGETS | AMD_TARGETS
MAIN = 90
OTHERS = [80, 86, 89, 100, 103, 120, 121, "gfx942", "gfx950"]
PAGED = ("mixed", "rotated_pages_of_16", "e4m3", "e5m2_pages_of_1", "int8_rotated")
EACH = 12  # of the cases, one in so many for the other targets
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.usefixtures("fresh_plans"),
]


@pytest.fixture(autouse=True)
def any_launcher(monkeypatch):
    """Plans whatever launches, or not: it is not asked."""
    monkeypatch.setattr(limits, "launcher", lambda: Launcher("direct", "not launched"))


def kernels_of(function, *arrays):
    with gpu_compile.absent_gpu():
        return list(launch.kernels_in(jax.make_jaxpr(function)(*arrays)))


def compile_all(kernels, arch):
    """Compiles kernels, which checks their shared memory and parameters."""
    for kernel, names, tiles in kernels:
        source = emit.emit(kernel, names, TARGETS[arch].dialect)
        assert isinstance(source, emit.Source), source
        compiled(source, TARGETS[arch], tiles.num_warps, tiles.num_stages)


@functools.cache
def kernels_of_case(case):
    with jax.default_matmul_precision(case.precision):
        program, *arrays = evaluation.program_of(case, "official_triton")
        return kernels_of(program, *arrays)


@pytest.mark.full
@pytest.mark.parametrize("case", SUPPORTED, ids=str)
def test_case(case):
    kernels = kernels_of_case(case)
    assert len(kernels) >= 3
    compile_all(kernels, MAIN)


@pytest.mark.full
@pytest.mark.parametrize("arch", OTHERS)
@pytest.mark.parametrize("case", SUPPORTED[::EACH], ids=str)
def test_target(case, arch):
    """The tiles are those of an H200: what does not fit elsewhere is said so, and nothing worse."""
    try:
        compile_all(kernels_of_case(case), arch)
    except CompileError as error:
        if "bytes of shared memory, and a CTA may have" not in str(error):
            raise
        pytest.skip(str(error))


@pytest.fixture
def one_kernel(monkeypatch, tmp_path):
    """Compiles a kernel, as a new process would, with `tmp_path / "cache"` as the cache on disk."""
    kernel, names, tiles = kernels_of_case(SUPPORTED[0])[0]
    source = emit.emit(kernel, names, TARGETS[MAIN].dialect)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))

    def run():
        compiled.cache_clear()
        return compiled(source, TARGETS[MAIN], tiles.num_warps, tiles.num_stages)

    return run


@pytest.mark.full
def test_another_process_reads_the_cache_without_triton(one_kernel, monkeypatch, tmp_path):
    first = one_kernel()
    [path] = (tmp_path / "cache").rglob("*.*")
    assert path.name.endswith(".jflex.json")
    for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
        monkeypatch.setitem(sys.modules, name, None)
    assert one_kernel() == first


@pytest.mark.full
def test_cache_that_cannot_be_written(one_kernel, tmp_path):
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert one_kernel().shared_memory > 0


@pytest.mark.full
@pytest.mark.parametrize("case", [case for case in paged_cases.CASES if case.name in PAGED], ids=str)
def test_paged(case, monkeypatch):
    monkeypatch.setattr("jflex.entry.current_device", lambda *_: ("gpu", gpu_compile.DEVICE))
    kernels = kernels_of(lambda: paged_evaluation.run(case, "official_triton"))
    assert len(kernels) >= 2
    compile_all(kernels, MAIN)


@pytest.mark.full
@pytest.mark.parametrize("arch", [80, 90, 120, "gfx942"])
def test_primitives(arch):
    for row in official_primitives.TABLE:
        for dtype in row.dtypes:
            run, args = official_primitives.program_of(row, dtype)
            compile_all(kernels_of(run, *args), arch)


@pytest.mark.full
@pytest.mark.skipif(isinstance(launcher(), str), reason=str(launcher()))
@pytest.mark.skipif(gpu_compile.missing() is not None, reason="compiles for a GPU")
@pytest.mark.parametrize("transform", ["grad", "vmap", "vmap of one", "shard_map", "export"])
def test_lowered_and_compiled_by_xla(monkeypatch, transform):
    """By what launches here: jax-triton, or jaxlib."""
    monkeypatch.setattr(limits, "launcher", launcher)
    monkeypatch.setenv("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    x, slopes = jax.ShapeDtypeStruct((2, 256, 4, 64), jnp.bfloat16), jax.ShapeDtypeStruct((4,), jnp.float32)
    mask = jflex.create_block_mask(jflex.masks.causal(), None, None, 256, 256)

    def loss(q, k, v, slopes):
        alibi = lambda s, b, h, i, j: s - slopes[h] * (i - j).astype(s.dtype)
        config = jflex.Config(contain_nan=False)
        out = jflex.flex_attention(q, k, v, alibi, mask, implementation="official_triton", config=config)
        return out.astype(jnp.float32).sum()

    function, arrays = jax.value_and_grad(loss, (0, 1, 2, 3)), (x, x, x, slopes)
    if "vmap" in transform:
        axes = (0, None, None, None) if "one" in transform else 0
        arrays = (_several(x), *((x, x, slopes) if "one" in transform else map(_several, (x, x, slopes))))
        function = jax.vmap(function, in_axes=axes)
    if transform == "shard_map":
        mesh = jax.sharding.Mesh(gpu_compile.absent_gpus(2), ("data",))
        at = jax.sharding.PartitionSpec("data")
        rows, whole = jax.NamedSharding(mesh, at), jax.NamedSharding(mesh, jax.sharding.PartitionSpec())
        local = lambda *xs: jax.lax.psum(loss(*xs), "data")
        function = jax.shard_map(local, mesh=mesh, in_specs=(at, at, at, jax.sharding.PartitionSpec()),
                                 out_specs=jax.sharding.PartitionSpec())  # fmt: skip
        arrays = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=rows if a is x else whole) for a in arrays]
    if transform == "export":
        allowed = [jax.export.DisabledSafetyCheck.custom_call("triton_kernel_call_ffi")]
        with gpu_compile.absent_gpu():
            exported = jax.export.export(jax.jit(function), platforms=("cuda",), disabled_checks=allowed)(*arrays)
        again = jax.export.deserialize(exported.serialize())
        assert again.mlir_module().count("@triton_kernel_call_ffi") == 3
        return
    on_gpu = arrays if transform == "shard_map" else jax.tree.map(gpu_compile._on_gpu, arrays)
    lowered = gpu_compile.lower(function, *on_gpu)
    assert lowered.as_text().count("@triton_kernel_call_ffi") == (1 if transform == "shard_map" else 3)
    assert "triton_kernel_call_ffi" in lowered.compile().as_text()


def _several(x):
    return jax.ShapeDtypeStruct((3, *x.shape), x.dtype)

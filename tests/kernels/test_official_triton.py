"""Official Triton as the compiler of the Triton kernels: source, limits, dispatch; and life without Pallas' own."""

import importlib.metadata
import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

import jflex
from jflex._call.dispatch import select_forward, select_passes
from pallas_kernels.plan import Refusal, all_gradients
from pallas_kernels.program.evaluate import ELEMENTWISE
from pallas_kernels.spec import Paging
from pallas_kernels.triton.compiler import compile as compiler
from pallas_kernels.triton.compiler.emit import emit
from pallas_kernels.triton.compiler.emit.dialect import CUDA
from pallas_kernels.triton.compiler.launch import direct, installed, launch, target
from pallas_kernels.triton.compiler.launch.installed import Launcher, launcher
from pallas_kernels.triton.plan import limits
from pallas_kernels.tuning import tables
from tests.cases import official_primitives
from tests.support import gpu_compile
from tests.support.specs import spec_of

ROOT = pathlib.Path(__file__).parents[2]
MISSING = launcher()
needs_triton = pytest.mark.skipif(isinstance(MISSING, str), reason=str(MISSING))
has_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@pytest.fixture
def any_launcher(monkeypatch):
    """Plans as with Triton, whether it is installed or not."""
    monkeypatch.setattr(limits, "launcher", lambda: Launcher("direct", "Triton 0.0, launched by a test"))


def source_of(kernel, *args, out, grid=(1,), vmap=False, names=None):
    """The source of a kernel, or its refusal."""
    call = pl.pallas_call(kernel, out_shape=out, grid=grid, name="a kernel")
    call = jax.vmap(call) if vmap else call
    [eqn] = jax.make_jaxpr(call)(*args).jaxpr.eqns
    names = names or (*(f"x{n}" for n in range(len(args))), "out")
    return emit.emit(launch.launched_of(eqn), names, CUDA)


X = jax.ShapeDtypeStruct((16, 32), jnp.float32)


def test_vmap_gives_blocks_an_offset_and_folds_grids_of_four_axes():
    kernel = lambda x, out: out.__setitem__(..., x[...] + pl.program_id(2).astype(jnp.float32))
    batched = jax.ShapeDtypeStruct((5, 16, 32), jnp.float32)
    source = source_of(kernel, batched, out=X, grid=(2, 3, 4), vmap=True)
    assert source.grid == (5 * 2 * 3 * 4, 1, 1)
    assert "tl.program_id(0) // 24 % 5" in source.text  # the axis of the batch varies slowest
    assert ".to(tl.int64) * 512" in source.text


def test_vmap_broadcasts_what_a_kernel_adds_to(monkeypatch):
    add = lambda x, sums, out: out.__setitem__(..., x[...] + sums[...])
    call = pl.pallas_call(add, out_shape=X, input_output_aliases={1: 0})
    x, sums = jnp.arange(5.0 * 16 * 32).reshape(5, 16, 32), jnp.ones((16, 32))
    jaxpr = jax.make_jaxpr(jax.vmap(call, in_axes=(0, None)))(x, sums)
    assert len(jaxpr.jaxpr.eqns) > 1
    monkeypatch.setattr(launch, "_launch", lambda launched, eqn, args, *_: [args[0] + args[1]])
    [out] = launch._run(jaxpr, [x, sums], (), None, None)
    assert (out == x + 1).all()


def test_an_unknown_primitive_is_refused_by_its_name():
    refusal = source_of(lambda x, out: out.__setitem__(..., jnp.sort(x[...])), X, out=X)
    assert isinstance(refusal, Refusal)
    assert refusal.reason == "its emitter has no rule for the primitive `sort`, in kernel `a_kernel`"


@pytest.mark.parametrize("row", official_primitives.TABLE, ids=lambda row: row.name)
def test_each_primitive_is_emitted(row):
    """Whatever its numbers are: those are compared in Triton's interpreter, and on a GPU."""
    for dtype in row.dtypes:
        run, args = official_primitives.program_of(row, dtype)
        [(kernel, names, _)] = launch.kernels_in(jax.make_jaxpr(run)(*args))
        if row.name != "log2" or jax.__version_info__ >= (0, 11):  # before, JAX divides a logarithm
            assert row.name.partition(".")[0] in {eqn.primitive.name for eqn in _equations(kernel.jaxpr)}
        assert isinstance(emit.emit(kernel, names, CUDA), emit.Source)


def _equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for x in value if isinstance(value, (tuple, list)) else (value,):
                if hasattr(getattr(x, "jaxpr", x), "eqns"):
                    yield from _equations(getattr(x, "jaxpr", x))


def test_every_elementwise_primitive_of_mods_has_a_rule():
    assert ELEMENTWISE - set(emit.RULES) == {"reduce_precision", "polynomial"}  # the program has formulas for these


# --- limits


@pytest.mark.parametrize(
    ("versions", "jax_version", "found"),
    [
        ({}, (0, 11), r"needs the package `triton`.*the extra `jax-triton` installs"),
        ({"triton": "3.5.1"}, (0, 11), r"tested with Triton 3\.6 to 3\.9, and 3\.5\.1 is installed"),
        ({"triton": "3.10.0"}, (0, 11), r"and 3\.10\.0 is installed"),
        ({"triton": "3.6.0"}, (0, 11), Launcher("direct", "Triton 3.6.0, launched by jaxlib")),
        (
            {"triton": "3.9.0", "jax-triton": "0.4.1"},
            (0, 11),
            Launcher("jax_triton", "Triton 3.9.0, launched by jax-t"),
        ),
        ({"triton": "3.9.0", "jax-triton": "0.4.1"}, (0, 12), Launcher("direct", "Triton 3.9.0, launched by jaxlib")),
        ({"triton": "3.9.0", "jax-triton": "0.3.1"}, (0, 10), Launcher("direct", "Triton 3.9.0, launched by jaxlib")),
    ],
    ids=lambda x: str(x)[:40],
)
def test_what_launches_kernels(monkeypatch, versions, jax_version, found):
    def version(package):
        if package not in versions:
            raise importlib.metadata.PackageNotFoundError(package)
        return versions[package]

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(jax, "__version_info__", (*jax_version, 0))
    monkeypatch.setattr(installed, "_has_custom_call", lambda: True)
    chosen = installed.launcher.__wrapped__()
    if isinstance(found, str):
        assert isinstance(chosen, str)
        assert re.search(found, chosen)
    else:
        assert chosen.name == found.name
        assert chosen.description.startswith(found.description)


def test_a_jaxlib_without_the_custom_call_is_refused(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "3.7.1")
    monkeypatch.setattr(installed, "_has_custom_call", lambda: False)
    assert "needs the CUDA plugin of jaxlib" in installed.launcher.__wrapped__()


@pytest.mark.parametrize(
    ("kind", "found"),
    [("NVIDIA H200", 90), ("NVIDIA H100 80GB HBM3", 90), ("NVIDIA A100-SXM4-80GB", 80), ("NVIDIA L40S", 89),
     ("NVIDIA B200", 100), ("NVIDIA GB300", 103), ("NVIDIA Unheard Of", "does not know the compute capability"),
     ("AMD Instinct MI300X", "launches kernels on NVIDIA GPUs")],
)  # fmt: skip
def test_targets_of_devices_that_are_not_there(kind, found):
    chosen = target.target_of(kind)
    assert found in chosen if isinstance(found, str) else chosen.arch == found


@pytest.mark.usefixtures("any_launcher")
@pytest.mark.parametrize(("kind", "refused"), [("NVIDIA A100-SXM4-80GB", True), ("NVIDIA L40S", False)])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_pages_of_a_dtype_that_the_device_lacks_are_refused(kind, refused, dtype):
    spec = spec_of(platform="gpu", device_kind=kind)
    spec = spec.replace(paging=Paging(16, 4, dtype))
    found = limits.limit_of_compiler(spec, "official")
    expected = f"Triton loads float8_e4m3fn from compute capability 8.9 on, and {kind!r} has less"
    assert found == (expected if refused and dtype == "float8_e4m3fn" else None)


def test_too_much_shared_memory_is_refused_before_launch(monkeypatch):
    made = compiler.Compiled("kernel", ".entry kernel(.param a, .param b, .param c)", 300_000, 4)
    monkeypatch.setattr(compiler, "_kept", lambda *_: made)
    source = emit.Source("", "kernel", ("float32",), (1, 1, 1))
    with pytest.raises(compiler.CompileError, match=r"takes 300000 bytes.*may have 232448.*smaller `Tiles`"):
        compiler.compiled.__wrapped__(source, target.CUDA_TARGETS[90], 4, 2)


def test_a_triton_that_passes_arguments_otherwise_is_refused(monkeypatch):
    made = compiler.Compiled("kernel", ".entry kernel(.param a, .param b, .param c, .param d)", 0, 4)
    monkeypatch.setattr(compiler, "_kept", lambda *_: made)
    source = emit.Source("", "kernel", ("float32",), (1, 1, 1))
    with pytest.raises(compiler.CompileError, match="of 1 arrays has 4 parameters, not 3: this version of Triton"):
        compiler.compiled.__wrapped__(source, target.CUDA_TARGETS[90], 4, 2)


def test_aliased_outputs_are_returned_in_their_order():
    source = emit.Source("", "kernel", ("float32",) * 3, (1, 1, 1))
    made = compiler.Compiled("kernel", "", 0, 4)
    sizes = [jax.ShapeDtypeStruct((n,), jnp.float32) for n in (1, 2, 3)]
    call = lambda a, b: direct.call(
        a, b, compiled=made, source=source, target=target.CUDA_TARGETS[90], outputs=sizes, aliases={0: 1}
    )
    jaxpr = jax.make_jaxpr(call)(sizes[2], sizes[0])
    assert [v.aval.shape for v in jaxpr.jaxpr.outvars] == [(1,), (2,), (3,)]
    [eqn] = jaxpr.jaxpr.eqns
    assert [x.shape for x in eqn.params["outputs"]] == [(2,), (3,), (1,)]
    assert eqn.params["aliases"] == ((1, 2),)


# --- dispatch


@pytest.mark.usefixtures("any_launcher", "fresh_plans")
def test_it_is_selected_only_where_it_was_measured_to_be_faster(monkeypatch):
    spec = spec_of(T=4096, platform="gpu", device_kind="NVIDIA A100-SXM4-80GB")
    key = tables.key_of("forward", 64, 2, (None, None, None), 4096)
    assert select_forward(None, spec) == "triton"
    entry = lambda key, time: {"key": key._asdict(), "tiles": {"block_q": 64, "block_kv": 64}, "microseconds": time}
    for theirs, ours, chosen in ((2.0, 1.0, "official_triton"), (1.0, 2.0, "triton")):
        table = {"entries": [entry(key, theirs), entry(tables.official(key), ours)]}
        monkeypatch.setattr(tables, "read", lambda name, table=table: table)
        assert select_forward(None, spec) == chosen
        assert select_forward("triton", spec) == "triton"
        assert select_passes(None, spec, all_gradients(spec)).backward == chosen


@pytest.mark.usefixtures("any_launcher")
def test_explain_says_what_compiles_and_launches():
    x = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16)
    with gpu_compile.absent_gpu():
        account = jflex.explain(x, x, x, implementation="official_triton")
    assert account.backend == account.gradients == "official_triton"
    assert account.tiles.endswith("; Triton 0.0, launched by a test")


# --- processes of their own

WITHOUT = """
import sys
sys.modules["jax.experimental.pallas.triton"] = None  # importing it raises ImportError
import jax, jax.numpy as jnp, numpy as np
import jflex
from pallas_kernels.triton.plan import limits
from pallas_kernels.triton.compiler.emit import emit
from pallas_kernels.triton.compiler.emit.dialect import CUDA
from pallas_kernels.triton.compiler.launch import launch
from pallas_kernels.triton.compiler.launch.installed import Launcher
from tests.support import gpu_compile
limits.launcher = lambda: Launcher("direct", "a test")
q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 40, 2, 16))
slopes = jnp.array([0.5, 0.25])

def loss(q, k, v, slopes, **how):
    alibi = lambda s, b, h, i, j: s - slopes[h] * (i - j).astype(s.dtype)
    return jnp.sum(jflex.flex_attention(q, k, v, alibi, mask_mod=jflex.masks.causal(), **how) ** 2)

grads = lambda **how: jax.value_and_grad(loss, (0, 1, 2, 3))(q, k, v, slopes, **how)
interpret = jflex.Config(interpret=True)
right = grads(implementation="reference")
for how in ({"implementation": "xla"}, {"implementation": "official_triton", "config": interpret}):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4), grads(**how), right)
cache = jflex.paged.PagedCache.create(8, 16, 2, 16, dtype=jnp.float32)
batch = jflex.paged.PagedBatch(jnp.array([0, 1, 2]), jnp.array([20, 33]), jnp.array([[5, 2, 0], [5, 7, 3]]))
jflex.paged_attention(q[0, :2], cache, batch, implementation="official_triton", config=interpret)
with gpu_compile.absent_gpu():
    account = jflex.explain(q, k, v)
    assert account.backend == "official_triton", account
    assert "no `jax.experimental.pallas.triton`" in account.reasons["triton"], account
    traced = jax.make_jaxpr(lambda *xs: jax.grad(loss, (0, 1, 2, 3))(*xs))(q, k, v, slopes)
kernels = list(launch.kernels_in(traced))
assert len(kernels) >= 3
for kernel, names, _ in kernels:
    assert isinstance(emit.emit(kernel, names, CUDA), emit.Source)
print("fine")
"""


def _run(*command: str, **environment: str) -> str:
    known = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run([sys.executable, *command], env=known, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.long
def test_without_the_triton_of_pallas_everything_else_works():
    assert _run("-c", WITHOUT) == "fine\n"


@pytest.mark.full
@has_triton
@pytest.mark.parametrize("cases", ["test_primitive or test_memory", "test_forward", "test_backward", "test_paged"])
def test_in_the_interpreter_of_triton(cases):
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/support/official_interpreted.py", "-k", cases]
    assert " passed" in _run(*command, TRITON_INTERPRET="1")


# --- on a GPU


@needs_triton
@pytest.mark.gpu
@pytest.mark.parametrize(("row", "dtype"), official_primitives.CASES)
def test_primitive(row, dtype):
    official_primitives.check_row(row, dtype)


@needs_triton
@pytest.mark.gpu
@pytest.mark.parametrize("name", official_primitives.MEMORY)
def test_memory(name):
    official_primitives.check_memory(name)

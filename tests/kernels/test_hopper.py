"""The kernels through Mosaic GPU: results on a Hopper GPU; without one, that they lower, and compile without spills."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jflex
from jflex.block_mask import limits
from pallas_kernels.mosaic_gpu.plan import plan
from tests.cases.hopper_cases import HOPPER, LIMITED, MORE_GROUPS, ONE_PASS, TWO_GROUPS
from tests.cases.table import Sizes
from tests.support import evaluation, gpu_compile
from tests.support.drawn_arrays import draw

pytestmark = pytest.mark.full

NEEDS_011 = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="Mosaic GPU is used from JAX 0.11 on")
BACKEND = "mosaic_gpu"


@pytest.mark.gpu
@pytest.mark.parametrize("case", HOPPER, ids=str)
def test_results_and_gradients(case):
    if evaluation.refused(case, BACKEND):
        return
    evaluation.check_forward(case, BACKEND)
    evaluation.check_gradients(case, BACKEND, evaluation.gradients_of(case))


@pytest.mark.gpu
@pytest.mark.parametrize("groups", ["three", "four"])
@pytest.mark.parametrize("case", MORE_GROUPS, ids=str)
def test_three_and_four_warp_groups(case, groups):
    evaluation.check_forward(case, f"{BACKEND}-{groups}_groups")


# Tiles of the plan, the length of sequences, which no other test has, since plans are cached, and the head size.
WIDE_TILES = [
    ("_THREE_GROUPS", 443, 64),
    ("_THREE_OF_96", 444, 96),
    ("_FOUR_GROUPS", 442, 64),
    ("_MANY_KEYS", 441, 128),
]


def check_wide_tiles(monkeypatch, backend, tiles, length, size):
    """Tiles that walk the range of a mask in place of its lists."""
    planned = []
    choice = lambda spec: planned.append(spec) or (None if spec.block_size else getattr(plan, tiles))
    monkeypatch.setattr(plan, "_wide_tiles", choice)
    case = dataclasses.replace(TWO_GROUPS, name="wide_ranges", sizes=Sizes(B=1, T=length, D=size))
    evaluation.check_forward(case, backend)
    evaluation.check_gradients(case, backend, evaluation.gradients_of(case))
    assert None in [spec.block_size for spec in planned]


@pytest.mark.gpu
@pytest.mark.parametrize(("tiles", "length", "size"), WIDE_TILES)
def test_wide_tiles(monkeypatch, tiles, length, size):
    check_wide_tiles(monkeypatch, BACKEND, tiles, length, size)


@pytest.mark.gpu
@pytest.mark.parametrize("case", ONE_PASS, ids=str)
def test_gradients_in_one_pass(case):
    names = evaluation.gradients_of(case)
    evaluation.check_gradients(case, f"{BACKEND}-one_pass", names)


@pytest.mark.gpu
@pytest.mark.parametrize("case", LIMITED, ids=str)
def test_limits_of_rows(monkeypatch, case):
    monkeypatch.setattr(limits, "MIN_ELEMENTS", 1)
    evaluation.check_forward(case, BACKEND)
    for backend in (BACKEND, f"{BACKEND}-one_pass"):
        evaluation.check_gradients(case, backend, evaluation.gradients_of(case))


@pytest.mark.gpu
@pytest.mark.parametrize("case", evaluation.having_tangents([*HOPPER, *LIMITED]), ids=str)
def test_tangents(monkeypatch, case):
    if case in LIMITED:
        monkeypatch.setattr(limits, "MIN_ELEMENTS", 1)
    if not evaluation.refused(case, BACKEND):
        evaluation.check_tangents(case, BACKEND)


# Bytes that a thread stores away. The backward kernels hold sums for dK and dV that fill the registers: what they store
# away are mostly addresses, and with 444 bytes (a soft cap at head size 64) they are faster than with smaller tiles.
# In the forward kernel the group that copies has but 24 registers, and stores addresses away once a tile of queries.
SPILLS = {"forward": 48, "backward": 460}
KNOWN_SPILLS = {
    "softcap_of_much": 560,  # the backward kernel for dK and dV; 8684 with a tile of 128 by 128
    "two_groups_dropout_wide": 684,  # the hash of dropout beside ALiBi; 560 before nvcc 13.5
    "decode_mask_mod": 84,  # the forward kernel, of nvcc 13.5; none of the backward kernels
    "switch": 480,  # it computes more on each element than registers hold
    "narrow_cut_wide": 496,  # as much in partial blocks; 288 with a CTA for each tile of keys
    "shared_by_all": 576,  # the kernel for dK and dV, which loads float32 elements one by one beside a window
    "two_groups_table": 576,  # addresses of elements: backward 535 TFLOP/s with such a table (D 128), `triton` 217
}


@NEEDS_011
@pytest.mark.parametrize("case", [case for case in HOPPER if not case.unsupported], ids=str)
def test_compiles(case):
    assert kernels_of(case, BACKEND)


@NEEDS_011
@pytest.mark.parametrize("case", ONE_PASS, ids=str)
def test_compiles_in_one_pass(case):
    assert any("backward_sm90" in kernel.name for kernel in kernels_of(case, f"{BACKEND}-one_pass"))


# Of two groups of 64 queries and tiles of 128 keys, whose sums and scores fill the registers at head size 128.
TANGENT_SPILLS = {
    "two_groups_causal": 0,
    "two_groups_table": 160,
    "two_groups_no_mask": 128,
    "even_bias": 256,
    "plane_wide": 64,
    "head_size_256": 320,
}


@NEEDS_011
@pytest.mark.skipif(gpu_compile.missing() is not None, reason="compiles for a GPU")
@pytest.mark.parametrize("case", [case for case in HOPPER if case.name in TANGENT_SPILLS], ids=str)
def test_tangents_compile(case):
    kernels = gpu_compile.compile_kernels(*evaluation.tangent_program(case, BACKEND, draw(case)))
    (kernel,) = (kernel for kernel in kernels if "tangent_sm90" in kernel.name)
    assert kernel.tensor == "wgmma"
    assert kernel.spill <= TANGENT_SPILLS[case.name], kernel


def kernels_of(case, backend):
    """The kernels of a case, compiled, of which none stores much away."""
    kernels = _compiled_once(case, backend)
    if not kernels and backend != BACKEND:  # they are those of the same case without an option
        kernels = _compiled_once(case, BACKEND)
    assert {kernel.tensor for kernel in kernels} == {"wgmma"}
    for kernel in kernels:
        allowed = SPILLS["forward" if "forward" in kernel.name else "backward"]
        assert kernel.spill <= KNOWN_SPILLS.get(case.name, allowed), kernel
    return kernels


@functools.cache
def _compiled_once(case, backend):
    """Kernels through Mosaic GPU, which are reported when a process compiles them first."""
    found = gpu_compile.compile_or_skip(*evaluation.program_of(case, backend))
    return [kernel for kernel in found if "sm90" in kernel.name]


@NEEDS_011
@pytest.mark.skipif(gpu_compile.missing() is not None, reason="compiles for a GPU")
@pytest.mark.parametrize(("D", "count"), [(64, 2), (96, 2), (192, 3)])
def test_shared_memory_is_known_from_what_is_declared(monkeypatch, D, count):
    from pallas_kernels.mosaic_gpu import smem as memory
    from pallas_kernels.mosaic_gpu.backward import dkv as backward_dkv
    from pallas_kernels.mosaic_gpu.backward import dq as backward_dq
    from pallas_kernels.mosaic_gpu.forward import kernel as forward_kernel

    known = {}
    for module in (forward_kernel, backward_dkv, backward_dq):

        def launch(kernel, inputs, outputs, scratch, *, name, launch=module.launch, **more):
            known[name] = memory.bytes_of(jax.tree.leaves(scratch))
            return launch(kernel, inputs, outputs, scratch, name=name, **more)

        monkeypatch.setattr(module, "launch", launch)
    x, bias = jax.ShapeDtypeStruct((1, 1024, 2, D), jnp.bfloat16), jnp.zeros((1024, 1024), jnp.int16)
    mod = lambda s, b, h, q, k: s + bias[q, k].astype(jnp.float32)
    total = lambda *args: jflex.flex_attention(*args, mod, implementation=BACKEND).astype(jnp.float32).sum()
    kernels = [x for x in gpu_compile.compile_kernels(jax.grad(total, (0, 1, 2)), x, x, x) if "sm90" in x.name]
    assert {x.name.removesuffix("_mosaic_gpu_kernel"): x.shared for x in kernels} == known
    assert len(known) == count


@NEEDS_011
@pytest.mark.skipif(gpu_compile.missing() is not None, reason="compiles for a GPU")
@pytest.mark.parametrize("D", [64, 128, 256])
def test_statistics_spill_nothing(D):
    x = jax.ShapeDtypeStruct((2, 4096, 8, D), jnp.bfloat16)
    mask = jflex.create_block_mask(jflex.masks.causal(), None, None, 4096, 4096)
    call = functools.partial(jflex.flex_attention, block_mask=mask, implementation=BACKEND)
    for names in (("max",), ("max", "entropy")):
        found = gpu_compile.compile_kernels(functools.partial(call, return_stats=names), x, x, x)
        [kernel] = [kernel for kernel in found if "sm90" in kernel.name]
        assert (kernel.spill, kernel.tensor) == (0, "wgmma")


@NEEDS_011
@pytest.mark.skipif(gpu_compile.missing() is not None, reason="compiles for a GPU")
def test_zeros_of_two_layers_are_not_copied():
    """The backward kernel adds dQ to zeros in place."""

    def run(x):
        attend = lambda x: jflex.flex_attention(x, x, x, mask_mod=jflex.masks.causal(), implementation=BACKEND)
        return jnp.sum(attend(attend(x)), dtype=jnp.float32)

    text = gpu_compile.compiled_of(jax.grad(run), jax.ShapeDtypeStruct((1, 1024, 4, 64), jnp.bfloat16)).as_text()
    assert text.count("jflex_backward_sm90/mpmd_map") >= 2
    assert not re.findall(r"= f32\[[\d,]*\]\S* copy\(", text)


@NEEDS_011
@pytest.mark.skipif(gpu_compile.missing() is not None, reason="compiles for a GPU")
@pytest.mark.parametrize(("D", "count"), [(32, 3), (64, 3), (128, 4)])
def test_a_shared_pair_bias_spills_little(D, count):
    """At AlphaFold's sizes: rows of 384 tokens, 4 heads, a bias for each."""
    x, bias = jax.ShapeDtypeStruct((128, 384, 4, D), jnp.bfloat16), jax.ShapeDtypeStruct((4, 384, 384), jnp.bfloat16)

    def total(q, k, v, bias):
        mod = lambda s, b, h, q, k: s + bias[h, q, k].astype(jnp.float32)
        return jflex.flex_attention(q, k, v, mod, implementation=BACKEND).astype(jnp.float32).sum()

    kernels = gpu_compile.compile_kernels(jax.grad(total, (0, 1, 2, 3)), x, x, x, bias)
    found = {kernel.name.removesuffix("_sm90_mosaic_gpu_kernel"): kernel for kernel in kernels}
    assert len(found) == count
    assert found["jflex_backward_captured"].spill <= 128
    assert found["jflex_backward_captured"].tensor == "wgmma"


@NEEDS_011
@pytest.mark.skipif(gpu_compile.missing() is not None, reason="compiles for a GPU")
@pytest.mark.parametrize("gradients", [False, True], ids=["forward", "gradients"])
@pytest.mark.parametrize("masked", [False, True], ids=["no_mask", "mask_by_batch"])
def test_compiles_where_the_batch_is_sharded(gradients, masked):
    mesh = jax.sharding.Mesh(np.array(gpu_compile.absent_gpus(2)), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    x = jax.ShapeDtypeStruct((4, 2048, 8, 64), jnp.bfloat16, sharding=sharding)
    documents = jnp.zeros((4, 2048), jnp.int32)
    same = lambda b, h, q, k: documents[b, q] == documents[b, k]
    attend = functools.partial(jflex.flex_attention, mask_mod=same if masked else None, implementation=BACKEND)
    total = lambda *args: attend(*args).astype(jnp.float32).sum()
    compiled = gpu_compile.lower(jax.grad(total, (0, 1, 2)) if gradients else attend, x, x, x).compile()
    calls = [line for line in compiled.as_text().splitlines() if "mosaic_gpu" in line and "custom-call(" in line]
    assert len(calls) == 1 + gradients
    assert all("[2,2048,8,64]" in call for call in calls)  # half of the batch

"""Every case that the Triton kernels can run, lowered for an H200 and compiled to machine code, without a GPU."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jflex
from tests.cases.table import CASES, LENGTHS, Case, Sizes
from tests.support import drawn_arrays, evaluation, gpu_compile, haste
from tests.support.rows import tiers

KERNELS = ["jflex_backward_dkv", "jflex_backward_dq", "jflex_forward"]
DECODING = [*KERNELS[:2], "jflex_decode"]
UNEVEN = [*DECODING, "jflex_decode_merge"]
CAPTURED = "jflex_backward_captured"  # only where something captured is read by element, and repeatedly
# Bytes of registers that each thread stores away: more is a step back, less is welcome. Elsewhere 16 pass.
KNOWN_SPILLS = {
    # Much arithmetic on each element.
    "switch": 480,
    "table_by_score": 32,  # not pipelined, see `estimate.can_pipeline`
    "scan": 64,
    "edge_bias": 96,
    # Tiles that fill the registers; measured beside smaller ones, they win.
    "own_lists": 32,
    "narrow_cut": 24,  # as many with wide tables
    "decode_sees_nothing": 160,
    "head_size_96": 96,
    "head_size_128": 256,
    "dropout_head_size_128": 128,  # not measured beside smaller tiles
    "head_sizes_192_128": 64,
    "head_size_256": 400,
    "head_size_256_float32": 17000,
    # Products of float32 in full precision run without tensor cores, from registers.
    "extreme_logits": 32,
    "identity_highest": 400,
    "causal_highest": 400,
    "softcap_float32": 400,
    "gate": 400,
}
TANGENTS = {"alibi", "causal", "softcap", "document", "gqa", "head_size_128", "head_sizes_192_128", "head_size_256"}
SUPPORTED = [case for case in [*CASES, *LENGTHS] if "triton" not in case.unsupported]


# Of each kind of mask and dtype one case, with the launches that repair it; the others without, for the time it takes.
REPAIRED = {case.name for case in SUPPORTED if case.mask is not None and case.name.startswith("causal")}


def fills_wgmma(case):
    """Whether 16-bit products have the 64 rows that wgmma wants, in all three kernels."""
    n = case.sizes
    block = case.block if isinstance(case.block, tuple) else (case.block or 64,) * 2
    short = min(block) < 64 or min(n.T, n.S) <= 32
    return jnp.dtype(case.dtype).itemsize == 2 and not short and min(n.D, n.Dv) >= 16 and max(n.D, n.Dv) <= 128


MARKS = {"default": pytest.mark.full, "full": pytest.mark.long}


@pytest.mark.parametrize("case", [pytest.param(case, id=str(case), marks=MARKS[case.tier]) for case in SUPPORTED])
def test_compiles(case):
    with jax.default_matmul_precision(case.precision):
        program = evaluation.program_of(case, "triton" if case.name in REPAIRED else "triton-no_repair")
        kernels = gpu_compile.compile_or_skip(*program)
    repairs = {kernel.name for kernel in kernels if "repair" in kernel.name}
    # They hardly ever compute: what they spill takes no time.
    kernels = [kernel for kernel in kernels if kernel.name not in repairs]
    names = [kernel.name for kernel in kernels if kernel.name != CAPTURED]
    assert names in (KERNELS, DECODING, UNEVEN)
    expected = {f"{name}_repair" for name in names if "merge" not in name}
    assert repairs == expected if case.name in REPAIRED else repairs <= {"jflex_decode_repair"}
    spilled = {kernel.name: kernel.spill for kernel in kernels if kernel.spill}
    assert max(spilled.values(), default=0) <= KNOWN_SPILLS.get(case.name, 16), (
        f"bytes of registers that each thread stores away: {spilled}"
    )
    if fills_wgmma(case):
        assert {kernel.tensor for kernel in kernels} == {"wgmma"}


@tiers(full={"case": "head_size_128"}, rest="long")
@pytest.mark.skipif(gpu_compile.missing() is not None, reason="compiles for a GPU")
@pytest.mark.parametrize("case", [case for case in SUPPORTED if case.name in TANGENTS], ids=str)
def test_tangents(case):
    program = evaluation.tangent_program(case, "triton", drawn_arrays.draw(case))
    with jax.default_matmul_precision(case.precision):
        kernels = {kernel.name: kernel for kernel in gpu_compile.compile_kernels(*program)}
    assert ("jflex_tangent_repair" in kernels) == (case.mask is not None)
    assert kernels["jflex_tangent"].spill <= (128 if case.sizes.D == 256 else 0)
    assert not fills_wgmma(case) or kernels["jflex_tangent"].tensor == "wgmma"


@tiers(full={"D": 64}, rest="long")
@pytest.mark.skipif(gpu_compile.missing() is not None, reason="compiles for a GPU")
@pytest.mark.parametrize(("D", "spill"), [(64, 0), (128, 176)])
def test_statistics_of_rows(D, spill):
    """The max takes no register more than the lse does; the entropy of head size 128 spills a little more."""
    x, d_rows = jax.ShapeDtypeStruct((2, 1024, 8, D), jnp.bfloat16), jax.ShapeDtypeStruct((2, 8, 1024), jnp.float32)
    mask = jflex.create_block_mask(jflex.masks.causal(), None, None, 1024, 1024)
    config = jflex.Config(contain_nan=False)

    def kernels(**returned):
        call = functools.partial(
            jflex.flex_attention, block_mask=mask, implementation="triton", config=config, **returned
        )

        def run(q, k, v, d_out, d_rows):
            (out, rows), pull = jax.vjp(call, q, k, v)
            return out, pull((d_out, jax.tree.map(lambda _: d_rows, rows)))

        return gpu_compile.compile_kernels(run, x, x, x, x, d_rows)

    use = lambda found: [(kernel.name, kernel.registers, kernel.spill) for kernel in found]
    assert use(kernels(return_stats=("lse", "max"))) == use(kernels(return_lse=True))
    found = kernels(return_stats=("max", "entropy"))
    assert [kernel.name for kernel in found] == KERNELS
    assert max(kernel.spill for kernel in found) <= spill
    assert {kernel.tensor for kernel in found} == {"wgmma"}


@pytest.mark.full
@pytest.mark.skipif(gpu_compile.missing() is not None, reason="compiles for a GPU")
def test_reports_what_cannot_be_compiled():
    """So that a kernel which passes here is known to have been judged."""
    case = Case("too_much_shared_memory", sizes=Sizes(B=1, T=512, D=256), dtype="bfloat16")
    config = jflex.Config(forward=jflex.Tiles(128, 256, num_warps=8, num_stages=4))
    x = evaluation.draw(case)
    call = functools.partial(jflex.flex_attention, implementation="triton", config=config)
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (x.query, x.key, x.value)]
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"(?i)shared memory"):
        gpu_compile.compile_kernels(call, *shapes)


@pytest.mark.full
@pytest.mark.skipif(gpu_compile.missing() is not None, reason="compiles for a GPU")
def test_kernels_hide_the_transfers_of_a_ring():
    """In XLA's schedule for four GPUs, a kernel stands between the start and the end of every transfer, in both passes.

    XLA runs the instructions of a computation in the order of its text; it has one transfer under way at a time.
    """
    mesh = Mesh(np.array(gpu_compile.absent_gpus(4)), ("context",), axis_types=(AxisType.Auto,))
    tokens = NamedSharding(mesh, PartitionSpec(None, "context"))
    shape = lambda heads: jax.ShapeDtypeStruct((1, 8192, heads, 64), jnp.bfloat16, sharding=tokens)
    attend = functools.partial(
        jflex.context_parallel_attention, mask_mod=lambda b, h, q, k: q >= k, mesh=mesh, strategy="ring",
        order=jflex.context_parallel.zigzag_order(4), config=jflex.Config(contain_nan=False),
    )  # fmt: skip
    pulled = jax.grad(lambda *x: attend(*x).astype(jnp.float32).sum(), argnums=(0, 1, 2))
    lowered = jax.jit(pulled).trace(shape(16), shape(4), shape(4)).lower(lowering_platforms=("cuda",))
    transfers = 0
    with haste.compiled_in_haste(False):
        text = lowered.compile().as_text()
    for computation in re.split(r"\n\}\n", text):
        for start in re.finditer(r"%(\S*) = [^\n]* collective-permute-start\(", computation):
            between = computation[start.end() :].partition(f"collective-permute-done(%{start[1]})")
            assert between[1], start[0]
            assert re.search(r"__gpu\$xla\.gpu\.triton|mosaic_gpu", between[0]), start[0]
            transfers += 1
    assert transfers == 6  # XLA has one for several steps in a loop, and one for both passes

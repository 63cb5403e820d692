"""Where `mosaic_gpu` refuses a call, where it is selected, and which of its kernels and tiles then run."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

import jflex
from jflex.backends.gpu import triton
from pallas_kernels.plan import Refusal
from tests.kernels.test_hopper import BACKEND, NEEDS_011
from tests.support import gpu_compile

X = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16)
REFUSALS = [
    ("float32", jax.ShapeDtypeStruct(X.shape, jnp.float32), {}, r"bfloat16 or float16, not float32"),
    ("head size", jax.ShapeDtypeStruct((1, 256, 2, 300), X.dtype), {}, r"head sizes up to 256, not 300"),
    ("blocks", X, {"block_mask": jflex.create_block_mask(jflex.masks.causal(), None, None, 256, 256, block_size=32)},
     r"blocks of the mask are 32 x 32 \(create the mask with a `block_size` that is a multiple of 64\)"),
    ("rows of a warp group", X, {"config": jflex.Config(forward=jflex.Tiles(32, 64, num_warps=8))},
     r"64 or 128 queries, or .* `config` sets 32 queries and 8 warps"),
    ("shared memory", jax.ShapeDtypeStruct((1, 512, 2, 256), X.dtype),
     {"config": jflex.Config(forward=jflex.Tiles(128, 128, num_warps=8, num_stages=4))},
     r"needs \d+ bytes of shared memory, and a CTA has 232448"),
    ("a primitive", X, {"score_mod": lambda s, b, h, q, k: s + jax.lax.population_count(q ^ k).astype(jnp.float32)},
     r"`score_mod` .* cannot run in its kernels: primitive `population_count` has no lowering for Mosaic GPU"),
    ("rows of a warp group", X, {"config": jflex.Config(forward=jflex.Tiles(32, 64, num_warps=4))},
     r"64 or 128 queries, or .* `config` sets 32 queries and 4 warps"),
    ("keys of four groups", X, {"config": jflex.Config(forward=jflex.Tiles(256, 128, num_warps=16))},
     r"four warp groups have registers for tiles of 64 keys, and for head sizes up to 64"),
    ("keys of a tile", X, {"config": jflex.Config(forward=jflex.Tiles(128, 32, num_warps=8))},
     r"its tiles are multiples of 64 keys, and `config` sets tiles of 32"),
    ("tiles of lengths", X, {"kv_lengths": jnp.full(1, 200), "config": jflex.Config(forward=jflex.Tiles(192, 64, 12))},
     r"divide blocks of \(128, 128\), and `config` sets tiles of \(192, 64\)"),
    ("interpreter", X, {"config": jflex.Config(interpret=True)}, r"no interpreter; they run on a Hopper GPU"),
]  # fmt: skip


@NEEDS_011
@pytest.mark.parametrize(("x", "arguments", "message"), [row[1:] for row in REFUSALS], ids=[row[0] for row in REFUSALS])
def test_refuses(x, arguments, message):
    call = functools.partial(jflex.flex_attention, implementation=BACKEND, **arguments)
    with pytest.raises(jflex.UnsupportedError, match=message), gpu_compile.absent_gpu():
        jax.jit(call).trace(x, x, x)


def test_is_refused_off_hopper():
    x = jnp.zeros((1, 64, 1, 64), jnp.bfloat16)
    with pytest.raises(jflex.UnsupportedError, match=r"needs a Hopper GPU \(H100, H200\), and this call runs on cpu"):
        jflex.flex_attention(x, x, x, implementation=BACKEND)


def chosen(T=1024, block=None, heads=2, D=64, Dv=None, **arguments):
    """What would run, on a Hopper GPU, where no implementation is named."""
    x, value = (jax.ShapeDtypeStruct((1, T, heads, size), jnp.bfloat16) for size in (D, Dv or D))
    mask = None if block is None else jflex.create_block_mask(jflex.masks.causal(), None, None, T, T, block_size=block)
    with gpu_compile.absent_gpu():
        return jflex.explain(x, x, value, block_mask=mask, **arguments)


@NEEDS_011
@pytest.mark.parametrize(("version", "refused"), [(12080, "12.8.0"), (12090, "12.9.0"), (12091, None), (None, None)])
def test_refuses_cuda_that_miscompiles(monkeypatch, version, refused):
    from pallas_kernels.mosaic_gpu.plan import limits as toolkit

    monkeypatch.setattr(toolkit, "_runtime_version", lambda: version)
    reason = chosen().reasons.get(BACKEND)
    assert reason is None if refused is None else f"the assembler of CUDA {refused} miscompiles" in reason


@NEEDS_011
@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({}, None),
        ({"block": 128}, None),
        ({"block": 64}, "blocks of 64 queries keep one"),
        ({"block": 64, "T": 16384, "heads": 16}, "blocks of 64 queries keep one"),
        ({"T": 256}, "4 tiles of 128 queries leave some of the 132"),
        ({"T": 255, "D": 128}, "4 tiles of 128 queries leave some of the 132"),
        ({"T": 128, "heads": 132}, None),
        ({"T": 127, "heads": 132}, "below 128 queries or keys"),
        ({"T": 4}, "for this call of few queries"),
        ({"T": 256, "D": 128}, None),
        ({"T": 1023, "heads": 80, "D": 32}, "below 1024 queries or keys, at head sizes up to 32, 'triton' is faster"),
        ({"heads": 80, "D": 32}, None),
        ({"T": 512, "heads": 80, "D": 32, "score_mod": lambda s, b, h, q, k: s * 2}, None),
        ({"heads": 80, "score_mod": lambda s, b, h, q, k: jnp.sin(s)}, "sin, cos or tan of each score"),
    ],
)
def test_is_first_where_it_is_faster(arguments, reason):
    account = chosen(**arguments)
    assert account.backend == ("triton" if reason else BACKEND)
    assert reason is None or reason in account.reasons[BACKEND]
    assert chosen(**arguments, implementation=BACKEND).backend == BACKEND


@NEEDS_011
@pytest.mark.parametrize(
    ("arguments", "tile"),
    [
        ({}, "192 x 128 (12 warps"),
        ({"D": 96, "heads": 32}, "192 x 96 (12 warps"),
        ({"D": 96, "block": 128}, "192 x 96 (12 warps"),
        ({"D": 96, "T": 1024, "heads": 132}, "128 x 128"),  # as many queries for each SM, with padding
        ({"D": 80}, "128 x 128"),
        ({"D": 128}, "128 x 192 (8 warps"),
        ({"D": 128, "T": 8100}, "128 x 128"),  # padded by 2 %
        ({"D": 128, "score_mod": lambda s, b, h, q, k: s * 2}, "128 x 128"),
        ({"D": 128, "block": 128}, "128 x 128"),
        ({"D": 192}, "128 x 64"),
        ({"D": 192, "Dv": 128}, "128 x 128"),
        ({"D": 192, "Dv": 128, "block": 128}, "128 x 128"),
        ({"T": 4096}, "128 x 128"),  # two waves for three of two thirds
        ({"block": 128}, "192 x 128 (12 warps"),
        ({"mask_mod": jflex.masks.causal()}, "192 x 128 (12 warps"),
        ({"mask_mod": jflex.masks.causal(), "heads": 4}, "128 x 128"),
        ({"mask_mod": jflex.masks.sliding_window(1024)}, "128 x 128"),
        ({"T": 1024, "heads": 132}, "256 x 64 (16 warps"),
        ({"T": 1024, "heads": 132, "block": 128}, "256 x 64 (16 warps"),
        ({"T": 1024, "heads": 132, "mask_mod": jflex.masks.sliding_window(256)}, "128 x 128"),
        ({"T": 1024}, "128 x 128"),  # half as many CTAs
        ({"T": 384, "heads": 132}, "128 x 128"),  # every other tile of 256 is half empty
        ({"T": 576, "heads": 512}, "192 x 128 (12 warps"),
        ({"T": 128, "heads": 132}, "128 x 64 (8 warps"),
        ({"T": 128, "heads": 132, "config": jflex.Config(batch_invariant=True)}, "128 x 128"),  # S may be room
    ],
)
def test_wide_tiles_where_they_are_faster(arguments, tile):
    assert f"forward {tile}" in chosen(**{"T": 16384, "heads": 16, **arguments}).tiles


@NEEDS_011
@pytest.mark.parametrize("name", ["sinks_and_window", "hole", "from_kv_blocks"])
def test_lists_are_read_where_they_may_skip_tiles_of_a_range(name):
    x, causal = jax.ShapeDtypeStruct((1, 16384, 16, 64), jnp.bfloat16), jflex.masks.causal()
    more = {"sinks_and_window": lambda b, h, q, k: (k < 4) | (q - k < 1024), "hole": lambda b, h, q, k: k // 128 != 1}
    mask = jflex.create_block_mask(jflex.and_masks(causal, more.get(name, causal)), None, None, 16384, 16384)
    if name == "from_kv_blocks":
        mask = jflex.BlockMask.from_kv_blocks(*mask.lists[:4], mask_mod=causal)
    with gpu_compile.absent_gpu():
        assert "forward 128 x 128" in jflex.explain(x, x, x, block_mask=mask, implementation=BACKEND).tiles


@NEEDS_011
def test_a_call_with_drawn_tiles_is_traced_without_transfers_and_under_vmap():
    """JAX does not batch the counter of tiles: calls are computed one after the other."""
    x = jax.ShapeDtypeStruct((2, 8, 1024, 16, 64), jnp.bfloat16)
    attend = lambda *args: jflex.flex_attention(*args, mask_mod=jflex.masks.causal(), implementation=BACKEND)
    total = lambda *args: jax.vmap(attend)(*args).astype(jnp.float32).sum()
    with gpu_compile.absent_gpu(), jax.transfer_guard("disallow"):
        assert "scan" in str(jax.jit(jax.grad(total)).trace(x, x, x).jaxpr)


# --- tangents

CUSTOM = jax.custom_vjp(lambda x: x * x)
CUSTOM.defvjp(lambda x: (CUSTOM(x), x), lambda x, ct: (2 * x * ct,))
MANY_CALLS = lambda s, b, h, q, k: jax.nn.gelu(jnp.sin(jax.nn.softplus(jax.nn.gelu(jnp.cos(s)))))


@NEEDS_011
@pytest.mark.parametrize(
    ("arguments", "backend", "text"),
    [
        ({}, BACKEND, "; tangent 128 x 128 (8 warps"),
        ({"block": 64}, BACKEND, "; tangent 64 x 64 (4 warps"),
        ({"D": 192}, BACKEND, "; tangent 128 x 64 (8 warps"),
        ({"D": 256}, BACKEND, "; tangent 64 x 64 (4 warps"),
        ({"score_mod": lambda s, b, h, q, k: jax.nn.gelu(jax.nn.softplus(s))}, BACKEND, "; tangent 128 x 64 (8 warps"),
        ({"score_mod": MANY_CALLS}, "triton", "computes more on each element than registers hold"),
        ({"score_mod": lambda s, b, h, q, k: CUSTOM(s)}, "xla", "primitive `custom_lin` has no meaning on a tile"),
    ],
)
def test_tangents_run_where_explain_says(arguments, backend, text):
    account = chosen(**arguments, config=jflex.Config(forward_mode=True))
    assert account.tangents == backend
    assert text in str(account)


# --- gradients

BELOW = "below {} queries or keys, at head sizes up to {}, it is faster"
WIDE = jflex.Tiles(128, 128, num_warps=8)


@pytest.mark.full
@NEEDS_011
@pytest.mark.parametrize(
    ("sizes", "config", "reason"),
    [
        ((256, 64), {}, BELOW.format(1024, 64)),
        ((1023, 64), {}, BELOW.format(1024, 64)),
        ((1024, 64), {}, None),
        ((256, 128), {}, None),
        ((256, 64), {"deterministic": True}, None),
        ((2047, 32), {}, BELOW.format(2048, 32)),
        ((2048, 32), {}, None),
        ((256, 64), {"dkv": jflex.Tiles(64, 64, num_warps=4)}, None),  # tiles that are set are used
        # Tiles that do not do.
        ((1024, 64), {"dq": jflex.Tiles(128, 64, num_warps=8)}, "sets tiles for dq alone"),
        ((1024, 64), {"dkv": jflex.Tiles(64, 64, num_warps=8)},
         "takes 64 rows, and `config` sets for dkv `block_kv` 64"),
        ((1024, 64), {"dkv": WIDE, "deterministic": True}, "no tiles for dq, which a kernel of its"),
        ((1024, 64), {"dkv": jflex.Tiles(64, 128, num_warps=8)}, "no tiles for dq, which a kernel of its own"),
        ((1024, 64), {"dkv": WIDE}, None),
    ],
)  # fmt: skip
def test_gradients_are_left_to_triton_where_it_is_faster_or_tiles_do_not_do(sizes, config, reason):
    arguments = {"T": sizes[0], "D": sizes[1], "heads": 80, "config": jflex.Config(**config)}
    account = chosen(**arguments)
    assert account.gradients == ("triton" if reason else BACKEND)
    assert (reason or "") in account.gradients_reason
    assert f"gradients {account.gradients}{', because ' if reason else ''}" in str(account)
    if "dkv" in config and reason is None:
        assert f"dkv and dq {config['dkv'].block_q} x {config['dkv'].block_kv}" in account.tiles
    if "dkv" not in config and "dq" not in config:
        assert chosen(**arguments, implementation=BACKEND).gradients == BACKEND


@pytest.mark.full
@NEEDS_011
def test_gradients_stay_where_nobody_else_can_compute_them(monkeypatch):
    monkeypatch.setattr(triton.Triton, "plan", lambda self, spec, requested: Refusal("it cannot"))
    assert chosen(256, heads=80).gradients == BACKEND


@NEEDS_011
@pytest.mark.skipif(gpu_compile.missing() is not None, reason="compiles for a GPU")
@pytest.mark.parametrize(("length", "kernels"), [(256, {"forward"}), (1024, {"forward", "backward"})])
def test_gradients_run_where_explain_says(length, kernels):
    x = jax.ShapeDtypeStruct((2, length, 80, 64), jnp.bfloat16)
    total = lambda *args: jflex.flex_attention(*args).astype(jnp.float32).sum()
    compiled = gpu_compile.compile_kernels(jax.grad(total, (0, 1, 2)), x, x, x)
    assert {name for name in kernels | {"backward"} if any(f"{name}_sm90" in k.name for k in compiled)} == kernels


@pytest.mark.full
@NEEDS_011
@pytest.mark.parametrize(
    ("length", "D", "bias", "kernels"),
    [
        (1023, 128, None, "dkv 64 x 128"),
        (1024, 64, None, "dkv and dq 128 x 128"),
        (1024, 128, None, "dkv and dq 64 x 128"),
        (4096, 64, ((4096, 4096), jnp.int16), "dkv and dq 128 x 128"),
        (4096, 64, ((4096, 4096), jnp.int32), "dkv 128 x 128"),  # TMA loads 32-bit elements for dQ only
        (4096, 64, ((4096, 4100), jnp.int32), "dkv and dq 128 x 128"),  # which it does not bring
        (4096, 128, ((4096, 4096), jnp.int16), "dkv and dq 64 x 128"),
        (1024, (192, 128), None, "dkv and dq 64 x 128"),
        (4096, (192, 128), ((4096, 4096), jnp.int16), "dkv and dq 64 x 128"),
        (1024, 192, None, "dkv 64 x 64"),
    ],
)
def test_one_pass_where_it_is_faster(length, D, bias, kernels):
    elements = jnp.zeros(*(bias or ((), jnp.int16)))  # integers have no gradient
    mod = None if bias is None else lambda s, b, h, q, k: s + elements[q, k].astype(jnp.float32)
    D, Dv = D if isinstance(D, tuple) else (D, D)
    tiles = chosen(length, D=D, Dv=Dv, score_mod=mod).tiles
    assert f" {kernels} " in tiles
    assert ("bias tiles by TMA" in tiles) == (bias is not None and bias[0][1] % 32 == 0)


@NEEDS_011
def test_explain_says_which_kernels_compute_gradients():
    assert "dq 128 x 128" in chosen(config=jflex.Config(deterministic=True)).tiles.split("dkv")[1]
    table = jnp.zeros(2048)
    by_distance = chosen(score_mod=lambda s, b, h, q, k: s + table[q - k + 1024])
    assert "dkv and dq 128 x 128" in by_distance.tiles
    assert "gradients of arrays that are read by query and key at once by 'triton'" in by_distance.tiles
    by_element = chosen(score_mod=lambda s, b, h, q, k: s + table[(q * k + h + b) % 2048])
    assert by_element.gradients == "triton"
    assert by_element.gradients_reason.startswith("the gradient of an array that is read by query and key")


KEPT = jflex.Config(deterministic=True)
BIASES = [  # batch, index, shape, configuration, and the kernels besides that for dK and dV ("" is of `triton`)
    ("each its own", 2, lambda b, h, q, k: (b, h, q, k), (2, 2, 512, 512), None, {"dq"}),
    ("of one text", 1, lambda b, h, q, k: (h, q, k), (2, 512, 512), None, {"dq"}),
    ("shared by the batch", 8, lambda b, h, q, k: (h, q, k), (2, 512, 512), None, {"captured and dq"}),
    ("shared by all", 2, lambda b, h, q, k: (q, k), (512, 512), None, {"captured and dq"}),
    ("in order", 8, lambda b, h, q, k: (h, q, k), (2, 512, 512), KEPT, {"captured", "dq"}),
    ("of few", 2, lambda b, h, q, k: (h, q, k), (2, 512, 512), None, {"dq", ""}),
    ("longer", 8, lambda b, h, q, k: (h, q, k), (2, 520, 512), None, {"dq", ""}),
    ("of one layer", 8, lambda b, h, q, k: (1, q, k), (3, 512, 512), None, {"dq", ""}),
    ("of more heads", 8, lambda b, h, q, k: (h, q, k), (4, 512, 512), None, {"dq", ""}),
    ("of other heads", 8, lambda b, h, q, k: (h + 2, q, k), (4, 512, 512), None, {"dq", ""}),
]


@pytest.mark.full
@NEEDS_011
@pytest.mark.parametrize(
    ("batch", "index", "shape", "config", "kernels"), [x[1:] for x in BIASES], ids=[x[0] for x in BIASES]
)
def test_which_kernel_computes_the_gradient_of_a_pair_bias(batch, index, shape, config, kernels):
    x, bias = jax.ShapeDtypeStruct((batch, 512, 2, 64), jnp.bfloat16), jnp.zeros(shape)
    mod = lambda s, b, h, q, k: s + bias[index(b, h, q, k)]
    with gpu_compile.absent_gpu():
        account = jflex.explain(x, x, x, mod, implementation=BACKEND, config=config)
    assert set(re.findall(r", ([a-z ]+) \d|by '(?:triton)'", account.tiles)) == {"dkv", *kernels}

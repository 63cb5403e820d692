"""Which backend runs a call, what `explain` says of it, and what a BlockMask saves."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jflex
from jflex._call.dispatch import get_backend, select_forward, select_passes
from jflex.backends.base import Plan
from jflex.paged import PagedBatch, PagedCache
from pallas_kernels.plan import GradientRequest, Refusal
from tests.cases.features import BACKENDS
from tests.support import gpu_compile
from tests.support.rows import in_turns
from tests.support.specs import spec_of

B, T, H, D = 1, 256, 2, 64
X = jax.ShapeDtypeStruct((B, T, H, D), jnp.bfloat16)


def halve_mod(s, b, h, q, k):
    return jax.lax.while_loop(lambda x: x > 1, lambda x: x / 2, s)


def spec(platform="cpu", **fields):
    return spec_of(platform=platform, **fields)


def test_a_cpu_runs_xla_without_a_warning():
    x = jnp.zeros((1, 8, 2, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert select_forward(None, spec()) == "xla"
        jflex.flex_attention(x, x, x)


def test_a_gpu_runs_triton():
    assert select_forward(None, spec("gpu")) == "triton"


def test_a_gpu_that_falls_to_xla_warns_with_the_reasons():
    with pytest.warns(UserWarning, match=r"slower implementation 'xla'.*triton: .*head sizes up to 256, not 300"):
        assert select_forward(None, spec("gpu", D=300)) == "xla"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert select_forward(("triton", "xla"), spec("gpu", D=300)) == "xla"


@pytest.mark.parametrize("refuses", [False, True])
def test_a_slower_backend_runs_what_the_faster_one_refuses(monkeypatch, refuses):
    """For example arrays that only the slower one can address; not `xla`, which is slower still."""
    first, second = get_backend("mosaic_gpu"), get_backend("triton")
    monkeypatch.setattr(type(first), "plan", lambda *_: Plan(lambda: ""))
    monkeypatch.setattr(type(first), "not_preferred", lambda *_: "it is slow")
    monkeypatch.setattr(type(second), "plan", lambda *_: Refusal("it cannot") if refuses else Plan(lambda: ""))
    call, everything = spec("gpu"), GradientRequest(True, True, True, ())
    assert select_forward(None, call) == ("mosaic_gpu" if refuses else "triton")
    assert select_passes(None, call, everything).backward == ("mosaic_gpu" if refuses else "triton")


def test_the_warning_points_to_the_line_of_the_user(monkeypatch):
    monkeypatch.setattr("jflex.entry.current_device", lambda *_: ("gpu", ""))
    x, ends = jnp.zeros((2, 1, 264)), jnp.array([0, 2])
    cache = PagedCache.create(2, 16, 1, 264, dtype=jnp.float32)
    batch = PagedBatch(ends, jnp.array([2]), jnp.array([[1]]))
    for call in (
        lambda: jflex.flex_attention(x[None], x[None], x[None]),
        lambda: jflex.paged_attention(x, cache, batch),
        lambda: jflex.flex_attention_varlen(x, x, x, cu_seqlens_q=ends, cu_seqlens_k=ends),
    ):
        with pytest.warns(UserWarning, match="slower implementation 'xla'") as found:
            call()
        assert [warning.filename for warning in found] == [__file__]


def test_the_first_of_a_sequence_that_can_run_is_taken():
    assert select_forward(("xla", "triton"), spec("gpu")) == "xla"
    assert select_forward(("triton", "reference"), spec()) == "reference"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"platform": "cpu"}, r"needs an NVIDIA GPU, and this call runs on cpu"),
        ({"platform": "tpu"}, r"this call runs on tpu"),
        ({"dtype": "float64"}, r"not float64"),
        ({"Dv": 512}, r"up to 256, not 512"),
    ],
)
def test_reasons_of_triton(fields, reason):
    with pytest.raises(jflex.UnsupportedError, match=rf"triton: .*{reason}.*These do: 'xla', 'reference'"):
        select_forward(("triton",), spec(**{"platform": "gpu", **fields}))


def test_a_mod_that_has_no_meaning_on_a_tile_names_function_primitive_and_way_out():
    config = jflex.Config(interpret=True)
    x = jnp.zeros((1, 8, 2, 16))
    run = functools.partial(jflex.flex_attention, x, x, x, halve_mod)
    with pytest.raises(jflex.UnsupportedError) as caught:
        run(implementation="triton", config=config)
    for part in ("halve_mod (test_dispatch.py:", "`while`", "implementation='xla'"):
        assert part in str(caught.value)
    assert run(implementation="xla").shape == x.shape


def test_arrays_of_bytes_that_pallas_cannot_address_are_refused():
    def account(seen):
        return jflex.explain(X, X, X, mask_mod=lambda b, h, q, k: seen[h, q, k], config=jflex.Config(interpret=True))

    found = {}
    for heads in (8, 9, 17):
        array = jax.ShapeDtypeStruct((heads, 1 << 14, 1 << 14), jnp.bool_)
        jax.eval_shape(lambda seen, heads=heads: found.update({heads: account(seen).backend}), array)
    assert found == {8: "triton", 9: "xla", 17: "triton"}


def test_explain_of_a_cpu_call():
    mask = jflex.create_block_mask(lambda b, h, q, k: q >= k, None, None, T, T, block_size=64)
    account = jflex.explain(X, X, X, block_mask=mask)
    assert account.backend == "xla"
    assert [*account.reasons] == ["mosaic_gpu", "triton", "official_triton"]
    assert (account.visited, account.full, account.blocks) == (20, 12, 32)
    assert account.flops == 2 * 2 * D * H * 10 * 64 * 64
    for part in (
        "backend   xla",
        "not triton: it needs an NVIDIA GPU",
        "20 of 32 visited (12 full, 8 partial)",
        "37.5 %",
    ):
        assert part in str(account)


def test_explain_for_an_absent_gpu():
    with gpu_compile.absent_gpu():
        account = jflex.explain(X, X, X)
    assert account.backend == "triton"
    assert "forward" in account.tiles


def test_explain_when_none_can_run():
    account = jflex.explain(X, X, X, implementation="triton")
    assert account.backend is None
    assert "none of the requested" in str(account)


def test_explain_under_jit_counts_no_blocks():
    def run(x, offset):
        mask = jflex.create_block_mask(lambda b, h, q, k: q + offset >= k, None, None, T, T)
        said.append(str(jflex.explain(x, x, x, block_mask=mask)))
        return x

    said = []
    jax.jit(run)(jnp.zeros(X.shape), 3)
    assert "not counted" in said[0]


@pytest.mark.full
@pytest.mark.parametrize("options", BACKENDS.values(), ids=BACKENDS)
def test_unlisted_blocks_and_unused_entries_are_never_read(options):
    """NaN in keys that no list names, and garbage after the counts, reach no output and no gradient."""
    rng = np.random.default_rng(0)
    q, k, v = jnp.asarray(rng.normal(size=(3, 1, 128, 2, 16)), jnp.float32)
    counts, numbers = jnp.array([[[1, 2, 1, 0]]]), jnp.array([[[[0, 7], [0, 1], [1, -4], [99, 99]]]])
    mask = jflex.BlockMask.from_kv_blocks(counts, numbers, block_size=32, seq_lengths=(128, 128))
    broken = [x.at[:, 64:].set(jnp.nan) for x in (k, v)]
    run = jax.value_and_grad(
        lambda q, k, v: jnp.sum(jflex.flex_attention(q, k, v, None, mask, **options) ** 2), (0, 1, 2)
    )
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), run(q, *broken), run(q, k, v))


@pytest.mark.full
@in_turns
@pytest.mark.parametrize("options", BACKENDS.values(), ids=BACKENDS)
@pytest.mark.parametrize("tiles", [(16, 64), (64, 16), (32, 32)])
def test_tiles_of_the_user_do_not_change_the_result(options, tiles):
    rng = np.random.default_rng(1)
    q, k, v = jnp.asarray(rng.normal(size=(3, 1, 100, 2, 16)), jnp.float32)
    chosen = jflex.Tiles(*tiles)
    config = jflex.Config(chosen, chosen, chosen, interpret="config" in options)
    run = lambda **options: jax.grad(
        lambda q, k, v: jnp.sum(jflex.flex_attention(q, k, v, mask_mod=lambda b, h, q, k: q >= k, **options) ** 2),
        (0, 1, 2))(q, k, v)  # fmt: skip
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5),
                 run(**{**options, "config": config}), run(implementation="reference"))  # fmt: skip


def test_the_reason_names_the_mod_of_this_call():
    """Equal programs share what is cached of them, not their names."""
    x = jnp.ones((1, 16, 1, 16))

    def alpha(score, b, h, q_idx, kv_idx):
        return jnp.sort(jnp.stack([score, score + 1]))[0]

    def beta(score, b, h, q_idx, kv_idx):
        return jnp.sort(jnp.stack([score, score + 1]))[0]

    for mod in (alpha, beta):
        with pytest.raises(jflex.UnsupportedError, match=rf"score_mod` \S*{mod.__name__} "):
            jflex.flex_attention(x, x, x, mod, implementation="triton", config=jflex.Config(interpret=True))


def test_an_empty_call_does_not_hide_that_a_backend_cannot_run():
    x = jnp.ones((1, 0, 1, 16))
    with pytest.raises(jflex.UnsupportedError, match="mosaic_gpu: it needs a Hopper GPU"):
        jflex.flex_attention(x, x, x, implementation="mosaic_gpu")


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_numpy_arrays_are_taken_as_jax_takes_them(implementation):
    x = np.ones((1, 16, 1, 16))
    assert jflex.flex_attention(x, x, x, implementation=implementation).dtype == jnp.asarray(x).dtype


def test_named_algorithms_of_products_are_passed_on():
    x = jax.random.normal(jax.random.key(0), (1, 16, 1, 16))
    with jax.default_matmul_precision("F32_F32_F32"):
        found = jflex.flex_attention(x, x, x, implementation="xla")
    assert jnp.allclose(found, jflex.flex_attention(x, x, x, implementation="reference"), atol=1e-5)


@pytest.mark.parametrize(("T", "Hq", "Hkv", "mask_heads", "kernel"), [
    (1, 8, 2, None, "decode 16 x "), (16, 4, 1, None, "decode 64 x "), (1, 4, 4, 4, "decode 16 x "),
    (17, 4, 4, None, "forward "),  # many queries
    (16, 8, 1, None, "forward "),  # more rows than a tile holds
    (1, 4, 2, 4, "forward "),  # heads that share keys, but not the blocks that they visit
])  # fmt: skip
def test_few_queries_are_decoded(T, Hq, Hkv, mask_heads, kernel):
    query = jax.ShapeDtypeStruct((2, T, Hq, 64), jnp.bfloat16)
    key = jax.ShapeDtypeStruct((2, 512, Hkv, 64), jnp.bfloat16)
    mask = (lambda b, h, q, k: k >= 3) if mask_heads is None else (lambda b, h, q, k: k >= h)
    block_mask = jflex.create_block_mask(mask, None, mask_heads, T, 512)
    account = jflex.explain(
        query, key, key, block_mask=block_mask, implementation="triton", config=jflex.Config(interpret=True)
    )
    assert f"tiles     {kernel}" in str(account)


def test_a_config_for_forward_is_not_passed_over():
    query, key = jax.ShapeDtypeStruct((2, 1, 4, 64), jnp.bfloat16), jax.ShapeDtypeStruct((2, 512, 4, 64), jnp.bfloat16)
    config = jflex.Config(forward=jflex.Tiles(16, 32), interpret=True)
    assert "forward 16 x 32" in str(jflex.explain(query, key, key, implementation="triton", config=config))
    config = jflex.Config(decode=jflex.Tiles(64, 32, num_warps=8), interpret=True)
    account = str(jflex.explain(query, key, key, implementation="triton", config=config))
    assert "decode 16 x 32 (8 warps, 2 stages, by config)" in account

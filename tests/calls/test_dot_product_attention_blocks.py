"""How `jflex.dot_product_attention` is said to the kernels: blocks, plans, memory; rows of the guide for `jax.nn`."""

import functools
import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jflex
from jflex.block_mask.bands import Band, band_block_mask
from jflex.jax_nn import translate
from tests.support import gpu_compile
from tests.support.rows import tiers

F32, I32 = jnp.float32, jnp.int32
array = lambda *shape, dtype=F32: jnp.zeros(shape, dtype)


def translated(T, S=None, heads=2, **arguments):
    S = T if S is None else S
    return translate(array(2, T, heads, 8), array(2, S, heads, 8), array(2, S, heads, 8), **arguments)


def visited(T, S=None, **arguments):
    """Blocks that are visited, the full ones of them, and all, of one head and the whole batch."""
    call = translated(T, S, heads=1, implementation="xla", **arguments)
    account = jflex.explain(**call._asdict())
    return account.visited, account.full, account.blocks


# --- blocks


@pytest.mark.full
def test_blocks_are_skipped():
    row = lambda *lengths: jnp.array(lengths, I32)
    assert visited(1024, is_causal=True) == (2 * 36, 2 * 28, 128)
    assert visited(1024, local_window_size=(200, 0)) == (2 * 21, 0, 128)
    assert visited(1024, 512, is_causal=True, local_window_size=(100, 90)) == (2 * 8, 0, 64)
    assert visited(1024, query_seq_lengths=row(1024, 130)) == (64 + 16, 64 + 8, 128)
    assert visited(1024, is_causal=True, query_seq_lengths=row(256, 0)) == (3, 1, 128)
    assert visited(1024, is_causal=True, key_value_seq_lengths=row(256, 1024)) == (15 + 36, 13 + 28, 128)
    documents = np.kron(np.eye(4, dtype=bool), np.ones((256, 256), bool))
    assert visited(1024, mask=documents) == (2 * 16, 2 * 16, 128)
    assert visited(1024, mask=documents, is_causal=True) == (2 * 12, 2 * 4, 128)
    assert visited(1024, mask=np.arange(1024) < 300) == (2 * 24, 2 * 16, 128)


def test_lengths_may_be_traced():
    def states(lengths):
        return translated(512, is_causal=True, query_seq_lengths=lengths).block_mask.states()

    found = jax.jit(states)(jnp.array([512, 130], I32))
    assert (found > 0).sum((1, 2, 3)).tolist() == [10, 3]
    assert jax.jit(states)(jnp.array([9999, -3], I32)).sum((1, 2, 3)).tolist() == [16, 0]


def test_lists_are_left_out_where_they_would_say_nothing():
    nothing = translated(512, local_window_size=(511, 4096))
    assert nothing.block_mask is nothing.mask_mod is None
    for call in (
        translated(128, is_causal=True),
        translated(200, local_window_size=50),
        translated(1, 4096, mask=array(2, 1, 1, 4096, dtype=bool)),
        translated(1024, mask=array(2, 2, 1024, 1024, dtype=bool)),  # a mask of each head costs as much to read
    ):
        assert call.block_mask is None
        assert call.mask_mod is not None
    lengths = translated(1024, key_value_seq_lengths=jnp.array([3, 4], I32))
    assert lengths.block_mask is lengths.mask_mod is None
    assert lengths.kv_lengths is not None


BANDS = [
    (Band(*sides).within(T, S), (T, S), block)
    for sides, (T, S), block in itertools.product(
        [(None, 0), (3, None), (7, 5), (20, -9), (-4, 11)], [(40, 40), (33, 70), (64, 17)], [(16, 16), (16, 32)]
    )
]


@pytest.mark.full
@pytest.mark.parametrize("with_lengths", [False, True])
def test_blocks_of_bands_are_exact(with_lengths):
    lengths = jnp.array([0, 13, 64], I32) if with_lengths else None
    batch = 3 if with_lengths else None
    for band, (T, S), block in BANDS:
        left, right = (n if x is None else x for x, n in zip(band, (T, S), strict=True))

        def visible(b, h, q_idx, kv_idx, left=left, right=right):
            seen = (kv_idx >= q_idx - left) & (kv_idx <= q_idx + right)
            return seen if lengths is None else seen & (q_idx < lengths[b])

        found = band_block_mask(visible, band, (batch or 1, 1, T, S), block, lengths)
        expected = jflex.create_block_mask(visible, batch, None, T, S, block_size=block)
        if found is None:
            assert (expected.states() == 1).all()
            continue
        np.testing.assert_array_equal(found.states(), expected.states())
        for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
            np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
        for name in ("kv_indices", "full_kv_indices", "q_indices", "full_q_indices"):
            np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))


def test_static_lists_are_made_once_and_are_one_constant_of_a_program():
    first, again = (translated(1024, is_causal=True).block_mask.lists for _ in range(2))
    assert all(x is y for x, y in zip(first, again, strict=True))

    def layers(count, x):
        for _ in range(count):
            x = jflex.dot_product_attention(x, x, x, is_causal=True, implementation="xla")
        return x

    x = array(1, 512, 1, 8)
    sizes = [len(jax.jit(functools.partial(layers, n)).lower(x).as_text()) for n in (2, 4, 6)]
    assert sizes[2] - sizes[1] == sizes[1] - sizes[0] < 2000


@pytest.mark.full
def test_tiles_of_the_user_divide_the_blocks():
    config = jflex.Config(forward=jflex.Tiles(256, 64), dq=jflex.Tiles(64, 512))
    assert translated(2048, is_causal=True, config=config).block_mask.block_size == (256, 512)


# --- memory


T_LONG = 4096


@tiers(default={"arguments": "is_causal"})
@pytest.mark.parametrize(
    "arguments",
    [
        {"is_causal": True},
        {"local_window_size": (100, 7)},
        {"query_seq_lengths": array(1, dtype=I32), "key_value_seq_lengths": array(1, dtype=I32)},
        {"mask": array(1, 1, 1, T_LONG, dtype=bool), "bias": array(1, 1, T_LONG), "is_causal": True},
    ],
    ids=lambda arguments: "-".join(arguments),
)
def test_no_array_of_queries_times_keys(arguments):
    static = {name: x for name, x in arguments.items() if not isinstance(x, jax.Array)}
    data = {name: x for name, x in arguments.items() if name not in static}

    def loss(q, k, v, data):
        return jflex.dot_product_attention(q, k, v, **data, **static, implementation="xla").sum()

    x = array(1, T_LONG, 1, 8)
    gradients = jax.jit(jax.grad(loss, (0, 1, 2)))
    memory = gradients.lower(x, x, x, data).compile().memory_analysis()
    assert memory.temp_size_in_bytes < T_LONG * T_LONG / 2  # half a byte for each score


@pytest.mark.full
@pytest.mark.parametrize("shape", [(2, 1, 1, 300), (1, 4, 300, 1), (300, 300), (1,), (4, 1, 1)])
def test_a_bias_is_captured_at_its_own_size_and_its_gradient_has_its_shape(shape):
    bias = jax.random.normal(jax.random.key(1), shape)
    x = jax.random.normal(jax.random.key(0), (2, 300, 4, 8))
    call = translate(x, x, x, bias, mask=bias > -1)
    captured = [*call.block_mask.mask_operands] if call.block_mask else []
    captured += [c.cell_contents for c in call.score_mod.__closure__ if isinstance(c.cell_contents, jax.Array)]
    assert all(c.size <= bias.size for c in captured)
    run = lambda attend: jax.grad(lambda bias: jnp.sin(attend(x, x, x, bias)).sum())(bias)
    found = run(functools.partial(jflex.dot_product_attention, implementation="xla"))
    assert found.shape == shape
    with jax.numpy_rank_promotion("allow"):
        np.testing.assert_allclose(found, run(jax.nn.dot_product_attention), rtol=2e-4, atol=2e-5)


# --- plans


PLANNED = {
    "causal": {"is_causal": True},
    "window": {"local_window_size": (100, 0)},
    "mask": {"mask": (2, 1, 1024, 1024)},
    "mask_of_heads": {"mask": (2, 8, 1024, 1024), "is_causal": True},
    "mask_of_keys": {"mask": (2, 1, 1, 1024)},
    "bias": {"bias": (1, 8, 1024, 1024)},
    "lengths": {"query_seq_lengths": (2,), "key_value_seq_lengths": (2,)},
    "all": {"is_causal": True, "mask": (2, 1, 1024, 1024), "bias": (8, 1024, 1024), "query_seq_lengths": (2,)},
}
DTYPES = {"mask": jnp.bool_, "bias": jnp.bfloat16, "query_seq_lengths": I32, "key_value_seq_lengths": I32}


@pytest.mark.parametrize("name", PLANNED)
@pytest.mark.parametrize("backend", ["triton", "mosaic_gpu"])
def test_kernels_take_it(name, backend):
    if backend == "mosaic_gpu" and jax.__version_info__ < (0, 11):
        pytest.skip("Mosaic GPU is used from JAX 0.11 on")
    data = {k: jax.ShapeDtypeStruct(x, DTYPES[k]) for k, x in PLANNED[name].items() if k in DTYPES}
    static = {k: x for k, x in PLANNED[name].items() if k not in DTYPES}
    shapes = [jax.ShapeDtypeStruct((2, 1024, heads, 64), jnp.bfloat16) for heads in (8, 2, 2)]
    accounts = []

    def plan(*arrays, **data):
        call = translate(*arrays, **data, **static, implementation=backend)
        with gpu_compile.absent_gpu():
            accounts.append(jflex.explain(**call._asdict()))

    jax.eval_shape(plan, *shapes, **data)
    assert accounts[0].backend == backend, accounts[0]
    assert "no gradients" not in accounts[0].tiles


# --- the signature, and wrong input


def test_the_signature_is_that_of_jax():
    theirs = list(inspect.signature(jax.nn.dot_product_attention).parameters.values())
    ours = list(inspect.signature(jflex.dot_product_attention).parameters.values())
    comparable = lambda parameters: [(p.name, p.kind, p.default) for p in parameters]
    assert comparable(ours[: len(theirs)]) == comparable(theirs)
    assert [p.name for p in ours[len(theirs) :]] == ["config"]


@pytest.mark.full
def test_float64_with_a_mask_has_no_infinities():
    with jax.enable_x64(), jax.debug_infs(True):
        query, key = jnp.zeros((5, 6, 11), jnp.float64), jnp.zeros((7, 3, 11), jnp.float64)
        out = jflex.dot_product_attention(query, key, key, mask=jnp.arange(7) <= 3)
        assert out.block_until_ready().dtype == jnp.float64


@pytest.mark.parametrize(
    "window", [(-1, 0), *(pytest.param(x, marks=pytest.mark.full) for x in ((0, -1), (-1, -1), -1))]
)
def test_a_window_that_would_hide_all_keys(window):
    """-1 is no bound, as in FlashAttention."""
    query = jax.random.normal(jax.random.key(0), (1, 9, 2, 8))
    left, right = (9 if side == -1 else side for side in (window if isinstance(window, tuple) else (window,) * 2))
    found = jflex.dot_product_attention(query, query, query, local_window_size=window)
    expected = jax.nn.dot_product_attention(query, query, query, local_window_size=(left, right))
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)

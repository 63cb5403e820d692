"""`jflex.dot_product_attention` against `jax.nn.dot_product_attention` and float64, on what JAX's own tests try."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jflex
from tests.support import oracle, tolerance
from tests.support.rows import in_turns, tiers

INTERPRET = {"implementation": "triton", "config": jflex.Config(interpret=True, contain_nan=False)}
assert_close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5)


class Case(NamedTuple):
    """Sizes of a call, and its other arguments; of `bias` and `mask` the shapes."""

    arguments: dict
    Hkv: int = 4
    B: int = 2
    T: int = 128
    S: int = 128
    Hq: int = 4
    D: int = 32
    unbatched: bool = False


PADDING = {"query_seq_lengths": (64, 32), "key_value_seq_lengths": (32, 64)}  # JAX's tests; queries may see no key
SEEN = {"query_seq_lengths": (190, 32), "key_value_seq_lengths": (200, 140)}
LONG = {"T": 190, "S": 200, "D": 16, "Hkv": 2}  # more than one block, and none of them whole
BIAS, MASK = {"bias": (1, 4, 128, 128)}, {"mask": (1, 1, 128, 128)}
CASES = {
    # Those of JAX's tests/nn_test.py.
    "groups_of_two": Case({}, Hkv=2),
    "one_key_head": Case({}, Hkv=1),
    "bias": Case(BIAS),
    "causal": Case({"is_causal": True}),
    "causal_padding": Case({"is_causal": True} | PADDING),
    "custom_padding": Case(MASK | PADDING),
    "bias_causal": Case({"is_causal": True} | BIAS),
    "causal_custom": Case({"is_causal": True} | MASK),
    "causal_window": Case({"is_causal": True, "local_window_size": (3, 2)}),
    "window": Case({"local_window_size": (3, 0)}),
    "bias_of_each_and_mask_of_keys": Case({"bias": (16, 4, 128, 128), "mask": (1, 1, 128)}, B=16, D=16),
    "bias_and_mask_batch_of_one": Case({"bias": (1, 4, 128, 128), "mask": (1, 1, 128)}, B=1),
    "unbatched": Case({"bias": (4, 128, 128), "mask": (1, 1, 128)}, B=1, unbatched=True),
    # Lengths of more than one block, and what hides part of them.
    "long_causal": Case({"is_causal": True}, **LONG),
    "long_padding": Case({"is_causal": True} | SEEN, **LONG),
    "long_window": Case({"local_window_size": (150, 3)}, **LONG),
    "long_future": Case({"local_window_size": (-1, 30), "scale": 0.1, "mask": (190, 200)}, **LONG),
    "long_mask": Case({"mask": (2, 1, 190, 200), "bias": (4, 1, 200), "is_causal": True}, **LONG),
    "long_mask_of_heads": Case({"mask": (1, 4, 190, 200)} | SEEN, **LONG),
    "long_mask_of_keys": Case({"mask": (2, 1, 1, 200), "bias": (2, 1, 190, 1), "local_window_size": 100}, **LONG),
    "few_queries": Case({"mask": (2, 1, 1, 200)}, **(LONG | {"T": 2})),
}


@functools.cache
def drawn(name: str, dtype: str) -> tuple[list, dict]:
    """Query, key, value and the cotangent of the output; and the other arguments. In numpy."""
    n, rng = CASES[name], np.random.default_rng(0)
    shapes = [(n.B, n.T, n.Hq, n.D), *[(n.B, n.S, n.Hkv, n.D)] * 2, (n.B, n.T, n.Hq, n.D)]
    arrays = [rng.normal(size=shape).astype(jnp.dtype(dtype)) for shape in shapes]
    more = dict(n.arguments)
    if "bias" in more:
        more["bias"] = rng.normal(size=more["bias"]).astype(jnp.dtype(dtype))
    if "mask" in more:
        more["mask"] = rng.random(more["mask"]) < 0.7
        more["mask"][..., 0] = True
        if name.startswith("custom"):
            more["mask"] = np.tril(np.ones((1, 1, n.T, n.S), bool))
    return arrays, {k: np.array(x, np.int32) if k.endswith("lengths") else x for k, x in more.items()}


@functools.cache
def exact(name: str, dtype: str) -> tuple[oracle.Forward, oracle.Gradients]:
    arrays, more = drawn(name, dtype)
    n = CASES[name]
    q, k, v, d_out = (x.astype(np.float64) for x in arrays)
    shape = (n.B, n.Hq, n.T, n.S)
    visible = np.ones(shape, bool)
    b, _, t, s = np.ogrid[tuple(map(slice, shape))]
    if "mask" in more:
        visible &= more["mask"]
    if more.get("is_causal"):
        visible &= t >= s
    if "local_window_size" in more:
        left, right = np.broadcast_to(more["local_window_size"], 2)
        visible &= (s >= t - left) & (s <= t + right)
    if "query_seq_lengths" in more:
        visible &= (t < more["query_seq_lengths"][b]) & (s < more["key_value_seq_lengths"][b])
    score, captures = None, {}
    if "bias" in more:
        bias = captures["bias"] = (
            more["bias"].astype(np.float64).reshape((1,) * (4 - more["bias"].ndim) + more["bias"].shape)
        )
        index = lambda places: tuple(i if size > 1 else 0 * i for i, size in zip(places, bias.shape, strict=True))
        score = oracle.Score(
            lambda s, *a: s + bias[index(a[:4])], d_captures=lambda s, *a: {"bias": [(1.0, index(a[:4]))]}
        )
    found = oracle.forward(q, k, v, more.get("scale", n.D**-0.5), score, lambda *_: visible, captures)
    d_lse = np.zeros(shape[:3])
    return found, oracle.gradients(q, k, v, more.get("scale", n.D**-0.5), score, found, captures, d_out, d_lse)


def differentiated(attend, name: str, dtype: str, **options):
    """Out and the gradients of query, key, value and bias, [B, T, H, D]."""
    arrays, more = drawn(name, dtype)
    data = {k: jnp.asarray(x) for k, x in more.items() if isinstance(x, np.ndarray)}
    static = {k: x for k, x in more.items() if k not in data} | options
    leave = (lambda x: x[0]) if CASES[name].unbatched else lambda x: x

    def run(data, q, k, v, d_out):
        def call(q, k, v, data):  # integers and booleans too are arguments of the vjp, as in JAX's tests
            return attend(*map(leave, (q, k, v)), **data, **static)

        out, pull = jax.vjp(call, q, k, v, data)
        *gradients, of_data = pull(leave(d_out))
        return out, *gradients, *([of_data["bias"]] if "bias" in data else [])

    with jax.default_matmul_precision("highest" if jax.default_backend() == "gpu" else None):
        return jax.jit(run)(data, *map(jnp.asarray, arrays))


@functools.cache
def by_jax_nn(name: str, dtype: str):
    with jax.numpy_dtype_promotion("standard"), jax.default_device(jax.devices("cpu")[0]):
        return differentiated(jax.nn.dot_product_attention, name, dtype)


@tiers(
    default={"name": ["groups_of_two", "causal_padding", "long_mask"], "dtype": "float32", "backend": "xla"},
    in_turns=True,
    share=2,
)
@pytest.mark.parametrize("backend", ["xla", "triton-interpret", pytest.param("triton", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_is_what_jax_nn_computes(name: str, dtype: str, backend: str):
    """Twice the error of `jax.nn` against float64, and roundings, as in `tests.support.evaluation`."""
    options = INTERPRET if backend == "triton-interpret" else {"implementation": backend}
    results = differentiated(jflex.dot_product_attention, name, dtype, **options)
    found, gradients = exact(name, dtype)
    rights = [found.out, gradients.query, gradients.key, gradients.value]
    rights += [gradients.captures["bias"]] if "bias" in gradients.captures else []
    moved = 0.0
    if dtype == "float32" or backend == "triton":
        moved = np.finfo(np.float32).eps * CASES[name].D ** 0.5 / 2 * np.abs(found.raw).max()
    for what, got, plain, right in zip(
        ("out", "query", "key", "value", "bias"), results, by_jax_nn(name, dtype), rights, strict=False
    ):
        got, plain = (np.asarray(x).reshape(right.shape) for x in (got, plain))
        rounding = tolerance.one_rounding(right, got.dtype) + 2 * moved * np.abs(right).max()
        if what != "out":
            mass = gradients.masses[what]
            rounding = tolerance.gradient_rounding(mass if what == "bias" else right, mass, found.lse, got.dtype)
            rounding = rounding + tolerance.half_rounding(dtype) * gradients.output_masses[what] + moved * mass
        tolerance.check(what, got, plain, right, rounding)
        if what == "bias" and name.startswith("long"):
            continue  # sums of many scores' gradients, of either sign: float64 alone judges them
        limit = 2e-5 if dtype == "float32" else 0.02  # JAX's own, of bfloat16
        np.testing.assert_allclose(np.float32(got), np.float32(plain), rtol=limit, atol=limit)


# --- where the two differ


@pytest.mark.full
def test_queries_without_keys_and_the_residual():
    q, k, v = (jax.random.normal(jax.random.key(i), (2, 12, 4, 8), jnp.bfloat16) for i in range(3))
    mask = jnp.ones((2, 1, 12, 12), bool).at[0, 0, 3].set(False)
    lengths = {
        "query_seq_lengths": jnp.array([12, 5], jnp.int32),
        "key_value_seq_lengths": jnp.array([12, 7], jnp.int32),
    }

    def run(q, k, v):
        return jflex.dot_product_attention(q, k, v, mask=mask, **lengths, return_residual=True)

    (out, lse), pull = jax.vjp(run, q, k, v)
    with jax.numpy_dtype_promotion("standard"):
        expected, residual = jax.nn.dot_product_attention(q, k, v, mask=mask, **lengths, return_residual=True)
    empty = np.zeros((2, 12), bool)
    empty[0, 3] = empty[1, 5:] = True
    assert out.dtype == lse.dtype == residual.dtype == jnp.bfloat16
    assert lse.shape == residual.shape == (2, 12, 4)
    assert not out[empty].any()
    assert (lse[empty] == -np.inf).all()
    assert not expected[1, 5:].any()
    assert expected[0, 3].any()
    np.testing.assert_allclose(np.float32(out[~empty]), np.float32(expected[~empty]), rtol=0.02, atol=0.02)
    np.testing.assert_allclose(np.float32(lse[~empty]), np.float32(residual[~empty]), rtol=0.02, atol=0.02)
    assert not any(x.any() for x in pull((jnp.zeros_like(out), jnp.ones_like(lse))))  # as there
    d_query, d_key, _ = pull((jnp.ones_like(out), jnp.zeros_like(lse)))
    assert not d_query[empty].any()
    assert d_query[~empty].any()
    assert d_key[0].any()


def test_unbatched_residual_and_a_head_size_of_values():
    q, v = jax.random.normal(jax.random.key(0), (12, 4, 8)), jax.random.normal(jax.random.key(1), (12, 2, 5))
    out, lse = jflex.dot_product_attention(q, q[:, :2], v, return_residual=True)
    assert (out.shape, lse.shape) == ((12, 4, 5), (12, 4))
    padded = jnp.pad(v, ((0, 0), (0, 0), (0, 3)))
    assert_close(out, jax.nn.dot_product_attention(q, q[:, :2], padded)[..., :5])


def test_shared_keys_are_as_repeated_ones():
    q, k = jax.random.normal(jax.random.key(0), (3, 12, 4, 8)), jax.random.normal(jax.random.key(1), (1, 12, 2, 8))
    assert_close(jflex.dot_product_attention(q, k, k), jax.nn.dot_product_attention(q, *[jnp.repeat(k, 3, 0)] * 2))


@pytest.mark.full
def test_numbers_and_numpy_arrays():
    x = np.random.default_rng(0).normal(size=(1, 9, 2, 8)).astype(np.float32)
    bias, mask = np.arange(9) > 4, [[[[True]]]]
    more = {"is_causal": np.bool_(True), "query_seq_lengths": [7], "key_value_seq_lengths": np.array([8], np.int32)}
    found = jflex.dot_product_attention(
        x, x, x, bias, mask, local_window_size=np.int64(6), scale=np.float32(0.3), **more
    )
    with jax.numpy_dtype_promotion("standard"):
        expected = jax.nn.dot_product_attention(
            x,
            x,
            x,
            bias,
            jnp.asarray(mask),
            local_window_size=6,
            scale=np.float32(0.3),
            **more | {"query_seq_lengths": np.array([7], np.int32)},
        )
    assert_close(found, expected)


@pytest.mark.full
@in_turns
@pytest.mark.parametrize("backend", ["xla", "triton"])
@pytest.mark.parametrize("hidden", [-np.inf, np.finfo(np.float32).min, -1e9])
def test_additive_masks(hidden, backend):
    """Also where the first keys are hidden, more than a tile of them: padding on the left."""
    x = jax.random.normal(jax.random.key(0), (1, 150, 2, 8))
    bias = jnp.where(jnp.tri(150).T > 0, 0, jnp.float32(hidden))
    options = INTERPRET if backend == "triton" else {"implementation": backend}

    def run(attend):
        loss = lambda x, bias: jnp.sin(attend(x, x, x, bias)).sum()
        return jax.value_and_grad(loss, (0, 1))(x, bias)

    found = run(functools.partial(jflex.dot_product_attention, **options))
    jax.tree.map(assert_close, found, run(jax.nn.dot_product_attention))


@pytest.mark.full
@pytest.mark.parametrize("empty", ["B", "T", "S"])
def test_nothing_to_attend(empty):
    B, T, S = (0 if name == empty else 3 for name in "BTS")
    query, key, lengths = jnp.ones((B, T, 4, 8)), jnp.ones((B, S, 2, 8)), jnp.zeros(B, jnp.int32)
    more = {"bias": jnp.ones((4, T, S)), "mask": jnp.ones((B, 1, T, S), bool), "query_seq_lengths": lengths}
    attend = lambda query: jflex.dot_product_attention(query, key, key, **more, is_causal=True, return_residual=True)
    (out, lse), pull = jax.vjp(attend, query)
    assert (out.shape, lse.shape) == (query.shape, (B, T, 4))
    assert not out.any()
    assert not pull((out, lse * 0 + 1))[0].any() or empty == "T"


# --- transformations

NAMES = ("query", "key", "value", "bias", "mask", "query_seq_lengths", "key_value_seq_lengths", "scale")


def operands(seed, *leading):
    """All that may be traced, without a batch."""
    draw = lambda i, *shape: jax.random.normal(jax.random.fold_in(jax.random.key(seed), i), (*leading, *shape))
    lengths = lambda i: jax.random.randint(jax.random.key(i + seed), (*leading, 1), 30, 150)
    mask = (draw(4, 1, 1, 150) > -1).at[..., 0].set(True)
    arrays = draw(0, 150, 2, 8), draw(1, 150, 1, 8), draw(2, 150, 1, 8), draw(3, 2, 1, 150), mask
    return dict(zip(NAMES, (*arrays, lengths(5), lengths(6), draw(7)), strict=True))


SUBSETS = (("query", "key", "value"), ("query",), ("value", "mask"), ("bias",), ("query_seq_lengths",), ("scale",))
SUBSETS += (("key", "key_value_seq_lengths"), NAMES)


@tiers(rest="full", in_turns=True, share=2)
@pytest.mark.parametrize("backend", ["xla", "triton"])
@pytest.mark.parametrize("mapped", SUBSETS, ids="-".join)
def test_vmap_over_any_subset(mapped, backend):
    one, many = operands(0), operands(1, 3)
    arrays = {name: (many if name in mapped else one)[name] for name in NAMES}
    axes = ({name: 0 if name in mapped else None for name in NAMES},)
    options = INTERPRET if backend == "triton" else {"implementation": "xla"}
    attend = lambda call, **more: lambda x: call(**x, is_causal=True, local_window_size=(130, 5), **more)
    with jax.numpy_rank_promotion("allow"):
        expected = jax.vmap(attend(jax.nn.dot_product_attention), axes)(arrays)
    assert_close(jax.vmap(attend(jflex.dot_product_attention, **options), axes)(arrays), expected)

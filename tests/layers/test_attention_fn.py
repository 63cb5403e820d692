"""`flax_layers.attention_fn` against Flax's own functions, and which blocks it skips where Flax passes `is_causal`."""

import dataclasses
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import jflex
from flax_layers import attention_fn
from tests.support.layer_flavours import HEADS
from tests.support.rows import tiers

B, T, KV_HEADS, D, WIDTH = 2, 9, 2, 8, 32
assert_close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5)
FLAX = {"nnx": nnx.dot_product_attention, "linen": linen.dot_product_attention}
flavours = pytest.mark.parametrize("flavour", FLAX)


def draw(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def shown(*shape: int, dtype=jnp.float32, seed: int = 1) -> jax.Array:
    """A mask that shows each query the first key at least."""
    mask = np.random.default_rng(seed).random(shape) < 0.6
    mask[..., 0] = True
    return jnp.asarray(mask, dtype)


def arrays(batch: tuple[int, ...], heads: int = HEADS, keys: int = T) -> list[jax.Array]:
    shapes = ((T, HEADS, D), (keys, heads, D), (keys, heads, D))
    return [draw(*batch, *shape, seed=seed) for seed, shape in enumerate(shapes)]


def causal_array() -> jax.Array:
    return jnp.tril(jnp.ones((1, 1, T, T)))


# What is handed over beside query, key and value; the batch; key heads and keys where they are others.
HANDED = {
    "nothing": ((B,), {}, {}),
    "no batch": ((), {}, {}),
    "float mask": ((B,), {"mask": lambda: shown(B, 1, T, T)}, {}),
    "bool mask of heads": ((B,), {"mask": lambda: shown(1, HEADS, T, T, dtype=bool)}, {}),
    "padding": ((B,), {"mask": lambda: shown(B, 1, 1, T)}, {}),
    "hidden queries": ((B,), {"mask": lambda: jnp.ones((B, 1, T, 1))}, {}),
    "bias": ((B,), {"bias": lambda: draw(B, HEADS, T, T, seed=5)}, {}),
    "bias of heads, mask": ((B,), {"bias": lambda: draw(1, HEADS, T, T, seed=5), "mask": causal_array}, {}),
    "bias of keys": ((B,), {"bias": lambda: draw(B, 1, 1, T, seed=5)}, {}),
    "two batch axes": ((2, 3), {"mask": lambda: shown(2, 3, 1, T, T), "bias": lambda: draw(2, 3, 1, T, T)}, {}),
    "other keys": ((B,), {"mask": lambda: shown(B, 1, T, 13)}, {"keys": 13}),
    "grouped": ((B,), {"mask": lambda: shown(B, 1, T, T)}, {"heads": KV_HEADS}),
    "causal": ((B,), {"is_causal": lambda: True}, {}),
    "causal, mask": ((B,), {"is_causal": lambda: True, "mask": lambda: shown(B, 1, T, T)}, {}),
    "precision, dtype": ((B,), {"precision": lambda: "highest", "dtype": lambda: jnp.float32}, {}),
    "dropout that drops nothing": ((B,), {"dropout_rate": lambda: 0.1, "deterministic": lambda: True}, {}),
}


@tiers(default={"flavour": ["nnx-grouped", "linen-bias of heads, mask"]})
@pytest.mark.parametrize(
    ("flavour", "name"),
    [*(("nnx", name) for name in HANDED), *(("linen", name) for name in ("nothing", "bias of heads, mask"))],
)
def test_the_function_is_flaxs_own_with_gradients(flavour, name):
    batch, handed, sizes = HANDED[name]
    handed = {argument: make() for argument, make in handed.items()}
    inputs = {"qkv": arrays(batch, **sizes)} | ({"bias": handed.pop("bias")} if "bias" in handed else {})
    weights = draw(*batch, T, HEADS, D, seed=7)

    def loss(function, inputs):
        out = function(*inputs["qkv"], **({"bias": inputs["bias"]} if "bias" in inputs else {}), **handed)
        return jnp.sum(out * weights), out

    run = lambda function: jax.jit(jax.value_and_grad(functools.partial(loss, function), has_aux=True))(inputs)
    jax.tree.map(assert_close, run(attention_fn()), run(FLAX[flavour]))


@pytest.mark.full
@pytest.mark.parametrize("handed", ["mask of keys, bias of heads", "mask, bias", "is_causal, mask"])
def test_a_kernel_reads_them_tile_by_tile(handed):
    """The Triton kernels, interpreted: of bool and of float32, along one axis and along two."""
    masks = {"mask of keys, bias of heads": shown(B, 1, 1, T), "mask, bias": shown(B, HEADS, T, T, dtype=bool)}
    arguments = {"mask": masks.get(handed, shown(B, 1, T, T))}
    arguments |= {"is_causal": True} if "is_causal" in handed else {}
    inputs = {"qkv": arrays((B,), KV_HEADS), "bias": draw(1, HEADS, T, T) if "heads" in handed else draw(B, 1, T, T)}
    in_kernel = attention_fn(implementation="triton", config=jflex.Config(interpret=True))

    def loss(function, inputs):
        return jnp.sum(jnp.sin(function(*inputs["qkv"], inputs["bias"], **arguments)))

    run = lambda function: jax.jit(jax.value_and_grad(functools.partial(loss, function)))(inputs)
    jax.tree.map(assert_close, run(in_kernel), run(FLAX["nnx"]))


@pytest.mark.full
@pytest.mark.parametrize("mask_shape", [(2, 3, HEADS, T, T), (2, 1, 1, T, T), (1, 3, 1, 1, T), (T, T), (1, T), ()])
def test_a_mask_and_a_bias_of_any_shape_that_broadcasts(mask_shape):
    query, key, value = arrays((2, 3))
    mask = shown(*mask_shape) if mask_shape else jnp.float32(1)
    full = jnp.broadcast_to(mask, (2, 3, HEADS, T, T))
    expected = linen.dot_product_attention(query, key, value, mask=full, bias=full)
    assert_close(attention_fn()(query, key, value, mask=mask, bias=mask), expected)


@flavours
def test_every_argument_of_flax_is_taken(flavour):
    """Linen hands over what it finds named, and drops all else in silence."""
    of_flax, ours = (inspect.signature(function).parameters for function in (FLAX[flavour], attention_fn()))
    assert not of_flax.keys() - ours.keys()
    assert list(ours)[:5] == list(of_flax)[:5]


@pytest.mark.full
def test_mods_bias_and_masks_together():
    query, key, value = arrays((B,))
    softcap, bias, mask = jflex.scores.softcap(2.0), draw(B, HEADS, T, T), shown(B, 1, T, T)
    scores = jnp.einsum("bthd,bshd->bhts", query, key) * D**-0.5
    scores = 2.0 * jnp.tanh(scores / 2.0) + bias
    scores = jnp.where((causal_array() * mask).astype(bool), scores, -jnp.inf)
    expected = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), value)
    causal = jflex.masks.causal()
    block_mask = jflex.create_block_mask(causal, None, None, T, T, block_size=4)
    forms = [attention_fn(softcap, causal), attention_fn(softcap, block_mask=block_mask), attention_fn(softcap)]
    for function, is_causal in zip(forms, [False, False, True], strict=True):
        assert_close(function(query, key, value, bias, mask, is_causal=is_causal), expected)


@pytest.mark.full
def test_precision_and_dtype_are_honored():
    query, key, value = arrays((B,))
    products = lambda **handed: str(
        jax.make_jaxpr(functools.partial(attention_fn(implementation="xla"), **handed))(query, key, value)
    )
    highest = (jax.lax.Precision.HIGHEST, ("highest", "highest"), "highest")
    assert "HIGHEST" not in products()
    assert all("HIGHEST" in products(precision=precision) for precision in highest)
    assert attention_fn()(query, key, value, dtype=jnp.bfloat16).dtype == jnp.bfloat16
    promoted = attention_fn()(query, key, value, promote_dtype=nnx.nn.dtypes.promote_dtype, dtype=jnp.float16)
    assert promoted.dtype == jnp.float16


@pytest.mark.full
def test_gradients_have_the_precision_too():
    loss = lambda x: jnp.sum(attention_fn(implementation="xla")(x, x, x, precision="highest"))
    assert str(jax.make_jaxpr(jax.grad(loss))(draw(1, T, 1, D))).count("HIGHEST") >= 5


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    cap: Any


@pytest.mark.full
@pytest.mark.parametrize("holder", ["slots", "dict", "keyword"])
def test_parameters_are_seen_wherever_a_function_keeps_them(holder):
    cap = nnx.Param(jnp.float32(0.5))
    held = {"slots": Slotted(cap), "dict": {"cap": cap}}.get(holder)

    def of_closure(score, b, h, q_idx, kv_idx):
        return score if held is None else score * 2

    def of_keyword(score, b, h, q_idx, kv_idx, *, cap=cap):
        return score * cap[...]

    with pytest.raises(ValueError, match="`score_mod` holds a Param"):
        attention_fn(of_keyword if holder == "keyword" else of_closure)


LONG = 512
FIRST_KEYS = jnp.arange(LONG)[None] < 200


def rings(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx) % (2 + h + b) != 1


def strided(b, h, q_idx, kv_idx):
    return kv_idx % 3 != 1


# What `attention_fn` takes, what Flax passes, the sparsity in percent, batch and heads of the lists.
BESIDE: dict[str, tuple[dict[str, Any], dict[str, Any], float, tuple[int, int]]] = {
    "nothing": ({}, {}, 37.5, (1, 1)),
    "mask_mod": ({"mask_mod": strided}, {}, 37.5, (1, 1)),
    "mask_mod of batch and heads": ({"mask_mod": rings}, {}, 37.5, (B, HEADS)),
    "mask_mod, mask": ({"mask_mod": rings}, {"mask": FIRST_KEYS}, 56.25, (B, HEADS)),
    "mask": ({}, {"mask": FIRST_KEYS}, 56.25, (1, 1)),
    "block_mask": ({"block_mask": (jflex.masks.sliding_window(100, 300), 128)}, {}, 56.25, (1, 1)),
    "block_mask, mask": ({"block_mask": (strided, 256)}, {"mask": FIRST_KEYS}, 50, (1, 1)),
    "block_mask of small blocks": ({"block_mask": (jflex.masks.sliding_window(0, 511), 64)}, {}, 87.5, (1, 1)),
}


def masks_of_calls(monkeypatch) -> list[Any]:
    """The BlockMask of each call that follows."""
    made, whole = [], jflex.flex_attention
    monkeypatch.setattr(jflex, "flex_attention", lambda *args, **rest: made.append(args[4]) or whole(*args, **rest))
    return made


def dense(mask_mod, mask=True) -> np.ndarray:
    """With `is_causal`."""
    shown = np.asarray(jflex.create_mask(mask_mod, B, HEADS, LONG, LONG))
    return shown & np.tri(LONG, dtype=bool) & np.asarray(mask)


@tiers(default={"name": ["nothing", "block_mask, mask"]})
@pytest.mark.parametrize("name", BESIDE)
def test_is_causal_skips_blocks(name, monkeypatch):
    """Beside each form of a mask: those above the diagonal; and those that a mask leaves empty, unless a mask_mod."""
    mods, handed, sparsity, batch_heads = BESIDE[name]
    mods, mask_mod = dict(mods), mods.get("mask_mod", jflex.noop_mask)
    if "block_mask" in mods:
        mask_mod, size = mods["block_mask"]
        mods["block_mask"] = jflex.create_block_mask(mask_mod, None, None, LONG, LONG, block_size=size)
    made, x = masks_of_calls(monkeypatch), draw(B, LONG, HEADS, D)
    found = attention_fn(**mods)(x, x, x, is_causal=True, **handed)
    [block_mask] = made
    assert (block_mask.sparsity(), block_mask.shape[:2]) == (sparsity, batch_heads)
    account = jflex.explain(x, x, x, block_mask=block_mask)
    assert (account.visited or 0) / (account.blocks or 1) == 1 - sparsity / 100
    expected = linen.dot_product_attention(x, x, x, mask=jnp.asarray(dense(mask_mod, **handed)))
    assert_close(found, expected)


@pytest.mark.full
def test_is_causal_beside_a_block_mask_of_one_block():
    query, key, value = arrays((B,))
    block_mask = jflex.create_block_mask(jflex.masks.sliding_window(3, 3), None, None, T, T)
    band = jnp.asarray(np.tri(T, dtype=bool) & ~np.tri(T, k=-4, dtype=bool))
    expected = linen.dot_product_attention(query, key, value, mask=band[None, None])
    assert_close(attention_fn(block_mask=block_mask)(query, key, value, is_causal=True), expected)


def test_the_blocks_of_is_causal_hold_the_tiles_of_the_user(monkeypatch):
    made = []
    monkeypatch.setattr(jflex, "flex_attention", lambda *args, **rest: made.append(args[4]) or args[0])
    x = draw(1, LONG, 1, D)
    attention_fn(config=jflex.Config(forward=jflex.Tiles(256, 64)))(x, x, x, is_causal=True)
    assert made[0].block_size == (256, 128)

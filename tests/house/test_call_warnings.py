"""What warns: arrays in the other layout, a decoding step with a mask of training, numbers that compile each time."""

import functools
import re
import warnings

import jax
import jax.numpy as jnp
import pytest

import jflex
from jflex import masks
from jflex._call import call_warnings
from jflex._call.checks import warn_of_layout
from jflex.backends.base import Saved
from tests.cases import decode_hopper_cases, hopper_cases, ragged_cases
from tests.cases.table import CASES, LENGTHS

SWAPPED = r"has 512 heads and 4 positions, .* 512 heads and 2 positions\. .*pass layout='{}'"


def arrays(*shapes):
    return [jnp.zeros(shape) for shape in shapes]


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_arrays_in_the_other_layout_warn(transform):
    """[B, H, L, E] in the layout BTNH, and [B, L, H, E] in the other one."""
    shape = lambda attend, *x: jax.eval_shape(transform(lambda *x: attend(*x)), *x)
    bnth, btnh = arrays((1, 4, 512, 8), *[(1, 2, 512, 8)] * 2), arrays((1, 512, 4, 8), *[(1, 512, 2, 8)] * 2)
    with pytest.warns(UserWarning, match=SWAPPED.format("BNTH")) as caught:
        shape(jflex.flex_attention, *bnth)
    assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match=SWAPPED.format("BTNH")):
        shape(functools.partial(jflex.flex_attention, layout="BNTH"), *btnh)
    with pytest.warns(UserWarning, match="heads and 4 positions"):
        shape(jflex.dot_product_attention, *bnth)


def test_each_line_warns_once():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            jflex.explain(*arrays((1, 4, 512, 8), *[(1, 4, 512, 8)] * 2))
    assert len(caught) == 1


def shapes_of(case):
    n = case.sizes
    query, key = (n.B, n.T, n.Hq, n.D), (n.Bkv, n.S, n.Hkv, n.D)
    turned = lambda x: x if case.layout == "BTNH" else (x[0], x[2], x[1], x[3])
    return (*(jax.ShapeDtypeStruct(turned(x), jnp.float32) for x in (query, key)), case.layout)


def test_no_case_of_the_tables_warns():
    dense = [*CASES, *LENGTHS, *hopper_cases.HOPPER, *decode_hopper_cases.DENSE]
    calls = [*map(shapes_of, [*dense, *ragged_cases.CASES])]
    assert len(calls) > 300
    one_of = lambda T, S, Hq, Hkv: [jax.ShapeDtypeStruct((1, *x, 8), jnp.float32) for x in ((T, Hq), (S, Hkv))]
    models = [(1, 4096, 512, 512), (16, 16, 128, 128), (300, 300, 256, 8), (2, 65536, 512, 1), (512, 512, 512, 512)]
    for query, key, layout in (*calls, *((*one_of(*sizes), "BTNH") for sizes in models)):
        warn_of_layout(query, key, layout)  # warnings are errors


def step(mask_mod=None, lengths=(3, 5), T=1, S=8, **more):
    query, key, value = arrays((2, T, 2, 8), *[(2, S, 2, 8)] * 2)
    lengths = None if lengths is None else jnp.array(lengths, jnp.int32)
    more = {"mask_mod": mask_mod, "kv_lengths": lengths, "implementation": "xla", **more}
    return jax.eval_shape(functools.partial(jflex.flex_attention, **more), query, key, value)


ENDS = jnp.array([3, 5], jnp.int32)
HIDING = {
    "causal": masks.causal(),
    "lambda": lambda b, h, q_idx, kv_idx: q_idx >= kv_idx,
    "window": masks.sliding_window(2),
    "traced_window": masks.sliding_window(jnp.int32(2)),
    "documents": jflex.and_masks(masks.document(jnp.zeros(8, jnp.int32)), masks.causal()),
}
SEEING = {
    "offset": jflex.with_offset(masks.causal(), ENDS - 1),
    "bottom_right": masks.causal("bottom_right", q_length=1, kv_length=8),
    "future": masks.sliding_window(0, 2),
    "prefix": masks.prefix_lm(2),
    "documents": masks.document(jnp.zeros(8, jnp.int32)),
    "strange": lambda b, h, q_idx, kv_idx: jnp.sin(kv_idx.astype(jnp.float32)) > 0,
}


@pytest.mark.full
@pytest.mark.parametrize("name", HIDING)
def test_a_decoding_step_with_a_mask_of_training_warns(name):
    with pytest.warns(
        UserWarning, match=r"hides all keys but the first.*`jflex\.with_offset\(mask_mod, kv_lengths - 1\)`"
    ):
        step(HIDING[name])
    block_mask = jflex.create_block_mask(HIDING[name], None, None, 1, 8)
    with pytest.warns(UserWarning, match="hides all keys but the first"):
        step(block_mask=block_mask)
    if name == "lambda":
        with pytest.warns(UserWarning, match=r"The mask <lambda> \(test_call_warnings\.py:\d+\) hides"):
            jax.eval_shape(lambda lengths: step(HIDING[name], kv_lengths=lengths), ENDS)


@pytest.mark.parametrize("name", SEEING)
def test_a_step_that_sees_its_keys_does_not_warn(name):
    step(SEEING[name])


def test_other_calls_do_not_warn():
    for more in ({"lengths": None}, {"T": 2}, {"S": 1, "lengths": (1, 0)}, {"lengths": (1, 0)}):
        step(masks.causal(), **more)


# --- Python numbers that change from call to call
@pytest.fixture
def attend(monkeypatch):
    """Eager attention that compiles nothing."""
    monkeypatch.setattr("jflex._jax.custom_vjp.attend", lambda static, inputs: Saved(inputs.query, None))
    call_warnings._programs.cache_clear()
    call_warnings.count_call.cache_clear()
    x = jnp.zeros((1, 8, 2, 16))
    return functools.partial(jflex.flex_attention, x, x, x)


def warned(call, numbers):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in numbers:
            call(number)
    return [str(x.message) for x in caught]


def scaled(score, b, h, q_idx, kv_idx, by):
    return score * by


def test_the_fourth_number_warns_once(attend):
    call = lambda x: attend(lambda s, b, h, q, k: scaled(s, b, h, q, k, x))
    [message] = warned(call, [0.1, 0.2, 0.1, 0.3, 0.2, 1e-4, 0.5, 0.6])
    assert re.match(r"4 programs .* of `score_mod` .*\(test_call_warnings\.py:\d+\)\. .*`jnp\.float32\(x\)`", message)


def test_a_number_of_a_mask_and_a_scale_warn(attend):
    [message] = warned(lambda n: attend(mask_mod=masks.sliding_window(n)), range(6))
    assert "`mask_mod` sliding_window.window" in message
    block_mask = lambda n: jflex.create_block_mask(masks.sliding_window(n), None, None, 8, 8)
    assert len(warned(lambda n: attend(block_mask=block_mask(n)), range(5))) == 1
    [message] = warned(lambda x: attend(scale=x), [0.1, 0.2, 0.3, 0.4])
    assert "Multiply `query` by an array in place of a scale" in message


def test_arrays_other_programs_and_traced_calls_do_not_warn(attend):
    assert not warned(lambda x: attend(functools.partial(scaled, by=jnp.float32(x))), range(4))
    assert not warned(lambda x: attend(functools.partial(scaled, by=x), implementation="reference"), range(4))
    assert not warned(lambda n: attend(lambda s, *at: sum([s] * n)), range(1, 5))
    assert not warned(lambda n: attend(mask_mod=masks.document(jnp.zeros(8 + n, jnp.int32))), range(4))
    layers = lambda x: [jflex.flex_attention(x, x, x, lambda s, *at, n=n: s * n) for n in range(4)]
    assert not warned(lambda _: jax.eval_shape(layers, jnp.zeros((1, 8, 2, 16))), [0])

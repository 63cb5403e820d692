"""StreamingLLM: sinks and a window over a paged cache, beside an oracle that rotates the kept keys anew."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jflex
from flax_layers import functional
from flax_layers.attention.streaming import Streaming, attend
from flax_layers.models import Decoder
from flax_layers.nnx import AlibiBias, FlexAttention, RelativeBias, SharedPrefix
from flax_layers.rotary_scaling import LinearScaling, Llama3Scaling, LongRopeScaling, YarnScaling
from jflex.paged import PagedBatch, PagedCache
from tests.cases import streaming_llm_cases as oracle
from tests.models.test_models import SMALL
from tests.support.rows import tiers

FEATURES, LENGTH, PAIRS = 24, 45, 4
ROTARY = {"rotary_base": 30.0}
LONGROPE = {"short_factors": (1.0, 1.1, 1.3, 2.0), "long_factors": (9.0,) * PAIRS, "magnitude": 1.2}
OPTIONS = {
    "rotary": ROTARY,
    "half": ROTARY | {"rotary_dim": 4, "qk_norm": True, "use_bias": True, "use_sinks": True, "scale": 0.7},
    "linear": ROTARY | {"rotary_scaling": LinearScaling(3.0)},
    "llama3": ROTARY | {"rotary_scaling": Llama3Scaling(8.0, 1.0, 4.0, original_max_positions=32)},
    "yarn": ROTARY | {"rotary_scaling": YarnScaling(4.0, original_max_positions=32)},
    "longrope_short": ROTARY
    | {"rotary_scaling": LongRopeScaling(**LONGROPE, original_max_positions=16, max_positions=99)},
    "longrope_long": ROTARY
    | {"rotary_scaling": LongRopeScaling(**LONGROPE, original_max_positions=15, max_positions=99)},
    "none": {},
}


def layer_of(**options) -> FlexAttention:
    return FlexAttention(FEATURES, 4, num_kv_heads=2, head_dim=2 * PAIRS, **options, rngs=nnx.Rngs(0))


def inputs_of(length: int = LENGTH) -> np.ndarray:
    return 2 * np.random.default_rng(1).normal(size=(length, FEATURES)).astype(np.float32)


def check(layer, streaming, chunks, score_mod=None, window=None, **options):
    inputs = inputs_of()
    found = oracle.decode(layer, inputs, chunks, streaming, score_mod=score_mod, **options)
    known = oracle.attend(layer, inputs, streaming, score_mod, window)
    np.testing.assert_allclose(found, known, rtol=2e-5, atol=2e-5)


WHOLE, TOKENS, MIXED = [LENGTH], [1] * LENGTH, [7, 1, 1, 7, 7, 1, 7, 7, 7]


@tiers(full={"sizes": "(3, 7)-[7, 1, 1, 7, 7, 1, 7, 7, 7]"}, rest="long")
@pytest.mark.parametrize(
    ("sizes", "chunks"),
    [
        ((4, 12), WHOLE), ((4, 12), TOKENS), ((4, 12), MIXED), ((0, 5), MIXED), ((0, 1), TOKENS), ((1, 1), TOKENS),
        ((3, 7), MIXED), ((9, 2), WHOLE), ((9, 2), TOKENS), ((4, 100), MIXED),
    ],
    ids=str,
)  # fmt: skip
def test_outputs_are_those_of_rotating_anew(sizes, chunks):
    check(layer_of(**ROTARY), Streaming(*sizes), chunks)


@tiers(full={"options": "half"}, rest="long")
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_rotary_embedding(options):
    check(layer_of(**options), Streaming(4, 12), [22, 1, 22])


def by_position(score, b, h, q_idx, kv_idx):
    table = jnp.sin(jnp.arange(16.0))
    return score + table[kv_idx] - table[q_idx] * jnp.float32(h)


SCORE_MODS = {
    "alibi": lambda: AlibiBias(4, rngs=nnx.Rngs(0)),
    "relative": lambda: RelativeBias(4, 14, rngs=nnx.Rngs(0)),
    "positions": lambda: by_position,
    "softcap": lambda: jflex.scores.softcap(2.0),
}


@tiers(full={"name": "relative"}, rest="long")
@pytest.mark.parametrize("name", SCORE_MODS)
def test_score_mods_get_positions_within_the_cache(name):
    score_mod = SCORE_MODS[name]()
    if name == "relative":
        score_mod.table[...] = jax.random.normal(jax.random.key(0), score_mod.table.shape)
    check(layer_of(**ROTARY), Streaming(4, 12), [22, 1, 22], score_mod)


@tiers(full={"window": 14}, rest="long")
@pytest.mark.parametrize("window", [3, 12, 14, 16])
def test_a_layer_with_a_window_of_its_own(window):
    mask_mod = jflex.masks.sliding_window(window - 1)
    check(layer_of(**ROTARY), Streaming(4, 12), [22, 1, 22], window=window, mask_mod=mask_mod)


@pytest.mark.parametrize("position", [0, 999, 20_000, 1_000_000, 1 << 24])
def test_angles_are_exact(position):
    ones = jnp.ones((64, 1, 8))
    positions = np.maximum(position - np.arange(64), 0)
    found = functional.rotate(ones, jnp.asarray(positions), 10_000.0, is_far=True)[:, 0]
    exponents = jnp.arange(0, 8, 2, dtype=jnp.float32) / 8
    angles = np.multiply.outer(positions, np.asarray(jnp.float32(10_000.0) ** -exponents, np.float64))
    known = np.concatenate([np.cos(angles) - np.sin(angles), np.cos(angles) + np.sin(angles)], axis=-1)
    np.testing.assert_allclose(found, known, atol=1e-6)


ROPES = {
    "whole": jflex.rope(30.0),
    "partial": jflex.rope(30.0, rotary_dim=8, scaling=Llama3Scaling(8.0, 1.0, 4.0, original_max_positions=32)),
    "none": None,
}


@tiers(full={"tokens": "6-whole"}, rest="long")
@pytest.mark.parametrize(("tokens", "name"), [(2, "whole"), (2, "partial"), (6, "whole"), (6, "none")])
def test_every_call_on_a_kernel(tokens, name):
    """Of a token far behind its window, beside another token or a chunk that leaves the sinks; with mods."""
    cache = PagedCache(*jax.random.normal(jax.random.key(0), (2, 12, 16, 2, 16)))
    batch = PagedBatch(
        jnp.array([0, 1, tokens]), jnp.array([90, 17]), jnp.array([[3, 1, 2, 7, 9, 4], [5, 6, 0, 0, 0, 0]])
    )
    query = jax.random.normal(jax.random.key(1), (tokens, 4, 16))
    alibi = jflex.scores.alibi(jflex.scores.alibi_slopes(4))
    parts = Streaming(4, 12).parts(batch, tokens, ROPES[name], alibi, jflex.masks.sliding_window(13))
    assert len(parts) == (1 if tokens == 2 or name == "none" else 2)
    call = lambda **how: jax.jit(lambda query, cache: attend(query, cache, parts, **how))(query, cache)
    known = call(implementation="reference")
    for found in (call(implementation="triton", config=jflex.Config(interpret=True)), call(implementation="xla")):
        np.testing.assert_allclose(found, known, atol=1e-5)


@pytest.mark.full
def test_a_chunk_with_no_more_tokens_than_requests():
    """It is one call, of a request for each token; mods get the request of the batch."""
    layer, streaming = layer_of(**ROTARY, use_sinks=True), Streaming(4, 12)
    gains = jnp.array([0.5, 1.0, 1.5, 2.0])
    options = {"score_mod": lambda score, b, h, q_idx, kv_idx: score * gains[b]}
    inputs, pages = inputs_of(30), jnp.arange(1, 9, dtype=jnp.int32)
    table = jnp.zeros((4, 8), jnp.int32).at[1].set(pages)
    prompt = PagedBatch(jnp.array([0, 0, 26]), jnp.array([0, 26]), table[:2])
    step = jax.jit(functools.partial(layer.decode_paged, streaming=streaming, **options))
    _, cache = step(inputs[:26], layer.init_paged_cache(9, 4), prompt)
    starts, lengths = jnp.array([0, 0, 3]), jnp.array([0, 29])
    few = PagedBatch(starts, lengths, table[:2])
    many = PagedBatch(jnp.array([0, 0, 3, 3, 3]), jnp.array([0, 29, 0, 0]), table)
    rope = jflex.rope(30.0)
    assert [len(streaming.parts(few, 3, rope)), len(streaming.parts(many, 4, rope))] == [2, 1]
    known, _ = step(inputs[26:29], cache, few)
    found, _ = step(inputs[26:30], cache, many)
    np.testing.assert_allclose(found[:3], known, rtol=2e-5, atol=2e-5)


@tiers(full={"dtype": "float8_e4m3fn"}, rest="long")
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_eight_bits(dtype):
    layer, streaming, inputs = layer_of(**ROTARY), Streaming(4, 12), inputs_of()
    cache, table, found = layer.init_paged_cache(13, 4, dtype=dtype), jnp.arange(1, 13)[None], []
    step = jax.jit(functools.partial(layer.decode_paged, streaming=streaming))
    for begin, end in ((0, 43), (43, 44), (44, 45)):
        batch = PagedBatch(jnp.array([0, end - begin]), jnp.array([end]), table)
        rows, cache = step(inputs[begin:end], cache, batch)
        found.append(rows)
    known, found = oracle.attend(layer, inputs, streaming), np.concatenate(found)
    error = np.linalg.norm(found - known, axis=-1) / np.linalg.norm(known, axis=-1)
    assert error.max() < (0.1 if dtype == "int8" else 0.25)
    assert error.mean() < (0.02 if dtype == "int8" else 0.06)


@tiers(full={"requests": "0-0"}, rest="long")
@pytest.mark.parametrize(("requests", "tokens"), [(0, 0), (0, 3), (2, 0)])
def test_nothing_to_attend_to(requests, tokens):
    layer = layer_of(**ROTARY)
    batch = PagedBatch(
        jnp.zeros(requests + 1, jnp.int32), jnp.zeros(requests, jnp.int32), jnp.zeros((requests, 2), jnp.int32)
    )
    rows, _ = layer.decode_paged(inputs_of(tokens), layer.init_paged_cache(3, 4), batch, streaming=Streaming(4, 12))
    assert rows.shape == (tokens, FEATURES)


@pytest.mark.full
def test_a_model_whose_layers_have_windows_and_a_soft_cap():
    model, streaming = Decoder(SMALL, implementation="xla", rngs=nnx.Rngs(0)), Streaming(2, 7)
    tokens = np.random.default_rng(0).integers(0, 64, 40).astype(np.int32)
    cache, table = model.init_paged_cache(11, 4), jnp.arange(1, 11, dtype=jnp.int32)[None]
    step = nnx.jit(lambda model, tokens, cache, batch: model.decode_paged(tokens, cache, batch, streaming))
    found, done = [], 0
    for count in (19, 1, 1, 19):
        batch = PagedBatch(jnp.array([0, count]), jnp.array([done + count]), table)
        logits, cache = step(model, jnp.asarray(tokens[done : done + count]), cache, batch)
        found.append(logits)
        done += count
    np.testing.assert_allclose(np.concatenate(found), oracle.logits(model, tokens, streaming), rtol=1e-4, atol=1e-4)


@pytest.mark.full
def test_a_shared_prefix_is_refused():
    model = Decoder(SMALL, rngs=nnx.Rngs(0))
    batch, prefix = PagedBatch(jnp.array([0, 1]), jnp.array([1]), jnp.ones((1, 1), jnp.int32)), SharedPrefix(0, 0)
    with pytest.raises(ValueError, match=r"`shared_prefix` and `streaming` must not be passed together\. Got both"):
        model.decode_paged_hidden(jnp.zeros(1, jnp.int32), model.init_paged_cache(2, 4), batch, prefix, Streaming(4, 8))


def test_a_cache_longer_than_the_model_was_trained_for():
    model = nnx.eval_shape(lambda: Decoder(SMALL, rngs=nnx.Rngs(0)))
    batch = PagedBatch(jnp.array([0, 1]), jnp.array([1]), jnp.ones((1, 1), jnp.int32))
    with pytest.raises(ValueError, match=r"`streaming` must not be longer than the 512 positions .* Got 513"):
        model.decode_paged(jnp.zeros(1, jnp.int32), model.init_paged_cache(2, 4), batch, Streaming(13, 500))

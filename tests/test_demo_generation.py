"""The demo model writes from its cache what it would write by reading everything anew for each byte."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_layers.demo import data
from flax_layers.demo.__main__ import create_trainer
from flax_layers.demo.generate import generate
from flax_layers.demo.model import ByteDecoder, Sizes
from flax_layers.demo.texts import KINDS
from flax_layers.models import Decoder
from tests import evaluation
from tests.train_cases import counted_compilations

SIZES = Sizes(width=32, layers=2, heads=4, kv_heads=2)
PROMPTS = [b"def ", b"import os, sys\n\nclass", b"x"]
COUNT = 30

pytestmark = pytest.mark.usefixtures("in_haste")


@pytest.fixture(scope="module")
def model() -> Decoder:
    """A decoder that has trained for a moment."""
    with evaluation.compiled_in_haste(True):
        trainer = create_trainer(ByteDecoder(SIZES, "xla", rngs=nnx.Rngs(0)), 5e-3, 40)
        batches = data.packed_rows(data.read_corpus().training, 2, 128, seed=0)
        for batch in itertools.islice(batches, 40):
            trainer.step(batch)
    return trainer.model()


@pytest.fixture(scope="module")
def recomputed(model: Decoder) -> tuple[list[bytes], float]:
    """Greedy texts, each byte by a pass over its whole text; and by how much its logit was ahead, at the least."""
    forward = nnx.jit(lambda model, tokens: model(tokens, jnp.zeros_like(tokens)))
    texts, margin = [], np.inf
    for prompt in PROMPTS:
        text = np.zeros((1, 64), np.int32)
        text[0, : len(prompt)] = list(prompt)
        for place in range(len(prompt), len(prompt) + COUNT):
            logits = np.asarray(forward(model, text))[0, place - 1]
            second, first = np.sort(logits)[-2:]
            margin = min(margin, float(first - second))
            text[0, place] = np.argmax(logits)
        texts.append(bytes(text[0, : len(prompt) + COUNT].tolist()))
    return texts, margin


@pytest.mark.parametrize("cache", KINDS)
def test_greedy_bytes_are_those_of_full_recomputation(cache, model, recomputed):
    texts, margin = recomputed
    assert margin > 1e-3  # so that the order of sums cannot decide
    assert len(set(b"".join(texts))) > 5
    assert generate(model, PROMPTS, COUNT, cache=cache) == texts


@pytest.mark.parametrize("cache", KINDS)
def test_logits_of_steps_are_those_of_the_whole_text(cache, model):
    tokens = np.random.default_rng(0).integers(0, 256, (3, 40)).astype(np.int32)
    expected = np.asarray(model(tokens, np.zeros_like(tokens)))
    read = nnx.jit(lambda model, texts, tokens, counts: texts.read(model, tokens, counts))
    texts, lengths = KINDS[cache].empty(model, 3, 40), np.zeros(3, int)
    for counts in ([20, 1, 7], [1, 1, 1], [1, 1, 1], [3, 20, 17], [1, 1, 1]):
        new = np.zeros((3, max(counts)), np.int32)
        for row, count in enumerate(counts):
            new[row, :count] = tokens[row, lengths[row] : lengths[row] + count]
        logits, texts = read(model, texts, jnp.asarray(new), jnp.asarray(counts, jnp.int32))
        lengths += counts
        np.testing.assert_allclose(logits, expected[np.arange(3), lengths - 1], rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("cache", KINDS)
def test_two_programs_write_texts_of_any_length(cache, model):
    generate(model, PROMPTS[:2], 2, cache=cache)
    with counted_compilations() as compiled:
        texts = generate(model, [PROMPTS[1], b"class A:"], 2, cache=cache, temperature=0.8)
    assert not compiled
    assert [len(text) for text in texts] == [len(PROMPTS[1]) + 2, 10]


def test_drawn_bytes_repeat_with_the_seed(model):
    first, again, other = (generate(model, [b"def "], 12, temperature=2.0, seed=seed) for seed in (0, 0, 1))
    assert first == again != other


@pytest.mark.parametrize("cache", KINDS)
def test_the_cache_of_a_step_is_updated_in_place(cache, model):
    texts = KINDS[cache].empty(model, 2, 8192)
    graph, parameters = nnx.split(model)

    def step(parameters, texts, tokens, counts):
        return texts.read(nnx.merge(graph, parameters), tokens, counts)

    ones = jnp.ones(2, jnp.int32)
    memory = jax.jit(step, donate_argnums=1).lower(parameters, texts, ones[:, None], ones).compile().memory_analysis()
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(texts))
    assert memory.alias_size_in_bytes > 0.99 * held
    assert memory.temp_size_in_bytes < held / 20


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model: generate(model, [], 1), r"`prompts` must be at least one, of at least one byte each. Got \[\]"),
        (lambda model: generate(model, [b"a", b""], 1), r"Got \[b'a', b''\]"),
        (lambda model: generate(model, [b"a"], 1, cache="none"), "`cache` must be one of dense, paged. Got 'none'"),
    ],
)
def test_wrong_calls(call, message, model):
    with pytest.raises(ValueError, match=message):
        call(model)

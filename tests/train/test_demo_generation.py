"""The demo model writes from its cache what it would write by reading everything anew for each byte."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_layers.demo import data
from flax_layers.demo.__main__ import create_trainer, parse_options, write_samples
from flax_layers.demo.model import ByteDecoder, Sizes
from flax_layers.generate import generate
from flax_layers.generate.sequences import KINDS
from flax_layers.models import Decoder
from tests.support import evaluation
from tests.support.rows import tiers

SIZES = Sizes(width=32, layers=2, heads=4, kv_heads=2)
PROMPTS = [b"def ", b"import os, sys\n\nclass", b"x"]
COUNT = 30


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


@tiers(full={"cache": "dense"}, rest="long")
@pytest.mark.parametrize("cache", KINDS)
def test_greedy_bytes_are_those_of_full_recomputation(cache, model, recomputed):
    texts, margin = recomputed
    assert margin > 1e-3  # so that the order of sums cannot decide
    assert len(set(b"".join(texts))) > 5
    results = generate(model, [list(prompt) for prompt in PROMPTS], max_tokens=COUNT, cache=cache).results()
    assert [prompt + bytes(result.tokens) for prompt, result in zip(PROMPTS, results, strict=True)] == texts


@tiers(full={"cache": "dense"}, rest="long")
@pytest.mark.parametrize("cache", KINDS)
def test_samples_are_shown(cache, model, capsys):
    write_samples(model, parse_options(["--cache", cache, "--length", "8", "--temperature", "0"]))
    shown = capsys.readouterr().out
    assert shown.count("The model writes:\ndef ") == shown.count("The model writes:\nimport ") == 1
    assert f" bytes/s from the {cache} cache" in shown

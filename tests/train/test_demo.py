"""The demo: its data and model, that new document boundaries compile nothing, and the whole command at a small size."""

import itertools

import jax
import numpy as np
import pytest
from flax import nnx

from flax_layers.demo import data
from flax_layers.demo.__main__ import create_trainer, main, parse_options, write_samples
from flax_layers.demo.model import ByteDecoder, Sizes
from flax_layers.generate.sequences import KINDS
from tests.cases.train_cases import counted_compilations

SMALL = Sizes(width=16, layers=2, heads=2, kv_heads=1)


@pytest.fixture(scope="module")
def corpus() -> data.Corpus:
    return data.read_corpus()


@pytest.mark.full
def test_rows_are_full_of_documents_of_different_lengths(corpus: data.Corpus):
    rows = list(itertools.islice(data.packed_rows(corpus.training, 4, 512, seed=0), 3))
    everything = {text.tobytes() for text in corpus.training}
    for batch in rows:
        assert batch.tokens.shape == batch.documents.shape == (4, 512)
        assert batch.tokens.dtype == batch.documents.dtype == np.int32
        assert set(np.diff(batch.documents).ravel()) <= {0, 1}
    tokens, documents = rows[0].tokens[0], rows[0].documents[0]
    sizes = np.bincount(documents)
    assert sizes.sum() == 512
    first = tokens[documents == 0].astype(np.uint8).tobytes()
    assert any(first in text for text in everything)
    assert len({size for batch in rows for row in batch.documents for size in np.bincount(row)}) > 5
    again = next(data.packed_rows(corpus.training, 4, 512, seed=0))
    np.testing.assert_array_equal(again.tokens, rows[0].tokens)


@pytest.mark.full
def test_unigram_loss_is_the_cross_entropy_of_byte_counts():
    texts = [np.array([0, 0, 1], np.uint8)]
    rows = [data.Rows(np.array([[9, 0, 1, 1]]), np.array([[0, 0, 0, 1]]))]  # scores the bytes 0 and 1
    expected = -(np.log(3 / 259) + np.log(2 / 259)) / 2
    assert data.unigram_loss(texts, rows) == pytest.approx(expected)


@pytest.mark.full
def test_a_byte_sees_only_what_comes_before_it_in_its_document():
    model = ByteDecoder(SMALL, rngs=nnx.Rngs(0))
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, 256, (1, 40)).astype(np.int32)
    documents = (np.arange(40)[None] >= 25).astype(np.int32)
    logits = np.asarray(model(tokens, documents))
    changed = tokens.copy()
    changed[0, 20] += 1
    seen = np.abs(np.asarray(model(changed, documents)) - logits).max(axis=(0, 2)) > 1e-6
    np.testing.assert_array_equal(seen, (np.arange(40) >= 20) & (np.arange(40) < 25))


@pytest.mark.full
def test_every_parameter_gets_a_gradient_and_the_slopes_do():
    model = ByteDecoder(SMALL, rngs=nnx.Rngs(0))
    tokens = np.random.default_rng(0).integers(0, 256, (2, 48)).astype(np.int32)
    gradients = nnx.grad(lambda model: (model(tokens, np.zeros_like(tokens)) ** 2).mean())(model)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(gradients))
    for index in range(SMALL.layers):
        assert np.abs(gradients["blocks"][index]["score_mod"]["slopes"][...]).max() > 0


@pytest.mark.full
def test_steps_with_new_document_boundaries_compile_once(corpus: data.Corpus):
    steps = 40
    trainer = create_trainer(ByteDecoder(SMALL, "xla", rngs=nnx.Rngs(0)), 5e-3, steps)
    batches = list(itertools.islice(data.packed_rows(corpus.training, 2, 128, seed=0), steps))
    assert len({batch.documents.tobytes() for batch in batches}) == steps
    first = float(trainer.step(batches[0]).loss)
    with counted_compilations() as compiled:
        losses = [float(trainer.step(batch).loss) for batch in batches[1:]]
    assert not compiled
    assert np.mean(losses[-10:]) < first - 1


@pytest.mark.full
def test_whole_demo(tmp_path, capsys):
    small = "--steps=3 --rows=2 --length=192 --width=16 --layers=1 --heads=2 --kv-heads=1"
    held_out_loss = main([*small.split(" "), f"--output={tmp_path}"])
    output = capsys.readouterr()
    assert 3 < held_out_loss < 7
    assert f"Held-out loss {held_out_loss:.3f} nats/byte" in output.out
    assert "a unigram model" in output.out
    assert "BlockMask(" in output.out
    assert "\ndef " in output.out
    assert "from the dense cache" in output.out
    assert "tokens/s" in output.err
    for name in ("loss.png", "mask.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.full
@pytest.mark.parametrize("cache", KINDS)
def test_samples_are_shown(cache, capsys):
    options = ["--cache", cache, "--length", "8", "--temperature", "0"]
    write_samples(ByteDecoder(SMALL, "xla", rngs=nnx.Rngs(0)), parse_options(options))
    shown = capsys.readouterr().out
    assert shown.count("The model writes:\ndef ") == shown.count("The model writes:\nimport ") == 1
    assert f" bytes/s from the {cache} cache" in shown

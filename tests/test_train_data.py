"""What is trained on: rows of packed documents, their order, and what is wrong with them."""

import collections

import numpy as np
import pytest

from flax_layers.train import Batches, InputError, read_corpus
from flax_layers.train.order import permuted
from flax_layers.train.tokens import ByteEncoder


@pytest.mark.parametrize("size", [1, 2, 3, 16, 17, 1000])
def test_the_order_is_a_permutation(size: int):
    first, second = ([permuted(place, size, seed) for place in range(size)] for seed in (0, 1))
    assert sorted(first) == sorted(second) == list(range(size))
    assert size < 10 or first != second


def test_the_order_mixes():
    order = np.array([permuted(place, 1024, 0) for place in range(1024)])
    assert abs(np.corrcoef(order, np.arange(1024))[0, 1]) < 0.1


@pytest.fixture
def texts(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"abcdefgh")
    (tmp_path / "b.txt").write_bytes(b"")
    (tmp_path / "c.txt").write_bytes(b"ABCDEFGHIJKLM")
    return tmp_path


def test_files_are_documents(texts):
    corpus = read_corpus([texts], ByteEncoder())
    tokens, documents = corpus.row(5, 7)
    assert bytes(tokens.tolist()) == b"fghABCD"
    assert documents.tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert corpus.size == 21


def test_a_row_that_begins_with_a_file_begins_at_document_0(texts):
    corpus = read_corpus([texts / "c.txt", texts / "a.txt"], ByteEncoder())
    assert corpus.row(13, 4)[1].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("name", ["tokens.npy", "tokens.bin"])
def test_token_files_are_mapped_and_end_tokens_end_documents(tmp_path, name: str):
    tokens = np.array([5, 6, 0, 7, 0, 0, 8, 9], np.uint16)
    np.save(tmp_path / name, tokens) if name.endswith("npy") else tokens.tofile(tmp_path / name)
    corpus = read_corpus([tmp_path / name], None, end_tokens=(0,))
    assert isinstance(corpus.files[0], np.memmap)
    found, documents = corpus.row(0, 8)
    assert found.tolist() == tokens.tolist()
    assert documents.tolist() == [0, 0, 0, 1, 1, 2, 3, 3]


def test_an_end_token_is_added_to_texts(texts):
    corpus = read_corpus([texts / "a.txt"], ByteEncoder(), end_tokens=(3, 4))
    assert corpus.row(0, 9)[0].tolist() == [*b"abcdefgh", 3]


def batches(count: int, batch: int = 2, seed: int = 0, vocabulary: int = 1000) -> Batches:
    corpus = read_corpus([], None)
    tokens = np.arange(count * 4, dtype=np.uint16)
    corpus = type(corpus)(("numbers",), (tokens,))
    return Batches(corpus, batch, 4, range(count), vocabulary, seed)


def test_every_epoch_has_each_row_once_and_its_own_order():
    source = batches(10)
    rows = [int(row[0]) // 4 for step in range(10) for row in source.at(step).tokens]
    first, second = rows[:10], rows[10:]
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    again = next(source.since(7))
    np.testing.assert_array_equal(again.tokens, source.at(7).tokens)
    assert batches(10, seed=1).at(0).tokens.tolist() != source.at(0).tokens.tolist()


def test_batches_larger_than_the_corpus_repeat_it():
    counts = collections.Counter(batches(3, batch=7).at(0).tokens[:, 0].tolist())
    assert sorted(counts.values()) == [2, 2, 3]


def test_held_out_batches_hold_each_row_once_and_score_nothing_else():
    found = batches(5, batch=2).in_order(most=10)
    assert [rows.tokens[:, 0].tolist() for rows in found] == [[0, 4], [8, 12], [16, 0]]
    assert found[-1].documents.tolist() == [[0, 0, 0, 0], [0, 1, 2, 3]]
    assert len(batches(5).in_order(most=2)) == 2


def test_wrong_data(tmp_path, texts):
    np.save(tmp_path / "square.npy", np.zeros((2, 2), int))
    (tmp_path / "latin.txt").write_bytes("ä".encode("latin-1"))

    class Strict(ByteEncoder):
        def encode(self, text):
            return super().encode(text.decode().encode())

    for paths, encoder, message in (
        ([tmp_path / "none"], None, "`--data` must name files or folders. There is no"),
        ([texts / "a.txt"], None, r"`--tokenizer` is required for text, as .*a\.txt: `bytes`, or"),
        ([tmp_path / "square.npy"], None, r"one axis of whole numbers. Got int64 of shape \(2, 2\)"),
        ([tmp_path / "latin.txt"], Strict(), r"`--data` must hold text in UTF-8. Got .*latin\.txt"),
    ):
        with pytest.raises(InputError, match=message):
            read_corpus(paths, encoder)


def test_an_empty_corpus_is_refused(texts):
    corpus = read_corpus([texts / "b.txt"], ByteEncoder())
    with pytest.raises(InputError, match=r"at least one row of `--length` 8 tokens. Got 0 tokens in 0 files"):
        Batches(corpus, 1, 8, range(corpus.size // 8), 256)


def test_tokens_beyond_the_vocabulary_are_refused():
    with pytest.raises(InputError, match=r"below the model's vocabulary, 14. Got 14 at token 14 of numbers. Use the"):
        list(map(batches(4, batch=1, vocabulary=14).at, range(4)))


def test_token_files_that_are_not_whole(tmp_path):
    (tmp_path / "odd.bin").write_bytes(b"abc")
    (tmp_path / "text.npy").write_text("no array")
    with pytest.raises(InputError, match=r"odd\.bin has 3 bytes, no multiple of the size of uint16. Set"):
        read_corpus([tmp_path / "odd.bin"], None)
    with pytest.raises(InputError, match=r"`--held-out` must hold token files that numpy can map. Got .*text\.npy"):
        read_corpus([tmp_path / "text.npy"], None, option="--held-out")


def test_messages_name_the_option_of_the_files(texts):
    corpus = read_corpus([texts / "b.txt"], ByteEncoder(), option="--held-out")
    with pytest.raises(InputError, match=r"`--held-out` must hold at least one row"):
        Batches(corpus, 1, 8, range(corpus.size // 8), 256)

"""What is trained on: rows of packed documents, where these end, their order, and what is wrong with them."""

import collections
import dataclasses
import gzip
import json
import pathlib
import shutil
from typing import Any

import numpy as np
import pytest

from flax_layers.models import ModelConfig
from flax_layers.train import Batches, Corpus, InputError, read_corpus
from flax_layers.train.data import document_end, make_batches, make_encoder, tokenizer_folder
from flax_layers.train.dataset.corpus import scan_tokens
from flax_layers.train.dataset.texts import ByteEncoder, Encoder, FolderEncoder
from flax_layers.train.options import parse_options
from flax_layers.train.setup import export_source, model_config, with_end_token
from tests.cases import train_cases
from tests.support.golden_models import ROOT


def read(paths, encoder: Encoder | None = ByteEncoder(), **options) -> Corpus:  # noqa: B008  it has no state
    return read_corpus(paths, encoder, vocabulary=256, **options)


@pytest.fixture
def texts(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"abcdefgh")
    (tmp_path / "b.txt").write_bytes(b"")
    (tmp_path / "c.txt").write_bytes(b"ABCDEFGHIJKLM")
    return tmp_path


def test_files_are_documents(texts):
    corpus = read([texts])
    tokens, documents = corpus.row(5, 7)
    assert bytes(tokens.tolist()) == b"fghABCD"
    assert documents.tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert corpus.size == 21


@pytest.mark.parametrize("name", ["tokens.npy", "tokens.bin"])
def test_token_files_are_mapped_and_end_tokens_end_documents(tmp_path, name: str):
    tokens = np.array([5, 6, 0, 7, 0, 0, 8, 9], np.uint16)
    np.save(tmp_path / name, tokens) if name.endswith("npy") else tokens.tofile(tmp_path / name)
    corpus = read([tmp_path / name], None, end_token=0)
    assert isinstance(corpus.files[0], np.memmap)
    found, documents = corpus.row(0, 8)
    assert found.tolist() == tokens.tolist()
    assert documents.tolist() == [0, 0, 0, 1, 1, 2, 3, 3]


@pytest.mark.parametrize(("end", "expected"), [(3, [*b"abcdefgh", 3]), (ord("h"), [*b"abcdefgh"])])
def test_each_text_ends_with_one_end_token(texts, end: int, expected: list[int]):
    corpus = read([texts / "a.txt", texts / "b.txt"], end_token=end)
    assert corpus.row(0, corpus.size)[0].tolist() == expected


LINES = b'{"text": "abc", "id": 1}\n\n{"text": ""}\n  {"text": "\\u00e4d"}\r\n{"text": "e", "body": "xyz"}'


@pytest.mark.parametrize(
    ("options", "tokens", "documents"),
    [({}, "abcäde", [0, 0, 0, 1, 1, 1, 2]), ({"end_token": ord("c")}, "abcädcec", [0, 0, 0, 1, 1, 1, 1, 2, 2])],
)
def test_each_line_of_a_jsonl_is_a_document(tmp_path, options, tokens, documents):
    (tmp_path / "a.jsonl").write_bytes(LINES)
    (tmp_path / "b.txt").write_text("rest")
    corpus = read([tmp_path], **options)
    found = corpus.row(0, corpus.size)
    ends = [*b"rest", *([ord("c")] if options else [])]
    assert found[0].tolist() == [*tokens.encode(), *ends]
    assert found[1].tolist() == [*documents, *[documents[-1] + 1] * len(ends)]
    assert corpus.row(4, 3)[1].tolist() == [0, 0, 1] if not options else [0, 0, 0]


def test_a_fingerprint_tells_lines_of_a_jsonl_apart(tmp_path):
    """And is that of earlier versions for other files."""
    found = set()
    for name, text in (
        ("a.txt", "abcd"),
        ("a.jsonl", '{"text": "ab"}\n{"text": "cd"}'),
        ("b.jsonl", '{"text": "a"}\n{"text": "bcd"}'),
    ):
        (tmp_path / name).write_text(text)
        found.add(read([tmp_path / name]).fingerprint)
    assert len(found) == 3
    assert scan_tokens(["a"], [np.array([*b"abcd"])], 256, "--data") in found


BAD_LINES = {
    "[1]": r"Got list in line 2 of .*a\.jsonl",
    '{"body": "x", "id": 1}': r"Got an object with body \(str\), id \(int\) in line 2 .*another field with `--field`",
    '{"text": null}': r"Got an object with text \(NoneType\) in line 2",
    "{}": r"Got an object with nothing in line 2",
    '{"text": "x"': r"Got Expecting ',' delimiter: .* in line 2 of .*a\.jsonl\. Correct it",
    '{"text": "\\ud800"}': r"Got 'utf-8' codec can't encode .* in line 2",
    '"text": "x"': r"Got Extra data: .* in line 2",
}


@pytest.mark.parametrize("line", BAD_LINES)
def test_bad_lines_of_a_jsonl(tmp_path, line):
    (tmp_path / "a.jsonl").write_text(f'{{"text": "fine"}}\n{line}\n')
    with pytest.raises(
        InputError, match=rf"`--data` must hold an object with .* a string `text` in .* {BAD_LINES[line]}"
    ):
        read([tmp_path])


NO_TEXTS = {
    "a.parquet": (b"PAR1\x15\x04\x2a\x00\x00\x00PAR1", r"Got .*a\.parquet: a null byte\. Unpack it"),
    "a.txt.gz": (
        gzip.compress(b"text"),
        r"Got .*a\.txt\.gz: 'utf-8' codec .*\. Unpack it, or write its texts to a \.jsonl",
    ),
    "utf16.txt": ("text".encode("utf-16-le"), r"Got .*utf16\.txt: a null byte"),
    "a.json": (b'[{"text": "x"}]', r'Got .*a\.json, all of whose syntax .* {"text": "\.\.\."} in each line; or rename'),
    "a.csv": (b"text\nx", r"Got .*a\.csv, all of whose syntax would be learned"),
}


@pytest.mark.parametrize("name", NO_TEXTS)
def test_other_files_than_text_are_refused(tmp_path, name):
    """Whatever the tokenizer and the option."""
    content, message = NO_TEXTS[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=rf"`--held-out` must hold text.* {message}"):
        read([tmp_path / name], option="--held-out")


def test_folders_are_taken_by_endings_and_say_so(texts):
    for name in ("d.md", "e.JSONL", "f.py", "g", ".hidden.txt", ".git/config.txt", "deep/h.txt"):
        (texts / name).parent.mkdir(exist_ok=True)
        (texts / name).write_text('{"text": "e"}' if name == "e.JSONL" else name[0])
    with pytest.warns(
        UserWarning, match=r"takes 6 of 10 files in .* Left out: \.git/config\.txt, \.hidden\.txt, f\.py, g\."
    ):
        corpus = read([texts])
    assert bytes(corpus.row(0, corpus.size)[0].tolist()) == b"abcdefghABCDEFGHIJKLMdde"
    assert bytes(read([texts / "f.py", texts / "g"]).row(0, 2)[0].tolist()) == b"fg"  # named themselves
    (texts / "empty").mkdir()
    (texts / "code").mkdir()
    (texts / "code" / "a.py").touch()
    for folder, holds in (("empty", "no files"), ("code", r"a\.py")):
        with pytest.raises(
            InputError, match=rf"`--data` must name folders of files that end in \.txt, .* holds {holds}"
        ):
            read([texts / folder])


def batches(count: int, batch: int = 2, seed: int = 0) -> Batches:
    return Batches(Corpus((np.arange(count * 4, dtype=np.uint16),)), batch, 4, range(count), seed)


def test_every_epoch_has_each_row_once_and_its_own_order():
    source = batches(10)
    rows = [int(row[0]) // 4 for step in range(10) for row in source.at(step).tokens]
    first, second = rows[:10], rows[10:]
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    np.testing.assert_array_equal(batches(10).at(7).tokens, source.at(7).tokens)
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
    for paths, encoder, message in (
        ([tmp_path / "none"], None, "`--data` must name files or folders. There is no"),
        ([texts / "a.txt"], None, r"`--tokenizer` is required for text, as .*a\.txt: `bytes`, or"),
        ([tmp_path / "square.npy"], None, r"with one axis of integers. Got int64 of shape \(2, 2\)"),
    ):
        with pytest.raises(InputError, match=message):
            read(paths, encoder)


def test_an_empty_corpus_is_refused(texts):
    corpus = read([texts / "b.txt"])
    with pytest.raises(InputError, match=r"at least one row of `--length` 8 tokens. Got 0 tokens in 0 files"):
        Batches(corpus, 1, 8, range(corpus.size // 8))


@pytest.mark.parametrize(
    ("token", "dtype"), [(256, np.uint16), (256, np.int64), (2**32 + 5, np.int64), (-1, np.int64), (2**63, np.uint64)]
)
@pytest.mark.parametrize("option", ["--data", "--held-out"])
def test_tokens_out_of_range_are_refused_at_once(tmp_path, monkeypatch, token: int, dtype, option: str):
    """Wherever they are, also where int32 would wrap around to a token of the vocabulary."""
    monkeypatch.setattr("flax_layers.train.dataset.corpus._CHUNK", 4)
    tokens = np.zeros(11, dtype)
    tokens[9] = token
    np.save(tmp_path / "a.npy", tokens[:9])
    np.save(tmp_path / "b.npy", tokens)
    with pytest.raises(
        InputError,
        match=rf"`{option}` must hold tokens from 0 to 255, the model's vocabulary\. Got {token} at token 9 of .*b\.npy"
        r"\. Use the tokenizer of the model, or the right `--token-dtype`",
    ):
        read([tmp_path], None, option=option)


def test_a_fingerprint_tells_contents_apart(monkeypatch):
    """Those of every chunk, and where files end; not names and dtypes."""
    monkeypatch.setattr("flax_layers.train.dataset.corpus._CHUNK", 4)

    def fingerprint(*files: list[int], dtype: Any = np.uint16) -> str:
        return scan_tokens(["name"] * len(files), [np.array(file, dtype) for file in files], 256, "--data")

    tokens = [*range(11)]
    same = {fingerprint(tokens), fingerprint(tokens, dtype=np.int64), fingerprint(tokens, dtype=">u2")}
    others = [fingerprint([*tokens[:i], 99, *tokens[i + 1 :]]) for i in range(11)]
    others += [fingerprint(tokens[:4], tokens[4:]), fingerprint(tokens[:10]), fingerprint(tokens[::-1])]
    assert len(same) == 1
    assert len(same | set(others)) == 1 + len(others)


def test_token_files_that_are_not_whole(tmp_path):
    (tmp_path / "odd.bin").write_bytes(b"abc")
    (tmp_path / "text.npy").write_text("no array")
    with pytest.raises(InputError, match=r"odd\.bin has 3 bytes, no multiple of the size of uint16. Set"):
        read([tmp_path / "odd.bin"], None)
    with pytest.raises(InputError, match=r"`--held-out` must hold token files that numpy can map. Got .*text\.npy"):
        read([tmp_path / "text.npy"], None, option="--held-out")


# --- which tokenizer encodes text, and which token ends a document

TOKENIZER = ROOT / "tokenizer"  # 280 tokens; its eos_token </s> is token 1
CHATS = dataclasses.replace(train_cases.CONFIG, vocabulary=280, eos_token_ids=(7, 1, 9))
PLAIN = dataclasses.replace(CHATS, eos_token_ids=())


@pytest.fixture
def without_eos(tmp_path) -> pathlib.Path:
    shutil.copy(TOKENIZER / "tokenizer.json", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "config", "token", "text"),
    [
        (["--end-token=3"], CHATS, 3, "Documents end with their file and after token 3, `--end-token`."),
        ([], CHATS, 7, "Documents end with their file and after token 7, the first `eos_token_id` of config.json."),
        (
            [f"--tokenizer={TOKENIZER}"],
            PLAIN,
            1,
            "Documents end with their file and after token 1 '</s>', the `eos_token` of the tokenizer.",
        ),
        (["--tokenizer=bytes"], PLAIN, None, "Documents end with their file."),
        ([], PLAIN, None, "Documents end with their file."),
    ],
)
def test_one_token_ends_a_document(arguments: list[str], config: ModelConfig, token: int | None, text: str):
    options = parse_options(["--data=x", *arguments])
    assert document_end(options, config, make_encoder(options, config)) == (token, text)


@pytest.mark.parametrize(
    ("arguments", "config", "message"),
    [
        (["--end-token=280"], PLAIN, r"must be from 0 to 279, the model's vocabulary. Got 280 from `--end-token`. Set"),
        (["--end-token=-1"], PLAIN, "Got -1 from `--end-token`"),
        ([], dataclasses.replace(PLAIN, eos_token_ids=(999,)), "Got 999 from the first `eos_token_id` of config.json"),
    ],
)
def test_end_tokens_out_of_range(arguments: list[str], config: ModelConfig, message: str):
    with pytest.raises(InputError, match=message):
        document_end(parse_options(["--data=x", *arguments]), config, None)


def test_documents_of_a_model_from_scratch_end_with_the_token_of_its_tokenizer(tmp_path):
    np.save(tmp_path / "tokens.npy", np.array([5, 6, 1, 7, 8, 9, 1, 2] * 2, np.uint16))
    (tmp_path / "text.txt").write_text("a")
    options = parse_options(
        [f"--data={tmp_path}", f"--tokenizer={TOKENIZER}", "--sizes=vocabulary=280", "--length=8", "--held-out-share=0"]
    )
    config, _ = model_config(options)
    encoder = make_encoder(options, config)
    end = document_end(options, config, encoder)
    batches, _ = make_batches(options, config, encoder, end.token)
    text = len(batches.corpus.files[0])
    tokens, documents = batches.corpus.row(text - 1, 9)
    assert tokens.tolist() == [1, 5, 6, 1, 7, 8, 9, 1, 2]
    assert documents.tolist() == [0, 1, 1, 1, 2, 2, 2, 2, 3]
    assert with_end_token(config, end.token).eos_token_ids == (1,)  # which an export writes, and generation stops at
    assert with_end_token(CHATS, end.token) == CHATS


def test_the_tokenizer_beside_a_config_is_taken(without_eos):
    shutil.copy(ROOT / "llama3" / "config.json", without_eos)
    config = json.loads((without_eos / "config.json").read_text())
    (without_eos / "config.json").write_text(json.dumps(config | {"vocab_size": 280}))
    options = parse_options(["--data=x", f"--config={without_eos}", "--length=64"])
    assert isinstance(make_encoder(options, model_config(options)[0]), FolderEncoder)
    assert tokenizer_folder(options) == export_source(options) == without_eos
    (without_eos / "tokenizer.json").unlink()
    assert make_encoder(options, model_config(options)[0]) is None


@pytest.mark.parametrize(
    ("arguments", "folder"),
    [
        (["--model=one", "--tokenizer=other"], "other"),
        (["--model=one"], "one"),
        (["--config=one", "--tokenizer=other"], "other"),
        ([], None),
    ],
)
def test_the_tokenizer_that_was_trained_with_is_exported(tmp_path, arguments: list[str], folder: str | None):
    expected = None if folder is None else pathlib.Path(folder)
    assert export_source(parse_options(["--data=x", *arguments])) == expected
    assert export_source(parse_options(["--data=x", "--tokenizer=bytes", f"--output={tmp_path}"])) == tmp_path

"""Which tokenizer encodes text, and which token ends a document."""

import dataclasses
import json
import pathlib
import shutil

import numpy as np
import pytest

from flax_layers.models import ModelConfig
from flax_layers.train import InputError
from flax_layers.train.data import document_end, make_batches, make_encoder, tokenizer_folder
from flax_layers.train.options import parse_options
from flax_layers.train.setup import export_source, model_config, with_end_token
from flax_layers.train.texts import FolderEncoder
from tests.cases import train_cases
from tests.support.golden_models import ROOT

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


def test_a_tokenizer_without_an_end_token_is_named(without_eos):
    end = document_end(parse_options(["--data=x"]), PLAIN, FolderEncoder(without_eos))
    assert end.token is None
    assert end.text == (
        f"Documents end with their file. The tokenizer in {without_eos} has no `eos_token`. To end them after a token, "
        "too, set `--end-token`."
    )


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
        (["--tokenizer=bytes"], None),
    ],
)
def test_the_tokenizer_that_was_trained_with_is_exported(arguments: list[str], folder: str | None):
    expected = None if folder is None else pathlib.Path(folder)
    assert export_source(parse_options(["--data=x", *arguments])) == expected

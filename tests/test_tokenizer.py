"""Tokens and chat prompts are those of `transformers`, for the tokenizer in `tests/goldens/tokenizer`."""

import json
import shutil

import pytest

from flax_layers.models import Tokenizer
from flax_layers.models.optional import needs
from tests.golden_models import ROOT

FOLDER = ROOT / "tokenizer"
EXPECTED = json.loads((FOLDER / "expected.json").read_text())


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(FOLDER)


@pytest.mark.parametrize("row", EXPECTED["texts"], ids=range(len(EXPECTED["texts"])))
def test_tokens_and_back(tokenizer, row):
    tokens = tokenizer.encode(row["text"])
    assert tokens.tolist() == row["tokens"]
    assert tokenizer.encode(row["text"], special_tokens=False).tolist() == row["tokens"][1:]
    plain = row["text"].replace("<s>", "").replace("</s>", "")
    assert tokenizer.decode(tokens) == plain
    assert tokenizer.decode(tokens, special_tokens=True) == "<s>" + row["text"]
    assert "".join(tokenizer.decode_stream(tokens)) == plain


def test_a_stream_shows_whole_characters(tokenizer):
    tokens = tokenizer.encode("😀", special_tokens=False)
    assert len(tokens) > 1
    assert list(tokenizer.decode_stream(tokens)) == ["😀"]


def test_chat_prompts(tokenizer):
    assert tokenizer.chat(EXPECTED["chat"]) == EXPECTED["prompt"]
    tools = [{"name": "é"}]
    assert tokenizer.chat(EXPECTED["chat"], tools=tools, add_generation_prompt=False) == EXPECTED["with_tools"]


def test_facts(tokenizer):
    assert tokenizer.vocabulary == 280
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert (tokenizer.token_id("</s>"), tokenizer.token_id("no such token")) == (1, None)


def test_named_templates_of_the_configuration(tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(FOLDER / name, tmp_path)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["chat_template"] = [{"name": "default", "template": "A"}, {"name": "rag", "template": "B{{ documents }}"}]
    config["eos_token"] = {"content": "</s>", "lstrip": False}
    path.write_text(json.dumps(config))
    tokenizer = Tokenizer(tmp_path)
    assert (tokenizer.chat([]), tokenizer.chat([], template="rag", documents=1)) == ("A", "B1")
    assert tokenizer.special_tokens["eos_token"] == "</s>"
    with pytest.raises(ValueError, match=r"`template` must name a chat template .* has default, rag"):
        tokenizer.chat([], template="tools")


def test_wrong_messages(tokenizer):
    with pytest.raises(ValueError, match=r"The chat template refuses `messages`: unknown role system"):
        tokenizer.chat([{"role": "system", "content": ""}])


def test_a_template_cannot_reach_python(tmp_path):
    shutil.copy(FOLDER / "tokenizer.json", tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages.__class__.__mro__ }}{{ messages.append(1) }}")
    with pytest.raises(ValueError, match=r"The chat template refuses `messages`: .*unsafe"):
        Tokenizer(tmp_path).chat([])


def test_missing_files_and_packages(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"`folder` must hold `tokenizer.json`.*save_pretrained"):
        Tokenizer(tmp_path)
    with (
        pytest.raises(ModuleNotFoundError, match=r"needs absent for this: pip install 'jflex\[models\]'"),
        needs("absent"),
    ):
        import absent  # noqa: F401  # pyright: ignore[reportMissingImports]


def test_nothing_is_cut_or_padded_as_in_training(tmp_path):
    """`tokenizer.json` of a fine-tuned model may hold how its rows were cut; `transformers` takes no notice."""
    raw = json.loads((FOLDER / "tokenizer.json").read_text())
    raw["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    raw["padding"] = {
        "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "<s>",
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    row = max(EXPECTED["texts"], key=lambda row: len(row["tokens"]))
    assert Tokenizer(tmp_path).encode(row["text"]).tolist() == row["tokens"]


def test_templates_may_say_how_json_is_written(tmp_path):
    shutil.copy(FOLDER / "tokenizer.json", tmp_path)
    template = "{{ tools | tojson(ensure_ascii=True, separators=(',', ':')) }}{{ tools | tojson(sort_keys=True) }}"
    (tmp_path / "chat_template.jinja").write_text(template)
    assert Tokenizer(tmp_path).chat([], tools={"b": "é", "a": 1}) == '{"b":"\\u00e9","a":1}{"a": 1, "b": "é"}'

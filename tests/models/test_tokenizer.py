"""Tokens and chat prompts are those of `transformers`, for the tokenizer in `tests/goldens/tokenizer`."""

import datetime
import json
import pathlib
import shutil

import pytest

from flax_layers.models import CheckpointError, Tokenizer
from flax_layers.models.checkpoint.optional import needs
from tests.support.golden_models import ROOT

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
    stream = tokenizer.text_stream()
    assert stream.push(tokens) + stream.finish() == plain


def test_a_stream_shows_whole_characters(tokenizer):
    tokens = tokenizer.encode("😀", special_tokens=False)
    assert len(tokens) > 1
    stream = tokenizer.text_stream()
    assert [stream.push([token]) for token in tokens] == [""] * (len(tokens) - 1) + ["😀"]


def test_chat_prompts(tokenizer):
    assert tokenizer.chat(EXPECTED["chat"]) == EXPECTED["prompt"]
    tools = [{"name": "é"}]
    assert tokenizer.chat(EXPECTED["chat"], tools=tools, add_generation_prompt=False) == EXPECTED["with_tools"]


def test_facts(tokenizer):
    assert tokenizer.vocabulary == 280
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert (tokenizer.token_id("</s>"), tokenizer.token_id("no such token")) == (1, None)


@pytest.mark.parametrize("text", [b"{", b"{}", b"\xff"])
def test_a_file_that_is_no_tokenizer(text, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(text)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read: .*\. Download it again"):
        Tokenizer(tmp_path)


def test_named_templates_of_the_configuration(tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(FOLDER / name, tmp_path)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({"chat_template": "\n{{"}))
    with pytest.raises(ValueError, match=r"Line 2 of 'default' in .*tokenizer_config\.json: "):
        Tokenizer(tmp_path).chat([])
    config["chat_template"] = [{"name": "default", "template": "A"}, {"name": "rag", "template": "B{{ documents }}"}]
    config["eos_token"] = {"content": "</s>", "lstrip": False}
    path.write_text(json.dumps(config))
    tokenizer = Tokenizer(tmp_path)
    assert (tokenizer.chat([]), tokenizer.chat([], template="rag", documents=1)) == ("A", "B1")
    assert tokenizer.special_tokens["eos_token"] == "</s>"
    with pytest.raises(ValueError, match=r"`template` must be a chat template .* has default, rag"):
        tokenizer.chat([], template="tools")


def with_template(folder: pathlib.Path, source: str) -> Tokenizer:
    shutil.copy(FOLDER / "tokenizer.json", folder)
    (folder / "chat_template.jinja").write_text(source, encoding="utf-8")
    return Tokenizer(folder)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ dict.__subclasses__() }}",
        "{% set it = namespace(__class__=1) %}",
        "{% set it = namespace() %}{% set it.__class__ = 1 %}",
        "{{ '<' + messages[0].content }}",  # which is None
    ],
)
def test_a_template_cannot_reach_python(source, tmp_path):
    message = r"The chat template refuses `messages`: .*(unsafe|immutable|subclasses|can only concatenate str)"
    with pytest.raises(ValueError, match=message):
        with_template(tmp_path, source).chat([{"role": "user", "content": None}])


# What `transformers` 5.23 renders of them, for the messages of `EXPECTED["chat"]`.
TEMPLATES = {
    "generation": (
        "{% for m in messages %}\n{% generation %}\n[{{ m.role }}]{% set m = 3 %}\n{%- endgeneration -%}\n"
        "{{ m.content }};{% endfor %}\n",
        "[user] who sees whom? ;[assistant]ask the mask;",
    ),
    "generation in a loop": (
        "{% for m in messages %}{%- generation %} {{ loop.index }} {% endgeneration -%}  {% endfor %}", " 1  2 "
    ),
    "loop controls": ("{% for m in messages %}{{ m.role }}{% break %}{% endfor %}", "user"),
    "dict, namespace": (
        "{% set all = namespace(last='', n=0) %}{% for m in messages %}{% set all.last = m.role %}{% endfor %}"
        "{{ all.last }}{{ dict(a=all.n) }}",
        "assistant{'a': 0}",
    ),
    "tojson": ("{{ {'b': '<é>', 'a': [1, none]} | tojson }}", '{"b": "<é>", "a": [1, null]}'),
    "tojson, indent": ("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}", '{\n "a": 2,\n "b": 1\n}'),
    "what is not defined": ("{{ nothing }}{{ tools is none }}{{ add_generation_prompt }}", "TrueTrue"),
}  # fmt: skip


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_are_rendered_as_by_transformers(name, tmp_path):
    source, expected = TEMPLATES[name]
    assert with_template(tmp_path, source).chat(EXPECTED["chat"]) == expected


def test_a_template_may_ask_for_the_date(tmp_path):
    tokenizer = with_template(tmp_path, "{{ strftime_now('%Y') }} {{ strftime_now(format='%%') }}")
    before, found, after = datetime.datetime.now().year, tokenizer.chat([]), datetime.datetime.now().year
    assert found in (f"{before} %", f"{after} %")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("a\n{% if %}", r"`template` must be valid jinja2\. Line 2 of 'default' in .*/chat_template\.jinja: .*\. C"),
        ("{{ x | nothing }}", r"Line 1 of .*: No filter named 'nothing'\. Correct the file, or download it again\."),
        ("\n\n{% generation %}", r"Line 3 of .*: Unexpected end of template"),
        ("{% training %}", r"Line 1 of .*: Encountered unknown tag 'training'"),
    ],
)
def test_a_template_that_is_not_valid(source, message, tmp_path):
    """It does not matter until it is used."""
    tokenizer = with_template(tmp_path, source)
    assert tokenizer.encode("a").size
    with pytest.raises(ValueError, match=message):
        tokenizer.chat([])


def test_named_templates_in_files_of_their_own(tmp_path):
    """As `transformers` 5 writes them."""
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("B{{ documents }}")
    tokenizer = with_template(tmp_path, "A")
    assert (tokenizer.chat([]), tokenizer.chat([], template="rag", documents=1)) == ("A", "B1")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"tokenizer_config\.json is not JSON: .* Download it again, or remove it"),
        ("[]", r"tokenizer_config\.json must hold a JSON object\. Got list\. Download it again"),
    ],
)
def test_a_configuration_that_is_not_valid(text, message, tmp_path):
    shutil.copy(FOLDER / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        Tokenizer(tmp_path)


def test_missing_files_and_packages(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"`folder` must hold `tokenizer.json`.*save_pretrained"):
        Tokenizer(tmp_path)
    with (
        pytest.raises(ModuleNotFoundError, match=r"needs absent: in a checkout, pip install -e '\.\[models\]'"),
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

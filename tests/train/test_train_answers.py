"""Lines that are chats or prompts with completions: which tokens are trained, and what is refused."""

import itertools
import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest

from flax_layers.models import from_pretrained
from flax_layers.train import Batches, Computation, InputError, Recipe, Rows, Trainer
from flax_layers.train.dataset.corpus import read_corpus
from flax_layers.train.dataset.texts import ByteEncoder, FolderEncoder
from tests.cases import train_cases
from tests.support.golden_models import ROOT
from tests.support.rows import tiers

CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
GENERATION = (
    "{{ tools or '' }}{% for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}</s>{% endgeneration %}{% else %}{{ m.content }}</s>{% endif %}\n{% endfor %}"
)
# As of models that leave out the reasoning of earlier answers.
FORGETFUL = (
    "{% for m in messages %}{{ m.role }}: {% if loop.last and m.role == 'assistant' %}(thought) {% endif %}"
    "{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
WITHOUT_ENDS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
ASK, ANSWER = {"role": "user", "content": "who?"}, {"role": "assistant", "content": " naïve 😀 "}
MORE = [{"role": "user", "content": "東京"}, {"role": "assistant", "content": "café"}]
SILENT = {**ANSWER, "weight": 0}


@pytest.fixture
def read(tmp_path):
    """Reads lines with a template; returns the corpus and the trained texts, each with its weight."""

    def read(*records, template: str = CHATML, **options):
        folder = tmp_path / "tokenizer"
        shutil.copytree(ROOT / "tokenizer", folder, dirs_exist_ok=True)
        (folder / "chat_template.jinja").write_text(template)
        (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        encoder = FolderEncoder(folder)
        corpus = read_corpus([tmp_path / "a.jsonl"], encoder, vocabulary=280, end_token=1, **options)
        (tokens, _), weights = corpus.row(0, corpus.size), corpus.row_weights(0, corpus.size)
        edges = np.flatnonzero(np.diff(weights, prepend=0, append=0))
        parts = [slice(a, b) for a, b in itertools.pairwise(edges) if weights[a]]
        decode = lambda x: encoder.tokenizer.decode(x, special_tokens=True)
        return corpus, [(decode(tokens[part]), float(weights[part][0])) for part in parts]

    return read


CHAT = [ASK, ANSWER, *MORE]
BOTH = [(" naïve 😀 </s>", 1), ("café</s>", 1)]


@pytest.mark.parametrize(
    ("record", "template", "trained"),
    [
        ({"messages": CHAT}, CHATML, BOTH),
        # Token for token as `return_assistant_tokens_mask` of transformers 5.24.
        ({"messages": CHAT}, GENERATION, BOTH),
        ({"messages": [ASK, SILENT, *MORE]}, CHATML, BOTH[1:]),
        ({"messages": [ASK, {**ANSWER, "weight": 0.5}, *MORE]}, GENERATION, [(BOTH[0][0], 0.5), BOTH[1]]),
        ({"messages": [ASK, SILENT, *MORE]}, FORGETFUL, [("(thought) café</s>", 1)]),
        ({"messages": CHAT}, WITHOUT_ENDS, [(" naïve 😀 \n", 1), ("café\n", 1)]),
        ({"messages": CHAT, "text": "x"}, CHATML, BOTH),
        ({"prompt": CHAT[:3], "completion": CHAT[3:]}, CHATML, BOTH[1:]),
        ({"prompt": "who?", "completion": " naïve 😀"}, CHATML, [(" naïve 😀</s>", 1)]),
        ({"prompt": "", "completion": ""}, CHATML, [("</s>", 1)]),
    ],
)
def test_answers_alone_are_trained(read, record, template, trained):
    """With the token that ends their turn, and no space after it."""
    assert read(record, template=template)[1] == trained


def test_variables_of_the_template_come_from_the_line(read):
    record = {"messages": CHAT, "tools": ["T"], "chat_template_kwargs": {"end": "!"}}
    call = {"function": {"name": "f", "arguments": '{"a": 1}'}}
    template = "{{ tools }}" + WITHOUT_ENDS.replace("\n", "{{ end }}{{ (m.tool_calls or [''])[0] }}")
    record["messages"] = [ASK, {"role": "assistant", "content": "x", "tool_calls": [call]}]
    assert read(record, template=template)[1] == [("x!{'function': {'name': 'f', 'arguments': {'a': 1}}}", 1)]


def test_lines_are_documents_and_have_weights(read):
    """End tokens within a chat end no document; texts among chats are trained whole."""
    records = [{"messages": CHAT, "w": 1}, {"body": "abc", "text": "abc", "w": 0.5}, {"messages": [*MORE], "w": 0}]
    corpus, trained = read(*records, weight_field="w")
    assert trained == [*BOTH, ("<s>abc</s>", 0.5)]
    sizes = np.unique(corpus.row(0, corpus.size)[1], return_counts=True)[1]
    assert len(sizes) == 3
    batches = Batches(corpus, 2, 16, range(corpus.size // 16))
    assert batches.at(0).weights.shape == (2, 16)
    held_out = batches.in_order(9)
    np.testing.assert_array_equal(
        np.concatenate([x.weights for x in held_out]).ravel()[: corpus.size // 16 * 16],
        corpus.row_weights(0, corpus.size // 16 * 16),
    )
    assert read(*records[:2], {**records[2], "w": 1}, weight_field="w")[0].fingerprint != corpus.fingerprint


BAD = [
    (
        {"messages": CHAT},
        FORGETFUL,
        r"Got message 1, whose answer .* Mark answers with {% generation %} .*\"weight\": 0",
    ),
    (
        {"messages": [ASK, {**ANSWER, "weight": 2}, *MORE]},
        f"{GENERATION}{GENERATION}",
        "different weights of 2 answers",
    ),
    ({"messages": [ASK]}, CHATML, "Got messages without one of the assistant in line 1 of"),
    ({"messages": [ASK, {**ANSWER, "weight": -1}]}, CHATML, "Got -1 as `weight`, where a number"),
    ({"messages": [{"content": "hi"}]}, CHATML, "Got messages without a `role` in line 1"),
    ({"messages": [ASK, ANSWER]}, "{{ raise_exception('no user') }}", "Got The chat template refuses .*no user"),
    ({"prompt": "a", "completion": 1}, CHATML, r"Got an object with prompt \(str\), completion \(int\)"),
    ({"body": "a"}, CHATML, r"with `messages`, with `prompt` and `completion`, or with a string `text` in each line"),
]


@pytest.mark.parametrize(("record", "template", "message"), BAD)
def test_lines_that_are_refused(read, record, template, message):
    with pytest.raises(InputError, match=message):
        read(record, template=template)


def test_weights_and_tokenizers_that_are_refused(read, tmp_path):
    with pytest.raises(InputError, match="Got None as `w`, where a number from 0 on is needed, in line 1"):
        read({"text": "a"}, weight_field="w")
    read({"messages": CHAT})
    with pytest.raises(InputError, match="Got answers, for which `--tokenizer` must be a folder with"):
        read_corpus([tmp_path / "a.jsonl"], ByteEncoder(), vocabulary=256)


# --- the loss

# `loss` of transformers 5.24 for the tokens in `expected.npz`, with the label -100 where `keep` is 0.
PLACES = np.arange(24)
KEEP = np.stack([PLACES % 7 < 3, PLACES > 17]).astype(np.float32)
LOSSES = {"llama3": 8.17126083, "qwen3": 7.27067137, "gemma2": 6.19235992}


@pytest.mark.parametrize("name", [pytest.param(x, marks=[] if x == "llama3" else pytest.mark.full) for x in LOSSES])
def test_the_loss_is_that_of_transformers_with_masked_labels(name):
    tokens = np.load(ROOT / name / "expected.npz")["tokens"]
    model = from_pretrained(ROOT / name, param_dtype=jnp.float32, implementation="xla")
    rows = Rows(tokens, np.zeros_like(tokens), KEEP)
    assert Trainer(model, Recipe(1)).mean_loss([rows]) == pytest.approx(LOSSES[name], abs=1e-5)


@tiers(full={"mesh": "data=1"}, rest="long")
@pytest.mark.parametrize(("mesh", "accumulate"), [("data=1", 4), ("data=2,context=2,model=2", 2)])
def test_the_loss_is_the_mean_over_all_trained_tokens(mesh, accumulate):
    """However they are spread over micro-batches and devices; a row without any is none."""
    weights = np.random.default_rng(5).random((train_cases.ROWS, train_cases.LENGTH)).astype(np.float32)
    weights[weights < 0.5] = 0
    weights[:3] = 0
    whole, divided = train_cases.trainer(), train_cases.trainer(mesh, Computation(accumulate, context_order="natural"))
    for seed in range(2):
        rows = train_cases.batch(seed)._replace(weights=weights)
        found, expected = divided.step(rows), whole.step(rows)
        np.testing.assert_allclose(found[:2], expected[:2], rtol=2e-5)
    doubled = rows._replace(weights=2 * weights)
    np.testing.assert_allclose(whole.mean_loss([rows]), divided.mean_loss([doubled]), rtol=2e-5)
    nothing = rows._replace(weights=0 * weights)
    assert float(whole.step(nothing).loss) == whole.mean_loss([nothing]) == 0

"""Constraints: what models of random weights write matches them, whatever runs beside them."""

from __future__ import annotations

import dataclasses
import json
import re

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from flax import nnx

from flax_layers.models import Decoder
from flax_layers.sampling import Sampling
from flax_layers.serving import Constraint, Engine, EngineOptions, Guides
from flax_layers.serving.device.penalties import Penalties
from tests.cases.constraint_cases import (
    BPE_END,
    JSON,
    PERSON,
    REGEX,
    SIZES,
    WORDS,
    engine_of,
    is_valid,
    model,
    sampled,
    schema,
    schemas,
    shared_engine,
    texts,
    tokenizer,
)
from tests.cases.engine_cases import Client, fail_once, run, submit
from tests.support.rows import tiers

PROMPT = (70, 71, 72)
KINDS = pytest.mark.parametrize("kind", ["bytes", "bpe"])


@tiers(full={"kind": "bpe"}, rest="long")
@KINDS
def test_texts_match(kind):
    engine, clients = shared_engine(kind), []
    for seed in range(12):
        sampling = sampled(seed) if seed else Sampling()
        for constraint in (JSON, REGEX):
            clients.append(Client(engine, (*PROMPT, seed), constraint=constraint, sampling=sampling, max_tokens=200))
    found = texts(engine, kind, clients)
    assert {client.reason for client in clients} == {"stop"}
    assert all(is_valid(PERSON, text) for text in found[::2]), found[::2]
    assert all(re.fullmatch(WORDS, text) for text in found[1::2]), found[1::2]
    assert len(set(found)) > 16


@tiers(full={"kind": "bpe"}, rest="long")
@KINDS
@hypothesis.settings(max_examples=25)
@hypothesis.given(value=schemas(), seed=st.integers(0, 1 << 20))
def test_any_small_schema(kind, value, seed):
    engine = shared_engine(kind)
    constraint = schema(value)
    options = {"constraint": constraint, "max_tokens": 700}
    clients = [Client(engine, PROMPT, sampling=sampled(seed + n), **options) for n in range(3)]
    clients.append(Client(engine, PROMPT, **options))
    for client, text in zip(clients, texts(engine, kind, clients), strict=True):
        assert client.reason == "stop" or (kind == "bpe" and client.reason == "length"), (client.events[-1], text)
        assert client.reason == "length" or is_valid(value, text), text


@pytest.mark.long
def test_whitespace_and_any_object():
    engine = shared_engine("bytes")
    clients = [
        Client(engine, PROMPT, constraint=Constraint.json_object(), sampling=sampled(seed), max_tokens=400)
        for seed in range(16)
    ]
    found = texts(engine, "bytes", clients)
    ended = [text for text, client in zip(found, clients, strict=True) if client.reason == "stop"]
    assert len(ended) > 4
    assert all(isinstance(json.loads(text), dict) for text in ended)
    assert any(re.search(r"\s", text) for text in ended)


UNCONSTRAINED = [
    {},
    {"sampling": sampled(5)},
    {"sampling": Sampling(0.8, top_k=9, top_p=0.9, seed=1), "penalties": Penalties(frequency_penalty=1.0)},
    {"logprobs": 2},
]


@pytest.mark.full
def test_requests_beside_constrained_ones_get_the_same_tokens():
    engine = engine_of("bytes")
    alone = [Client(engine, PROMPT, **options) for options in UNCONSTRAINED]
    run(engine)
    engine = engine_of("bytes")
    beside = []
    for seed, options in enumerate(UNCONSTRAINED):
        Client(engine, PROMPT, constraint=REGEX, sampling=sampled(seed), max_tokens=40)
        beside.append(Client(engine, PROMPT, **options))
        engine.step()
    run(engine)
    assert [x.tokens for x in beside] == [x.tokens for x in alone]
    np.testing.assert_allclose(*([one.logprob for one in x[3].logprobs] for x in (beside, alone)), atol=1e-5)


@pytest.mark.full
def test_preemption_and_prefixes_change_nothing():
    outputs = []
    for pages in (400, 20):
        engine = engine_of("bpe", num_pages=pages)
        options = [{"constraint": JSON, "sampling": sampled(n)} for n in range(5)]
        clients = [Client(engine, (*range(30, 50), 9), max_tokens=120, **x) for x in [*options, {"constraint": REGEX}]]
        outputs.append(texts(engine, "bpe", clients))
        assert (engine.stats().preemptions > 0) == (pages == 20)
        assert engine.stats().hit_tokens > 0
    assert outputs[0] == outputs[1]
    assert all(is_valid(PERSON, text) for text in outputs[0][:-1])


@pytest.mark.full
def test_samples_of_one_prompt():
    """The first tokens come from the same logits, each under its own constraint."""
    prompt = (*range(30, 50), 9)
    each = [{"constraint": JSON if n % 2 else REGEX, "sampling": sampled(n), "max_tokens": 120} for n in range(3)]
    each.append({"sampling": sampled(9)})
    engine, alone = engine_of("bytes"), engine_of("bytes")
    samples = submit(engine, prompt, each)
    found = texts(engine, "bytes", samples)
    assert found == texts(alone, "bytes", [Client(alone, prompt, **options) for options in each])
    assert [x.ticket.hit_tokens for x in samples] == [0, 21, 21, 21]
    assert is_valid(PERSON, found[1])


@pytest.mark.full
def test_speculated_requests_beside_a_constrained_one():
    """The constrained one is not speculated; the others get the tokens that they get without both."""
    tokens = []
    for draft_tokens in (0, 5):
        engine = engine_of("bytes", draft_tokens=draft_tokens, draft_match=1)
        options = {"max_tokens": 60}
        plain = [
            Client(engine, (*PROMPT, n) * 4, sampling=sampled(n) if n else Sampling(), **options) for n in range(3)
        ]
        constrained = Client(engine, PROMPT, constraint=JSON, max_tokens=200)
        run(engine)
        tokens.append([client.tokens for client in plain])
        assert is_valid(PERSON, tokenizer("bytes").decode(constrained.tokens))
        assert (engine.stats().drafted_tokens > 0) == (draft_tokens > 0)
    assert tokens[0] == tokens[1]


@pytest.mark.full
def test_an_end_token_is_allowed_where_the_text_may_end():
    engine = shared_engine("bpe")
    ending = {"penalties": Penalties(logit_bias=((BPE_END, 100.0),)), "stop_tokens": (BPE_END,), "max_tokens": 30}
    clients = [
        Client(engine, PROMPT, constraint=Constraint.regex(x), **ending) for x in ("dogs*", "(cat)+x*", "a{4,9}")
    ]
    ordered = {"type": "object", "properties": {"z": {"type": "null"}, "a": {"type": "null"}}, "required": ["a", "z"]}
    clients.append(Client(engine, PROMPT, constraint=schema({**ordered, "additionalProperties": False}), **ending))
    clients.append(Client(engine, PROMPT, constraint=Constraint.lark('start: "(" start ")" | "x"'), max_tokens=99))
    *found, nested = texts(engine, "bpe", clients)
    assert found == ["dog", "cat", "aaaa", '{"z":null,"a":null}']
    assert nested == "(" * nested.count("(") + "x" + ")" * nested.count("(")
    assert {client.reason for client in clients} == {"stop"}
    free = Client(engine, PROMPT, constraint=Constraint.regex("a*"), max_tokens=12)  # it cannot end
    assert texts(engine, "bpe", [free]) == ["a" * 12]
    assert free.reason == "length"


@pytest.mark.full
def test_log_probabilities_are_those_of_the_model():
    engine = shared_engine("bytes")
    forced = Client(engine, PROMPT, constraint=Constraint.regex("no"), logprobs=3)
    free = Client(engine, PROMPT, logprobs=3, max_tokens=1)
    run(engine)
    assert forced.events[0].logprobs[0].top == free.events[0].logprobs[0].top
    assert forced.events[0].logprobs[0].logprob < free.events[0].logprobs[0].logprob


@tiers(full={"vocabulary": 281}, rest="long")
@pytest.mark.parametrize("vocabulary", [281, 320, 264])
def test_vocabularies_of_model_and_tokenizer_differ(vocabulary):
    """Padded embeddings, also where llguidance has its end token; and tokens that the model does not have."""
    config = dataclasses.replace(model("bpe").config, vocabulary=vocabulary)
    decoder = Decoder(config, implementation="xla", rngs=nnx.Rngs(1))
    engine = Engine(decoder, EngineOptions(**SIZES), Guides(tokenizer("bpe"), vocabulary))
    anything = Constraint.regex(r"[^\x00]{20,40}")
    clients = [Client(engine, PROMPT, constraint=anything, sampling=sampled(n), max_tokens=60) for n in range(8)]
    texts(engine, "bpe", clients)
    tokens = {token for client in clients for token in client.tokens}
    assert max(tokens) < min(vocabulary, 280)
    assert len(tokens) > 50


ERRORS = {
    "pattern": (Constraint.regex("(a"), "llguidance can follow. It says: .*unclosed group"),
    "look-ahead": (Constraint.regex("a(?=b)"), "look-around.* is not supported"),
    "empty": (Constraint.regex(""), "must allow a text. Got one that allows only an empty one. Leave it out"),
    "keyword": (schema({"not": {}}), r'It says: Unimplemented keys: \["not"\]'),
    "remote": (schema({"$ref": "file:///etc/passwd"}), "Default retriever does not fetch resources"),
    "endless": (schema({"$ref": "#"}), "no text matches what is left of it"),
    "grammar": (Constraint.lark("start: foo"), 'unknown name: "foo"'),
    "slow": (
        Constraint.json_schema(
            {"allOf": [{"type": "string", "pattern": f"^(.*{'ab' * n}.*|b.{{{n}}})$"} for n in range(1, 60)]}
        ),
        "must compile within 2 s and 1024 MiB. Got one that does not: signal 24. Simplify it",
    ),
}


@tiers(full={"name": "slow"})
@pytest.mark.parametrize("name", ERRORS)
def test_constraints_that_are_refused(name):
    constraint, message = ERRORS[name]
    engine = shared_engine("bytes")
    with pytest.raises(ValueError, match=f"^`constraint` .*{message}") as refused:
        Client(engine, PROMPT, constraint=constraint)
    assert len(str(refused.value)) < 400
    assert not engine.step()


class _Fixed:
    def __init__(self, text: str):
        self._text = text

    def serialized(self) -> str:
        return self._text


def of_letters(letters: str) -> _Fixed:
    """A tokenizer of these letters alone."""
    value = json.loads(tokenizer("bytes").serialized())
    value["model"]["vocab"] = {letter: n for n, letter in enumerate(letters)}
    return _Fixed(json.dumps(value))


@pytest.mark.full
def test_a_tokenizer_that_lacks_a_letter():
    engine = Engine(model("bytes"), EngineOptions(**SIZES), Guides(of_letters("abc"), 256))
    with pytest.raises(ValueError, match=r"llguidance can follow\. It says: no text matches what is left of it"):
        Client(engine, PROMPT, constraint=Constraint.regex("(x|y)a"))
    stuck, other = (Client(engine, PROMPT, constraint=Constraint.regex(x)) for x in ("ab(x|y)", "(ab){3}"))
    run(engine)
    assert stuck.tokens == [0, 1]
    assert stuck.reason == "error"
    assert stuck.events[-1].error == "`constraint` cannot be followed any further: no text matches what is left of it"
    assert (other.tokens, other.reason) == ([0, 1] * 3, "stop")


@pytest.mark.full
def test_a_limit_of_the_library_ends_its_request_alone():
    """What copies of a matcher share counts towards its limits; so a request that comes later begins anew."""
    import llguidance

    made = Guides(tokenizer("bytes"), 256)
    made._limits = llguidance.LLParserLimits(max_lexer_states=20, verbose_errors=False)
    engine = Engine(model("bytes"), EngineOptions(**SIZES), made)
    hard = Constraint.regex("[ab]*a[ab]{12}c")
    for _ in range(2):
        client = Client(engine, PROMPT, constraint=hard, sampling=sampled(0), max_tokens=99)
        other = Client(engine, PROMPT)
        run(engine)
        assert client.reason == "error"
        assert "lexer error: too many states: 20 >= 20" in client.events[-1].error
        assert client.tokens
        assert other.reason == "length"
        assert hard not in made._compiled


@pytest.mark.full
def test_cancelled_and_failed_requests(monkeypatch):
    engine = engine_of("bytes")
    clients = [Client(engine, PROMPT, constraint=JSON, sampling=sampled(n), max_tokens=200) for n in range(3)]
    for _ in range(5):
        engine.step()
    clients[1].ticket.cancel()
    texts(engine, "bytes", clients)
    assert [client.reason for client in clients] == ["stop", "cancelled", "stop"]
    fail_once(monkeypatch, engine, 3)
    again = [Client(engine, PROMPT, constraint=JSON, sampling=sampled(n), max_tokens=200) for n in (0, 1, 0, 1, 2)]
    run(engine)
    assert [client.reason for client in again] == ["error"] * 4 + ["stop"]
    assert again[4].tokens == clients[2].tokens

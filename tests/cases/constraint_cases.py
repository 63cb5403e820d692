"""A model of bytes and one of BPE, engines with guides, and a checker of small schemas, for tests of constraints."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

import hypothesis.strategies as st
from flax import nnx

from flax_layers.models import Decoder, LayerConfig, ModelConfig, Tokenizer
from flax_layers.sampling import Sampling
from flax_layers.serving import Constraint, Engine, EngineOptions, Guides
from flax_layers.serving.demo_model import ByteTokenizer
from tests.cases.engine_cases import Client, run
from tests.support.golden_models import ROOT

SIZES = {"max_requests": 4, "max_step_tokens": 32, "num_pages": 400, "page_size": 8, "context": 768, "poison": True}
BPE_END = 1
"""The token `</s>` of the tokenizer of the goldens, which has 280."""
VOCABULARIES = {"bytes": 256, "bpe": 300}
COMPACT = {"x-guidance": {"whitespace_flexible": False}}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["é", "😀", "x"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
    **COMPACT,
}
WORDS = "(cat|dog|é😀|漢字){2,4}!"
JSON, REGEX = Constraint.json_schema(PERSON), Constraint.regex(WORDS)


@functools.cache
def model(kind: str) -> Decoder:
    config = ModelConfig(
        vocabulary=VOCABULARIES[kind], width=16, mlp_width=32, num_heads=2, num_kv_heads=1, head_dim=8,
        layers=(LayerConfig(),), max_positions=768, initializer_range=0.5,
    )  # fmt: skip
    return Decoder(config, implementation="xla", rngs=nnx.Rngs(0))


@functools.cache
def tokenizer(kind: str) -> ByteTokenizer | Tokenizer:
    return ByteTokenizer() if kind == "bytes" else Tokenizer(ROOT / "tokenizer")


@functools.cache
def guides(kind: str) -> Guides:
    return Guides(tokenizer(kind), VOCABULARIES[kind])


def engine_of(kind: str, **options: Any) -> Engine:
    return Engine(model(kind), EngineOptions(**SIZES | options), guides(kind))


@functools.cache
def shared_engine(kind: str) -> Engine:
    return engine_of(kind)


def sampled(seed: int) -> Sampling:
    return Sampling(1.0, seed=seed)


def texts(engine: Engine, kind: str, clients: list[Client]) -> list[str]:
    """Runs to the end. Texts that are complete must end with a whole character."""
    run(engine)
    found = [tokenizer(kind).decode(client.tokens) for client in clients]
    ended = [text for text, client in zip(found, clients, strict=True) if client.reason == "stop"]
    assert not any("\N{REPLACEMENT CHARACTER}" in text for text in ended)
    return found


def schema(value: dict[str, Any]) -> Constraint:
    return Constraint.json_schema({**value, **COMPACT})


def schemas() -> st.SearchStrategy[dict[str, Any]]:
    """Small schemas of the keywords that `matches` knows."""
    small = st.integers(0, 4)
    strings = st.builds(
        lambda least, more: {"type": "string", "minLength": least, "maxLength": least + more}, small, small
    )
    integers = st.builds(
        lambda least, more: {"type": "integer", "minimum": least, "maximum": least + more},
        st.integers(-1200, 1200),
        st.integers(0, 1200),
    )
    enums = st.lists(st.one_of(st.text(max_size=4), st.integers(-9, 9), st.none()), min_size=1, max_size=4)
    patterns = st.sampled_from(["^[a-c]{2,5}$", "^(é|😀)+x$", r"^\d{3}-\d{2}$"])
    leaves = st.one_of(
        strings,
        integers,
        st.sampled_from([{"type": "null"}, {"type": "boolean"}]),
        enums.map(lambda values: {"enum": values}),
        patterns.map(lambda pattern: {"type": "string", "pattern": pattern}),
    )

    def nested(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
        arrays = st.builds(
            lambda items, least, more: {"type": "array", "items": items, "minItems": least, "maxItems": least + more},
            inner,
            st.integers(0, 1),
            st.integers(0, 2),
        )
        objects = st.builds(
            lambda properties, required: {
                "type": "object",
                "properties": properties,
                "required": list(properties)[:required],
                "additionalProperties": False,
            },
            st.dictionaries(st.text(min_size=1, max_size=3), inner, max_size=3),
            st.integers(0, 3),
        )
        return st.one_of(arrays, objects, st.lists(inner, min_size=1, max_size=3).map(lambda x: {"anyOf": x}))

    return st.recursive(leaves, nested, max_leaves=5)


def matches(schema: dict[str, Any], value: Any) -> bool:
    """Whether a value matches a schema of the keywords that these tests use."""
    if "anyOf" in schema:
        return any(matches(one, value) for one in schema["anyOf"])
    if "enum" in schema:
        return any(type(one) is type(value) and one == value for one in schema["enum"])
    kind = schema["type"]
    if kind == "integer":
        return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
    if kind == "string":
        fits = isinstance(value, str) and schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 1 << 30)
        return fits and re.search(schema.get("pattern", ""), value) is not None
    if kind == "array":
        fits = isinstance(value, list) and schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", 1 << 30)
        return fits and all(matches(schema["items"], one) for one in value)
    if kind == "object":
        fits = isinstance(value, dict) and set(schema["required"]) <= set(value) <= set(schema["properties"])
        return fits and all(matches(schema["properties"][name], one) for name, one in value.items())
    return {"null": value is None, "boolean": isinstance(value, bool)}[kind]


def is_valid(schema: dict[str, Any], text: str) -> bool:
    return matches(schema, json.loads(text))

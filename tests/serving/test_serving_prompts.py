"""Prompts: a text is refused by its length only if it cannot fit, and long ones delay neither the server nor others."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Library

from flax_layers.models.checkpoint.tokenizer import BYTE_NAMES, Tokenizer
from flax_layers.serving.api import prompts
from flax_layers.serving.api.http import create_app
from flax_layers.serving.api.prompts import longest_token
from flax_layers.serving.demo_model import ByteTokenizer
from tests.support.golden_models import ROOT
from tests.support.rows import tiers
from tests.support.served import CHATS, COMPLETIONS, HELLO, SERVED, ask, client

SPACE, FALLBACK = "\N{LOWER ONE EIGHTH BLOCK}", [f"<0x{byte:02X}>" for byte in range(256)]


def bpe(vocabulary, merges=(), normalizer=None, pre_tokenizer=None, added=(), **options) -> Library:
    names = list(dict.fromkeys([*vocabulary, *("".join(pair) for pair in merges)]))
    made = Library(models.BPE({name: n for n, name in enumerate(names)}, list(merges), **options))
    if normalizer is not None:
        made.normalizer = normalizer
    if pre_tokenizer is not None:
        made.pre_tokenizer = pre_tokenizer
    made.add_tokens(list(added))
    return made


GAP = "\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}"  # a space in byte-level tokens
BLANKS = [(GAP * n, GAP * n) for n in (1, 2, 4, 8)]
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
LLAMA2 = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
DIGITS = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\d{1,3}"), "isolated"), BYTES])

BOUNDED = {
    "byte level": (bpe(BYTE_NAMES, BLANKS, pre_tokenizer=BYTES), 16),
    "as Qwen": (bpe(BYTE_NAMES, BLANKS, normalizers.NFC(), DIGITS, [AddedToken("<|end|>", special=True)]), 64),
    "as Llama 2": (
        bpe(["<unk>", *FALLBACK, SPACE, "a"], [(SPACE, "a")], LLAMA2, unk_token="<unk>", fuse_unk=True,
            byte_fallback=True), 6,
    ),
    "unknown characters by themselves": (bpe(["<unk>", "a"], normalizer=normalizers.NFD(), unk_token="<unk>"), 5),
    "long special tokens": (bpe(BYTE_NAMES, pre_tokenizer=BYTES, added=[AddedToken("x" * 40, normalized=False)]), 40),
    "SentencePiece with bytes": (
        Library(models.Unigram([("<unk>", 0.0), *((x, -9.0) for x in FALLBACK), ("a", -1.0)], 0, byte_fallback=True)), 6
    ),
}  # fmt: skip
UNBOUNDED = {
    "unknown characters vanish": (bpe(["a"]), "b" * 999),
    "unknown characters fuse": (bpe(["<unk>", "a"], unk_token="<unk>", fuse_unk=True), "b" * 999),
    "missing bytes": (bpe(["a", "b"], pre_tokenizer=BYTES), "c" * 999),
    "spaces that become one": (bpe(BYTE_NAMES, [], normalizers.Replace(Regex(" +"), " "), BYTES), " " * 999),
    "text that vanishes": (bpe(BYTE_NAMES, [], normalizers.Replace("a", ""), BYTES), "a" * 999),
    "split and removed": (
        bpe(BYTE_NAMES, [], None, pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), BYTES])), " " * 999
    ),
    "tokens that take spaces": (
        bpe(BYTE_NAMES, [], None, BYTES, [AddedToken("<mask>", lstrip=True)]), " " * 999 + "<mask>"
    ),
    "words": (Library(models.WordLevel({"<unk>": 0}, unk_token="<unk>")), "a" * 999),
    "word pieces": (Library(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]")), "b" * 999),
    "SentencePiece without bytes": (Library(models.Unigram([("<unk>", 0.0), ("a", -1.0)], 0)), "b" * 999),
}  # fmt: skip
PIECES = st.sampled_from([
    " ", "  ", " " * 17, "\t", "\n", "\0", "a", "abc", "x" * 40, "7", "<|end|>", "<unk>", "<0x41>", SPACE, "日", "😀",
    "\u200d", "\ufffd", "é", "e\u0301", "\u0130", "\ufb03", "\u1100\u1161\u11a8",
    "\u1f80", "\u03b1\u0313\u0301\u0345",  # an alpha with three marks, which NFC makes one
])  # fmt: skip
TEXTS = st.lists(PIECES | st.text(max_size=5), max_size=30).map("".join)


def count(tokenizer: Library, text: str) -> int:
    return len(tokenizer.encode(text, add_special_tokens=False).ids)


@tiers(full={"name": ["byte level", "unknown characters by themselves"]})
@given(text=TEXTS)
@pytest.mark.parametrize("name", BOUNDED)
def test_no_token_covers_more(name, text):
    tokenizer, longest = BOUNDED[name]
    assert longest_token(tokenizer.to_str()) == longest
    assert len(text) <= longest * count(tokenizer, text)


@pytest.mark.parametrize("name", UNBOUNDED)
def test_tokenizers_without_a_bound(name):
    tokenizer, text = UNBOUNDED[name]
    assert count(tokenizer, text) <= 8
    assert longest_token(tokenizer.to_str()) is None


def test_what_the_bound_relies_on():
    """No canonical decomposition is longer, and the tokens of checkpoints have bounds."""
    assert max(len(unicodedata.normalize("NFD", chr(point))) for point in range(0x110000)) == 4
    assert longest_token(ByteTokenizer().serialized()) == 1
    assert longest_token((ROOT / "tokenizer" / "tokenizer.json").read_text()) == 8


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {"prompt": "x" * 1024}, "prompt"), (COMPLETIONS, {"prompt": [[5], [7] * 1024]}, "prompt"),
        (CHATS, {"messages": [{"role": "user", "content": "x" * 1024}]}, "messages"),
        ("/tokenize", {"prompt": "x" * 1024}, "prompt"),
    ],
)  # fmt: skip
def test_long_texts_are_refused_before_they_are_tokenized(path, body, param, engine):
    class Unused(ByteTokenizer):
        def encode(self, text, **options):
            assert text == "a"
            return super().encode(text)

    answer = ask(create_app(engine, Unused(), SERVED), path, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, "context_length_exceeded")
    assert (
        f"`{param}` must be shorter than 1024 tokens, the context length, so that a token can follow. Got 1024"
        in (error["message"])
    )


def test_added_special_tokens(engine):
    """`add_special_tokens` of completions and chats, whose template has them."""
    seen = []

    class Watched(ByteTokenizer):
        def encode(self, text, *, special_tokens=True):
            seen.append(special_tokens)
            return super().encode(text)

    app = create_app(engine, Watched(), SERVED)
    for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHATS, HELLO), ("/tokenize", {"prompt": "a"})):
        for value in (None, True, False):
            ask(app, path, {**body, "add_special_tokens": value, "max_tokens": 0})
    assert seen == [True, True, False, False, True, False, True, True, False]


def test_tokenization_does_not_hold_the_interpreter():
    """Others go on meanwhile: 3 s for a prompt of 4 MB."""
    tokenizer = Tokenizer(ROOT / "tokenizer")
    thread = threading.Thread(target=tokenizer.encode, args=("word and " * 40_000,))
    thread.start()
    turns = 0
    while thread.is_alive():
        time.sleep(0.001)
        turns += 1
    assert turns > 20


class Blocked(ByteTokenizer):
    """Long texts wait until the test lets them go on."""

    def __init__(self):
        super().__init__()
        self.going, self.running, self.most = threading.Event(), 0, 0

    def encode(self, text, **options):
        if len(text) > 9:
            self.running += 1
            self.most = max(self.most, self.running)
            assert self.going.wait(60)
            self.running -= 1
        return super().encode(text)


def test_long_bodies_are_read_one_by_one_and_delay_no_other(engine, monkeypatch):
    tokenizer = Blocked()
    app = create_app(engine, tokenizer, SERVED)
    monkeypatch.setattr(prompts, "LONG_BODY", 100)
    monkeypatch.setattr(prompts, "LONG_BYTES", 700)

    async def run() -> None:
        async with client(app) as session:
            post = lambda text: session.post("/tokenize", content=json.dumps({"prompt": text}).encode())
            long = [asyncio.create_task(post("y" * 200)) for _ in range(3)]
            while not tokenizer.running:
                await asyncio.sleep(0.001)
            for _ in range(5):
                assert (await session.get("/health")).status_code == 200
                assert (await post("short")).json()["count"] == 5
            refused = await post("y" * 200)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            long.pop().cancel()  # a client that leaves while its body waits
            await asyncio.sleep(0.01)
            tokenizer.going.set()
            assert [answer.json()["count"] for answer in await asyncio.gather(*long)] == [200, 200]
            assert (await post("y" * 200)).status_code == 200

    asyncio.run(run())
    assert tokenizer.most == 1


ENCODED = {
    "byte level": (BOUNDED["byte level"][0], decoders.ByteLevel()),
    "as Llama 2": (
        BOUNDED["as Llama 2"][0],
        decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(),
                           decoders.Strip(" ", 1, 0)]),
    ),
    "Metaspace": (BOUNDED["as Llama 2"][0], decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])),
}  # fmt: skip


@settings(max_examples=30)
@given(text=TEXTS)
@pytest.mark.parametrize("name", ENCODED)
def test_bytes_of_tokens_are_those_of_the_text(name, text, tmp_path_factory):
    library, decoder = ENCODED[name]
    folder = tmp_path_factory.getbasetemp() / name
    if not folder.exists():
        library.decoder = decoder
        folder.mkdir()
        library.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer(folder)
    text = text.replace("<unk>", "").replace(SPACE, "_")
    found = b"".join(tokenizer.token_bytes(token) for token in tokenizer.encode(text).tolist())
    assert found.decode() == (text if name == "byte level" or not text else f" {text}")

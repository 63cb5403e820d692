"""Text of a served choice: whole characters, and nothing of a stop string, however the text is cut into pieces."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from flax_layers.models.text_stream import TextStream
from flax_layers.serving.api.text import ChoiceText, Piece, StopStrings, TokenTexts
from flax_layers.serving.engine.requests import Event, TokenLogprobs

CASES = [
    ("abcdef", ["cd"], "ab"),
    ("abcdef", ["x"], "abcdef"),
    ("abcdef", [], "abcdef"),
    ("ababac", ["abac"], "ab"),  # the first one begins and fails
    ("aaab", ["aab"], "a"),
    ("xabcd", ["abcd", "bc"], "xa"),  # "bc" is complete first
    ("xabc", ["abc", "bc"], "x"),  # both at once: the longer one
    ("endEN", ["END"], "endEN"),
    ("a\n\nb", ["\n\n"], "a"),
    ("né😀x", ["😀"], "né"),
]


def cuts(text: str):
    """All ways to cut a text into pieces."""
    for borders in itertools.product((False, True), repeat=len(text) - 1):
        ends = [n for n, border in enumerate(borders, 1) if border]
        yield [text[a:b] for a, b in itertools.pairwise([0, *ends, len(text)])]


@pytest.mark.parametrize(("text", "stops", "expected"), CASES)
def test_stop_strings_do_not_depend_on_pieces(text, stops, expected):
    for pieces in cuts(text):
        found = StopStrings(stops)
        shown = ""
        for piece in pieces:
            shown += found.push(piece)
            assert expected.startswith(shown)
        assert shown + found.finish() == expected
        assert found.has_ended == (expected != text)


def choice(*stops: str) -> ChoiceText:
    return ChoiceText(TextStream(lambda tokens: bytes(tokens).decode(errors="replace")), stops)


def whole(text: str, size: int, *stops: str, reason="length") -> tuple[str, ChoiceText, list[Piece]]:
    taken, tokens = choice(*stops), text.encode()
    events = [Event(tuple(tokens[n : n + size])) for n in range(0, len(tokens), size)]
    pieces = [taken.push(event) for event in [*events[:-1], events[-1]._replace(finish_reason=reason)]]
    return "".join(piece.text for piece in pieces), taken, pieces


def test_the_end_shows_what_was_held_back():
    assert whole("abE", 1, "END")[0] == "abE"
    assert whole("abE", 1, "END", reason="stop")[2][-1].finish_reason == "stop"
    taken = choice()
    assert [taken.push(Event((x,))).text for x in (97, 0xF0, 0x9F)] == ["a", "", ""]
    assert taken.push(Event((), (), "length")) == Piece("\N{REPLACEMENT CHARACTER}", (), "length")


@pytest.mark.parametrize("tokens", [[0x80], [0x80, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0xFF], [256], [256, 256, 256, 0x80]])
def test_no_token_is_decoded_often(tokens):
    """Tokens that are no character, or have no text, do not pile up."""
    sizes: list[int] = []

    def decode(tokens):
        sizes.append(len(tokens))
        return bytes(x for x in tokens if x < 256).decode(errors="replace")

    drawn, stream = np.random.default_rng(0).choice(tokens, 2000).tolist(), TextStream(decode)
    pieces = [stream.push([token]) for token in drawn]
    assert max(sizes) < 100
    assert "".join(pieces) + stream.finish() == decode(drawn)


def test_log_probabilities_come_with_their_text():
    taken, found = choice("cd"), []
    for number, token in enumerate(b"abcXcde"):
        piece = taken.push(Event((token,), (TokenLogprobs(-float(number), ()),)))
        assert len(piece.tokens) == len(piece.text)
        found += piece.tokens
    assert [(x.token, x.offset, x.logprobs.logprob) for x in found] == [
        (token, number, -float(number)) for number, token in enumerate(b"abcX")
    ]


class Counted(list):
    """A list that counts the elements that are looked at."""

    count = 0

    def __iter__(self):
        for x in super().__iter__():
            Counted.count += 1
            yield x

    def __getitem__(self, index):
        return Counted(super().__getitem__(index))


def test_log_probabilities_of_tokens_without_text_are_looked_at_once():
    taken, event = ChoiceText(TextStream(lambda tokens: "a" * sum(tokens))), Event((0,), (TokenLogprobs(-1.0, ()),))
    taken._waiting = Counted()
    assert not any(any(taken.push(event)) for _ in range(2_000))
    assert Counted.count <= 2_000
    assert [x.offset for x in taken.push(event._replace(tokens=(1,))).tokens] == [0] * 2_001


def test_random_texts():
    """Few letters, so that stop strings begin often; against a search in the whole text."""
    rng = np.random.default_rng(0)
    draw = lambda size: "".join(rng.choice(list("ab\n"), size))
    for _ in range(20):
        text, stops = draw(200), [draw(int(rng.integers(2, 9))) for _ in range(3)]
        ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
        expected = text[: min(ends)[1]] if ends else text
        assert {whole(text, size, *stops)[0] for size in (1, 2, 7, 200)} == {expected}


def test_tokens_with_one_text_have_keys_of_their_own():
    pieces = {1: b"a", 2: b"a", 3: "é".encode(), 4: "é".encode()[:1], 5: "é".encode()[1:], 6: b"bytes:\\xc3", 7: b""}
    texts = TokenTexts(pieces.__getitem__)
    expected = ["a", "token_id:2", "é", "bytes:\\xc3", "bytes:\\xa9", "token_id:6", ""]
    assert texts.keys([1, 2, 3, 4, 5, 6, 7]) == expected
    assert [texts.raw(token) for token in pieces] == list(pieces.values())

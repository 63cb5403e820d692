"""Constraints on the text of a request (JSON schema, regular expression, grammar), and the tokens that they allow next.

The host follows them with llguidance.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import pathlib
import reprlib
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import numpy as np
from jaxtyping import Int32, UInt32

from flax_layers.models.checkpoint.optional import needs
from flax_layers.serving.engine import grammar_check

MAX_CHARACTERS = 1 << 17
"""Characters of a schema, a pattern or a grammar, at most."""

WALL_SECONDS = 15
"""A check of a grammar ends after so many seconds, on a machine that is too busy for its seconds of CPU time."""

_KEPT = 32
"""Compiled constraints that are kept. The lexer of one has at most 250,000 states, 40 MB; most have a few hundred."""

_END = "<|end of a constrained text|>"


@dataclasses.dataclass(frozen=True)
class Constraint:
    """A language that the whole text of a request must match.

    llguidance compiles it: its documentation lists the keywords of JSON schema, and describes regular expressions and
    grammars. A keyword that it cannot follow is an error, never ignored.

    Attributes:
        kind: Language of the text.
        text: A schema, a pattern or a grammar.

    Raises:
        ValueError: The text is too long, or has surrogates.

    Example:
        >>> Constraint.json_schema({"type": "integer"})
        Constraint(kind='json_schema', text='{"type": "integer"}')
        >>> Constraint.regex("yes|no")
        Constraint(kind='regex', text='yes|no')
    """

    kind: Literal["json_schema", "regex", "lark"]
    text: str

    def __post_init__(self) -> None:
        if len(self.text) > MAX_CHARACTERS:
            raise ValueError(
                f"`constraint` must have at most {MAX_CHARACTERS} characters. Got {len(self.text)}. Simplify it."
            )
        if not self.text.isprintable() and any("\ud800" <= x <= "\udfff" for x in self.text):
            raise ValueError(f"`constraint` must be text of Unicode. Got {reprlib.repr(self.text)}, with a surrogate.")

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool) -> Constraint:
        """JSON that matches a schema of draft 2020-12. Properties come in the order of the schema.

        Raises:
            ValueError: The schema is not an object of JSON.
        """
        if not isinstance(schema, Mapping | bool):
            raise ValueError(f"`schema` must be a JSON object, true or false. Got {reprlib.repr(schema)}.")
        try:
            text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"`schema` must be JSON. Got {reprlib.repr(schema)}: {error}.") from None
        return cls("json_schema", text)

    @classmethod
    def json_object(cls) -> Constraint:
        """Any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> Constraint:
        """A text that a regular expression matches as a whole.

        Its syntax is the one of the Rust crate `regex`, without look-around, anchors inside and back-references.
        """
        return cls("regex", pattern)

    @classmethod
    def lark(cls, grammar: str) -> Constraint:
        """A text of a context-free grammar, in llguidance's dialect of Lark."""
        return cls("lark", grammar)


class SerializedTokenizer(Protocol):
    """The part of a tokenizer that constraints need: `flax_layers.models.Tokenizer` has it."""

    def serialized(self) -> str:
        """The text of its `tokenizer.json`."""
        ...


@dataclasses.dataclass(eq=False)
class Guide:
    """A constraint that a sequence follows. Its state depends on the generated tokens alone."""

    constraint: Constraint
    stop_tokens: tuple[int, ...]  # end the sequence; they are allowed where the text may end
    matcher: Any  # matcher of llguidance, after the tokens so far
    allowed: Int32[np.ndarray, " words"]  # a bit for each token of the model: whether it may come next
    is_stale: bool = False  # whether a token was taken since `Guides.allow` computed `allowed`
    is_complete: bool = False  # whether the text is complete, and nothing may follow
    error: str = ""  # why the constraint cannot be followed any further; empty if it can

    def advance(self, token: int) -> None:
        """Takes the next token, which must be an allowed one and no stop token."""
        if not self.matcher.consume_token(token):
            self.error = _words(self.matcher.get_error())
        self.is_complete = not self.error and self.matcher.is_stopped()
        self.is_stale = True


class Guides:
    """Compiles constraints for one tokenizer, and computes the allowed tokens of many sequences at once.

    With a vocabulary of 128256, for 64 sequences of JSON with English words that follow a schema of five properties,
    `allow` takes 1.2 ms on average and 6.3 ms at most, on two busy cores of a CPU. It takes 3.6 and 8.5 ms if strings
    have a `maxLength`. `advance` takes 0.1 ms for all of them. `begin` may be called from any thread, `allow` from one.

    Args:
        tokenizer: The tokenizer of the model.
        vocabulary: Vocabulary size of the model. Tokens that the tokenizer does not have are never allowed.

    Raises:
        ModuleNotFoundError: llguidance is not installed.
        ValueError: llguidance cannot read the tokenizer.

    Example:
        >>> from flax_layers.serving.demo_model import ByteTokenizer
        >>> guides = Guides(ByteTokenizer(), vocabulary=256)
        >>> guide = guides.begin(Constraint.regex("no"))
        >>> guide.allowed[ord("n") // 32] == 1 << ord("n") % 32
        np.True_
        >>> guide.advance(ord("n"))
        >>> guide.advance(ord("o"))
        >>> guide.is_complete
        True
    """

    def __init__(self, tokenizer: SerializedTokenizer, vocabulary: int):
        with needs("llguidance", "serve"):
            import llguidance
            import llguidance.numpy
        with needs("tokenizers"):
            import tokenizers
        self.vocabulary = vocabulary
        self._library = llguidance
        self._limits = llguidance.LLParserLimits(**grammar_check.LIMITS)
        self._executor = llguidance.LLExecutor()
        # The end is a token of its own. So it does not matter which tokens end a request, or if there are any.
        extended = tokenizers.Tokenizer.from_str(tokenizer.serialized())
        known = extended.get_vocab()
        extended.add_special_tokens([_END])
        self._end = extended.get_vocab()[_END]
        size = max(self._end, *known.values(), vocabulary - 1) + 1
        try:
            self._tokenizer = llguidance.LLTokenizer(extended.to_str(), n_vocab=size, eos_token=self._end)
        except ValueError as error:
            raise ValueError(
                f"`tokenizer` must be one that llguidance can read, as byte-level BPE is. Got one that it cannot: "
                f"{_words(str(error))}. Serve the model without constraints."
            ) from error
        self._row_words = -(-size // 32)
        self._of_model = token_bits([token for token in known.values() if token < vocabulary], vocabulary)
        self._compiled: collections.OrderedDict[Constraint, Guide] = collections.OrderedDict()
        self._lock = threading.Lock()

    def begin(self, constraint: Constraint, stop_tokens: Sequence[int] = ()) -> Guide:
        """Compiles a constraint, or copies one that is compiled. Takes 0.1 s for a new one, and 2 s or so at most.

        `stop_tokens` end a sequence. Returns a guide at the beginning of the text.

        Raises:
            ValueError: The constraint does not compile, takes too long, or allows no token.
        """
        first = self._first(constraint)
        ended = [token for token in stop_tokens if 0 <= token < self.vocabulary]
        with self._lock:
            matcher, may_end = first.matcher.deep_copy(), first.matcher.is_accepting()
        allowed = first.allowed | token_bits(ended, self.vocabulary).view(np.int32) if may_end else first.allowed
        return Guide(constraint, tuple(ended), matcher, allowed)

    def allow(self, guides: Sequence[Guide]) -> None:
        """Computes the allowed tokens of all guides that have advanced, on several cores.

        A guide is complete afterwards, or has an error, if no token may come next.
        """
        stale = [guide for guide in guides if guide.is_stale and not (guide.is_complete or guide.error)]
        rows = np.zeros((len(stale), self._row_words), np.uint32)
        jobs = [(guide.matcher, row) for row, guide in enumerate(stale)]
        try:
            if jobs:
                self._executor.unsafe_compute_mask_ptr(jobs, rows.ctypes.data, rows.strides[0], len(rows))
        except (ValueError, RuntimeError):  # of one of them; the library does not say of which
            for guide, row in zip(stale, rows, strict=True):
                try:
                    guide.matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
                except (ValueError, RuntimeError) as error:
                    guide.error = _words(str(error))
        for guide, row in zip(stale, rows, strict=True):
            if not guide.error:
                self._settle(guide, row)
        for guide in guides:
            guide.is_stale = False
            if guide.error:  # copies share the states of the lexer, and its limits
                with self._lock:
                    self._compiled.pop(guide.constraint, None)

    def _first(self, constraint: Constraint) -> Guide:
        """The guide at the beginning that is copied for each request."""
        with self._lock:
            if constraint in self._compiled:
                self._compiled.move_to_end(constraint)
                return self._compiled[constraint]
        if constraint != Constraint.json_object():
            check(constraint)
        grammar = getattr(self._library.LLMatcher, f"grammar_from_{constraint.kind}")(constraint.text)
        matcher = self._library.LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        guide = Guide(constraint, (), matcher, self._of_model.view(np.int32))
        row = np.zeros(self._row_words, np.uint32)
        if not matcher.is_error():
            matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        self._settle(guide, row)
        if guide.error:
            raise ValueError(f"`constraint` must be one that llguidance can follow. It says: {guide.error}.")
        if guide.is_complete:
            raise ValueError("`constraint` must allow a text. Got one that allows only an empty one. Leave it out.")
        with self._lock:
            self._compiled[constraint] = guide
            if len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        return guide

    def _settle(self, guide: Guide, row: UInt32[np.ndarray, " words"]) -> None:
        """Reads a row of llguidance."""
        if guide.matcher.is_error():
            guide.error = _words(guide.matcher.get_error())
            return
        may_end = bool(row[self._end // 32] >> np.uint32(self._end % 32) & 1)
        allowed = row[: len(self._of_model)] & self._of_model
        if not allowed.any():
            guide.is_complete = may_end
            guide.error = "" if may_end else "no token of the model may come next"
        elif may_end and guide.stop_tokens:
            allowed |= token_bits(guide.stop_tokens, self.vocabulary)
        guide.allowed = allowed.view(np.int32)


def check(constraint: Constraint) -> None:
    """Compiles a constraint in another process. Raises ValueError beyond its limits of time and memory."""
    text = json.dumps(dataclasses.asdict(constraint)).encode()
    command = [sys.executable, "-P", str(pathlib.Path(grammar_check.__file__).absolute())]
    try:
        checked = subprocess.run(command, input=text, capture_output=True, timeout=WALL_SECONDS, check=False)
        failure = checked.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        failure = failure or f"signal {-checked.returncode}"
    except subprocess.TimeoutExpired:
        checked, failure = None, f"{WALL_SECONDS} s were over"
    if checked is None or checked.returncode:
        raise ValueError(
            f"`constraint` must compile within {grammar_check.CPU_SECONDS} s and {grammar_check.MEMORY >> 20} MiB. Got "
            f"one that does not: {_words(failure)}. Simplify it."
        )
    if checked.stdout:
        words = _words(checked.stdout.decode(errors="replace"))
        raise ValueError(f"`constraint` must be one that llguidance can follow. It says: {words}.")


def _words(message: str) -> str:
    r"""A message of llguidance on one line, without the state of its parser.

    >>> _words("regex parse error:\n    (a\n    ^\nunclosed group\n")
    'regex parse error: (a ^ unclosed group'
    """
    text = " ".join(message.partition("<state>")[0].replace("<non-verbose/>", "").split()).rstrip(".")
    if text.startswith("NoExtension"):
        return "no text matches what is left of it"
    return text if len(text) <= 240 else f"{text[:160]} ... {text[-60:]}"


def token_bits(tokens: Sequence[int], vocabulary: int) -> UInt32[np.ndarray, " words"]:
    """Tokens as bits, the lowest bit of the first word first.

    >>> token_bits([0, 33], 40).tolist()
    [1, 2]
    """
    chosen = np.zeros(-(-vocabulary // 32) * 32, bool)
    chosen[list(tokens)] = True
    return np.packbits(chosen, bitorder="little").view(np.uint32)

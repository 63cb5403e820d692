"""Constraints on the text of a request: JSON that matches a schema, a regular expression, a grammar."""

from __future__ import annotations

import dataclasses
import json
import reprlib
from collections.abc import Mapping
from typing import Any, Literal

MAX_CHARACTERS = 1 << 17
"""Characters of a schema, a pattern or a grammar, at most."""


@dataclasses.dataclass(frozen=True)
class Constraint:
    """What the text of a request must match, as a whole.

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
        """JSON that matches a schema. Properties come in the order of the schema.

        Args:
            schema: The schema, of draft 2020-12.

        Returns:
            The constraint.

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

        Args:
            pattern: In the syntax of the Rust crate `regex`, without look-around, anchors inside and back-references.

        Returns:
            The constraint.
        """
        return cls("regex", pattern)

    @classmethod
    def lark(cls, grammar: str) -> Constraint:
        """A text of a context-free grammar.

        Args:
            grammar: In llguidance's dialect of Lark.

        Returns:
            The constraint.
        """
        return cls("lark", grammar)

"""Formats in which models call tools, recognized from their chat templates, and the grammars of forced calls."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from flax_layers.serving.engine.constraints import Constraint

Schema = Mapping[str, object]
"""JSON schema of the arguments of a function."""

_FOREIGN = re.compile("<function=|<arg_key>|<parameter=")
"""Text inside of `<tool_call>` of templates whose calls are not JSON, as in Qwen3-Coder and GLM-4.5."""

_SPACING = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
"""The white space that models write by themselves; free white space might never end."""


class ToolFormat(NamedTuple):
    """The form of a model's calls: an object of JSON with the name of the function and its arguments.

    `begin` and `end` are around it. Without them calls are the whole text, and semicolons separate them.
    """

    name: str
    arguments: str  # the key of the arguments
    begin: str = ""
    end: str = ""

    def grammar(self, functions: Mapping[str, Schema], *, repeats: bool) -> Constraint:
        """The constraint of a text that calls one of the functions, or several times if it `repeats`."""
        names = [f"f{n}" for n in range(len(functions))]
        call = f'"{self.begin}\\n" ({" | ".join(names)}) "\\n{self.end}"' if self.begin else " | ".join(names)
        rules = ['start: call ("\\n" call)*' if repeats and self.begin else "start: call", f"call: {call}"]
        for rule, (name, schema) in zip(names, functions.items(), strict=True):
            opening = json.dumps(f'{{"name": {json.dumps(name)}, "{self.arguments}": ')
            rules.append(f'{rule}: {opening} {rule}_arguments "}}"')
            rules.append(f"{rule}_arguments: %json {json.dumps({**schema, 'type': 'object', **_SPACING})}")
        return Constraint.lark("\n".join(rules))


HERMES = ToolFormat("Hermes", "arguments", "<tool_call>", "</tool_call>")
LLAMA = ToolFormat("Llama 3", "parameters")


def tool_format(template: str) -> ToolFormat | None:
    r"""The format of the calls that a chat template describes; None if it is neither of the two.

    Example:
        >>> tool_format('<tool_call>\n{\"name\": <function-name>, \"arguments\": <object>}\n</tool_call>').name
        'Hermes'
        >>> tool_format('Respond in the format {"name": function name, "parameters": dictionary of ...}').name
        'Llama 3'
        >>> tool_format("<tool_call><function=name><parameter=city>")
    """
    text = template.replace("\\", "")
    has_keys = lambda format: all(f'"{key}":' in text for key in ("name", format.arguments))
    if HERMES.begin in text:
        return HERMES if has_keys(HERMES) and not _FOREIGN.search(text) else None
    return LLAMA if has_keys(LLAMA) and '"name": function name' in text else None


def schemas(tools: Sequence[Mapping[str, Mapping]]) -> dict[str, Schema]:
    """The schema of the arguments of each function; one without `parameters` takes none."""
    none: Schema = {"properties": {}, "additionalProperties": False}
    return {tool["function"]["name"]: tool["function"].get("parameters") or none for tool in tools}

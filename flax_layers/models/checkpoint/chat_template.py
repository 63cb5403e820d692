"""Renders chat templates with jinja2, and with the block, filter and functions that `transformers` adds to it.

Templates come with checkpoints, so they run in a sandbox.
"""

import datetime
import functools
import json
from collections.abc import Mapping
from typing import Any, NoReturn

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils


def render(source: str, origin: str, values: Mapping[str, object], marks: tuple[str, str] = ("", "")) -> str:
    """Renders a chat. `origin` is the name and the file of the template, for messages.

    `marks` are written before and after the text of each `{% generation %}` block.

    Raises:
        ValueError: The template is not valid, or it refuses the messages.

    Example:
        >>> messages = [{"role": "user"}, {"role": "assistant"}]
        >>> render("{% for x in messages %}<{{ x.role }}>{% endfor %}", "chat.jinja", {"messages": messages})
        '<user><assistant>'
    """
    try:
        compiled = _compiled(source, marks)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(
            f"`template` must be valid jinja2. Line {error.lineno} of {origin}: {(error.message or '').rstrip('.')}. "
            "Correct the file, or download it again."
        ) from error
    try:
        return compiled.render(values)
    except (jinja2.TemplateError, TypeError) as error:  # a TypeError: the content of a message is None, for example
        raise ValueError(f"The chat template refuses `messages`: {error}") from error


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks the text of the assistant for training: its body is rendered between marks."""

    tags = {"generation"}  # noqa: RUF012  as jinja2 declares it

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        marks = getattr(self.environment, "generation_marks")  # noqa: B009  jinja2 adds it
        before, after = (jinja2.nodes.Output([jinja2.nodes.TemplateData(mark)]) for mark in marks)
        return jinja2.nodes.Scope([before, *body, after], lineno=lineno)


class _Dict:
    """`dict` for templates, without the attributes of the class."""

    def __call__(self, *args: Mapping, **values: object) -> dict:
        return dict(*args, **values)

    def fromkeys(self, *args: Any) -> dict:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """`namespace` for templates, without names that begin with an underscore."""

    def __init__(*args: Any, **values: Any) -> None:  # `namespace(self=...)` is valid
        self, *mappings = args
        for name in dict(*mappings, **values):
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, *mappings, **values)

    def __setitem__(self, name: str, value: object) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"A namespace must not have the unsafe attribute {name!r}.")


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Returns JSON as `transformers` does: the filter of jinja2 escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


@functools.lru_cache(16)  # a corpus of chats renders one template many times
def _compiled(source: str, marks: tuple[str, str]) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.extend(generation_marks=marks)
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_exception, "strftime_now": _strftime_now, "dict": _Dict(), "namespace": _Namespace,
    }  # fmt: skip
    return environment.from_string(source)

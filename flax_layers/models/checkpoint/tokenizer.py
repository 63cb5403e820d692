"""The tokenizer and the chat templates of a checkpoint."""

import functools
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int32

from flax_layers.models.checkpoint import folders
from flax_layers.models.checkpoint.optional import needs
from flax_layers.models.text_stream import TextStream

Message = Mapping[str, Any]
"""A message of a chat: `{"role": "user", "content": "..."}`."""

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""The space in tokens of SentencePiece."""


def _byte_names() -> dict[str, int]:
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}  # by themselves; the others from 256 on
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte if byte in shown else 256 + hidden.index(byte)): byte for byte in range(256)}


TEMPLATE_ERRORS = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError)
"""Errors that a checkpoint's template raises for messages that it was not written for."""

BYTE_NAMES = _byte_names()
"""The byte of each character in byte-level tokens, whose bytes have the names that GPT-2 gave them."""


def byte_level_json() -> str:
    """The text of a `tokenizer.json` with a token for each byte of UTF-8: BPE without merges."""
    with needs("tokenizers"):
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    tokenizer = Tokenizer(models.BPE(BYTE_NAMES, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer.to_str()


class Tokenizer:
    """The tokenizer of a checkpoint.

    Args:
        folder: A folder with `tokenizer.json`. Special tokens are read from `tokenizer_config.json`, and chat
            templates from there, from `chat_template.jinja` and from `additional_chat_templates/`.

    Attributes:
        special_tokens: Special tokens by role, such as `bos_token`.
        chat_templates: Chat templates by name. Most checkpoints have only `default`.

    Raises:
        FileNotFoundError: There is no `tokenizer.json`.
        CheckpointError: `tokenizer.json` is no tokenizer, or `tokenizer_config.json` is not JSON.
    """

    def __init__(self, folder: str | pathlib.Path):
        folder = pathlib.Path(folder)
        folders.recover(folder)
        path = folder / "tokenizer.json"
        if not path.exists():
            folders.refuse_adapter(folder)
            raise FileNotFoundError(
                f"`folder` must hold `tokenizer.json`. There is no {path}; `transformers` writes one with "
                "`AutoTokenizer.from_pretrained(...).save_pretrained(folder)`."
            )
        with needs("tokenizers"):
            import tokenizers
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
        except Exception as error:  # the library raises nothing narrower
            raise folders.CheckpointError(f"{path} cannot be read: {error}. Download it again.") from error
        self._tokenizer.no_truncation()  # settings of training, which `transformers` ignores as well
        self._tokenizer.no_padding()
        config_path = folder / "tokenizer_config.json"
        config = folders.read_optional_json(config_path)
        roles = ("bos_token", "eos_token", "unk_token", "pad_token")
        self.special_tokens: dict[str, str] = {role: _content(config[role]) for role in roles if config.get(role)}
        self.chat_templates, self._template_paths = _chat_templates(folder, config, config_path)

    @property
    def vocabulary(self) -> int:
        """Number of tokens, including special tokens."""
        return self._tokenizer.get_vocab_size()

    def token_id(self, token: str) -> int | None:
        """The id of a token, or None if there is no such token."""
        return self._tokenizer.token_to_id(token)

    def serialized(self) -> str:
        """The text of `tokenizer.json`."""
        return self._tokenizer.to_str()

    def encode(self, text: str, *, special_tokens: bool = True) -> Int32[np.ndarray, " T"]:
        """Encodes text to token ids.

        Special tokens in the text are encoded as such. With `special_tokens`, those that begin and end a text, such as
        BOS, are added.
        """
        # As a batch, since `encode` of the library holds the GIL: 5 s for 4 MB. "fast" leaves out offsets.
        [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=special_tokens)
        return np.asarray(encoding.ids, np.int32)

    def encode_spans(self, text: str, *, special_tokens: bool = True) -> tuple[Int32[np.ndarray, " T"], np.ndarray]:
        """Encodes text as `encode`; also the characters of each token, as `[begin, end)`. Added ones have none."""
        [encoding] = self._tokenizer.encode_batch([text], add_special_tokens=special_tokens)
        return np.asarray(encoding.ids, np.int32), np.asarray(encoding.offsets, np.int64).reshape(-1, 2)

    @functools.cached_property
    def added_tokens(self) -> tuple[str, ...]:
        """The texts of tokens that no merge makes, such as `<|im_end|>`."""
        return tuple(token.content for token in self._tokenizer.get_added_tokens_decoder().values())

    def decode(self, tokens: Iterable[int], *, special_tokens: bool = False) -> str:
        """Decodes token ids to text, which shows special tokens if `special_tokens` is set."""
        return self._tokenizer.decode([int(token) for token in tokens], skip_special_tokens=not special_tokens)

    def token_bytes(self, token: int) -> bytes:
        """The bytes of a token by itself: part of a character may be all of it, and a space may begin it.

        Bytes of several tokens may make one character of UTF-8.
        """
        piece, (added, decoder) = self._tokenizer.id_to_token(token) or "", self._pieces
        if token in added:
            return piece.encode()
        if "ByteLevel" in decoder and all(x in BYTE_NAMES for x in piece):
            return bytes(BYTE_NAMES[x] for x in piece)
        if "ByteFallback" in decoder and (named := re.fullmatch("<0x([0-9A-F]{2})>", piece)):
            return bytes.fromhex(named[1])
        return (piece.replace(_SPACE, " ") if _SPACE in decoder else self.decode([token])).encode()

    @functools.cached_property
    def _pieces(self) -> tuple[frozenset[int], str]:
        """The ids of added tokens, and the decoder as JSON."""
        decoder = self._tokenizer.decoder
        state = "" if decoder is None else decoder.__getstate__().decode()
        return frozenset(self._tokenizer.get_added_tokens_decoder()), state

    def text_stream(self, *, special_tokens: bool = False) -> TextStream:
        """A stream that decodes the tokens of one text as they arrive."""
        return TextStream(functools.partial(self.decode, special_tokens=special_tokens))

    def chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        template: str = "default",
        generation_marks: tuple[str, str] = ("", ""),
        **values: object,
    ) -> str:
        """Renders a chat with a chat template. Encode the text with `special_tokens=False`.

        The template runs in the sandbox of jinja2.

        Args:
            messages: The messages, in order.
            add_generation_prompt: Whether to append the beginning of the answer.
            template: Name of the chat template.
            generation_marks: Texts to put around each `{% generation %}` block of the template.
            values: Other variables of the template, such as `tools`.

        Raises:
            ValueError: There is no such template, it is not valid jinja2, or it refuses the messages.
        """
        if template not in self.chat_templates:
            known = ", ".join(self.chat_templates) or "none"
            raise ValueError(
                f"`template` must be a chat template of the checkpoint, which has {known}. Got {template!r}."
            )
        with needs("jinja2"):
            from flax_layers.models.checkpoint import chat_template
        values = {
            "tools": None, "documents": None, **self.special_tokens, **values,
            "messages": messages, "add_generation_prompt": add_generation_prompt,
        }  # fmt: skip
        origin = f"{template!r} in {self._template_paths[template]}"
        return chat_template.render(self.chat_templates[template], origin, values, generation_marks)


def _content(token: str | Mapping[str, str]) -> str:
    """The text of a token, which is a string or an object in files."""
    return token if isinstance(token, str) else token["content"]


def _chat_templates(
    folder: pathlib.Path, config: Mapping[str, Any], config_path: pathlib.Path
) -> tuple[dict[str, str], dict[str, pathlib.Path]]:
    """Templates and their files, by name. Templates in `*.jinja` files replace templates of the configuration."""
    templates = config.get("chat_template") or {}
    if isinstance(templates, str):
        templates = {"default": templates}
    elif isinstance(templates, list):
        templates = {entry["name"]: entry["template"] for entry in templates}
    files = {path.stem: path for path in sorted((folder / folders.MORE_TEMPLATES).glob("*.jinja"))}
    if (folder / "chat_template.jinja").exists():
        files["default"] = folder / "chat_template.jinja"
    texts = {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    return {**templates, **texts}, {**dict.fromkeys(templates, config_path), **files}

"""The byte-level model of the demo, which is served if no checkpoint is given."""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from flax import nnx
from jaxtyping import Int32

import jflex
from flax_layers.demo.model import ByteDecoder, Sizes, load_model, save_model
from flax_layers.models import Decoder
from flax_layers.models.checkpoint.optional import needs
from flax_layers.models.checkpoint.tokenizer import byte_level_json
from flax_layers.models.text_stream import TextStream

FILE = pathlib.Path("demo_output", "model.npz")
"""File of the demo's model, below the current folder."""

SIZES = Sizes(width=64, layers=2, heads=2, kv_heads=1)
TRAINING = argparse.Namespace(steps=150, rows=4, length=256, seed=0)


class ByteTokenizer:
    """A token for each byte of UTF-8. Its chat template is the texts of the messages, one below the other.

    Example:
        >>> tokenizer = ByteTokenizer()
        >>> tokenizer.encode("né").tolist(), tokenizer.decode([110, 195, 169])
        ([110, 195, 169], 'né')
    """

    def __init__(self) -> None:
        self.chat_templates = {"default": "the texts of the messages"}
        self.special_tokens: dict[str, str] = {}

    def serialized(self) -> str:
        """The text of a `tokenizer.json`."""
        return byte_level_json()

    def encode(self, text: str, *, special_tokens: bool = True) -> Int32[np.ndarray, " T"]:
        """The bytes of a text. There are no special tokens."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def decode(self, tokens: Iterable[int], *, special_tokens: bool = False) -> str:
        """The text of bytes. There are no special tokens."""
        return bytes(tokens).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """The byte of a token."""
        return bytes([token])

    def text_stream(self) -> TextStream:
        """The text of tokens as they come."""
        return TextStream(self.decode)

    def chat(self, messages: Sequence[dict[str, str]], **values: object) -> str:
        """The text of a chat, which the model continues: it was not trained to answer."""
        return "\n".join(message["content"] for message in messages)


def demo_model(
    file: pathlib.Path,
    implementation: str | None,
    say: Callable[[str], None],
    attention_config: jflex.Config | None = None,
) -> Decoder:
    """Reads the model of the demo, or trains a small one and leaves it there; `say` prints where it comes from.

    Raises ValueError if the file holds something else.
    """
    if file.exists():
        say(f"Without --model: the byte-level model of the demo, from {file}.")
        return load_model(file, implementation, attention_config)
    with needs("optax", "serve"):
        import optax  # noqa: F401
    from flax_layers.demo import data
    from flax_layers.demo.__main__ import create_trainer, fit

    say(
        f"Without --model: a small byte-level model, trained on the Python standard library for {TRAINING.steps} steps "
        f"and kept in {file}. `python -m flax_layers.demo` trains a better one."
    )
    trainer = create_trainer(ByteDecoder(SIZES, implementation, rngs=nnx.Rngs(0)), 5e-3, TRAINING.steps)
    fit(trainer, data.read_corpus().training, TRAINING)
    file.parent.mkdir(parents=True, exist_ok=True)
    save_model(file, trainer.model(), SIZES)
    return load_model(file, implementation, attention_config)

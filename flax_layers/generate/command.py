"""The command line of generation."""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Sequence
from typing import TextIO

import jax.numpy as jnp

from flax_layers.generate.folder import Loaded, load
from flax_layers.generate.generation import Generation, Speed, generate
from flax_layers.generate.requests import check_max_tokens
from flax_layers.generate.sequences import KINDS
from flax_layers.models import Tokenizer
from flax_layers.sampling import Sampling

DTYPES = ("bfloat16", "float16", "float32")


def parser() -> argparse.ArgumentParser:
    """The options.

    Returns:
        What reads them.
    """
    made = argparse.ArgumentParser(
        prog="python -m flax_layers.generate",
        description="Continues prompts with a model from a folder as `transformers` writes it. The text goes to the "
        "standard output as it comes; tokens per second go to the standard error. Several prompts are written at once "
        "and shown one after the other.",
    )
    add = made.add_argument
    add("--model", type=pathlib.Path, required=True, metavar="FOLDER", help="config.json, safetensors, tokenizer.json")
    add("--prompt", nargs="+", default=[], metavar="TEXT", help="one prompt or more, each an argument")
    add("--stdin", action="store_true", help="the standard input is a prompt, the last one")
    add("--chat", action="store_true", help="each prompt is what a user says: the model's chat template goes around it")
    add("--max-tokens", type=int, default=256, metavar="N", help="tokens after each prompt, at most; default: 256")
    add("--temperature", type=float, default=0.0, metavar="T", help="0, the default: the most probable tokens")
    add("--top-k", type=int, default=0, metavar="K", help="draw from the K most probable; 0, the default: from all")
    add("--top-p", type=float, default=1.0, metavar="P", help="draw from the most probable that have P together")
    add("--seed", type=int, default=0, help="the same seed draws the same tokens; default: 0")
    add("--cache", choices=list(KINDS), default="dense", help="where keys and values are; default: dense")
    add("--dtype", choices=DTYPES, help="of parameters and computation; default: bfloat16, on a CPU float32")
    add("--implementation", metavar="NAME", help="the jflex backend; default: the first that can run here")
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command.

    Args:
        arguments: Instead of the command line's.
    """
    reader = parser()
    options = reader.parse_args(arguments)
    try:
        loaded, generation = begin(options, sys.stdin)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        reader.error(str(error))
    show(generation, loaded.tokenizer, sys.stdout)
    print(summary(generation.speed), file=sys.stderr)


def begin(options: argparse.Namespace, stdin: TextIO) -> tuple[Loaded, Generation]:
    """Checks the options, loads the model and begins.

    Args:
        options: Of `parser`.
        stdin: The standard input.

    Returns:
        The model, and the generation.

    Raises:
        ValueError: An option is out of its range, or there is no prompt.
        OSError: The folder cannot be read.
        ModuleNotFoundError: A package is missing that reads it.
    """
    sampling = Sampling(options.temperature, options.top_k, options.top_p, options.seed)
    check_max_tokens(options.max_tokens)  # before a model of many gigabytes is read
    texts = texts_of(options, stdin)
    loaded = load(options.model, options.dtype and jnp.dtype(options.dtype), options.implementation)
    prompts = [tokens_of(loaded.tokenizer, text, chat=options.chat) for text in texts]
    return loaded, generate(
        loaded.model,
        prompts,
        max_tokens=options.max_tokens,
        sampling=sampling,
        cache=options.cache,
        stop_tokens=loaded.stop_tokens,
    )


def texts_of(options: argparse.Namespace, stdin: TextIO) -> list[str]:
    """The prompts, as text.

    Args:
        options: Of `parser`.
        stdin: The standard input, read if the options say so.

    Returns:
        At least one.

    Raises:
        ValueError: There is none, or one is empty.
    """
    texts = list(options.prompt)
    if not texts and not options.stdin:
        raise ValueError(
            "`--prompt` or `--stdin` is required: there is nothing to continue. Pass `--prompt TEXT`, or a text to "
            "the standard input with `--stdin`."
        )
    if "" in texts:
        raise ValueError(
            f"`--prompt` must not be empty. Prompt {texts.index('')} of {len(texts)} is. Leave it out, or pass a text."
        )
    if options.stdin:
        texts.append(stdin.read())
        if not texts[-1]:
            raise ValueError("`--stdin` needs a text. The standard input is empty. Pass one, or `--prompt`.")
    return texts


def tokens_of(tokenizer: Tokenizer, text: str, *, chat: bool) -> list[int]:
    """The tokens of a prompt.

    Args:
        tokenizer: Of the model.
        text: The prompt.
        chat: Whether it is what a user says.

    Returns:
        Tokens.

    Raises:
        ValueError: There is no chat template.
    """
    if not chat:
        return tokenizer.encode(text).tolist()
    if not tokenizer.chat_templates:
        raise ValueError(
            "`--chat` needs a chat template, in `tokenizer_config.json` or `chat_template.jinja`. The folder has none. "
            "Leave `--chat` out, or take the model's version for chats."
        )
    return tokenizer.encode(tokenizer.chat([{"role": "user", "content": text}]), special_tokens=False).tolist()


def show(generation: Generation, tokenizer: Tokenizer, out: TextIO) -> None:
    """Writes texts as they come: the first that is not complete at once, those behind it when its turn comes.

    Args:
        generation: What is written.
        tokenizer: Of the model.
        out: Where the text goes. Several texts have a line with their number before them.
    """
    rows = generation.speed.rows
    streams, waiting = [tokenizer.text_stream() for _ in range(rows)], [""] * rows
    ended, row = [False] * rows, 0
    head = lambda row: f"[{row + 1}]\n" if 1 < rows > row else ""
    out.write(head(0))
    for piece in generation:
        ended[piece.row] = piece.finish_reason is not None
        waiting[piece.row] += streams[piece.row].push(piece.tokens)
        waiting[piece.row] += streams[piece.row].finish() if ended[piece.row] else ""
        while row < rows:
            out.write(waiting[row])
            waiting[row] = ""
            if not ended[row]:
                break
            row += 1
            out.write("\n" + head(row))
        out.flush()


def summary(speed: Speed) -> str:
    """Tokens per second in one line.

    Args:
        speed: Of a generation that has ended.

    Returns:
        The line.

    Example:
        >>> speed = Speed(96, 2, tokens=66, first_tokens=2, compile_seconds=3, prefill_seconds=0.5, decode_seconds=0.25)
        >>> print(summary(speed))
        prefill: 96 tokens, 192 tokens/s; decode: 66 tokens, 256 tokens/s of 2 texts; compiled in 3.0 s
    """
    texts = f" of {speed.rows} texts" if speed.rows > 1 else ""
    return (
        f"prefill: {speed.prompt_tokens} tokens, {speed.prefill_rate:,.0f} tokens/s; decode: {speed.tokens} tokens, "
        f"{speed.decode_rate:,.0f} tokens/s{texts}; compiled in {speed.compile_seconds:.1f} s"
    )

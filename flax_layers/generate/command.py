"""The command line for generation."""

from __future__ import annotations

import argparse
import pathlib
import signal
import sys
from collections.abc import Sequence
from typing import TextIO

import jax.numpy as jnp

from flax_layers.generate.batch import check_cache, check_max_tokens
from flax_layers.generate.folder import Loaded, load
from flax_layers.generate.generation import Generation, Speed, generate
from flax_layers.generate.sequences import KINDS
from flax_layers.models import Tokenizer
from flax_layers.models.cache_dtype import CACHE_DTYPES
from flax_layers.models.eight_bit_weights import WEIGHT_DTYPES
from flax_layers.sampling import Sampling

DTYPES = ("bfloat16", "float16", "float32")


def parser() -> argparse.ArgumentParser:
    """Builds the parser of the options."""
    reader = argparse.ArgumentParser(
        prog="python -m flax_layers.generate",
        description="Continues prompts with a checkpoint in the format of `transformers`. Text is streamed to standard "
        "output; tokens per second go to standard error. Several prompts are generated in one batch and printed one "
        "after the other.",
    )
    add = reader.add_argument
    add("--model", type=pathlib.Path, required=True, metavar="FOLDER", help="folder of a checkpoint, with a tokenizer")
    add("--prompt", nargs="+", default=[], metavar="TEXT", help="one or more prompts, each an argument")
    add("--stdin", action="store_true", help="read one more prompt from standard input")
    add("--chat", action="store_true", help="wrap each prompt as a user message in the chat template of the model")
    add("--max-tokens", type=int, default=256, metavar="N", help="maximum number of new tokens; default: 256")
    add("--temperature", type=float, default=0.0, metavar="T", help="sampling temperature; default: 0, greedy")
    add("--top-k", type=int, default=0, metavar="K", help="sample from the K most probable tokens; default: 0, all")
    add("--top-p", type=float, default=1.0, metavar="P", help="sample from the fewest tokens with probability P")
    add("--min-p", type=float, default=0.0, metavar="M", help="sample from tokens with M times the highest probability")
    add("--seed", type=int, default=0, help="random seed; default: 0")
    add("--cache", choices=list(KINDS), default="dense", help="cache of keys and values; default: dense")
    add("--cache-dtype", choices=CACHE_DTYPES, help="dtype of a paged cache; default: the model's")
    add("--dtype", choices=DTYPES, help="dtype of the model; default: bfloat16 on a GPU, float32 on a CPU")
    add("--weight-dtype", choices=WEIGHT_DTYPES, help="dtype of the layers' projections; default: as --dtype")
    add("--implementation", metavar="NAME", help="jflex implementation; default: the first that can run here")
    return reader


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command, by default with the arguments of the process."""
    reader = parser()
    options = reader.parse_args(arguments)
    try:
        loaded, generation = begin(options, sys.stdin)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        reader.error(str(error))
    try:
        show(generation, loaded.tokenizer, sys.stdout)
    except KeyboardInterrupt:
        print("\nSIGINT ended the command.", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    print(summary(generation.speed), file=sys.stderr)


def begin(options: argparse.Namespace, stdin: TextIO) -> tuple[Loaded, Generation]:
    """Checks the options, loads the model and starts the generation. Raises the errors that `main` reports."""
    sampling = Sampling(options.temperature, options.top_k, options.top_p, options.seed, options.min_p)
    check_max_tokens(options.max_tokens)
    check_cache(options.cache, options.cache_dtype)  # before gigabytes are read
    texts = texts_of(options, stdin)
    dtype = options.dtype and jnp.dtype(options.dtype)
    loaded = load(options.model, dtype, options.implementation, weight_dtype=options.weight_dtype)
    prompts = [tokens_of(loaded.tokenizer, text, chat=options.chat) for text in texts]
    return loaded, generate(
        loaded.model, prompts, max_tokens=options.max_tokens, sampling=sampling, cache=options.cache,
        cache_dtype=options.cache_dtype, stop_tokens=loaded.stop_tokens,
    )  # fmt: skip


def texts_of(options: argparse.Namespace, stdin: TextIO) -> list[str]:
    """The prompts as text, at least one; with `--stdin` one is read. Raises ValueError for none, or an empty one."""
    texts = list(options.prompt)
    if not texts and not options.stdin:
        raise ValueError(
            "`--prompt` or `--stdin` is required: there is nothing to continue. Pass `--prompt TEXT`, or `--stdin` and "
            "a text on standard input."
        )
    if "" in texts:
        raise ValueError(
            f"`--prompt` must not be empty. Prompt {texts.index('')} of {len(texts)} is. Leave it out, or pass a text."
        )
    if options.stdin:
        texts.append(stdin.read())
        if not texts[-1]:
            raise ValueError("`--stdin` needs a text. Standard input is empty. Pass a text, or `--prompt TEXT`.")
    return texts


def tokens_of(tokenizer: Tokenizer, text: str, *, chat: bool) -> list[int]:
    """Tokenizes a prompt, with `chat` as a user message. Raises ValueError if there is no chat template."""
    if not chat:
        return tokenizer.encode(text).tolist()
    if not tokenizer.chat_templates:
        raise ValueError(
            "`--chat` needs a chat template, in `tokenizer_config.json` or `chat_template.jinja`. The folder has none. "
            "Leave `--chat` out, or use the instruction-tuned version of the model."
        )
    return tokenizer.encode(tokenizer.chat([{"role": "user", "content": text}]), special_tokens=False).tolist()


def show(generation: Generation, tokenizer: Tokenizer, out: TextIO) -> None:
    """Prints texts one after the other: streams the current one and holds back later ones until it is complete.

    Several texts are preceded by a line with their number.
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
    """One line with the tokens per second of a generation that has ended.

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

"""Reads the data that the options of the command line name."""

import argparse
import pathlib
from typing import NamedTuple

from flax_layers.models import ModelConfig
from flax_layers.train.dataset.corpus import Batches, Corpus, Rows, read_corpus
from flax_layers.train.dataset.texts import ByteEncoder, Encoder, FolderEncoder
from flax_layers.train.errors import InputError


class DocumentEnd(NamedTuple):
    """The token that ends documents, besides the ends of files; and the same in words, for the user."""

    token: int | None
    text: str


def tokenizer_folder(options: argparse.Namespace) -> pathlib.Path | None:
    """The folder of `--tokenizer`, or of `--model` or `--config` if it has one; None: text is bytes, or has none."""
    if options.tokenizer is not None:
        return None if options.tokenizer == "bytes" else pathlib.Path(options.tokenizer)
    folder = options.model or options.config
    return folder if folder is not None and (folder / "tokenizer.json").exists() else None


def make_encoder(options: argparse.Namespace, config: ModelConfig) -> Encoder | None:
    """Makes the tokenizer of text; None if no option names one. Raises InputError if the model has fewer tokens."""
    folder = tokenizer_folder(options)
    if folder is None and options.tokenizer is None:
        return None
    encoder: Encoder = ByteEncoder() if folder is None else FolderEncoder(folder)
    if encoder.vocabulary > config.vocabulary:
        raise InputError(
            f"`--tokenizer` must have no more tokens than the model's vocabulary, {config.vocabulary}. Got "
            f"{encoder.vocabulary}. Take the tokenizer of the model, or `--sizes vocabulary={encoder.vocabulary}`."
        )
    return encoder


def document_end(options: argparse.Namespace, config: ModelConfig, encoder: Encoder | None) -> DocumentEnd:
    """The token that ends a document: of `--end-token`, else of config.json, else of the tokenizer.

    Other entries of `eos_token_id` do not end a document: in models for chats, they end a turn. Raises InputError for a
    token that is not in the vocabulary.
    """
    files = "Documents end with their file"
    if options.end_token is not None:
        token, source = options.end_token, "`--end-token`"
    elif config.eos_token_ids:
        token, source = config.eos_token_ids[0], "the first `eos_token_id` of config.json"
    elif isinstance(encoder, FolderEncoder):
        token, source = encoder.end_token, "the `eos_token` of the tokenizer"
        if token is None:
            remedy = "To end them after a token, too, set `--end-token`."
            return DocumentEnd(None, f"{files}. The tokenizer in {encoder.folder} has no `eos_token`. {remedy}")
    else:
        return DocumentEnd(None, f"{files}.")
    if not 0 <= token < config.vocabulary:
        raise InputError(
            f"`--end-token` must be from 0 to {config.vocabulary - 1}, the model's vocabulary. Got {token} from "
            f"{source}. Set it to the token that ends a document."
        )
    text = f" {encoder.text(token)!r}" if isinstance(encoder, FolderEncoder) else ""
    return DocumentEnd(token, f"{files} and after token {token}{text}, {source}.")


def make_batches(
    options: argparse.Namespace, config: ModelConfig, encoder: Encoder | None, end_token: int | None
) -> tuple[Batches, list[Rows]]:
    """The batches to train on, and the held-out batches, which may be none. Raises InputError for unsuitable data."""

    def read(option: str, paths: list[pathlib.Path]) -> Corpus:
        return read_corpus(
            paths, encoder, vocabulary=config.vocabulary, end_token=end_token, token_dtype=options.token_dtype,
            field=options.field, weight_field=options.weight_field, option=option,
        )  # fmt: skip

    def batches(corpus: Corpus, rows: range, parts: int = 1) -> Batches:
        return Batches(corpus, options.batch // parts, options.length, rows, options.seed)

    corpus = read("--data", options.data)
    rows = corpus.size // options.length
    if options.held_out is not None:
        other = read("--held-out", options.held_out)
        held_out = batches(other, range(other.size // options.length), options.accumulate)
        return batches(corpus, range(rows)), held_out.in_order(options.held_out_batches)
    share = min(max(round(options.held_out_share * rows), 1), rows - 1) if options.held_out_share and rows else 0
    training = batches(corpus, range(rows - share))
    if not share:
        return training, []
    last = batches(corpus, range(rows - share, rows), options.accumulate)
    return training, last.in_order(options.held_out_batches)

"""Checks prompts, and pads them so that a few programs serve prompts of all lengths."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int32

from flax_layers.generate.sequences import KINDS
from flax_layers.models import ModelConfig
from flax_layers.models.cache_dtype import check_cache_name
from flax_layers.sampling import Sampling, checked_integer


@dataclasses.dataclass(frozen=True)
class Batch:
    """Prompts that run in one batch, with the sampling parameters and the maximum number of new tokens of each."""

    prompts: tuple[tuple[int, ...], ...]
    sampling: tuple[Sampling, ...]
    max_tokens: tuple[int, ...]
    stop_tokens: tuple[int, ...]

    def continued(self, rows: Sequence[int], written: Sequence[Sequence[int]], limit: int) -> Batch:
        """Selects rows, with the tokens generated so far (`written`, of all rows) appended to their prompts.

        No sequence in the cache is longer than `limit`; its last token is not in the cache.
        """
        prompts = tuple((*self.prompts[row], *written[row]) for row in rows)
        most = [self.max_tokens[row] - len(written[row]) for row in rows]
        max_tokens = tuple(min(n, limit - len(prompt) + 1) for n, prompt in zip(most, prompts, strict=True))
        return Batch(prompts, tuple(self.sampling[row] for row in rows), max_tokens, self.stop_tokens)

    def padded(self, max_positions: int) -> tuple[Int32[np.ndarray, "B T"], Int32[np.ndarray, " B"]]:
        """The prompts, padded to the bucket of the longest, and their lengths."""
        lengths = [len(prompt) for prompt in self.prompts]
        tokens = np.zeros((len(lengths), min(bucket(max(lengths)), max_positions)), np.int32)
        for row, prompt in enumerate(self.prompts):
            tokens[row, : len(prompt)] = prompt
        return tokens, np.array(lengths, np.int32)

    def room(self, max_tokens: int, max_positions: int) -> int:
        """Capacity of the cache in tokens: enough for every prompt in the bucket."""
        longest = max(map(len, self.prompts))
        return min(bucket(min(bucket(longest), max_positions) + max_tokens), max_positions)


def bucket(length: int) -> int:
    """The smallest of 16, 24, 32, 48, 64, 96, ... that is at least `length`. From 12 on, at most a third is padding.

    Example:
        >>> [bucket(length) for length in (1, 16, 17, 25, 1000, 1025)]
        [16, 16, 24, 32, 1024, 1536]
    """
    power = max(16, 1 << (length - 1).bit_length())
    return power * 3 // 4 if power > 16 and length <= power * 3 // 4 else power


def check_batch(
    config: ModelConfig,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    sampling: Sampling | Sequence[Sampling],
    stop_tokens: Sequence[int] | None,
) -> Batch:
    """Checks the arguments of `generate`, and raises TypeError or ValueError for one that is wrong."""
    each_prompt = tuple(_tokens(f"`prompts`, in prompt {number},", prompt) for number, prompt in enumerate(prompts))
    _check_prompts(config, each_prompt)
    check_max_tokens(max_tokens)
    each = (sampling,) * len(prompts) if isinstance(sampling, Sampling) else tuple(sampling)
    if len(each) != len(prompts):
        raise ValueError(
            f"`sampling` must be one `Sampling` for all prompts, or one for each. Got {len(each)} for {len(prompts)} "
            "prompts."
        )
    most = tuple(min(max_tokens, config.max_positions - len(prompt)) for prompt in each_prompt)
    stops = config.eos_token_ids if stop_tokens is None else _tokens("`stop_tokens`", stop_tokens)
    return Batch(each_prompt, each, most, stops)


def _tokens(name: str, tokens: Sequence[int]) -> tuple[int, ...]:
    """A list or an array of tokens as Python numbers. Raises TypeError for anything else."""
    array = np.asarray(tokens)
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise TypeError(
            f"{name} must be a list of integers. Got {str(tokens)[:40]!r}. Encode texts with the tokenizer."
        )
    return tuple(array.tolist())


def check_max_tokens(max_tokens: int) -> None:
    """Raises TypeError or ValueError unless `max_tokens` is an integer of at least 1."""
    if checked_integer("max_tokens", max_tokens) < 1:
        raise ValueError(f"`max_tokens` must be at least 1. Got {max_tokens}. Pass the number of tokens to generate.")


def check_cache(cache: str, dtype: str | None = None) -> None:
    """Raises ValueError if there is no such cache, or it cannot have the dtype; None is the dtype of the model."""
    if cache not in KINDS:
        raise ValueError(f"`cache` must be one of {', '.join(KINDS)}. Got {cache!r}. The default is dense.")
    check_cache_name(dtype)
    if dtype is not None and cache != "paged":
        raise ValueError(
            f"`cache_dtype` must be None unless `cache` is paged. Got {dtype}. Pass both, or leave it out."
        )


def _check_prompts(config: ModelConfig, prompts: Sequence[Sequence[int]]) -> None:
    if not prompts:
        raise ValueError("`prompts` must hold at least one prompt. Got none. Pass lists of tokens.")
    for number, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(
                f"`prompts` must have at least one token each. Prompt {number} is empty. Pass the BOS token, or leave "
                "it out."
            )
        if len(prompt) >= config.max_positions:
            raise ValueError(
                f"`prompts` must be shorter than the {config.max_positions} positions of the model, so that a token "
                f"can follow. Prompt {number} has {len(prompt)} tokens. Truncate it to {config.max_positions - 1}."
            )
        if not 0 <= min(prompt) <= max(prompt) < config.vocabulary:
            raise ValueError(
                f"`prompts` must hold tokens from 0 to {config.vocabulary - 1}, the vocabulary of the model. Prompt "
                f"{number} holds {min(prompt)} to {max(prompt)}. Use the tokenizer of this checkpoint."
            )

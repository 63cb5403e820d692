"""Changes of logits before a draw: penalties on tokens that have occurred, biases on tokens, allowed tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from flax_layers.sampling import as_float32, checked_integer

MAX_BIASES = 300
"""Biased tokens of a request, at most; as in OpenAI's API."""

_REPETITIONS = (1e-6, 1e6)
"""Bounds of `repetition_penalty`. Within them logits stay finite in float32, up to 1e32."""


@dataclasses.dataclass(frozen=True)
class Penalties:
    """Changes of the logits of one request; by default none.

    Raises:
        TypeError: A token is not an integer.
        ValueError: A value is out of range, once it is rounded to float32.

    Example:
        >>> Penalties(frequency_penalty=0.5, logit_bias=((7, -100.0),)).logit_bias
        ((7, -100.0),)
        >>> Penalties(presence_penalty=3)
        Traceback (most recent call last):
        ValueError: `presence_penalty` must be from -2 to 2. Got 3.
    """

    presence_penalty: float = 0.0  # subtracted from the logits of tokens that were generated, -2 to 2
    frequency_penalty: float = 0.0  # subtracted for each time that a token was generated, -2 to 2
    # positive logits of tokens in the prompt or the output are divided by it, negative ones multiplied (Keskar et al.,
    # 2019, arXiv:1909.05858, section 4.1). 1e-6 to 1e6; 1 changes nothing
    repetition_penalty: float = 1.0
    # tokens, each with a number to add to its logit, -100 to 100. Of two biases of a token the last counts
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= as_float32(getattr(self, name)) <= 2:
                raise ValueError(f"`{name}` must be from -2 to 2. Got {getattr(self, name)}.")
        least, most = _REPETITIONS
        if not least <= self.repetition_penalty <= most:
            raise ValueError(
                f"`repetition_penalty` must be from {least:g} to {most:g}. Got {self.repetition_penalty}. Use 1 for "
                "none."
            )
        if len(self.logit_bias) > MAX_BIASES:
            raise ValueError(f"`logit_bias` must be of at most {MAX_BIASES} tokens. Got {len(self.logit_bias)}.")
        for number, (token, bias) in enumerate(self.logit_bias):
            checked_integer(f"logit_bias[{number}][0]", token)
            if not -100 <= as_float32(bias) <= 100:
                raise ValueError(f"`logit_bias` must be from -100 to 100. Got {bias} for token {token}.")

    def __bool__(self) -> bool:
        return self != _NONE


_NONE = Penalties()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Edits:
    """Token counts and biases of each slot, kept on the device for the penalties."""

    in_prompt: Bool[Array, "slots V"]
    counts: Int32[Array, "slots V"]
    biases: Float32[Array, "slots V"]

    @classmethod
    def empty(cls, slots: int, vocabulary: int) -> Edits:
        """The state in which no slot has penalties."""
        zeros = lambda dtype: jnp.zeros((slots, vocabulary), dtype)
        return cls(zeros(bool), zeros(jnp.int32), zeros(jnp.float32))

    def begin(self, words: Int32[Array, " words"]) -> Edits:
        """Sets the tokens and biases of a request that begins in a slot, from the words of `pack_penalties`."""
        slot, prompt = words[0], words[1]
        biased, bits, tokens = jnp.split(words[2:], [MAX_BIASES, 2 * MAX_BIASES])
        biases = jax.lax.bitcast_convert_type(bits, jnp.float32)
        vocabulary = self.counts.shape[1]
        index = jnp.arange(tokens.shape[0], dtype=jnp.int32)
        select = lambda x, mask: jnp.where(mask & (x >= 0), x, vocabulary)  # updates out of range are dropped
        in_prompt = jnp.zeros(vocabulary, bool).at[select(tokens, index < prompt)].set(True, mode="drop")
        counts = jnp.zeros(vocabulary, jnp.int32).at[select(tokens, index >= prompt)].add(1, mode="drop")
        dense = jnp.zeros(vocabulary, jnp.float32).at[select(biased, biased >= 0)].set(biases, mode="drop")
        return Edits(
            self.in_prompt.at[slot].set(in_prompt), self.counts.at[slot].set(counts), self.biases.at[slot].set(dense)
        )

    def sampled(self, slots: Int32[Array, " R"], tokens: Int32[Array, " R"]) -> Edits:
        """Counts one more token in each slot; slots out of range are dropped."""
        return dataclasses.replace(self, counts=self.counts.at[slots, tokens].add(1, mode="drop"))


class PenaltyBatch(NamedTuple):
    """The penalties of R rows; biases are in `Edits`.

    Unless `is_edited`, the slot of a row holds the edits of an earlier request.
    """

    presence_penalty: Float32[Array, " R"]
    frequency_penalty: Float32[Array, " R"]
    repetition_penalty: Float32[Array, " R"]
    is_edited: Int32[Array, " R"]


def apply_penalties(
    logits: Float[Array, "R V"], rows: PenaltyBatch, edits: Edits, slots: Int[Array, " R"]
) -> Float[Array, "R V"]:
    """Changes the logits of rows that have penalties or biases, by the state of their slots.

    Example:
        >>> edits = Edits.empty(1, 3).sampled(jnp.array([0, 0]), jnp.array([1, 1]))
        >>> one = lambda x: jnp.array([x], jnp.float32)
        >>> rows = PenaltyBatch(one(0.25), one(0.5), one(1.0), jnp.array([1]))
        >>> apply_penalties(jnp.ones((1, 3)), rows, edits, jnp.array([0])).tolist()
        [[1.0, -0.25, 1.0]]
    """
    column = lambda x: x[:, None]
    in_prompt, counts, biases = (x.at[slots].get(mode="clip") for x in (edits.in_prompt, edits.counts, edits.biases))
    repeated = jnp.where(logits > 0, logits / column(rows.repetition_penalty), logits * column(rows.repetition_penalty))
    changed = jnp.where(in_prompt | (counts > 0), repeated, logits) + biases
    changed -= column(rows.frequency_penalty) * counts.astype(jnp.float32)
    changed -= column(rows.presence_penalty) * (counts > 0).astype(jnp.float32)
    return jnp.where(column(rows.is_edited) > 0, changed, logits)


def keep_allowed(
    logits: Float[Array, "R V"], allowed: Int32[Array, "R words"], is_guided: Int32[Array, " R"]
) -> Float[Array, "R V"]:
    """Sets the logits of tokens that are not allowed to `-inf`, in rows that have a constraint.

    The lowest bit of the first word of `allowed` is token 0.

    Example:
        >>> keep_allowed(jnp.ones((2, 3)), jnp.full((2, 1), 0b101, jnp.int32), jnp.array([1, 0])).tolist()
        [[1.0, -inf, 1.0], [1.0, 1.0, 1.0]]
    """
    rows, tokens = logits.shape
    bits = (allowed[:, :, None] >> jnp.arange(32, dtype=jnp.int32)[None, None]) & 1
    is_allowed = (bits.reshape(rows, -1)[:, :tokens] > 0) | (is_guided[:, None] == 0)
    return jnp.where(is_allowed, logits, -jnp.inf)


def pack_penalties(
    penalties: Penalties, slot: int, tokens: Sequence[int], prompt: int, context: int
) -> Int32[np.ndarray, " words"]:
    """Packs the penalties of a request that begins, with its tokens so far, prompt first: one transfer.

    Returns slot, length of the prompt, biased tokens, biases, tokens; lists are padded with -1, the tokens to
    `context`.
    """
    known = np.full(context, -1, np.int32)
    known[: len(tokens)] = tokens
    biased, biases = np.full(MAX_BIASES, -1, np.int32), np.zeros(MAX_BIASES, np.float32)
    for n, (token, bias) in enumerate(dict(penalties.logit_bias).items()):
        biased[n], biases[n] = token, bias
    return np.concatenate([np.array([slot, prompt], np.int32), biased, biases.view(np.int32), known])

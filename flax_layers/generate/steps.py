"""The two compiled programs of generation: prefill, and a chunk of decoding steps."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Hashable
from collections.abc import Sequence as Items

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Int32

from flax_layers.compiler_options import DECODING, PROMPTS
from flax_layers.generate.sequences import KINDS, Sequences
from flax_layers.models.form import ModelForm
from flax_layers.sampling import SamplingBatch, sample

NO_TOKEN = -1
"""The entry of a chunk where a sequence has already ended."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rules:
    """Sampling parameters and ends of B sequences."""

    sampling: SamplingBatch
    max_tokens: Int32[Array, " B"]
    stop_tokens: Int32[Array, " K"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """The state of B sequences between decoding steps."""

    sequences: Sequences  # the sequences and their cache
    # the last sampled token of each sequence, not yet in the cache; `NO_TOKEN` if it ended earlier
    token: Int32[Array, " B"]
    written: Int32[Array, " B"]  # number of tokens sampled for each
    ended: Bool[Array, " B"]  # True for each complete sequence


class Programs:
    """The programs of models of one form: `prefill` and `write_chunk`, jitted functions of a list of parameters.

    The form is not an argument of the programs, because `jax.jit` would compare it in each call.
    """

    def __init__(self, form: ModelForm):
        self._form = form
        self._known: set[Hashable] = set()
        self.prefill = jax.jit(self._prefill, static_argnames=("cache", "dtype", "room"), compiler_options=PROMPTS)
        self.write_chunk = jax.jit(
            self._write_chunk, static_argnames="steps", donate_argnames="state", compiler_options=DECODING
        )

    def compile(self, program: jax.stages.Wrapped, *arguments: object, **options: Hashable) -> float:
        """Compiles a program ahead of time, once for each set of shapes, and returns the seconds that it took.

        A call takes it from JAX's cache. To lower a program again, only to find that it is there, takes longer than a
        prompt: 40 ms with 32 layers.
        """
        started = time.perf_counter()
        leaves, form = jax.tree.flatten(arguments)
        key = program, form, tuple((x.shape, x.dtype) for x in leaves), *options.items()
        if key not in self._known:
            program.lower(*arguments, **options).compile()
            self._known.add(key)
        return time.perf_counter() - started

    def _prefill(
        self,
        parameters: Items[Array],
        prompts: Int[Array, "B T"],
        counts: Int32[Array, " B"],
        rules: Rules,
        *,
        cache: str,
        dtype: str | None,
        room: int,
    ) -> State:
        """Reads prompts, padded to one length, and samples the first token of each sequence.

        `counts` are the lengths of the prompts. The caches, with `room` tokens for each, are made here, because a call
        of `jnp.zeros` for each of a layer delays the first kernel.
        """
        model = self._form.model(parameters)
        logits, sequences = KINDS[cache].empty(model, len(counts), room, dtype).read(model, prompts, counts)
        begun = jnp.zeros(counts.shape, jnp.int32)
        return _choose(logits, State(sequences, begun, begun, begun > 0), rules)

    def _write_chunk(
        self, parameters: Items[Array], state: State, rules: Rules, *, steps: int
    ) -> tuple[State, Int32[Array, "B steps"]]:
        """Runs `steps` decoding steps. A sequence that has ended does not change.

        The number of steps is static, also after all sequences have ended. With a condition that it computes, XLA waits
        for the GPU after each step, and the call returns when its last step is launched: 5.2 ms a step of the shape of
        Llama 3 8B at batch 1, and 4.6 ms so (H200, JAX 0.11.2).

        Returns:
            The new state, which replaces the donated one, and the sampled tokens; `NO_TOKEN` where a sequence had
            ended.
        """
        model = self._form.model(parameters)

        def advance(step: Array, carry: tuple[State, Array]) -> tuple[State, Array]:
            state, chunk = carry
            going = (~state.ended).astype(jnp.int32)
            logits, sequences = state.sequences.read(model, state.token[:, None], going)
            state = _choose(logits, dataclasses.replace(state, sequences=sequences), rules)
            return state, chunk.at[:, step].set(state.token)

        chunk = jnp.full((state.token.shape[0], steps), NO_TOKEN, jnp.int32)
        return jax.lax.fori_loop(0, steps, advance, (state, chunk))


make_programs = functools.lru_cache(maxsize=16)(Programs)
"""The programs of models of a form."""


def _choose(logits: Array, state: State, rules: Rules) -> State:
    """Samples the next token of each sequence that has not ended."""
    token = sample(logits, rules.sampling, state.sequences.lengths)
    written = state.written + (~state.ended).astype(jnp.int32)
    stopped = jnp.any(token[:, None] == rules.stop_tokens[None, :], axis=-1)
    ended = state.ended | stopped | (written >= rules.max_tokens)
    return State(state.sequences, jnp.where(state.ended, NO_TOKEN, token), written, ended)

"""The engine's device side: parameters, state, and the programs that change it."""

from __future__ import annotations

import math

import jax
from jax.sharding import NamedSharding
from jaxtyping import Array, Int32

from flax_layers.models import Decoder
from flax_layers.models.cache_dtype import check_cache_dtype
from flax_layers.models.form import flatten_model
from flax_layers.serving.device.options import EngineOptions, Program
from flax_layers.serving.device.step import cache_sharding, change_state, empty_state, make_step
from jflex.types import AnyArray


class Executor:
    """Runs steps. Every call returns once its work is dispatched, and takes nothing but numbers.

    Raises ValueError if the mesh does not divide the KV heads; the model cannot have the `cache_dtype`; or one of model
    and options is batch invariant and not the other, or both on a mesh.
    """

    def __init__(self, model: Decoder, options: EngineOptions):
        check_cache_dtype(options.cache_dtype, model)
        self._model, self._options = model, options
        self._parameters, form = flatten_model(model)
        heads = model.config.num_kv_heads if model.config.latent is None else None
        self._sharding = cache_sharding(self._parameters, heads)
        _check_invariant(model, options, self._sharding)
        self._step = make_step(form, self._sharding, options.streaming)
        self._state = empty_state(model, options, self._sharding)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys and values, or latent vector, with scales; in one layer, on one device."""
        arrays = jax.tree.leaves(self._state.cache)
        return sum(math.prod(x.sharding.shard_shape(x.shape)[3:]) * x.dtype.itemsize for x in arrays)

    def lower(self, packed: Int32[AnyArray, " words"], program: Program) -> jax.stages.Lowered | None:
        """Lowers a step; None if only `run` may compile it. Once that is compiled, in any thread, `run` need not."""
        return self._step.lower(self._parameters, self._state, packed, program=program)

    def run(self, packed: Int32[AnyArray, " words"], program: Program) -> Int32[Array, "R fields"]:
        """Runs a step, and returns the fields that `read_row` reads."""
        self._state, fields = self._step(self._parameters, self._state, packed, program=program)
        return fields

    def change(self, change: str, words: Int32[AnyArray, " words"]) -> None:
        """Applies one of `flax_layers.serving.device.step.CHANGES` to the state."""
        self._state = change_state(self._state, words, change=change, sharding=self._sharding)

    def is_intact(self) -> bool:
        """True if the state is still there after a call has raised, and no earlier call has failed."""
        try:
            jax.block_until_ready(self._state)
        except RuntimeError:  # donated to the call, or the result of one that failed on the device
            return False
        return True

    def reset(self) -> None:
        """Begins anew, with an empty cache."""
        self._state = empty_state(self._model, self._options, self._sharding)

    def close(self) -> None:
        """Ends the executor: no call follows."""


def _check_invariant(model: Decoder, options: EngineOptions, sharding: NamedSharding | None) -> None:
    """Raises ValueError unless model and options promise the same, and can."""
    of_model = model.attention_config is not None and model.attention_config.batch_invariant
    if of_model != options.batch_invariant:
        raise ValueError(
            "`batch_invariant` must be the same in the `EngineOptions` and in the `attention_config` of the model. Got "
            f"{options.batch_invariant} and {of_model}. Set both, or neither."
        )
    if options.batch_invariant and sharding is not None:
        raise ValueError(
            "`batch_invariant` must be False for a model on several devices: the order in which an all-reduce adds may "
            f"depend on the place of a token. Got {sharding.mesh.size} devices. Use one, or leave it out."
        )

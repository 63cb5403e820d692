"""The compiled step: one program for prefill chunks and decoding, from packed numbers to sampled tokens."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence as Items
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int32

from flax_layers.attention.streaming import Streaming
from flax_layers.compiler_options import DECODING
from flax_layers.models import Decoder
from flax_layers.models.block import Pages
from flax_layers.models.form import ModelForm
from flax_layers.sampling import SamplingBatch, sample
from flax_layers.serving.device.inputs import unpack
from flax_layers.serving.device.options import EngineOptions, Program
from flax_layers.serving.device.penalties import Edits, apply_penalties, keep_allowed
from flax_layers.serving.device.speculation import DraftRows, accept, compact, sample_drafts
from jflex.paged import copy_pages

Tree = TypeVar("Tree")

MAX_LOGPROBS = 20
"""Top log probabilities that a request may ask for; as in OpenAI's API."""


_SCORED_ROWS = 128
"""Rows of logits that are held at once to score prompts: 79 MB of 152,000 tokens."""


class TokenLogprobs(NamedTuple):
    """Log probabilities (natural) at one position, of the model's own distribution: before temperature and truncation.

    Attributes:
        logprob: Log probability of the sampled token.
        top: The most probable tokens with theirs, as many as the request asked for, the most probable one first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DeviceState:
    """The state on the device, donated to each step."""

    cache: Pages  # keys and values of all layers, or latent vectors; with their scales, if they have eight bits
    sampled: Int32[Array, " slots"]  # the last sampled token of each slot
    edits: Edits  # token counts and biases of each slot
    allowed: Int32[Array, "slots words"]  # a bit for each token that the constraint of a slot allows next


@functools.cache
def make_step(
    form: ModelForm, sharding: NamedSharding | None, streaming: Streaming | None = None
) -> jax.stages.Wrapped:
    """The step of a model; engines of models of one form share its programs.

    A step reads packed tokens and samples the next token of each row. It returns the donated state, and the fields that
    `read_row` reads: the only transfer back.

    The form is not an argument of the step, because `jax.jit` would compare it in each call. The cache has the
    `sharding`.
    """

    def run(
        parameters: Items[Array], state: DeviceState, packed: Array, *, program: Program
    ) -> tuple[DeviceState, Array]:
        model = form.model(parameters)
        count = program.shape.tokens if program.is_scoring else 0
        packed, following = jnp.split(packed, [packed.shape[0] - count])
        inputs = unpack(packed, program.shape)
        tokens = jnp.where(inputs.tokens < 0, state.sampled[jnp.maximum(-1 - inputs.tokens, 0)], inputs.tokens)
        shared = inputs.shared_prefix if program.is_cascade else None
        hidden, cache = model.decode_paged_hidden(tokens, state.cache, inputs.batch, shared, streaming)
        nodes = DraftRows.from_batch(inputs.batch) if program.shape.drafts else None
        # A row without tokens has the logits of the row before, whose prompt is the same.
        rows = jnp.maximum(inputs.batch.qo_indptr[1:] - 1, 0) if nodes is None else nodes.rows
        of_nodes = model.logits(hidden[rows])
        logits = of_nodes if nodes is None else of_nodes[:, 0]
        ends = jnp.asarray(inputs.batch.kv_lengths) if nodes is None else nodes.positions[:, 0]
        edits, positions = state.edits, ends + inputs.dropped
        sampling = SamplingBatch() if program.is_greedy else inputs.sampling
        if program.is_greedy:
            sampled = sample(logits, sampling, positions)
            fields = sampled[:, None]
        else:
            changed = apply_penalties(logits, inputs.penalties, edits, inputs.slots)
            changed = keep_allowed(changed, state.allowed.at[inputs.slots].get(mode="clip"), inputs.is_guided)
            sampled = sample(changed, sampling, positions)
            fields, edits = _fields(sampled, logits), edits.sampled(inputs.slots, sampled)
        if nodes is not None:
            after = sample_drafts(of_nodes[:, 1:], sampling, nodes.positions)
            accepted = accept(nodes, tokens[nodes.rows], jnp.concatenate([sampled[:, None], after], axis=1))
            cache, sampled = compact(cache, inputs.batch, nodes, accepted), accepted.last
            fields = jnp.concatenate([fields, accepted.tokens[:, 1:], accepted.counts[:, None]], axis=1)
        if program.is_scoring:
            scores = _scores(model, hidden, following)
            fields = jnp.concatenate([fields, jnp.pad(scores, ((0, 0), (0, fields.shape[1] - scores.shape[1])))])
        state = DeviceState(cache, state.sampled.at[inputs.slots].set(sampled, mode="drop"), edits, state.allowed)
        return _constrained(state, sharding), _replicated(fields, sharding)

    return jax.jit(run, static_argnames="program", donate_argnames="state", compiler_options=DECODING)


def cache_sharding(parameters: Items[Array], num_kv_heads: int | None) -> NamedSharding | None:
    """Sharding of a cache beside sharded parameters: by KV heads over the axis `model` of their mesh.

    Latent vectors (`num_kv_heads` None) are replicated, since MLA shards query heads. None for unsharded parameters.
    Raises ValueError if the axis does not divide the heads.
    """
    shardings = {x.sharding for x in parameters}
    meshes = {x.mesh for x in shardings if isinstance(x, NamedSharding) and x.mesh.size > 1}
    if not meshes:
        return None
    [mesh] = meshes
    if num_kv_heads is None:
        return NamedSharding(mesh, PartitionSpec())
    parts = dict(mesh.shape).get("model", 1)
    if num_kv_heads % parts:
        raise ValueError(
            f"The axis `model` of the mesh must divide the KV heads. Got {parts} devices for {num_kv_heads} heads."
        )
    # Of keys and values [L, P, page_size, Hkv, D], and of their scales [L, P, page_size, Hkv].
    return NamedSharding(mesh, PartitionSpec(None, None, None, "model" if parts > 1 else None))


def empty_state(model: Decoder, options: EngineOptions, sharding: NamedSharding | None) -> DeviceState:
    """The state before the first step; no device ever holds all of a sharded cache."""

    def make() -> DeviceState:
        cache = model.init_paged_cache(options.num_pages, options.page_size, dtype=options.cache_dtype)
        slots, vocabulary = options.max_requests, model.config.vocabulary
        allowed = jnp.zeros((slots, -(-vocabulary // 32)), jnp.int32)
        state = DeviceState(cache, jnp.zeros(slots, jnp.int32), Edits.empty(slots, vocabulary), allowed)
        return _constrained(state, sharding)

    return jax.jit(make)()


def _constrained(state: DeviceState, sharding: NamedSharding | None) -> DeviceState:
    """Fixes the sharding of the state, so that all steps have the same one and none is compiled twice."""
    if sharding is None:
        return state
    cache = jax.lax.with_sharding_constraint(state.cache, sharding)
    others = (state.sampled, state.edits, state.allowed)
    return DeviceState(cache, *_replicated(others, sharding))


def _replicated(tree: Tree, sharding: NamedSharding | None) -> Tree:
    """Makes every device of the cache's mesh hold all of the arrays."""
    if sharding is None:
        return tree
    return jax.lax.with_sharding_constraint(tree, NamedSharding(sharding.mesh, PartitionSpec()))


def _fields(sampled: Int32[Array, " R"], logits: Float[Array, "R V"]) -> Int32[Array, "R fields"]:
    """Sampled tokens, their log probabilities, and the top ones with theirs."""
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    of_sampled = jnp.take_along_axis(logprobs, sampled[:, None], axis=-1)
    best, which = jax.lax.top_k(logprobs, min(MAX_LOGPROBS, logits.shape[-1]))
    bits = lambda x: jax.lax.bitcast_convert_type(x, jnp.int32)
    return jnp.concatenate([sampled[:, None], bits(of_sampled), which.astype(jnp.int32), bits(best)], axis=-1)


def _scores(model: Decoder, hidden: Float[Array, "N width"], following: Int32[Array, " N"]) -> Int32[Array, "N fields"]:
    """The fields of the tokens that follow in prompts; logits of a few rows are held at once, not of all."""
    score = lambda row: _fields(row[1][None], model.logits(row[0])[None])[0]
    return jax.lax.map(score, (hidden, following), batch_size=_SCORED_ROWS)


def read_row(
    fields: Int32[np.ndarray, " fields"], top: int, drafts: int
) -> tuple[tuple[int, ...], TokenLogprobs | None]:
    """Reads the sampled tokens of a row of results, and the log probabilities of the first.

    `top` is the number of most probable tokens, -1 for no log probabilities; `drafts` are those of the shape of the
    step. There are several tokens if drafts were accepted.
    """
    tokens = (int(fields[0]),)
    if drafts:
        tokens += tuple(fields[-1 - drafts : -1][: int(fields[-1]) - 1].tolist())
        fields = fields[: -1 - drafts]
    if top < 0:
        return tokens, None
    logprob, tops = float(fields[1:2].view(np.float32)[0]), (len(fields) - 2) // 2
    which, best = fields[2 : 2 + tops].tolist(), fields[2 + tops :].view(np.float32).tolist()
    return tokens, TokenLogprobs(logprob, tuple(zip(which, best, strict=True))[:top])


def poison_pages(state: DeviceState, free: Int32[Array, " P"]) -> DeviceState:
    """Overwrites pages marked with 1 with NaN. Of int8, which has none, it overwrites the scales."""

    def overwrite(x: Array) -> Array:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        marked = free.astype(bool).reshape(1, -1, *[1] * (x.ndim - 2))  # of all layers
        return jnp.where(marked, jnp.asarray(jnp.nan, x.dtype), x)

    return dataclasses.replace(state, cache=jax.tree.map(overwrite, state.cache))


CHANGES = {
    # the penalties of a request, to its slot: words of `pack_penalties`
    "penalties": lambda state, words: dataclasses.replace(state, edits=state.edits.begin(words)),
    # the bits of the tokens that the constraints of all slots allow next, one slot after the other
    "allowed": lambda state, words: dataclasses.replace(state, allowed=words.reshape(state.allowed.shape)),
    # pages of all layers: words of `pack_copies`
    "copies": lambda state, words: dataclasses.replace(state, cache=copy_pages(state.cache, *jnp.split(words, 2))),
    "poison": poison_pages,
}
"""Changes of the state between steps, by name."""


@functools.partial(jax.jit, donate_argnames="state", static_argnames=("change", "sharding"))
def change_state(
    state: DeviceState, words: Int32[Array, " words"], *, change: str, sharding: NamedSharding | None
) -> DeviceState:
    """Applies one of `CHANGES`."""
    return _constrained(CHANGES[change](state, words), sharding)

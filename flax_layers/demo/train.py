"""Training, and the held-out loss."""

import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float

from flax_layers.demo.data import Rows
from flax_layers.demo.model import ByteDecoder, Packed, next_byte_loss


class Progress(NamedTuple):
    """What one step did."""

    loss: float
    tokens_per_second: float


def create_optimizer(model: ByteDecoder, learning_rate: float, steps: int) -> nnx.Optimizer:
    """AdamW with a short warm-up, a cosine decay to a twentieth, and gradients clipped to norm 1.

    Args:
        model: What is trained.
        learning_rate: The largest one.
        steps: Length of the whole schedule.

    Returns:
        The optimizer.
    """
    warmup = min(50, max(steps // 10, 1))
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, learning_rate, warmup, max(steps, warmup + 1), learning_rate / 20
    )
    adam = optax.adamw(schedule, b2=0.98, weight_decay=0.05)
    return nnx.Optimizer(model, optax.chain(optax.clip_by_global_norm(1.0), adam), wrt=nnx.Param)


@nnx.jit
def train_step(model: ByteDecoder, optimizer: nnx.Optimizer, tokens: Packed, documents: Packed) -> Float[Array, ""]:
    """One step of gradient descent on one batch; returns the loss before it."""
    loss, gradients = nnx.value_and_grad(next_byte_loss)(model, tokens, documents)
    optimizer.update(model, gradients)
    return loss


def train(model: ByteDecoder, optimizer: nnx.Optimizer, batches: Iterable[Rows]) -> Iterator[Progress]:
    """Trains on the batches in turn.

    Args:
        model: Changed in place.
        optimizer: Changed in place.
        batches: One for each step.

    Yields:
        The loss of each step, and the speed of all steps so far but the first, which compiles.
    """
    started, tokens = time.perf_counter(), 0
    for step, batch in enumerate(batches):
        loss = float(train_step(model, optimizer, *batch))
        if step == 0:
            started = time.perf_counter()
        else:
            tokens += batch.tokens.size
        yield Progress(loss, tokens / max(time.perf_counter() - started, 1e-9))


@nnx.jit
def _evaluate(model: ByteDecoder, tokens: Packed, documents: Packed) -> Float[Array, ""]:
    return next_byte_loss(model, tokens, documents)


def mean_loss(model: ByteDecoder, batches: list[Rows]) -> float:
    """Loss over all scored bytes of the batches.

    Args:
        model: The decoder.
        batches: Rows that it was not trained on.

    Returns:
        Nats per byte.
    """
    scored = [np.sum(batch.documents[:, 1:] == batch.documents[:, :-1]) for batch in batches]
    losses = [float(_evaluate(model, *batch)) for batch in batches]
    return float(np.average(losses, weights=scored))

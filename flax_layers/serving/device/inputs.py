"""The inputs of a step: one packed int32 array, a single transfer to the device, and how the step takes it apart."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from flax_layers.nnx import SharedPrefix
from flax_layers.sampling import SamplingBatch
from flax_layers.serving.device.options import Shape
from flax_layers.serving.device.penalties import PenaltyBatch
from jflex.paged import PagedBatch

SAMPLING_COLUMNS = (
    ("temperature", np.float32), ("top_k", np.int32), ("top_p", np.float32), ("seed", np.uint32), ("min_p", np.float32),
)  # fmt: skip
PENALTY_COLUMNS = tuple((f"{name}_penalty", np.float32) for name in ("presence", "frequency", "repetition"))
STATE_COLUMNS = (("is_edited", np.int32), ("dropped", np.int32), ("is_guided", np.int32))
COLUMNS = (*SAMPLING_COLUMNS, *PENALTY_COLUMNS, *STATE_COLUMNS)


class StepInputs(NamedTuple):
    """The inputs of a step from the host. R rows of requests and N tokens, both padded."""

    tokens: Int32[Array, " N"]  # packed; `-1 - slot` stands for the token that the step before sampled for a slot
    batch: PagedBatch  # the tokens and pages of each row; rows of padding have none
    # slot of each row. For rows that sample no token it is out of range, so that writes to it are dropped
    slots: Int32[Array, " R"]
    sampling: SamplingBatch  # parameters of each row
    penalties: PenaltyBatch  # penalties of each row
    shared_prefix: SharedPrefix  # the prefix that the first rows share
    dropped: Int32[Array, " R"]  # with `streaming`, tokens of each row that `batch` leaves out
    is_guided: Int32[Array, " R"]  # 1 for each row with a constraint, else 0


def unpack(packed: Int32[Array, " words"], shape: Shape) -> StepInputs:
    """Splits a packed step of a shape into its inputs, inside of `jit`."""
    nodes = 1 + shape.drafts if shape.drafts else 0
    sizes = [1, 1, shape.tokens, shape.rows + 1, *[shape.rows] * (2 + len(COLUMNS)), shape.rows * shape.pages]
    parts = jnp.split(packed, np.cumsum(sizes).tolist())
    requests, shared, tokens, indptr, lengths, slots, *words, table, trees = parts
    cast = jax.lax.bitcast_convert_type
    *columns, dropped, guided = (cast(x, dtype) for (_, dtype), x in zip(COLUMNS, words, strict=True))
    ancestors = trees.reshape(shape.rows, nodes) if nodes else None
    batch = PagedBatch(indptr, lengths, table.reshape(shape.rows, shape.pages), ancestors)
    of_sampling = len(SAMPLING_COLUMNS)
    sampling, penalties = SamplingBatch(*columns[:of_sampling]), PenaltyBatch(*columns[of_sampling:])
    prefix = SharedPrefix(requests[0], shared[0])
    return StepInputs(tokens, batch, slots, sampling, penalties, prefix, dropped, guided)

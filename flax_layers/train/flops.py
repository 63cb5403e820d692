"""FLOPs of a training step, and peak FLOP/s of devices."""

import math
import time
from collections.abc import Collection, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from flax_layers.models import ModelConfig

PEAKS = {
    "A100": 312e12, "H100": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H200": 989e12, "GH200": 989e12,
    "B200": 2250e12, "L4": 121e12, "L40S": 362e12,
    "TPU v4": 275e12, "TPU v5 lite": 197e12, "TPU v5e": 197e12, "TPU v5p": 459e12, "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
}  # fmt: skip
"""Peak FLOP/s of dense bf16 matrix products from data sheets, by words of `jax.Device.device_kind`."""


def peak_flops(kind: str) -> float | None:
    """Peak FLOP/s of a `jax.Device.device_kind`: the longest matching entry of `PEAKS`; None if there is none.

    Example:
        >>> peak_flops("NVIDIA H200"), peak_flops("NVIDIA H100 PCIe"), peak_flops("cpu")
        (989000000000000.0, 756000000000000.0, None)
    """
    names = [name for name in PEAKS if f" {name} " in f" {kind} " or f" {name}-" in f" {kind}"]
    return PEAKS[max(names, key=len)] if names else None


def measured_flops(size: int = 8192, repeats: int = 10) -> float:
    """FLOP/s that one device reaches in a square bf16 matrix product, of `repeats` that are timed together."""
    matrix = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16)

    @jax.jit
    def products(matrices):
        multiply = lambda _, matrices: (matrices @ matrix) * jnp.bfloat16(size**-0.5)
        return jax.lax.fori_loop(0, repeats, multiply, matrices)

    products(matrix).block_until_ready()
    started = time.perf_counter()
    products(matrix).block_until_ready()
    return 2 * size**3 * repeats / (time.perf_counter() - started)


def multiplied_parameters(
    shapes: Mapping[str, tuple[int, ...]], config: ModelConfig, trained: Collection[str] | None = None
) -> float:
    """Parameters that each token is multiplied by: all projections with the output head, not the embedding lookup.

    Of a mixture of experts it is those that a token goes through. (The decoder computes the others, too.) `shapes` are
    of all parameters, by path. One that is not in `trained` counts two thirds: no gradient of it is computed.
    """
    share = lambda path: 1 if trained is None or path in trained else 2 / 3
    kernels = 0
    for path, shape in shapes.items():
        if path.endswith(".kernel"):
            experts = config.layers[int(path.split(".")[1])].experts if ".mlp.experts." in path else None
            kernels += share(path) * math.prod(shape if experts is None else (experts.per_token, *shape[1:]))
    return kernels + (share("embed.embedding") * config.vocabulary * config.width if config.tied_embeddings else 0)


def visible_pairs(documents: Int[np.ndarray, "B T"], window: int | None = None) -> int:
    """Attended query-key pairs of all rows: causal, within the document, and within a window of keys if there is one.

    Example:
        >>> visible_pairs(np.array([[0, 0, 0, 1]])), visible_pairs(np.array([[0, 0, 0, 1]]), window=2)
        (7, 6)
    """
    total = 0
    for row in documents:
        ends = np.flatnonzero(np.diff(row, append=row[-1] + 1)) + 1
        lengths = np.diff(ends, prepend=0).astype(np.int64)
        short = lengths if window is None else np.minimum(lengths, window)
        total += int(np.sum(short * (short + 1) // 2 + (lengths - short) * short))
    return total


def step_flops(config: ModelConfig, multiplied: float, documents: Int[np.ndarray, "B T"]) -> float:
    """Model FLOPs of the forward and backward pass of a batch; `multiplied` as from `multiplied_parameters`.

    Each token takes 6 FLOPs for each parameter that it is multiplied by, and each attended pair 6 for each feature of a
    key and of a value of each head: a matrix product forward, two backward. Recomputation by remat does not count.
    """
    by_window = {window: visible_pairs(documents, window) for window in config.windows}
    pairs = sum(by_window[layer.window] for layer in config.layers)
    features = config.head_dim + config.value_head_dim
    return 6.0 * multiplied * documents.size + 6.0 * config.num_heads * features * pairs

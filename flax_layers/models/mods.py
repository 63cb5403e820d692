"""The attention of all families as mods and masks."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

import jflex
from flax_layers.attention.caches.owned_pages import OwnedPages
from flax_layers.attention.streaming import Streaming
from flax_layers.context_parallel import ContextParallel
from flax_layers.models.config import ModelConfig
from flax_layers.nnx import DenseCache
from jflex.masks import causal, document, sliding_window
from jflex.scores import softcap

Masks = dict[int | None, jflex.BlockMask | None]
"""The masks of the layers, by window."""

FEW_TOKENS = 16
"""Up to this many tokens, one row of blocks holds all queries of a sequence, and decoding kernels run."""


def score_mod(config: ModelConfig, bias: jflex.ScoreMod | None = None) -> jflex.ScoreMod | None:
    """The score_mod of a layer, if any: a learned bias, which is a module of the layer, then the soft cap."""
    cap = None if config.attention_softcap is None else softcap(config.attention_softcap)
    if bias is None or cap is None:
        return cap if bias is None else bias
    return lambda score, b, h, q_idx, kv_idx: cap(jnp.asarray(bias(score, b, h, q_idx, kv_idx)), b, h, q_idx, kv_idx)


def mask_mod(window: int | None, documents: Int[Array, "B T"] | None = None) -> jflex.MaskMod:
    """A causal mask within documents and a window: the number of keys that a query attends to, its own included.

    Example:
        >>> jflex.create_mask(mask_mod(2), None, None, 3, 3)[0, 0].astype(int).tolist()
        [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    """
    mod = causal() if window is None else sliding_window(window - 1)
    return mod if documents is None else jflex.and_masks(document(documents), mod)


def paged_mask(window: int | None, streaming: Streaming | None) -> jflex.MaskMod | None:
    """The mask of a layer over a paged cache, at positions of `streaming`; None where that masks as much."""
    if streaming is None:
        return mask_mod(window)
    return None if _within(window, streaming.size) is None else mask_mod(window)


def training_masks(
    config: ModelConfig,
    rows: int,
    length: int,
    documents: Int[Array, "B T"] | None,
    context: ContextParallel | None = None,
) -> Masks:
    """One BlockMask of B rows and T tokens for each window; layers with the same window share it.

    The document ids may be traced. With a `context`, blocks divide its chunks.
    """
    block = 128 if context is None else math.gcd(128, context.chunk(length))
    batch = None if documents is None else rows
    masks: Masks = {}
    for window in config.windows:
        effective = _within(window, length)
        if effective not in masks:
            masks[effective] = jflex.create_block_mask(
                mask_mod(effective, documents), batch, None, length, length, block_size=block
            )
    return {window: masks[_within(window, length)] for window in config.windows}


def cache_masks(config: ModelConfig, cache: DenseCache | OwnedPages, tokens: int) -> Masks:
    """Masks of the next tokens and a dense cache, before they are appended: layers read only the listed blocks.

    A few tokens without a window attend to the whole cache and need no BlockMask. With a window, the block size of
    queries is the number of tokens, since the mask is evaluated on whole blocks in every step. (On a CPU, two sequences
    with a window of 1024 in a cache of 65536 take 2 ms per call, and 28 ms with blocks of 128 queries.) A mask is None
    where the mask_mod is sufficient, as over eight bits and latent vectors, whose kernels bound it tile by tile.
    """
    if isinstance(cache, OwnedPages):
        return dict.fromkeys(config.windows)
    masks: Masks = {None: None} if tokens <= FEW_TOKENS else {}
    for window in config.windows:
        effective = _within(window, cache.max_length)
        if effective not in masks:
            queries = tokens if tokens <= FEW_TOKENS else 128
            masks[effective] = cache.block_mask(mask_mod(effective), tokens, block_size=(queries, 128))
    return {window: masks[_within(window, cache.max_length)] for window in config.windows}


def _within(window: int | None, length: int) -> int | None:
    """The window, or None if it covers the whole length."""
    return None if window is None or window >= length else window


def remat_policy() -> Callable[..., bool]:
    """A policy for `jax.checkpoint` that saves the residuals of attention, so that remat does not recompute it."""
    return jax.checkpoint_policies.save_only_these_names("jflex_out", "jflex_lse")

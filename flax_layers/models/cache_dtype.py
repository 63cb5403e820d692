"""Dtypes of eight bits for the paged cache of a model."""

from __future__ import annotations

import jax.numpy as jnp

from flax_layers.models.decoder import Decoder
from jflex.paged.eight_bits import LATENT_TILE, QUERIES, TILES_DTYPE

CACHE_DTYPES = ("int8", "float8_e4m3fn", "float8_e5m2")


def check_cache_name(name: str | None) -> None:
    """Raises ValueError for a name that is neither None nor one of `CACHE_DTYPES`."""
    if name is not None and name not in CACHE_DTYPES:
        raise ValueError(
            f"`cache_dtype` must be one of {', '.join(CACHE_DTYPES)}, or None for the dtype of the model. Got {name!r}."
        )


def check_cache_dtype(name: str | None, model: Decoder) -> None:
    """Raises ValueError if the cache of a model cannot have a dtype; None stands for the dtype of the model."""
    latent = model.config.latent
    if name is None or latent is None:
        return
    if name != TILES_DTYPE:
        raise ValueError(
            f"`cache_dtype` must be None or {TILES_DTYPE} for a model with latent attention, whose latent vectors have "
            f"a scale for each {LATENT_TILE} columns. Got {name}. Take {TILES_DTYPE}, or leave it out."
        )
    if latent.latent_dim % LATENT_TILE:
        raise ValueError(
            f"`cache_dtype` must be None where latent vectors are not whole tiles of {LATENT_TILE} columns, which "
            f"share a scale. Got {name}, and {latent.latent_dim} columns. Leave it out."
        )
    computed = str(jnp.dtype(model.embed.dtype))
    if computed not in QUERIES:
        raise ValueError(
            f"`cache_dtype` must be None for a model with latent attention that computes in {computed}, which does not "
            f"hold each number times its scale. Got {name}. Compute in {' or '.join(QUERIES)}, or leave it out."
        )

"""Remat policies: what the backward pass recomputes to save memory. Attention is never recomputed."""

from collections.abc import Callable
from typing import Any

import jax

from flax_layers.models import mods


def _products() -> Callable[..., bool]:
    policies = jax.checkpoint_policies
    return policies.save_from_both_policies(policies.dots_with_no_batch_dims_saveable, mods.remat_policy())


REMAT: dict[str, Callable[[], Any]] = {
    "none": lambda: False,
    "products": _products,
    "blocks": mods.remat_policy,
}
"""By name. `none`: nothing is recomputed. `products`: everything between matrix products. `blocks`: whole blocks,
except for the output and lse of attention, which jflex names as residuals."""

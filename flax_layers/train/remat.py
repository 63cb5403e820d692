"""What the backward pass computes again, to hold less from the forward pass. Attention is never computed twice."""

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
"""By name. `none`: nothing is computed again. `products`: what lies between matrix products. `blocks`: whole blocks but
for attention, of which jflex keeps its output and its lse by name."""

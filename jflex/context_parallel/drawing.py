"""A picture of the work of devices: the blocks that each visits, in one order of the tokens and in others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from jax.typing import ArrayLike

from jflex.block_mask.mask import BlockMask
from jflex.context_parallel.order import chunk_costs, costs_in_order

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def costs_to_image(
    block_mask: BlockMask, shards: int, orders: Mapping[str, ArrayLike | None], *, partial_cost: float = 1.0
) -> Figure:
    """Draws what each query block and each device visits, with matplotlib.

    Args:
      block_mask: As in `jflex.context_parallel.balanced_order`, and so `shards` and `partial_cost`.
      orders: Orders of the tokens by name, None for the natural one; each gets a row of the picture.

    Returns:
      A ``matplotlib.figure.Figure``: at the left the cost of each query block, in the order of the tokens, colored by
      device; at the right that of each device, and the mean.

    Raises:
      ImportError: matplotlib is not installed.
      TypeError: An argument is of a wrong type, or the mask is traced.
      ValueError: There is no order, one is no permutation, or one does not divide the query blocks.
    """
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
    except ImportError:
        remedy = "Install it with `pip install matplotlib`."
        raise ImportError(f"`costs_to_image` needs matplotlib. {remedy}") from None
    costs = chunk_costs(block_mask, shards, 1, partial_cost)
    if not orders:
        raise ValueError("`orders` must hold at least one order, by its name. Got none. Pass {'natural': None}.")
    rows = {name: costs_in_order(costs, shards, order) for name, order in orders.items()}
    colors = colormaps["viridis"](np.linspace(0, 0.9, shards))
    figure = Figure(figsize=(10.0, 2.5 * len(rows)), layout="constrained")
    for (blocks, devices), (name, row) in zip(figure.subplots(len(rows), 2, squeeze=False), rows.items(), strict=True):
        blocks.bar(np.arange(row.size), row, width=1.0, color=np.repeat(colors, row.size // shards, axis=0))
        blocks.set(title=name, xlabel="query block", ylabel="blocks visited")
        of_devices = row.reshape(shards, -1).sum(1)
        ratio = of_devices.max() / of_devices.mean() if of_devices.any() else 1.0
        devices.bar(np.arange(shards), of_devices, color=colors)
        devices.axhline(of_devices.mean(), color="grey", linestyle="--")
        devices.set(xlabel="device", ylabel="blocks visited", title=f"largest / mean: {ratio:.2f}")
    return figure

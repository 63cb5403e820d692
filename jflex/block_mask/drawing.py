"""Pictures of a BlockMask: as text, and with matplotlib."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jflex.block_mask.lists import FULL, PARTIAL, BlockLists, states_from_lists

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SKIPS_NOTHING = "no block is skipped, although elements are hidden: try a smaller block_size or another order of tokens"
_CHARACTERS = {0: "  ", PARTIAL: "░░", FULL: "██"}
_COLOURS = {"empty": "#f2f2f2", "partial": "#f0a830", "full": "#3060a0"}


def is_concrete(lists: BlockLists) -> bool:
    """True if the values of the lists are known: not under ``jit``, nor while JAX transforms the pytree."""
    return all(isinstance(x, (jax.Array, np.ndarray)) and not isinstance(x, Tracer) for x in lists)


def sparsity(states: np.ndarray, seq_lengths: tuple[int, int], block_size: tuple[int, int]) -> float:
    """The percentage of elements in empty blocks."""
    heights, widths = map(np.diff, _edges(seq_lengths, block_size))
    total = states.shape[0] * states.shape[1] * seq_lengths[0] * seq_lengths[1]
    if total == 0:
        return 0.0
    seen = states > 0  # counted without a copy in 64 bits: 67 million blocks of a million tokens would take 0.5 GB
    keys = np.count_nonzero(seen, axis=-1) * block_size[1] - seen[..., -1] * (block_size[1] - widths[-1])
    listed = int(np.sum(keys * heights))
    return 100.0 * (total - listed) / total


def skips_nothing(states: np.ndarray, seq_lengths: tuple[int, int], block_size: tuple[int, int]) -> bool:
    """True if several blocks are all visited, although elements of some are hidden."""
    rows, columns = (length // block for length, block in zip(seq_lengths, block_size, strict=True))
    several = states.shape[-2] * states.shape[-1] > 1
    return several and bool(np.all(states)) and bool(np.any(states[..., :rows, :columns] == PARTIAL))


def _edges(seq_lengths: tuple[int, int], block_size: tuple[int, int]) -> list[np.ndarray]:
    return [
        np.append(np.arange(0, n, size, dtype=np.int64), n) for n, size in zip(seq_lengths, block_size, strict=True)
    ]


def draw(
    lists: BlockLists,
    seq_lengths: tuple[int, int],
    block_size: tuple[int, int],
    grid_size: int | tuple[int, int] | None,
    limit: int,
) -> str:
    """Draws the blocks as text; see `BlockMask.to_string`."""
    leading = getattr(lists.kv_num_blocks, "shape", None)
    shape = seq_lengths if leading is None else (*leading[:-1], *seq_lengths)
    head = f"BlockMask(shape={shape}, block_size={block_size}"
    if not is_concrete(lists) or len(shape) != 4:
        return f"{head})"
    states = np.asarray(states_from_lists(lists))
    lines = [f"{head}, sparsity={sparsity(states, seq_lengths, block_size):.2f}%)"]
    lines += [SKIPS_NOTHING] if skips_nothing(states, seq_lengths, block_size) else []
    grid = (grid_size, grid_size) if isinstance(grid_size, int) else grid_size
    pictures = [(b, h) for b in range(shape[0]) for h in range(shape[1])]
    for b, h in pictures[:limit]:
        lines.append(f"batch {b}, head {h}")
        lines += ["".join(_CHARACTERS[int(state)] for state in row) + "|" for row in _coarser(states[b, h], grid)]
    if len(pictures) > limit:
        lines.append(f"... and {len(pictures) - limit} more")
    return "\n".join(lines)


def _coarser(states: np.ndarray, grid: tuple[int, int] | None) -> np.ndarray:
    if 0 in states.shape or grid is None:
        return states
    for axis, cells in enumerate(grid):
        step = -(-states.shape[axis] // max(1, cells))
        starts = np.arange(0, states.shape[axis], step)
        least, most = np.minimum.reduceat(states, starts, axis), np.maximum.reduceat(states, starts, axis)
        states = np.where(least == most, least, PARTIAL)
    return states


def to_figure(
    lists: BlockLists,
    seq_lengths: tuple[int, int],
    block_size: tuple[int, int],
    zoom: tuple[slice, slice] | None,
    elements: Callable[[jax.Array, jax.Array], jax.Array],
) -> Figure:
    """Draws blocks and elements of one batch entry and head; see `BlockMask.to_image`."""
    try:
        from matplotlib.colors import ListedColormap
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        remedy = "Install it with `pip install matplotlib`."
        raise ImportError(f"`BlockMask.to_image` needs matplotlib. {remedy}") from None
    if not is_concrete(lists):
        raise TypeError("`BlockMask.to_image` needs the values of the lists, traced here. Call it outside `jit`.")
    states, (q_length, kv_length) = np.asarray(states_from_lists(lists)), seq_lengths
    figure = Figure(figsize=(6.0 if zoom is None else 11.0, 5.5), layout="constrained")
    axes = figure.subplots(1, 1 if zoom is None else 2, squeeze=False)[0]
    sides = _edges(seq_lengths, block_size)
    if q_length and kv_length:
        colors = ListedColormap(list(_COLOURS.values()))
        axes[0].pcolormesh(sides[1], sides[0], states[0, 0], cmap=colors, vmin=0, vmax=2)
    percent = sparsity(states, seq_lengths, block_size)
    axes[0].set_title(f"blocks of {block_size[0]} x {block_size[1]}, {percent:.1f}% skipped")
    axes[0].set_xlim(0, kv_length or 1)
    axes[0].set_ylim(q_length or 1, 0)
    patches = [Patch(facecolor=color, edgecolor="grey", label=name) for name, color in _COLOURS.items()]
    axes[0].legend(handles=patches, loc="upper right")
    if zoom is not None:
        queries, keys = (range(length)[part] for length, part in zip(seq_lengths, zoom, strict=True))
        indices = (jnp.asarray(np.asarray(part, np.int32)) for part in (queries, keys))
        _draw_elements(axes[1], np.asarray(elements(*indices))[0, 0], queries, keys)
    for axis in axes:
        axis.set(xlabel="key", ylabel="query", aspect="equal" if q_length == kv_length else "auto")
    return figure


def _draw_elements(axis: Any, visible: np.ndarray, queries: range, keys: range) -> None:
    if visible.size:
        extent = (keys[0] - 0.5, keys[-1] + 0.5, queries[-1] + 0.5, queries[0] - 0.5)
        axis.imshow(visible, cmap="Blues", vmin=0, vmax=1.3, interpolation="nearest", extent=extent)
    axis.set_title(f"elements, {int(visible.sum())} of {visible.size} visible")

"""The demo's pictures: the loss curve and the block mask of a batch."""

import pathlib
from collections.abc import Sequence

import jflex

ZOOM = slice(0, 1024)


def draw_losses(path: pathlib.Path, losses: Sequence[float], held_out_loss: float, unigram_loss: float) -> None:
    """Draws the training loss of every step beside the two figures that it is judged by.

    Args:
        path: The PNG to write.
        losses: Nats per byte, one for each step.
        held_out_loss: Of the trained model, nats per byte.
        unigram_loss: Of the model that knows only how often each byte occurs, nats per byte.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(losses) + 1), losses, linewidth=1, label="training, each step")
    axes.axhline(unigram_loss, color="gray", linestyle=":", label=f"unigram model, held-out files: {unigram_loss:.2f}")
    axes.axhline(held_out_loss, color="black", linestyle="--", label=f"held-out files: {held_out_loss:.2f}")
    axes.set(xlabel="step", ylabel="nats per byte", title="Byte-level decoder on the Python standard library")
    axes.legend()
    figure.savefig(path, dpi=150)


def draw_mask(path: pathlib.Path, block_mask: jflex.BlockMask) -> None:
    """Draws the blocks of the first row, and the elements of its beginning.

    Args:
        path: The PNG to write.
        block_mask: The mask of a batch.
    """
    figure = block_mask.to_image(batch=0, head=0, zoom=(ZOOM, ZOOM))
    figure.savefig(path, dpi=150)

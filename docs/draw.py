"""Draws the pictures of the site, as SVG: python docs/draw.py writes docs/pages/images/*.svg.

Pictures are committed, and `tests/docs/test_pages.py` compares them with what this module draws.
"""

import html
import itertools
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

import jflex
from jflex import masks

IMAGES = pathlib.Path(__file__).parent / "pages/images"
RESULTS = pathlib.Path(__file__).parents[1] / "benchmarks/results/h200"
INK, GREY, BLUE, PALE, EDGE = "#1f2430", "#6b7280", "#3949ab", "#dfe3f7", "#9aa3b5"
FONT = 'font-family="Helvetica, Arial, sans-serif"'


def document(width: int, height: int, *parts: str) -> str:
    """An SVG document on a white card, which reads on light and dark pages."""
    card = f'<rect width="{width}" height="{height}" rx="6" fill="#ffffff"/>'
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {FONT}>\n' + "\n".join([card, *parts]) + "\n</svg>\n"


def text(x: float, y: float, words: str, size: int = 13, color: str = INK, anchor: str = "middle") -> str:
    """A line of text, around or from `x`."""
    place = f'x="{x:g}" y="{y:g}" text-anchor="{anchor}"'
    return f'<text {place} font-size="{size}" fill="{color}">{html.escape(words)}</text>'


def rectangle(x: float, y: float, width: float, height: float, fill: str, edge: str = "none", radius: int = 0) -> str:
    """A rectangle."""
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}" stroke="{edge}" rx="{radius}"/>'
    )


# --- masks


class Mask(NamedTuple):
    """A mask to draw: `length` queries and keys, in blocks."""

    title: str
    mod: Callable[..., object]
    length: int = 64
    block: int = 8


def panel(mask: Mask, x: float, y: float, side: float) -> list[str]:
    """Draws visible elements, in the dark color where their block is full, and the lines between blocks."""
    block_mask = jflex.create_block_mask(mask.mod, None, None, mask.length, mask.length, block_size=mask.block)
    elements = np.asarray(jflex.create_mask(mask.mod, None, None, mask.length, mask.length))[0, 0]
    full = elements.reshape(mask.length // mask.block, mask.block, -1, mask.block).all(axis=(1, 3))
    unit, parts = side / mask.length, [rectangle(x, y, side, side, "#f4f5f8")]
    for row, visible in enumerate(elements):
        colors = np.where(np.repeat(full[row // mask.block], mask.block), 2, 1) * visible
        edges = [0, *(np.flatnonzero(np.diff(colors)) + 1), mask.length]
        runs = itertools.pairwise(edges)
        parts += [
            rectangle(x + a * unit, y + row * unit, (b - a) * unit, unit, BLUE if colors[a] == 2 else "#8c9eff")
            for a, b in runs
            if colors[a]
        ]
    for at in np.arange(0, mask.length + 1, mask.block) * unit:
        line = f'stroke="#ffffff" stroke-width="0.7" d="M{x + at:g} {y:g}v{side:g}M{x:g} {y + at:g}h{side:g}"'
        parts.append(f"<path {line}/>")
    caption = f"{block_mask.sparsity():.0f} % of the blocks skipped"
    return [
        *parts,
        text(x + side / 2, y + side + 20, mask.title),
        text(x + side / 2, y + side + 37, caption, 11, GREY),
    ]


def mask_row(*row: Mask, side: int = 168) -> str:
    """Masks beside one another."""
    gap, top = 22, 16
    parts = [panel(mask, gap + i * (side + gap), top, side) for i, mask in enumerate(row)]
    return document(gap + len(row) * (side + gap), top + side + 50, *itertools.chain(*parts))


# --- diagrams


class Step(NamedTuple):
    """A box of a diagram: what happens, where in the code, and a remark."""

    title: str
    where: str = ""
    remark: str = ""


def flow(steps: Sequence[Step], width: int = 740) -> str:
    """Boxes below one another, joined by arrows; the place in the code in the box, the remark at its right."""
    box, height, gap, left = 330, 46, 22, 20
    parts = []
    for number, step in enumerate(steps):
        y = 16 + number * (height + gap)
        parts.append(rectangle(left, y, box, height, PALE, EDGE, 6))
        parts.append(text(left + box / 2, y + (19 if step.where else 28), step.title))
        if step.where:
            parts.append(text(left + box / 2, y + 36, step.where, 11, GREY))
        for line, words in enumerate(step.remark.split("\n")):
            parts.append(text(left + box + 18, y + 20 + 16 * line, words, 12, INK, "start"))
        if number:
            x, top = left + box / 2, y - gap
            parts.append(f'<path d="M{x:g} {top:g}v{gap - 6}m-4 0l4 6l4 -6z" stroke="{EDGE}" fill="{EDGE}"/>')
    return document(width, 32 + len(steps) * (height + gap) - gap, *parts)


DOCUMENTS = masks.document_ids_from_lengths(jnp.array([14, 28, 22]), 64)
PREFIX = masks.prefix_lm(20)
CAUSAL = Mask("causal", masks.causal())
WINDOW = Mask("sliding window", masks.sliding_window(12))
PACKED = Mask("packed documents", masks.causal_document(DOCUMENTS))
NEIGHBORS = Mask("neighborhood in an image", masks.neighborhood((8, 8), (3, 3)))

LIFE_OF_A_CALL = (
    Step("flex_attention(q, k, v, score_mod, block_mask)", "jflex/attention.py", "checks every argument"),
    Step(
        "trace the mods", "jflex/mods/trace.py",
        "a jaxpr of scalars, captured arrays as operands,\nequal by structure: a fresh lambda hits the caches",
    ),
    Step(
        "plan", "pallas_kernels/*/plan/",
        "a Plan or a Refusal with one sentence, cached;\ndispatch, errors and explain read the same one",
    ),
    Step(
        "compile the mods to tile programs", "pallas_kernels/program/",
        "uniform, row, column or tile: each value\nis held at the size it depends on",
    ),
    Step("run the kernel", "pallas_kernels/{triton,mosaic_gpu}/", "online softmax over the blocks that the mask lists"),
    Step(
        "backward", "jflex/_jax/custom_vjp.py",
        "recomputes tiles from q, k, v, lse; cotangents of\ncaptured arrays are reduced in registers",
    ),
)  # fmt: skip

LIFE_OF_A_REQUEST = (
    Step("endpoint", "flax_layers/serving/api/http.py", "limits, fields, access"),
    Step("tokens", "flax_layers/serving/api/prompts.py", "chat template, tokenizer, constraint"),
    Step("queue", "flax_layers/serving/engine/engine.py", "to the engine's thread; 429 if it is full"),
    Step(
        "schedule", "flax_layers/serving/engine/scheduler.py",
        "a token for each decoding request,\nthe rest for prompts; pages, preemption",
    ),
    Step("pack", "flax_layers/serving/engine/packing.py", "one transfer of int32 words"),
    Step(
        "step", "flax_layers/serving/device/step.py",
        "write pages, attend, sample: one program;\nthe host runs one step ahead",
    ),
    Step("read", "flax_layers/serving/engine/sequence.py", "one transfer back; stop tokens, limits"),
    Step("text", "flax_layers/serving/api/text.py", "whole characters, stop strings, the stream"),
)  # fmt: skip

DIFFUSION = Mask("block diffusion", masks.block_diffusion(32, 8), length=64)


NAMES = {
    "causal": "causal", "sliding_window": "window of 1,024", "document_mask": "12 documents", "softcap": "soft cap",
    "alibi": "ALiBi",
}  # fmt: skip
PEERS = {"jflex": BLUE, "jax-cudnn": "#8c9eff", "torch-flex": "#c5cae9"}


def speed_by_variant() -> str:
    """Bars of TFLOP/s, from the result file of the suite `main`: S 16384, H 16, D 128."""
    records = json.loads((RESULTS / "main.json").read_text())["records"]
    speed = {
        (x["direction"], x["problem"]["variant"], x["peer"]): x["TFLOP/s"]
        for x in records
        if (x["problem"]["S"], x["problem"]["Hq"], x["problem"]["D"]) == (16384, 16, 128) and "TFLOP/s" in x
    }
    parts, scale, bar = [], 0.34, 10
    for column, direction in enumerate(("forward", "backward")):
        left = 130 + column * 330
        parts.append(text(left, 24, f"{direction}, TFLOP/s", 13, INK, "start"))
        for row, (variant, name) in enumerate(NAMES.items()):
            y = 40 + row * (3 * bar + 14)
            if not column:
                parts.append(text(left - 10, y + 19, name, 12, INK, "end"))
            for number, (peer, color) in enumerate(PEERS.items()):
                value = speed.get((direction, variant, peer))
                if value is not None:
                    parts.append(rectangle(left, y + number * bar, value * scale, bar - 2, color))
                    parts.append(text(left + value * scale + 4, y + number * bar + 8, f"{value:.0f}", 9, GREY, "start"))
    bottom = 40 + len(NAMES) * (3 * bar + 14) + 14
    labels = {"jflex": "jflex", "jax-cudnn": "jax.nn, cuDNN", "torch-flex": "torch FlexAttention"}
    for number, (peer, color) in enumerate(PEERS.items()):
        x = 130 + number * 150
        parts += [rectangle(x, bottom - 9, 10, 10, color), text(x + 16, bottom, labels[peer], 12, INK, "start")]
    return document(760, bottom + 16, *parts)


PICTURES: dict[str, Callable[[], str]] = {
    "masks": lambda: mask_row(CAUSAL, WINDOW, PACKED, NEIGHBORS),
    "mask_examples": lambda: mask_row(DIFFUSION, NEIGHBORS),
    "mask_documents": lambda: mask_row(CAUSAL, PACKED),
    "speed_by_variant": speed_by_variant,
    "life_of_a_call": lambda: flow(LIFE_OF_A_CALL),
    "life_of_a_request": lambda: flow(LIFE_OF_A_REQUEST),
}


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (IMAGES / f"{name}.svg").write_text(draw())

"""The loss along a text far longer than those of training: ``python -m benchmarks streaming``.

A byte-level decoder with rotary embedding, of the size of the demo's, is trained on rows of 256 bytes of Python's
standard library. Then it reads texts of 20,000 bytes that were held out, from a paged cache in chunks: with attention
to all bytes, to a window of the last ones, and to sinks and a window (`flax_layers.serving.Streaming`). The last two
hold the pages that they attend to, and reuse the others.
"""

from __future__ import annotations

import argparse
import itertools
import pathlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from benchmarks.environment import gpu_facts, results_folder
from benchmarks.questions.command import Measured
from benchmarks.results import schema
from benchmarks.results.schema import Record

if TYPE_CHECKING:
    from flax_layers.models import Decoder
    from flax_layers.serving import Streaming

_TITLE = (
    "loss along {texts} held-out texts of {length} bytes, of a byte-level decoder with rotary embedding that was "
    "trained for {steps} steps on rows of {trained} bytes"
)
_EDGES = (0, 64, 128, 256, 512, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_PAGE = 32


class Sizes(NamedTuple):
    """Of the model, its training, and what it reads."""

    width: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    trained: int = 256  # bytes of a row
    rows: int = 16
    steps: int = 600
    texts: int = 4
    length: int = 20_000  # bytes of a text
    sinks: int = 4


def streaming(sizes: Sizes) -> Measured:
    """How does the loss change beyond the trained length, with all keys, a window, or sinks and a window?

    Args:
      sizes: Of the model, its training, and what it reads.
    """
    from flax_layers.demo import data
    from flax_layers.serving import Streaming

    corpus, started = data.read_corpus(), time.perf_counter()
    model = _trained(sizes, corpus.training)
    records = [Record.single("training", round(time.perf_counter() - started), "s")]
    texts = _long_texts(corpus.held_out, sizes)
    within = sizes.trained - sizes.sinks
    policies = {
        "full attention": None,
        f"window of {sizes.trained}": Streaming(0, sizes.trained),
        f"{sizes.sinks} sinks and a window of {within}": Streaming(sizes.sinks, within),
    }
    for name, policy in policies.items():
        losses, pages = read(model, texts, policy)
        for begin, end in _ranges(sizes.length):
            mean = round(float(losses[:, begin:end].mean()), 3)
            records.append(Record.single(f"{name}: bytes {begin} to {end}", mean, "nats/byte"))
        records.append(Record.single(f"{name}: keys of a text that are held", pages * _PAGE, ""))
    middle = texts[:, sizes.length // 2 :]
    shares = [_share_of_first(model, rows[:, : sizes.trained], sizes.sinks) for rows in (texts, middle)]
    return records, [
        f"Attention of the last byte of a row of {sizes.trained} to its first {sizes.sinks} bytes, in the mean over "
        f"layers and heads: {shares[0]:.1%} at the beginning of the texts, {shares[1]:.1%} in rows cut from their "
        f"middles; an even share is {sizes.sinks / sizes.trained:.1%}."
    ]


def _share_of_first(model: Decoder, rows: np.ndarray, first: int) -> float:
    """The attention of the last byte of each row to the first ones, in the mean over layers and heads."""
    import jax
    import jax.numpy as jnp

    from flax_layers.attention import core as attention_core

    stream, shares = model._embed(jnp.asarray(rows)), []
    places = jnp.arange(rows.shape[1]), rows.shape[1]
    for block in model.blocks:
        layer, inputs = block.attention, block.attention_norm(stream)
        query = attention_core.rotated(layer, attention_core.query_heads(layer, inputs), *places)
        key = attention_core.project_kv(layer, inputs, *places).key
        key = jnp.repeat(key, query.shape[2] // key.shape[2], axis=2)
        scores = jnp.einsum("bhd,bshd->bhs", query[:, -1], key) * query.shape[-1] ** -0.5
        shares.append(jax.nn.softmax(scores)[..., :first].sum(-1).mean())
        stream = block(stream)
    return float(jnp.stack(shares).mean())


def _ranges(length: int) -> list[tuple[int, int]]:
    """Ranges of positions.

    >>> _ranges(300)
    [(0, 64), (64, 128), (128, 256), (256, 300)]
    """
    edges = [*(x for x in _EDGES if x < length), length]
    return list(itertools.pairwise(edges))


def _trained(sizes: Sizes, texts: Sequence[Any]) -> Decoder:
    from flax import nnx
    from tqdm import tqdm

    from flax_layers.demo import data
    from flax_layers.models import Decoder, LayerConfig, ModelConfig
    from flax_layers.train.loop import Plan, Progress, Run
    from flax_layers.train.optimizer import Recipe
    from flax_layers.train.trainer import Trainer

    config = ModelConfig(
        vocabulary=256,
        width=sizes.width,
        mlp_width=4 * sizes.width,
        num_heads=sizes.heads,
        num_kv_heads=sizes.kv_heads,
        head_dim=sizes.width // sizes.heads,
        layers=(LayerConfig(),) * sizes.layers,
        max_positions=sizes.trained,
        initializer_range=sizes.width**-0.5,
    )
    recipe = Recipe(sizes.steps, 2e-3, final_share=0.05, weight_decay=0.05, b2=0.98)
    trainer = Trainer(Decoder(config, rngs=nnx.Rngs(0)), recipe)
    batches = data.packed_rows(list(texts), sizes.rows, sizes.trained, seed=0)
    with tqdm(total=sizes.steps, unit="step", disable=None) as bar:

        def on_step(progress: Progress) -> None:
            bar.update()

        Run(trainer, lambda step: next(batches), Plan(sizes.steps), on_step=on_step).finish()
    return trainer.model()


def _long_texts(files: Sequence[np.ndarray], sizes: Sizes) -> np.ndarray:
    """Texts [texts, length + 1]: held-out files, the longest first, one after the other."""
    whole = np.concatenate(sorted(files, key=len, reverse=True))
    return whole[: sizes.texts * (sizes.length + 1)].reshape(sizes.texts, -1).astype(np.int32)


def read(model: Decoder, texts: np.ndarray, policy: Streaming | None, chunk: int = 5 * _PAGE) -> tuple[np.ndarray, int]:
    """Reads texts side by side from a paged cache.

    Args:
      model: What reads.
      texts: Of equal lengths, [texts, length + 1].
      policy: Sinks and window; None: all that was read is attended to.
      chunk: Bytes of each text in a call.

    Returns:
      The loss of each byte but the first, and the pages that a text holds at most.
    """
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from jflex.paged import PagedBatch

    rows, length = texts.shape[0], texts.shape[1] - 1
    sinks, window = (0, length) if policy is None else (-(-policy.sinks // _PAGE), policy.window)
    most = min(-(-length // _PAGE), sinks + -(-(window + chunk - 2) // _PAGE) + 1)
    free = [list(range(1 + row * most, 1 + (row + 1) * most)) for row in range(rows)]
    tables: list[list[int]] = [[] for _ in range(rows)]
    cache, dropped, losses = model.init_paged_cache(1 + rows * most, _PAGE), 0, []

    def step(model: Decoder, tokens: Any, targets: Any, cache: Any, batch: PagedBatch) -> Any:
        logits, cache = model.decode_paged(tokens.ravel(), cache, batch, policy)
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), targets.ravel()[:, None], 1)[:, 0], cache

    compiled = nnx.jit(step, donate_argnames="cache")
    for begin in range(0, length, chunk):
        end = min(begin + chunk, length)
        unseen = max(sinks, (begin - dropped - window + 1) // _PAGE)
        dropped += (unseen - sinks) * _PAGE
        for table, pages in zip(tables, free, strict=True):
            pages += table[sinks:unseen]
            del table[sinks:unseen]
            table += [pages.pop(0) for _ in range(-(-(end - dropped) // _PAGE) - len(table))]
        padded = jnp.array([table + [0] * (most - len(table)) for table in tables], jnp.int32)
        batch = PagedBatch(
            jnp.arange(rows + 1, dtype=jnp.int32) * (end - begin), jnp.full(rows, end - dropped, jnp.int32), padded
        )
        tokens, targets = texts[:, begin:end], texts[:, begin + 1 : end + 1]
        found, cache = compiled(model, tokens, targets, cache, batch)
        losses.append(np.asarray(found).reshape(rows, -1))
    return np.concatenate(losses, axis=1), most


def draw(records: Sequence[Record], path: pathlib.Path) -> None:
    """Draws the loss by position, of each policy.

    Args:
      records: From `streaming`.
      path: The PNG to write.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axis = figure.subplots()
    lines: dict[str, list[tuple[int, float]]] = {}
    for record in records:
        policy, found, places = record.name.partition(": bytes ")
        if found:
            lines.setdefault(policy, []).append((int(places.split()[-1]), record.value.median))
    for (policy, points), style in zip(lines.items(), ("o-", "s--", "^-"), strict=False):
        axis.plot(*zip(*points, strict=True), style, ms=4, label=policy)
    axis.set(xscale="log", xlabel="position, the end of each range", ylabel="nats per byte")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def main(words: Sequence[str] | None = None) -> None:
    """The command: trains, reads, writes `streaming.json` and draws `streaming_by_position.png`."""
    form = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m benchmarks streaming", formatter_class=form)
    for name, default in Sizes()._asdict().items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--out", type=pathlib.Path, metavar="DIR", help="default: benchmarks/results/<device>")
    options = parser.parse_args(words)
    sizes = Sizes(*(getattr(options, name) for name in Sizes._fields))
    records, remarks = streaming(sizes)
    machine = gpu_facts()
    folder = options.out or schema.FOLDER / results_folder(machine.get("device", "cpu"))
    about = {"title": _TITLE.format(**sizes._asdict()), "machine": machine, "remarks": remarks}
    path = schema.write(folder / "streaming.json", records, about)
    draw(records, path.with_name("streaming_by_position.png"))
    print("\n".join([f"{path}:", *(f"{x.name}: {x.value.median:g} {x.unit}" for x in records), *remarks]), flush=True)


if __name__ == "__main__":
    main()

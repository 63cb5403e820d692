"""`python -m flax_layers.demo`: trains a language model on the standard library and shows what it learned."""

import argparse
import itertools
import pathlib
import time

import jax
from flax import nnx

from flax_layers.demo import data
from flax_layers.demo.model import ByteDecoder, Sizes, document_mask, save_model
from flax_layers.generate import Sampling, generate
from flax_layers.generate.sequences import KINDS
from flax_layers.models import Decoder
from flax_layers.models.checkpoint.optional import check_installed
from flax_layers.train.errors import run_command
from flax_layers.train.log import draw_losses
from flax_layers.train.loop import Plan, Progress, Run
from flax_layers.train.optimizer import Recipe
from flax_layers.train.trainer import Trainer

HELD_OUT_BATCHES = 16
PROMPTS = (b"def ", b"import ")
SAMPLE_LENGTH = 192


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line, or `arguments` in its place; returns the options by name."""
    parser = argparse.ArgumentParser(
        prog="python -m flax_layers.demo",
        description="Trains a byte-level decoder on the Python standard library, packed as documents of different "
        "lengths, with a BlockMask built in every step and learnable ALiBi slopes in the score_mod.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--implementation", help="jflex implementation; None: the first that can run here")
    add("--steps", type=int, default=200, help="training steps")
    add("--rows", type=int, default=4, help="rows in a batch")
    add("--length", type=int, default=1024, help="bytes in a row")
    add("--width", type=int, default=128, help="features of the residual stream")
    add("--layers", type=int, default=4, help="layers of the decoder")
    add("--heads", type=int, default=4, help="query heads")
    add("--kv-heads", type=int, default=2, help="key and value heads")
    add("--learning-rate", type=float, default=3e-3, help="peak learning rate")
    add("--cache", choices=list(KINDS), default="dense", help="KV cache of the sample")
    add("--temperature", type=float, default=0.7, help="sampling temperature; 0: the most probable bytes")
    add("--seed", type=int, default=0, help="random seed of the weights, the batches and the sample")
    add("--output", type=pathlib.Path, default=pathlib.Path("demo_output"), help="folder of the PNGs")
    return parser.parse_args(arguments)


def create_trainer(model: ByteDecoder, learning_rate: float, steps: int) -> Trainer:
    """The trainer of `flax_layers.train`, set up for a small model and a short run of so many steps in all."""
    return Trainer(model, Recipe(steps, learning_rate, final_share=0.05, weight_decay=0.05, b2=0.98))


def fit(trainer: Trainer, texts: list[data.Text], options: argparse.Namespace) -> list[tuple[int, float]]:
    """Trains with a progress bar; returns each step and its loss."""
    from tqdm import tqdm

    batches = data.packed_rows(texts, options.rows, options.length, options.seed)
    losses = []
    with tqdm(total=options.steps, unit="step", dynamic_ncols=True) as bar:

        def on_step(progress: Progress) -> None:
            losses.append((progress.step, progress.loss))
            speed = progress.tokens_per_second or 0
            bar.set_postfix_str(f"loss {progress.loss:.2f} nats/byte, {speed:,.0f} tokens/s", refresh=False)
            bar.update()

        Run(trainer, lambda step: next(batches), Plan(options.steps), on_step=on_step).finish()
    return losses


def write_samples(model: Decoder, options: argparse.Namespace) -> None:
    """Prints what the model writes behind each prompt, and how fast."""
    generation = generate(
        model,
        [list(prompt) for prompt in PROMPTS],
        max_tokens=min(SAMPLE_LENGTH, options.length),
        sampling=Sampling(options.temperature, seed=options.seed),
        cache=options.cache,
    )
    for prompt, result in zip(PROMPTS, generation.results(), strict=True):
        print(f"\nThe model writes:\n{(prompt + bytes(result.tokens)).decode(errors='replace')}")
    speed = generation.speed
    print(f"\n{speed.rows} texts at once, {speed.decode_rate:,.0f} bytes/s from the {options.cache} cache\n")


def main(arguments: list[str] | None = None) -> float:
    """Runs the demo; returns the loss on the held-out files, nats per byte. Raises Interrupted after a signal."""
    started = time.perf_counter()
    options = parse_options(arguments)
    check_installed("matplotlib", "tqdm", extra="demo")
    corpus = data.read_corpus()
    batches = data.packed_rows(corpus.held_out, options.rows, options.length, options.seed + 1)
    held_out = list(itertools.islice(batches, HELD_OUT_BATCHES))
    print(
        f"{jax.devices()[0].device_kind}; {len(corpus.training)} files to train on, {len(corpus.held_out)} held out, "
        f"{sum(map(len, corpus.training)) / 1e6:.1f} and {sum(map(len, corpus.held_out)) / 1e6:.1f} MB"
    )
    block_mask = document_mask(held_out[0].document_ids)
    print(f"The block mask of one batch:\n{block_mask}\n")

    sizes = Sizes(options.width, options.layers, options.heads, options.kv_heads)
    model = ByteDecoder(sizes, options.implementation, rngs=nnx.Rngs(options.seed))
    trainer = create_trainer(model, options.learning_rate, options.steps)
    losses = fit(trainer, corpus.training, options)
    held_out_loss = trainer.mean_loss(held_out)
    unigram_loss = data.unigram_loss(corpus.training, held_out)

    write_samples(trainer.model(), options)
    options.output.mkdir(parents=True, exist_ok=True)
    save_model(options.output / "model.npz", trainer.model(), sizes)
    levels = {"held-out files": held_out_loss, "unigram model, held-out files": unigram_loss}
    title = "Byte-level decoder on the Python standard library"
    draw_losses(options.output / "loss.png", losses, levels=levels, title=title, unit="nats per byte")
    first = slice(0, 1024)  # the elements of the beginning of the first row
    block_mask.to_image(batch=0, head=0, zoom=(first, first)).savefig(options.output / "mask.png", dpi=150)
    print(
        f"Held-out loss {held_out_loss:.3f} nats/byte; a unigram model of the same files has {unigram_loss:.3f}. "
        f"{time.perf_counter() - started:.0f} s in all. Pictures: {options.output}/loss.png, {options.output}/mask.png"
    )
    return held_out_loss


if __name__ == "__main__":
    run_command(main)

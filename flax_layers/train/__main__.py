"""`python -m flax_layers.train`: trains a decoder; see `--help`."""

import argparse
import sys
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from flax.typing import Dtype

from flax_layers.models import ModelConfig, save_pretrained
from flax_layers.models.checkpoint.optional import check_installed
from flax_layers.models.checkpoint.tokenizer import byte_level_json
from flax_layers.train import data, setup
from flax_layers.train.dataset.corpus import Batches, Rows
from flax_layers.train.errors import InputError, run_command, saving
from flax_layers.train.log import Log, draw_losses, tensorboard_hook
from flax_layers.train.loop import Plan, Progress, Run
from flax_layers.train.memory import step_memory
from flax_layers.train.options import parse_options
from flax_layers.train.trainer import Trainer

if TYPE_CHECKING:
    from flax_layers.train.checkpoints import Checkpoints


def main(arguments: list[str] | None = None) -> float | None:
    """Trains; returns the last held-out loss, nats per token, or None if nothing is held out.

    Raises:
        InputError: An option or its data is wrong.
        CheckpointError: The folder to begin with is no checkpoint that can be read.
        LossError: The loss is no longer a number.
        SaveError: A checkpoint, the log or a result could not be written.
        Interrupted: By a signal, after a checkpoint.
        ModuleNotFoundError: A package of the extra `train` is missing.
    """
    from flax_layers.train.checkpoints import Checkpoints

    options = parse_options(arguments)
    check_installed("grain", "matplotlib", "tqdm", *["tensorboardX"] * bool(options.log_dir), extra="train")
    config, score_mod = setup.model_config(options)
    mesh, recipe = setup.create_mesh(options, config), setup.make_recipe(options)
    peak = setup.all_peak_flops(options.peak_flops, mesh)
    export_dtype = setup.export_dtype(options)  # now: `--export` may replace `--model`
    config, batches, held_out = _read_data(options, config)
    model, others = setup.description(options, recipe, config, batches)
    with Checkpoints(
        options.output / "checkpoints",
        model | others,
        options.keep,
        changeable=others,
        accept_changes=options.accept_changes,
    ) as checkpoints:
        _check_resumed(options, checkpoints)
        trainer, make_model = setup.make_trainer(options, recipe, config, score_mod, mesh)
        _introduce(options, trainer, batches)
        if checkpoints.latest() is None:
            trainer.begin(make_model())
        else:
            trainer.state = checkpoints.restore(trainer.state)
        path = options.output / "log.jsonl"
        with saving(path, checkpoints.last_good):
            log = Log(path, int(trainer.state.step))
        plan = Plan(options.steps, options.save_every, options.evaluate_every, peak)
        hooks = [tensorboard_hook(options.log_dir, int(trainer.state.step))] if options.log_dir else []
        _fit(Run(trainer, batches.at, plan, held_out, checkpoints, log, hooks=hooks))
        return _finish(options, trainer, log, checkpoints, export_dtype)


def _read_data(options: argparse.Namespace, config: ModelConfig) -> tuple[ModelConfig, Batches, list[Rows]]:
    """The model with its end token, the batches to train on, and the held-out batches."""
    encoder = data.make_encoder(options, config)
    end = data.document_end(options, config, encoder)
    print(end.text)
    return setup.with_end_token(config, end.token), *data.make_batches(options, config, encoder, end.token)


def _check_resumed(options: argparse.Namespace, checkpoints: "Checkpoints") -> None:
    """Raises if the newest checkpoint belongs to another run, and says where this run resumes."""
    changes, step = checkpoints.check(), checkpoints.latest()
    if step is None:
        return
    if options.steps < step:
        raise InputError(
            f"`--steps` must be at least the steps of the last checkpoint, {checkpoints.folder}/{step}. Got "
            f"{options.steps}. Take more steps, or another `--output`."
        )
    print("\n  ".join([f"Resuming from step {step}, {checkpoints.folder}/{step}", *changes]))


def _introduce(options: argparse.Namespace, trainer: Trainer, batches: Batches) -> None:
    """Prints what is trained, where, on what, and the memory that it takes. Raises InputError if it does not fit."""
    sizes = {path: value.size for path, value in trainer.state.parameters.items()}
    trained, corpus = sum(sizes[path] for path in trainer.trained), batches.corpus
    print(
        f"{sum(sizes.values()) / 1e6:,.1f} M parameters, {trained / 1e6:,.1f} M of them trained, {options.dtype}, on "
        f"{trainer.mesh.size} of {jax.device_count()} devices ({jax.devices()[0].device_kind}); "
        f"{len(batches.rows):,} rows of {options.length} tokens to train on"
    )
    if corpus.weights:
        print(f"{sum(map(np.count_nonzero, corpus.weights)) / corpus.size:.1%} of the tokens are trained")
    memory = step_memory(trainer, options.batch, options.length, has_weights=bool(corpus.weights))
    print(f"Memory: {memory}")
    memory.check()


def _fit(run: Run) -> None:
    """Takes the steps under a progress bar."""
    from tqdm import tqdm

    start = int(run.trainer.state.step)
    with tqdm(total=run.plan.steps, initial=start, unit="step", dynamic_ncols=True) as bar:

        def on_step(progress: Progress) -> None:
            bar.set_postfix_str(_in_words(progress), refresh=False)
            bar.update()

        run.on_step = on_step
        run.on_evaluation = lambda step, loss: bar.write(f"step {step}: held-out loss {loss:.4f}", file=sys.stdout)
        run.finish()


def _in_words(progress: Progress) -> str:
    words = f"loss {progress.loss:.3f}"
    if progress.tokens_per_second is not None:
        words += f", {progress.tokens_per_second:,.0f} tokens/s"
    if progress.utilization is not None:
        words += f", {progress.utilization:.1%} of peak FLOP/s"
    return words


def _finish(
    options: argparse.Namespace, trainer: Trainer, log: Log, checkpoints: "Checkpoints", export_dtype: Dtype
) -> float | None:
    """Draws the losses and writes the model."""
    held_out, picture = log.curve("held_out_loss"), options.output / "loss.png"
    written = f"{options.output}/checkpoints, {log.path}, {picture}"
    with saving(picture, checkpoints.last_good):
        draw_losses(picture, log.curve("loss"), held_out)
    if options.export is not None:
        with saving(options.export, checkpoints.last_good):
            source = setup.export_source(options)
            if options.tokenizer == "bytes":
                (options.output / "tokenizer.json").write_text(byte_level_json(), encoding="utf-8")
            save_pretrained(trainer.model(), options.export, source=source, dtype=export_dtype)
        written += f", {options.export} in {jnp.dtype(export_dtype).name}"
    loss = held_out[-1][1] if held_out else None
    print(f"Held-out loss {loss:.4f} nats per token. " if loss is not None else "", end="")
    print(f"Written: {written}")
    return loss


if __name__ == "__main__":
    run_command(main)

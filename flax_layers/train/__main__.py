"""`python -m flax_layers.train`: trains a decoder; see `--help`."""

import argparse
import sys

import jax

from flax_layers.models import save_pretrained
from flax_layers.models.optional import check_installed
from flax_layers.train import data, setup
from flax_layers.train.command import run_command
from flax_layers.train.log import Log
from flax_layers.train.loop import Plan, Progress, Run
from flax_layers.train.options import parse_options
from flax_layers.train.pictures import draw_losses
from flax_layers.train.trainer import Trainer


def main(arguments: list[str] | None = None) -> float | None:
    """Trains.

    Args:
        arguments: Instead of the command line's.

    Returns:
        The held-out loss in the end, nats per token; None if nothing is held out.

    Raises:
        InputError: An option or its data is wrong.
        CheckpointError: The folder to begin with is no checkpoint that can be read.
        LossError: The loss is no longer a number.
        SaveError: A checkpoint could not be written.
        Interrupted: By a signal, after a checkpoint.
        ModuleNotFoundError: A package of the extra `train` is missing.
    """
    from flax_layers.train.checkpoints import Checkpoints

    options = parse_options(arguments)
    check_installed("matplotlib", "tqdm", extra="train")
    config, score_mod = setup.model_config(options)
    mesh = setup.check(options, config)
    encoder = data.make_encoder(options, config)
    end = data.document_end(options, config, encoder)
    config = setup.with_end_token(config, end.token)
    print(end.text)
    batches, held_out = data.make_batches(options, config, encoder, end.token)
    trainer = setup.make_trainer(options, config, score_mod, mesh)
    size = sum(value.size for value in trainer.state.parameters.values())
    print(
        f"{size / 1e6:,.1f} M parameters, {options.dtype}, on {mesh.size} of {jax.device_count()} devices "
        f"({jax.devices()[0].device_kind}); {len(batches.rows):,} rows of {options.length} tokens to train on"
    )
    about = setup.description(options, config, batches)
    with Checkpoints(options.output / "checkpoints", about, options.keep) as checkpoints:
        if checkpoints.latest() is not None:
            trainer.state = checkpoints.restore(trainer.release_state())
            print(f"Goes on from step {checkpoints.latest()}, {checkpoints.folder}/{checkpoints.latest()}")
        log = Log(options.output / "log.jsonl", int(trainer.state.step))
        plan = Plan(
            options.steps, options.save_every, options.evaluate_every, setup.all_peak_flops(options.peak_flops, mesh)
        )
        _fit(Run(trainer, batches.at, plan, held_out, checkpoints, log))
    return _finish(options, trainer, log)


def _fit(run: Run) -> None:
    """Takes the steps under a progress bar."""
    from tqdm import tqdm

    start = int(run.trainer.state.step)
    with tqdm(total=run.plan.steps, initial=start, unit="step", dynamic_ncols=True) as bar:

        def seen(progress: Progress) -> None:
            bar.set_postfix_str(_in_words(progress), refresh=False)
            bar.update()

        run.seen = seen
        run.evaluated = lambda step, loss: bar.write(f"step {step}: held-out loss {loss:.4f}", file=sys.stdout)
        run.finish()


def _in_words(progress: Progress) -> str:
    words = f"loss {progress.loss:.3f}"
    if progress.tokens_per_second is not None:
        words += f", {progress.tokens_per_second:,.0f} tokens/s"
    if progress.utilisation is not None:
        words += f", {progress.utilisation:.1%} of peak FLOP/s"
    return words


def _finish(options: argparse.Namespace, trainer: Trainer, log: Log) -> float | None:
    """Draws the losses and writes the model."""
    training, held_out = log.curve("loss"), log.curve("held_out_loss")
    draw_losses(options.output / "loss.png", training, held_out)
    written = f"{options.output}/checkpoints, {log.path}, {options.output}/loss.png"
    if options.export is not None:
        save_pretrained(trainer.model(), options.export, source=setup.export_source(options))
        written += f", {options.export}"
    loss = held_out[-1][1] if held_out else None
    print(f"Held-out loss {loss:.4f} nats per token. " if loss is not None else "", end="")
    print(f"Written: {written}")
    return loss


if __name__ == "__main__":
    run_command(main)

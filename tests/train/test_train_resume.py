"""What a resumed run must share with its checkpoint. `tests/train/test_train_runs.py` trains."""

import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from flax_layers.train import InputError, Run, SaveError, make_mesh, parse_mesh
from flax_layers.train import __main__ as train
from flax_layers.train.trainer import State

ARGUMENTS = (  # noqa: SIM905
    "--tokenizer=bytes --sizes=width=16,mlp_width=32,num_heads=4,num_kv_heads=2,head_dim=8,layers=1,max_positions=64 "
    "--length=32 --batch=8 --steps=6 --learning-rate=0.01 --implementation=xla"
).split(" ")


class StillTrainer:
    """A trainer that does not train."""

    mesh = make_mesh(parse_mesh("data=1"))

    def __init__(self):
        self.state = State(jnp.int32(6), {"weight": jnp.zeros(2)}, {})

    def begin(self, model: None) -> None:
        pass


def save(run: Run) -> None:
    assert run.checkpoints is not None
    run.checkpoints.save(run.plan.steps, run.trainer.state)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the command without training: it compares, restores and saves."""
    monkeypatch.setattr(train.setup, "make_trainer", lambda *_: (StillTrainer(), lambda: None))
    monkeypatch.setattr(train, "_introduce", lambda *_: None)
    monkeypatch.setattr(train, "_fit", save)
    monkeypatch.setattr(train, "_finish", lambda *_: None)
    write_text(tmp_path / "text")
    return lambda *changes: train.main([*ARGUMENTS, f"--data={tmp_path}/text", f"--output={tmp_path}/out", *changes])


def write_text(path: pathlib.Path, seed: int = 0) -> None:
    path.write_bytes(np.random.default_rng(seed).integers(97, 123, 32 * 80, np.uint8).tobytes())


@pytest.mark.full
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--learning-rate=0.02"], r"--learning-rate: 0\.01 in the checkpoint, 0\.02 in this run"),
        (["--warmup=2"], "--warmup: 1 in the checkpoint, 2 in this run"),
        (["--final-share=0.5"], r"--final-share: 0\.1 in the checkpoint, 0\.5 in this run"),
        (["--weight-decay=0"], r"--weight-decay: 0\.1 in the checkpoint, 0\.0 in this run"),
        (["--clip=2"], r"--clip: 1\.0 in the checkpoint, 2\.0 in this run"),
        (["--dtype=float32"], "--dtype: 'bfloat16' in the checkpoint, 'float32' in this run"),
        (["--end-token=97"], "--end-token: None in the checkpoint, 97 in this run"),
        (["--batch=4"], "--batch: 8 in the checkpoint, 4 in this run"),
        (["--length=16"], "--length: 32 in the checkpoint, 16 in this run"),
        (["--seed=1"], "--seed: 0 in the checkpoint, 1 in this run"),
        (["--held-out-share=0.5"], "rows to train on: 79 in the checkpoint, 40 in this run"),
        (["--seed=1", "--clip=2"], r"--seed: 0 in the .*\n  --clip: 1\.0 in the"),
        (
            ["--steps=9"],
            r"--schedule-steps: 6 in the checkpoint, 9 in this run\n.* `--schedule-steps 6` keeps the schedule of that",
        ),
    ],
)
def test_what_decides_the_losses_must_be_the_same(run, changes: list[str], message: str):
    run()
    with pytest.raises(InputError, match=rf"(?s)`--output` holds a checkpoint of another run, .*{message}") as refused:
        run(*changes)
    assert (
        "\nUse the options of that run, or another `--output`. `--accept-changes` resumes with the options and data of "
        "this run." in str(refused.value)
    )


def test_changed_data_of_the_same_size_are_refused(run, tmp_path):
    run()
    write_text(tmp_path / "text", seed=1)
    with pytest.raises(
        InputError, match=r"fingerprint of --data: '\w{32}' in the checkpoint, '\w{32}' in this run\nUse"
    ):
        run()


@pytest.mark.parametrize(
    ("first", "changes"),
    [
        ([], ["--steps=9", "--schedule-steps=6"]),
        (["--schedule-steps=9"], ["--steps=9"]),
        (["--final-share=1"], ["--final-share=1", "--steps=9"]),
        ([], ["--mesh=data=2", "--accumulate=2", "--remat=blocks", "--loss-chunk=64", "--save-every=1", "--keep=1"]),
    ],
)
def test_what_does_not_decide_the_losses_may_change(run, capsys, first: list[str], changes: list[str]):
    run(*first)
    run(*changes)
    printed = capsys.readouterr().out
    assert "Resuming from step 6, " in printed
    assert "in the checkpoint" not in printed


def test_accepted_changes_are_printed_and_saved(run, capsys):
    run()
    changes = ["--learning-rate=0.02", "--steps=9"]
    run(*changes, "--accept-changes")
    printed = capsys.readouterr().out
    assert "\n  --learning-rate: 0.01 in the checkpoint, 0.02 in this run\n  --schedule-steps: 6 in the" in printed
    run(*changes)  # the checkpoint of step 9 has them


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["width=24"], r"model\.width: 16 in the checkpoint, 24 in this run\n  --seed: 0 in"),
        (
            ["layers=5"],
            r"model\.layers: 1 in the .*, 5 .*\n  attention of each layer: \[{.*}\] in .*, \[{.*\.\.\. in this",
        ),
    ],
)
def test_another_model_is_refused_all_the_same(run, changes: list[str], message: str):
    run()
    sizes = ",".join([ARGUMENTS[1], *changes])
    with pytest.raises(InputError, match=rf"(?s){message}.*\nUse the options of that run, or another `--output`\.$"):
        run(sizes, "--seed=1", "--accept-changes")
    with pytest.raises(InputError, match="--bias: None in the checkpoint, 'alibi' in this run"):
        run("--bias=alibi", "--accept-changes")


def test_fewer_steps_than_were_taken_are_refused(run):
    run()
    with pytest.raises(
        InputError, match=r"`--steps` must be at least the steps of the last checkpoint, .*/6\. Got 5\. Take more"
    ):
        run("--steps=5", "--schedule-steps=6")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("--clip", r"--clip: not recorded in the checkpoint, 1\.0 in this run"),
        ("learning rate of the first step", r"first step: not recorded in the checkpoint, 0\.01 in this run"),
        ("order of rows", "order of rows: not recorded in the checkpoint, 'grain' in this run"),
    ],
)
def test_a_checkpoint_that_lacks_an_entry_is_refused(run, monkeypatch, entry: str, message: str):
    """As of versions whose warm-up began with a learning rate of 0, or that ordered rows otherwise."""
    description: Any = train.setup.description

    def shorter(*arguments):
        model, others = description(*arguments)
        return model, {name: value for name, value in others.items() if name != entry}

    with monkeypatch.context() as patch:
        patch.setattr(train.setup, "description", shorter)
        run()
    with pytest.raises(InputError, match=message):
        run()


def test_a_log_that_cannot_begin_is_one_clear_error(run, tmp_path):
    (tmp_path / "out" / "log.jsonl").mkdir(parents=True)
    with pytest.raises(
        SaveError, match=r"log\.jsonl could not be written: Is a directory\. There is no checkpoint\. Make"
    ):
        run()

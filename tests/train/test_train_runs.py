"""Whole runs: they resume exactly, and end with one clear message."""

import json
import pathlib
import re
import signal
import subprocess
import sys
import types
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorboardX
from flax import nnx
from tensorboardX.proto import event_pb2

from flax_layers.models import CheckpointError, Decoder, Tokenizer, from_pretrained
from flax_layers.train import InputError, Interrupted, LossError, Plan, Recipe, Rows, Run, SaveError, Trainer
from flax_layers.train.__main__ import main
from flax_layers.train.checkpoints import Checkpoints
from flax_layers.train.log import Log, tensorboard_hook
from flax_layers.train.options import parse_options
from flax_layers.train.trainer import flat_parameters
from tests.cases import train_cases
from tests.support.golden_models import ROOT
from tests.support.rows import tiers
from tests.train.test_train_resume import ARGUMENTS, write_text

SMALL = [*ARGUMENTS, "--dtype=float32", "--save-every=2", "--evaluate-every=3"]


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    write_text(path)
    return path


def losses_of(folder: pathlib.Path, steps: int = 6) -> dict[int, float]:
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, steps + 1))
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


@pytest.fixture(scope="module")
def undisturbed(text, tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    loss = main([*SMALL, f"--data={text}", f"--output={folder}"])
    assert loss is not None
    assert 2 < loss < 6
    return folder


@pytest.mark.full
def test_a_run_writes_its_losses_and_pictures(undisturbed):
    losses = losses_of(undisturbed)
    assert losses[6] < losses[1]
    lines = [json.loads(line) for line in (undisturbed / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "held_out_loss" in line] == [3, 6]
    assert lines[2]["tokens_per_second"] > 0
    assert (undisturbed / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in (undisturbed / "checkpoints").iterdir()) == ["4", "6"]


def by_signal(patch, number: int, step: int = 3) -> str:
    """Sends a signal once the progress of a step is known."""
    finish = Run.finish

    def changed(self):
        on_step = self.on_step

        def also_interrupt(progress):
            on_step(progress)
            if progress.step == step:
                signal.raise_signal(number)

        self.on_step = also_interrupt
        finish(self)

    patch.setattr(Run, "finish", changed)
    return rf"{signal.Signals(number).name} ended the run after step 3 of 6. The last good .* step 3"


def by_failure(patch, step: int) -> str:
    """As of a machine that fails after the last checkpoint: the log is cut back to it."""
    report = Run._report

    def fail(self, number, *args):
        report(self, number, *args)
        if number == step:
            raise MemoryError("broken")

    patch.setattr(Run, "_report", fail)
    return "broken"


@tiers(full={"name": ["SIGINT", "failure"]}, rest="long")
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "failure", "fewer steps"])
def test_a_run_that_stopped_goes_on_with_the_same_losses(name, text, undisturbed, tmp_path, monkeypatch, capsys):
    arguments = [*SMALL, f"--data={text}", f"--output={tmp_path}", "--schedule-steps=6"]
    handlers = [signal.getsignal(x) for x in (signal.SIGINT, signal.SIGTERM)]
    if name == "fewer steps":
        main([*arguments, "--steps=4"])
    else:
        with monkeypatch.context() as patch:
            message = by_failure(patch, 5) if name == "failure" else by_signal(patch, signal.Signals[name])
            with pytest.raises((Interrupted, MemoryError), match=message):
                main(arguments)
    assert [signal.getsignal(x) for x in (signal.SIGINT, signal.SIGTERM)] == handlers
    main(arguments)
    assert f"Resuming from step {3 if name.startswith('SIG') else 4}" in capsys.readouterr().out
    assert losses_of(tmp_path) == losses_of(undisturbed)  # to the last bit


def small_run(folder: pathlib.Path, **changes) -> Any:
    trainer = train_cases.trainer()
    checkpoints = Checkpoints(folder / "checkpoints", {"model": "small"})
    changes = {"batch_at": train_cases.batch, "plan": Plan(6, save_every=2), **changes}
    return Run(trainer, checkpoints=checkpoints, log=Log(folder / "log.jsonl"), **changes)


@pytest.mark.long
def test_a_full_disk_leaves_the_last_good_checkpoint(text, undisturbed, tmp_path):
    """In a process of its own: a failed save leaves coroutines of orbax, which would warn in whichever test follows."""
    arguments = [*SMALL, f"--data={text}", f"--output={tmp_path}", "--schedule-steps=6"]
    main([*arguments, "--steps=2"])
    train = [sys.executable, "-m", "flax_layers.train", *arguments, "--steps=6"]
    small_files = ["sh", "-c", 'ulimit -f 8 && exec "$@"', "sh"]  # no file may grow beyond a few kilobytes
    process = subprocess.run([*small_files, *train], capture_output=True, text=True, check=False)
    assert process.returncode == 1
    assert re.search(r"(?s)error: .*step 4 could not be written.*last good checkpoint is of step 2, ", process.stderr)
    # Threads of orbax may write on after the failure, into a folder that the next run removes.
    names = lambda: {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert names() - {"4.orbax-checkpoint-tmp"} == {"2"}
    main([*arguments, "--steps=6"])
    assert all(name.isdigit() for name in names())
    assert losses_of(tmp_path) == losses_of(undisturbed)


@pytest.mark.full
@pytest.mark.skipif(not pathlib.Path("/dev/full").exists(), reason="a Linux device that is always full")
def test_a_log_that_cannot_be_written_ends_the_run(tmp_path):
    def fill(progress):
        if progress.step == 3:
            run.log.path = pathlib.Path("/dev/full")

    run = small_run(tmp_path, on_step=fill)
    with pytest.raises(
        SaveError, match=r"/dev/full could not be .* The last good checkpoint is of step 2, .*/2\. Make"
    ):
        run.finish()


@pytest.mark.full
def test_a_loss_that_is_nan_ends_the_run(tmp_path):
    def batch_at(step):
        if step == 4:  # the fifth step computes with a parameter that is NaN
            parameters = run.trainer.state.parameters
            parameters["norm.scale"] = parameters["norm.scale"].at[0].set(np.nan)
        return train_cases.batch(step)

    run = small_run(tmp_path, batch_at=batch_at)
    with pytest.raises(LossError, match=r"The loss of step 5 is nan.*The last good checkpoint is of step 4, .*/4\. "):
        run.finish()
    assert run.checkpoints.latest() == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--length=65"], "`--length` must be at most the positions of the model, 64. Got 65. Take shorter rows"),
        (["--mesh=model=4"], r"must divide the heads of the model .* Got num_kv_heads=2 for 4 devices"),
        (["--mesh=data=3"], r"`--mesh` data=3,fsdp=1,model=1 must divide the rows"),
        (["--sizes=width=8,depth=2"], r"`--sizes` must be sizes of vocabulary, .* Got 'depth=2'"),
        (["--sizes=vocabulary=100"], "no more tokens than the model's vocabulary, 100. Got 256"),
        (["--model=somewhere"], "`--model` says all sizes. Leave out `--sizes` and `--bias`"),
        (["--mesh=model=2", "--sizes=vocabulary=257"], r"(?s)does not divide .*embed\.embedding \[257, "),
        (["--export-dtype=float16"], "`--export-dtype` needs `--export`, the folder to write. Got float16"),
        (["--train", "*.atention.*"], r"`--train` must match .* '\*\.atention\.\*' .*blocks\.\*\.attention\."),
        (["--peak-flops=many"], "`--peak-flops` must be a number, or `measure`. Got 'many'"),
    ],
)
def test_wrong_commands(text, tmp_path, changes: list[str], message: str):
    with pytest.raises(InputError, match=message):
        main([*SMALL, f"--data={text}", f"--output={tmp_path}", *changes])


@pytest.mark.full
def test_a_checkpoint_of_hugging_face_is_trained_on_and_written(tmp_path):
    source = pathlib.Path(__file__).parents[1] / "goldens" / "llama3"
    before = from_pretrained(source, param_dtype=jnp.float32)
    vocabulary = before.config.vocabulary
    np.save(tmp_path / "tokens.npy", np.random.default_rng(0).integers(0, vocabulary, 32 * 20))
    options = ["--length=32", "--batch=4", "--steps=3", "--learning-rate=0.01", "--dtype=float32"]
    more = [
        f"--model={source}",
        f"--data={tmp_path}/tokens.npy",
        f"--output={tmp_path}/out",
        f"--export={tmp_path}/new",
    ]
    main([*options, *more])
    first = losses_of(tmp_path / "out", steps=3)[1]
    rows = [Rows(row[None], np.zeros_like(row)[None]) for row in np.load(tmp_path / "tokens.npy").reshape(-1, 32)]
    untrained = Trainer(before, Recipe(steps=1)).mean_loss(rows)
    assert first == pytest.approx(untrained, rel=0.1)
    after = from_pretrained(tmp_path / "new")
    assert after.embed.embedding.dtype == jnp.bfloat16  # as it was
    change = np.abs(np.asarray(after.embed.embedding[...]) - np.asarray(from_pretrained(source).embed.embedding[...]))
    assert 1e-3 < change.max() < 0.1


class Events:
    """A stand-in for the writer of tensorboardX."""

    written: ClassVar[list[tuple]] = []

    def __init__(self, folder: str, purge_step: int):
        self.written.append((folder, purge_step))

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.written.append((name, value, step))


@pytest.mark.full
def test_tensorboard_reads_the_log(tmp_path, monkeypatch):
    writers, create = [], tensorboardX.SummaryWriter
    monkeypatch.setattr(
        tensorboardX, "SummaryWriter", lambda *args, **more: writers.append(create(*args, **more)) or writers[0]
    )
    tensorboard_hook(tmp_path, step=2)(3, {"loss": 0.5})
    writers[0].close()
    [path], events = tmp_path.glob("events.*"), []
    content = path.read_bytes()
    while content:  # a length of 8 bytes, a checksum of 4, the event, a checksum
        end = 12 + int.from_bytes(content[:8], "little")
        events.append(event_pb2.Event.FromString(content[12:end]))
        content = content[end + 4 :]
    assert [(x.step, value.tag, value.simple_value) for x in events for value in x.summary.value] == [(3, "loss", 0.5)]
    assert [x.step for x in events if x.session_log.status == event_pb2.SessionLog.START] == [3]  # hides later steps


@pytest.mark.long
def test_some_parameters_are_trained_on_answers(tmp_path, monkeypatch, capsys):
    """The run resumes with their moments alone, and exports the whole model; TensorBoard gets the log."""
    monkeypatch.setitem(sys.modules, "tensorboardX", types.SimpleNamespace(SummaryWriter=Events))
    chat = [{"role": "user", "content": "who?"}, {"role": "assistant", "content": "all you need is attention"}]
    (tmp_path / "a.jsonl").write_text(f"{json.dumps({'messages': chat})}\n" * 40)
    arguments = [*SMALL, f"--data={tmp_path}/a.jsonl", f"--tokenizer={ROOT}/tokenizer", "--schedule-steps=6"]
    arguments[1] += ",vocabulary=280"
    some = ["--train", "*.attention.*", "norm.*"]
    main([*arguments, f"--output={tmp_path}/whole", *some])
    more = [f"--output={tmp_path}/two", f"--export={tmp_path}/new", f"--log-dir={tmp_path}/events"]
    main([*arguments, *more, *some, "--steps=4"])
    with pytest.raises(InputError, match=r"--train: \['\*\.attention\.\*', 'norm\.\*'\] in .*, None in this"):
        main([*arguments, *more, "--accept-changes"])
    main([*arguments, *more, *some])
    assert losses_of(tmp_path / "two") == losses_of(tmp_path / "whole")
    printed = capsys.readouterr().out
    assert re.search(r"M of them trained, float32, .* rows of 32 tokens to train on\n\d+\.\d% of the tokens", printed)
    assert re.search(r"Memory: \d+\.\d MB on each device: parameters \d+\.\d MB, optimizer .*, activations ", printed)
    steps = [step for name, _, step in (x for x in Events.written if len(x) == 3) if name == "loss"]
    assert steps == [1, 2, 3, 4, 5, 6]
    assert [x[1] for x in Events.written if x[0] == f"{tmp_path}/events"] == [1, 5]
    assert ("held_out_loss", 6) in {(x[0], x[2]) for x in Events.written if len(x) == 3}
    exported = flat_parameters(nnx.state(from_pretrained(tmp_path / "new")))
    main([*arguments, f"--output={tmp_path}/none", f"--export={tmp_path}/first", "--learning-rate=1e-30", "--steps=1"])
    for path, value in flat_parameters(nnx.state(from_pretrained(tmp_path / "first"))).items():
        assert np.array_equal(value, exported[path]) == (".attention." not in path and path != "norm.scale"), path


@tiers(full={"dtype": "bfloat16"}, rest="long")
@pytest.mark.parametrize(("options", "dtype"), [([], "float32"), (["--export-dtype=bfloat16"], "bfloat16")])
def test_a_model_from_scratch_is_exported_in_float32_or_as_told(text, undisturbed, tmp_path, capsys, options, dtype):
    main([*SMALL, f"--data={text}", f"--output={undisturbed}", f"--export={tmp_path}/new", *options])
    assert from_pretrained(tmp_path / "new").embed.embedding.dtype == jnp.dtype(dtype)
    assert json.loads((tmp_path / "new" / "config.json").read_text())["torch_dtype"] == dtype
    tokenizer = Tokenizer(tmp_path / "new")
    assert tokenizer.encode("né").tolist() == [*"né".encode()]
    assert tokenizer.decode([*"né".encode()]) == "né"
    assert f"{tmp_path}/new in {dtype}\n" in capsys.readouterr().out


@pytest.mark.full
def test_a_checkpoint_of_another_shape_is_refused(tmp_path):
    source = pathlib.Path(__file__).parents[1] / "goldens" / "llama3"
    for path in source.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "config.json").unlink()
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": config["intermediate_size"] * 2}))
    np.save(tmp_path / "tokens.npy", np.zeros(32 * 20, int))
    with pytest.raises(CheckpointError, match=r"(?s)Nothing was loaded.*with another shape.*gate_proj"):
        main([f"--model={tmp_path}", f"--data={tmp_path}/tokens.npy", "--length=32", f"--output={tmp_path}/out"])


@pytest.mark.full
def test_an_export_that_cannot_be_written_is_refused_before_training(text, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    arguments = [*SMALL, f"--data={text}", f"--output={tmp_path}/out"]
    with pytest.raises(InputError, match="`--export` writes what `transformers` reads, which has no learned bias"):
        main([*arguments, "--bias=alibi", f"--export={tmp_path}/new"])
    with pytest.raises(CheckpointError, match=r"must be new, empty or a checkpoint.*holds thesis\.tex"):
        main([*arguments, f"--export={tmp_path}/full"])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("option", "value", "rule"),
    [
        *(
            (option, 0, "at least 1")
            for option in ("steps", "schedule-steps", "batch", "held-out-batches", "accumulate", "loss-chunk", "keep")
        ),
        *((option, -1, "at least 0") for option in ("warmup", "save-every", "evaluate-every")),
        *((option, -1.0, "at least 0") for option in ("final-share", "weight-decay")),
        *((option, 0.0, "more than 0") for option in ("learning-rate", "clip")),
        ("learning-rate", float("nan"), "more than 0"),
        ("held-out-share", 1.0, "at least 0 and less than 1"),
        ("length", 1, "at least 2, a token and the next"),
    ],
)
def test_wrong_numbers(option: str, value: float, rule: str, capsys):
    with pytest.raises(SystemExit):
        parse_options(["--data=x", f"--{option}={value}"])
    assert f"argument --{option}: must be {rule}, got {value}" in capsys.readouterr().err


@pytest.mark.full
def test_a_log_whose_last_line_is_cut_is_read(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    log = Log(path, step=2)
    log.write(step=2, loss=1.0)
    assert log.curve("loss") == [(1, 2.0), (2, 1.0)]


@pytest.mark.full
def test_parameters_of_a_narrow_dtype_are_refused():
    model = Decoder(train_cases.CONFIG, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    with pytest.raises(InputError, match=r"must have float32 parameters to train. Got bfloat16. Pass `param_dtype"):
        Trainer(model, Recipe(steps=1))


@pytest.mark.full
def test_a_mesh_without_an_axis_is_refused():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    with pytest.raises(InputError, match=r"`mesh` must have the axes data, fsdp, model. Got data. Make it with"):
        Trainer(train_cases.build(), Recipe(steps=1), mesh=mesh)

"""The trainer: meshes, accumulation and remat change nothing; what it holds and moves."""

import contextlib
import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_layers.train import Computation, InputError, Recipe, Rows, Trainer, create_model, make_mesh, parse_mesh
from flax_layers.train.flops import multiplied_parameters, peak_flops, step_flops, visible_pairs
from flax_layers.train.memory import Memory, step_memory
from flax_layers.train.optimizer import REMAT
from flax_layers.train.parallel import check_mesh
from tests.cases import train_cases
from tests.cases.train_cases import CONFIG, batch, counted_compilations
from tests.support.context_parallel_calls import NEEDS_EIGHT_DEVICES
from tests.support.rows import tiers

MESH = "data=2,fsdp=2,model=2"
pytestmark = NEEDS_EIGHT_DEVICES


def three_steps(trainer) -> tuple[list[float], list[float], float]:
    metrics = [trainer.step(batch(seed)) for seed in range(3)]
    norms = [float(step.gradient_norm) for step in metrics]
    return [float(step.loss) for step in metrics], norms, trainer.mean_loss([batch(9), batch(10)])


@pytest.fixture(scope="module")
def on_one_device():
    return three_steps(train_cases.trainer())


@tiers(full={"mesh": MESH}, rest="long")
@pytest.mark.parametrize("mesh", [MESH, "data=8", "data=4,model=2"])
def test_losses_on_every_mesh_are_those_of_one_device(mesh: str, on_one_device):
    trainer = train_cases.trainer(mesh)
    for found, expected in zip(three_steps(trainer), on_one_device, strict=True):
        np.testing.assert_allclose(found, expected, rtol=2e-5)
    sizes = parse_mesh(mesh)
    kernel = trainer.state.parameters["blocks.0.mlp.up.kernel"]
    assert kernel.addressable_shards[0].data.size == kernel.size // sizes["fsdp"] // sizes["model"]
    moments = trainer.state.optimizer[1][0].mu["blocks.0.mlp.up.kernel"]
    assert moments.sharding == kernel.sharding


@tiers(full={"inside": True}, rest="long")
@pytest.mark.parametrize("inside", [False, True])
def test_losses_on_the_mesh_of_make_mesh(inside, on_one_device, monkeypatch):
    """Its axes are explicit; outside and inside of `jax.set_mesh`."""
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "model"))
    monkeypatch.setattr(train_cases, "make_mesh", lambda sizes: mesh)
    with jax.set_mesh(mesh) if inside else contextlib.nullcontext():
        losses = three_steps(train_cases.trainer(MESH))
    for found, expected in zip(losses, on_one_device, strict=True):
        np.testing.assert_allclose(found, expected, rtol=2e-5)


@tiers(rest="full", share=3)
@pytest.mark.parametrize(
    ("mesh", "computation"),
    [
        ("data=2,model=2", Computation(accumulate=2, loss_chunk=16)),
        *(("data=1", Computation(remat=name)) for name in REMAT if name != "none"),
    ],
)
def test_how_a_step_is_computed_does_not_change_it(mesh: str, computation: Computation, on_one_device):
    for found, expected in zip(three_steps(train_cases.trainer(mesh, computation)), on_one_device, strict=True):
        np.testing.assert_allclose(found, expected, rtol=2e-5)


@pytest.mark.full
@pytest.mark.parametrize("accumulate", [1, 2])
def test_ids_of_one_document_may_be_left_out(accumulate: int):
    tokens, losses = batch().tokens, []
    for rows in (Rows(tokens, np.zeros_like(tokens)), Rows(tokens)):
        trainer = train_cases.trainer(computation=Computation(accumulate))
        trainer.compile(*tokens.shape, has_documents=rows.documents is not None)
        with counted_compilations() as compiled:
            losses.append([float(trainer.step(rows).loss)])
        assert not compiled
        losses[-1].append(trainer.mean_loss([rows]))
    np.testing.assert_allclose(*losses, rtol=2e-5)


@pytest.mark.full
def test_nothing_compiles_after_the_first_step():
    trainer = train_cases.trainer("data=2,model=2")
    float(trainer.step(batch(0)).loss)
    trainer.mean_loss([batch(0)])
    with counted_compilations() as compiled:
        metrics = [trainer.step(batch(seed)) for seed in range(1, 4)]
        trainer.mean_loss([batch(5)])
        jax.block_until_ready(metrics)
    assert not compiled


@tiers(full={"mesh": MESH}, rest="long")
@pytest.mark.parametrize("mesh", ["data=4,model=2", MESH])
def test_a_step_gathers_no_keys_and_computes_in_bfloat16(mesh: str):
    """Over rows and heads, attention needs nothing of another device; parameters are gathered over `fsdp` alone.

    The loss gathers maxima and sums of exponentials: of 32 tokens from two shards of the vocabulary.
    """
    trainer = train_cases.trainer(mesh, dtype=jnp.bfloat16)
    text = trainer.compile(*batch().tokens.shape).as_text()
    gathered = re.findall(r"= \(?(\w+\[[\d,]*\])\S*(?:, \S+\))? all-gather(?:-start)?\(", text)
    gathered = [shape for shape in gathered if not re.fullmatch(r"f32\[1,\d,32,2\]", shape)]
    assert not [shape for shape in gathered if shape.startswith(("f32", "bf16")) and shape.count(",") > 1], gathered
    if "fsdp" not in mesh:
        assert not [shape for shape in gathered if shape.startswith(("f32", "bf16"))], gathered
    assert "bf16" in text
    assert {leaf.dtype for leaf in trainer.state.parameters.values()} == {jnp.dtype("float32")}


@pytest.mark.full
def test_the_state_is_updated_in_place():
    trainer = train_cases.trainer()
    memory = trainer.compile(*batch().tokens.shape).memory_analysis()
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(trainer.state))
    assert memory.alias_size_in_bytes > 0.99 * held


ATTENTION = ("*.attention.*",)


@tiers(full={"mesh": "data=1"}, rest="long")
@pytest.mark.parametrize("mesh", ["data=1", MESH])
def test_parameters_that_are_not_trained_stay_and_take_no_memory(mesh: str):
    """The first gradient of the others is that of training all; clipping has no part in it."""
    whole, some = train_cases.trainer(mesh), train_cases.trainer(mesh, trained=ATTENTION)
    before = jax.tree.map(np.asarray, some.state.parameters)
    memory = [step_memory(x, 8, 32) for x in (whole, some)]
    moments = [x.state.optimizer[1][0].mu for x in (whole, some)]
    assert set(moments[1]) == some.trained == {x for x in moments[0] if ".attention." in x}
    assert sum(x.nbytes for x in jax.tree.leaves(some.state.optimizer)) < 0.5 * sum(
        x.nbytes for x in jax.tree.leaves(whole.state.optimizer)
    )
    assert memory[1].parameters == memory[0].parameters
    assert memory[1].total - memory[1].optimizer < memory[0].total - memory[0].optimizer - memory[1].gradients
    for x in (whole, some):
        assert float(x.step(batch()).loss) == pytest.approx(4.2, abs=0.2)
    after, moments = some.state.parameters, [x.state.optimizer[1][0].mu for x in (whole, some)]
    changed = {path for path, value in before.items() if np.any(value != after[path])}
    assert changed == some.trained
    scales = [np.linalg.norm([np.linalg.norm(x[path]) for path in some.trained]) for x in moments]
    for path in some.trained:  # Adam's first moment is the gradient, scaled
        np.testing.assert_allclose(moments[1][path] / scales[1], moments[0][path] / scales[0], atol=1e-5)


@pytest.mark.parametrize("pattern", ["*.atention.*", "blocks.0.attention.query"])
def test_a_pattern_that_matches_no_parameter(pattern: str):
    with pytest.raises(InputError, match=rf"'{re.escape(pattern)}' matches none. .*blocks\.\*\.attention\."):
        Trainer(nnx.eval_shape(train_cases.build), Recipe(1), trained=["*.mlp.*", pattern])
    one, several = (Trainer(nnx.eval_shape(train_cases.build), Recipe(1), trained=x) for x in ("*.mlp.*", ["*.mlp.*"]))
    assert one.trained == several.trained


@pytest.mark.full
@pytest.mark.parametrize(("mesh", "accumulate"), [("data=1", 1), (MESH, 2)])
def test_memory_is_known_before_anything_is_allocated(mesh: str, accumulate: int):
    """It is what XLA reports; and the program of the first step is compiled by then."""
    devices = make_mesh(parse_mesh(mesh))
    trainer = Trainer(nnx.eval_shape(train_cases.build), Recipe(9), Computation(accumulate), mesh=devices)
    memory = step_memory(trainer, 8, 32)
    assert not any(isinstance(x, jax.Array) for x in jax.tree.leaves(trainer.state))
    compiled = trainer.compile(8, 32).memory_analysis()
    trainer.begin(create_model(train_cases.build, devices))
    with counted_compilations() as programs:
        trainer.step(batch())
    assert not programs
    leaves = jax.tree.leaves((trainer.state.parameters, trainer.state.optimizer))
    held = sum(x.addressable_shards[0].data.nbytes for x in leaves)
    assert memory.parameters + memory.optimizer == held
    rows = 2 * batch().tokens.size * 4 // (devices.shape["data"] * devices.shape["fsdp"])
    assert compiled.argument_size_in_bytes == pytest.approx(held + rows, rel=0.01)
    assert memory.total == pytest.approx(held + rows + compiled.temp_size_in_bytes, rel=0.01)


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        (Memory(4 << 30, 8 << 30, 4 << 30, 1 << 30, 15 << 30), r"18\.25 GB of 16\.11 GB .*Shard the parameters"),
        (Memory(4 << 30, 8 << 30, 1 << 30, 4 << 30, 15 << 30), "18.*parameters 4.29 GB, .*Recompute more"),
        (Memory(1 << 20, 1 << 20, 1 << 20, 1 << 30, 1 << 30), ".*gradients 1.0 MB, activations .*Recompute"),
    ],
)
def test_a_run_that_does_not_fit_is_refused(memory: Memory, message: str):
    with pytest.raises(InputError, match=f"The run would not fit into memory: {message}"):
        memory.check()
    memory._replace(capacity=None).check()
    memory._replace(capacity=memory.total).check()


@pytest.mark.full
def test_flops_count_what_is_multiplied_and_seen():
    documents = np.array([[0, 0, 0, 1, 1, 2], [0, 0, 0, 0, 0, 0]])
    for window in (None, 2):
        same = documents[:, :, None] == documents[:, None, :]
        behind = np.arange(6)[:, None] - np.arange(6)
        seen = same & (behind >= 0) & (behind < (window or 6))
        assert visible_pairs(documents, window) == seen.sum()
    shapes = {path: value.shape for path, value in train_cases.trainer().state.parameters.items()}
    multiplied = multiplied_parameters(shapes, CONFIG)
    assert multiplied == 2 * (16 * 32 * 2 + 16 * 16 * 2 + 3 * 16 * 32) + 16 * 64
    frozen = multiplied_parameters(shapes, CONFIG, {path for path in shapes if ".mlp." not in path})
    assert frozen == pytest.approx(multiplied - 2 * 3 * 16 * 32 / 3)
    pairs = visible_pairs(documents, 12) + visible_pairs(documents)
    assert step_flops(CONFIG, multiplied, documents) == 6 * multiplied * 12 + 12 * 4 * 8 * pairs
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989e12


@pytest.mark.parametrize(
    ("mesh", "rows", "accumulate", "message"),
    [
        ("model=4", 8, 1, r"`--mesh` data=1,fsdp=1,model=4 must divide the heads .* Got num_kv_heads=2 for 4 devices"),
        (
            "data=4,fsdp=2",
            4,
            1,
            r"divide the rows .* = 8 devices. Got 4 rows, `--batch` 4 in 1 parts. Change `--batch`",
        ),
        ("data=4", 8, 4, r"Got 2 rows, `--batch` 8 in 4 parts"),
        ("data=2", 8, 3, r"`--accumulate` must divide the rows of a step, `--batch` 8. Got 3"),
    ],
)
def test_meshes_that_do_not_fit(mesh: str, rows: int, accumulate: int, message: str):
    with pytest.raises(InputError, match=message):
        check_mesh(make_mesh(parse_mesh(mesh)), CONFIG, rows, accumulate)


@pytest.mark.parametrize("text", ["data", "data=0", "rows=2", "data=-1", "data=2;model=2"])
def test_meshes_that_cannot_be_read(text: str):
    with pytest.raises(
        InputError, match=r"`--mesh` must be sizes of data, fsdp, context, model, as data=2,fsdp=1,model=4"
    ):
        parse_mesh(text)


def test_a_mesh_of_more_devices_than_there_are():
    with pytest.raises(InputError, match=r"`--mesh` data=64,fsdp=1,model=1 needs 64 devices. There are 8"):
        make_mesh(parse_mesh("data=64"))


@pytest.mark.full
def test_a_mesh_that_does_not_divide_a_parameter():
    config = dataclasses.replace(CONFIG, mlp_width=31, vocabulary=63)
    with pytest.raises(ValueError, match=r"(?s)does not divide .*blocks\.0\.mlp\.gate.*embed\.embedding"):
        train_cases.trainer("model=2,fsdp=4", config=config)


@pytest.mark.full
def test_rows_that_a_step_does_not_divide():
    trainer = train_cases.trainer("data=2", Computation(accumulate=2))
    with pytest.raises(InputError, match=r"`rows` must be a multiple of .*, 2, times .*, 2\. Got 6\. Change the batch"):
        trainer.step(batch(rows=6))
    with pytest.raises(InputError, match=r"micro-batches, 1, times data \* fsdp, 2\. Got 3\."):
        trainer.mean_loss([batch(rows=3)])
    with pytest.raises(InputError, match=r"`batches` must hold a batch\. It is empty"):
        trainer.mean_loss([])


@pytest.mark.parametrize("wrong", [{"accumulate": 0}, {"loss_chunk": 0}, {"remat": "some"}])
def test_parts_of_a_computation_that_are_none(wrong: dict[str, Any]):
    with pytest.raises(InputError, match=next(iter(wrong))):
        Computation(**wrong)

"""The trainer: meshes, accumulation and remat change nothing; what it holds and moves."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_layers.train import Computation, InputError, Rows, make_mesh, parse_mesh
from flax_layers.train.flops import multiplied_parameters, peak_flops, step_flops, visible_pairs
from flax_layers.train.optimizer import REMAT
from flax_layers.train.parallel import check_mesh
from tests.cases import train_cases
from tests.cases.train_cases import CONFIG, batch, counted_compilations
from tests.support.rows import tiers

MESH = "data=2,fsdp=2,model=2"

pytestmark = [
    pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices; tests/conftest.py simulates them"),
]


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


@pytest.mark.full
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
def test_nothing_compiles_after_the_first_step():
    trainer = train_cases.trainer("data=2,model=2")
    float(trainer.step(batch(0)).loss)
    trainer.mean_loss([batch(0)])
    with counted_compilations() as compiled:
        metrics = [trainer.step(batch(seed)) for seed in range(1, 4)]
        trainer.mean_loss([batch(5)])
        jax.block_until_ready(metrics)
    assert not compiled


@pytest.mark.full
@pytest.mark.parametrize("mesh", ["data=4,model=2", MESH])
def test_a_step_gathers_no_keys_and_computes_in_bfloat16(mesh: str):
    """Over rows and heads, attention needs nothing of another device; parameters are gathered over `fsdp` alone."""
    trainer = train_cases.trainer(mesh, dtype=jnp.bfloat16)
    text = compiled_step(trainer, batch()).as_text()
    gathered = re.findall(r"= \(?(\w+\[[\d,]*\])\S*(?:, \S+\))? all-gather(?:-start)?\(", text)
    assert not [shape for shape in gathered if shape.startswith(("f32", "bf16")) and shape.count(",") > 1], gathered
    if "fsdp" not in mesh:
        assert not [shape for shape in gathered if shape.startswith(("f32", "bf16"))], gathered
    assert "bf16" in text
    assert {leaf.dtype for leaf in trainer.state.parameters.values()} == {jnp.dtype("float32")}


def compiled_step(trainer, rows: Rows) -> Any:
    return lowered_step(trainer, rows).compile()


def lowered_step(trainer, rows: Rows) -> Any:
    split = Rows(*(array[None] for array in rows))
    return trainer._step.lower(trainer.state, trainer._on_devices(split, None, ("data", "fsdp")))


@pytest.mark.full
def test_the_state_is_updated_in_place():
    trainer = train_cases.trainer()
    memory = compiled_step(trainer, batch()).memory_analysis()
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(trainer.state))
    assert memory.alias_size_in_bytes > 0.99 * held


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


@pytest.mark.parametrize("wrong", [{"accumulate": 0}, {"loss_chunk": 0}, {"remat": "some"}])
def test_parts_of_a_computation_that_are_none(wrong: dict[str, Any]):
    with pytest.raises(InputError, match=next(iter(wrong))):
        Computation(**wrong)

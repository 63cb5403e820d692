"""The training benchmark: its peers compute the same losses, in the first form that fits into the memory."""

import jax
import numpy as np
import pytest

import jflex
from benchmarks.questions import training
from flax_layers.train.flops import multiplied_parameters
from tests.cases import train_cases


def test_peers_have_the_losses_of_jflex(monkeypatch):
    monkeypatch.setattr(jflex, "flex_attention", jflex.flex_attention)  # which a peer exchanges for good
    tiny = training.PROBLEMS["tiny"]
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # which jax.nn relies on
        figures = {peer: training.measure(tiny, peer, "data=1", "none", 1, steps=1) for peer in ("jflex", "dense")}
    np.testing.assert_allclose(figures["dense"]["losses"], figures["jflex"]["losses"], rtol=1e-3)
    assert figures["jflex"]["tokens_per_second"] > 0


def test_forms_are_tried_until_one_fits():
    """A form that does not fit is followed by the next one; another error ends the case."""
    figures = {"seconds": 2.0, "first_two_steps_seconds": 9.0, "tokens_per_second": 5e4, "peak_bytes": 1e9,
               "model_flops_per_second": 4e14}  # fmt: skip
    full = {"failed": "XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory"}
    for answers, names in (([full, figures], 5), ([full, {"failed": "ValueError: no"}], 0)):
        run = lambda job, forms=answers: forms.pop(0)
        case = training.run_case("llama3-1b", "jflex", "data=1", 1, 9.0, run)
        measured = training.records_of(case, "NVIDIA H200")
        assert len(measured.records) == names
        assert [x.startswith("llama3-1b, jflex: ") for x in measured.remarks] == [True]
    assert measured.remarks[0].endswith("Out of memory; products, 1 parts: ValueError: no")


def test_rows_hold_documents():
    problem = training.PROBLEMS["llama3-1b"]
    tokens, documents = problem.batch(0)
    assert tokens.shape == documents.shape == (4, 8192)
    assert documents.max(axis=1).tolist() == [11] * 4
    assert (problem.batch(1)[1] != documents).any()


@pytest.mark.parametrize(("name", "billions"), [("llama3-1b", 1.24), ("llama3-8b-4-layers", 1.40)])
def test_flops_count_all_that_is_multiplied(name: str, billions: float):
    problem = training.PROBLEMS[name]
    alone = np.arange(problem.length)[None]  # each place its own document: one pair each
    config = problem.config()
    pairs = 12 * config.num_heads * config.head_dim * len(config.layers) * problem.length
    multiplied = (problem.flops(alone) - pairs) / 6 / problem.length
    assert multiplied / 1e9 == pytest.approx(billions, abs=0.01)


def test_flops_are_those_of_the_trainer():
    problem = training.Problem("tiny", 1, 8, 1)
    trainer = train_cases.trainer(config=problem.config())
    shapes = {path: value.shape for path, value in trainer.state.parameters.items()}
    assert problem.multiplied() == multiplied_parameters(shapes, problem.config())
    documents = np.arange(8)[None]
    assert problem.flops(documents) == 6 * problem.multiplied() * 8 + 12 * 4 * 32 * 4 * 8

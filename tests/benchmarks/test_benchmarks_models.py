"""Questions about whole models, at tiny sizes on a CPU: training, generation and the serving engine."""

import jax
import numpy as np
import pytest

import jflex
from benchmarks.questions import engine, generation, http_cost, training
from benchmarks.questions.engine import Roof, Sizes
from benchmarks.questions.generation import Load, Shape, step_bytes
from tests.benchmarks.test_benchmarks_questions import by_name

TINY, LOAD = Shape(1, 64, 128, 4, 2, 16, 300), Load(2, 20, 10)
SIZES = Sizes(12, 6, (2,), users=2, shared=16, suffix=8, page_size=8, step_tokens=16, shares=(0.5,))
CLIENTS = "2 clients, 12/6 tokens, 2 turns"


class TestTraining:
    def test_peers_have_the_losses_of_jflex(self, monkeypatch):
        monkeypatch.setattr(jflex, "flex_attention", jflex.flex_attention)  # which a peer exchanges for good
        tiny = training.PROBLEMS["tiny"]
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # which jax.nn relies on
            figures = {peer: training.measure(tiny, peer, "data=1", "none", 1, steps=1) for peer in ("jflex", "dense")}
        np.testing.assert_allclose(figures["dense"]["losses"], figures["jflex"]["losses"], rtol=1e-3)
        assert min(figures["jflex"][name] for name in ("tokens_per_second", "predicted_bytes")) > 0

    @pytest.mark.parametrize(("name", "billions"), [("llama3-1b", 1.24), ("llama3-8b-4-layers", 1.40)])
    def test_flops_count_all_that_is_multiplied(self, name: str, billions: float):
        problem = training.PROBLEMS[name]
        alone = np.arange(problem.length)[None]  # each place its own document: one pair each
        config = problem.config()
        pairs = 12 * config.num_heads * config.head_dim * len(config.layers) * problem.length
        assert (problem.flops(alone) - pairs) / 6e9 / problem.length == pytest.approx(billions, abs=0.01)
        tokens, documents = problem.batch(0)
        assert tokens.shape == documents.shape == (4, 8192)
        assert documents.max(axis=1).tolist() == [11] * 4
        assert (problem.batch(1)[1] != documents).any()


class TestGeneration:
    def test_records_of_all_peers(self):
        """jflex is measured; torch takes half a second for nine steps of two texts."""

        def run(job):
            if job.function == "torch_generation":
                return {"prefill": [0.1], "decode": [0.5], "copy": 1e9}
            return generation.jax_generation(**job.arguments)

        measured = generation.generated(TINY, LOAD, runs=1, run=run)
        found = by_name(measured.records)
        assert (measured.remarks, len(found)) == ([], 4 * 5 + 2 + 3 * 2)
        assert min(found[f"batch 2, jflex dense: {name}"] for name in (generation.FIRST, generation.DEVICE)) > 0
        assert found["batch 2, torch sdpa: decode"] == pytest.approx(2 * 9 / 0.5)
        assert found["batch 2, torch sdpa: prompt"] == pytest.approx(2 * 20 / 0.1)
        share = 100 * step_bytes(TINY, LOAD) * 9 / 0.5 / 1e9
        assert found["batch 2, torch sdpa: share of the copy rate"] == pytest.approx(share, rel=1e-3)
        for cache in ("dense", "paged"):
            ratio = found[f"batch 2, jflex {cache}: decode, over torch"]
            assert ratio == pytest.approx(found[f"batch 2, jflex {cache}: decode"] / 36, rel=0.02)

        assert generation.generated(TINY, LOAD, ["jflex 8-bit weights"], runs=1, run=run).derived == ""

    def test_bytes_and_tokens_of_a_step(self):
        """Weights without embeddings: attention, MLP, and the head; keys and values of 25 tokens."""
        weights = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128 + 64 * 300
        assert step_bytes(TINY, LOAD) == 2 * (weights + 2 * 25 * 2 * 2 * 16)
        assert step_bytes(TINY._replace(item=1), LOAD) == step_bytes(TINY, LOAD) - weights + 64 * 300
        generation.check_counts([[1] * 16] * 2, 16)
        with pytest.raises(RuntimeError, match=r"^Generated 12 tokens, expected 16\.$"):
            generation.check_counts([[1] * 16, [1] * 12], 16)


class TestEngine:
    run_here = staticmethod(lambda job: getattr(engine, job.function)(**job.arguments))

    def test_clients(self):
        measured = engine.measured_part(TINY, SIZES, "clients", run=self.run_here)
        found = by_name(measured.records)
        assert (measured.remarks, len(found)) == ([], 2 + 1 + 2 * 8)
        assert found[f"{CLIENTS}: failed"] == 0
        assert found[f"{CLIENTS}: output"] == pytest.approx(6 * found[f"{CLIENTS}: requests"], rel=1e-2)
        assert found[f"Poisson arrivals at 50% of {CLIENTS}: requests"] < found[f"{CLIENTS}: requests"]
        assert found[f"{CLIENTS}: first token"] > found[f"{CLIENTS}: between tokens"] > 0
        assert all(0 < value < 100 for name, value in found.items() if "roof" in name)

    @pytest.mark.long
    def test_cost_of_http(self):
        run_here = lambda job: getattr(http_cost, job.function)(**job.arguments)
        measured = engine.measured_part(TINY, SIZES, "http", run=run_here)
        found = by_name(measured.records)
        assert (measured.remarks, len(found)) == ([], 2 * 7 + 1)
        alone, by_http = (found[f"{CLIENTS}, {kind}: output"] for kind in ("engine alone", "HTTP"))
        assert found[f"{CLIENTS}: cost of HTTP"] == pytest.approx(100 * (1 - by_http / alone), abs=0.1)
        assert found[f"{CLIENTS}, HTTP: failed"] == 0

    @pytest.mark.long
    def test_users_and_names_of_eight_bits(self):
        """Names tell the cache, so that both stand in one file. The roof counts bytes of keys, values and scales."""
        sizes = SIZES._replace(cache_dtype="int8")
        measured = engine.measured_part(TINY, sizes, "users", run=self.run_here)
        assert len(measured.records) == 3 * (1 + 8)
        assert all(", int8 cache: " in name for name in by_name(measured.records))
        cascades = {remark.partition(":")[0]: int(remark.split()[-6]) for remark in measured.remarks}
        name = "2 users share 16 tokens, {}, int8 cache"
        assert cascades[name.format("no prefix cache")] == cascades[name.format("prefix cache")] == 0
        assert cascades[name.format("prefix cache and cascade")] > 0
        assert Roof.from_shape(Shape(), 1.0, 1.0, "int8").key_bytes == 32 * 2 * 8 * (128 + 4)
        names = lambda sizes, part: [name for name, _, _ in sizes.cases(part)]
        assert names(sizes, "launches") == [f"{CLIENTS}, no command buffers, int8 cache"]
        assert names(SIZES._replace(weight_dtype="fp8"), "clients") == [f"{CLIENTS}, fp8 weights"]
        rounded, roof = (Roof.from_shape(shape, 1.0, 1.0) for shape in (Shape(item=1), Shape()))
        assert rounded.token_flops < 0.6 * roof.token_flops

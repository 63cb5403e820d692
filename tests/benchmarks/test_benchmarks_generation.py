"""The benchmark of generation, at tiny sizes on a CPU."""

import pytest

from benchmarks.__main__ import main
from benchmarks.questions import generation, question
from benchmarks.questions.generation import Load, Shape, step_bytes
from benchmarks.results import schema

TINY, LOAD = Shape(2, 64, 128, 4, 2, 16, 300), Load(2, 20, 10)


def test_records_of_all_peers():
    """jflex is measured; torch takes half a second for nine steps of two texts."""

    def run(job):
        if job.function == "torch_generation":
            return {"prefill": [0.1], "decode": [0.5], "copy": 1e9}
        return generation.jax_generation(**job.arguments)

    records, remarks, *_ = generation.generated(TINY, LOAD, runs=1, run=run)
    found = {record.name: record.value.median for record in records}
    assert remarks == []
    assert len(found) == len(records) == 3 * 5 + 2
    assert found["batch 2, torch sdpa: decode"] == pytest.approx(2 * 9 / 0.5)
    assert found["batch 2, torch sdpa: prompt"] == pytest.approx(2 * 20 / 0.1)
    share = 100 * step_bytes(TINY, LOAD) * 9 / 0.5 / 1e9
    assert found["batch 2, torch sdpa: share of the copy rate"] == pytest.approx(share, rel=1e-3)
    for cache in ("dense", "paged"):
        ratio = found[f"batch 2, jflex {cache}: decode over that of the faster torch"]
        assert ratio == pytest.approx(found[f"batch 2, jflex {cache}: decode"] / 36, rel=0.02)


def test_the_file_keeps_other_batches(monkeypatch, tmp_path):
    """Of one run after the other; a peer that fails is a remark."""
    monkeypatch.setattr(question, "gpu_facts", lambda: {"device": "NVIDIA H200"})

    def run_jobs(jobs, run, at_once):
        assert at_once == 1
        answers = {job.label: {"prefill": [1.0], "decode": [2.0], "copy": 1e12} for job in jobs[:-1]}
        return answers, [f"{jobs[-1].label} is left out: no"]

    monkeypatch.setattr(generation, "run_jobs", run_jobs)
    for batch in ("1", "32", "1"):
        peers = ["--peers", "jflex dense", "torch sdpa", "jflex paged"]
        main(["generation", "--batches", batch, *peers, "--out", str(tmp_path)])
    file = schema.read(tmp_path / "generation.json")
    assert file.about["remarks"] == [f"batch {n}, jflex paged is left out: no" for n in (32, 1)]
    assert len(file.records) == 2 * (2 * 5 + 1)
    main(["generation", "--batches", "1", "--peers", "jflex dense", "torch sdpa", "--out", str(tmp_path)])
    ratios = [x.name for x in schema.read(tmp_path / "generation.json").records if x.unit == "x"]
    assert ratios == ["batch 32, jflex dense: decode over that of the faster torch"]  # that of batch 1 is of two runs


def test_the_bytes_of_a_step():
    """Weights without embeddings: 2 layers of attention and MLP, and the head; keys and values of 25 tokens."""
    weights = 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128) + 64 * 300
    assert step_bytes(TINY, LOAD) == 2 * (weights + 2 * 25 * 2 * 2 * 2 * 16)


def test_a_text_of_another_length_is_refused():
    generation.check_counts([[1] * 16] * 2, 16)
    with pytest.raises(RuntimeError, match=r"^Generated 12 tokens, expected 16\.$"):
        generation.check_counts([[1] * 16, [1] * 12], 16)


def test_the_torch_peer_decodes_as_it_computes_whole_texts():
    torch = pytest.importorskip("torch")
    from benchmarks.peers.torch.generation import programs

    def seeded(prompt):
        torch.manual_seed(0)
        return programs(TINY, Load(2, prompt, 10))

    with torch.no_grad():
        text, decoding = torch.randint(300, (2, 20)), seeded(20)
        token = decoding.prefill(text)
        for position in range(20, 24):
            text = torch.cat([text, token], dim=1)
            token = decoding.step(token, torch.tensor([position]))
            assert torch.equal(token, seeded(position + 1).prefill(text))

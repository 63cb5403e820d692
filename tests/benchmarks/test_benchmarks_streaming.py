"""The question of losses along long texts, at tiny sizes."""

from __future__ import annotations

import numpy as np
import pytest
from flax import nnx

from benchmarks.questions import streaming
from benchmarks.results import schema
from flax_layers.attention.streaming import Streaming
from flax_layers.models import Decoder, LayerConfig, ModelConfig
from tests.cases import streaming_llm_cases as oracle


@pytest.mark.parametrize("chunk", [70])
def test_losses_are_those_of_the_oracle(chunk):
    config = ModelConfig(
        vocabulary=256, width=16, mlp_width=32, num_heads=2, num_kv_heads=1, head_dim=8, layers=(LayerConfig(),) * 2,
        max_positions=64, initializer_range=0.3,
    )  # fmt: skip
    model, policy = Decoder(config, implementation="xla", rngs=nnx.Rngs(0)), Streaming(4, 40)
    texts = np.random.default_rng(0).integers(0, 256, (2, 231)).astype(np.int32)
    losses, pages = streaming.read(model, texts, policy, chunk)
    assert pages < 231 // 32
    for text, found in zip(texts, losses, strict=True):
        logits = oracle.logits(model, text[:-1], policy).astype(np.float64)
        known = np.log(np.exp(logits).sum(-1)) - logits[np.arange(230), text[1:]]
        np.testing.assert_allclose(found, known, rtol=1e-3, atol=1e-3)


def test_the_command(tmp_path, capsys):
    words = "--width 16 --layers 1 --heads 2 --kv-heads 1 --trained 64 --rows 2 --steps 2 --texts 2 --length 200"
    streaming.main([*words.split(), "--out", str(tmp_path)])
    result = schema.read(tmp_path / "streaming.json")
    assert result is not None
    names = [record.name for record in result.records]
    for policy in ("full attention", "window of 64", "4 sinks and a window of 60"):
        assert f"{policy}: bytes 128 to 200" in names
    near = [x.value.median for x in result.records if x.name.endswith("bytes 0 to 64")]
    assert max(near) - min(near) < 2e-3  # all alike within the trained length
    assert (tmp_path / "streaming_by_position.png").exists()
    assert "an even share is 6.2%" in capsys.readouterr().out

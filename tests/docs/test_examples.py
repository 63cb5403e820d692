"""Examples run at a small size and stay short; three of them are notebooks."""

import pathlib
import runpy

import pytest

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
SMALL = {
    "block_diffusion": {"steps": 2},
    "context_parallel": {"length": 512},
    "gemma_layers": {"length": 256},
    "learned_relative_bias": {"steps": 2},
    "meanflow": {"steps": 2},
    "mla_decode": {"prompt": 10, "tokens": 2},
    "packed_training": {"steps": 2},
    "paged_batching": {"number": 3},
    "tree_speculation": {"tokens": 8},
    "vit_neighborhood": {"canvas": (16, 16), "layers": 1},
    "whisper_decoder": {"tokens": 3},
}
NOTEBOOKS = ("learned_relative_bias", "tree_speculation", "vit_neighborhood")


def test_every_example_is_run():
    assert sorted(SMALL) == sorted(path.stem for path in EXAMPLES.glob("*.py"))


@pytest.mark.parametrize("name", SMALL)
def test_an_example_is_short(name: str):
    text = (EXAMPLES / f"{name}.py").read_text()
    assert text.count("\n") <= 60
    assert ("# %% [markdown]" in text) == (name in NOTEBOOKS)
    page = (EXAMPLES.parent / "docs/pages/examples.md").read_text()
    assert f"| `examples/{name}.py` |" in page


@pytest.mark.full
@pytest.mark.parametrize("name", SMALL)
def test_an_example_runs(name: str):
    runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](**SMALL[name])


def test_integrations_are_short_and_named_in_the_pages():
    for path in (EXAMPLES / "integrations").glob("*.py"):
        assert path.read_text().count("\n") < 200
        for page in ("coming_from/other_frameworks.md", "examples.md"):
            assert f"| `examples/integrations/{path.name}` |" in (EXAMPLES.parent / "docs/pages" / page).read_text()

"""Integrations are short, and the pages name them."""

import pathlib

FOLDER = pathlib.Path(__file__).parents[2] / "examples/integrations"


def test_files_are_short_and_named_in_the_pages():
    pages = pathlib.Path(__file__).parents[2] / "docs/pages"
    for path in FOLDER.glob("*.py"):
        assert path.read_text().count("\n") < 200
        for page in ("coming_from/other_frameworks.md", "examples.md"):
            assert f"| `examples/integrations/{path.name}` |" in (pages / page).read_text()

"""The README keeps its word: commands, extras, figures; the table of support is what the plans say."""

import pathlib
import re
import subprocess
import tomllib

import jax
import pytest

from tests.support import support_table

ROOT = pathlib.Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
ROOMS = ("jflex", "pallas_kernels", "flax_layers", "tests", "benchmarks")


def command(name: str) -> str:
    """The shell block marked `<!-- command: name -->`."""
    match = re.search(rf"<!-- command: {name} -->\n```bash\n(.*?)```", README, re.DOTALL)
    assert match, f"README.md marks no command `{name}`"
    return match[1]


@pytest.mark.parametrize("name", ["demo", "tests"])
def test_a_command_sets_up_all_it_needs(name: str):
    text = command(name)
    assert len(text.strip().splitlines()) == 1
    assert text.startswith("python3.11 -m venv ")
    for extra in re.search(r"-e '\.\[(.*?)\]'", text)[1].split(","):
        assert extra in EXTRAS


def test_ci_runs_the_readme_test_command():
    shown = subprocess.run([ROOT / ".ci" / "run", "--show"], capture_output=True, text=True, check=True).stdout
    assert shown == command("tests")


def test_every_extra_is_explained():
    assert not [extra for extra in EXTRAS if f"`{extra}`" not in README]


def test_every_room_is_named():
    assert all(f"`{room}/`" in README for room in ROOMS)


def test_support_is_what_the_plans_say():
    """The column of `mosaic_gpu`, and what is selected, on JAX 0.11 and later: before, it refuses everything."""
    made, committed = support_table.table(), support_table.committed()
    if jax.__version_info__ >= support_table.NEEDS:
        assert committed == support_table.markdown(made), "run `python -m tests.support.support_table --write`"
        return
    others = [name for name in support_table.NAMES if name != "mosaic_gpu"]
    columns = lambda rows: {text: [cells[name] for name in others] for text, cells in rows.items()}
    assert columns(support_table.parse(committed)) == columns(made)


def test_figures_have_their_place():
    assert README.count("<!-- figures -->") == README.count("<!-- /figures -->") == 1

"""The README keeps its word: its Python runs, its commands are the ones that CI runs, its paths exist."""

import pathlib
import re
import subprocess
import tomllib

import pytest

pytestmark = pytest.mark.usefixtures("in_haste")

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def command(name: str) -> str:
    """The shell block marked `<!-- command: name -->`."""
    match = re.search(rf"<!-- command: {name} -->\n```bash\n(.*?)```", README, re.DOTALL)
    assert match, f"README.md marks no command `{name}`"
    return match[1]


def test_python_blocks_run_in_order():
    assert blocks("python")
    namespace: dict = {}
    for source in blocks("python"):
        exec(compile(source, "README.md", "exec"), namespace)


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


def test_paths_in_the_map_exist():
    paths = re.findall(r"^\| `((?:jflex|pallas_kernels|flax_layers|tests|benchmarks)/[^`]*)`", README, re.MULTILINE)
    assert len(paths) > 10
    assert not [path for path in paths if not (ROOT / path).exists()]


def test_figures_have_their_place():
    assert README.count("<!-- figures -->") == README.count("<!-- /figures -->") == 1

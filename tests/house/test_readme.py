"""README and guides keep their word: their Python runs and prints what they show, commands and paths exist."""

import contextlib
import importlib
import io
import pathlib
import re
import subprocess
import tomllib

import jax
import pytest

from tests.support import support_table
from tests.support.rows import tiers

ROOT = pathlib.Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
GUIDES = ("README.md", *(f"{room}/README.md" for room in ("jflex", "pallas_kernels", "flax_layers", "tests")))
DOCUMENTS = (*GUIDES, ".github/CONTRIBUTING.md")
ROOMS = ("jflex", "pallas_kernels", "flax_layers", "tests", "benchmarks")


def python_blocks(text: str) -> list[tuple[str, str | None]]:
    """The Python of a document, each block with the text block behind it, which shows what it prints."""
    blocks = re.findall(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", text, re.DOTALL | re.MULTILINE)
    return [(source, shown or None) for source, shown in blocks]


def command(name: str) -> str:
    """The shell block marked `<!-- command: name -->`."""
    match = re.search(rf"<!-- command: {name} -->\n```bash\n(.*?)```", README, re.DOTALL)
    assert match, f"README.md marks no command `{name}`"
    return match[1]


@tiers(default={"name": "README.md"})
@pytest.mark.parametrize("name", GUIDES)
def test_python_blocks_run_in_order(name: str):
    namespace: dict = {"__name__": "guide"}
    blocks = python_blocks((ROOT / name).read_text())
    assert blocks
    for source, shown in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(source, name, "exec"), namespace)
        assert shown is None or printed.getvalue() == shown


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


@pytest.mark.parametrize("name", DOCUMENTS)
def test_paths_exist(name: str):
    """Those in backquotes that begin with a room, from the root; those of links, from the document."""
    text = (ROOT / name).read_text().partition("<!-- figures -->")
    text = text[0] + text[2].partition("<!-- /figures -->")[2]
    named = re.findall(rf"`((?:{'|'.join(ROOMS)})/[\w./-]*)`", text)
    linked = re.findall(r"\]\((?!https?:|#)([^)#]+)[^)]*\)", text)
    assert named or linked
    assert not [path for path in named if not (ROOT / path).exists()]
    assert not [path for path in linked if not (ROOT / name).parent.joinpath(path).exists()]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_modules_exist(name: str):
    """Those in backquotes, from the root, or from any folder below that of a guide."""
    folder = (ROOT / name).parent
    for path in re.findall(r"`([\w/]+\.py)`", (ROOT / name).read_text()):
        assert (ROOT / path).exists() or (folder != ROOT and list(folder.rglob(path))), path


@pytest.mark.parametrize("name", DOCUMENTS)
def test_names_of_jflex_exist(name: str):
    """Dotted names in backquotes that begin with a package."""
    for dotted in re.findall(r"`((?:jflex|pallas_kernels|flax_layers)(?:\.\w+)+)", (ROOT / name).read_text()):
        found, *rest = dotted.split(".")
        value = importlib.import_module(found)
        for part in rest:
            found += f".{part}"
            value = getattr(value, part) if hasattr(value, part) else importlib.import_module(found)


def test_every_room_is_in_the_map():
    rooms = {path.parent.name for path in (ROOT / "jflex").glob("[a-z]*/__init__.py")}
    named = README.partition("## Map")[2]
    assert {f"jflex/{room}" for room in rooms} <= set(re.findall(r"`(jflex/\w+)/`", named))
    assert all(f"`{room}/" in named for room in ROOMS)


def test_support_is_what_the_plans_say():
    """The column of `mosaic_gpu`, and what is selected, on JAX 0.11 and later: before, it refuses everything."""
    made, committed = support_table.table(), support_table.committed()
    if jax.__version_info__ >= support_table.NEEDS:
        assert committed == support_table.markdown(made), "run `python -m tests.support.support_table --write`"
        return
    others = [name for name in support_table.NAMES if name != "mosaic_gpu"]
    columns = lambda rows: {text: [cells[name] for name in others] for text, cells in rows.items()}
    assert columns(support_table.parse(committed)) == columns(made)


def test_a_readme_without_markers_of_the_support_is_refused(monkeypatch, tmp_path: pathlib.Path):
    monkeypatch.setattr(support_table, "README", tmp_path / "README.md")
    support_table.README.write_text("# jflex\n")
    with pytest.raises(ValueError, match="lacks the markers"):
        support_table.committed()


def test_figures_have_their_place():
    assert README.count("<!-- figures -->") == README.count("<!-- /figures -->") == 1

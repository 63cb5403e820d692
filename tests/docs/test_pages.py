"""Pages keep their word: their Python runs and prints what they show; commands, paths, names and pictures exist."""

import contextlib
import importlib
import io
import pathlib
import re
import runpy
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
SITE = ROOT / "docs/pages"
ROOMS = ("jflex", "pallas_kernels", "flax_layers", "tests", "benchmarks", "examples", "docs")
FIRST = ("README.md", "docs/pages/index.md", "docs/pages/start/first_call.md", "docs/pages/tutorial/2_mask.md")
GUIDES = (*(f"{room}/README.md" for room in ROOMS[:5]), ".github/CONTRIBUTING.md")
PAGES = sorted({*FIRST, *GUIDES, *(str(path.relative_to(ROOT)) for path in SITE.rglob("*.md"))})
COMMANDS = ("flax_layers.train", "flax_layers.generate", "flax_layers.serve", "flax_layers.demo")


def read(name: str) -> str:
    return (ROOT / name).read_text()


def python_blocks(text: str) -> list[tuple[str, str | None]]:
    """The Python of a page, each block with the text block behind it, which shows what it prints."""
    blocks = re.findall(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", text, re.DOTALL | re.MULTILINE)
    return [(source, shown or None) for source, shown in blocks]


RUN = [name for name in PAGES if python_blocks(read(name))]


@pytest.mark.parametrize("name", [pytest.param(x, marks=[] if x in FIRST[:2] else pytest.mark.full) for x in RUN])
def test_python_blocks_run_in_order(name: str):
    namespace: dict = {"__name__": "page"}
    for source, shown in python_blocks(read(name)):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(source, name, "exec"), namespace)
        assert shown is None or printed.getvalue() == shown


@pytest.mark.parametrize("name", PAGES)
def test_paths_and_names_exist(name: str):
    """Paths in backquotes from the root, links from the page, modules from anywhere below the folder of the page."""
    text = re.sub("<!-- figures -->.*<!-- /figures -->", "", read(name), flags=re.DOTALL)
    folder = (ROOT / name).parent
    named = re.findall(rf"`((?:{'|'.join(ROOMS)})/[\w./-]*)`", text)
    assert not [path for path in named if not (ROOT / path).exists()]
    linked = re.findall(r"\]\((?!https?:|#)([^)#]+)[^)]*\)", re.sub("```.*?```", "", text, flags=re.DOTALL))
    assert not [path for path in linked if not folder.joinpath(path).exists()]
    for path in re.findall(r"`([\w/]+\.py)`", text):
        assert (ROOT / path).exists() or list(
            ROOT.rglob(path) if folder.is_relative_to(SITE) else folder.rglob(path)
        ), path
    for dotted in re.findall(r"`((?:jflex|pallas_kernels|flax_layers)(?:\.\w+)+)", text):
        package, *parts = dotted.split(".")
        value = importlib.import_module(package)
        for part in parts:
            package += f".{part}"
            value = getattr(value, part) if hasattr(value, part) else importlib.import_module(package)


@pytest.mark.full
@pytest.mark.parametrize("command", COMMANDS)
def test_options_of_commands_exist(command: str):
    lines = re.findall(rf"python -m {command}\b(.*(?:\\\n.*)*)", "\n".join(map(read, PAGES)))
    named = {option for line in lines for option in re.findall(r" (--[a-z][a-z-]+)", line)}
    shown = subprocess.run(
        [sys.executable, "-m", command, "--help"], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert lines
    assert not [option for option in named if option not in shown.stdout.split()]


def test_pictures_are_as_they_are_drawn():
    pictures = runpy.run_path(str(ROOT / "docs/draw.py"))["PICTURES"]
    for name, draw in pictures.items():
        assert (SITE / f"images/{name}.svg").read_text() == draw(), "run `python docs/draw.py`"

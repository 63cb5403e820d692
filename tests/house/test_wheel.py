"""The wheel holds all that the packages need, and computes from an empty directory."""

import importlib.util
import os
import pathlib
import subprocess
import sys
import zipfile

import pytest

pytestmark = pytest.mark.full

ROOT = pathlib.Path(__file__).parents[2]
PACKAGES = ("jflex", "pallas_kernels", "flax_layers")
UNREACHABLE = ("Could not find a version", "No matching distribution", "Connection", "Temporary failure")

PROGRAM = """
import jax, jax.numpy as jnp
import jflex, pallas_kernels
from pallas_kernels.tuning import tables

query = jax.random.normal(jax.random.key(0), (1, 64, 2, 16))
mask = jflex.create_block_mask(jflex.masks.causal(), None, None, 64, 64, block_size=32)
attend = lambda x, **options: jflex.flex_attention(x, x, x, jflex.scores.softcap(5.0), mask, **options)
grad = lambda **options: jax.grad(lambda x: attend(x, **options).sum())(query)
assert jnp.allclose(attend(query), attend(query, implementation="reference"), atol=1e-5)
assert jnp.allclose(grad(), grad(implementation="reference"), atol=1e-4)
triton = {"implementation": "triton", "config": jflex.Config(interpret=True)}
assert jnp.allclose(attend(query, **triton), attend(query), atol=1e-5)
assert tables.entries("nvidia-h200")
print(jflex.__file__, jflex.__version__)
"""


def build(folder: pathlib.Path) -> None:
    """Builds the wheel: by what is installed, else by what pip installs into an environment of its own."""
    has = lambda name: importlib.util.find_spec(name) is not None
    if has("build"):
        command = ["build", "--wheel", "--outdir", str(folder), *(["--no-isolation"] if has("hatchling") else [])]
    else:
        command = ["pip", "wheel", "--no-deps", "--wheel-dir", str(folder)]
        command += ["--no-build-isolation"] if has("hatchling") else []
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.run(
        [sys.executable, "-m", *command, str(ROOT)], cwd=folder, env=environment, capture_output=True, text=True
    )
    said = process.stdout + process.stderr
    if process.returncode != 0 and not has("hatchling") and any(text in said for text in UNREACHABLE):
        pytest.skip("hatchling is not installed, and pip cannot reach an index")
    assert process.returncode == 0, said


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The wheel, unpacked."""
    built, folder = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("site")
    build(built)
    [wheel] = built.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def test_the_wheel_holds_the_data_of_the_packages(site: pathlib.Path):
    assert {path.name for path in site.iterdir() if not path.name.endswith(".dist-info")} == set(PACKAGES)
    for package in PACKAGES:
        assert (site / package / "py.typed").exists()
        sources = {path.relative_to(ROOT) for path in (ROOT / package).rglob("*.py")}
        assert sources == {path.relative_to(site) for path in (site / package).rglob("*.py")}
    assert (site / "flax_layers" / "serving" / "api" / "page.html").exists()
    tables = [path.name for path in (ROOT / "pallas_kernels" / "tuning" / "tables").glob("*.json")]
    assert tables
    assert all((site / "pallas_kernels" / "tuning" / "tables" / name).exists() for name in tables)


def test_the_wheel_computes_from_an_empty_directory(site: pathlib.Path, tmp_path: pathlib.Path):
    environment = {**os.environ, "PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    path, version = process.stdout.split()
    assert pathlib.Path(path).is_relative_to(site)
    assert version[0].isdigit()
    assert "checkout" not in version

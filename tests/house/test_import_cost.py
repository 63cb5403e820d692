"""What `import jflex` loads, seen in a fresh process."""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


def fresh_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)


def loaded_by(statement: str) -> set[str]:
    """Names of the modules that a fresh interpreter holds after `statement`."""
    process = fresh_python(f"{statement}\nimport sys\nprint('\\n'.join(sys.modules))")
    assert process.returncode == 0, process.stderr
    return set(process.stdout.split())


@pytest.mark.parametrize(
    "heavy",
    ["jax.experimental.pallas", "pallas_kernels.triton", "pallas_kernels.mosaic_gpu", "flax", "optax", "matplotlib"],
)
def test_importing_jflex_does_not_load(heavy: str, jflex_modules: set[str]):
    assert "jflex" in jflex_modules
    assert heavy not in jflex_modules


@pytest.fixture(scope="module")
def jflex_modules() -> set[str]:
    return loaded_by("import jflex")


@pytest.mark.full
def test_importing_jflex_warns_of_nothing_and_asks_for_no_device():
    # JAX refuses a new number of devices once the first device was asked for.
    loaded_by(
        "import warnings; warnings.simplefilter('error')\n"
        "import jflex\n"
        "import jax; jax.config.update('jax_num_cpu_devices', 3)"
    )


def test_without_flax_the_layers_say_what_to_install():
    process = fresh_python("import sys; sys.modules['flax'] = None\nimport flax_layers")
    assert process.returncode != 0
    message = "flax_layers needs Flax, which is not installed: in a checkout, pip install -e '.[flax]'"
    assert process.stderr.splitlines()[-1] == f"ModuleNotFoundError: {message}"


@pytest.mark.full
def test_without_the_packages_of_the_server_the_engine_is_imported():
    names = ("starlette", "uvicorn", "pydantic", "prometheus_client", "llguidance")
    loaded = loaded_by(f"import sys; sys.modules.update(dict.fromkeys({names}))\nimport flax_layers.serving")
    assert "flax_layers.serving.engine.engine" in loaded


@pytest.mark.full
def test_without_starlette_the_endpoints_say_what_to_install():
    process = fresh_python("import sys; sys.modules['starlette'] = None\nimport flax_layers.serving.api.http")
    assert process.returncode != 0
    message = "`flax_layers.serve` needs starlette: in a checkout, pip install -e '.[serve]'"
    assert process.stderr.splitlines()[-1] == f"ModuleNotFoundError: {message}"

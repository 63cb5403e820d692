"""Settings of every test: the platform, eight simulated devices on the CPU, strict dtypes and ranks."""

import gc
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import hypothesis
import jax
import pytest

from tests.support import haste, workers

SIMULATED_DEVICES = 8


def pytest_configure(config: pytest.Config) -> None:
    """`-m gpu` runs on the GPU and refuses to run without one; any other selection runs on the CPU, GPU or not."""
    # Examples compile, so the time that one takes says nothing; the same run always draws the same examples.
    too_slow = [hypothesis.HealthCheck.too_slow]
    hypothesis.settings.register_profile("jflex", deadline=None, derandomize=True, suppress_health_check=too_slow)
    hypothesis.settings.load_profile("jflex")
    # Collecting garbage took 10 % of the run: thousands of tests and compiled programs are walked, and none is garbage.
    gc.set_threshold(50_000, 20, 50)
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    if config.option.markexpr == "gpu":
        require_gpu()
        return
    # Both the variable, for the processes that tests start, and the setting: the plugins of pytest may have imported
    # JAX. XLA reads its flags later, when the first device is asked for.
    os.environ["JAX_PLATFORMS"] = "cpu"
    jax.config.update("jax_platforms", "cpu")
    haste.begin()
    flags = [f"--xla_force_host_platform_device_count={SIMULATED_DEVICES}"]
    if jax.__version_info__ < (0, 11):
        # Half the time to compile: without emitters that XLA 0.11 has no switch for (it ends at a flag that it does not
        # know), and on one thread, where pytest-xdist runs as many workers as there are cores.
        flags += ["--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1"]
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags]).strip()


def pytest_collection_finish() -> None:
    """Leaves what collection made, which lives to the end, to no later collection of garbage."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _bounded_memory() -> Iterator[None]:
    """Drops compiled programs between modules once they fill memory: a worker of the full run held 8 GB of them."""
    yield
    statm = pathlib.Path("/proc/self/statm")  # of Linux; the second number counts resident pages
    if statm.exists() and int(statm.read_text().split()[1]) * os.sysconf("SC_PAGESIZE") > 3 << 30:
        jax.clear_caches()


@pytest.fixture
def settings_of_device() -> Iterator[None]:
    """In haste on the CPU; on a GPU, float32 without TF32."""
    on_gpu = jax.default_backend() == "gpu"
    with haste.compiled_in_haste(not on_gpu), jax.default_matmul_precision("highest" if on_gpu else None):
        yield


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    """The engine of `tests.support.served`, which the tests of a module share. Its packages are imported here alone."""
    from tests.support.served import running

    with running() as engine:
        yield engine


@pytest.fixture
def no_page_is_lost(engine) -> Iterator[None]:
    """Checks after a test that every page of the engine is free or cached."""
    from tests.support.served import idle

    yield
    idle(engine)


@pytest.fixture
def fresh_plans() -> Iterator[None]:
    """For tests that change what plans depend on."""
    from tests.support.specs import forget_plans

    forget_plans()
    yield
    forget_plans()


def require_gpu() -> None:
    try:
        jax.devices("gpu")
    except RuntimeError as error:
        raise pytest.UsageError(f"`-m gpu` needs a GPU that JAX can use, and there is none here: {error}") from error


def pytest_ignore_collect(collection_path: pathlib.Path, config: pytest.Config) -> bool | None:
    """Leaves out tests of the server under `-m gpu`: none needs a GPU, and machines with one may lack its packages."""
    is_of_server = collection_path.name.startswith(("test_serving_", "test_benchmarks_serving"))
    return True if is_of_server and config.option.markexpr == "gpu" else None


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keeps tests of one case on one worker, unless `--dist` says otherwise."""
    return workers.scheduler(config, log) if config.getoption("dist") == "load" else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Takes tests for a GPU with `-m gpu` alone, whatever else they are marked with."""
    if config.option.markexpr != "gpu":
        for_gpu = [item for item in items if item.get_closest_marker("gpu")]
        config.hook.pytest_deselected(items=for_gpu)
        items[:] = [item for item in items if item not in set(for_gpu)]

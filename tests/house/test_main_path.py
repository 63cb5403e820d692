"""How far it is from a call to its kernel: files that run, and calls that cross from `jflex` to `pallas_kernels`."""

import functools
import itertools
import pathlib
import sys

import jax
import jax.numpy as jnp
import pytest

import jflex
from tests.support import gpu_compile

ROOT = pathlib.Path(__file__).parents[2]
ROOMS = ("jflex", "pallas_kernels")
MOSAIC_FILES = 51
TRITON_FILES = 34
PAGED_FILES = 40
SHARED = {"pallas_kernels/spec.py", "pallas_kernels/plan.py", "pallas_kernels/config.py"}  # what both speak of


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 1)


def forget_caches():  # what is in one would not be counted
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] in ROOMS]
    for value in itertools.chain.from_iterable(list(vars(module).values()) for module in modules):
        if callable(getattr(value, "cache_clear", None)):
            value.cache_clear()
    jax.clear_caches()


def crossings_and_files(call):
    """Call sites in `jflex` of functions in `pallas_kernels`, and files whose functions run; imports do not count."""
    call()
    forget_caches()
    sites, files = set(), set()

    @functools.cache
    def file_of(filename):
        path = pathlib.Path(filename)
        name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else ""
        return name if name.startswith(ROOMS) else None

    room_of = lambda frame: file_of(frame.f_code.co_filename)

    def profile(frame, event, _):
        name = room_of(frame) if event == "call" and frame.f_code.co_name != "<module>" else None
        if name is None:
            return
        files.add(name)
        caller = frame.f_back
        while caller is not None and room_of(caller) is None:
            caller = caller.f_back
        below = name.startswith("pallas_kernels") and name not in SHARED
        if caller is not None and below and room_of(caller).startswith("jflex"):
            sites.add((room_of(caller), caller.f_lineno))

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return sites, files


def alibi_and_causal(implementation, x, **options):
    slopes = jnp.ones(x.shape[2])
    mod = lambda s, b, h, q, k: s - slopes[h] * (q - k).astype(jnp.float32)
    mask = jflex.create_block_mask(lambda b, h, q, k: q >= k, None, None, x.shape[1], x.shape[1])
    return lambda q: jflex.flex_attention(q, q, q, mod, mask, implementation=implementation, **options)


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="Mosaic GPU is used from JAX 0.11 on")
@pytest.mark.skipif(gpu_compile.missing() is not None, reason="lowers for a GPU")
def test_mosaic_gpu():
    x = jax.ShapeDtypeStruct((2, 1024, 16, 128), jnp.bfloat16)
    call = alibi_and_causal("mosaic_gpu", x)
    sites, files = crossings_and_files(lambda: gpu_compile.lower(call, x))
    assert 2 <= len(sites) <= 5, sites
    assert len(files) <= MOSAIC_FILES, sorted(files)


def test_triton():
    x = jax.ShapeDtypeStruct((1, 128, 2, 16), jnp.float32)
    call = alibi_and_causal("triton", x, config=jflex.Config(interpret=True))
    sites, files = crossings_and_files(lambda: jax.eval_shape(call, x))
    assert 2 <= len(sites) <= 5, sites
    assert len(files) <= TRITON_FILES, sorted(files)


def test_paged():
    cache = jflex.paged.PagedCache.create(9, 16, 1, 16, dtype=jnp.float32)
    tables, lengths = jnp.arange(1, 9, dtype=jnp.int32).reshape(2, 4), jnp.array([50, 60], jnp.int32)
    batch = jflex.paged.PagedBatch(jnp.arange(3), lengths, tables)
    slopes = jnp.ones(2)
    mod = lambda s, b, h, q, k: s - slopes[h] * (q - k).astype(jnp.float32)
    options = {"mask_mod": jflex.masks.causal(), "config": jflex.Config(interpret=True)}
    call = lambda q: jflex.paged_attention(q, cache, batch, score_mod=mod, implementation="triton", **options)
    x = jax.ShapeDtypeStruct((2, 2, 16), jnp.float32)
    sites, files = crossings_and_files(lambda: jax.eval_shape(call, x))
    assert 2 <= len(sites) <= 5, sites
    assert len(files) <= PAGED_FILES, sorted(files)

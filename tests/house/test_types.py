"""Annotations of public functions are true: shapes and dtypes are checked at run time, over the table of cases."""

from __future__ import annotations

import contextlib
import functools
import inspect
import pkgutil
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("beartype", reason="annotations are checked by beartype, of the extra `test`")

import beartype
import jaxtyping
from jaxtyping import Array, Float

import flax_layers.functional
import flax_layers.nnx
import jflex
from jflex.masks import causal
from tests.cases.table import CASES, LENGTHS, Case, in_tiers
from tests.support import evaluation

# Every element of a container, and not one at random, as beartype has it.
_CHECKER = beartype.beartype(conf=beartype.BeartypeConf(strategy=beartype.BeartypeStrategy.On))
# Dataclasses are not made under a check: JAX makes pytrees of anything, of None, strings or its own markers.
_SKIPPED = frozenset({"tree_flatten", "tree_unflatten"})
NAMESPACES = (jflex, jflex.masks, jflex.scores, jflex.paged, jflex.rotary, flax_layers.functional, flax_layers.nnx)


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that raises `jaxtyping.TypeCheckError` where its annotations are not true."""
    return jaxtyping.jaxtyped(inspect.unwrap(function), typechecker=_CHECKER)


def public() -> dict[str, Any]:
    """What users import: functions, and classes that have methods."""
    return {
        f"{space.__name__}.{name}": x
        for space in NAMESPACES
        for name, x in vars(space).items()
        if not name.startswith("_") and getattr(x, "__module__", "").startswith(("jflex", "flax_layers"))
        and (inspect.isfunction(x) or inspect.isclass(x))
    }  # fmt: skip


def methods(cls: type) -> dict[str, Any]:
    """The public methods that a class itself defines, and calls of its objects; as its dictionary holds them."""
    wanted = lambda name: name == "__call__" or not (name.startswith("_") or name in _SKIPPED)
    kinds = (types.FunctionType, classmethod, staticmethod)
    return {name: x for name, x in vars(cls).items() if wanted(name) and isinstance(x, kinds)}


@contextlib.contextmanager
def all_checked() -> Iterator[None]:
    """Checks all public functions and methods, wherever a module of the packages or of the tests has them."""
    with contextlib.ExitStack() as undo:
        swap = lambda owner, name, new: _swap(undo, owner, name, new)
        for package in (jflex, flax_layers):
            for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
                if not found.name.endswith("__main__"):
                    __import__(found.name)
        modules = [m for name, m in sys.modules.items() if name.partition(".")[0] in ("jflex", "flax_layers", "tests")]
        for x in set(public().values()):
            if inspect.isclass(x):
                for name, method in methods(x).items():
                    swap(x, name, _checked_method(method))
                continue
            new = checked(x)
            for module in modules:
                for name in [name for name, value in vars(module).items() if value is x]:
                    swap(module, name, new)
        yield


def _checked_method(method: Any) -> Any:
    if isinstance(method, classmethod | staticmethod):
        return type(method)(checked(method.__func__))
    return checked(method)


def _swap(undo: contextlib.ExitStack, owner: Any, name: str, new: Any) -> None:
    undo.callback(setattr, owner, name, vars(owner)[name])
    setattr(owner, name, new)


MODULES = sorted({x.__module__ for x in public().values()})
# One array of each: T and S, Hq and Hkv, D and Dv differ, so that no two axes are taken for one another.
SIZES = {"query": (2, 8, 4, 16), "key": (2, 12, 2, 16), "value": (2, 12, 2, 24)}


@pytest.fixture(autouse=True, scope="module")
def _all_checked() -> Iterator[None]:
    with all_checked():
        yield


def arrays(layout: str = "BTNH", batch: int = 2, dtype: str = "float32") -> list[jax.Array]:
    """Query, key and value; keys of one batch entry or of all."""
    turned = lambda x: x if layout == "BTNH" else x.swapaxes(1, 2)
    shapes = [SIZES["query"], *((batch, *SIZES[name][1:]) for name in ("key", "value"))]
    return [turned(jax.random.normal(jax.random.key(i), shape).astype(dtype)) for i, shape in enumerate(shapes)]


def arguments_of(x: Case) -> tuple[Any, ...]:
    """What annotations see of a case: dtypes, layouts and which arguments there are, not what mods compute."""
    sees = (x.dtype, x.qk_dtype, x.layout, x.normalize, x.sinks, x.shared_dropout, x.sizes.Dv == x.sizes.D)
    return *sees, x.kv_lengths is None, x.dropout_rate == 0, x.score is None, x.mask is None, x.block is None


SOME = [*{arguments_of(x): x for x in [*LENGTHS, *CASES][::-1]}.values()]


@pytest.mark.parametrize("case", in_tiers(SOME, share=3))
def test_the_table_of_cases(case: Case):
    """Traces forward and backward pass, which is when annotations are compared; nothing is compiled."""
    run, *shapes = evaluation.program_of(case, "xla")
    with jax.default_matmul_precision(case.precision):
        jax.eval_shape(run, *shapes)


@pytest.mark.full
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("layout", ["BTNH", "BNTH"])
def test_layouts_transformations_and_kinds_of_arrays(layout: str, batch: int):
    attend = functools.partial(jflex.flex_attention, mask_mod=causal(), layout=layout, implementation="xla")
    both = lambda *xs: attend(*xs, return_lse=True)
    given, lengths = arrays(layout, batch), jnp.array([5, 12], jnp.int32)
    out, lse = both(*given)
    assert lse.shape == (2, 4, 8)
    assert attend(*map(np.asarray, given), kv_lengths=np.asarray(lengths)).shape == out.shape
    assert attend(*given, kv_lengths=lengths).shape == out.shape
    for rows in (None, [0, -1], jnp.array([3])):
        weights = jflex.attention_weights(*given[:2], mask_mod=causal(), kv_lengths=lengths, layout=layout, rows=rows)
        assert weights.shape == (2, 4, 8 if rows is None else len(rows), 12)
    several = [jnp.stack([x] * 3) for x in given]
    assert jax.eval_shape(jax.jit(jax.vmap(both)), *several)[0].shape == (3, *out.shape)
    total = lambda *xs: sum(x.astype(jnp.float32).sum() for x in both(*xs))
    assert jax.eval_shape(jax.grad(total, (0, 1, 2)), *given)[1].shape == given[1].shape
    for dtype in ("bfloat16", "float16"):
        assert jax.eval_shape(both, *arrays(layout, batch, dtype))[0].dtype == dtype
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in given]
    of_lengths = jax.ShapeDtypeStruct((2,), jnp.int32)
    for xs in (given, shapes):
        assert jflex.explain(*xs, kv_lengths=of_lengths, layout=layout, implementation="xla").backend == "xla"
    state = jflex.AttentionState.from_attention(out, lse, layout=layout)
    assert jflex.merge(state, state).to_attention(layout)[0].shape == out.shape


@pytest.mark.full
@pytest.mark.parametrize("layers", [None, 3])
def test_pages_and_levels(layers: int | None):
    cache = jflex.paged.PagedCache.create(8, 4, 2, 16, v_head_dim=24, dtype=jnp.float32, layers=layers)
    layer = None if layers is None else 1
    query, key, value = (x.reshape(-1, *x.shape[2:])[:5] for x in arrays())
    fields = jnp.array([0, 3, 5]), jnp.array([3, 6]), jnp.array([[1, 0], [2, 3]])
    for make in (jnp.asarray, np.asarray):
        batch = jflex.paged.PagedBatch(*map(make, fields))
        slots = jflex.paged.token_slots(batch, 5, page_size=4)
        filled = jflex.paged.write(cache, make(key), make(value), make(slots), layer=layer)
        attend = functools.partial(
            jflex.paged_attention, mask_mod=causal(), layer=layer, return_lse=True, implementation="xla"
        )
        assert attend(make(query), filled, batch)[0].shape == (5, 4, 24)
        assert jax.eval_shape(jax.jit(attend), query, filled, batch)[1].shape == (5, 4)
        level = jflex.CascadeLevel.paged(filled, batch, layer=layer)
        positions = jflex.paged.token_positions(batch, 5)
        cascade = functools.partial(jflex.cascade_attention, mask_mod=causal(), return_lse=True, implementation="xla")
        assert cascade(make(query), [level], positions=make(positions))[0].shape == (5, 4, 24)
    assert jflex.paged.clear_unused(filled, batch.page_table, batch.kv_lengths).k.shape == cache.k.shape


def test_a_wrong_annotation_fails():
    """`Dv` of the output said to be `D`, a dtype, and a layout of which nothing knows."""
    given = arrays()
    for name, wrong in (
        ("return", Float[Array, "B T Hq D"]),
        ("key", jaxtyping.Int[Array, "B S Hkv D"]),
        ("query", Float[Array, "T B Hq D"]),
        ("value", Float[Array, "B S Hkv"]),
    ):
        original = inspect.unwrap(jflex.attention.flex_attention)
        function = types.FunctionType(original.__code__, original.__globals__, "wrong", original.__defaults__)
        function.__kwdefaults__ = original.__kwdefaults__
        function.__annotations__ = {**original.__annotations__, name: wrong}
        with pytest.raises(jaxtyping.TypeCheckError):
            checked(function)(*given, implementation="xla")


def test_every_public_function_is_checked():
    functions = public()
    assert len(functions) > 40
    names = ("flex_attention", "explain", "create_block_mask", "cascade_attention", "masks.causal", "paged.write")
    assert {f"jflex.{name}" for name in names} <= set(functions)
    functions = {name: x for name, x in functions.items() if not isinstance(x, type)}
    assert all(hasattr(x, "__wrapped__") for x in functions.values())

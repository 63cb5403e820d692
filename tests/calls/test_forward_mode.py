"""Tangents and second derivatives with `Config(forward_mode=True)`, and gradients that it must not change."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jflex
from tests.calls.test_features import mesh_of, placed
from tests.cases.features import BACKENDS, FEATURES, REFERENCE
from tests.cases.table import CASES
from tests.support import evaluation
from tests.support.context_parallel_calls import NEEDS_EIGHT_DEVICES
from tests.support.dense_masks import causal
from tests.support.drawn_arrays import drawn_tangents
from tests.support.rows import tiers

BOTH = {"xla": {"implementation": "xla", "config": jflex.Config(forward_mode=True)}}
BOTH["triton-interpret"] = {"implementation": "triton", "config": jflex.Config(forward_mode=True, interpret=True)}
backends = pytest.mark.parametrize("backend", BOTH)
TANGENTS = evaluation.having_tangents(CASES)
assert_close = functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-4)


def close(found, right, **how):
    jax.tree.map(lambda x, y: assert_close(np.asarray(x), np.asarray(y), **how), found, right)


@tiers(
    default={"case": "sinks", "backend": "xla"},
    full=[
        {"case": "sinks"},
        {"case": "causal", "backend": "xla"},
        *({"case": str(case), "backend": evaluation.BACKENDS[i % 2]} for i, case in enumerate(TANGENTS[::8])),
    ],
)
@pytest.mark.parametrize("backend", evaluation.BACKENDS)
@pytest.mark.parametrize("case", TANGENTS, ids=str)
def test_tangents(case, backend):
    if not evaluation.refused(case, backend):
        evaluation.check_tangents(case, backend)


@tiers(in_turns=True, rest="full")
@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("backend", evaluation.BACKENDS)
def test_hidden_values_and_tangents_that_are_not_finite(backend, poison):
    """Two causal documents: what the second has in its values reaches no tangent of the first."""
    x, tangents = jax.random.normal(jax.random.key(0), (2, 3, 2, 96, 2, 16), jnp.float32)
    mask = lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx // 48 == kv_idx // 48)
    implementation, _, manner = backend.partition("-")
    config = jflex.Config(forward_mode=True, interpret=manner == "interpret")

    def attend(query, key, value):
        return jflex.flex_attention(
            query, key, value, mask_mod=mask, implementation=implementation, config=config, return_lse=True
        )

    run = jax.jit(lambda arrays, moved: jax.jvp(attend, tuple(arrays), tuple(moved))[1])
    clean, last = run(x, tangents), (2, slice(None), 60)
    for arrays in ((x.at[last].set(poison), tangents), (x, tangents.at[last].set(poison))):
        d_out, d_lse = run(*arrays)
        np.testing.assert_array_equal(d_lse, clean[1])
        close(d_out[:, :60], clean[0][:, :60])
        assert not np.isfinite(d_out[:, 60:]).any()


@tiers(default={"name": "sinks", "backend": "xla"}, in_turns=True)
@pytest.mark.parametrize("backend", evaluation.BACKENDS)
@pytest.mark.parametrize("name", ["sinks", "statistics", "mods and lists"])
def test_tangents_along_some_inputs_add_up(name, backend):
    """Each subset of inputs has a kernel of its own."""
    implementation, _, manner = backend.partition("-")
    options = {"implementation": implementation}
    options["config"] = jflex.Config(forward_mode=True, interpret=manner == "interpret")
    make, floats = split(FEATURES[name], FEATURES[name].draw())
    tangents = drawn_tangents(floats)

    def along(names):
        function = lambda some: make(options)(floats | some)[1]
        with jax.default_matmul_precision("highest"):  # products of sums in TF32 are no sums of products
            return jax.jit(lambda *xs: jax.jvp(function, *((x,) for x in xs))[1])(
                *({n: tree[n] for n in names} for tree in (floats, tangents))
            )

    parts = [along([n]) for n in floats]
    whole, pair = along(list(floats)), along(["q", "v"])
    add = lambda *xs: functools.reduce(jnp.add, xs)
    close(jax.tree.map(add, *parts), whole, rtol=2e-3, atol=2e-3)
    named = dict(zip(floats, parts, strict=True))
    close(jax.tree.map(add, named["q"], named["v"]), pair, rtol=2e-3, atol=2e-3)


def split(feature, arrays):
    """The loss as a function of the floating-point arrays, and these."""
    floats = {name: x for name, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.floating)}
    others = {name: x for name, x in arrays.items() if name not in floats}
    return lambda options: lambda floats: feature.loss(options, floats, others), floats


TRANSFORMED = {
    "jvp": lambda f, x, t: jax.jvp(lambda y: f(y)[1], (x,), (t,)),
    "linearize": lambda f, x, t: jax.linearize(jax.jit(lambda y: f(y)[1]), x)[1](t),
    "checkpoint": lambda f, x, t: jax.jvp(jax.checkpoint(lambda y: f(y)[1]), (x,), (t,)),
    "jvp of grad": lambda f, x, t: jax.jvp(jax.grad(lambda y: f(y)[0]), (x,), (t,)),
    "jvp of jvp": lambda f, x, t: jax.jvp(lambda y: jax.jvp(lambda z: f(z)[0], (y,), (t,))[1], (x,), (t,)),
    "vmap of jvp": lambda f, x, t: jax.vmap(lambda t: jax.jvp(lambda y: f(y)[1], (x,), (t,))[1])(
        jax.tree.map(lambda a: jnp.stack([a, 2 * a]), t)
    ),
    "vmap of jvp of grad": lambda f, x, t: jax.vmap(lambda t: jax.jvp(jax.grad(lambda y: f(y)[0]), (x,), (t,))[1])(
        jax.tree.map(lambda a: jnp.stack([a, 2 * a]), t)
    ),
    "jvp of vmap": lambda f, x, t: jax.jvp(
        jax.vmap(lambda y: f(y)[1]), *[(jax.tree.map(lambda a: jnp.stack([a, 2 * a]), y),) for y in (x, t)]
    ),
    "transposed pullback": lambda f, x, t: jax.linear_transpose(jax.vjp(lambda y: f(y)[0], x)[1], jnp.float32(1))((t,)),
}


@tiers(
    default={"name": "statistics", "kind": "jvp", "backend": "xla"},
    full={"name": "statistics", "kind": "jvp of grad", "backend": "xla"},
    rest="full",
    in_turns=True,
    share=2,
)
@backends
@pytest.mark.parametrize("kind", TRANSFORMED)
@pytest.mark.parametrize("name", [name for name in FEATURES if name != "weights"])  # they have derivatives of their own
def test_transformations(name, kind, backend):
    make, floats = split(FEATURES[name], FEATURES[name].draw())
    derive = lambda options: jax.jit(functools.partial(TRANSFORMED[kind], make(options)))
    tangents = drawn_tangents(floats)
    found, right = (derive(options)(floats, tangents) for options in (BOTH[backend], REFERENCE))
    close(found, right, rtol=2e-3, atol=2e-3)


@tiers(full={"name": "sinks"}, share=2, rest="full")
@pytest.mark.parametrize("name", [name for name in FEATURES if name != "weights"])
@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.save_only_these_names("jflex_out", "jflex_lse")])
def test_gradients_are_the_program_of_the_custom_vjp(name, policy):
    make, floats = split(FEATURES[name], FEATURES[name].draw())

    def program(options):
        function = make(options)
        function = function if policy is None else jax.checkpoint(function, policy=policy)
        return jax.jit(jax.value_and_grad(function, has_aux=True)).lower(floats)

    both, reverse = (program(options[name]) for options, name in ((BOTH, "xla"), (BACKENDS, "xla")))
    # A function that caches of JAX hold twice is emitted twice, under a number: which are, depends on earlier tests.
    functions = lambda lowered: {f.strip("} \n") for f in re.sub(r"_\d+\b", "", lowered.as_text()).split("func.func ")}
    assert functions(both) == functions(reverse)
    found, right = (lowered.compile() for lowered in (both, reverse))
    jax.tree.map(np.testing.assert_array_equal, found(floats), right(floats))
    sizes = [compiled.memory_analysis().temp_size_in_bytes for compiled in (found, right)]
    assert sizes[0] == sizes[1]


twice = lambda f, y: jnp.sum(jax.vmap(f)(jnp.stack([y, 2 * y])), axis=0)
through_layers = lambda layer, y: jax.lax.scan(lambda y, _: (y + layer(y), None), y, length=2)[0]
LAYERED = {
    "scan": through_layers,
    "mapped scan": lambda layer, y: twice(functools.partial(through_layers, layer), y),
    "scan of mapped calls": lambda layer, y: through_layers(functools.partial(twice, layer), y),
}


@tiers(full={"name": "scan of mapped calls", "backend": "xla"}, share=3, rest="full")
@backends
@pytest.mark.parametrize("name", LAYERED)
def test_hessian_vector_products_through_a_scan(name, backend):
    """The gradient of a scan drops the rule of a `jax.custom_jvp` inside of it, and keeps the rule of a primitive."""
    x = FEATURES["plain"].draw()["q"]

    def product(options):
        layer = lambda y: jflex.flex_attention(y, y, jnp.sin(y), mask_mod=causal, **options)
        loss = lambda y: jnp.sum(LAYERED[name](layer, y) ** 2)
        return jax.jit(lambda y: jax.jvp(jax.grad(loss), (y,), (jnp.cos(y),))[1])(x)

    assert_close(product(BOTH[backend]), product(REFERENCE), rtol=2e-3, atol=2e-3)


@pytest.mark.full
def test_jacobian_and_hessian():
    make, floats = split(FEATURES["sinks"], FEATURES["sinks"].draw())
    by = lambda options: lambda sinks: make(options)(floats | {"sinks": sinks})[0]
    found = jax.jacfwd(by(BOTH["xla"])), jax.hessian(by(BOTH["xla"]))
    right = jax.jacrev(by(BACKENDS["xla"])), jax.hessian(by(REFERENCE))
    close([f(floats["sinks"]) for f in found], [f(floats["sinks"]) for f in right])


@tiers(rest="full", share=4)
@pytest.mark.parametrize("kind", ["jvp", "jvp of grad"])
@pytest.mark.parametrize("where", ["auto", "explicit", "shard_map"])
@pytest.mark.parametrize("name", ["plain", "sinks", "statistics", "mods and lists"])
@NEEDS_EIGHT_DEVICES
def test_devices(name, where, kind):
    feature, sharded = FEATURES[name], FEATURES[name]
    make, floats = split(feature, feature.draw())
    tangents = drawn_tangents(floats)
    right = jax.jit(functools.partial(TRANSFORMED[kind], make(REFERENCE)))(floats, tangents)
    mesh = mesh_of(AxisType.Explicit if where == "explicit" else AxisType.Auto)
    if where == "shard_map":
        specs = {x: feature.spec(x) for x in feature.draw()}
        local = lambda arrays: feature.attend(BOTH["xla"], **arrays)
        whole = jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=feature.results)
        sharded = feature._replace(attend=lambda options, **arrays: whole(arrays))
    with jax.set_mesh(mesh):
        make, arrays = split(sharded, placed(name, mesh, "qkv"))
        moved = jax.tree.map(lambda x, t: jax.device_put(t, x.sharding), arrays, tangents)
        run = jax.jit(functools.partial(TRANSFORMED[kind], make(BOTH["xla"]))).lower(arrays, moved).compile()
        found = run(arrays, moved)
    close(found, right, rtol=2e-3, atol=2e-3)
    assert where != "auto" or kind != "jvp" or "all-gather" not in run.as_text()


def test_the_explicit_gradient_of_sinks_has_their_sharding():
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        arrays = placed("sinks", mesh, "qkv")
        found = jax.jit(functools.partial(FEATURES["sinks"].differentiated, BACKENDS["xla"]))(arrays)[1]
    assert found["sinks"].sharding.spec in (P(), P(None))


def test_the_explicit_tangent_of_a_gradient_has_its_sharding():
    """A residual connection adds two tangents, which must have one type."""
    feature, mesh = FEATURES["plain"], mesh_of(AxisType.Explicit)

    def product(options, arrays):
        loss = lambda q: jnp.sum((q + feature.attend(options, **arrays | {"q": q})[0]) ** 2)
        return jax.jit(lambda q: jax.jvp(jax.grad(loss), (q,), (jnp.cos(q),)))(arrays["q"])

    with jax.set_mesh(mesh):
        gradient, tangent = product(BOTH["xla"], placed("plain", mesh, "qkv"))
    close((gradient, tangent), product(REFERENCE, feature.draw()), rtol=2e-3, atol=2e-3)
    assert gradient.sharding == tangent.sharding


@pytest.mark.full
def test_a_hessian_vector_product_takes_linear_memory():
    """Of 16,384 tokens; the scores of a head alone would take 1.1 GB."""
    x = jax.ShapeDtypeStruct((1, 16384, 1, 32), jnp.float32)
    mask = jflex.create_block_mask(jflex.masks.causal(), None, None, 16384, 16384)
    loss = lambda q: jnp.sum(jflex.flex_attention(q, q, q, block_mask=mask, **BOTH["xla"]) ** 2)
    program = jax.jit(lambda q, t: jax.jvp(jax.grad(loss), (q,), (t,))[1]).lower(x, x).compile()
    assert program.memory_analysis().temp_size_in_bytes < 100 * 2**20


@tiers(in_turns=True, rest="full")
@backends
@pytest.mark.parametrize("kind", ["grad of grad", "grad of jvp", "three times"])
def test_other_second_and_third_derivatives_name_the_reference(kind, backend):
    make, floats = split(FEATURES["plain"], FEATURES["plain"].draw())
    f, x = lambda q: make(BOTH[backend])(floats | {"q": q})[0], floats["q"]
    along = lambda g: lambda y: jax.jvp(g, (y,), (x,))[1]
    derive = {
        "grad of grad": lambda: jax.grad(lambda y: jnp.sum(jax.grad(f)(y)))(x),
        "grad of jvp": lambda: jax.grad(along(f))(x),
        "three times": lambda: along(along(along(f)))(x),
    }[kind]
    with pytest.raises(NotImplementedError, match=r'derivatives of any order and mode, implementation="reference"'):
        derive()


@pytest.mark.full
def test_a_backward_pass_that_is_refused_has_a_tangent():
    """A table of distances whose gradient no kernel adds in a fixed order."""
    config = jflex.Config(forward_mode=True, interpret=True, deterministic=True)
    (q, k, v), table = jax.random.normal(jax.random.key(0), (3, 1, 16, 1, 16)), jnp.linspace(0.0, 1.0, 31)
    mod = lambda table: lambda s, b, h, q_idx, kv_idx: s + table[jnp.abs(q_idx - kv_idx) + jnp.int32(b)]
    attend = lambda table, **options: jflex.flex_attention(q, k, v, mod(table), **options)
    run = functools.partial(attend, implementation="triton", config=config)
    found, right = (jax.jvp(f, (table,), (table,)) for f in (run, functools.partial(attend, **REFERENCE)))
    close(found, right)
    with pytest.raises(jflex.UnsupportedError, match="is added by atomics, in no fixed order"):
        jax.grad(lambda table: run(table).sum())(table)


def test_explain_names_the_backend_of_tangents():
    x = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.float32)
    account = jflex.explain(x, x, x, **BOTH["xla"])
    assert account.tangents == "xla"
    assert "tangents  xla" in str(account)
    assert jflex.explain(x, x, x).tangents is None
    account = jflex.explain(x, x, x, **BOTH["triton-interpret"])
    assert account.tangents == "triton"
    assert "; tangent 32 x " in account.tiles
    pulled = jax.custom_vjp(lambda x: 2 * x)
    pulled.defvjp(lambda x: (pulled(x), None), lambda _, ct: (2 * ct,))
    account = jflex.explain(x, x, x, lambda s, b, h, q_idx, kv_idx: pulled(s), **BOTH["triton-interpret"])
    assert (account.tangents, account.gradients) == ("xla", "triton")
    assert "primitive `custom_lin` has no meaning on a tile" in str(account)
    assert jflex.explain(x, x, x, **REFERENCE).tangents == "reference"


@pytest.mark.full
def test_a_ring_is_refused():
    x, mesh = jnp.ones((1, 16, 2, 8)), jax.make_mesh((2,), ("context",))
    with pytest.raises(jflex.UnsupportedError, match="'ring'` has derivatives in reverse mode only"):
        jflex.context_parallel_attention(x, x, x, mesh=mesh, strategy="ring", config=jflex.Config(forward_mode=True))

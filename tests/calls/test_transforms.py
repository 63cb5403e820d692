"""Transformations around the call: jit, grad, vmap, scan, checkpoint, export; and what reverse mode cannot do."""

import functools
import itertools

import jax
import jax.numpy as jnp
import jax.test_util
import numpy as np
import pytest
from jax import export

import jflex
from jflex.backends.gpu.triton import Triton
from jflex.backends.xla.attention import Xla
from tests.cases.features import BACKENDS, REFERENCE
from tests.support.dense_masks import causal
from tests.support.rows import in_turns

pytestmark = pytest.mark.full

B, T, H, D = 2, 40, 2, 16
backends = pytest.mark.parametrize("backend", BACKENDS)
assert_close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5)


def drawn(seed=0, *leading, B=B, T=T):
    return jax.random.normal(jax.random.key(seed), (3, *leading, B, T, H, D))


def biases(seed=1, *leading):
    return jax.random.normal(jax.random.key(seed), (*leading, H, T))


def documents(seed, *leading):
    return jnp.sort(jax.random.randint(jax.random.key(seed), (*leading, B, T), 0, 4), axis=-1)


def document_mask(ids):
    return jflex.create_block_mask(lambda b, h, q, k: (ids[b, q] == ids[b, k]) & (q >= k), B, None, T, T, block_size=16)


def attend(options, q, k, v, bias, block_mask=None, **more):
    return jflex.flex_attention(q, k, v, lambda s, b, h, q, k: s + bias[h, q], block_mask, **options, **more)


def loss(options, *args, **more):
    out, lse = attend(options, *args, return_lse=True, **more)
    return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(lse))


def tree_close(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(assert_close, found, expected)


@pytest.fixture
def counted(monkeypatch):
    """How often each pass of a backend was traced. Traces outlive a test: each test takes a `scale` of its own."""
    counts = {"forward": 0, "backward": 0}
    for backend, name in itertools.product((Xla, Triton), counts):
        method = getattr(backend, name)

        def wrapper(self, *args, name=name, method=method):
            counts[name] += 1
            return method(self, *args)

        monkeypatch.setattr(backend, name, wrapper)
    return counts


# --- gradients


@backends
def test_captured_gradients_that_nobody_asks_for_are_not_computed(backend):
    q, k, v = drawn()
    args = q, k, v, jnp.zeros((B, H, T, T + 1))
    run = lambda q, k, v, bias: jflex.flex_attention(
        q, k, v, lambda s, b, h, q, k: s + bias[b, h, q, k], **BACKENDS[backend]
    ).sum()
    shape = (B, H, T, T + 1)

    def made(argnums):
        """Shapes of all intermediate results of the gradient, however deep."""
        return list(shapes_made(jax.make_jaxpr(jax.grad(run, argnums=argnums))(*args)))

    flat = lambda shapes: [x for x in shapes if np.prod(x) == np.prod(shape)]
    assert flat(made((0, 3)))
    assert not flat(made((0, 1, 2)))


def shapes_made(jaxpr):
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "custom_jvp_call":  # jflex's identity before the call
            continue
        yield from (v.aval.shape for v in eqn.outvars if hasattr(v.aval, "shape"))
        for inner in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            if hasattr(inner, "eqns") or hasattr(getattr(inner, "jaxpr", None), "eqns"):
                yield from shapes_made(inner)


@backends
def test_gradients_of_some_arguments(backend):
    args = (*drawn(), biases())
    expected = jax.jit(jax.grad(functools.partial(loss, REFERENCE), range(4)))(*args)
    for argnums in ((0,), (1,), (2,), (3,), (1, 3)):
        found = jax.jit(jax.grad(functools.partial(loss, BACKENDS[backend]), argnums))(*args)
        tree_close(found, tuple(expected[n] for n in argnums))


@backends
def test_gradient_of_lse_alone_and_of_out_alone(backend):
    q, k, v = drawn()
    for pick in (0, 1):
        run = lambda options, q, k, v, pick=pick: jnp.sum(
            jnp.sin(jflex.flex_attention(q, k, v, return_lse=True, **options)[pick])
        )
        gradients = lambda options, run=run: jax.jit(jax.grad(functools.partial(run, options), (0, 1, 2)))(q, k, v)
        tree_close(gradients(BACKENDS[backend]), gradients(REFERENCE))


def test_float64():
    """In float64, plain differences judge the gradients to many digits."""
    with jax.enable_x64(True):
        q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 11, 2, 4), jnp.float64)
        mod = lambda s, b, h, q, k: jnp.sin(jnp.cos(s)) + jnp.tan(b.astype(jnp.float32))
        run = lambda options, q, k, v: jflex.flex_attention(q, k, v, mask_mod=causal, **options).sum()
        for options in (REFERENCE, BACKENDS["xla"]):
            jax.test_util.check_grads(functools.partial(run, options), (q, k, v), order=1, modes=["rev"])
            out = jflex.flex_attention(q, k, v, mod, **options)
            assert out.dtype == jnp.float64


# --- vmap


@in_turns
@backends
@pytest.mark.parametrize("mapped", ["q", "k", "qkv", "c", "m", "qc", "kvm", "qkvcm"])
def test_vmap_over_any_subset(backend, mapped):
    names, size = "qkvcm", 3
    plain = dict(zip(names, (*drawn(), biases(), documents(0)), strict=True))
    full = dict(zip(names, (*drawn(7, size), biases(8, size), documents(9, size)), strict=True))
    args = [full[name] if name in mapped else plain[name] for name in names]
    axes = tuple(0 if name in mapped else None for name in names)

    def run(options, q, k, v, bias, ids):
        return attend(options, q, k, v, bias, document_mask(ids), return_lse=True)

    found = jax.jit(jax.vmap(functools.partial(run, BACKENDS[backend]), axes))(*args)
    right = jax.jit(functools.partial(run, REFERENCE))
    for i in range(size):
        one = [x[i] if axis == 0 else x for x, axis in zip(args, axes, strict=True)]
        tree_close(jax.tree.map(lambda x, i=i: x[i], found), right(*one))


@backends
def test_vmap_over_a_block_mask_itself(backend):
    masks, args = jax.vmap(document_mask)(documents(3, 4)), (*drawn(), biases())
    run = lambda options: jax.jit(lambda block_mask: attend(options, *args, block_mask))
    found, right = jax.jit(jax.vmap(run(BACKENDS[backend])))(masks), run(REFERENCE)
    assert_close(found, jnp.stack([right(jax.tree.map(lambda x, i=i: x[i], masks)) for i in range(4)]))


# --- scan, checkpoint, export


@backends
def test_scan_over_layers(backend, counted):
    x, weights = drawn()[0], jax.random.normal(jax.random.key(5), (4, D, D)) / 4
    block_mask = document_mask(documents(0))

    def run(options, x, weights, bias):
        def layer(x, layer_weights):
            w, c = layer_weights
            return jnp.sin(x + attend(options, x @ w, x, x, c, block_mask, scale=0.31)), None

        return jnp.sum(jax.lax.scan(layer, x, (weights, bias))[0] ** 2)

    grads = [
        jax.jit(jax.grad(functools.partial(run, options), argnums=(0, 1, 2)))(x, weights, biases(1, 4))
        for options in (REFERENCE, BACKENDS[backend])
    ]
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-4), *grads)
    assert counted == {"forward": 1, "backward": 1}


@pytest.mark.parametrize(("names", "calls"), [(("jflex_out", "jflex_lse"), 2), (("jflex_out",), 3), ((), 3)])
def test_checkpoint_policies_can_name_the_residuals(names, calls):
    args = (*drawn(), biases())
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    run = jax.grad(jax.checkpoint(functools.partial(loss, BACKENDS["xla"]), policy=policy), argnums=(0, 3))
    assert str(jax.make_jaxpr(run)(*args)).count("jflex_call[") == calls  # passes of backends
    tree_close(jax.jit(run)(*args), jax.jit(jax.grad(functools.partial(loss, REFERENCE), argnums=(0, 3)))(*args))


@backends
def test_export_round_trip(backend):
    pytest.importorskip("flatbuffers", reason="jax.export writes with it")
    args = (*drawn(), biases())
    run = jax.jit(functools.partial(attend, BACKENDS[backend]))
    exported = export.export(run)(*args)
    restored = export.deserialize(exported.serialize(vjp_order=0))
    assert_close(restored.call(*args), run(*args))


def test_export_with_a_symbolic_batch():
    """A call for one entry under `jax.vmap`, as the message for symbolic sizes says."""
    one = lambda q, k, v: jflex.flex_attention(q[None], k[None], v[None], mask_mod=causal, implementation="xla")[0]
    batched = jax.jit(jax.vmap(one))
    shape = jax.ShapeDtypeStruct((*export.symbolic_shape("b"), T, H, D), jnp.float32)
    arrays = drawn(3, B=3)
    assert_close(export.export(batched)(shape, shape, shape).call(*arrays), batched(*arrays))


@backends
def test_without_jit(backend):
    """`jax.disable_jit` is for debugging the caller: the call and its mods compute the same."""
    q, k, v = drawn(4)

    def looping(bias):
        halved = lambda s, h: jax.lax.fori_loop(0, 2, lambda i, x: x + bias[h, i], s)
        return lambda s, b, h, q, k: jax.lax.cond(q > k, lambda: halved(s, h), lambda: s)

    def total(q, bias):
        return jnp.sum(jflex.flex_attention(q, k, v, looping(bias), mask_mod=causal, **BACKENDS[backend]) ** 2)

    function = jax.grad(total, argnums=(0, 1))
    with jax.disable_jit():
        eager = function(q, biases())
    tree_close(eager, jax.jit(function)(q, biases()))


# --- tracing happens once


@backends
def test_a_fresh_lambda_with_new_captures_is_not_traced_again(backend, counted):
    q, k, v = drawn(11)
    for seed in range(3):
        bias = biases(seed)
        step = lambda q: loss(BACKENDS[backend], q, k, v, bias, scale=0.32)  # noqa: B023, called in this round
        jax.grad(step)(q)
    assert counted == {"forward": 1, "backward": 1}


@backends
def test_new_mask_values_are_not_traced_again(backend, counted):
    args = (*drawn(12, T=T), biases())
    for seed in range(3):
        attend(BACKENDS[backend], *args, document_mask(documents(seed)), scale=0.33)
    assert counted["forward"] == 1


# --- what mods may be


class Slopes:
    """A callable object, also with a method that is a mod."""

    def __init__(self, slopes):
        self.slopes = slopes

    def __call__(self, s, b, h, q, k):
        return s - self.slopes[h] * jnp.abs(q - k).astype(jnp.float32)

    def method(self, s, b, h, q, k):
        return self(s, b, h, q, k)


def sloped(tree, s, b, h, q, k):
    return s - tree["deep"][0].slopes[h] * jnp.abs(q - k).astype(jnp.float32)


@pytest.mark.parametrize("kind", ["lambda", "partial", "object", "method", "jitted"])
def test_states_of_functions(kind):
    q, k, v = drawn()
    slopes = jnp.array([0.1, 0.2])
    make = {
        "lambda": lambda c: lambda s, b, h, q, k: s - c[h] * jnp.abs(q - k).astype(jnp.float32),
        "partial": lambda c: functools.partial(sloped, {"deep": [Slopes(c)]}),
        "object": Slopes,
        "method": lambda c: Slopes(c).method,
        "jitted": lambda c: jax.jit(Slopes(c)),
    }[kind]
    run = lambda options, c: jnp.sum(jflex.flex_attention(q, k, v, make(c), **options) ** 2)
    by_reference = lambda c: jnp.sum(jflex.flex_attention(q, k, v, Slopes(c), **REFERENCE) ** 2)
    total = functools.partial(run, BACKENDS["xla"])
    found, expected = (jax.jit(jax.value_and_grad(f))(slopes) for f in (total, by_reference))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), found, expected)


# --- what reverse mode cannot do


FORWARD_MODE = {
    "jvp": lambda f, x: jax.jvp(f, (x,), (x,)),
    "jacfwd": lambda f, x: jax.jacfwd(f)(x),
    "second_order": lambda f, x: jax.grad(lambda y: jnp.sum(jax.grad(f)(y) ** 2))(x),
    "hessian_vector_product": lambda f, x: jax.jvp(jax.grad(f), (x,), (x,)),
}


@in_turns
@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("kind", FORWARD_MODE)
@backends
def test_higher_derivatives_name_the_reference(backend, kind, jitted):
    _, k, v = drawn()
    run = lambda q: loss(BACKENDS[backend], q, k, v, biases())
    derive = functools.partial(FORWARD_MODE[kind], run)
    with pytest.raises(NotImplementedError, match=r'reverse mode only.*implementation="reference"'):
        (jax.jit(derive) if jitted else derive)(drawn()[0])

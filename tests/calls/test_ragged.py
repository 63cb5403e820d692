"""Packed sequences: `flex_attention_varlen` against the oracle, one sequence at a time. In all padding stands NaN."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jflex
from jflex.varlen import flex_attention_varlen, varlen_block_mask
from tests.calls.test_transforms import shapes_made
from tests.cases.ragged_cases import CASES, OPTIONS, arguments_of, check, found_by, places_of, program_of
from tests.support import evaluation, gpu_compile
from tests.support.dense_masks import causal
from tests.support.rows import tiers

F32 = jnp.float32
backends = pytest.mark.parametrize("backend", evaluation.BACKENDS)
assert_close = functools.partial(np.testing.assert_allclose, rtol=3e-5, atol=3e-5)
tree_close = lambda found, right: jax.tree.map(assert_close, found, right)


def boundaries(*lengths: int) -> jax.Array:
    return jnp.asarray(np.concatenate([[0], np.cumsum(lengths)]), jnp.int32)


# --- against the oracle


@tiers(full={"backend": "triton-interpret", "case": "causal_grouped"}, in_turns=True, share=2, rest="full")
@pytest.mark.parametrize("case", CASES, ids=str)
@backends
def test_against_each_sequence_alone(case, backend):
    """Padding gives nothing, and gets nothing."""
    check(case, backend)
    found, (q, kv) = found_by(case, backend), (ends[-1] for ends in case.ends)
    for x, start in ((found.out, q), (found.query, q), (found.key, kv), (found.value, kv)):
        np.testing.assert_array_equal(np.asarray(x, np.float32)[:, start:], 0)
    np.testing.assert_array_equal(found.lse[:, :, q:], -np.inf)


# --- the definition, and its neighbors


def drawn(N=60, M=60, seed=0):
    rng = np.random.default_rng(seed)
    return tuple(jnp.asarray(rng.normal(size=(n, h, 16)), F32) for n, h in ((N, 4), (M, 2), (M, 2)))


def loss(options, mods, ends, q, k, v, slopes):
    """Of out and lse; the score mod captures `slopes`, by sequence and head."""
    score_mod = lambda s, b, h, q_idx, kv_idx: s * slopes[b, h] - 0.1 * (q_idx - kv_idx).astype(F32)
    out, lse = flex_attention_varlen(
        q, k, v, cu_seqlens_q=ends[0], cu_seqlens_k=ends[1], score_mod=score_mod, return_lse=True, **mods, **options
    )
    return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(jnp.where(lse == -jnp.inf, 0.0, lse)))


@pytest.mark.parametrize("backend", ["xla", "reference"])
def test_no_sequences_and_no_tokens(backend):
    slopes, ends = jnp.ones((0, 4)), boundaries()
    step = jax.jit(jax.value_and_grad(functools.partial(loss, OPTIONS[backend], {"mask_mod": causal}), (1, 2, 3, 4)))
    value, gradients = step((ends, ends), *drawn(), slopes)
    assert value == 60 * 4  # of cos(0)
    assert not any(np.any(x != 0) for x in gradients)
    value, _ = step((boundaries(0, 0), boundaries(0, 0)), *drawn(0, 0), jnp.ones((2, 4)))
    assert value == 0


# --- transformations


@pytest.mark.full
def test_a_mask_made_once_serves_all_layers_of_a_scan():
    q, k, v = drawn()

    def model(options, ends, factors):
        limit = jnp.asarray(7.0)  # a float that the mask captures must not disturb the gradient
        mask_mod = lambda b, h, q_idx, kv_idx: (q_idx - kv_idx).astype(F32) < limit * factors[0]
        mask = varlen_block_mask(ends, ends, 60, 60, mask_mod=mask_mod, block_size=16)

        def layer(x, factor):
            attended = flex_attention_varlen(
                x * factor, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends, block_mask=mask, **options
            )
            return x + attended, None

        return jnp.sum(jnp.sin(jax.lax.scan(layer, q, factors)[0]))

    run = lambda name: jax.jit(jax.value_and_grad(functools.partial(model, OPTIONS[name]), 1))(
        boundaries(20, 10, 25), jnp.array([1.0, 2.0, 0.5])
    )
    tree_close(run("xla"), run("reference"))


@tiers(full={"name": "window_by_head_bfloat16"}, rest="long")
@pytest.mark.parametrize("name", ["window_by_head_bfloat16", "cross_bottom_right", "places"])
def test_compiles_for_a_gpu(name):
    [case] = [case for case in CASES if case.name == name]
    shapes = lambda tree: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
    program = program_of(case, "triton")
    args = shapes(arguments_of(case))
    with jax.default_matmul_precision(None):
        names = {kernel.name for kernel in gpu_compile.compile_or_skip(program, *args)}
    assert {"jflex_forward", "jflex_backward_dkv", "jflex_backward_dq"} <= names


# --- the mask


@pytest.mark.parametrize(("block_size", "is_masked"), [((16, 8), False), ((8, 32), True)])
@hypothesis.settings(max_examples=25)
@hypothesis.given(lengths=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=5, max_size=5))
def test_lists_tell_what_the_elements_tell(lengths, block_size, is_masked):
    """Kinds of blocks, as a dense mask has them."""
    N, M = 203, 208
    ends = [np.concatenate([[0], np.cumsum(x)]).astype(np.int32) for x in np.transpose(lengths)]
    mask = (masked if is_masked else unmasked)(*ends, N, M, block_size)
    (b, q), (other, kv) = places_of(ends[0], N), places_of(ends[1], M)
    dense = (b[:, None] == other[None]) & (b >= 0)[:, None]
    if is_masked:
        dense &= q[:, None] + b[:, None] >= kv[None]
    shape = [-(-n // block) for n, block in zip((N, M), block_size, strict=True)]
    padded = np.zeros((shape[0] * block_size[0], shape[1] * block_size[1]), bool)
    padded[:N, :M] = dense
    blocks = padded.reshape(shape[0], block_size[0], shape[1], block_size[1])
    right = blocks.any((1, 3)).astype(int) + blocks.all((1, 3)).astype(int)
    np.testing.assert_array_equal(mask.states()[0, 0], right)
    np.testing.assert_array_equal(mask.to_elements()[0, 0], dense)


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def unmasked(*args):
    return varlen_block_mask(*args[:4], block_size=args[4])


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def masked(*args):
    mask_mod = lambda b, h, q_idx, kv_idx: q_idx + b >= kv_idx
    return varlen_block_mask(*args[:4], mask_mod=mask_mod, block_size=args[4])


@pytest.mark.full
def test_a_mask_by_head_over_several_steps(monkeypatch):
    monkeypatch.setattr("jflex.block_mask.states._ELEMENTS_PER_STEP", 5 * 256)
    ends, by_head = boundaries(50, 3, 60), lambda b, h, q_idx, kv_idx: q_idx - kv_idx >= 9 * h
    mask = varlen_block_mask(ends, ends, 119, 119, mask_mod=by_head, H=3, block_size=16)
    right = jflex.create_block_mask(mask.mask_mod, None, 3, 119, 119, block_size=16)
    np.testing.assert_array_equal(mask.states(), right.states())
    assert mask.shape == (1, 3, 119, 119)


@pytest.mark.full
def test_no_array_of_all_elements_and_no_evaluation_without_a_mask_mod():
    N = 1 << 15
    make = lambda mask_mod, ends: varlen_block_mask(ends, ends, N, N, mask_mod=mask_mod)
    most = lambda mask_mod: max(
        np.prod(shape) for shape in shapes_made(jax.make_jaxpr(functools.partial(make, mask_mod))(boundaries(9, N - 9)))
    )
    assert most(causal) <= 1 << 24
    assert most(None) <= 2 * (N // 128) ** 2


@pytest.mark.full
def test_tiles_of_the_user_divide_the_blocks_of_a_mask_of_the_call():
    ends = boundaries(200, 56)
    config = jflex.Config(forward=jflex.Tiles(256, 64), interpret=True)
    q, k, v = drawn(256, 256)
    attend = functools.partial(flex_attention_varlen, q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends, mask_mod=causal)
    assert_close(attend(implementation="triton", config=config), attend(implementation="reference"))


# --- wrong input


@pytest.mark.full
def test_traced_boundaries_out_of_range_read_nothing_outside():
    q, k, v = drawn()
    attend = jax.jit(lambda ends: flex_attention_varlen(q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends))
    assert_close(attend(jnp.array([0, 20, 1000], jnp.int32)), attend(boundaries(20, 40)))

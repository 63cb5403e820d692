"""Pickles of BlockMasks and ready mods: what comes back computes the same, and hits the same caches."""

import inspect
import pathlib
import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jflex
from jflex import masks, scores
from jflex.mods.trace import describe, trace_mask_mod, trace_score_mod
from tests.support.sized_calls import ALIBI, call, draw, ids_of, int32

IDS = ids_of(32)
LENGTHS = int32([0, 20, 32])


def create(mod, B=None, H=None):
    return jflex.create_block_mask(mod, B, H, 32, 32, block_size=8)


def bounded(score):
    return jnp.tanh(score)


def listed():
    counts, numbers = np.full((1, 1, 4), 1), np.arange(4).reshape(1, 1, 4, 1)
    return jflex.BlockMask.from_kv_blocks(counts, numbers, block_size=8, seq_lengths=(32, 32))


BLOCK_MASKS = {
    "lambda": lambda: create(lambda b, h, q_idx, kv_idx: (IDS[q_idx] == IDS[kv_idx]) & (q_idx >= kv_idx)),
    "ready": lambda: create(jflex.and_masks(masks.causal(), masks.document(IDS))),
    "calls": lambda: create(lambda b, h, q, k: jnp.where(q // 8 % 2 == 0, q >= k, jnp.take(IDS, q) == 1)),
    "branches": lambda: create(lambda b, h, q, k: jax.lax.cond(h > 0, lambda: q >= k, lambda: q < k), H=2),
    "loop": lambda: create(lambda b, h, q, k: jax.lax.fori_loop(0, 3, lambda i, x: x + q, 0) > k),
    "floats": lambda: create(lambda b, h, q, k: jnp.sin(q.astype(jnp.float32) * 0.3) > 0.5),
    "algebra": lambda: ~(create(masks.sliding_window(3)) & listed()) | create(masks.causal()),
    "selected": lambda: create(masks.padding(LENGTHS[:2]), B=2)[1, :, 1:],
    "lists": listed,
    "packed": lambda: jflex.varlen_block_mask(LENGTHS, LENGTHS, 32, 32, mask_mod=masks.causal(), block_size=8),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=pytest.mark.full) if x in ("packed", "selected", "algebra") else x for x in BLOCK_MASKS],
)
def test_a_block_mask_comes_back(name):
    block_mask = BLOCK_MASKS[name]()
    loaded = pickle.loads(pickle.dumps(block_mask))
    assert type(loaded) is type(block_mask)
    assert jax.tree.structure(loaded) == jax.tree.structure(block_mask)  # the key of JAX's caches
    assert str(loaded) == str(block_mask)
    np.testing.assert_array_equal(loaded.to_elements(), block_mask.to_elements())
    if loaded.traced is not None:
        assert loaded.traced.source == block_mask.traced.source
        assert trace_mask_mod(loaded.mask_mod)[0] == trace_mask_mod(block_mask.mask_mod)[0]


def test_a_loaded_mask_compiles_nothing():
    compiled = []
    attend = jax.jit(lambda x, mask: compiled.append(1) or jflex.flex_attention(x, x, x, block_mask=mask))
    x, block_mask = draw(1, 32, 2, 8), BLOCK_MASKS["lambda"]()
    expected = attend(x, block_mask)
    np.testing.assert_array_equal(attend(x, pickle.loads(pickle.dumps(block_mask))), expected)
    assert len(compiled) == 1


def test_what_is_refused():
    dumped = lambda x: pickle.dumps(create(lambda b, h, q, k: x[q] > 0)) and x
    with pytest.raises(jax.errors.ConcretizationTypeError, match="pickle a traced value"):
        jax.jit(dumped)(jnp.ones(32))
    drawn = create(lambda b, h, q, k: jax.random.uniform(jax.random.fold_in(jax.random.key(0), q)) > 0.5)
    with pytest.raises(TypeError, match=r"<lambda> .*`random_wrap` has no public name\. Pickle the arrays"):
        pickle.dumps(drawn)


def test_another_version_of_jax_is_refused(monkeypatch):
    dumped = pickle.dumps(BLOCK_MASKS["lambda"]())
    monkeypatch.setattr(jax, "__version__", "0.99")
    with pytest.raises(ValueError, match=r"was pickled with JAX .*, and this is 0\.99.*`create_block_mask`"):
        pickle.loads(dumped)


MASK_MODS = {
    "causal": masks.causal(),
    "bottom_right": masks.causal("bottom_right", q_length=8, kv_length=16),
    "sliding_window": masks.sliding_window(3, right=jnp.int32(1)),
    "dilated_window": masks.dilated_window(4, dilation=2),
    "global_tokens": masks.global_tokens(IDS == 1),
    "prefix_lm": masks.prefix_lm(3),
    "prefixes": masks.prefix_lm(int32([1, 2])),
    "padding": masks.padding(int32([1, 2])),
    "document": masks.document(IDS),
    "causal_document": masks.causal_document(IDS),
    "shared_prefix": masks.shared_prefix(IDS, int32([0, 0, 0, 3])),
    "batchify": masks.batchify(masks.causal(), 4),
    "block_diffusion": masks.block_diffusion(8, 2),
    "tree": masks.tree(2, masks.tree_ancestors([-1, 0, 0])),
    "trees": masks.trees(int32([1, 0]), int32([masks.tree_bits([-1, 0]), masks.tree_bits([-1, 0])])),
    "draft_blocks": masks.draft_blocks(3, 2),
    "neighborhood": masks.neighborhood((4, 4), (3, 3), order=masks.morton_order((4, 4))),
    "sliding_tile": masks.sliding_tile((4, 4), (2, 2), (2, 2)),
    "spatial_head": masks.spatial_head(4, 3),
    "temporal_head": masks.temporal_head(4, 3),
    "vision_cross_attention": masks.vision_cross_attention(int32([[0, 2], [2, 4]]), 4),
    "noop": jflex.noop_mask,
    "composed": jflex.or_masks(jflex.not_mask(masks.causal()), masks.document(IDS)),
    "offset": jflex.with_offset(jflex.and_masks(masks.causal(), masks.sliding_window(3)), int32([3, 5])),
}
SCORE_MODS = {
    "alibi": ALIBI,
    "bias": scores.bias(draw(1, 4, 8, 8)),
    "relative_bias": scores.relative_bias(draw(4, 5)),
    "t5_bias": scores.t5_bias(draw(4, 32), bidirectional=True),
    "sandwich": scores.sandwich(4, 16),
    "sigmoid": scores.sigmoid(-1.0),
    "softcap": scores.softcap(jnp.float32(30.0)),
    "activation": scores.activation(bounded, offset=2.0),
    "spatial_bias": scores.spatial_bias(draw(4, 3), ids_of(8, 8)),
    "edge_bias": scores.edge_bias(draw(4, 2, 3), ids_of(8, 8, 2)),
    "offset": jflex.with_offset(ALIBI, 3),
}


@pytest.mark.parametrize(
    ("trace", "mod"),
    [(trace_mask_mod, mod) for mod in MASK_MODS.values()] + [(trace_score_mod, mod) for mod in SCORE_MODS.values()],
    ids=[*MASK_MODS, *SCORE_MODS],
)
def test_a_ready_mod_comes_back(trace, mod):
    loaded = pickle.loads(pickle.dumps(mod))
    (traced, operands), (again, values) = trace(mod), trace(loaded)
    assert traced == again
    assert describe(loaded) == describe(mod)
    for x, y in zip(operands, values, strict=True):
        np.testing.assert_array_equal(x, y)


def test_every_ready_mod_is_tried():
    tried = {describe(mod).split(".")[0] for mod in (*MASK_MODS.values(), *SCORE_MODS.values())}
    others = {"document_ids_from_lengths", "morton_order", "reorder", "restore", "tile_order", "tree_ancestors",
              "tree_bits", "undo_softmax", "alibi_slopes"}  # fmt: skip
    functions = {name for room in (masks, scores) for name, x in vars(room).items() if inspect.isfunction(x)}
    assert functions - others <= tried | {"causal_document"}


def test_ready_mods_made_inside_jit():
    """Their arrays are evaluated at once: they pickle, and work outside."""
    mods = []

    @jax.jit
    def make():
        mods.extend(
            (masks.document(np.arange(8) // 4), masks.sliding_window(np.int32(3)), masks.padding(np.array([3])))
        )
        mods.append(jflex.with_offset(masks.causal(), np.array([3])))

    make()
    for mod in mods:
        loaded = pickle.loads(pickle.dumps(mod))
        np.testing.assert_array_equal(jflex.create_mask(loaded, 1, None, 8, 8), jflex.create_mask(mod, 1, None, 8, 8))
    with pytest.raises(jax.errors.ConcretizationTypeError, match="pickle a traced value"):
        jax.jit(lambda slopes: pickle.dumps(scores.alibi(slopes)) and slopes)(jnp.ones(4))


def test_rope_comes_back():
    rope, vector = jflex.rope(500.0, scaling=jflex.rotary.LinearScaling(2.0)), jnp.ones(8)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(rope))(vector, 0, 0, 3), rope(vector, 0, 0, 3))


def test_a_loaded_mod_knows_its_sizes():
    with pytest.raises(ValueError, match=r"`slopes` of `alibi` .*Got 8 for a call with 4 heads"):
        call(score_mod=pickle.loads(pickle.dumps(ALIBI)))
    block_mask = pickle.loads(pickle.dumps(BLOCK_MASKS["lambda"]()))
    with pytest.raises(ValueError, match=r"`q_idx` must hold an element for each query"):
        block_mask.with_lengths(40, 32)


@pytest.mark.full
def test_another_process_loads_them(tmp_path: pathlib.Path):
    mods = (BLOCK_MASKS["lambda"](), masks.document(IDS), scores.softcap(30.0))
    path = tmp_path / "mods"
    path.write_bytes(pickle.dumps(mods))
    code = (
        f"import pickle, jflex, jax.numpy as jnp; block_mask, mask, score = pickle.load(open({str(path)!r}, 'rb'))\n"
        "x = jnp.ones((1, 32, 2, 8))\n"
        "print(block_mask, float(jflex.flex_attention(x, x, x, score, block_mask).sum()), bool(mask(0, 0, 1, 1)))"
    )
    root = pathlib.Path(__file__).parents[2]
    shown = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True).stdout
    assert shown == f"{mods[0]} 512.0 True\n"

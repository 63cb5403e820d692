"""Blocks that are selected inside of a step: the mask that indices make, the selection, and attention over it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jflex
from jflex.block_mask.lists import states_from_lists
from tests.cases import mask_pairs
from tests.cases.mask_pairs import MaskPair
from tests.cases.table import Case, Sizes
from tests.support import evaluation
from tests.support.dense_masks import pooled_states
from tests.support.hopper_emulator import emulated
from tests.support.rows import in_turns, tiers

BF16 = {"dtype": "bfloat16"}


def selected_elements(indices, H, block, b, h, q, k):
    """The elements that indices select, by looking for each key's block among those of its query."""
    of_head = indices[np.minimum(b, indices.shape[0] - 1), h // (H // indices.shape[1]), q // block[0]]
    return (of_head == np.asarray(k // block[1])[..., None]).any(-1)


@dataclasses.dataclass(frozen=True)
class Selected:
    """A call whose BlockMask is made inside of it, of traced indices: some negative, too large, or there twice."""

    name: str
    sizes: Sizes
    mask: MaskPair | None = mask_pairs.causal
    block: tuple[int, int] = (32, 32)
    k: int = 3
    heads: int = 0  # of the indices; 0 for the key heads
    batch: int = 0  # of the indices; 0 for that of the call
    dtype: str = "float32"

    def __str__(self):
        return self.name

    @functools.cached_property
    def case(self):
        """The same as a dense mask."""
        n, inner = self.sizes, self.mask or mask_pairs.everything

        def captures(rng, n):
            rows, columns = -(-n.T // self.block[0]), -(-n.S // self.block[1])
            shape = self.batch or n.B, self.heads or n.Hkv, rows, self.k
            indices = rng.integers(-2, columns + 2, shape)
            if self.k > 1:
                indices[..., -1] = np.where(rng.random(shape[:3]) < 0.5, indices[..., 0], indices[..., -1])
            return {"indices": indices.astype(np.int32), **inner.captures(rng, n)}

        def exact(b, h, q, k, c):
            places = [x[..., None][..., 0] for x in np.broadcast_arrays(b, h, q, k)]
            return selected_elements(c["indices"], n.Hq, self.block, *places) & inner.exact(b, h, q, k, c)

        return Case(self.name, mask=MaskPair(inner.jax, exact, captures), sizes=n, dtype=self.dtype)

    def block_mask(self, captures):
        """Of the captured arrays, which may be traced."""
        n, mod = self.sizes, None if self.mask is None else self.mask.jax(captures)
        made = functools.partial(jflex.block_mask_from_indices, captures["indices"], n.T, n.S)
        return made(H=n.Hq, block_size=self.block, mask_mod=mod)

    def attend(self, backend):
        """For `evaluation.everything_by`."""
        return lambda x, _, q, k, v, floats: evaluation.call(
            self.case, backend, q, k, v, {}, x.mask, self.block_mask(x.mask)
        )


CASES = [
    Selected("selected_causal", Sizes(T=130)),
    Selected("selected_grouped", Sizes(T=150, Hq=4, Hkv=2, D=16, Dv=8), block=(32, 16), k=5, **BF16),
    Selected("selected_without_mask", Sizes(B=2, T=70, S=100, Hq=2), None, k=2, batch=1),
    Selected("selected_for_all_heads", Sizes(T=96, Hq=4, Hkv=2), block=(16, 32), heads=1),
    Selected("selected_documents", Sizes(T=128, Hq=2), mask_pairs.documents, k=4),
    Selected("selected_by_query_head", Sizes(T=96, Hq=4, Hkv=2), mask_pairs.window_by_head, k=2),
    Selected("selected_one", Sizes(B=1, T=200, Hq=2, Hkv=1), block=(64, 64), k=1, **BF16),
    Selected("selected_more_than_there_are", Sizes(B=1, T=64), k=7),
]
HOPPER = [
    Selected("selected_hopper", Sizes(B=1, T=520, Hq=4, Hkv=2, D=64), block=(128, 128), **BF16),
    Selected("selected_hopper_64", Sizes(B=1, T=260, Hq=4, Hkv=2, D=128), block=(128, 64), k=4, **BF16),
]
cases = pytest.mark.parametrize("case", CASES, ids=str)


def compare(case, found):
    """Fails unless output, lse and all gradients are those of float64."""
    right = evaluation.plain(case.case), evaluation.exact(case.case)
    evaluation.compare_forward(case.case, found, *right)
    evaluation.compare_gradients(case.case, found, *right, ("query", "key", "value"))


@tiers({"backend": "xla", "case": "selected_grouped"}, {"case": "selected_grouped"}, in_turns=True, rest="full")
@cases
@pytest.mark.parametrize("backend", ["reference", *evaluation.BACKENDS])
def test_attention_is_that_of_the_dense_mask(case, backend):
    compare(case, evaluation.everything_by(case.case, case.attend(backend)))


@pytest.mark.full
@in_turns
@cases
@pytest.mark.parametrize("traced", [False, True])
def test_lists_hold_the_selected_blocks(case, traced):
    """Each query block with its state, the transpose alike, and as many entries as it selects."""
    n, captures = case.sizes, evaluation.draw(case.case).mask
    visible = evaluation.exact(case.case).found.visible[: case.batch or n.B]
    block_mask = (jax.jit(case.block_mask) if traced else case.block_mask)(jax.tree.map(jnp.asarray, captures))
    np.testing.assert_array_equal(block_mask.to_elements(), visible)
    found = block_mask.lists
    turned = type(found)(*found[4:], *found[:4])
    np.testing.assert_array_equal(states_from_lists(found), pooled_states(visible, case.block))
    np.testing.assert_array_equal(states_from_lists(turned), pooled_states(visible, case.block).swapaxes(2, 3))
    assert max(block_mask.kv_indices.shape[-1], block_mask.full_kv_indices.shape[-1]) <= max(case.k, 1)


@pytest.mark.full
def test_integers_of_any_width():
    """None wraps around to a block that exists."""
    for dtype in (np.int8, np.int64, np.uint32):
        wrong = np.array([[[[0, np.iinfo(dtype).max if dtype != np.int64 else 2**32]]]], dtype)
        for given in (wrong, [[[[0, -1]]]], *([jnp.asarray(wrong)] if dtype != np.int64 else [])):
            mask = jflex.block_mask_from_indices(given, 32, 64, block_size=32)
            assert mask.to_dense().tolist() == [[[[1, 0]]]]
    many = jflex.block_mask_from_indices(np.full((1, 1, 1, 1), 255, np.uint8), 1, 300, block_size=1)
    assert np.flatnonzero(many.to_dense()).tolist() == [255]


@pytest.mark.full
@pytest.mark.parametrize(
    ("shape", "lengths"), [((2, 1, 3, 0), (96, 64)), ((1, 1, 0, 2), (0, 64)), ((1, 2, 2, 1), (64, 0))]
)
def test_nothing_to_select(shape, lengths):
    mask = jflex.block_mask_from_indices(jnp.zeros(shape, jnp.int32), *lengths, block_size=32)
    assert not mask.to_dense().any()
    q, k = jnp.ones((shape[0], lengths[0], 2, 8)), jnp.ones((shape[0], lengths[1], 2, 8))
    assert not jflex.flex_attention(q, k, k, block_mask=mask, implementation="xla").any()


# ---------------------------------------------------------------- selection


def best_blocks(scores, k, sizes, causal, local, initial, visible):
    """The definition, one row after the other, with Python's stable sort."""
    rows, columns = scores.shape
    chosen = np.full((rows, k), -1)
    for r in range(rows):
        positions = range(r * sizes[0], (r + 1) * sizes[0])
        own = {p // sizes[1] for p in positions}
        allowed = [
            c for c in range(columns) if visible[r, c] and (not causal or c * sizes[1] <= positions[-1])
        ]  # fmt: skip
        always = {c for c in allowed if c < initial}
        if local:
            always |= {c for c in allowed if min(own) - local < c <= max(own)}
        rest = [c for c in allowed if c not in always and scores[r, c] > -np.inf]
        order = sorted(always) + sorted(rest, key=lambda c: -scores[r, c])
        chosen[r, : len(order[:k])] = order[:k]
    return chosen


@tiers(default={"causal": "True-1-0", "sizes": "(32, 32)"}, in_turns=True)
@pytest.mark.parametrize("sizes", [(32, 32), (64, 32), (32, 64), (96, 64)], ids=str)
@pytest.mark.parametrize(
    ("causal", "local", "initial"), [(True, 1, 0), (True, 2, 1), (True, 0, 0), (False, 0, 1), (False, 1, 0)]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_select_blocks_follows_its_definition(sizes, causal, local, initial, dtype):
    rng = np.random.default_rng(0)
    scores = rng.integers(-2, 3, (2, 3, 7, 9)).astype(jnp.dtype(dtype))
    scores[rng.random(scores.shape) < 0.2] = -0.0
    scores[rng.random(scores.shape) < 0.1] = -np.inf
    scores[rng.random(scores.shape) < 0.1] = np.nan
    scores[rng.random(scores.shape) < 0.1] = np.inf
    visible = rng.random((2, 1, 7, 9) if causal else (7, 9)) < 0.8
    for k in (5, 12):
        options = {"block_size": sizes, "causal": causal, "local_blocks": local, "initial_blocks": initial}
        select = jax.jit(functools.partial(jflex.select_blocks, k=k, **options))
        found = select(jnp.asarray(scores), visible=jnp.asarray(visible))
        assert found.dtype == jnp.int32
        for b, h in np.ndindex(2, 3):
            shown = np.broadcast_to(visible, scores.shape)[b, h]
            right = best_blocks(scores[b, h].astype(np.float64), k, sizes, causal, local, initial, shown)
            np.testing.assert_array_equal(found[b, h], right)


@pytest.mark.full
@pytest.mark.parametrize("queries", ["first", "mean"])
def test_block_scores_against_float64(queries):
    rng = np.random.default_rng(1)
    query, key = rng.normal(size=(2, 75, 6, 8)), rng.normal(size=(1, 50, 3, 8))
    found = jflex.block_scores(
        jnp.asarray(query, jnp.float32), jnp.asarray(key, jnp.float32), block_size=(32, 16), queries=queries
    )
    means = [
        np.stack([x[:, i : i + n].mean(1) for i in range(0, x.shape[1], n)], 1) for x, n in ((query, 32), (key, 16))
    ]
    of_queries = query[:, ::32] if queries == "first" else means[0]
    right = np.einsum("brkgd,xckd->bkrgc", of_queries.reshape(2, 3, 3, 2, 8), means[1]).mean(3)
    np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-5)


def arrays(seed=0, *leading):
    q, k, v = (jax.random.fold_in(jax.random.key(seed), n) for n in range(3))
    return (
        jax.random.normal(q, (*leading, 2, 96, 4, 16)),
        *(jax.random.normal(x, (*leading, 2, 96, 2, 16)) for x in (k, v)),
    )


def assert_close(found, right):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, right)


@pytest.mark.full
@in_turns
@pytest.mark.parametrize("axes", [("data", None, "model"), ("data", "model"), ("data", None, None, "model")], ids=str)
@pytest.mark.parametrize("queries", ["first", "mean"])
def test_scores_of_shared_keys_in_a_mesh_with_explicit_axes(axes, queries):
    """Keys of batch size 1, and any axis of queries and keys sharded."""
    (query, key, _), mesh = (
        arrays(),
        jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Explicit,) * 2),
    )
    score = functools.partial(jflex.block_scores, block_size=16, queries=queries)
    right = score(query, key[:1])
    with jax.set_mesh(mesh):
        place = lambda x, *spec: jax.device_put(x, jax.NamedSharding(mesh, jax.P(*spec)))
        found = jax.jit(score)(place(query, *axes), place(key[:1], None, *axes[1:]))
    assert_close(np.asarray(found), np.asarray(right))


# ---------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("case", HOPPER, ids=str)
def test_hopper(case):
    compare(case, evaluation.everything_by(case.case, case.attend("mosaic_gpu")))


@pytest.mark.full
def test_hopper_emulated():
    case = Selected("selected_emulated", Sizes(B=1, T=200, Hq=2, Hkv=1, D=64), block=(128, 64), k=2, **BF16)
    with emulated():
        compare(case, evaluation.everything_by(case.case, case.attend("mosaic_gpu-emulated"), compiled=False))

"""Features of calls: the same call with arrays that a step changes, for tests of transformations and of sharding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import jflex
from jflex import masks, scores
from tests.cases.score_pairs import F32
from tests.support.dense_masks import causal

B, T, S, HQ, HKV, D = 2, 24, 40, 4, 2, 16
REFERENCE = {"implementation": "reference"}
BACKENDS = {
    "xla": {"implementation": "xla"},
    "triton-interpret": {"implementation": "triton", "config": jflex.Config(interpret=True)},
}
STATS = ("lse", "max", "entropy")
ROWS, SCORES = P("data", None, "model"), P("data", "model")


class Feature(NamedTuple):
    """A call.

    Attributes:
      attend: Takes the options of a backend and the arrays by name; returns a tree of arrays.
      sizes: Of query, key and value: T, S, Hq, Hkv.
      more: Draws the other arrays.
      specs: How batch and heads of the other arrays are sharded; those that are not named are replicated.
      results: How batch and heads of the results are sharded.
    """

    attend: Callable[..., Any]
    sizes: tuple[int, int, int, int] = (T, S, HQ, HKV)
    more: Callable[[np.random.Generator], dict[str, Any]] = lambda rng: {}
    specs: dict[str, P] | None = None
    results: Any = (ROWS, SCORES)

    def draw(self, seed: int = 0) -> dict[str, jax.Array]:
        """All arrays."""
        rng, (T, S, Hq, Hkv) = np.random.default_rng(seed), self.sizes
        shapes = {"q": (B, T, Hq, D), "k": (B, S, Hkv, D), "v": (B, S, Hkv, D)}
        return {name: normal(rng, *shape) for name, shape in shapes.items()} | self.more(rng)

    def spec(self, name: str) -> P:
        return ROWS if name in "qkv" else (self.specs or {}).get(name, P())

    def loss(self, options: dict[str, Any], floats: dict[str, jax.Array], others: dict[str, jax.Array]) -> Any:
        """A sum over all results, and the results."""
        results = self.attend(options, **floats, **others)
        finite = (jnp.where(jnp.isneginf(x), 0, x).astype(F32) for x in jax.tree.leaves(results))
        return sum(jnp.sum(jnp.sin(x + i)) for i, x in enumerate(finite)), results

    def differentiated(self, options: dict[str, Any], arrays: dict[str, jax.Array]) -> Any:
        """The sum, the results, and the gradients of all floating-point arrays."""
        floats = {name: x for name, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.floating)}
        others = {name: x for name, x in arrays.items() if name not in floats}
        return jax.value_and_grad(lambda floats: self.loss(options, floats, others), has_aux=True)(floats)


def normal(rng: np.random.Generator, *shape: int) -> jax.Array:
    return jnp.asarray(rng.normal(size=shape), F32)


def ids(rng: np.random.Generator, *shape: int) -> jax.Array:
    return jnp.asarray(np.sort(rng.integers(0, 3, shape), axis=-1), jnp.int32)


def whole(*ends: int) -> Callable[[np.random.Generator], Any]:
    """Integers in ascending order, the last of them `ends`."""
    return lambda rng: jnp.asarray(np.sort(np.concatenate([rng.integers(0, ends[-1], 2), ends])), jnp.int32)


def plain(options, q, k, v):
    return jflex.flex_attention(q, k, v, return_lse=True, **options)


def mods_and_lists(options, q, k, v, bias, shared, slopes, ids):
    """Mods that capture arrays of each batch entry and head, integers too; ready ones among them."""

    def score_mod(s, b, h, q_idx, kv_idx):
        s = scores.alibi(slopes)(s * shared, b, h, q_idx, kv_idx) + bias[b, h, q_idx]
        return jnp.where(ids[b, q_idx] == 1, s, 2 * s)

    mask_mod = jflex.and_masks(masks.document(ids), masks.causal())
    block_mask = jflex.create_block_mask(mask_mod, q.shape[0], None, T, T, block_size=16)
    return jflex.flex_attention(q, k, v, score_mod, block_mask, return_lse=True, **options)


def lengths(options, q, k, v, bias, kv_lengths):
    score_mod = lambda s, b, h, q_idx, kv_idx: s * bias[b, h]
    mask_mod = lambda b, h, q_idx, kv_idx: (kv_idx + jnp.int32(bias[b, h] > 0)) % 3 != 0
    how = {"mask_mod": mask_mod, "kv_lengths": kv_lengths, "return_lse": True}
    return jflex.flex_attention(q, k, v, score_mod, **how, **options)


def sinks(options, q, k, v, sinks):
    return jflex.flex_attention(q, k, v, mask_mod=causal, sinks=sinks, return_lse=True, **options)


def statistics(options, q, k, v, slopes):
    score_mod = lambda s, b, h, q_idx, kv_idx: s + slopes[h] * (q_idx - kv_idx).astype(F32)
    mask_mod = lambda b, h, q_idx, kv_idx: q_idx > kv_idx  # the first row is empty
    return jflex.flex_attention(q, k, v, score_mod, mask_mod=mask_mod, return_stats=STATS, **options)


def dropout(options, q, k, v, key):
    return jflex.flex_attention(q, k, v, dropout_rate=0.3, dropout_key=key, return_lse=True, **options)


def vector_mods(options, q, k, v, gain, gates):
    mods = {
        "query_mod": lambda x, b, h, i: x * gain[b, i],
        "key_mod": jflex.rope(100.0),
        "value_mod": lambda x, b, h, i: x * gain[b, i // 2],
        "output_mod": lambda x, lse, b, h, i: x * jax.nn.sigmoid(gates[h] + lse),
    }
    return jflex.flex_attention(q, k, v, mask_mod=causal, return_lse=True, **mods, **options)


def packed(options, q, k, v, slopes, ends):
    """Each batch entry is a packing of its own."""

    def one(q, k, v, slopes, ends):
        mod = lambda s, b, h, q_idx, kv_idx: s * slopes[b, h] - 0.1 * (q_idx - kv_idx).astype(F32)
        how = {"score_mod": mod, "mask_mod": causal, "return_lse": True}
        return jflex.flex_attention_varlen(q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends, **how, **options)

    results = [one(*arrays) for arrays in zip(q, k, v, slopes, ends, strict=True)]
    return jax.tree.map(lambda *xs: jnp.stack(xs), *results)


def weights(options, q, k, v, slopes, ids, rows):
    score_mod = lambda s, b, h, q_idx, kv_idx: s * slopes[h]
    return jflex.attention_weights(q, k, score_mod, mask_mod=masks.document(ids), rows=rows)


def jax_nn(options, q, k, v, bias, shown, lengths):
    how = {"query_seq_lengths": lengths, "key_value_seq_lengths": lengths, "is_causal": True}
    return jflex.dot_product_attention(q, k, v, bias, shown, **how, **options)


def selected_blocks(options, q, k, v):
    """Of which blocks each query block attends to, the call decides."""
    chosen = jflex.select_blocks(jflex.block_scores(q, k, block_size=16), 2, block_size=16)
    mask = jflex.block_mask_from_indices(chosen, 48, 48, H=q.shape[2], block_size=16, mask_mod=masks.causal())
    return jflex.flex_attention(q, k, v, block_mask=mask, return_lse=True, **options)


FEATURES = {
    "plain": Feature(plain),
    "mods and lists": Feature(
        mods_and_lists,
        (T, T, HQ, HKV),
        lambda rng: {
            "bias": normal(rng, B, HQ, T), "shared": normal(rng), "slopes": normal(rng, HQ), "ids": ids(rng, B, T),
        },
        {"bias": SCORES, "slopes": P("model"), "ids": P("data")},
    ),
    "lengths, few queries": Feature(
        lengths,
        (2, S, HQ, HKV),
        lambda rng: {"bias": normal(rng, B, HQ), "kv_lengths": whole(0, S)(rng)[:2]},
        {"bias": SCORES, "kv_lengths": P("data")},
    ),
    "lengths": Feature(
        lengths,
        more=lambda rng: {"bias": normal(rng, B, HQ), "kv_lengths": whole(0, S)(rng)[2:]},
        specs={"bias": SCORES, "kv_lengths": P("data")},
    ),
    "dropout": Feature(dropout, more=lambda rng: {"key": jax.random.key(rng.integers(9))}),
    "vector mods": Feature(
        vector_mods,
        more=lambda rng: {"gain": normal(rng, B, S, D), "gates": normal(rng, HQ)},
        specs={"gain": P("data"), "gates": P("model")},
    ),
    "statistics": Feature(
        statistics,
        more=lambda rng: {"slopes": normal(rng, HQ) / 4},
        specs={"slopes": P("model")},
        results=(ROWS, jflex.AttentionStats(SCORES, SCORES, SCORES)),
    ),
    "weights": Feature(
        weights,
        (S, S, HQ, HKV),
        lambda rng: {"slopes": normal(rng, HQ), "ids": ids(rng, B, S), "rows": jnp.asarray(rng.integers(-S, S, 3))},
        {"slopes": P("model"), "ids": P("data")},
        SCORES,
    ),
    "packed": Feature(
        packed,
        (T, T, HQ, HKV),
        lambda rng: {"slopes": normal(rng, B, 3, HQ), "ends": jnp.stack([whole(0, n)(rng) for n in (T - 2, T)])},
        {"slopes": P("data", None, "model"), "ends": P("data")},
        (ROWS, P("data", None, "model")),
    ),
    "sinks": Feature(sinks, more=lambda rng: {"sinks": normal(rng, HQ)}, specs={"sinks": P("model")}),
    "selected blocks": Feature(selected_blocks, (48, 48, HQ, HKV)),
    "jax_nn": Feature(
        jax_nn,
        (T, T, HQ, HKV),
        lambda rng: {
            "bias": normal(rng, 1, HQ, T, T), "shown": jnp.asarray(rng.random((B, 1, 1, T)) < 0.7),
            "lengths": whole(T)(rng)[:2],
        },
        {"bias": P(None, "model"), "shown": P("data"), "lengths": P("data")},
        ROWS,
    ),
}  # fmt: skip

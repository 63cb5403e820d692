"""Cases of paged attention: requests, mods, pages, dtypes. `tests/support/paged_evaluation.py` runs them."""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal

import jax.numpy as jnp
import numpy as np

from tests.cases import mask_pairs, score_pairs, vector_pairs
from tests.cases.mask_pairs import MaskPair, same
from tests.cases.score_pairs import F32, ScorePair
from tests.cases.table import Sizes
from tests.cases.vector_pairs import VectorPair
from tests.support import oracle


@dataclasses.dataclass(frozen=True, eq=False)
class PagedCase:
    """One problem.

    Attributes:
      name: For messages, and the seed.
      queries: Of each request.
      lengths: Keys of each request.
      padding: Packed rows behind those of the last request.
      score: A score mod and its numpy form, or None.
      mask: Likewise.
      key: A key mod and its numpy form, or None.
      value: A value mod, likewise.
      Hq: Query heads.
      Hkv: Key heads.
      D: Head size.
      Dv: Head size of values; None for D.
      page_size: Keys in a page.
      layers: Of a stacked cache, or None.
      scale: Of the scores; None for the default.
      factor: Of the queries: how large scores are.
      rope: Columns of the rotated key of a latent cache, whose values are its other columns; None for a cache of both.
        With eight bits, these columns have bfloat16.
      normalize: As in the call; without a softmax, the lse is 0 here.
      dropout: The rate; the key is that of `dropout_bits.KEY`.
      dtype: Of all arrays, but for keys and values of eight bits.
      held: The dtype of eight bits of keys and values; None for `dtype`.
      scales: Of these: one for each token and head, or for each head.
    """

    name: str
    queries: tuple[int, ...] = (1, 1, 1)
    lengths: tuple[int, ...] = (33, 5, 64)
    padding: int = 0
    score: ScorePair | None = None
    mask: MaskPair | None = None
    key: VectorPair | None = None
    value: VectorPair | None = None
    Hq: int = 4
    Hkv: int = 2
    D: int = 16
    Dv: int | None = None
    page_size: int = 16
    layers: int | None = None
    scale: float | None = None
    factor: float = 1.0
    rope: int | None = None
    normalize: Literal["softmax", "none"] = "softmax"
    dropout: float = 0.0
    dtype: str = "float32"
    held: str | None = None
    scales: Literal["token", "head"] = "token"

    def __str__(self) -> str:
        return self.name if self.dtype == "float32" else f"{self.name}_{self.dtype}"

    # What `tolerance` asks of a case.
    qk_dtype = ""
    within = True

    @property
    def sizes(self) -> Sizes:
        return Sizes(D=self.D)

    @property
    def N(self) -> int:
        """Packed rows."""
        return sum(self.queries) + self.padding

    @property
    def R(self) -> int:
        """Requests."""
        return len(self.queries)

    @property
    def S(self) -> int:
        """More than any position."""
        return max(128, *self.lengths)

    @property
    def indptr(self) -> np.ndarray:
        """Where the queries of each request begin, and where the last ones end."""
        return np.cumsum([0, *self.queries]).astype(np.int32)

    def pages_of(self, length: int) -> int:
        """Pages of a request."""
        return -(-length // self.page_size)


def in_dtype(case: PagedCase, dtype: str) -> PagedCase:
    """The same case in another dtype."""
    return dataclasses.replace(case, dtype=dtype)


# --- mods that capture

slopes = ScorePair(
    lambda c: lambda s, b, h, q, k: s - c["slopes"][h] * (q - k).astype(F32),
    oracle.Score(lambda s, b, h, q, k, c: s - c["slopes"][h] * (q - k)),
    lambda rng, n: {"slopes": (rng.random(n.Hq) / 4).astype(np.float32)},
)
bias_by_key = ScorePair(
    lambda c: lambda s, b, h, q, k: s + c["bias"][b, h, k],
    oracle.Score(lambda s, b, h, q, k, c: s + c["bias"][b, h, k]),
    lambda rng, n: {"bias": rng.normal(size=(n.R, n.Hq, n.S)).astype(np.float32)},
)
documents = same(
    lambda b, h, q, k, c: (c["document"][b, q] == c["document"][b, k]) & (q >= k),
    lambda rng, n: {"document": np.sort(rng.integers(0, 4, (n.R, n.S)), axis=1).astype(np.int32)},
)
prefix_by_request = same(
    lambda b, h, q, k, c: (k < c["prefix"][b]) | (q >= k),
    lambda rng, n: {"prefix": rng.integers(0, 40, n.R).astype(np.int32)},
)
chosen_by_row = MaskPair(
    lambda c: lambda b, h, q, k: k <= jnp.where(q % 2 == 0, q, 10 * b),
    lambda b, h, q, k, c: k <= np.where(q % 2 == 0, q, 10 * b),
)
random_by_key = same(lambda b, h, q, k, c: c["seen"][b, k], lambda rng, n: {"seen": rng.random((n.R, n.S)) < 0.4})
window = same(lambda b, h, q, k, c: (q >= k) & (q - k < 8))
sinks_and_window = same(lambda b, h, q, k, c: ((q - k < 16) | (k < 4)) & (q >= k))

MIXED = {"queries": (1, 20, 1, 33), "lengths": (50, 20, 7, 60)}
CASES = [
    PagedCase("decode"),
    PagedCase("speculative", (2, 5, 3), (40, 5, 19), mask=mask_pairs.causal),
    PagedCase("mixed", **MIXED, mask=mask_pairs.causal),
    PagedCase("mixed_with_padding_and_empty_requests", (0, 1, 0, 20, 2, 0), (0, 30, 9, 24, 0, 0), 5, slopes),
    PagedCase("nothing_but_empty_requests", (2, 0, 1), (0, 0, 0), 1, mask=mask_pairs.causal),
    PagedCase("one_key_each", (1, 1), (1, 1), Hq=8),
    PagedCase("more_queries_than_keys", (34, 1), (1, 20), 3, mask=mask_pairs.causal),
    PagedCase("pages_of_1", (1, 18), (21, 18), page_size=1, mask=mask_pairs.causal),
    PagedCase("pages_of_64", (3, 1), (130, 64), page_size=64, mask=mask_pairs.causal),
    PagedCase("pages_of_48", (1, 20), (150, 48), page_size=48, mask=mask_pairs.causal, Hkv=4),
    PagedCase("group_5", (1, 3, 17), (9, 40, 33), Hq=10, score=slopes, mask=mask_pairs.causal),
    PagedCase("softcap_group_8", (1, 4), (48, 20), Hq=16, score=score_pairs.softcap, factor=8.0),
    PagedCase("softcap_of_one_key_head", (5, 1), (48, 20), Hq=8, Hkv=1, score=score_pairs.softcap, mask=window),
    PagedCase("values_of_another_size", (1, 18), (30, 40), D=32, Dv=16, mask=window),
    PagedCase("head_size_80", (1, 2), (30, 40), D=80, score=bias_by_key),
    PagedCase("head_sizes_24_80", (1, 17), (30, 40), D=24, Dv=80, Hq=2, scale=0.3, mask=documents),
    PagedCase("window", (1, 1, 20), (8, 9, 70), mask=window, page_size=4),
    PagedCase("sinks", (1, 3, 20), (100, 9, 70), mask=sinks_and_window),
    PagedCase("bias_by_key", **MIXED, score=bias_by_key, mask=mask_pairs.causal, layers=3),
    PagedCase("prefix_by_request", (1, 20, 4), (60, 40, 50), mask=prefix_by_request),
    PagedCase("chosen_by_row", (1, 20, 4), (60, 40, 50), mask=chosen_by_row),
    PagedCase("random_by_key", (1, 20, 4), (60, 40, 50), mask=random_by_key),
    PagedCase("random_elements", (1, 6), (60, 40), mask=mask_pairs.random_elements),
    PagedCase("extreme_logits", (1, 4), (60, 40), factor=100.0, mask=mask_pairs.causal),
    PagedCase("layers", (1, 2), (20, 33), layers=2, Hq=2),
    PagedCase("divided", (1, 1, 2), (1500, 40, 700), page_size=64, mask=mask_pairs.causal),
    PagedCase("divided_with_empty_parts", (1, 1, 2), (1500, 40, 700), page_size=64, mask=window),
    PagedCase("divided_with_parts_that_see_nothing", (1, 1, 2), (1500, 40, 700), page_size=64, mask=documents),
    PagedCase("sigmoid", **MIXED, score=score_pairs.sigmoid, mask=mask_pairs.causal, normalize="none"),
    PagedCase("divided_sigmoid", (1, 1, 2, 0), (1500, 0, 700, 3), 2, score_pairs.sigmoid, documents, page_size=64,
     normalize="none"),
    PagedCase("dropout", **MIXED, mask=mask_pairs.causal, dropout=0.3, Hq=8),
    PagedCase("divided_dropout", (1, 1, 2), (1500, 40, 700), page_size=64, score=slopes, dropout=0.5),
    PagedCase("sigmoid_dropout", (1, 4), (60, 40), score=score_pairs.sigmoid, mask=mask_pairs.causal, normalize="none",
     dropout=0.2),
    PagedCase("scores_as_weights", (1, 4), (60, 40), scale=-0.1, mask=window, normalize="none"),
    PagedCase("rotated_pages_of_1", (1, 2), (21, 9), page_size=1, key=vector_pairs.rope_of_halves, D=32),
    PagedCase("rotated_pages_of_16", **MIXED, mask=mask_pairs.causal, key=vector_pairs.rope_of_halves, D=32),
    PagedCase("rotated_pages_of_64", (3, 1), (130, 64), page_size=64, mask=mask_pairs.causal, D=128, layers=2,
     key=vector_pairs.rope_of_halves, value=vector_pairs.by_position),
    PagedCase("rotated_neighbors", (1, 1, 5), (33, 5, 64), key=vector_pairs.rope_of_neighbors, D=32, Hq=8),
    PagedCase("rotated_in_part", (1, 4), (40, 70), key=vector_pairs.partial_rope, mask=mask_pairs.causal, D=64),
    PagedCase("rotated_head_size_80", (1, 4), (40, 70), key=vector_pairs.rope_of_halves, score=slopes, D=80, Dv=24),
    PagedCase("norm_of_keys", (1, 3, 17), (9, 40, 33), Hq=10, key=vector_pairs.norm, mask=mask_pairs.causal, D=24),
    PagedCase("gains_of_heads", (1, 4), (40, 20), key=vector_pairs.by_head, value=vector_pairs.by_batch, page_size=4),
    PagedCase("values_by_position", (1, 20), (150, 48), page_size=48, value=vector_pairs.by_position, Dv=80),
    PagedCase("norms_of_values", (2, 1), (50, 130), key=vector_pairs.norm, value=vector_pairs.norm, mask=window, Hq=8),
    PagedCase("e4m3", **MIXED, mask=mask_pairs.causal, held="float8_e4m3fn", layers=2),
    PagedCase("e4m3_of_heads", **MIXED, mask=window, score=slopes, held="float8_e4m3fn", scales="head", layers=2),
    PagedCase("e5m2_pages_of_1", (1, 18), (21, 18), page_size=1, mask=mask_pairs.causal, held="float8_e5m2"),
    PagedCase("int8_rotated", (1, 4), (40, 70), held="int8", key=vector_pairs.rope_of_halves, value=vector_pairs.norm),
    PagedCase("divided_int8", (1, 1, 2), (1500, 40, 700), page_size=64, mask=documents, held="int8"),
    PagedCase("e5m2_sigmoid", (1, 4), (60, 40), score=score_pairs.sigmoid, normalize="none", held="float8_e5m2"),
    PagedCase("int8_head_size_80", (1, 4), (40, 70), held="int8", D=80, Dv=42, mask=mask_pairs.causal),
    PagedCase("e4m3_odd_values", (1, 18), (21, 18), held="float8_e4m3fn", scales="head", D=24, Dv=17),
    PagedCase("divided_and_rotated", (1, 1, 2), (1500, 40, 700), page_size=64, key=vector_pairs.rope_of_halves, D=32),
]  # fmt: skip

# --- latent vectors, of `mla_attention`

latent_case = functools.partial(PagedCase, Hkv=1, D=80, Dv=64, rope=16, scale=24**-0.5)
LATENT = [
    latent_case("latent_decode", Hq=16),
    latent_case("latent_one_head", (1, 2), (33, 20), Hq=1),
    latent_case("latent_mixed", **MIXED, Hq=3, mask=mask_pairs.causal, score=slopes),
    latent_case("latent_9_heads", (2, 1, 4), (20, 140, 33), Hq=9, mask=mask_pairs.causal),
    latent_case("latent_63_heads", (2, 1), (20, 35), Hq=63, mask=mask_pairs.causal),
    latent_case("latent_128_heads", (1, 2), (20, 35), Hq=128, mask=mask_pairs.causal, page_size=64),
    latent_case("latent_window", (1, 1, 20), (8, 9, 70), Hq=8, mask=window, page_size=4),
    latent_case("latent_softcap", (1, 4), (48, 20), Hq=16, score=score_pairs.softcap, factor=8.0),
    latent_case("latent_divided", (1, 1, 2), (1500, 40, 700), Hq=8, page_size=64, mask=mask_pairs.causal),
    latent_case("latent_layers", (1, 2), (20, 33), Hq=4, layers=2),
    latent_case("latent_padding_and_empty", (0, 1, 0, 20, 2), (0, 30, 9, 24, 0), 5, slopes, Hq=8),
    latent_case("latent_of_two_chunks", (1, 5), (33, 20), Hq=8, D=120, Dv=96, rope=24, mask=mask_pairs.causal),
    latent_case("latent_of_deepseek", (1, 2), (70, 33), Hq=16, D=576, Dv=512, rope=64, scale=192**-0.5),
]
NOT_ON_HOPPER = ["latent_window", "latent_of_two_chunks"]  # pages of 4 keys, 24 rotated columns

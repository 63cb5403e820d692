"""Attention problems to measure. Imports neither JAX nor torch."""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

EIGHT_BITS = ("float8_e4m3fn", "int8")  # of `Problem.keys`


@dataclasses.dataclass(frozen=True)
class Problem:
    """One attention to measure. With fewer queries than keys, the queries are the last positions of the keys.

    Attributes:
      variant: A name in `benchmarks.variants.VARIANTS`.
      form: How the mask is given: ``"split"`` as a BlockMask with full and partial blocks, ``"partial"`` as one with
        every block partial, ``"everywhere"`` as a bare mask_mod.
      block: Queries and keys in a block of jflex's BlockMask; peers keep their own size.
      differentiated: Whether the backward also gives the gradient of the array that the score_mod captures.
      lengths: A name of `requests_of`; "" for S each.
      page: Keys of a page, for caches in pages that lie at random; 0 for contiguous ones.
      prefix: Keys at the front that all sequences share.
      Dv: Size of a head of the values; 0 for D.
      weights: ``"sinks"``, ``"dropout"`` (of a tenth) or ``"sigmoid"`` (without a softmax); "" for a plain softmax.
      keys: ``"raw"`` or ``"raw neighbours"``: keys that a `key_mod` rotates as they are loaded from pages, halves or
        neighbours; without pages, queries and keys that the call rotates, halves. ``"rolling"``: pages hold the cache
        of StreamingLLM, sinks and a window, S together. ``"latent"``: pages hold latent vectors, whose first `Dv`
        columns are the values (MLA, absorbed). ``"indexer"``: no attention, but the selection of keys for sparse MLA.
        ``"float8_e4m3fn"`` or ``"int8"``: pages hold keys and values of this dtype, with a scale for each token and
        head; without pages, queries and keys have it, and values `dtype`. "": rotated before they were written.
      stats: Names of `return_stats`, with spaces between them; their gradients are not requested.
      selected: Key blocks that each query block selects in each call, by scores, its own among them; with latent
        vectors, keys that each query has selected, and with an indexer selects; 0: no selection.
      source: Where the problem comes from.
    """

    B: int
    T: int
    S: int
    Hq: int
    Hkv: int
    D: int
    variant: str
    form: str = "split"
    block: int = 128
    differentiated: bool = False
    lengths: str = ""
    page: int = 0
    prefix: int = 0
    Dv: int = 0
    weights: str = ""
    keys: str = ""
    stats: str = ""
    selected: int = 0
    dtype: str = "bfloat16"
    source: str = "jflex"

    @property
    def value_size(self) -> int:
        """Size of a head of the values."""
        return self.Dv or self.D

    @property
    def served(self) -> bool:
        """The queries continue sequences, as in decoding, or the keys lie in pages."""
        return self.T < self.S or bool(self.page)

    @property
    def selects_keys(self) -> bool:
        """Queries select keys, as in DeepSeek-V3.2, and not blocks."""
        return bool(self.selected) and self.keys in ("latent", "indexer")

    @property
    def label(self) -> str:
        """The variant and how it is given."""
        notes = (
            {"partial": "every block partial", "everywhere": "mask_mod alone"}.get(self.form),
            self.weights,
            self.keys and f"{self.keys} {'keys' if self.page else 'queries and keys'}",
            self.stats and f"returning {self.stats}",
            self.selected and f"the best {self.selected} {'keys' if self.selects_keys else 'blocks'}",
        )
        label = ", ".join([self.variant, *filter(None, notes)])
        label += "" if self.block == 128 else f" (jflex: blocks of {self.block})"
        return f"{label} and its gradient" if self.differentiated else label

    @property
    def shape(self) -> str:
        """In words, without the variant."""
        parts = (
            f"B {self.B}, H {self.Hq}" if self.Hq == self.Hkv else f"B {self.B}, H {self.Hq}/{self.Hkv}",
            f"S {self.S}" if self.T == self.S else f"T {self.T}, S {self.S}",
            f"D {self.D}",
            self.Dv and f"Dv {self.Dv}",
            self.lengths and f"{self.lengths} lengths",
            self.prefix and f"prefix {self.prefix}",
            self.page and f"pages of {self.page}",
        )
        return ", ".join(filter(None, parts))

    @property
    def name(self) -> str:
        """All in words."""
        return f"{self.label}; {self.shape}"

    def to_json(self) -> dict[str, Any]:
        """The fields that differ from their defaults; `Problem(**fields)` is the inverse."""
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        return {name: x for name, x in dataclasses.asdict(self).items() if x != defaults[name]}


def square(B: int, S: int, H: int | tuple[int, int], D: int, variant: str, **more: Any) -> Problem:
    """A problem with as many queries as keys."""
    Hq, Hkv = H if isinstance(H, tuple) else (H, H)
    return Problem(B, S, S, Hq, Hkv, D, variant, **more)


class Requests(NamedTuple):
    """Queries and keys of each sequence, int32; the queries are the last positions of the keys."""

    queries: np.ndarray
    keys: np.ndarray

    @property
    def indptr(self) -> np.ndarray:
        """Offsets of the packed queries; int32, one longer."""
        return np.concatenate([[0], np.cumsum(self.queries)]).astype(np.int32)


def requests_of(problem: Problem) -> Requests:
    """Lengths of a problem: T queries at the end of S keys each, unless its `lengths` say otherwise.

    Even ones fill a quarter of the cache. Uniform ones are drawn by a fixed seed from 1 to twice the mean; of skewed
    ones one in eight is S long, and the others are short and alike: both have as many keys in all as even ones, but for
    a remainder. The first of mixed ones has T queries at the end of S keys, the others one after half as many.

    >>> requests_of(Problem(3, 8, 64, 2, 2, 16, "causal", lengths="mixed"))
    Requests(queries=array([8, 1, 1], dtype=int32), keys=array([64, 32, 32], dtype=int32))
    """
    B, S, rng = problem.B, problem.S, np.random.default_rng(0)
    queries, keys, total = np.full(B, problem.T), np.full(B, S), B * (S // 4)
    if problem.lengths == "even":
        keys = np.full(B, S // 4)
    elif problem.lengths == "uniform":
        shares = rng.uniform(0.0, 1.0, B)
        keys = np.clip(np.floor(shares / shares.sum() * total), 1, S).astype(int)
        keys[np.argmin(keys)] += total - keys.sum()
    elif problem.lengths == "skewed":
        long = max(1, B // 8)
        short = max(1, (total - long * S) // (B - long))
        keys = rng.permutation([S] * long + [short] * (B - long))
    elif problem.lengths == "mixed":
        queries[1:], keys[1:] = 1, S // 2
    return Requests(queries.astype(np.int32), keys.astype(np.int32))


def page_table(problem: Problem, prefix: int = 0) -> np.ndarray:
    """Pages of each sequence at random places, int32 [B, most pages]; sequences share the pages of a prefix.

    Page 0 belongs to no sequence, and fills the rows of shorter ones.
    """
    shared, counts = prefix // problem.page, -(-requests_of(problem).keys // problem.page)
    places = np.random.default_rng(0).permutation(np.arange(1, 1 + shared + int((counts - shared).sum())))
    table = np.zeros((problem.B, counts.max()), np.int32)
    table[:, :shared] = places[:shared]
    for row, pages in zip(table, np.split(places[shared:], np.cumsum(counts - shared)[:-1]), strict=True):
        row[shared : shared + len(pages)] = pages
    return table

"""A random call: two random mods, sizes, dtypes, masks in blocks, tiles."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jflex
from tests.cases import table
from tests.cases.mask_pairs import MaskPair
from tests.cases.score_pairs import ScorePair
from tests.cases.table import Sizes
from tests.support import plain_attention
from tests.support.random_mods.draw import Drawing
from tests.support.random_mods.program import Program

# Without the first, XLA's CPU compiler (jaxlib 0.10.2) computes sums of products over a small axis wrongly in float32;
# without the second (0.10.2 to 0.12) it makes a plain sum of a padded cumulative sum of 3 numbers, as in the derivative
# of ``jnp.cumsum(x)[1]``; without the third it leaves out roundings to 16 bits.
WITHOUT_ALGSIMP = {"xla_disable_hlo_passes": "algsimp"}
EXACTLY = {"xla_cpu_experimental_ynn_fusion_type": "", **WITHOUT_ALGSIMP, "xla_allow_excess_precision": False}
N = Sizes
SMALL = [
    N(B=1, T=17, S=33, Hq=2, Hkv=1, D=8, Dv=8),
    N(B=2, T=33, S=47, Hq=4, Hkv=2, D=16, Dv=12),
    N(B=1, T=64, S=64, Hq=2, D=16),
    N(B=2, T=5, S=40, Hq=3, D=4, Dv=7),
    N(B=1, T=1, S=61, Hq=4, Hkv=1, D=16),
    N(B=3, T=40, S=23, Hq=2, Hkv=1, D=9, Dv=5, Bkv=1),
    N(B=1, T=70, S=37, Hq=6, Hkv=2, D=24, Dv=16),
    N(B=2, T=16, S=50, Hq=4, D=1, Dv=3),
    N(B=1, T=91, S=100, Hq=1, D=32),
    N(B=2, T=3, S=70, Hq=4, Hkv=2, D=32),
]
WIDE = [
    *SMALL,
    N(B=2, T=130, S=257, Hq=4, Hkv=2, D=64),
    N(B=1, T=257, S=129, Hq=2, D=40, Dv=72),
    N(B=2, T=128, S=256, Hq=2, Hkv=1, D=128),
    N(B=1, T=300, S=300, Hq=3, Hkv=1, D=64),
    N(B=1, T=2, S=500, Hq=8, Hkv=2, D=64),
    N(B=3, T=70, S=190, Hq=2, D=33, Bkv=1),
]


@dataclasses.dataclass(frozen=True)
class Profile:
    """What is drawn for a kind of run.

    Attributes:
      sizes: Of the arrays.
      dtypes: Of query, key and value.
      block: Sizes of blocks of a mask, for queries and for keys.
      tiles: Tile sizes that are set.
      operations: How many operations a score mod has, at least and at most.
    """

    sizes: tuple[Sizes, ...]
    dtypes: tuple[str, ...]
    blocks: tuple[int, ...]
    tiles: tuple[int, ...]
    operations: tuple[int, int] = (3, 12)


_FLOATS = ("float32", "float32", "bfloat16", "float16")
PROFILES = {
    "quick": Profile(tuple(SMALL), _FLOATS, (16, 32, 64), (16, 32), (3, 5)),
    "small": Profile(tuple(SMALL), _FLOATS, (16, 32, 64, 128), (16, 32, 64)),
    "wide": Profile(tuple(WIDE), _FLOATS, (16, 32, 64, 128), (16, 32, 64)),
    "hopper": Profile(tuple(WIDE), ("bfloat16", "bfloat16", "float16"), (64, 128), ()),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One random call.

    Attributes:
      seed: What it was drawn from.
      sizes: Of the arrays.
      score: The score mod.
      mask: The mask mod, or None.
      dtype: Of query, key and value.
      layout: As in the call.
      scale: As in the call.
      block: Block size of a BlockMask; None to pass the mask as `mask_mod`.
      lists_by: Whether the BlockMask has lists for each batch entry, and for each query head.
      kv_lengths: As in the call.
      tiles: Of all kernels, or None.
    """

    seed: int
    sizes: Sizes
    score: Program
    mask: Program | None = None
    dtype: str = "float32"
    layout: str = "BTNH"
    scale: float | None = None
    block: tuple[int, int] | None = None
    lists_by: tuple[bool, bool] = (True, True)
    kv_lengths: tuple[int, ...] | None = None
    tiles: tuple[int, int] | None = None

    @functools.cached_property
    def call(self) -> table.Case:
        """As `evaluation` takes it; its score has no numpy form."""
        n, score, mask = self.sizes, self.score, self.mask
        by_batch, by_head = self.lists_by
        return table.Case(
            f"seed{self.seed}",
            ScorePair(lambda c: score.build(n)(**c), None, score.draw),
            None if mask is None else MaskPair(lambda c: mask.build(n)(**c), self._elements, mask.draw),
            n, self.block, by_batch=by_batch, by_head=by_head, dtype=self.dtype, layout=self.layout, scale=self.scale,
            kv_lengths=self.kv_lengths, tiles=None if self.tiles is None else jflex.Tiles(*self.tiles),
        )  # fmt: skip

    def _elements(self, b, h, q, k, captured) -> np.ndarray:
        """The mask at open grids of indices."""
        places = [np.asarray(place, np.int32) for place in np.broadcast_arrays(b, h, q, k)]
        with jax.default_device(jax.devices("cpu")[0]):
            mod = self.mask.build(self.sizes, select=True)(**jax.tree.map(jnp.asarray, captured))
            return np.asarray(jax.jit(plain_attention.over_all(mod), compiler_options=EXACTLY)(*places))

    def report(self) -> str:
        """All that it takes to write the call down by hand."""
        programs = [self.score, *([] if self.mask is None else [self.mask])]
        captures = [
            f"# {c.name}: {_DTYPES.get(c.kind, program.half)}{list(c.shape)}" + (f" up to {c.high}" * (c.kind in "iu"))
            for program in programs
            for c in program.captures
        ]
        head = "import jax, jax.numpy as jnp\nfrom jax import lax\nF32, G = jnp.float32, jnp." + self.score.half
        letters = "; ".join(f"{name} = {getattr(self.sizes, name)}" for name in ("B", "Hq", "T", "S"))
        rest = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ("score", "mask") and getattr(self, field.name) != field.default
        }
        return "\n".join([f"# {rest}", head, letters, *captures, *(p.source() for p in programs)])


_DTYPES = {"f": "float32", "i": "int32", "u": "uint8", "p": "bool"}


def draw_case(seed: int, profile: str = "small") -> Case:
    """Draws a call; the same of the same seed."""
    rng, options = np.random.default_rng(seed), PROFILES[profile]
    pick = lambda choices: choices[rng.integers(len(choices))]
    sizes, dtype = pick(options.sizes), pick(options.dtypes)
    half = "float16" if dtype == "float16" or rng.random() < 0.3 else "bfloat16"
    masked = rng.random() < 0.6
    guarded = masked and sizes.T > 1 and rng.random() < 0.2
    fewest, most = options.operations
    score = Drawing(rng, "score", half, sizes, guarded=guarded).program(int(rng.integers(fewest, most + 1)))
    more: dict[str, Any] = {}
    if masked:
        more["mask"] = Drawing(rng, "mask", half, sizes, guarded=guarded).program(int(rng.integers(1, 6)))
        if rng.random() < 0.6:
            more["block"] = (pick(options.blocks), pick(options.blocks))
            more["lists_by"] = tuple(_depends(more["mask"], name) or rng.random() < 0.2 for name in "bh")
    if rng.random() < 0.15:
        more["kv_lengths"] = tuple(int(x) for x in rng.integers(0, sizes.S + 1, sizes.B))
    if rng.random() < 0.3 and "block" not in more and options.tiles:
        more["tiles"] = (pick(options.tiles), pick(options.tiles))
    layout, scale = "BNTH" if rng.random() < 0.3 else "BTNH", None if rng.random() < 0.7 else 0.25
    return Case(seed, sizes, score, dtype=dtype, layout=layout, scale=scale, **more)


def _depends(program: Program, argument: str) -> bool:
    return any(re.search(rf"\b{argument}\b", step.line()) for step in program.steps)

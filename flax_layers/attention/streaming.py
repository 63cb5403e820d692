"""StreamingLLM: attention to the first tokens and to the last ones, at positions within that cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int32

import jflex
from flax_layers.sampling import checked_integer
from jflex.masks import causal, sliding_window
from jflex.paged import PagedBatch, PagedCache, token_positions, token_requests
from jflex.types import AnyArray


class Part(NamedTuple):
    """A call of `jflex.paged_attention` over raw keys, which `key_mod` rotates as they are loaded."""

    batch: PagedBatch
    query_mod: jflex.VectorMod | None
    key_mod: jflex.VectorMod | None
    score_mod: jflex.ScoreMod | None
    mask_mod: jflex.MaskMod


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Streaming:
    """A query attends to the first tokens, the attention sinks, and to a window of the last ones.

    Rotary embedding and mods take positions within this cache of `size` tokens: in a longer sequence the sinks are at
    0, 1, ..., the window follows them without a gap, and the query is at `size - 1`. So no position is beyond what the
    model was trained on, however long the sequence is.

    The cache holds raw keys, before the rotary embedding, and kernels rotate them as they load them: a key of the
    window moves towards the sinks with each token. A page table may leave out whole pages between sinks and window
    that no later query attends to. Its `kv_lengths` count the other tokens, and positions are those in the table.

    Attributes:
        sinks: First tokens that stay visible; 0: the window alone.
        window: Last tokens that are visible, the query's own included.

    Raises:
        TypeError: A number is not an integer.
        ValueError: A number is out of range.

    References:
        Xiao et al. 2024, Efficient Streaming Language Models with Attention Sinks, arXiv:2309.17453, section 3.2.

    Example:
        >>> streaming = Streaming(sinks=4, window=1020)
        >>> streaming.size
        1024
    """

    sinks: int = 4
    window: int = 1020

    def __post_init__(self) -> None:
        for name, least in (("sinks", 0), ("window", 1)):
            if checked_integer(name, getattr(self, name)) < least:
                raise ValueError(
                    f"`{name}` of `Streaming` must be at least {least}. Got {getattr(self, name)}. The paper has 4 "
                    "sinks, and a window that fills the context of the model."
                )

    @property
    def size(self) -> int:
        """Tokens that a query attends to at most, and positions that the model sees."""
        return self.sinks + self.window

    def parts(
        self,
        batch: PagedBatch,
        num_tokens: int,
        rope: jflex.VectorMod | None = None,
        score_mod: jflex.ScoreMod | None = None,
        mask_mod: jflex.MaskMod | None = None,
    ) -> tuple[Part, ...]:
        """The calls whose merged results are attention to sinks and window: one, or the window and the sinks.

        It is one call if there are no more tokens than requests, as in a step of decoding: each token is a request of
        its own, whose keys are rotated for it. In a chunk, the sinks come closer from query to query while distances
        in the window stay, and a `key_mod` rotates a key once for all queries of its request. So there the window is a
        call, and the sinks before it are another one. Without a rotary embedding there is one call in any case.

        The mods of the layer get positions within the cache; without a mask_mod, attention is causal.

        Example:
            >>> batch = PagedBatch(jnp.array([0, 4]), jnp.array([4]), jnp.array([[1, 2]]))
            >>> window, sinks = Streaming(sinks=1, window=2).parts(batch, 4, jflex.rope())
            >>> jflex.create_mask(window.mask_mod, None, None, 4, 4)[0, 0, 3].astype(int).tolist()
            [0, 0, 1, 1]
            >>> jflex.create_mask(sinks.mask_mod, None, None, 4, 4)[0, 0, 3].astype(int).tolist()
            [1, 0, 0, 0]
            >>> token = dataclasses.replace(batch, qo_indptr=jnp.array([0, 1]))
            >>> len(Streaming(sinks=1, window=2).parts(token, 1, jflex.rope()))
            1
        """
        visible = lambda b, h, q_idx, kv_idx: (kv_idx < self.sinks) | (kv_idx > q_idx - self.window)
        if rope is None or not (num_tokens and batch.requests):
            return (self._part(batch, jflex.and_masks(visible, causal()), score_mod, mask_mod),)
        if num_tokens > batch.requests or batch.ancestors is not None:
            return self._window_and_sinks(batch, rope, score_mod, mask_mod)
        owners = jnp.maximum(token_requests(batch, num_tokens), 0)
        ends = token_positions(batch, num_tokens) + 1  # of the keys of each token, with its own; of padding 0
        starts = jnp.minimum(jnp.arange(num_tokens + 1, dtype=jnp.int32), jnp.asarray(batch.qo_indptr)[-1])
        batch = PagedBatch(starts, ends, jnp.asarray(batch.page_table)[owners])  # a request for each token
        gaps = self._gaps(batch)
        rotate_key = lambda key, b, h, kv_idx: rope(key, b, h, self._cache_position(kv_idx, gaps[b]))
        return (self._part(batch, visible, score_mod, mask_mod, self._rotate_query(rope), rotate_key, owners),)

    def _window_and_sinks(
        self, batch: PagedBatch, rope: jflex.VectorMod, score_mod: jflex.ScoreMod | None, mask_mod: jflex.MaskMod | None
    ) -> tuple[Part, ...]:
        gaps = self._gaps(batch)  # keep the angles of the window small: distances are the same without them
        rotate_near = lambda x, b, h, idx: rope(x, b, h, idx - gaps[b])
        window = self._part(batch, sliding_window(self.window - 1), score_mod, mask_mod, rotate_near, rotate_near)
        if not self.sinks:
            return (window,)
        before = lambda b, h, q_idx, kv_idx: (kv_idx < self.sinks) & (kv_idx <= q_idx - self.window)
        return window, self._part(batch, before, score_mod, mask_mod, self._rotate_query(rope), rope)

    def _rotate_query(self, rope: jflex.VectorMod) -> jflex.VectorMod:
        """Rotates queries at their positions within the cache."""
        return lambda query, b, h, q_idx: rope(query, b, h, jnp.minimum(q_idx, self.size - 1))

    def _part(
        self,
        batch: PagedBatch,
        visible: jflex.MaskMod,
        score_mod: jflex.ScoreMod | None,
        mask_mod: jflex.MaskMod | None,
        query_mod: jflex.VectorMod | None = None,
        key_mod: jflex.VectorMod | None = None,
        owners: Int32[Array, " N"] | None = None,
    ) -> Part:
        """A call with the mods of the layer at positions within the cache; `owners` as for `_within`."""
        mask = visible if mask_mod is None else jflex.and_masks(visible, self._within(mask_mod, owners))
        score = None if score_mod is None else self._within(score_mod, owners)
        return Part(batch, query_mod, key_mod, score, mask)

    def _within(self, mod: Callable[..., ArrayLike], owners: Int32[Array, " N"] | None) -> Callable[..., ArrayLike]:
        """A mod that takes positions in the page table, and gives `mod` those within the cache.

        `owners` are the requests that `mod` gets in place of those in the call. Pages are left out only where the query
        is behind the end of the cache, so they make no difference.
        """

        def within(*arguments: Array) -> ArrayLike:
            *score, b, h, q_idx, kv_idx = arguments
            gap = jnp.maximum(q_idx - (self.size - 1), 0)
            return mod(*score, b if owners is None else owners[b], h, q_idx - gap, self._cache_position(kv_idx, gap))

        return within

    def _cache_position(self, kv_idx: Array, gap: Array) -> Array:
        """The position within the cache of a key that is attended to, with so many tokens before the window."""
        return jnp.where(kv_idx < self.sinks, kv_idx, kv_idx - gap)

    def _gaps(self, batch: PagedBatch) -> Int32[Array, " R"]:
        """Tokens between the sinks and the window of the last token of each request."""
        return jnp.maximum(jnp.asarray(batch.kv_lengths) - self.size, 0)


def attend(
    query: Float[AnyArray, "N Hq D"],
    cache: PagedCache,
    parts: tuple[Part, ...],
    *,
    sinks: Float[Array, " Hq"] | None = None,
    **options: Any,
) -> Float[Array, "N Hq D"]:
    """Attention to sinks and window.

    `query` is not rotated and has the dtype of the attention. `sinks` are learned ones of the layer, which are logits
    and not tokens.
    """

    def call(part: Part, **more: Any) -> Any:
        mods: dict[str, Any] = part._asdict()
        return jflex.paged_attention(query, cache, mods.pop("batch"), **mods, **options, **more)

    if len(parts) == 1:
        return call(parts[0], sinks=sinks)
    state = jflex.merge_all([jflex.AttentionState(*call(part, return_lse=True)) for part in parts])
    return (state if sinks is None else jflex.with_sinks(state, sinks)).out

"""From packed queries and pages to output and lse: traces the mods, selects a backend, runs it.

Shared by `jflex.paged_attention` and `jflex.cascade_attention`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jflex import backends
from jflex._call.dispatch import Implementation, select_forward, warn_of_new_numbers
from jflex._call.dropout import KeptMod
from jflex._check.arguments import check_config, check_scale, current_device, current_precision
from jflex._jax.ops import PagedOp
from jflex._jax.primitive import call_as_primitive
from jflex._mesh import match_manual_axes
from jflex.backends.base import PagedInputs
from jflex.backends.vector_mods import exact_dtype
from jflex.config import Config
from jflex.errors import UnsupportedError
from jflex.mods.trace import TracedMod, VectorRole, trace_mask_mod, trace_score_mod, trace_vector_mod
from jflex.mods.types import MaskMod, ScoreMod, VectorMod
from jflex.states.state import AttentionState, Normalize
from jflex.states.stats import Stat
from jflex.types import AnyArray, ArrayOrShape
from pallas_kernels.spec import AttentionSpec, Captured, Device, Dropout, Mods, Numerics, Paging, Sizes


class Pages(NamedTuple):
    """Pages of keys and values, and those of each group of queries; may be numpy arrays.

    Attributes:
      key: [P, page_size, Hkv, D], or [L, P, page_size, Hkv, D] for L layers; or its shape.
      num_pages: Pages that the table may name.
      first_page: int32 [1], the first page of the layer; the pages of all layers are numbered consecutively.
      indptr: int32 [R + 1], where the queries of each group begin.
      latent_size: Columns of the keys that are the values, and `value` is not read; None where values have pages.
      key_scale: Of keys of eight bits, as in a `PagedCache`, or its shape; None for others.
      rope_key: Of latent vectors of eight bits, as in a `LatentCache`, or its shape; `key` then has the latent columns
        alone, and `key_scale` is that of the cache. None for others.
      hides_zeros: Whether the mask hides nothing but rows of zeros.
    """

    key: ArrayOrShape
    value: ArrayOrShape
    num_pages: int
    first_page: jax.Array
    indptr: AnyArray
    lengths: AnyArray
    table: AnyArray
    latent_size: int | None = None
    key_scale: AnyArray | None = None
    value_scale: AnyArray | None = None
    rope_key: AnyArray | None = None
    hides_zeros: bool = False


class PagedOptions(NamedTuple):
    """Options forwarded by the public calls.

    Attributes:
      score_mod: ``(score, r, h, n, j)``: group, query head, packed query, key of the group.
      exact_out: Whether the output has the accumulator dtype, to be merged; else it has the dtype of the query.
      key_mod: ``(key[D], r, h_kv, j) -> [D]``, checked.
    """

    score_mod: ScoreMod | None
    mask_mod: MaskMod | None
    scale: float | None
    config: Config | None
    exact_out: bool = False
    key_mod: VectorMod | None = None
    value_mod: VectorMod | None = None
    normalize: Normalize = "softmax"
    stats: tuple[Stat, ...] = ()
    dropout_rate: float = 0.0
    kept_mod: KeptMod | None = None


class PagedCall(NamedTuple):
    """A checked call, or a level of one.

    Attributes:
      query: [N, Hq, D], in the dtype of the pages, unless these have eight bits; or its shape.
    """

    caller: str
    spec: AttentionSpec
    query: Any
    pages: Pages
    captured: Captured[jax.Array]

    def inputs(self) -> PagedInputs:
        """The arrays."""
        pages = self.pages
        by_page = lambda x: x.reshape(-1, *x.shape[-3:])
        key, value = by_page(pages.key), by_page(pages.value)
        rope_key = None if pages.rope_key is None else by_page(pages.rope_key)
        indptr, lengths, table = (jnp.asarray(x) for x in (pages.indptr, pages.lengths, pages.table))
        key_scale, value_scale = (_scale_of(pages, x) for x in (pages.key_scale, pages.value_scale))
        scales = {"key_scale": key_scale, "value_scale": value_scale, "rope_key": rope_key}
        return PagedInputs(self.query, key, value, indptr, lengths, table, pages.first_page, self.captured, **scales)


def _scale_of(pages: Pages, scale: AnyArray | None) -> jax.Array | None:
    """A scale of each head of the layer, [Hkv], or of each token and head, [pages of all layers, page_size, Hkv].

    Of latent vectors, there is one for each token and tile of columns.
    """
    if scale is None:
        return None
    if pages.rope_key is not None or scale.shape == pages.key.shape[:-1]:
        return jnp.asarray(scale).reshape(-1, *scale.shape[-2:])
    stacked = jnp.asarray(scale).reshape(-1, scale.shape[-1])
    return stacked[0] if len(stacked) == 1 else stacked[pages.first_page[0] // pages.num_pages]


def attend(call: PagedCall, implementation: Implementation) -> AttentionState:
    """Attention of each packed query over the keys of its group: out [N, Hq, Dv], lse and ``spec.stats`` [N, Hq]."""
    caller, spec = call.caller, call.spec
    name = select_forward(implementation, spec, caller)
    if spec.is_empty:
        return AttentionState.empty(spec.out_shape(), spec.out_dtype, spec.normalize, spec.stats)
    inputs, reason = call.inputs(), no_derivative(caller, name)
    if reason is not None:
        warn_of_new_numbers(spec, inputs)
        guard = lambda x: _without_gradient(x, reason) if jnp.issubdtype(x.dtype, jnp.floating) else x
        inputs = jax.tree.map(guard, inputs)
        saved = call_as_primitive(PagedOp(name, spec), match_manual_axes(inputs))
    else:
        saved = backends.get(name).forward(spec, match_manual_axes(inputs))
    return AttentionState(saved.out, saved.lse, spec.normalize, saved.max, saved.entropy)


def prepare(caller: str, query: Any, pages: Pages, how: PagedOptions) -> PagedCall:
    """Traces the mods and makes the remaining checks; nothing is computed, and query and pages may be shapes."""
    Dv = pages.value.shape[-1] if pages.latent_size is None else pages.latent_size
    score, score_operands = (None, ()) if how.score_mod is None else trace_score_mod(how.score_mod)
    mask, mask_operands = (None, ()) if how.mask_mod is None else trace_mask_mod(how.mask_mod)
    R, max_pages = pages.table.shape
    page_size, Hkv, D = pages.key.shape[-3:]
    D += 0 if pages.rope_key is None else pages.rope_key.shape[-1]
    key_mod, key_operands = _traced_vector_mod(how.key_mod, "key", D, query.dtype)
    value_mod, value_operands = _traced_vector_mod(how.value_mod, "value", Dv, query.dtype)
    dropout, dropout_operands = None, ()
    if how.kept_mod is not None:
        kept, dropout_operands = trace_mask_mod(how.kept_mod)
        dropout = Dropout(how.dropout_rate, kept)
    numerics = Numerics(
        dtype=str(query.dtype),
        scale=check_scale(how.scale, D),
        out_dtype="float32" if how.exact_out and query.dtype != jnp.float64 else None,
        precision=current_precision(query.dtype),
        normalize=how.normalize,
        stats=tuple(name for name in how.stats if name != "lse"),
    )
    paging = Paging(
        page_size,
        pages.num_pages,
        None if pages.key_scale is None else str(pages.key.dtype),
        layers=pages.key.shape[0] if pages.key.ndim == 5 else 1,
        hides_zeros=pages.hides_zeros,
        values_in_keys=pages.latent_size is not None,
    )
    spec = AttentionSpec(
        sizes=Sizes(B=R, T=query.shape[0], S=max_pages * page_size, Hq=query.shape[1], Hkv=Hkv, D=D, Dv=Dv, Bkv=R),
        numerics=numerics,
        device=Device(*current_device(query, pages.key, pages.value)),
        mods=Mods(score, mask, key_mod, value_mod, dropout),
        memory=paging,
        config=check_config(how.config, None),
    )
    captured = Captured(score_operands, mask_operands, key_operands, value_operands, dropout_operands)
    return PagedCall(caller, spec, query, pages, captured)


def _traced_vector_mod(
    mod: VectorMod | None, role: VectorRole, size: int, dtype: DTypeLike
) -> tuple[TracedMod | None, tuple[jax.Array, ...]]:
    return (None, ()) if mod is None else trace_vector_mod(mod, role, size, exact_dtype(dtype))


def no_derivative(caller: str, name: str) -> str | None:
    """Why there is no derivative on a backend, or None if there is one."""
    if backends.get(name).differentiable:
        return None
    return (
        f"`{caller}` has no derivative on {name!r}: it is made for inference. implementation='reference' has one, "
        "dense and slow; `flex_attention_varlen` and `flex_attention` train."
    )


def _without_gradient(x: jax.Array, reason: str) -> jax.Array:
    """The array itself; raises if it is differentiated."""

    @jax.custom_jvp
    def identity(x: jax.Array) -> jax.Array:
        return x

    @identity.defjvp
    def _refuse(primals: Any, tangents: Any) -> Any:
        raise UnsupportedError(reason)

    return identity(x)

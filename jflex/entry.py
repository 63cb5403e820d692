"""The one body of all public calls: `prepare` checks and traces, `run` selects a backend and runs it, `finish` returns.

A dense call has arrays with an axis of the batch. A paged call has packed queries, and keys in pages: that of a public
call, of a level of a cascade, or of one device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jflex._call.call_warnings import warn_of_alignment
from jflex._call.checks import check_arrays, check_block_mask, warn_of_layout
from jflex._call.dispatch import Requested, get_backend, select_forward, warn_of_new_numbers
from jflex._call.vector_mods import VectorMods
from jflex._check.arguments import (
    check_config,
    check_scale,
    checked_lengths,
    checked_sinks,
    current_device,
    current_precision,
    largest_value,
)
from jflex._jax import custom_vjp, forward_mode
from jflex._jax.paged import PagedOp
from jflex._jax.partitioning import refuse_divided_tokens
from jflex._jax.primitive import call_as_primitive
from jflex._mesh import match_manual_axes
from jflex.backends.base import Inputs, PagedInputs, Saved
from jflex.backends.results import results_of_no_keys
from jflex.backends.vector_mods import exact_dtype, modified_inputs, modified_output, modified_rows
from jflex.block_mask.mask import BlockMask
from jflex.errors import UnsupportedError
from jflex.mods.array_sizes import CallSizes, check_requirements
from jflex.mods.trace import (
    TracedMod,
    check_call_sizes,
    mod_requirements,
    trace_mask_mod,
    trace_score_mod,
    trace_vector_mod,
)
from jflex.options import Settings
from jflex.states.merging import with_sinks
from jflex.states.state import AttentionState
from jflex.types import AnyArray, ArrayOrShape
from pallas_kernels.spec import AttentionSpec, Blocks, Captured, Dense, Device, Dropout, Mods, Numerics, Paging, Sizes


class _Traced(NamedTuple):
    """A traced mod, and the arrays that it captures; no mod and no arrays by default."""

    mod: TracedMod | None = None
    operands: tuple[jax.Array, ...] = ()


def _traced(
    trace: Callable[[Callable[..., ArrayLike]], tuple[TracedMod, tuple[jax.Array, ...]]],
    mod: Callable[..., ArrayLike] | None,
) -> _Traced:
    return _Traced() if mod is None else _Traced(*trace(mod))


def _joined(
    settings: Settings, sizes: Sizes, score: _Traced, mask: _Traced, key: _Traced, value: _Traced
) -> tuple[Mods, Captured[jax.Array]]:
    """The programs that a backend evaluates, with that of dropout, and the arrays that these capture."""
    kept = _traced(trace_mask_mod, settings.kept(sizes.B, sizes.Hq))
    dropout = None if kept.mod is None else Dropout(settings.dropout_rate, kept.mod)
    mods = Mods(score.mod, mask.mod, key.mod, value.mod, dropout)
    return mods, Captured(score.operands, mask.operands, key.operands, value.operands, kept.operands)


def _numerics(settings: Settings, dtype: DTypeLike, D: int, **more: Any) -> Numerics:
    return Numerics(
        dtype=str(dtype),
        scale=check_scale(settings.scale, D),
        precision=current_precision(dtype),
        normalize=settings.normalize,
        stats=tuple(name for name in settings.return_stats if name != "lse"),
        **more,
    )


# --- dense calls


class Call(NamedTuple):
    """A checked dense call; query, key and value are not yet modified."""

    spec: AttentionSpec
    inputs: Inputs
    vectors: VectorMods = VectorMods()
    caller: str = "flex_attention"  # the public function, for messages


def prepare(
    query: Any,
    key: Any,
    value: Any,
    settings: Settings,
    *,
    block_mask: BlockMask | None = None,
    kv_lengths: AnyArray | None = None,
    layout: str = "BTNH",
    has_value: bool = True,
) -> Call:
    """Checks every argument of `flex_attention`; nothing is computed, and query, key and value may be shapes.

    Where the call has no value (`jflex.attention_weights`), `key` stands in its place.
    """
    query, key, value = (jnp.asarray(x) if isinstance(x, np.ndarray) else x for x in (query, key, value))
    check_arrays(query, key, value, layout, has_value=has_value, may_have_eight_bits=has_value)
    warn_of_layout(query, key, layout)
    value = value if has_value else key
    sizes, vectors = _sizes(query, key, value, layout), settings.vectors
    B, T, S, Hq = sizes[:4]
    if block_mask is not None:
        check_block_mask(block_mask, settings.mask_mod, B, Hq, T, S)
    lengths = None if kv_lengths is None else checked_lengths(kv_lengths, B, S)
    sinks = None if settings.sinks is None else checked_sinks(settings.sinks, Hq)
    call_sizes = CallSizes(B, Hq, T, S if lengths is None else largest_value(lengths))
    if vectors != VectorMods():
        has_lse = settings.normalize == "softmax"
        vectors.check(sizes.D, sizes.Dv, query.dtype, sizes=call_sizes, kv_heads=sizes.Hkv, has_lse=has_lse)
        if sizes.Bkv != B and vectors.needs_batch(sizes.D, sizes.Dv, query.dtype):
            sizes = sizes._replace(Bkv=B)  # the mods make different keys for each batch entry
    if block_mask is None:
        mask, blocks, lists = _traced(trace_mask_mod, settings.mask_mod), None, None
    else:
        mask, lists = _Traced(block_mask.traced, block_mask.mask_operands), block_mask.lists
        blocks = Blocks(block_mask.block_size, *block_mask.shape[:2], follow_mod=block_mask.lists_follow_mod)
    score = _traced(trace_score_mod, settings.score_mod)
    required = (*mod_requirements(settings.score_mod, score.mod), *mod_requirements(settings.mask_mod, mask.mod))
    check_requirements(required, call_sizes)
    mods, captured = _joined(settings, sizes, score, mask, _Traced(), _Traced())
    if mask.mod is not None and lengths is not None and T == 1:
        warn_of_alignment(mask.mod, (B, Hq, T, S), lengths)
    qk_dtype = None if query.dtype == value.dtype else str(query.dtype)  # eight bits, or the check had raised
    spec = AttentionSpec(
        sizes=sizes,
        numerics=_numerics(settings, value.dtype, sizes.D, qk_dtype=qk_dtype, sinks=sinks is not None),
        device=Device(*current_device(query, key, value)),
        mods=mods,
        memory=Dense(layout, blocks, lengths is not None),
        config=check_config(settings.config, blocks),
    )
    sinks = None if sinks is None else sinks.astype(spec.exact)
    return Call(spec, Inputs(query, key, value, lists, captured, lengths, sinks=sinks), vectors)


def _sizes(query: Any, key: Any, value: Any, layout: str) -> Sizes:
    """Sizes of a call with checked arrays."""
    length, heads = (1, 2) if layout == "BTNH" else (2, 1)
    (T, S), (Hq, Hkv) = ((query.shape[axis], key.shape[axis]) for axis in (length, heads))
    return Sizes(B=query.shape[0], T=T, S=S, Hq=Hq, Hkv=Hkv, D=query.shape[3], Dv=value.shape[3], Bkv=key.shape[0])


def with_modified_inputs(call: Call) -> Call:
    """The call with query, key and value as its vector mods make them."""
    if call.vectors[:3] == (None, None, None):
        return call
    spec, inputs = call.spec, call.inputs
    arrays = inputs.query, inputs.key, inputs.value
    query, key, value = modified_inputs(call.vectors[:3], arrays, spec.layout, spec.Bkv, inputs.kv_lengths)
    return call._replace(inputs=inputs._replace(query=query, key=key, value=value))


def run(call: Call, implementation: Requested) -> Saved:
    """Applies the vector mods of the inputs, selects a backend and runs it."""
    call = with_modified_inputs(call)
    spec, inputs = call.spec, call.inputs
    name = select_forward(implementation, spec, call.caller)
    if spec.is_empty:
        return results_of_no_keys(spec, inputs.sinks)
    return _run(name, implementation, spec, inputs)


def _run(name: str, implementation: Requested, spec: AttentionSpec, inputs: Inputs) -> Saved:
    if any(jax.typeof(x).sharding.mesh.explicit_axes for x in inputs[:3]):
        refuse_divided_tokens(spec, inputs.query, inputs.key, inputs.value)
    inputs = match_manual_axes(inputs)
    if get_backend(name).differentiable and spec.qk_dtype is None:
        return get_backend(name).forward(spec, inputs)
    warn_of_new_numbers(spec, inputs)
    static = custom_vjp.Static(name, implementation, spec)
    both_modes = spec.config.forward_mode and spec.qk_dtype is None  # eight bits have no derivative
    return forward_mode.attend(static, inputs) if both_modes else custom_vjp.attend(static, inputs)


def finish(settings: Settings, saved: Saved, layout: str, positions: jax.Array | None = None) -> Any:
    """The result of a dense call: the output mod comes last. `positions` are those of the queries, if not from 0."""
    if settings.output_mod is not None:
        lse = saved.lse if settings.normalize == "softmax" else None
        saved = saved._replace(out=modified_output(settings.output_mod, saved.out, lse, layout, positions))
    return settings.results(saved)


# --- paged calls


class Pages(NamedTuple):
    """Pages of keys and values, and those of each group of queries; may be numpy arrays."""

    key: ArrayOrShape  # [P, page_size, Hkv, D], or [L, P, page_size, Hkv, D] for L layers; or its shape
    value: ArrayOrShape
    num_pages: int  # pages that the table may name
    first_page: jax.Array  # int32 [1], the first page of the layer; the pages of all layers are numbered consecutively
    indptr: AnyArray  # int32 [R + 1], where the queries of each group begin
    lengths: AnyArray
    table: AnyArray
    # columns of the keys that are the values, and `value` is not read; None where values have pages
    latent_size: int | None = None
    key_scale: AnyArray | None = None  # of keys of eight bits, as in a `PagedCache`, or its shape; None for others
    value_scale: AnyArray | None = None
    # of latent vectors of eight bits, as in a `LatentCache`, or its shape; `key` then has the latent columns alone, and
    # `key_scale` is that of the cache. None for others
    rope_key: AnyArray | None = None
    hides_zeros: bool = False  # whether the mask hides nothing but rows of zeros


class PagedCall(NamedTuple):
    """A checked paged call."""

    caller: str
    spec: AttentionSpec
    query: Any  # [N, Hq, D], in the dtype of the pages, unless these have eight bits; or its shape
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


def check_packed(settings: Settings, q: ArrayOrShape, Dv: int, sizes: CallSizes, kv_heads: int | None) -> None:
    """Checks sinks and mods of packed queries; `sizes` are the ranges of the indices that the mods of the user get."""
    heads, D = q.shape[1:]
    if settings.sinks is not None:
        checked_sinks(settings.sinks, heads)
    if settings.vectors != VectorMods():
        settings.vectors.check(D, Dv, q.dtype, sizes=sizes, kv_heads=kv_heads, has_lse=settings.normalize == "softmax")
    check_call_sizes(settings.score_mod, settings.mask_mod, sizes)


def prepare_paged(caller: str, query: Any, pages: Pages, settings: Settings, *, is_partial: bool = False) -> PagedCall:
    """Traces the mods and makes the remaining checks; nothing is computed, and query and pages may be shapes.

    Args:
      settings: Their mods get a group, a query head, a packed query, and a key of the group.
      is_partial: Whether the state is merged with others. Then, and where more follows, `out` is not rounded.
    """
    R, max_pages = pages.table.shape
    page_size, Hkv, D = pages.key.shape[-3:]
    D += 0 if pages.rope_key is None else pages.rope_key.shape[-1]
    Dv = pages.value.shape[-1] if pages.latent_size is None else pages.latent_size
    sizes = Sizes(B=R, T=query.shape[0], S=max_pages * page_size, Hq=query.shape[1], Hkv=Hkv, D=D, Dv=Dv, Bkv=R)
    key = _traced(lambda mod: trace_vector_mod(mod, "key", D, exact_dtype(query.dtype)), settings.key_mod)
    value = _traced(lambda mod: trace_vector_mod(mod, "value", Dv, exact_dtype(query.dtype)), settings.value_mod)
    score, mask = _traced(trace_score_mod, settings.score_mod), _traced(trace_mask_mod, settings.mask_mod)
    mods, captured = _joined(settings, sizes, score, mask, key, value)
    is_exact = is_partial or settings.sinks is not None or settings.output_mod is not None
    out_dtype = "float32" if is_exact and query.dtype != jnp.float64 else None
    spec = AttentionSpec(
        sizes=sizes,
        numerics=_numerics(settings, query.dtype, D, out_dtype=out_dtype),
        device=Device(*current_device(query, pages.key, pages.value)),
        mods=mods,
        memory=Paging(
            page_size,
            pages.num_pages,
            None if pages.key_scale is None else str(pages.key.dtype),
            layers=pages.key.shape[0] if pages.key.ndim == 5 else 1,
            hides_zeros=pages.hides_zeros,
            values_in_keys=pages.latent_size is not None,
        ),
        config=check_config(settings.config, None),
    )
    return PagedCall(caller, spec, query, pages, captured)


def run_paged(call: PagedCall, implementation: Requested) -> AttentionState:
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
        saved = get_backend(name).forward(spec, match_manual_axes(inputs))
    return AttentionState(saved.out, saved.lse, spec.normalize, saved.max, saved.entropy)


def finish_packed(
    settings: Settings, state: AttentionState, dtype: DTypeLike, rows: Callable[[], tuple[jax.Array, jax.Array]]
) -> Any:
    """The result of packed queries, from the state over all keys: sinks and the output mod come last, once.

    `rows` computes the request and the position of each query, for the output mod.
    """
    state = state if settings.sinks is None else with_sinks(state, settings.sinks)
    out = state.out.astype(dtype)
    if settings.output_mod is not None:
        lse = None if state.normalize == "none" else state.lse
        out = modified_rows(settings.output_mod, (state.out, lse), *rows(), dtype)
    return settings.results(dataclasses.replace(state, out=out))


def no_derivative(caller: str, name: str) -> str | None:
    """Why there is no derivative on a backend, or None if there is one."""
    if get_backend(name).differentiable:
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

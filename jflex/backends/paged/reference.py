"""Paged attention as it is defined: every key of every request gathered, dense scores. For tests and small cases."""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp

from jflex.backends.paged.base import PagedBackend
from jflex.paged.problem import PagedInputs, PagedProblem
from jflex.trace import TracedMod


class PagedReference(PagedBackend):
    """Dense, differentiable to any order, and large: N x S scores and as many copies of keys."""

    name: ClassVar[str] = "reference"
    own_derivatives: ClassVar[bool] = True

    def unsupported(self, problem: PagedProblem) -> str | None:
        """Runs everything."""
        del problem
        return None

    def attend(self, problem: PagedProblem, inputs: PagedInputs) -> tuple[jax.Array, jax.Array]:
        """Softmax over all logical keys of a query's request."""
        p, exact = problem, jnp.dtype(problem.exact)
        n, j = jnp.arange(p.T, dtype=jnp.int32), jnp.arange(p.S, dtype=jnp.int32)
        request = jnp.searchsorted(inputs.indptr[1:], n, side="right").astype(jnp.int32)
        real, request = request < p.B, jnp.minimum(request, p.B - 1)
        exists = real[:, None] & (j[None] < inputs.lengths[request][:, None])  # [N, S]

        def keys(pages: jax.Array) -> jax.Array:
            pages_of = jnp.clip(inputs.table, 0, p.num_pages - 1) + inputs.first_page[0]
            rows = pages[pages_of].reshape(p.B, p.S, p.Hkv, pages.shape[3])
            own = jnp.where(exists[:, :, None, None], rows[request].astype(exact), 0)
            return jnp.repeat(own, p.group, axis=2)  # [N, S, Hq, D]

        s = jnp.einsum("nhd,nshd->nhs", inputs.query.astype(exact), keys(inputs.key), precision="highest") * p.scale
        over = lambda mod, operands, *scores: _on_all(mod, operands, scores, request, jnp.arange(p.Hq), n, j)
        if p.score is not None:
            s = over(p.score, inputs.score_operands, s.astype(jnp.float32)).astype(exact)
        visible = jnp.broadcast_to(exists[:, None], s.shape)
        if p.mask is not None:
            visible &= over(p.mask, inputs.mask_operands)
        s = jnp.where(visible, s, -jnp.inf)
        top = jax.lax.stop_gradient(jnp.max(s, axis=2, keepdims=True, initial=-jnp.inf))
        weights = jnp.where(visible, jnp.exp(s - jnp.where(top == -jnp.inf, 0, top)), 0)
        total = weights.sum(axis=2, keepdims=True)
        empty = total == 0
        safe = jnp.where(empty, 1, total)
        out = jnp.einsum("nhs,nshd->nhd", weights / safe, keys(inputs.value), precision="highest")
        lse = jnp.where(empty, -jnp.inf, top + jnp.log(safe))[..., 0]
        return out.astype(p.out_dtype), lse.astype(jnp.float32)


def _on_all(mod: TracedMod, operands, scores, request, h, n, j) -> jax.Array:
    """A mod on [N, Hq, S]."""
    at = lambda *scalars: mod(operands, *scalars)
    given = (0,) * len(scores)
    at = jax.vmap(at, in_axes=(*given, None, None, None, 0))
    at = jax.vmap(at, in_axes=(*given, None, 0, None, None))
    return jax.vmap(at, in_axes=(*given, 0, None, 0, None))(*scores, request, h.astype(jnp.int32), n, j)

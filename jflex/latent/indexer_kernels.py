"""The kernels of the indexer: where they are chosen, and how JAX transforms them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import PartitionSpec

from jflex._check.arguments import check_config, current_device
from jflex._jax.primitive import Op, call_as_primitive
from jflex._mesh import match_manual_axes
from jflex.errors import UnsupportedError

if TYPE_CHECKING:
    from jflex.backends.gpu.triton_indexer import Site

IndexerImplementation = Literal["triton", "xla"] | None


def site_of_kernel(
    caller: str,
    implementation: IndexerImplementation,
    config: Any,
    arrays: tuple[jax.Array, ...],
    limit: Callable[[Any, Site], str | None],
) -> Site | None:
    """The site of a kernel for a call, or None if XLA runs it; `limit` says why the kernel does not."""
    if implementation not in ("triton", "xla", None):
        raise ValueError(f"`implementation` of `{caller}` must be 'triton', 'xla' or None. Got {implementation!r}.")
    config = check_config(config, None)
    if implementation == "xla":
        return None
    from jflex.backends.gpu import triton_indexer

    site = triton_indexer.Site(*current_device(*arrays), config.interpret)
    reason = limit(triton_indexer, site)
    if implementation == "triton" and reason is not None:
        raise UnsupportedError(
            f"None of the requested implementations supports this call of `{caller}`. triton: {reason}. These do: "
            "'xla'; pass implementation=None to let jflex choose."
        )
    may_run = reason is None and (implementation == "triton" or not _may_be_divided(*arrays))
    return site if may_run else None


def _may_be_divided(*arrays: jax.Array) -> bool:
    """True if arrays may be divided among devices, which would gather them for a kernel; in `jax.shard_map`, none is.

    Shardings of traced arrays are not known before XLA propagates them.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.axis_names and set(mesh.manual_axes) == set(mesh.axis_names):
        return False
    if any(isinstance(x, Tracer) for x in arrays):
        return jax.device_count() > 1
    return any(len(x.devices()) > 1 for x in arrays)


Arrays = tuple[jax.Array, jax.Array, jax.Array]
"""Queries, keys and weights of heads."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _scores(site: Site, plain: Callable[..., jax.Array], arrays: Arrays) -> jax.Array:
    from jflex.backends.gpu import triton_indexer

    query, key, weights = arrays
    return call_as_primitive(_Kernel(triton_indexer.scores, site), (query, key, weights.astype(jnp.float32)))


_scores.defvjp(
    lambda site, plain, arrays: (_scores(site, plain, arrays), arrays),
    lambda _, plain, arrays, d_scores: (jax.vjp(plain, *arrays)[1](d_scores),),
)


def scores(site: Site, plain: Callable[..., jax.Array], arrays: Arrays) -> jax.Array:
    """Scores by the kernel, of at least one query, head, key and column; in reverse mode, the derivative of `plain`."""
    return _scores(site, plain, match_manual_axes(arrays))


def top_k(site: Site, scores: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """`jax.lax.top_k` by the kernel; k is from 1 to the number of keys."""
    from jflex.backends.gpu import triton_indexer

    return call_as_primitive(_Kernel(triton_indexer.select, site, (k,)), (scores,))


@dataclasses.dataclass(frozen=True)
class _Kernel(Op[Any, Any]):
    """A kernel of Triton as an operation, which XLA does not partition: rows are the first axis of all arrays."""

    run: Callable[..., Any]
    site: Site
    numbers: tuple[int, ...] = ()

    def __call__(self, arrays: tuple[jax.Array, ...]) -> Any:
        return self.run(self.site, *arrays, *self.numbers)

    def out_specs(self, arrays: Any, outputs: Any, pspec: PartitionSpec) -> list[PartitionSpec]:
        """See `jflex._jax.primitive.Op`."""
        return [PartitionSpec(pspec[0], None) for _ in jax.tree.leaves(outputs)]

"""Launches of kernels through Mosaic GPU: the grid of tiles, operands padded for TMA, and the launch itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plg
from jax.typing import DTypeLike

from pallas_kernels.mosaic_gpu import smem
from pallas_kernels.spec import AttentionSpec, Operands
from pallas_kernels.types import Index, Location, Ref

WARP_GROUP = "warp_group"
_CTA = "block"
NUM_SMS = 132  # of an H100 or H200
MAX_WAVES = 2  # waves of CTAs over the SMs that the tiles of concurrent heads fill, where nothing else is known
ROWS_MULTIPLE = 8  # rows of a swizzled tile: TMA takes arrays of whole ones
T = TypeVar("T")  # outputs


def run_roles(
    consumers: int,
    produce: Callable[[], None],
    consume: Callable[[jax.Array], None],
    registers: tuple[int, int] = smem.REGISTERS,
) -> None:
    """Runs the warp groups of a CTA: consumers, and after them a producer, which gives registers to these."""
    group = lax.axis_index(WARP_GROUP)

    def run(action: Literal["increase", "decrease"], count: int, role: Callable[[], None]) -> None:
        plg.set_max_registers(count, action=action)
        role()

    pl.when(group == consumers)(lambda: run("decrease", registers[1], produce))
    pl.when(group < consumers)(lambda: run("increase", registers[0], lambda: consume(group)))


class Grid(NamedTuple):
    """All tiles, by tile id: batch, heads, and tiles of a head, of which the heaviest come first.

    Longest processing time first, with a few heads at a time for L2 reuse: the first tiles of concurrent heads come
    before their second ones. With one head at a time, the heavy tiles of the last head would start when all else is
    done: with list scheduling of a causal mask over 64 tiles of each of 16 heads the last SM ends 11.5 % after the
    mean, with four concurrent heads 0.2 %. With all heads at once the keys and values would miss the L2 cache.
    """

    batch: int
    heads: int
    tiles: int
    max_waves: int = MAX_WAVES

    @property
    def size(self) -> int:
        """The number of tiles."""
        return self.batch * self.heads * self.tiles

    @property
    def concurrent_heads(self) -> int:
        """Heads that are computed concurrently; what is left over joins the last group, behind which SMs would idle."""
        return max(1, min(self.batch * self.heads, self.max_waves * NUM_SMS // max(1, self.tiles)))

    def unravel(self, tile_id: Index) -> Location:
        """Batch, head, and number in the head's order of tiles, of a tile id below the size."""
        concurrent_heads, tiles, heads = (jnp.int32(x) for x in (self.concurrent_heads, self.tiles, self.heads))
        last = jnp.int32(self.batch * self.heads // self.concurrent_heads - 1)
        group = lax.min(lax.div(tile_id, concurrent_heads * tiles), last)
        offset = tile_id - group * concurrent_heads * tiles
        count = jnp.where(group == last, self.batch * heads - last * concurrent_heads, concurrent_heads)
        tile = lax.div(offset, count)
        head = group * concurrent_heads + offset - tile * count
        return lax.div(head, heads), lax.rem(head, heads), tile


def launch(
    kernel: Callable[..., None],
    inputs: object,
    outputs: T,
    scratch: object,
    *,
    name: str,
    num_ctas: int,
    warp_groups: int,
) -> T:
    """Runs ``kernel(cta_id, inputs, outputs, scratch)`` in every warp group of every CTA, consumers and one producer.

    Inputs are a pytree of arrays; outputs (`output`) and scratch are pytrees of declarations; the kernel gets refs.

    The barriers keep slices out of the call: XLA hands over an address inside of the whole array otherwise, and Mosaic
    GPU refuses one that is no multiple of 256.
    """
    flat, tree = jax.tree.flatten(inputs)
    shapes, out_tree = jax.tree.flatten(outputs)

    def body(*refs: Ref, declared: object) -> None:
        ins, outs = jax.tree.unflatten(tree, refs[: len(flat)]), jax.tree.unflatten(out_tree, refs[len(flat) :])
        kernel(lax.axis_index(_CTA), ins, outs, declared)

    results = plg.kernel(
        body,
        out_type=shapes,
        scratch_types={"declared": scratch},  # pyright: ignore[reportArgumentType]  (JAX's type of the tree is private)
        grid=(num_ctas,),  # one axis: the hardware bounds the others by 65535
        grid_names=(_CTA,),
        num_threads=warp_groups,
        thread_name=WARP_GROUP,
        kernel_name=name,
        compiler_params=plg.CompilerParams(
            lowering_semantics=plg.LoweringSemantics.Lane, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
        ),
    )(*lax.optimization_barrier(flat))
    return jax.tree.unflatten(out_tree, lax.optimization_barrier(results))


def output(shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    """Declares an output, with the type of the array that `launch` returns."""
    return cast("jax.Array", jax.ShapeDtypeStruct(shape, dtype))


def flatten_captured(arrays: Operands[jax.Array]) -> Operands[jax.Array]:
    """The operands, with captured arrays flattened to one dimension."""
    return arrays._replace(captured=jax.tree.map(lambda x: x.reshape(-1), arrays.captured))


# --- padding with zeros: TMA takes rows of a multiple of 16 numbers, and a multiple of 8 rows


def pad_operands(spec: AttentionSpec, arrays: Operands[jax.Array]) -> tuple[AttentionSpec, Operands[jax.Array]]:
    """The spec with padded head sizes, and the padded arrays; lengths in the spec stay the true ones."""
    D, Dv = padded_head_sizes(spec, arrays.value.dtype)
    wide = arrays._replace(
        query=pad_rows(spec, arrays.query, D), key=pad_rows(spec, arrays.key, D), value=pad_rows(spec, arrays.value, Dv)
    )
    return spec.replace(D=D, Dv=Dv), wide


def padded_head_sizes(spec: AttentionSpec, dtype: DTypeLike) -> tuple[int, ...]:
    """Head sizes of query and key, and of value, which has the given dtype, padded to a multiple of a swizzle."""
    sizes = (spec.D, spec.qk_dtype or dtype), (spec.Dv, dtype)
    return tuple(smem.rows_padded(size, jnp.dtype(of_rows).itemsize) for size, of_rows in sizes)


def pad_rows(spec: AttentionSpec, x: jax.Array, size: int) -> jax.Array:
    """Pads an array in the layout of the spec to rows of `size`, and to a multiple of `ROWS_MULTIPLE` of them."""
    axis = _axis(spec)
    widths = [(0, 0)] * 4
    widths[axis], widths[3] = (0, -x.shape[axis] % ROWS_MULTIPLE), (0, size - x.shape[3])
    return x if widths == [(0, 0)] * 4 else jnp.pad(x, widths)


def cut_rows(spec: AttentionSpec, x: jax.Array, length: int, size: int) -> jax.Array:
    """Slices off the padding of `pad_rows`."""
    return jax.lax.slice_in_dim(x, 0, length, axis=_axis(spec))[..., :size]


def _axis(spec: AttentionSpec) -> int:
    return 1 if spec.layout == "BTNH" else 2

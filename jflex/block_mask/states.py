"""The states of the blocks of a mask_mod: from bounds, and from elements where these leave doubt.

Interval arithmetic on the program of the mod decides most blocks of a causal mask, a window, documents, or what `&`,
`|` and `~` make of them. Two elements decide most others: a corner that is visible and one that is not make a block
partial. Of what is left every element is evaluated, a bounded number at a time, never over the whole mask at once.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int8, Int32

from jflex._mesh import isolated_trace, match_manual_axes, varying_axes
from jflex.block_mask.bits import last_where, nth_of_word, pack
from jflex.block_mask.lists import EMPTY, FULL, PARTIAL, block_count, inside_blocks
from jflex.mods.dependence import uses_index
from jflex.mods.trace import TracedMod
from pallas_kernels.block_intervals import Grid, Visibility, visibility_of_blocks
from pallas_kernels.spec import Mod

# Elements evaluated at once: enough to fill a GPU (131072 x 131072 takes 1024 steps), and few enough that without
# fusion of the mask into its reduction only tens of megabytes are needed.
_ELEMENTS_PER_STEP = 1 << 24
# Up to here one undecided block has all elements evaluated: as fast as without bounds, and the loop that would evaluate
# it alone takes 0.4 s to compile. On 2 cores of a CPU 2 ** 28 elements take 0.08 s.
_FEW_ELEMENTS = 1 << 28
UNDECIDED = 3  # the state of a block that bounds and corners leave undecided

Shape = tuple[int, int, int, int]


def known_block_states(
    traced: TracedMod, operands: tuple[jax.Array, ...], shape: Shape, block_size: tuple[int, int]
) -> Int8[Array, "B H R C"]:
    """Block states of known operands: code for undecided blocks is compiled only if there are any."""
    states = block_states(traced, operands, shape, block_size, settle=False)
    if not states.size or int(jnp.max(states)) < UNDECIDED:
        return states
    return block_states(traced, operands, shape, block_size)


@jax.jit(static_argnames=("traced", "shape", "block_size", "settle"))
def block_states(
    traced: TracedMod,
    operands: tuple[jax.Array, ...],
    shape: Shape,
    block_size: tuple[int, int],
    *,
    settle: bool = True,
) -> Int8[Array, "B H R C"]:
    """Classifies every block of a mask of `shape` ``(B, H, Q_LEN, KV_LEN)``, exactly unless not `settle`."""
    batch, heads, *lengths = shape
    rows, columns = map(block_count, lengths, block_size)
    if 0 in (batch, heads, rows, columns):
        return jnp.zeros((batch, heads, rows, columns), jnp.int8)
    own_batch, own_heads = (n if uses_index(traced, index) else 1 for n, index in ((batch, "b"), (heads, "h")))
    own_shape = own_batch, own_heads, lengths[0], lengths[1]
    operands = lax.stop_gradient(operands)  # states have no derivative, and a loop of unknown length cannot be reversed
    # What one step evaluates is not worth bounds, which take 0.1 s to compile.
    bounded = math.prod(own_shape) > _ELEMENTS_PER_STEP
    states = _bounded_states(traced, operands, own_shape, block_size, settle=settle) if bounded else None
    if states is None:
        states = _evaluated_states(traced, operands, own_shape, block_size)
    return jnp.broadcast_to(states, (batch, heads, rows, columns))


def _bounded_states(
    traced: TracedMod, operands: tuple[jax.Array, ...], shape: Shape, block_size: tuple[int, int], *, settle: bool
) -> Int8[Array, "B H R C"] | None:
    """States by bounds; undecided ones by elements if `settle`. None if bounds decide nothing."""
    batch, heads, *lengths = shape
    grid = Grid((lengths[0], lengths[1]), block_size)
    if varying_axes(*operands):  # inside a `jax.shard_map` programs would need the types of its mesh
        return None

    def bounds(b: Int32[Array, ""], h: Int32[Array, ""]) -> Visibility | None:
        return isolated_trace(visibility_of_blocks)(traced, operands, (b, h), (batch, heads), grid)

    zero = jnp.zeros((), jnp.int32)
    if jax.eval_shape(bounds, zero, zero) is None:
        return None

    def classify(unit: Int32[Array, ""]) -> Int8[Array, "R C"]:
        h = zero if heads == 1 else unit % heads
        b = zero if batch == 1 else unit // heads
        bounded = bounds(b, h)
        assert bounded is not None  # see above
        seen, hidden = _corners(traced, operands, b, h, grid)
        inside = inside_blocks(grid.lengths, block_size)
        full, hidden = bounded.all & inside, hidden | ~inside
        state = jnp.where((bounded.all | seen) & hidden, jnp.int8(PARTIAL), jnp.int8(UNDECIDED))
        return jnp.where(full, jnp.int8(FULL), jnp.where(bounded.some, state, jnp.int8(EMPTY)))

    units, (rows, columns) = batch * heads, grid.shape
    numbers = jnp.arange(units, dtype=jnp.int32)
    if math.prod(shape) <= _FEW_ELEMENTS:
        states = jax.vmap(classify)(numbers).reshape(batch, heads, rows, columns)
        if not settle:
            return states
        evaluate = lambda _: _evaluated_states(traced, operands, shape, block_size)
        return lax.cond(_any_undecided(states), evaluate, lambda states: states, states)
    width = min(units, max(1, _ELEMENTS_PER_STEP // (rows * columns)))

    def of_units(some: Int32[Array, " N"]) -> Int8[Array, "N R C"]:
        states = jax.vmap(classify)(some)
        return settled(traced, operands, states, some, heads, grid) if settle else states

    steps = block_count(units, width)
    padded = jnp.minimum(jnp.arange(steps * width, dtype=jnp.int32), units - 1)
    states = of_units(numbers) if steps == 1 else lax.map(of_units, padded.reshape(steps, width))
    return states.reshape(-1, rows, columns)[:units].reshape(batch, heads, rows, columns)


def _any_undecided(states: Int8[Array, "*N"]) -> Bool[Array, ""]:
    return jnp.max(states) == UNDECIDED  # on a CPU `any` takes ten times as long


def _corners(
    traced: TracedMod, operands: tuple[jax.Array, ...], b: Int32[Array, ""], h: Int32[Array, ""], grid: Grid
) -> tuple[Bool[Array, "R C"], Bool[Array, "R C"]]:
    """Tells of each block whether any corner is visible, and whether any is not."""
    q_ends, kv_ends = ((grid.positions(axis)[:, 0], grid.positions(axis)[:, -1]) for axis in (0, 1))
    corners = [
        visible_elements(traced, operands, b, h, (q_idx, kv_idx[None]), grid.lengths)[0]
        for q_idx in q_ends
        for kv_idx in kv_ends
    ]
    one, two, three, four = corners
    return one | two | three | four, ~(one & two & three & four)


def settled(
    traced: TracedMod,
    operands: tuple[jax.Array, ...],
    states: Int8[Array, "N R C"],
    units: Int32[Array, " N"],
    heads: int,
    grid: Grid,
) -> Int8[Array, "N R C"]:
    """The states with those undecided decided by their elements, in a loop over these blocks."""
    (rows, columns), flat = grid.shape, states.reshape(-1)
    width = min(flat.size, max(1, _ELEMENTS_PER_STEP // (grid.block_size[0] * grid.block_size[1])))

    def classify(number: Int32[Array, ""]) -> Int8[Array, ""]:
        unit, number = units[number // (rows * columns)], number % (rows * columns)
        begin = number // columns * grid.block_size[0], number % columns * grid.block_size[1]
        q_idx, kv_idx = (x + jnp.arange(n, dtype=jnp.int32) for x, n in zip(begin, grid.block_size, strict=True))
        visible = visible_elements(traced, operands, unit // heads, unit % heads, (q_idx, kv_idx[None]), grid.lengths)
        return jnp.any(visible).astype(jnp.int8) + jnp.all(visible).astype(jnp.int8)

    def settle(flat: Int8[Array, " X"]) -> Int8[Array, " X"]:
        words = pack((flat == UNDECIDED)[None])[0]
        each = lax.population_count(words).astype(jnp.int32)
        before = jnp.cumsum(each, dtype=jnp.int32) - each
        undecided = before[-1] + each[-1]

        def step(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            start, values_so_far = state
            nth = start + jnp.arange(width, dtype=jnp.int32)
            word = last_where(lambda word: before[word] <= nth, before.size - 1, nth)
            number = word * 32 + nth_of_word(words[word], nth - before[word])
            values = jax.vmap(classify)(jnp.minimum(number, flat.size - 1))
            at = jnp.where(nth < undecided, number, flat.size)
            return start + width, values_so_far.at[at].set(values, mode="drop")

        state = match_manual_axes((jnp.int32(0), flat))
        return lax.while_loop(lambda state: state[0] < undecided, step, state)[1]

    return lax.cond(_any_undecided(flat), settle, lambda flat: flat, flat).reshape(states.shape)


def _evaluated_states(
    traced: TracedMod, operands: tuple[jax.Array, ...], shape: Shape, block_size: tuple[int, int]
) -> Int8[Array, "B H R C"]:
    """The states by evaluation of every element.

    The blocks are grouped into units, a few neighboring blocks of one row; a step of the loop evaluates as many units
    as `_ELEMENTS_PER_STEP` allows and reduces them at once, so that XLA fuses the mask into the reduction.
    """
    batch, heads, q_length, kv_length = shape
    rows, columns = block_count(q_length, block_size[0]), block_count(kv_length, block_size[1])
    block_area = block_size[0] * block_size[1]
    width = min(columns, max(1, _ELEMENTS_PER_STEP // block_area))
    groups = block_count(columns, width)
    units = batch * heads * rows * groups
    units_per_step = min(units, max(1, _ELEMENTS_PER_STEP // (block_area * width)))
    steps = block_count(units, units_per_step)

    def classify_unit(unit: Int32[Array, ""]) -> Int8[Array, " W"]:
        # An axis of size 1 has a constant index, so that values that depend on it alone are computed only once.
        group, unit = (jnp.int32(0), unit) if groups == 1 else (unit % groups, unit // groups)
        row, unit = (jnp.int32(0), unit) if rows == 1 else (unit % rows, unit // rows)
        h, b = (jnp.int32(0), unit) if heads == 1 else (unit % heads, unit // heads)
        b = jnp.int32(0) if batch == 1 else b
        q_idx = row * block_size[0] + jnp.arange(block_size[0], dtype=jnp.int32)
        kv_idx = group * width * block_size[1] + jnp.arange(width * block_size[1], dtype=jnp.int32)
        visible = visible_elements(traced, operands, b, h, (q_idx, kv_idx.reshape(width, -1)), (q_length, kv_length))
        return jnp.any(visible, axis=(1, 2)).astype(jnp.int8) + jnp.all(visible, axis=(1, 2)).astype(jnp.int8)

    unit_ids = jnp.minimum(jnp.arange(steps * units_per_step, dtype=jnp.int32), units - 1)
    states = lax.map(jax.vmap(classify_unit), unit_ids.reshape(steps, units_per_step))
    states = states.reshape(steps * units_per_step, width)[:units]
    return states.reshape(batch, heads, rows, groups * width)[..., :columns]


def visible_elements(
    traced: Mod,
    operands: tuple[jax.Array, ...],
    b: Int32[Array, ""],
    h: Int32[Array, ""],
    indices: tuple[Int32[Array, " Q"], Int32[Array, "N K"]],
    seq_lengths: tuple[int, int],
) -> Bool[Array, "N Q K"]:
    """Evaluates a mask on some queries and some blocks of keys; False beyond the lengths.

    Indices of padding are clamped, so that the mod never reads a captured array out of range. ``vmap`` over one axis at
    a time keeps values that depend on the query alone at the size of the queries.
    """
    q_idx, kv_idx = indices
    q_length, kv_length = seq_lengths

    def element(q: Int32[Array, ""], kv: Int32[Array, ""]) -> Bool[Array, ""]:
        return traced(operands, b, h, q, kv)

    over_keys = jax.vmap(element, in_axes=(None, 0))
    over_queries = jax.vmap(over_keys, in_axes=(0, None))
    over_blocks = jax.vmap(over_queries, in_axes=(None, 0))
    visible = over_blocks(jnp.minimum(q_idx, q_length - 1), jnp.minimum(kv_idx, kv_length - 1))
    return visible & (q_idx < q_length)[None, :, None] & (kv_idx < kv_length)[:, None, :]

"""Random numbers from a captured key: the primitives of typed keys, as integer arithmetic on their data.

Only Threefry, JAX's default, is arithmetic; `rbg` calls a generator of XLA. Inside of a mod a key is one value that
holds two nodes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from jax.extend.random import threefry_prng_impl
from jax.typing import ArrayLike

from pallas_kernels.program.ir import Graph, Node
from pallas_kernels.program.rules.views import NotOnTile, Scalars, scalars
from pallas_kernels.types import aval_of

Inline = Callable[[core.ClosedJaxpr, Sequence[Scalars]], Sequence[Scalars]]
"""Interprets a jaxpr on values."""

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA
_WORDS = 2  # of the data of a key

# What moves and chooses values without looking at them.
_MOVES = frozenset({
    "broadcast_in_dim", "concatenate", "cond", "dynamic_slice", "reshape", "rev", "select_n", "slice", "split",
    "squeeze", "stack", "transpose", "unstack",
})  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Key:
    """A random key: its data. An element of `Scalars` in place of a node."""

    words: tuple[Node, ...]


def select_key(graph: Graph, predicate: Node, if_true: Key, if_false: Key) -> Key:
    """One of two keys: each word of their data is chosen."""
    return Key(tuple(graph.select(predicate, a, b) for a, b in zip(if_true.words, if_false.words, strict=True)))


def apply(eqn: core.JaxprEqn, ins: Sequence[Scalars], inline: Inline) -> Sequence[Scalars] | None:
    """The results of an equation of `RULES` or with random keys; None if it moves keys like any other values.

    Raises:
      NotOnTile: The keys are not of Threefry, or the primitive has no meaning for keys.
    """
    name = eqn.primitive.name
    for v in (*eqn.invars, *eqn.outvars):
        dtype = aval_of(v).dtype
        if jnp.issubdtype(dtype, jax.dtypes.prng_key) and dtype != _KEY_DTYPE:
            raise NotOnTile(f"primitive `{name}` of {dtype}: only keys of threefry2x32 are arithmetic")
    if name in RULES:
        return RULES[name](eqn, ins, inline)
    if name in _MOVES:
        return None
    raise NotOnTile(f"primitive `{name}` of random keys has no meaning on a tile")


def _word(keys: Scalars, i: tuple[int, ...], word: int) -> Node:
    return cast(Key, keys[i]).words[word]


_KEY_DTYPE = jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32")).dtype


def _wrap(eqn: core.JaxprEqn, ins: Sequence[Scalars], inline: Inline) -> Sequence[Scalars]:
    [data] = ins
    return [scalars(data.shape[:-1], lambda i: Key(tuple(data[i])))]


def _unwrap(eqn: core.JaxprEqn, ins: Sequence[Scalars], inline: Inline) -> Sequence[Scalars]:
    [keys] = ins
    return [scalars((*keys.shape, _WORDS), lambda i: _word(keys, i[:-1], i[-1]))]


def _of_each(function: Callable[..., jax.Array], *dtypes: np.dtype) -> Callable[..., Scalars]:
    """A function of key data, and of scalars, for each key of an array."""

    def each(inline: Inline, keys: Scalars, *others: Scalars) -> Scalars:
        avals = [jax.ShapeDtypeStruct((_WORDS,), np.uint32), *(jax.ShapeDtypeStruct((), d) for d in dtypes)]
        jaxpr = jax.make_jaxpr(function)(*avals)
        inner = jax.eval_shape(function, *avals).shape
        out = np.empty((*keys.shape, *inner), object)
        for i in np.ndindex(*keys.shape):
            words = scalars((_WORDS,), lambda j, i=i: _word(keys, i, j[0]))
            arguments = [scalars((), lambda _, i=i, x=x: np.broadcast_to(x, keys.shape)[i]) for x in others]
            [results] = inline(jaxpr, [words, *arguments])
            for j in np.ndindex(*inner):
                out[(*i, *j)] = results[j]
        return out

    return each


def _fold_in(eqn: core.JaxprEqn, ins: Sequence[Scalars], inline: Inline) -> Sequence[Scalars]:
    keys, data = ins
    keys = np.broadcast_to(keys, aval_of(eqn.outvars[0]).shape)
    return _wrap(eqn, [_of_each(threefry_prng_impl.fold_in, np.dtype(np.uint32))(inline, keys, data)], inline)


def _bits(eqn: core.JaxprEqn, ins: Sequence[Scalars], inline: Inline) -> Sequence[Scalars]:
    width, shape = eqn.params["bit_width"], eqn.params["shape"]
    return [_of_each(lambda words: threefry_prng_impl.random_bits(words, width, shape))(inline, ins[0])]


def _split(eqn: core.JaxprEqn, ins: Sequence[Scalars], inline: Inline) -> Sequence[Scalars]:
    shape = eqn.params["shape"]
    return _wrap(eqn, [_of_each(lambda words: threefry_prng_impl.split(words, shape))(inline, ins[0])], inline)


def _threefry(eqn: core.JaxprEqn, ins: Sequence[Scalars], inline: Inline) -> Sequence[Scalars]:
    shape = aval_of(eqn.outvars[0]).shape
    jaxpr = jax.make_jaxpr(threefry2x32)(*[jax.ShapeDtypeStruct((), np.uint32)] * 4)
    words = [np.broadcast_to(x, shape) for x in ins]
    results = {i: inline(jaxpr, [scalars((), lambda _, x=x, i=i: x[i]) for x in words]) for i in np.ndindex(*shape)}
    return [scalars(shape, lambda i, word=word: results[i][word].item()) for word in range(_WORDS)]


def _counts(eqn: core.JaxprEqn, ins: Sequence[Scalars], inline: Inline) -> Sequence[Scalars]:
    shape = eqn.params["shape"]

    def count() -> tuple[jax.Array, jax.Array]:
        number = np.arange(int(np.prod(shape)), dtype=np.uint64).reshape(shape)
        return jnp.asarray((number >> 32).astype(np.uint32)), jnp.asarray(number.astype(np.uint32))

    return inline(jax.make_jaxpr(count)(), [])


def threefry2x32(key0: ArrayLike, key1: ArrayLike, x0: ArrayLike, x1: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """Threefry-2x32 with 20 rounds: two words of random bits from those of a key and of a counter, uint32.

    Salmon et al. 2011, Parallel random numbers: as easy as 1, 2, 3, section 3.3.
    """
    keys = [jnp.uint32(key0), jnp.uint32(key1), jnp.uint32(key0) ^ jnp.uint32(key1) ^ jnp.uint32(_PARITY)]
    a, b = jnp.uint32(x0) + keys[0], jnp.uint32(x1) + keys[1]
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            a = a + b
            b = lax.shift_left(b, jnp.uint32(rotation)) | lax.shift_right_logical(b, jnp.uint32(32 - rotation))
            b = a ^ b
        a, b = a + keys[(group + 1) % 3], b + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return a, b


RULES: dict[str, Callable[[core.JaxprEqn, Sequence[Scalars], Inline], Sequence[Scalars]]] = {
    "random_wrap": _wrap,
    "random_unwrap": _unwrap,
    "random_clone": lambda eqn, ins, inline: ins,
    "random_fold_in": _fold_in,
    "random_bits": _bits,
    "random_split": _split,
    "threefry2x32": _threefry,
    "iota_2x32_shape": _counts,
}

"""Score mods that capture arrays, each in JAX and in numpy with its derivatives: more rows of `cases.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy import special

from tests.cases.score_pairs import F32, ScorePair
from tests.support.oracle import Score


def normal(*axes: str, dtype: Any = np.float32) -> Callable[..., dict[str, Any]]:
    """Draws one array ``bias`` with the axes named by the letters of the sizes."""
    return lambda rng, n: {"bias": rng.normal(size=[getattr(n, axis) for axis in axes]).astype(dtype)}


def added(
    jax_mod: Callable[..., Any],
    index: Callable[..., tuple[Any, ...]],
    captures: Callable[..., dict[str, Any]],
    **more: Any,
) -> ScorePair:
    """A pair that adds one element of ``bias``: the one at ``index(b, h, q, k, n)``, n its shape."""
    at = lambda b, h, q, k, c: index(b, h, q, k, c["bias"].shape)
    return ScorePair(
        jax_mod,
        Score(
            lambda s, b, h, q, k, c: s + c["bias"][at(b, h, q, k, c)],
            None,
            lambda s, b, h, q, k, c: {"bias": [(1.0, at(b, h, q, k, c))]},
        ),
        captures,
        **more,
    )


def same(index: Callable[..., tuple[Any, ...]], captures: Callable[..., dict[str, Any]]) -> ScorePair:
    """A pair that adds one element of ``bias``, at an index of operators alone: the same in JAX and in numpy."""

    def in_jax(c):
        return lambda s, b, h, q, k: s + c["bias"][index(b, h, q, k, c["bias"].shape)].astype(F32)

    return added(in_jax, index, captures)


def within(i: np.ndarray, size: int) -> np.ndarray:
    """What JAX reads at index i: negative ones count from the end, then all are brought into range."""
    return np.clip(np.where(i < 0, i + size, i), 0, size - 1)


# --- one element of an array is added

bias_q = same(lambda b, h, q, k, n: (q,), normal("T"))
bias_kv = same(lambda b, h, q, k, n: (k,), normal("S"))
bias_h = same(lambda b, h, q, k, n: (h,), normal("Hq"))
bias_bq = added(lambda c: lambda s, b, h, q, k: s + c["bias"][b][q], lambda b, h, q, k, n: (b, q), normal("B", "T"))
bias_qk = same(lambda b, h, q, k, n: (q, k), normal("T", "S"))
bias_bqk = same(lambda b, h, q, k, n: (b, q, k), normal("B", "T", "S"))
bias_hqk = same(lambda b, h, q, k, n: (h, q, k), normal("Hq", "T", "S"))
bias_bhqk = same(lambda b, h, q, k, n: (b, h, q, k), normal("B", "Hq", "T", "S"))
bias_of_more_heads = same(
    lambda b, h, q, k, n: (h + 1, q, k),
    lambda rng, n: {"bias": rng.normal(size=(n.Hq + 2, n.T, n.S)).astype(np.float32)},
)
bias_bhwq = same(
    lambda b, h, q, k, n: (b, h, 1, q), lambda rng, n: {"bias": rng.normal(size=(n.B, n.Hq, 2, n.T)).astype(np.float32)}
)
bias_of_padding = same(
    lambda b, h, q, k, n: (b, 0, 0, k), lambda rng, n: {"bias": rng.normal(size=(n.B, 1, 1, n.S)).astype(np.float32)}
)
bias_0d = added(lambda c: lambda s, b, h, q, k: s + c["bias"], lambda b, h, q, k, n: (), normal())
bias_bf16 = same(lambda b, h, q, k, n: (b, h, q, k), normal("B", "Hq", "T", "S", dtype=jnp.bfloat16))
bias_of_heads_bf16 = same(lambda b, h, q, k, n: (h, q, k), normal("Hq", "T", "S", dtype=jnp.bfloat16))
_EIGHTHS = lambda rng, *shape: (rng.integers(-32, 32, shape) / 8).astype(jnp.bfloat16)  # bfloat16 holds their sums
fixed_bias = ScorePair(
    lambda c: lambda s, b, h, q, k: s + c["fixed"][b, h, q, k].astype(F32),
    Score(lambda s, b, h, q, k, c: s + c["fixed"][b, h, q, k].astype(np.float64)),
    lambda rng, n: {"fixed": rng.normal(size=(n.B, n.Hq, n.T, n.S)).astype(jnp.bfloat16)},
)
fixed_biases = ScorePair(
    lambda c: lambda s, b, h, q, k: s * (c["fixed"][h // 2, q, k] + c["fixed_too"][b, q, k]).astype(F32),
    Score(
        lambda s, b, h, q, k, c: s * (c["fixed"][h // 2, q, k] + c["fixed_too"][b, q, k]).astype(np.float64),
        lambda s, b, h, q, k, c: (c["fixed"][h // 2, q, k] + c["fixed_too"][b, q, k]).astype(np.float64),
    ),
    lambda rng, n: {"fixed": _EIGHTHS(rng, n.Hq, n.T, n.S), "fixed_too": _EIGHTHS(rng, n.B, n.T, n.S)},
)
bias_of_product = added(
    lambda c: (lambda bias: lambda s, b, h, q, k: s + bias[q, k])(c["bias"] * 1.0),
    lambda b, h, q, k, n: (q, k),
    normal("T", "S"),
)
table = same(
    lambda b, h, q, k, n: (h, q - k + n[1] // 2),
    lambda rng, n: {"bias": rng.normal(size=(n.Hq, 2 * max(n.T, n.S))).astype(np.float32)},
)
table_of_distance = same(
    lambda b, h, q, k, n: (abs(q - k),), lambda rng, n: {"bias": rng.normal(size=max(n.T, n.S)).astype(np.float32)}
)
table_of_wrapped = added(  # a byte wraps at 128; so this does not depend on the distance alone
    lambda c: lambda s, b, h, q, k: s + c["bias"][q.astype(jnp.int8).astype(jnp.int32) - k + c["bias"].size // 2],
    lambda b, h, q, k, n: (q - 256 * (q > 127) - k + n[0] // 2,),
    lambda rng, n: {"bias": rng.normal(size=512).astype(np.float32)},
)
take = added(
    lambda c: lambda s, b, h, q, k: s + jnp.take(c["bias"], q // 2, mode="clip"),
    lambda b, h, q, k, n: (q // 2,),
    normal("T"),
)
negative_index = added(
    lambda c: lambda s, b, h, q, k: s + c["bias"][k - c["bias"].shape[0]],
    lambda b, h, q, k, n: (within(k - n[0], n[0]),),
    normal("S"),
)
outside_index = added(
    lambda c: lambda s, b, h, q, k: s + c["bias"][2 * q - 20, k + 7],
    lambda b, h, q, k, n: (within(2 * q - 20, n[0]), within(k + 7, n[1])),
    normal("T", "S"),
)
only_bias = ScorePair(
    lambda c: lambda s, b, h, q, k: c["bias"][q, k],
    Score(  # the score itself is not used
        lambda s, b, h, q, k, c: c["bias"][q, k] + 0 * s,
        lambda *_: 0.0,
        lambda s, b, h, q, k, c: {"bias": [(1.0, (q, k))]},
    ),
    normal("T", "S"),
)
bias_q_and_kv = ScorePair(
    lambda c: lambda s, b, h, q, k: s + c["bias"][q] + c["bias"][k],
    Score(
        lambda s, b, h, q, k, c: s + (c["bias"][q] + c["bias"][k]),
        None,
        lambda s, b, h, q, k, c: {"bias": [(1.0, (q,)), (1.0, (k,))]},
    ),
    lambda rng, n: {"bias": rng.normal(size=max(n.T, n.S)).astype(np.float32)},
)
permuted = ScorePair(
    lambda c: lambda s, b, h, q, k: s + c["bias"][c["order"][q], c["order"][k]],
    Score(
        lambda s, b, h, q, k, c: s + c["bias"][c["order"][q], c["order"][k]],
        None,
        lambda s, b, h, q, k, c: {"bias": [(1.0, (c["order"][q], c["order"][k]))]},
    ),
    lambda rng, n: {
        "bias": rng.normal(size=(n.T, n.S)).astype(np.float32),
        "order": rng.permutation(max(n.T, n.S)).astype(np.int32) % min(n.T, n.S),
    },
)
filled = ScorePair(  # elsewhere: 0.5, without a gradient
    lambda c: lambda s, b, h, q, k: s + c["bias"].at[q + k].get(mode="fill", fill_value=0.5),
    Score(
        lambda s, b, h, q, k, c: s + np.append(c["bias"], 0.5)[np.minimum(q + k, c["bias"].size)],
        None,
        lambda s, b, h, q, k, c: {"bias": [((q + k < c["bias"].size) * 1.0, (within(q + k, c["bias"].size),))]},
    ),
    normal("T"),
)
rounded = ScorePair(
    lambda c: (
        lambda s, b, h, q, k: s + jnp.round(4 * c["bias"][q]) / 4 + jnp.floor(c["bias"][k]) + jnp.sign(c["bias"][k])
    ),
    Score(
        lambda s, b, h, q, k, c: s + np.rint(4 * c["bias"][q]) / 4 + np.floor(c["bias"][k]) + np.sign(c["bias"][k]),
        None,
        lambda s, b, h, q, k, c: {"bias": [(0.0, (q,))]},
    ),
    lambda rng, n: {"bias": rng.normal(size=max(n.T, n.S)).astype(np.float32)},
)

# --- products and functions of captures

table_by_score = ScorePair(  # infinite for a score of 0, as it is past the end
    lambda c: lambda s, b, h, q, k: s + c["bias"][q - k + c["bias"].size // 2] / s,
    Score(
        lambda s, b, h, q, k, c: s + c["bias"][q - k + c["bias"].size // 2] / s,
        lambda s, b, h, q, k, c: 1 - c["bias"][q - k + c["bias"].size // 2] / s**2,
        lambda s, b, h, q, k, c: {"bias": [(1 / s, (q - k + c["bias"].size // 2,))]},
    ),
    lambda rng, n: {"bias": 0.1 * rng.normal(size=2 * max(n.T, n.S)).astype(np.float32)},
)
at_score = ScorePair(  # by the score, and NaN or infinite up to the diagonal
    lambda c: lambda s, b, h, q, k: s + c["bias"][(s > -50).astype(jnp.int32)] * jnp.log((q - k).astype(F32)),
    Score(
        lambda s, b, h, q, k, c: s + c["bias"][1] * np.log(q - k + 0.0),
        None,
        lambda s, b, h, q, k, c: {"bias": [(np.log(q - k + 0.0), (1,))]},
    ),
    normal("Hq"),
)

slopes = ScorePair(
    lambda c: lambda s, b, h, q, k: s - c["slopes"][h] * jnp.abs(q - k).astype(F32),
    Score(
        lambda s, b, h, q, k, c: s - c["slopes"][h] * abs(q - k),
        None,
        lambda s, b, h, q, k, c: {"slopes": [(-abs(q - k) + 0.0, (h,))]},
    ),
    lambda rng, n: {"slopes": (2.0 ** -np.arange(1, n.Hq + 1)).astype(np.float32)},
)
scale_0d = ScorePair(
    lambda c: lambda s, b, h, q, k: s * c["scale"] + c["scale"],
    Score(
        lambda s, b, h, q, k, c: c["scale"] * (s + 1),
        lambda s, b, h, q, k, c: c["scale"],
        lambda s, b, h, q, k, c: {"scale": [(s + 1, ())]},
    ),
    lambda rng, n: {"scale": np.float32(1.25)},
)
scale_int = ScorePair(
    lambda c: lambda s, b, h, q, k: s * c["scale"].astype(F32),
    Score(lambda s, b, h, q, k, c: c["scale"] * s, lambda s, b, h, q, k, c: c["scale"] + 0.0),
    lambda rng, n: {"scale": np.int32(2)},
)
scale_one = ScorePair(
    lambda c: lambda s, b, h, q, k: s * c["scale"][0],
    Score(
        lambda s, b, h, q, k, c: c["scale"][0] * s,
        lambda s, b, h, q, k, c: c["scale"][0],
        lambda s, b, h, q, k, c: {"scale": [(s, (0,))]},
    ),
    lambda rng, n: {"scale": np.float32([0.8])},
)
times_bias_q = ScorePair(
    lambda c: lambda s, b, h, q, k: s * c["bias"][q],
    Score(
        lambda s, b, h, q, k, c: s * c["bias"][q],
        lambda s, b, h, q, k, c: c["bias"][q],
        lambda s, b, h, q, k, c: {"bias": [(s, (q,))]},
    ),
    normal("T"),
)
gate = ScorePair(
    lambda c: lambda s, b, h, q, k: s * jax.nn.sigmoid(c["gate"][h]),
    Score(
        lambda s, b, h, q, k, c: s * special.expit(c["gate"][h]),
        lambda s, b, h, q, k, c: special.expit(c["gate"][h]),
        lambda s, b, h, q, k, c: {"gate": [(s * special.expit(c["gate"][h]) * special.expit(-c["gate"][h]), (h,))]},
    ),
    lambda rng, n: {"gate": rng.normal(size=n.Hq).astype(np.float32)},
)
outside_work = ScorePair(  # exp of the whole table is no work of the kernel's
    lambda c: (lambda weights: lambda s, b, h, q, k: s * weights[k])(jnp.exp(c["bias"])),
    Score(
        lambda s, b, h, q, k, c: s * np.exp(c["bias"][k]),
        lambda s, b, h, q, k, c: np.exp(c["bias"][k]),
        lambda s, b, h, q, k, c: {"bias": [(s * np.exp(c["bias"][k]), (k,))]},
    ),
    lambda rng, n: {"bias": 0.3 * rng.normal(size=n.S).astype(np.float32)},
)


def _nested(c):
    tree = {"heads": {"slope": c["slope"]}, "positions": (c["at_q"], c["at_kv"])}

    def mod(s, b, h, q, k):
        at_q, at_kv = tree["positions"]
        return s + tree["heads"]["slope"][h] * (at_q[q] - at_kv[k])

    return mod


pytree = ScorePair(
    _nested,
    Score(
        lambda s, b, h, q, k, c: s + c["slope"][h] * (c["at_q"][q] - c["at_kv"][k]),
        None,
        lambda s, b, h, q, k, c: {
            "slope": [(c["at_q"][q] - c["at_kv"][k], (h,))],
            "at_q": [(c["slope"][h], (q,))],
            "at_kv": [(-c["slope"][h], (k,))],
        },
    ),
    lambda rng, n: {
        "slope": rng.normal(size=n.Hq).astype(np.float32),
        "at_q": rng.normal(size=n.T).astype(np.float32),
        "at_kv": rng.normal(size=n.S).astype(np.float32),
    },
)


def _distance(c, q, k):
    away = c["at"][q] - c["at"][k]
    return away, np.sqrt((away**2).sum(-1) + 0.1)


distance = ScorePair(
    lambda c: lambda s, b, h, q, k: s - c["decay"][h] * jnp.sqrt(jnp.sum((c["at"][q] - c["at"][k]) ** 2) + 0.1),
    Score(
        lambda s, b, h, q, k, c: s - c["decay"][h] * _distance(c, q, k)[1],
        None,
        lambda s, b, h, q, k, c: {
            "decay": [(-_distance(c, q, k)[1], (h,))],
            "at": [
                (sign * c["decay"][h][..., None] * _distance(c, q, k)[0] / _distance(c, q, k)[1][..., None], (place,))
                for sign, place in ((-1, q), (1, k))
            ],
        },
    ),
    lambda rng, n: {
        "at": rng.normal(size=(max(n.T, n.S), 3)).astype(np.float32),
        "decay": (1 / (1 + np.arange(n.Hq))).astype(np.float32),
    },
)


def _loop(c):
    def mod(s, b, h, q, k):
        x = s / 4
        return jax.lax.fori_loop(0, 3, lambda i, y: y * x + c["bias"][i], jnp.zeros_like(s))

    return mod


polynomial = ScorePair(
    _loop,
    Score(  # (a x + b) x + c at x = s / 4
        lambda s, b, h, q, k, c: np.polyval(c["bias"], s / 4),
        lambda s, b, h, q, k, c: np.polyval(np.polyder(c["bias"]), s / 4) / 4,
        lambda s, b, h, q, k, c: {"bias": [((s / 4) ** (2 - i), (i,)) for i in range(3)]},
    ),
    lambda rng, n: {"bias": np.float32([0.3, 2.0, 0.5])},
)


def _scan(c):
    def mod(s, b, h, q, k):
        step = lambda y, x: (y + x * jnp.tanh(s * x), None)
        return jax.lax.scan(step, s, c["bias"])[0]

    return mod


scan = ScorePair(
    _scan,
    Score(
        lambda s, b, h, q, k, c: s + sum(x * np.tanh(s * x) for x in c["bias"]),
        lambda s, b, h, q, k, c: 1 + sum(x**2 / np.cosh(s * x) ** 2 for x in c["bias"]),
        lambda s, b, h, q, k, c: {
            "bias": [(np.tanh(s * x) + x * s / np.cosh(s * x) ** 2, (i,)) for i, x in enumerate(c["bias"])]
        },
    ),
    lambda rng, n: {"bias": np.float32([0.5, -0.25, 1.5])},
)
sorting = ScorePair(  # has no meaning on a tile
    lambda c: lambda s, b, h, q, k: s + jnp.sort(c["bias"][q])[1],
    Score(
        lambda s, b, h, q, k, c: s + np.sort(c["bias"], -1)[:, 1][q],
        None,
        lambda s, b, h, q, k, c: {"bias": [(1.0, (q, np.argsort(c["bias"], -1)[:, 1][q]))]},
    ),
    lambda rng, n: {"bias": rng.normal(size=(n.T, 3)).astype(np.float32)},
)

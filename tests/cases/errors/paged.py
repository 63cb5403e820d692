"""Wrong calls of `paged_attention`."""

import dataclasses

import jax.numpy as jnp
import numpy as np

import jflex
from jflex.paged import PagedBatch, PagedCache
from tests.cases.errors.calls import F32
from tests.cases.errors.calls import array as zeros

INT = lambda x: jnp.asarray(x, jnp.int32)
BATCH = PagedBatch(INT([0, 2, 3]), INT([20, 5]), INT([[1, 2], [3, 0]]))
INTERPRETED = {"implementation": "triton", "config": jflex.Config(interpret=True)}


def cache_of(heads=2, size=16, layers=None, dtype=F32):
    return PagedCache.create(4, 16, heads, size, dtype=dtype, layers=layers)


def call(q=None, cache=None, batch=BATCH, **options):
    q = zeros(3, 4, 16) if q is None else q
    cache = cache_of() if cache is None else cache
    return lambda: jflex.paged_attention(q, cache, batch, **({"implementation": "xla"} | options))


def branches(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx and kv_idx > 0


def four_arguments(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def sorts(b, h, q_idx, kv_idx):
    return jnp.sort(jnp.stack([q_idx, kv_idx]))[0] > 3


def projects(vector, b, h_kv, kv_idx):
    return vector @ jnp.ones((32, 32))


def wrong(**fields):
    return dataclasses.replace(BATCH, **fields)


TYPES, VALUES, REFUSED = TypeError, ValueError, jflex.UnsupportedError
# Name, how to provoke it, type, what the message holds.
ROWS = [
    # --- queries and cache
    ("cache", call(cache=(zeros(4, 16, 2, 16),) * 2), TYPES, r"`cache` must be a `PagedCache`. Got tuple. Make"),
    ("query", call([[1.0]]), TYPES, r"`q` must be an array. Got list"),
    ("axes", call(zeros(1, 3, 4, 16)), VALUES,
     r"`q` must have three axes, \[N, Hq, D\].*Got q: float32\[1,3,4,16\], .*Reshape \[B, T, Hq, D\] to"),
    ("dtype", call(zeros(3, 4, 16, dtype=jnp.bfloat16)), TYPES,
     r"`q` and `cache` must have one dtype. Got q: bfloat16\[3,4,16\], cache.k: float32\[4,16,2,16\].*Cast `q`"),
    ("head size", call(zeros(3, 4, 32)), VALUES, r"`q` must have the head size of the cache's keys, 16. Got q"),
    ("heads", call(zeros(3, 3, 16)), VALUES, r"`q` must have a multiple of the cache's 2 heads: grouped-query"),
    # --- layers
    ("layer missing", call(cache=cache_of(layers=2)), VALUES, r"`layer` is missing: the cache stacks 2 layers. Pass"),
    ("layer superfluous", call(layer=0), VALUES, r"`layer` is 0, but the cache has no axis of layers. Leave"),
    ("layer beyond", call(cache=cache_of(layers=2), layer=2), VALUES, r"`layer` must lie within 0 and 1.*Got 2"),
    # --- the batch
    ("batch", call(batch=(1, 2, 3)), TYPES, r"`batch` must be a `PagedBatch`. Got tuple"),
    ("indptr dtype", call(batch=wrong(qo_indptr=np.array([0, 2, 3]))), TYPES, r"`batch.qo_indptr` must.*int64\[3\]"),
    ("requests", call(batch=wrong(kv_lengths=INT([20]))), VALUES, r"`batch` must have `qo_indptr` \[R \+ 1\]"),
    ("first", call(batch=wrong(qo_indptr=INT([1, 2, 3]))), VALUES, r"`qo_indptr` must begin with 0"),
    ("reserved page", call(batch=wrong(page_table=INT([[1, 0], [3, 0]]))), VALUES, r"page 0 is reserved.*entry 1 is 0"),
    # --- how
    ("no implementation", call(implementation=()), VALUES, r"`implementation` must name at least one backend"),
    ("scale", call(scale=float("nan")), VALUES, r"`scale`.*nan"),
    ("statistics", call(return_stats=["max"]), TYPES, r"`return_stats` must be a tuple"),
    ("weights", call(normalize="none", return_lse=True), VALUES, r"`return_lse` must be False with `normalize='none'`"),
    ("sinks", call(normalize="none", sinks=zeros(4)), VALUES, r"`sinks` enter the denominator of a softmax"),
    # --- mods
    ("branch", call(mask_mod=branches), VALUES, r"`mask_mod` cannot branch.*: branches \(paged.py:\d+\)"),
    ("score without a score", call(score_mod=four_arguments), TYPES, r"`score_mod`.*four_arguments \(paged"),
    ("block mask", call(mask_mod=jflex.create_block_mask(four_arguments, None, None, 32, 32, block_size=16)), TYPES,
     r"`mask_mod` must be.*[Gg]ot BlockMask"),
    ("vector mod", call(query_mod=lambda x, b, h, i: x[1:]), VALUES, r"`query_mod` must return one.*float32\[15\]"),
    # --- what a backend cannot run
    ("cpu", call(implementation="triton"), REFUSED,
     r"triton: it needs an NVIDIA GPU, and this call runs on cpu \(for tests, config=jflex.Config\(interpret=True\)"),
    ("large heads", call(zeros(3, 4, 320), cache_of(size=320), **INTERPRETED), REFUSED,
     r"head sizes up to 256, not 320.*These do: 'xla', 'reference'"),
    ("large group", call(zeros(3, 258, 16), **INTERPRETED), REFUSED, r"up to 128 query heads .*, not 129"),
    ("no program", call(mask_mod=sorts, **INTERPRETED), REFUSED,
     r"`mask_mod` sorts \(paged.py:\d+\) cannot run in a kernel: .*sort.*'xla' evaluates any mod"),
    ("matrix of keys", call(zeros(3, 4, 32), cache_of(size=32), key_mod=projects, **INTERPRETED), REFUSED,
     r"`key_mod` projects \(paged.py:\d+\) cannot run in a kernel: primitive `dot_general`.*'xla' eval"),
]  # fmt: skip

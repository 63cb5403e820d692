"""Wrong context parallel calls."""

import jax
import jax.numpy as jnp
import numpy as np

import jflex
from jflex import context_parallel
from tests.support.context_parallel_calls import MASKS, PAIR, mesh_of


def call(T=64, S=None, heads=4, B=2, axes=PAIR, mesh=None, **options):
    x = lambda n: jnp.zeros((B, n, heads, 16))
    mesh = mesh_of(**axes) if mesh is None else mesh
    S = T if S is None else S
    return jflex.context_parallel_attention(x(T), x(S), x(S), mesh=mesh, **({"implementation": "xla"} | options))


def paged(num_pages=64, table=((1, 9, 17),), axes=None, heads=2, **options):
    cache = jflex.paged.PagedCache.create(num_pages, 16, heads, 8, dtype=jnp.float32)
    batch = jflex.paged.PagedBatch(jnp.array([0, 1]), jnp.array([40]), jnp.array(table, jnp.int32))
    mesh = mesh_of(**(axes or {"context": 8}))
    return jflex.context_parallel_paged_attention(jnp.ones((1, 2 * heads, 8)), cache, batch, mesh=mesh, **options)


def block_mask(block_size=16, T=64):
    return jflex.create_block_mask(MASKS["causal"], None, None, T, T, block_size=block_size)


ROWS = [
    ("no mesh", lambda: jflex.context_parallel_attention(*[jnp.zeros((1, 8, 1, 8))] * 3), ValueError,
     r"`mesh` must be a `jax\.sharding\.Mesh`.*Got None\. Make one with `jax\.make_mesh"),
    ("an axis that the mesh lacks", lambda: call(axis="sequence"), ValueError,
     r"must name axes of the mesh\. Got 'sequence'; the mesh has 'data', 'context'\."),
    ("a number for an axis", lambda: call(axis=0), TypeError, r"`axis` must be the name of an axis of the mesh\. Got"),
    ("a strategy", lambda: call(strategy="tree"), ValueError, r"`strategy` must be one of 'all_gather', 'ring', 'ul"),
    ("queries that do not divide", lambda: call(T=62, S=64), ValueError,
     r"`query` has 62 queries, which the 4 devices along 'context' do not divide\. Pad them to 64"),
    ("keys that do not divide", lambda: call(T=64, S=63), ValueError,
     r"`key` has 63 keys.*Pad them to 64.*mask the padding of keys \(`kv_idx < 63`\)"),
    ("a batch that does not divide", lambda: call(B=3, batch_axes="data"), ValueError, r"do not divide the batch of 3"),
    ("heads that do not divide", lambda: call(heads=3, head_axes="data"), ValueError, r"do not divide the 3 key heads"),
    ("heads for ulysses", lambda: call(heads=2, strategy="ulysses"), ValueError,
     r"`strategy='ulysses'` divides the key heads of a device, 2, among the 4 devices along 'context'.*'ring'"),
    ("a chunk twice", lambda: call(order=np.array([0, 1, 1, 3])), ValueError,
     r"`order` must be a permutation of chunks.*each once\. Got int64\[4\]: \[0, 1, 1, 3\]"),
    ("a traced order", lambda: jax.jit(lambda order: call(order=order))(jnp.arange(4)), TypeError,
     r"known while tracing\. Got a traced array"),
    ("an order for other devices", lambda: call(order=np.arange(6)), ValueError,
     r"as many chunks for each of 4 devices\. Got 6 chunks"),
    ("an order for other tokens", lambda: call(T=68, order=np.arange(8)), ValueError,
     r"8 chunks, which do not divide the 68 tokens\. Pad these to 72"),
    ("blocks that do not divide", lambda: call(block_mask=block_mask(32)), ValueError,
     r"blocks of \(32, 32\), which must divide the chunks of \(16, 16\).*block_size=\(16, 16\)"),
    ("a mask of the shard", lambda: call(block_mask=block_mask(T=16)), ValueError,
     r"for 16 queries and 16 keys, the c"),
    ("two masks", lambda: call(block_mask=block_mask(), mask_mod=MASKS["causal"]), ValueError,
     r"`block_mask` and `mask_mod` cannot both be given"),
    ("no backend", lambda: call(implementation="mosaic_gpu"), jflex.UnsupportedError,
     r"None of the requested implementations supports.*mosaic_gpu"),
    ("a ready mod of other sizes", lambda: call(score_mod=jflex.scores.alibi(jnp.ones(8))), ValueError,
     r"`slopes` of `alibi` must hold one slope for each query head"),
    ("a traced mask to balance", lambda: jax.jit(lambda m: context_parallel.device_costs(m, 2))(block_mask()),
     TypeError, r"whose lists are known, outside of `jit`\. Got a traced one"),
    ("no mask to balance", lambda: context_parallel.balanced_order(None, 2), TypeError, r"Got NoneType"),
    ("blocks that do not divide for balance", lambda: context_parallel.balanced_order(block_mask(), 3), ValueError,
     r"has 4 query blocks, which must be a multiple of 3 devices x 1.*multiple of 48 tokens"),
    ("an order that cuts blocks", lambda: context_parallel.device_costs(block_mask(), 2, np.arange(8)), ValueError,
     r"`order` must divide the 4 query blocks of the mask.*Got 8 chunks"),
    ("no order to draw", lambda: context_parallel.costs_to_image(block_mask(), 2, {}), ValueError,
     r"`orders` must hold at least one order.*Got none"),
    ("lengths of another batch", lambda: call(kv_lengths=jnp.zeros(3, jnp.int32)), ValueError,
     r"`kv_lengths` must be an int32 array \[B\], the number of visible keys of each of the 2 batch entries\."),
    ("a vector mod of another size", lambda: call(key_mod=lambda x, b, h, i: x[:4]), ValueError,
     r"`key_mod` must return one vector like the one it gets"),
    # --- pages
    ("pages that do not divide", lambda: paged(63), ValueError,
     r"`cache` has 63 pages, which the 8 devices along 'context' do not divide\. Make it with 64\."),
    ("a page of another device", lambda: paged(table=((1, 9, 25),)), ValueError,
     r"in the run of device j % 8\. Page 2 of request 0 is 25, and the run of device 2 is 16 to 23\. Take it from"),
    ("heads that do not divide",
     lambda: paged(axes={"context": 4, "model": 2}, heads=3, table=((1, 17, 33),), head_axes="model"), ValueError,
     r"`head_axes` \('model',\) has 2 devices, which do not divide the 3 key heads"),
    ("a page beyond the cache", lambda: paged(table=((1, 9, 640),)), ValueError,
     r"`page_table` must hold pages with"),
]  # fmt: skip

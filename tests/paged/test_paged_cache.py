"""The paged cache: its sizes, and writes and copies that neither wrap nor copy the cache."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jflex.paged import PagedCache, copy_pages, copy_slots, write
from tests.support import gpu_compile

P, SIZE, HKV, D, DV, L = 6, 4, 2, 8, 5, 3
F32 = jnp.float32
INT = functools.partial(np.asarray, dtype=np.int32)
donating_write = jax.jit(write, donate_argnames="cache")


def drawn(layers=None, dtype=np.float32):
    rng = np.random.default_rng(0)
    shape = (P, SIZE, HKV) if layers is None else (layers, P, SIZE, HKV)
    return PagedCache(*(jnp.asarray(rng.normal(size=(*shape, d)), dtype) for d in (D, DV)))


def tokens(n, dtype=np.float32):
    rng = np.random.default_rng(1)
    return tuple(jnp.asarray(rng.normal(size=(n, HKV, d)), dtype) for d in (D, DV))


def written(cache, k, v, slots, layer=None):
    """What `write` must do, slot by slot."""
    sides = []
    for pages, new in ((cache.k, k), (cache.v, v)):
        flat = np.array(pages if layer is None else pages[layer]).reshape(P * SIZE, *pages.shape[-2:])
        for token, slot in enumerate(np.asarray(slots)):
            if SIZE <= slot < P * SIZE:  # page 0 holds no tokens
                flat[slot] = new[token]
        whole = np.array(pages)
        whole[() if layer is None else layer] = flat.reshape(P, SIZE, *pages.shape[-2:])
        sides.append(whole)
    return sides


def assert_holds(cache, sides):
    np.testing.assert_array_equal(cache.k, sides[0])
    np.testing.assert_array_equal(cache.v, sides[1])


@pytest.mark.parametrize("page_size", [1, 3, 16, 256])
def test_sizes_of_a_cache(page_size):
    cache = PagedCache.create(5, page_size, 2, 8, v_head_dim=4, dtype=jnp.bfloat16)
    assert (cache.k.shape, cache.v.shape) == ((5, page_size, 2, 8), (5, page_size, 2, 4))
    assert (cache.num_pages, cache.page_size, cache.num_kv_heads, cache.layers) == (5, page_size, 2, None)
    stacked = jax.tree.map(lambda x: x, PagedCache.create(5, page_size, 2, 8, dtype=jnp.bfloat16, layers=3))
    assert stacked.v.shape == (3, 5, page_size, 2, 8)
    assert (stacked.num_pages, stacked.page_size, stacked.num_kv_heads, stacked.layers) == (5, page_size, 2, 3)
    assert not np.asarray(stacked.k, np.float32).any()


# The last slot and those of page 0, a boundary of pages that lie apart, and all that must be dropped.
SLOTS = {
    "boundary": [7, 20, 21],
    "ends": [P * SIZE - 1, 4, 0, 3],
    "dropped among others": [-1, 9, P * SIZE, 10, -P * SIZE, 2**31 - 1, -(2**31)],
    "all dropped": [-1, -1, -1, -1],
    "none": [],
}


@pytest.mark.full
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("slots", SLOTS.values(), ids=SLOTS)
def test_write_is_exact_and_drops_what_is_outside(slots, dtype):
    cache, (k, v) = drawn(dtype=dtype), tokens(len(slots), dtype)
    expected = written(cache, k, v, slots)
    assert_holds(write(cache, k, v, INT(slots)), expected)
    assert_holds(donating_write(cache, k, v, jnp.asarray(INT(slots))), expected)


@pytest.mark.full
@pytest.mark.parametrize("layer", [0, 2, np.int64(1), jnp.int32(2), np.int32(1)])
def test_write_to_one_layer(layer):
    cache, (k, v), slots = drawn(L), tokens(4), INT([-1, 23, P * SIZE, 5])
    expected = written(cache, k, v, slots, int(layer))
    assert_holds(write(cache, k, v, slots, layer=layer), expected)
    assert_holds(donating_write(cache, k, v, slots, layer=layer), expected)


@pytest.mark.parametrize("layer", [-1, L, -(2**31)])
def test_a_traced_layer_outside_drops_all(layer):
    cache, (k, v) = drawn(L), tokens(2)
    assert_holds(jax.jit(write)(cache, k, v, INT([4, 5]), layer=layer), (cache.k, cache.v))


def test_slots_given_twice_are_fine_where_no_token_lives():
    cache, (k, v) = drawn(), tokens(6)
    for step in (write, jax.jit(write)):
        assert_holds(step(cache, k, v, INT([0, 0, -1, -1, 10**6, 10**6])), (cache.k, cache.v))


@pytest.mark.full
def test_copies_read_before_they_write():
    cache = drawn(L)
    new = copy_pages(cache, INT([1, 2, 5, 3]), INT([2, 1, -1, P]))
    order = [0, 2, 1, 3, 4, 5]
    assert_holds(new, (cache.k[:, np.array(order)], cache.v[:, np.array(order)]))
    single = drawn()
    order = np.array([0, 1, 2, 3, 4, 4])
    assert_holds(jax.jit(copy_pages)(single, INT([4]), INT([5])), (single.k[order], single.v[order]))


@pytest.mark.parametrize("layers", [None, L])
def test_copies_of_slots_read_before_they_write(layers):
    cache = drawn(layers)
    new = jax.jit(copy_slots)(cache, INT([6, 7, 9, 23, 5, 4, 8, 9]), INT([5, 6, -1, 12, P * SIZE, 7, 2, 2]))
    order = np.arange(P * SIZE)
    order[[5, 6, 12, 7]] = [6, 7, 23, 4]
    by_slot = lambda x: x.reshape(*x.shape[:-4], P * SIZE, *x.shape[-2:])
    for x, old in ((new.k, cache.k), (new.v, cache.v)):
        np.testing.assert_array_equal(by_slot(x), np.take(np.asarray(by_slot(old)), order, axis=-3))


def by_layer(cache, k, v, slots):
    def layer(cache, number):
        return write(cache, k * number.astype(k.dtype), v, slots, layer=number), None

    return jax.lax.scan(layer, cache, jnp.arange(L, dtype=jnp.int32))[0]


STEPS = {
    "single": (None, lambda cache, k, v, slots: write(cache, k, v, slots)),
    "one of several layers": (L, lambda cache, k, v, slots: write(cache, k, v, slots, layer=slots[0] % L)),
    "scan over layers": (L, by_layer),
    "copied pages": (L, lambda cache, k, v, slots: copy_pages(cache, slots[:1] % P, slots[1:2] % P)),
    "copied slots": (L, lambda cache, k, v, slots: copy_slots(cache, slots, slots - 1)),
    "written, then copied": (
        None,
        lambda cache, k, v, slots: copy_pages(write(cache, k, v, slots), slots[:1] % P, slots[1:2] % P),
    ),
}


@pytest.mark.parametrize(("layers", "step"), STEPS.values(), ids=STEPS)
def test_a_donated_cache_is_updated_in_place(layers, step):
    """No second cache: the result has the pointers of what was given, which is gone; no room for another."""
    cache = PagedCache.create(512, 16, 4, 32, v_head_dim=16, dtype=F32, layers=layers)
    k, v = jnp.ones((8, 4, 32)), jnp.ones((8, 4, 16))
    slots = INT([17, 35, -1, 100, 101, 102, 103, 8191])
    compiled = jax.jit(step, donate_argnums=0).lower(cache, k, v, slots).compile()
    memory = compiled.memory_analysis()
    held = cache.k.nbytes + cache.v.nbytes
    assert memory.alias_size_in_bytes == held
    assert memory.temp_size_in_bytes < held / 20
    before = [x.unsafe_buffer_pointer() for x in (cache.k, cache.v)]
    after = compiled(cache, k, v, jnp.asarray(slots))
    assert [x.unsafe_buffer_pointer() for x in (after.k, after.v)] == before
    assert cache.k.is_deleted()
    assert cache.v.is_deleted()


@pytest.mark.full
@pytest.mark.skipif(gpu_compile.missing() is not None, reason="compiles for a GPU")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, F32])
@pytest.mark.parametrize(("layers", "step"), STEPS.values(), ids=STEPS)
def test_the_gpu_holds_no_second_cache(layers, step, dtype):
    make = lambda: PagedCache.create(4096, 16, 8, 128, dtype=dtype, layers=layers)
    tokens = jax.ShapeDtypeStruct((64, 8, 128), dtype)
    cache, slots = jax.eval_shape(make), jax.ShapeDtypeStruct((64,), jnp.int32)
    compiled = gpu_compile.compiled_of(step, cache, tokens, tokens, slots, donate_argnums=(0,))
    memory = compiled.memory_analysis()
    held = 2 * cache.k.size * cache.k.dtype.itemsize
    assert memory.alias_size_in_bytes == held
    assert memory.temp_size_in_bytes < held / 100


@pytest.mark.skipif(gpu_compile.missing() is not None, reason="compiles for a GPU")
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_the_gpu_writes_without_compare_and_swap(dtype):
    """XLA's loops of it took 12.5 us in the mean of a load of 256 clients, plain stores 5.4 (H200, jax 0.11.2)."""
    cache = jax.eval_shape(lambda: PagedCache.create(64, 16, 8, 128, dtype=dtype, layers=2))
    tokens, slots = jax.ShapeDtypeStruct((64, 8, 128), jnp.bfloat16), jax.ShapeDtypeStruct((64,), jnp.int32)
    step = lambda cache, k, v, slots: write(cache, k, v, slots, layer=1)
    kernels = [ptx for ptx in gpu_compile.ptx_of(step, cache, tokens, tokens, slots) if "scatter" in ptx]
    assert kernels
    assert not [ptx for ptx in kernels if "atom." in ptx]


CACHE, STACKED = drawn(), drawn(L)
K, V = tokens(3)
NEW = INT([4, 5, 6])
create = functools.partial(PagedCache.create, 8, 4, 2, 16)
WRONG = [
    ("no page", lambda: PagedCache.create(0, 4, 2, 8, dtype=F32), ValueError, r"`num_pages` must be at least 1. Got 0"),
    ("large page", lambda: PagedCache.create(8, 257, 2, 8, dtype=F32), ValueError, r"`page_size` must be 1 to 256 tok.*"
     r"Got 257. Take smaller pages"),
    ("slots", lambda: PagedCache.create(2**23, 256, 1, 1, dtype=F32),
     ValueError, r"`num_pages` times `page_size` must be "
     r"below 2\*\*31.*8388608 \* 256 = 2147483648. Take at most 8388607 pages"),
    ("dtype", lambda: create(dtype=jnp.int16), TypeError, r"`dtype` must be floating-point \(.*\). Got int16"),
    ("no cache", lambda: write(CACHE.k, K, V, NEW), TypeError, r"`cache` must be a `PagedCache`. Got ArrayImpl. Make"),
    ("dtypes", lambda: write(PagedCache(CACHE.k, CACHE.v.astype(jnp.float16)), K, V, NEW), TypeError,
     r"`cache` must hold.*one floating-point dtype.*Got k: float32\[6,4,2,8\], v: float16"),
    ("axes", lambda: write(PagedCache(CACHE.k, STACKED.v), K, V, NEW), ValueError,
     r"`cache` must have `k` \[P, page_size, Hkv, D\].*v: float32\[3,6,4,2,5\]. Make one"),
    ("precise keys", lambda: write(CACHE, K.astype(jnp.bfloat16), V, NEW), TypeError,
     r"`k` must have the dtype of the cache, float32. Got bfloat16\[3,2,8\]. Cast it"),
    ("long slots", lambda: write(CACHE, K, V, NEW.astype(np.int64)),
     TypeError, r"`slots` must.*Got int64\[3\]. Cast it"),
    ("more tokens than slots", lambda: write(CACHE, K, V, NEW[:2]), ValueError,
     r"`k`, `v` and `slots` must be of the same tokens.*slots: int32\[2\]. Give padding the slot -1"),
    ("twice", lambda: write(CACHE, K, V, INT([9, 4, 9])), ValueError,
     r"`slots` must not give a slot twice. Got slot 9 \(page 2\) for 2 tokens. Give all but one"),
    ("copies", lambda: copy_pages(CACHE, INT([1, 2]), INT([3])), ValueError,
     r"`src` and `dst` must have one shape.*src: int32\[2\], dst: int32\[1\]. Pad the shorter one"),
    ("copies onto one", lambda: copy_pages(CACHE, INT([1, 2]), INT([3, 3])), ValueError,
     r"`dst` must not hold a page twice. Got page 3 more than once. Replace"),
]  # fmt: skip


@pytest.mark.parametrize(("provoke", "error", "message"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG])
def test_wrong_calls(provoke, error, message):
    with pytest.raises(error, match=message):
        provoke()

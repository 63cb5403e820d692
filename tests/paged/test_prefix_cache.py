"""The prefix cache: what is found and shared, what leaves it, and what that costs."""

import sys
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jflex
from jflex.masks import causal
from jflex.paged import PagedBatch, PagedCache, PrefixHit, PrefixStats, StaleHit, slots_of
from tests.support.prefixes import add, found, make, put, refused

# --- match


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint32, np.int8])
def test_arrays_of_any_integers(dtype):
    _, cache = make()
    put(cache, [5, 6, 7])
    assert found(cache, np.array([5, 6, 7], dtype)) == 3
    assert found(cache, np.array([5, 0, 6, 0, 7], dtype)[::2]) == 3


def test_a_changed_array_does_not_change_the_cache():
    _, cache = make(page_size=2)
    tokens = np.arange(8)
    hit = add(cache, tokens)
    tokens[:] = 0
    assert found(cache, range(8)) == 8
    assert found(cache, tokens) == 0
    assert hit.num_tokens == 8


def test_tokens_are_compared_and_not_their_hashes():
    assert (hash(-1), hash(0)) == (hash(-2), hash(2**61 - 1))
    _, cache = make()
    put(cache, [-2, 0])
    assert [found(cache, tokens) for tokens in ([-1, 0], [-2, 2**61 - 1], [-2, 0])] == [0, 1, 2]


class Collision:
    """A namespace that has the hash of all others."""

    def __hash__(self):
        return 0


def test_namespaces_share_nothing():
    pool, cache = make()
    spaces = [None, "tenant", ("tenant", "adapter"), ("tenant", "other"), 0, Collision(), Collision()]
    pages = [put(cache, [1, 2, 3], space) for space in spaces]
    assert len({page for listed in pages for page in listed}) == 3 * len(spaces)
    for space, listed in zip(spaces, pages, strict=True):
        hit = cache.match([1, 2, 3, 4], namespace=space)
        assert (hit.pages, hit.namespace) == (listed, space)
        cache.unlock(hit)
    assert found(cache, [1, 2, 3], namespace="salt") == 0
    cache.evict(99)
    assert not cache._tree.roots  # namespaces without pages and locks take no memory
    assert pool.num_free == 31
    cache.check([])


# --- locks


def test_hits_are_known_by_what_they_are_and_not_by_what_they_hold():
    _, cache = make()
    hit = add(cache, [1, 2])
    same = PrefixHit(hit.pages, hit.num_tokens, hit.namespace, hit._node)
    refused(cache, StaleHit, "2 pages of namespace None. Unlock a hit once", lambda: cache.unlock(same))
    _, other = make()
    refused(other, StaleHit, "not locked by this cache", lambda: other.unlock(hit))


# --- insert


@pytest.mark.full
def test_tokens_are_attended_to_on_the_pages_of_the_cache_once_duplicates_are_gone():
    """Pages that are free hold NaN, as another request could have written anything there."""
    pool, cache = make(num_pages=8, page_size=4)
    key, value, query = map(jnp.asarray, np.random.default_rng(0).normal(size=(3, 9, 1, 8)).astype(np.float32))
    stored = PagedCache.create(8, 4, 1, 8, dtype=jnp.float32)

    def written(stored, pages):
        slots = slots_of(jnp.array(pages), jnp.arange(9), 4)
        return jflex.paged.write(stored, key, value, slots)

    def attend(stored, pages):
        batch = PagedBatch(jnp.array([0, 1]), jnp.array([9]), jnp.array([pages]))
        return jflex.paged_attention(query[8:], stored, batch, mask_mod=causal(), implementation="xla")

    first, second = cache.match(range(9)), cache.match(range(9))
    pages, others = pool.alloc(3), pool.alloc(3)
    stored = written(written(stored, pages), others)
    expected = attend(stored, others)
    cache.insert(range(9), pages, first)
    hit = cache.insert(range(9), others, second)
    table = [*hit.pages, *others[len(hit.pages) :]]
    free = jnp.array([page for page in range(1, 8) if not pool.owners(page)])
    assert {*others} & {*free.tolist()} == {*others[:2]}
    poisoned = jax.tree.map(lambda x: x.at[free].set(jnp.nan), stored)
    np.testing.assert_array_equal(attend(poisoned, table), expected)
    assert jnp.isnan(attend(poisoned, others)).any()


# --- eviction


def test_tokens_take_no_more_memory_than_twice_those_of_the_pages():
    _, cache = make(page_size=2)
    put(cache, range(40))
    put(cache, [*range(10), *range(12)])
    for _ in range(16):
        cache.evict(1)
        for node in cache._tree._nodes(None):
            assert node.tokens.base is None or not node.pages
            assert len(node.tokens) <= 2 * len(node.pages)


def test_a_clock_tells_the_idle_pages():
    now = 100.0
    _, cache = make(clock=lambda: now)
    first = put(cache, [1, 2])
    now = 200
    second = put(cache, [3])
    third = put(cache, [1, 4])[1:]
    now = Fraction(601, 2)
    fourth = put(cache, [5])
    assert cache.evict(9, used_before=100) == ()
    assert cache.evict(9, used_before=150) == first[1:]  # its first page was used again by the third
    assert cache.evict(9, used_before=200) == ()
    assert cache.evict(1, used_before=201) == second
    assert cache.evict(9, used_before=300.4) == (*third, first[0])
    assert cache.evict(9) == fourth


def test_without_a_clock_unlocks_are_counted():
    _, cache = make()
    pages = [put(cache, [number]) for number in range(4)]
    assert cache.evict(9, used_before=3) == (*pages[0], *pages[1])


def opcodes(call):
    """How many instructions of Python `call` takes."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def work(leaves):
    """Of an eviction, a match and its end, and an insertion, in a cache whose leaves have been used again."""
    _, cache = make(num_pages=3 * leaves + 9)
    for leaf in range(leaves):
        put(cache, [0, leaf, 0])
    for leaf in range(leaves):
        found(cache, [0, leaf, 0])
    calls = [lambda: cache.evict(1), lambda: found(cache, [0, 7, 0]), lambda: add(cache, [0, leaves, 0])]
    return [opcodes(call) for call in calls]


def test_the_work_of_a_call_does_not_grow_with_the_number_of_leaves():
    """Nearly the same count of instructions: what Python itself caches may be missing the first time."""
    for few, many in zip(work(10), work(2_000), strict=True):
        assert many < 1.2 * few


def test_a_path_of_many_nodes():
    """Deeper than Python recurses."""
    n = 3 * sys.getrecursionlimit()
    _, cache = make(num_pages=n + 1)
    put(cache, range(n))
    for length in range(n - 1, 0, -100):
        found(cache, range(length))
    hit = add(cache, range(n))
    for node in [*hit._node.path()][:-1]:
        assert node.locks == 1
    node = hit._node
    for length in range(n, 0, -1):  # one page each
        cache._tree.split(cache._tree.find(None, np.arange(length)[:, None]))
        if length % 500 == 0:
            cache.check([])
    assert len([*hit._node.path()]) == n + 1
    cache.unlock(hit)
    assert cache.evict(2) == hit.pages[:-3:-1]
    cache.check([])
    assert len(cache.clear()) == n - 2


def test_statistics():
    pool, cache = make(page_size=2)
    assert cache.stats == PrefixStats()
    assert cache.stats.hit_rate == 0
    put(cache, range(6))
    hit = cache.match(range(9))
    cache.insert(range(6), hit.pages, hit)
    twin = cache.match(range(6), limit=2)
    cache.insert(range(6), [*twin.pages, *pool.alloc(2)], twin)
    put(cache, [8, 8])
    cache.evict(1)
    assert cache.stats == PrefixStats(
        lookups=4, hits=2, tokens=23, hit_tokens=8, inserted_pages=4, duplicate_pages=2, evicted_pages=1
    )
    assert cache.stats.hit_rate == 8 / 23

"""The prefix cache: what is found, locked and shared; nothing is lost or counted twice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jflex
from jflex.masks import causal
from jflex.paged import PagedBatch, PagedCache, PrefixHit, StaleHit, slots_of
from tests.support.prefixes import add, edges, found, make, put, refused

# --- match


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([], 0),
        ([1, 2, 3, 4], 4),
        ([1, 2, 3, 4, 5, 6, 7, 8], 8),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 8),
        ([1, 2, 3, 4, 5, 6], 4),
        ([1, 2, 3, 4, 5, 6, 0, 0], 4),
        ([1, 2, 3, 0], 0),
        ([1, 2, 3], 0),
        ([5, 6, 7, 8], 0),
    ],
)
def test_the_longest_cached_prefix_in_whole_pages_is_found(tokens, expected):
    _, cache = make(page_size=4)
    assert found(cache, tokens) == 0
    pages = put(cache, [1, 2, 3, 4, 5, 6, 7, 8])
    assert found(cache, tokens) == expected
    hit = cache.match(tokens, limit=8)
    assert (hit.pages, hit.num_tokens, hit.namespace) == (pages[: expected // 4], expected, None)
    cache.check([])


def test_the_last_token_of_a_prompt_is_always_computed():
    """A prompt that is cached as a whole leaves out its last page, or only the token behind it."""
    _, cache = make(page_size=4)
    put(cache, range(12))
    lengths = {n: cache.match(range(n)).num_tokens for n in (0, 1, 4, 5, 8, 9, 12)}
    assert lengths == {0: 0, 1: 0, 4: 0, 5: 4, 8: 4, 9: 8, 12: 8}
    assert [cache.match(range(12), limit=limit).num_tokens for limit in (0, 3, 4, 11, 12, 99)] == [0, 0, 4, 8, 12, 12]
    cache.check([])


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


# --- splits


def test_prefixes_that_diverge_split_an_edge():
    _, cache = make()
    a, b, c, d, e, f, g = range(7)
    pages = put(cache, [a, b, c, d, e])
    hit = cache.match([a, b, c, f, g])
    assert hit.pages == pages[:3]
    assert edges(cache) == [[a, b, c], [d, e]]
    own = cache.alloc(2)
    assert cache.insert([a, b, c, f, g], [*hit.pages, *own], hit).pages == (*pages[:3], *own)
    assert edges(cache) == [[a, b, c], [d, e], [f, g]]
    assert found(cache, [a, b, c, d, e]) == 5
    cache.check([])


def test_a_split_keeps_sizes_and_locks():
    _, cache = make()
    hit = add(cache, range(6))
    twice = cache.lock(hit)
    short = cache.match(range(6), limit=2)
    shorter = cache.match(range(6), limit=1)
    assert edges(cache) == [[0], [1], [2, 3, 4, 5]]
    assert [node.locks for node in cache._tree._nodes(None)] == [4, 4, 3, 2]
    assert (cache.num_cached, cache.num_evictable) == (6, 0)
    for number, ended in enumerate([hit, shorter, twice, short]):
        cache.unlock(ended)
        cache.check([])
        assert cache.num_evictable == [0, 0, 4, 6][number]


# --- locks


def test_locks_protect_all_pages_up_to_the_root():
    _, cache = make()
    put(cache, [1, 2, 3])
    put(cache, [1, 2, 4, 5])
    put(cache, [1, 6])
    deep = cache.match([1, 2, 4, 5], limit=4)
    assert (cache.num_cached, cache.num_evictable) == (6, 2)
    assert len(cache.evict(99)) == 2
    assert (cache.num_cached, cache.num_evictable) == (4, 0)
    assert cache.evict(99) == ()
    cache.unlock(deep)
    assert cache.num_evictable == 4
    cache.check([])


def test_a_prefix_is_locked_until_each_of_its_requests_has_ended():
    _, cache = make()
    first = add(cache, [1, 2, 3])
    second, copy = cache.match([1, 2, 3, 4]), cache.lock(first)
    for hit in (first, copy):
        cache.unlock(hit)
        assert (cache.evict(9), cache.num_evictable) == ((), 0)
    cache.unlock(second)
    assert len(cache.evict(9)) == 3
    assert cache.num_locks == 0


def test_each_hit_is_unlocked_once():
    _, cache = make()
    hit = add(cache, [1, 2])
    copy, empty = cache.lock(hit), cache.match([7])
    for ended in (hit, empty):
        cache.unlock(ended)
        for call in (cache.unlock, cache.lock, lambda ended: cache.insert([1, 2], [1, 2], ended)):
            refused(cache, StaleHit, "`hit` is not locked by this cache", lambda call=call, ended=ended: call(ended))
    assert cache.num_locks == 1
    cache.unlock(copy)


def test_hits_are_known_by_what_they_are_and_not_by_what_they_hold():
    _, cache = make()
    hit = add(cache, [1, 2])
    same = PrefixHit(hit.pages, hit.num_tokens, hit.namespace, hit._node)
    refused(cache, StaleHit, "2 pages of namespace None. Unlock a hit once", lambda: cache.unlock(same))
    _, other = make()
    refused(other, StaleHit, "not locked by this cache", lambda: other.unlock(hit))


# --- insert


def test_pages_of_tokens_that_are_cached_by_then_are_released():
    pool, cache = make(page_size=2)
    first, second = cache.match(range(7)), cache.match(range(7))
    pages, others = pool.alloc(4), pool.alloc(4)
    first = cache.insert(range(7), pages, first)
    assert first.pages == pages[:3]
    second = cache.insert(range(7), others, second)
    assert second.pages == pages[:3]
    assert [pool.owners(page) for page in others] == [0, 0, 0, 1]
    cache.check([pages[3:], others[3:]])
    third = cache.insert([*range(6), 8, 9], [*second.pages, others[3]], second)
    assert third.pages == (*pages[:3], others[3])
    cache.check([pages[3:]])
    assert cache.stats.duplicate_pages == 3


def test_a_duplicate_that_ends_within_an_edge():
    pool, cache = make()
    pages = put(cache, range(6))
    hit = cache.match(range(6), limit=2)
    hit = cache.insert([0, 1, 2, 3, 9], [*hit.pages, *pool.alloc(3)], hit)
    assert hit.pages[:4] == pages[:4]
    assert edges(cache) == [[0, 1], [2, 3], [4, 5], [9]]
    assert (cache.num_cached, cache.num_evictable, pool.num_free) == (7, 2, 24)
    cache.check([])


def test_a_request_inserts_again_as_it_grows():
    """After each chunk of the prompt, and at its end."""
    pool, cache = make(page_size=4)
    pages, hit, tokens = list(pool.alloc(5)), cache.match(range(18)), range(100, 118)
    for written in (3, 4, 9, 9, 18):
        hit = cache.insert(tokens[:written], pages, hit)
        pages[: len(hit.pages)] = hit.pages
        assert hit.num_tokens == written // 4 * 4
        assert cache.num_locks == 1
        cache.check([pages[len(hit.pages) :]])
    assert edges(cache) == [[*range(100, 104)], [*range(104, 108)], [*range(108, 116)]]


def test_what_is_not_written_is_not_cached():
    """A request of 6 prompt and 3 sampled tokens ends: keys of the last one were never written."""
    pool, cache = make(page_size=4)
    prompt, sampled = [1, 2, 3, 4, 5, 6], [7, 8, 9]
    hit = cache.match(prompt)
    pages = cache.alloc(pool.pages_for(9))
    hit = cache.insert(prompt + sampled[:-1], pages, hit)
    cache.unlock(hit)
    pool.release(pages[len(hit.pages) :])
    cache.check([])
    assert found(cache, [*prompt, *sampled, 0, 0, 0]) == 8
    assert pool.num_free + cache.num_cached == 31


def test_a_request_that_is_aborted_leaves_nothing():
    pool, cache = make(page_size=4)
    cached = put(cache, range(8))
    hit = cache.match(range(20))
    own = cache.alloc(3)
    cache.check([own])
    cache.unlock(hit)
    pool.release(own)
    cache.check([])
    assert hit.pages == cached
    assert (cache.num_locks, cache.num_evictable, pool.num_free) == (0, 2, 29)


def test_requests_that_fork_share_a_lock_and_copy_the_partial_page():
    pool, cache = make(page_size=4)
    hit = cache.match(range(6))
    pages = cache.alloc(2)
    hit = cache.insert(range(6), pages, hit)
    other = cache.lock(hit)
    pool.share(pages[1:])
    hit = cache.insert(range(6), pages, hit)  # the page that both own is not full yet
    last = pool.fork(pages[1])
    cache.check([pages[1:], [last]])
    mine = cache.insert([*range(6), 50, 51], [*hit.pages, pages[1]], hit)
    other = cache.insert([*range(6), 60, 61], [*other.pages, last], other)
    assert (mine.pages, other.pages) == (pages, (pages[0], last))
    cache.check([])


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

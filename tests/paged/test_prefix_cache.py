"""The prefix cache: what is found, locked and shared; nothing is lost or counted twice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jflex
from jflex.masks import causal
from jflex.paged import PagedBatch, PagedCache, PrefixHit, StaleHit, slots_of
from tests.support.prefixes import add, found, make, put, refused

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


# --- locks


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

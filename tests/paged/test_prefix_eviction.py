"""What leaves the prefix cache: the least recently used leaves, namespaces, everything; and what that costs."""

import sys
from fractions import Fraction

import numpy as np

from jflex.paged import OutOfPages, PrefixLocked, PrefixStats
from tests.support.prefixes import add, found, make, put, refused


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


def test_alloc_evicts_what_is_missing_and_no_more():
    pool, cache = make(num_pages=8)
    put(cache, range(4))
    hit = add(cache, range(10, 12))
    assert (pool.num_free, cache.num_evictable) == (1, 4)
    assert len(cache.alloc(3)) == 3
    assert (pool.num_free, cache.num_cached, cache.num_evictable) == (0, 4, 2)
    refused(
        cache, OutOfPages, "`n` is 3, but 0 pages are free and 2 evictable of 7. Unlock hits", lambda: cache.alloc(3)
    )
    assert len(cache.alloc(2)) == 2
    assert cache.alloc(0) == ()
    assert cache.num_cached == len(hit.pages)


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


# --- clear, reset, statistics


def test_clear_removes_one_namespace_and_reset_all():
    pool, cache = make()
    pages = {space: put(cache, [1, 2, 3], space) for space in (None, "a", "b")}
    put(cache, [1, 9], "a")
    assert cache.clear("nobody") == ()
    assert {*pages["a"]} < {*cache.clear("a")}
    assert [found(cache, [1, 2, 3], namespace=space) for space in (None, "a", "b")] == [3, 0, 3]
    cache.check([])
    assert cache.clear() == pages[None]
    assert cache.reset() == pages["b"]
    assert cache.reset() == ()
    assert (cache.num_cached, cache.num_evictable, pool.num_free) == (0, 0, 31)
    cache.check([])
    assert put(cache, [1, 2], "a")


def test_a_namespace_in_use_is_not_cleared():
    _, cache = make()
    put(cache, [1, 2], "a")
    put(cache, [1, 2], "b")
    for tokens in ([1, 2, 3], [7, 8]):  # also a request that found nothing: it will insert what it computes
        hit = cache.match(tokens, namespace="a")
        message = "`namespace` 'a' cannot be cleared while requests use it. Got 1 locked hits. Unlock"
        refused(cache, PrefixLocked, message, lambda: cache.clear("a"))
        refused(cache, PrefixLocked, "a cache cannot be reset.*Got 1 locked hits. Unlock", cache.reset)
        cache.unlock(hit)
    assert len(cache.clear("a")) == 2
    assert len(cache.reset()) == 2


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

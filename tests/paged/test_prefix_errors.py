"""Wrong calls of the prefix cache, which change nothing, and inconsistent caches, which `check` sees."""

import numpy as np
import pytest

from jflex.paged import ForeignPage, OutOfPages, PagedCache, PagePool, PrefixCache
from tests.support.prefixes import make, refused


def used():
    """Pages 1, 2 and 3 cached and locked by `hit`, page 4 owned by its request, page 5 shared, the others free."""
    pool, cache = make(num_pages=10, page_size=2)
    hit = cache.insert(range(6), pool.alloc(3), cache.match(range(6)))
    pool.alloc(2)
    pool.share([5])
    return pool, cache, hit


def times(*given):
    """A cache whose clock gives these times, after three unlocks but the last."""
    left = list(given)
    _, cache = make(clock=lambda: left.pop(0))
    hits = [cache.match([1]) for _ in given]
    for hit in hits[:-1]:
        cache.unlock(hit)
    return cache, lambda: cache.unlock(hits[-1])


TOKENS = [0, 1, 2, 3, 4, 5, 9, 9]
WRONG = [
    ("halves", lambda p, c, h: c.match([0.5]), TypeError, r"`tokens` must hold integers. Got float64"),
    ("rows", lambda p, c, h: c.match([[1, 2]]), ValueError, r"`tokens` must be \[N\].*Got shape \(1, 2\)"),
    ("limit", lambda p, c, h: c.match([1], limit=-1), ValueError, r"`limit` must not be negative. Got -1"),
    ("unhashable", lambda p, c, h: c.match([1], namespace=["a"]), TypeError,
     r"`namespace` must be hashable, like the keys of a dict. Got list.*Take a string"),
    ("lock pages", lambda p, c, h: c.lock(h.pages), TypeError, r"`hit` must be a PrefixHit, from `match`.*Got tuple"),
    ("other tokens", lambda p, c, h: c.insert([0, 1, 2, 9, 4, 5], [1, 2, 3], h), ValueError,
     r"`tokens` must begin with those of `hit`, 3 pages. Got 6 tokens; 1 pages agree. Pass all tokens"),
    ("few pages", lambda p, c, h: c.insert(TOKENS, [1, 2, 3], h), ValueError,
     r"`pages` must hold the 4 pages that `tokens` fill. Got 3. Pass all pages"),
    ("pages without hit", lambda p, c, h: c.insert(TOKENS, [4, 1, 2, 3], h), ValueError,
     r"`pages` must begin with those of `hit`, \[1, 2, 3\]. Got \[4, 1, 2\]. Pass `hit.pages`"),
    ("reserved", lambda p, c, h: c.insert(TOKENS, [1, 2, 3, 0], h), ForeignPage, r"`pages` holds page 0.*reserved"),
    ("free", lambda p, c, h: c.insert(TOKENS, [1, 2, 3, 6], h), ForeignPage,
     r"`pages` holds page 6, which is free. Do not use a page after its release"),
    ("cached", lambda p, c, h: c.insert(TOKENS, [1, 2, 3, 2], h), ForeignPage,
     r"`pages` holds page 2, which is cached and not of `hit`. Pass the hit that the last `insert`"),
    ("shared", lambda p, c, h: c.insert(TOKENS, [1, 2, 3, 5], h), ValueError,
     r"`pages` must hold pages of one owner where `tokens` fill them. Page 5 has 2. Insert pages before"),
    ("twice", lambda p, c, h: c.insert([*TOKENS, 7, 7], [1, 2, 3, 4, 4], h), ValueError,
     r"`pages` must list each page once. Page 4 is there twice or more. Leave out"),
    ("negative alloc", lambda p, c, h: c.alloc(-1), ValueError, r"`n` must not be negative. Got -1"),
    ("large alloc", lambda p, c, h: c.alloc(5), OutOfPages, r"`n` is 5, but 4 pages are free and 0 evictable of 9"),
    ("time", lambda p, c, h: c.evict(1, used_before="now"), TypeError,
     r"`used_before` must be a time, a real number. Got 'now' \(str\)"),
    ("missing holder", lambda p, c, h: c.check([[4, 5]]), RuntimeError,
     r"page 5 has 2 owners in the pool, but `holders` lists it once. It leaked"),
    ("cached holder", lambda p, c, h: c.check([[4, 5, 5, 1]]), RuntimeError, r"page 1 has 1 owner.*lists it 2 times"),
]  # fmt: skip


@pytest.mark.parametrize(("provoke", "error", "message"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG])
def test_wrong_calls_change_nothing(provoke, error, message):
    pool, cache, hit = used()
    refused(cache, error, message, lambda: provoke(pool, cache, hit))


def test_pages_of_the_cache_are_not_inserted_by_a_request_that_does_not_hold_them():
    """Neither where they are, nor below other tokens, nor in another namespace: no page is counted twice."""
    _, cache, hit = used()
    for tokens, namespace in ((range(6), None), ([7, 7], None), (range(6), "other")):
        empty = cache.match([], namespace=namespace)
        message = "`pages` holds page 1, which is cached and not of `hit`"
        refused(cache, ForeignPage, message, lambda tokens=tokens, empty=empty: cache.insert(tokens, hit.pages, empty))


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ((1.0, 0.5), ValueError, r"`clock` must not go back. It gave 0.5 after 1.0. Pass `time.monotonic`"),
        ((1, float("nan")), ValueError, r"`clock\(\)` must be finite. Got nan"),
        ((np.inf,), ValueError, r"`clock\(\)` must be finite. Got inf"),
        ((None,), TypeError, r"`clock\(\)` must be a time, a real number. Got None \(NoneType\)"),
    ],
)
def test_wrong_clocks_change_nothing(given, error, message):
    cache, unlock = times(*given)
    refused(cache, error, message, unlock)
    assert cache.num_locks == 1


@pytest.mark.parametrize(
    ("pool", "clock", "message"),
    [
        (PagedCache, None, r"`pool` must be a PagePool. Got type"),
        (PagePool(4, 4), 0.5, r"`clock` must be a function without arguments, or None. Got float"),
    ],
)
def test_wrong_constructions(pool, clock, message):
    with pytest.raises(TypeError, match=message):
        PrefixCache(pool, clock=clock)


def tampered(change):
    pool, cache, hit = used()
    cache.check([[4, 5], [5]])
    change(pool, cache, hit)
    return cache


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p, c, h: p.release([2]), r"page 2 is cached, and must have 1 owner, the cache. It has 0. Do not share"),
        (lambda p, c, h: p.share([2]), r"page 2 is cached, and must have 1 owner, the cache. It has 2"),
        (lambda p, c, h: c._hits.clear(), r"inconsistent: a node has other locks than are held. Change it only"),
        (lambda p, c, h: setattr(c._tree, "num_evictable", 1), r"`num_evictable` is wrong"),
        (lambda p, c, h: c._cached.fill(False), r"other pages are marked as cached than are in the tree"),
        (lambda p, c, h: c._tree.split(c._tree.find("new", np.zeros((0, 2), int))), r"an empty namespace was kept"),
    ],
)  # fmt: skip
def test_what_is_inconsistent_is_seen(change, message):
    with pytest.raises(RuntimeError, match=message):
        tampered(change).check()

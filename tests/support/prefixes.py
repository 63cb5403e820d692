"""Prefix caches for tests: requests in one call, and all that a failed call could have changed."""

import pytest

from jflex.paged import PagePool, PrefixCache


def make(num_pages=32, page_size=1, **options):
    pool = PagePool(num_pages, page_size)
    return pool, PrefixCache(pool, **options)


def add(cache, tokens, namespace=None):
    """A request that computes `tokens`, whole pages, and caches them; its locked hit."""
    hit = cache.match(tokens, namespace=namespace)
    own = cache.alloc(len(tokens) // cache._pool.page_size - len(hit.pages))
    return cache.insert(tokens, [*hit.pages, *own], hit)


def put(cache, tokens, namespace=None):
    """A request that computes `tokens`, caches them and ends; their pages."""
    hit = add(cache, tokens, namespace)
    cache.unlock(hit)
    return hit.pages


def found(cache, tokens, **options):
    """How many tokens are cached, at most all; no lock stays."""
    hit = cache.match(tokens, **{"limit": len(tokens)} | options)
    cache.unlock(hit)
    return hit.num_tokens


def state(cache):
    """All that a failed call could have changed."""
    tree, pool = cache._tree, cache._pool
    nodes = [
        (id(node), id(node.parent), node.key, node.locks, node.last_used, tuple(node.pages), node.tokens.tobytes())
        for namespace in tree.roots
        for node in tree._nodes(namespace)
    ]
    lists = [id(node) for node in tree._lru], [*tree.roots], sorted(map(id, cache._hits)), cache._cached.tolist()
    counts = tree.num_pages, tree.num_evictable, cache._time, cache.stats
    return nodes, lists, counts, pool._free[: pool.num_free].tolist(), pool._owners.tolist()


def refused(cache, error, message, call):
    before = state(cache)
    with pytest.raises(error, match=message):
        call()
    assert state(cache) == before

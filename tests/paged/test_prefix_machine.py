"""Thousands of random calls of the prefix cache, against a dict of prefixes."""

import random

import numpy as np
import pytest

from jflex.paged import ForeignPage, OutOfPages, PrefixLocked, StaleHit
from tests.support.prefixes import make, refused
from tests.support.rows import tiers


class Request:
    """What a scheduler knows of a request: its tokens, its pages, those of its hit first, and its hit."""

    def __init__(self, namespace, tokens, hit):
        self.namespace, self.tokens, self.hit, self.pages = namespace, tokens, hit, [*hit.pages]

    def own(self):
        return self.pages[len(self.hit.pages) :]


class Machine:
    """Random calls, and after each the same in a dict: the page, the locks and the last use of each cached prefix."""

    def __init__(self, seed, page_size, num_pages=24):
        self.draw = random.Random(seed)
        self.pool, self.cache = make(num_pages, page_size)
        self.model, self.requests, self.ended, self.time = {}, [], [], 0
        self.calls = 3 * [self.begin, self.grow, self.insert] + 2 * [self.end]
        self.calls += [self.fork, self.evict, self.release, self.wrong, self.clear]

    def step(self):
        self.draw.choice(self.calls)()
        self.cache.check([request.own() for request in self.requests])
        locked = sum(locks > 0 for _, locks, _ in self.model.values())
        in_use = sum(len(request.own()) for request in self.requests)
        assert self.cache.num_cached == len(self.model)
        assert self.cache.num_evictable == len(self.model) - locked
        assert self.cache.num_locks == len(self.requests)
        assert self.pool.num_free + self.cache.num_cached + in_use == self.pool.num_pages - 1

    def prefixes(self, namespace, tokens):
        """The keys of the model for the whole pages of tokens."""
        size = self.pool.page_size
        return [(namespace, (*tokens[:end],)) for end in range(size, len(tokens) + 1, size)]

    def cached(self, namespace, tokens):
        """The longest prefix in the model."""
        keys = self.prefixes(namespace, tokens)
        return keys[: next((n for n, key in enumerate(keys) if key not in self.model), len(keys))]

    def add_locks(self, keys, count):
        for key in keys:
            page, locks, last_used = self.model[key]
            self.model[key] = page, locks + count, last_used if count > 0 else self.time

    def evicted(self, n, used_before=np.inf):
        """The pages that are evicted from the model: a leaf at a time, the least recently used one."""
        pages, size = [], self.pool.page_size
        while len(pages) < n:
            parents = {(namespace, tokens[:-size]) for namespace, tokens in self.model}
            leaves = {last: key for key, (_, locks, last) in self.model.items() if not locks and key not in parents}
            if not leaves or min(leaves) >= used_before:
                break
            pages.append(self.model.pop(leaves[min(leaves)])[0])
        return sorted(pages)

    def pick(self):
        return self.draw.choice(self.requests) if self.requests else None

    def tokens(self, most=14):
        return [int(self.draw.random() < 0.1) for _ in range(self.draw.randrange(most))]

    def begin(self):
        if len(self.requests) == 6:
            return
        namespace, tokens = self.draw.choice([None, "tenant"]), self.tokens()
        limit = self.draw.choice([None, None, len(tokens), self.draw.randrange(16)])
        most = max(0, len(tokens) - 1) if limit is None else limit
        keys = self.cached(namespace, tokens[:most])
        hit = self.cache.match(tokens, namespace=namespace, limit=limit)
        assert hit.pages == tuple(self.model[key][0] for key in keys)
        self.add_locks(keys, 1)
        self.requests.append(Request(namespace, tokens, hit))

    def grow(self):
        if request := self.pick():
            request.tokens += self.tokens(4)
            n = max(0, self.pool.pages_for(len(request.tokens)) - len(request.pages))
            if n > self.pool.num_free + self.cache.num_evictable:
                refused(self.cache, OutOfPages, f"`n` is {n}, but", lambda: self.cache.alloc(n))
                return
            evicted = self.evicted(n - self.pool.num_free)
            before = self.cache.stats.evicted_pages
            request.pages += self.cache.alloc(n)
            assert self.cache.stats.evicted_pages - before == len(evicted)

    def insert(self):
        if request := self.pick():
            most = min(len(request.tokens), len(request.pages) * self.pool.page_size)
            tokens = request.tokens[: self.draw.randint(request.hit.num_tokens, most)]
            keys = self.prefixes(request.namespace, tokens)
            for key, page in zip(keys, request.pages, strict=False):
                self.model.setdefault(key, (page, 0, 0))
            self.add_locks(keys[len(request.hit.pages) :], 1)
            self.ended.append(request.hit)
            request.hit = self.cache.insert(tokens, request.pages, request.hit)
            assert request.hit.pages == tuple(self.model[key][0] for key in keys)
            request.pages[: len(keys)] = request.hit.pages

    def fork(self):
        if (request := self.pick()) and len(self.requests) < 6:
            keys = self.cached(request.namespace, request.tokens[: request.hit.num_tokens])
            tokens = request.tokens[: request.hit.num_tokens]
            self.requests.append(Request(request.namespace, tokens, self.cache.lock(request.hit)))
            self.add_locks(keys, 1)

    def end(self):
        if request := self.pick():
            self.requests.remove(request)
            self.time += 1
            self.add_locks(self.cached(request.namespace, request.tokens[: request.hit.num_tokens]), -1)
            self.cache.unlock(request.hit)
            self.pool.release(request.own())
            self.ended.append(request.hit)

    def release(self):
        """Preemption: a request gives up some of its own pages, from its end."""
        if (request := self.pick()) and request.own():
            keep = self.draw.randrange(len(request.hit.pages), len(request.pages))
            self.pool.release(request.pages[keep:])
            del request.pages[keep:]

    def evict(self):
        n, before = self.draw.randrange(5), self.draw.choice([None, self.time - self.draw.randrange(9)])
        pages = self.cache.evict(n, used_before=before)
        assert sorted(pages) == self.evicted(n, np.inf if before is None else before)

    def clear(self):
        namespace = self.draw.choice([None, "tenant", "nobody"])
        if namespace in {request.namespace for request in self.requests}:
            return
        gone = [key for key in self.model if key[0] == namespace]
        assert sorted(self.cache.clear(namespace)) == sorted(self.model.pop(key)[0] for key in gone)

    def wrong(self):
        """Calls that must change nothing."""
        cache, refuse = self.cache, lambda *wrong: refused(self.cache, *wrong)
        if self.ended:
            stale = self.draw.choice(self.ended)
            call = self.draw.choice([cache.unlock, cache.lock, lambda hit: cache.insert([], [], hit)])
            refuse(StaleHit, "not locked", lambda: call(stale))
        if request := self.pick():
            refuse(PrefixLocked, "in use|use it", lambda: cache.clear(request.namespace))
            refuse(PrefixLocked, "use it", cache.reset)
            tokens = request.tokens[: request.hit.num_tokens]
            more = [*tokens, *[0] * self.pool.page_size]
            refuse(ValueError, "`pages` must hold", lambda: cache.insert(more, request.hit.pages, request.hit))
            for page in {page for page, _, _ in self.model.values()}:
                insert = lambda page=page: cache.insert(more, [*request.hit.pages, page], request.hit)
                refuse(ForeignPage, "is cached", insert)
            if tokens:
                tokens[-1] ^= 1
                refuse(ValueError, "`tokens` must begin", lambda: cache.insert(tokens, request.pages, request.hit))


@tiers(full={"calls": 10000})
@pytest.mark.parametrize(("calls", "page_size"), [(1_000, 1), (1_000, 3), (10_000, 2)])
def test_random_calls_against_a_dict_of_prefixes(calls, page_size):
    machine = Machine(calls, page_size)
    for _ in range(calls):
        machine.step()
    stats = machine.cache.stats
    assert min(stats.hits, stats.duplicate_pages, stats.evicted_pages) > calls // 200
    while machine.requests:
        machine.end()
    machine.cache.check([])
    assert machine.cache.num_locks == 0
    assert len(machine.cache.reset()) == len(machine.model)
    assert machine.pool.num_free == machine.pool.num_pages - 1

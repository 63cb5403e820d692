"""The pool of pages: owners are counted, nothing is lost, and a failed call changes nothing."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jflex.paged import DoubleFree, ForeignPage, OutOfPages, PagePool


def state(pool):
    return pool.num_free, [pool.owners(page) for page in range(1, pool.num_pages)], str(pool.__dict__)


def test_the_tail_of_a_request_is_used_again_before_its_head():
    pool = PagePool(12, 16)
    first, second = pool.alloc(4), pool.alloc(4)
    pool.release(first)
    pool.release(second)
    assert pool.alloc(11) == (8, 7, 6, 5, 4, 3, 2, 1, 9, 10, 11)


@pytest.mark.parametrize("page_size", [1, 16, 128, 256])
def test_pages_of_a_length(page_size):
    pool = PagePool(8, page_size)
    for length in (1, page_size - 1, page_size, page_size + 1, 3 * page_size):
        pages = pool.pages_for(length)
        assert (pages - 1) * page_size < length <= pages * page_size or length == pages == 0
    assert pool.pages_for(0) == 0


def test_tables():
    pool = PagePool(16, 4)
    a, b = pool.alloc(3), pool.alloc(1)
    table = pool.table([a, (), [a[0], *b]], max_pages=4)
    assert table.dtype == np.int32
    assert table.tolist() == [[1, 2, 3, 0], [0, 0, 0, 0], [1, 4, 0, 0]]
    assert pool.table([a, b]).shape == (2, 3)
    assert pool.table([]).shape == (0, 0)
    pool.check_table(table)
    pool.check_table(jnp.asarray(table), jnp.array([12, 0, 5]))
    pool.release(b)
    pool.check_table(table, np.array([12, 0, 4]))
    for lengths in (None, np.array([12, 0, 5])):
        with pytest.raises(ForeignPage, match=r"Entry 1 of request 2 is page 4, which is free. Do not use"):
            pool.check_table(table, lengths)


class Serving(RuleBasedStateMachine):
    """Requests that begin, grow, share, fork, roll back and end, against lists of pages and a plain count."""

    @initialize(num_pages=st.integers(1, 12), page_size=st.sampled_from([1, 3, 16, 256]))
    def begin(self, num_pages, page_size):
        self.pool = PagePool(num_pages, page_size)
        self.held = []

    def free(self):
        return self.pool.num_pages - 1 - len({page for pages in self.held for page in pages})

    def count(self, page):
        return sum(pages.count(page) for pages in self.held)

    def refused(self, error, call):
        before = state(self.pool)
        with pytest.raises(error):
            call()
        assert state(self.pool) == before

    def pick(self, data, entries=1):
        return data.draw(st.sampled_from([pages for pages in self.held if len(pages) >= entries]))

    @rule(length=st.integers(0, 40))
    def admit(self, length):
        n = self.pool.pages_for(length)
        if n > self.free():
            self.refused(OutOfPages, lambda: self.pool.alloc(n))
        else:
            pages = self.pool.alloc(n)
            assert len(set(pages)) == n
            assert not any(self.count(page) for page in pages)
            self.held.append(list(pages))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def append(self, data):
        pages = self.pick(data, 0)
        if self.free():
            pages += self.pool.alloc(1)
        else:
            self.refused(OutOfPages, lambda: self.pool.alloc(1))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def share_a_prefix(self, data):
        pages = self.pick(data, 0)
        prefix = pages[: data.draw(st.integers(0, len(pages)))]
        self.pool.share(prefix)
        self.held.append(list(prefix))

    @precondition(lambda self: any(self.held))
    @rule(data=st.data())
    def fork_the_tail(self, data):
        pages = self.pick(data)
        owners = self.count(pages[-1])
        if owners > 1 and not self.free():
            self.refused(OutOfPages, lambda: self.pool.fork(pages[-1]))
            return
        new = self.pool.fork(pages[-1])
        assert (new == pages[-1]) == (owners == 1)
        assert new == pages[-1] or not self.count(new)
        pages[-1] = new

    @precondition(lambda self: any(self.held))
    @rule(data=st.data())
    def roll_back(self, data):
        pages = self.pick(data)
        keep = data.draw(st.integers(0, len(pages) - 1))
        self.pool.release(pages[keep:])
        del pages[keep:]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def end(self, data):
        pages = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.release(pages)

    @rule(data=st.data())
    def release_too_often(self, data):
        if self.pool.num_pages > 1:
            page = data.draw(st.integers(1, self.pool.num_pages - 1))
            others = data.draw(st.sampled_from([[], *self.held]))
            self.refused(DoubleFree, lambda: self.pool.release([*others, *[page] * (self.count(page) + 1)]))

    @rule(page=st.sampled_from([0, -1, 12, 2**31]), data=st.data())
    def use_what_is_none(self, page, data):
        others = data.draw(st.sampled_from([[], *self.held]))
        for call in (self.pool.share, self.pool.release):
            self.refused(ForeignPage, lambda call=call: call([*others, page]))
        self.refused(ForeignPage, lambda: self.pool.fork(page))

    @rule(data=st.data())
    def use_what_is_free(self, data):
        free = [page for page in range(1, self.pool.num_pages) if not self.count(page)]
        if free:
            page = data.draw(st.sampled_from(free))
            others = data.draw(st.sampled_from([[], *self.held]))
            self.refused(ForeignPage, lambda: self.pool.share([*others, page]))
            self.refused(ForeignPage, lambda: self.pool.fork(page))
            self.refused(ForeignPage, lambda: self.pool.check_table([[page, 0]]))

    @invariant()
    def balanced(self):
        if hasattr(self, "pool"):
            self.pool.check(self.held)
            assert self.pool.num_free == self.free()
            self.pool.check_table(self.pool.table(self.held))


Serving.TestCase.settings = settings(max_examples=20, stateful_step_count=40)
TestServing = Serving.TestCase


def pool_of(owned, num_pages=8):
    pool = PagePool(num_pages, 16)
    pool.alloc(owned)
    return pool


def tampered():
    pool = pool_of(3)
    pool._owners[2] = 0
    return pool


WRONG = [
    ("no pages", lambda: PagePool(0, 16), ValueError, r"`num_pages` must be at least 1. Got 0"),
    ("too many", lambda: pool_of(5).alloc(3),
     OutOfPages, r"`n` is 3, but 2 pages are free of 7. Release pages, or make"),
    ("share free", lambda: pool_of(2).share([1, 3]), ForeignPage, r"`ids` holds page 3, which is free. Do not use"),
    ("free twice", lambda: pool_of(2).release([1, 2, 1]), DoubleFree,
     r"`ids` releases page 1 2 times, and it has 1 owner. Release a page once for each"),
    ("free beyond", lambda: pool_of(2).release([8]),
     ForeignPage, r"`ids` holds page 8, which is not within 1 and 7. Pass"),
    ("fork full", lambda: (p := pool_of(7)).share([1]) or p.fork(1), OutOfPages,
     r"`page` 1 has 2 owners, and none of 7 pages is free to.*Release pages"),
    ("table of free", lambda: pool_of(2).table([[1], [2, 3]]),
     ForeignPage, r"`requests\[1\]` holds page 3, which is free"),
    ("narrow", lambda: pool_of(3).table([[1], [2, 3]], max_pages=1), ValueError,
     r"`max_pages` is 1, too narrow a table: request 1 has 2 pages. Make the table wider"),
    ("foreign", lambda: pool_of(2).check_table([[1, 9]]), ForeignPage, r"Entry 1 of request 0 is page 9, which is not"),
    ("lengths", lambda: pool_of(2).check_table([[1, 2]], [17, 1]),
     ValueError, r"`kv_lengths` must be \[R\].*\(2,\) and"),
    ("long", lambda: pool_of(2).check_table([[1, 2]], [33]), ValueError,
     r"`page_table` is too narrow: its 2 entries of 16 tokens do not hold the 33 keys of request 0. Make"),
    ("tampered", lambda: tampered().check(),
     RuntimeError, r"PagePool\(.*num_free=4\) is inconsistent: 4 pages"),
    ("leak", lambda: pool_of(2).check([[1]]), RuntimeError,
     r"page 2 has 1 owner in the pool, but `holders` lists it 0 times. It leaked"),
]  # fmt: skip


@pytest.mark.parametrize(("provoke", "error", "message"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG])
def test_wrong_calls(provoke, error, message):
    with pytest.raises(error, match=message):
        provoke()

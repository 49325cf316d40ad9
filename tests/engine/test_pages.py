"""Pages: each one has the users that it should, whatever comes and goes."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duoka.engine.pages import PagePool


def test_a_common_beginning_is_shared() -> None:
    pool = PagePool(8, 4)
    one = list(range(10))
    pages, computed = pool.take(one, 12) or pytest.fail("there is room")
    assert (len(pages), computed) == (3, 0)
    pool.share(pages, one, len(one))
    others, computed = pool.take([*one[:8], 99, 98], 12) or pytest.fail("there is room")
    assert others[:2] == pages[:2]
    assert computed == 8
    assert others[2] not in pages
    assert pool.num_free == 4


def test_the_last_token_is_always_computed() -> None:
    pool = PagePool(8, 4)
    tokens = list(range(8))
    pages, _ = pool.take(tokens, 8) or pytest.fail("there is room")
    pool.share(pages, tokens, len(tokens))
    _, computed = pool.take(tokens, 8) or pytest.fail("there is room")
    assert computed == 4


def test_what_nobody_has_is_shared_until_its_place_is_needed() -> None:
    pool = PagePool(4, 2)
    tokens = [1, 2, 3, 4, 5]
    pages, _ = pool.take(tokens, 6) or pytest.fail("there is room")
    pool.share(pages, tokens, len(tokens))
    pool.give_back(pages)
    assert pool.num_free == 4
    again, computed = pool.take(tokens, 6) or pytest.fail("there is room")
    assert (again[:2], computed) == (pages[:2], 4)
    pool.give_back(again)
    other, computed = pool.take([9] * 8, 8) or pytest.fail("there is room")
    assert computed == 0
    pool.give_back(other)
    assert pool.take(tokens, 6) is not None
    assert pool.num_free == 1


def test_what_followed_a_page_that_is_gone_is_not_taken_for_what_follows_another() -> None:
    pool = PagePool(2, 1)
    pages, _ = pool.take([1, 2, 0], 2) or pytest.fail("there is room")
    pool.share(pages, [1, 2], 2)
    pool.give_back(pages[:1])  # the second page, with [1, 2] before its end, stays in use
    fresh, _ = pool.take([7], 1) or pytest.fail("there is room")
    assert fresh == pages[:1]
    pool.share(fresh, [7], 1)
    pool.give_back(fresh)
    _, computed = pool.take([7, 2], 1) or pytest.fail("there is room")
    assert computed == 1  # not two: what follows 7 here isn't what followed 1


def test_what_is_shared_bit_by_bit_is_shared_as_at_once() -> None:
    tokens = list(range(9))
    pools = PagePool(8, 2), PagePool(8, 2)
    taken = [pool.take(tokens, 9) or pytest.fail("there is room") for pool in pools]
    pools[0].share(taken[0][0], tokens, 9)
    for number in (1, 2, 3, 6, 6, 9):
        pools[1].share(taken[1][0], tokens, number)
    again = [pool.take(tokens, 9) for pool in pools]
    assert again[0] == again[1] == ([*taken[0][0][:4], 5], 8)


def test_a_page_is_not_known_by_what_it_held_before() -> None:
    pool = PagePool(4, 1)
    twins = [pool.take([1, 2, 0], 2) or pytest.fail("there is room") for _ in range(2)]
    for pages, _ in twins:
        pool.share(pages, [1, 2], 2)
    pool.give_back(twins[1][0])  # whose pages hold what others are shared for
    fresh, _ = pool.take([7, 2, 0], 2) or pytest.fail("there is room")
    assert fresh == twins[1][0][::-1]
    pool.share(fresh, [7, 2], 2)
    pool.give_back(fresh)
    assert pool.take([7, 2, 0], 2) == (fresh, 2)


def test_nothing_is_taken_where_there_is_not_enough() -> None:
    pool = PagePool(4, 2)
    first, _ = pool.take([1], 6) or pytest.fail("there is room")
    assert pool.take([2], 4) is None
    assert pool.num_free == 1
    pool.give_back(first)
    assert pool.take([2], 8) is not None


@given(seed=st.integers(0, 2**32))
def test_pages_are_never_lost_or_had_twice(seed: int) -> None:
    rng = random.Random(seed)
    pool = PagePool(12, 2)
    held: list[tuple[list[int], list[int]]] = []
    for _ in range(60):
        if held and rng.random() < 0.4:
            pages, _tokens = held.pop(rng.randrange(len(held)))
            pool.give_back(pages)
            continue
        tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 9))]
        taken = pool.take(tokens, len(tokens) + rng.randrange(4))
        if taken is None:
            continue
        pages, computed = taken
        assert computed < len(tokens)
        assert len(set(pages)) == len(pages)
        # Only pages that hold the same tokens may be in use by others.
        own = pages[computed // 2 :]
        assert not {page for other, _ in held for page in other} & set(own)
        pool.share(pages, tokens, len(tokens))
        held.append((pages, tokens))
        in_use = {page for other, _ in held for page in other}
        assert pool.num_free == 12 - len(in_use)

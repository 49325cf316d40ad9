"""Pages of a KV cache: which are free, whose they are, and which hold the same tokens.

A page has the keys and values of so many tokens of one sequence, in every layer. Numbers stand for
pages here; the tensors are elsewhere. Sequences that begin with the same tokens share the full
pages of these: a page is known by all tokens up to its end. One that nobody has any more stays as
it is, and can be shared again, until its place is needed; the one that was left longest ago goes
first.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence

Key = tuple[int, tuple[int, ...]]
"""What a full page holds: the content of the page before, by its number, and its own tokens."""
_NOTHING = 0


class PagePool:
    """Pages of a KV cache, by number.

    Parameters
    ----------
    num_pages : int
    page_tokens : int
        Tokens of a page.
    """

    def __init__(self, num_pages: int, page_tokens: int) -> None:
        self.num_pages = num_pages
        self.page_tokens = page_tokens
        self._empty: deque[int] = deque(range(num_pages))
        self._num_users = [0] * num_pages
        # Full pages that can be shared, by what they hold, and the reverse. Contents are numbered,
        # and no number comes again: what followed a page that is gone is never found by another's.
        self._contents: dict[Key, tuple[int, int]] = {}
        self._keys: dict[int, Key] = {}
        # Of full pages the number of what they hold, be it this page that is shared or another one.
        self._numbers: dict[int, int] = {}
        self._last_content = _NOTHING
        # Those of them that nobody has.
        self._unused: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Pages that a sequence can have."""
        return len(self._empty) + len(self._unused)

    def pages_for(self, num_tokens: int) -> int:
        """How many pages so many tokens take."""
        return -(-num_tokens // self.page_tokens)

    def take(
        self, tokens: Sequence[int], num_tokens: int, spare: int = 0
    ) -> tuple[list[int], int] | None:
        """Pages for a sequence that begins with `tokens` and will have `num_tokens`.

        Returns them with the number of tokens that they hold already; of these there is always one
        less than of the first ones, since the last one's output is what comes next. None, and
        nothing is taken, where there aren't enough, with `spare` others that stay free.
        """
        shared = list(self._shared(tokens[:-1]))
        needed = self.pages_for(num_tokens) - len(shared)
        if needed + spare > self.num_free - sum(page in self._unused for page in shared):
            return None
        for page in shared:
            self._num_users[page] += 1
            self._unused.pop(page, None)
        fresh = [self._fresh() for _ in range(needed)]
        return shared + fresh, len(shared) * self.page_tokens

    def more(self, number: int) -> list[int]:
        """More pages for a sequence; there must be so many."""
        return [self._fresh() for _ in range(number)]

    def give_back(self, pages: Iterable[int]) -> None:
        """A sequence has ended."""
        for page in reversed(list(pages)):  # the first ones are the likeliest to be shared again
            self._num_users[page] -= 1
            assert self._num_users[page] >= 0, "a page is given back once"
            if not self._num_users[page]:
                if page in self._keys:
                    self._unused[page] = None
                else:
                    self._empty.append(page)

    def share(self, pages: Sequence[int], tokens: Sequence[int], num_tokens: int) -> None:
        """Let others have the pages that the first of `tokens`, which have been computed, fill.

        Those that have been shared before are known, and not gone through again.
        """
        size, stop = self.page_tokens, num_tokens // self.page_tokens
        first = stop
        while first and pages[first - 1] not in self._numbers:
            first -= 1
        before = self._numbers[pages[first - 1]] if first else _NOTHING
        for at in range(first, stop):
            page, key = pages[at], (before, tuple(tokens[at * size : (at + 1) * size]))
            if key not in self._contents:
                self._last_content += 1
                self._contents[key] = page, self._last_content
                self._keys[page] = key
            _, before = self._contents[key]
            self._numbers[page] = before

    def _shared(self, tokens: Sequence[int]) -> Iterator[int]:
        before = _NOTHING
        for part in self._parts(tokens):
            if (before, part) not in self._contents:
                return
            page, before = self._contents[before, part]
            yield page

    def _parts(self, tokens: Sequence[int]) -> Iterator[tuple[int, ...]]:
        size = self.page_tokens
        for start in range(0, len(tokens) - size + 1, size):
            yield tuple(tokens[start : start + size])

    def _fresh(self) -> int:
        if self._empty:
            page = self._empty.popleft()
        else:
            page, _ = self._unused.popitem(last=False)
            del self._contents[self._keys.pop(page)]
        self._numbers.pop(page, None)
        self._num_users[page] = 1
        return page

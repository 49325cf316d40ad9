"""Pages of a KV cache: allocation, reference counts, and sharing of common prefixes.

A page has the keys and values of `page_tokens` tokens of one sequence, in every layer. Here pages
are numbers; the tensors are elsewhere. Sequences that begin with the same tokens share their full
pages: a page is identified by all tokens up to its end. Unused pages keep their content and can be
shared again, until they are needed for other tokens, the least recently used page first.

A page's content is a number that stands for all tokens up to its end. With pages of 2 tokens:

    tokens 5 6 │ 7 8 │ 9      contents: (nothing, 5 6) → 1, (1, 7 8) → 2
    tokens 5 6 │ 7 1          shares the page of content 1; (1, 7 1) → 3
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence

Key = tuple[int, tuple[int, ...]]
"""The identity of a full page: the content of the previous page, and its own tokens."""
_NOTHING = 0


class PagePool:
    """Allocates the pages of a KV cache, by number.

    Parameters
    ----------
    num_pages : int
    page_tokens : int
        Tokens per page.
    """

    def __init__(self, num_pages: int, page_tokens: int) -> None:
        self.num_pages = num_pages
        self.page_tokens = page_tokens
        self._empty: deque[int] = deque(range(num_pages))
        self._num_users = [0] * num_pages
        # Full pages that can be shared, by identity, and the reverse. Numbers of contents are not
        # reused: pages behind a page that is gone are never found through another page.
        self._contents: dict[Key, tuple[int, int]] = {}
        self._keys: dict[int, Key] = {}
        # The contents of full pages; a twin of a page has the same content and isn't shared.
        # Two sequences that compute tokens 5 6 at the same time fill two pages of content 1: the
        # first one is found by others; its twin has no key, and ends as an empty page.
        self._numbers: dict[int, int] = {}
        self._last_content = _NOTHING
        # Pages that can be shared and have no users.
        self._unused: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """The number of free pages."""
        return len(self._empty) + len(self._unused)

    def pages_for(self, num_tokens: int) -> int:
        """Return the number of pages for so many tokens."""
        return -(-num_tokens // self.page_tokens)

    def take(
        self, tokens: Sequence[int], num_tokens: int, spare: int = 0
    ) -> tuple[list[int], int] | None:
        """Allocate pages for a sequence that begins with `tokens` and will have `num_tokens`.

        Return the pages, and the number of tokens that they hold already. The last token is never
        among them: its output gives the next token. Return None, and allocate nothing, where not
        enough pages are free beside `spare` others.
        """
        # Unused pages count as free; those among the shared ones stop being free now.
        shared = list(self._shared(tokens[:-1]))
        needed = self.pages_for(num_tokens) - len(shared)
        if needed + spare > self.num_free - sum(page in self._unused for page in shared):
            return None
        for page in shared:
            self._num_users[page] += 1
            self._unused.pop(page, None)
        fresh = [self._fresh() for _ in range(needed)]
        return shared + fresh, len(shared) * self.page_tokens

    def allocate(self, number: int) -> list[int]:
        """Allocate more pages for a sequence; they must be free."""
        return [self._fresh() for _ in range(number)]

    def give_back(self, pages: Iterable[int]) -> None:
        """Release the pages of an ended sequence."""
        for page in reversed(
            list(pages)
        ):  # a prefix is the likeliest to be shared again: it goes last
            self._num_users[page] -= 1
            assert self._num_users[page] >= 0, "a page is given back once"
            if not self._num_users[page]:
                if page in self._keys:
                    self._unused[page] = None
                else:
                    self._empty.append(page)

    def share(self, pages: Sequence[int], tokens: Sequence[int], num_tokens: int) -> None:
        """Let other sequences share the pages that the computed `num_tokens` of `tokens` fill.

        Pages that were shared before are skipped.
        """
        size, stop = self.page_tokens, num_tokens // self.page_tokens
        # The content of a page follows from that of the page before it: begin behind the last page
        # that has a number already. So a call takes as long as there are new full pages.
        start = stop
        while start and pages[start - 1] not in self._numbers:
            start -= 1
        content = self._numbers[pages[start - 1]] if start else _NOTHING
        for at in range(start, stop):
            page, key = pages[at], (content, tuple(tokens[at * size : (at + 1) * size]))
            if key not in self._contents:
                self._last_content += 1
                self._contents[key] = page, self._last_content
                self._keys[page] = key
            _, content = self._contents[key]
            self._numbers[page] = content

    def _shared(self, tokens: Sequence[int]) -> Iterator[int]:
        """Yield the shared pages of the beginning of `tokens`."""
        content, size = _NOTHING, self.page_tokens
        for start in range(0, len(tokens) - size + 1, size):
            key = content, tuple(tokens[start : start + size])
            if key not in self._contents:
                return
            page, content = self._contents[key]
            yield page

    def _fresh(self) -> int:
        if self._empty:
            page = self._empty.popleft()
        else:
            # When the page of content 1 is evicted, (1, 7 8) → 2 stays in `_contents` until its
            # page is needed, but is found no more: tokens 5 6 get a new number when they are
            # computed again.
            page, _ = self._unused.popitem(last=False)
            del self._contents[self._keys.pop(page)]
        self._numbers.pop(page, None)
        self._num_users[page] = 1
        return page

"""Pages of a KV cache: allocation, reference counts, and sharing of common prefixes.

A page holds the keys and values of `page_tokens` tokens of one sequence, in every layer. This
module handles page numbers; `runtime` owns the tensors. Sequences that begin with the same tokens
share their full pages (prefix caching). Unused pages keep their content and can be shared again
until they are evicted for other tokens, the least recently used page first.

A full page is identified by all tokens up to its end. Each such prefix gets a number, the page's
*content*. The keys and values of equal tokens differ between adapters (`Chunk`): the content before
the first page is 0 minus the number of the sequence's adapter. With pages of 2 tokens:

    tokens 5 6 │ 7 8 │ 9      contents: (0, 5 6) → 1, (1, 7 8) → 2
    tokens 5 6 │ 7 1          shares the page of content 1; (1, 7 1) → 3
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence

Key = tuple[int, tuple[int, ...]]
"""The identity of a full page: the content number of the previous page, and the page's tokens."""


class PagePool:
    """Allocates and shares the pages of a KV cache, by number.

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
        # `_contents`: key of a shareable full page → (page, content); `_keys`: page → key. Content
        # numbers are not reused, so after a page is evicted, the pages that follow it are never
        # found through another page.
        self._contents: dict[Key, tuple[int, int]] = {}
        self._keys: dict[int, Key] = {}
        # The content of each full page. Two sequences that compute tokens 5 6 at the same time fill
        # two pages with content 1. Only the first one is shareable; the second one has no key, and
        # becomes an empty page when its sequence ends.
        self._numbers: dict[int, int] = {}
        self._last_content = 0
        # Shareable pages without users, the least recently used first.
        self._unused: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """The number of pages without users, empty or shareable."""
        return len(self._empty) + len(self._unused)

    def pages_for(self, num_tokens: int) -> int:
        """Return the number of pages for `num_tokens` tokens."""
        return -(-num_tokens // self.page_tokens)

    def take(
        self, tokens: Sequence[int], num_tokens: int, spare: int = 0, adapter: int = 0
    ) -> tuple[list[int], int] | None:
        """Allocate pages for the first `num_tokens` tokens of a sequence that begins with `tokens`.

        Return the pages (its block table), and the number of tokens whose keys and values they
        already hold. The last of `tokens` is never among those: it has to be computed to get the
        next token. Return None, and allocate nothing, unless `spare` further pages remain free.
        """
        # Unused pages count as free; those among the shared ones stop being free now.
        shared = list(self._find_shared(tokens[:-1], adapter))
        needed = self.pages_for(num_tokens) - len(shared)
        if needed + spare > self.num_free - sum(page in self._unused for page in shared):
            return None
        for page in shared:
            self._num_users[page] += 1
            self._unused.pop(page, None)
        new_pages = [self._allocate_page() for _ in range(needed)]
        return shared + new_pages, len(shared) * self.page_tokens

    def allocate(self, number: int) -> list[int]:
        """Allocate `number` pages for a sequence; so many must be free."""
        return [self._allocate_page() for _ in range(number)]

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

    def share(
        self, pages: Sequence[int], tokens: Sequence[int], num_tokens: int, adapter: int = 0
    ) -> None:
        """Make full pages shareable, after the first `num_tokens` of `tokens` were computed.

        `pages` is the block table of the sequence. Pages that are shareable already are skipped.
        """
        size, stop = self.page_tokens, num_tokens // self.page_tokens
        # A page's content depends on the page before it, so begin behind the last page that has a
        # content number. The cost of a call is linear in the number of new full pages.
        start = stop
        while start and pages[start - 1] not in self._numbers:
            start -= 1
        content = self._numbers[pages[start - 1]] if start else -adapter
        for index in range(start, stop):
            page, key = pages[index], (content, tuple(tokens[index * size : (index + 1) * size]))
            if key not in self._contents:
                self._last_content += 1
                self._contents[key] = page, self._last_content
                self._keys[page] = key
            _, content = self._contents[key]
            self._numbers[page] = content

    def _find_shared(self, tokens: Sequence[int], adapter: int) -> Iterator[int]:
        """Yield the shareable pages of the longest prefix of `tokens`, in order."""
        content, size = -adapter, self.page_tokens
        for start in range(0, len(tokens) - size + 1, size):
            key = content, tuple(tokens[start : start + size])
            if key not in self._contents:
                return
            page, content = self._contents[key]
            yield page

    def _allocate_page(self) -> int:
        """Allocate a page: an empty page or else the least recently used shareable page."""
        if self._empty:
            page = self._empty.popleft()
        else:
            # After the page with content 1 is evicted, the key (1, 7 8) stays in `_contents` until
            # its page is evicted, too, but is not found: recomputed tokens 5 6 get a new content.
            page, _ = self._unused.popitem(last=False)
            del self._contents[self._keys.pop(page)]
        self._numbers.pop(page, None)
        self._num_users[page] = 1
        return page

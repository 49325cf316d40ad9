"""Read fixed texts and JSON values character by character.

Readers are generators. Each receives characters through `CharacterReader.take`, wherever the text
was cut on its way, and raises `NoCall` at the first character that can't follow. Every value is
checked here and parsed by `duoka.base.serialization` once it is complete.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import NoReturn

MOST_CALL_CHARACTERS = 1 << 20
_SPACE = " \t\n\r"
_DEEPEST = 64
_MOST_DIGITS = 400
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_WORDS = {"t": "true", "f": "false", "n": "null"}

Script = Generator[None, str, None]
"""Receives characters; "" is the end of the answer."""
Characters = Generator[None, str, str]


class NoCall(Exception):
    """The text is not a call, or no longer one."""


class CharacterReader:
    """The characters of an answer, some of which are read again."""

    def __init__(self) -> None:
        self.has_ended = False
        # Characters since the last part of the answer, and those to be taken again, last one first.
        # `give_back` moves characters from the first list to the second:
        #     taken "<to", give_back("to")  →  taken "<", again ["o", "t"]
        self._taken: list[str] = []
        self._again: list[str] = []
        self._size = 0
        self._keep: Callable[[str], object] = str

    def take(self) -> Characters:
        """Take the next character; after the end always ""."""
        char = self._again.pop() if self._again else "" if self.has_ended else (yield)
        if char:
            self._taken.append(char)
            self._size += 1
        if self._size > MOST_CALL_CHARACTERS:
            self.stop(char)
        return char

    def stop(self, unread: str = "") -> NoReturn:
        """Raise NoCall; the characters taken last may begin something else, and are taken again."""
        self.give_back(unread)
        raise NoCall

    def give_back(self, unread: str) -> None:
        """Let the characters taken last be taken again."""
        for char in reversed(unread):
            self._taken.pop()
            self._again.append(char)
            self._size -= 1

    def take_again(self, text: str) -> None:
        """Let a text be taken again, though it is part of the answer already."""
        self._again.extend(reversed(text))

    def after_space(self) -> Characters:
        """Take white space and the next character."""
        while (char := (yield from self.take())) and char in _SPACE:
            pass
        return char

    def expect(self, *texts: str) -> Characters:
        """Take white space and a text of some; no text may be the beginning of another."""
        text = yield from self.after_space()
        while text not in texts:
            char = ""
            if any(expected.startswith(text) for expected in texts):
                char = yield from self.take()
            if not char:
                self.stop(text)
            text += char
        return text

    def until(self, mark: str) -> Characters:
        """Take a text and the mark that ends it; return the text without the mark."""
        chars: list[str] = []
        tail = ""
        while tail != mark:
            char = yield from self.take()
            if not char:
                self.stop()
            chars.append(char)
            tail = (tail + char)[-len(mark) :]
        return "".join(chars)[: -len(mark)]

    # ── JSON ──
    #
    # A recursive descent whose frames are suspended generators: one level of "yield from" for each
    # open object or list, 64 at most. A value ends with its last character, so nothing waits for
    # the next one; only a number ends before it, and returns the character that ended it.

    def json_value(self, char: str, receive: Callable[[str], object] | None = None) -> Characters:
        """Take a JSON value from its first character on; `receive` gets each character."""
        chars: list[str] = []
        self._keep = receive or chars.append
        self.give_back((yield from self._value(char, 0)))
        return "".join(chars)

    def _value(self, char: str, depth: int) -> Characters:
        """Take a value; return the character after a number, otherwise ""."""
        if char == '"':
            yield from self._string(char)
        elif char and char in "{[" and depth < _DEEPEST:
            yield from self._container(char, depth + 1)
        elif char in _WORDS:
            self._keep(char)
            for letter in _WORDS[char][1:]:
                self._keep_only(letter, (yield from self.take()))
        elif char and char in "-0123456789":
            return (yield from self._number(char))
        else:
            self.stop(char)
        return ""

    def _container(self, begin: str, depth: int) -> Script:
        end = "}" if begin == "{" else "]"
        self._keep(begin)
        char = yield from self._solid("")
        is_open = char != end
        while is_open:
            if end == "}":
                yield from self._string(char)
                self._keep_only(":", (yield from self._solid("")))
                char = yield from self._solid("")
            char = yield from self._value(char, depth)
            char = yield from self._solid(char)
            is_open = char != end
            if is_open:
                self._keep_only(",", char)
                char = yield from self._solid("")
        self._keep(end)

    def _string(self, char: str) -> Script:
        self._keep_only('"', char)
        char = ""
        while char != '"':
            char = yield from self.take()
            if char < " ":
                self.stop(char)
            self._keep(char)
            if char == "\\":
                escape = yield from self.take()
                self._keep_only('"\\/bfnrtu', escape)
                for _ in range(4 if escape == "u" else 0):
                    self._keep_only("0123456789abcdefABCDEF", (yield from self.take()))

    def _number(self, char: str) -> Characters:
        number = ""
        while char and char in "0123456789+-.eE" and len(number) < _MOST_DIGITS:
            number += char
            self._keep(char)
            char = yield from self.take()
        if not _NUMBER.fullmatch(number) or (char and char in "0123456789+-.eE"):
            self.stop(char)
        return char

    def _solid(self, char: str) -> Characters:
        """Take white space, from a given character on, up to the first other character."""
        char = char or (yield from self.take())
        while char and char in _SPACE:
            self._keep(char)
            char = yield from self.take()
        return char

    def _keep_only(self, allowed: str, char: str) -> None:
        if not char or char not in allowed:
            self.stop(char)
        self._keep(char)

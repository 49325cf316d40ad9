"""Parse fixed texts and JSON values character by character.

Parsers are generators, so a text may arrive in chunks that are cut anywhere. They receive
characters through `CharacterReader.take`, and raise `NoCall` at the first invalid character. Values
are checked for validity here, and decoded by `duoka.base.serialization` once they are complete.
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
"""A parser: a generator that is sent characters; "" is the end of the answer."""
# A parser that returns text.
Characters = Generator[None, str, str]


class NoCall(Exception):
    """The text is not a call, or not a valid call from here on."""


class CharacterReader:
    """Passes the characters of an answer to parsers, which can give characters back."""

    def __init__(self) -> None:
        self.has_ended = False
        # `_taken`: characters since the last added part of the answer. `_again`: characters to take
        # again, in reverse order. `give_back` moves characters from the first list to the second:
        #     taken "<to", give_back("to")  →  taken "<", again ["o", "t"]
        self._taken: list[str] = []
        self._again: list[str] = []
        self._size = 0
        self._keep: Callable[[str], object] = str

    def take(self) -> Characters:
        """Take and return the next character; after the end of the answer always ""."""
        char = self._again.pop() if self._again else "" if self.has_ended else (yield)
        if char:
            self._taken.append(char)
            self._size += 1
        if self._size > MOST_CALL_CHARACTERS:
            self.stop(char)
        return char

    def stop(self, unread: str = "") -> NoReturn:
        """Give back the last characters taken, which may begin other text, and raise NoCall."""
        self.give_back(unread)
        raise NoCall

    def give_back(self, unread: str) -> None:
        """Give back the last characters taken, to be taken again."""
        for char in reversed(unread):
            self._taken.pop()
            self._again.append(char)
            self._size -= 1

    def take_again(self, text: str) -> None:
        """Let a text be taken again, although used in a part of the answer already."""
        self._again.extend(reversed(text))

    def after_space(self) -> Characters:
        """Skip white space; return the next character, or "" at the end."""
        while (char := (yield from self.take())) and char in _SPACE:
            pass
        return char

    def expect(self, *texts: str) -> Characters:
        """Skip white space, and take and return any of the given texts; NoCall for other text.

        None of the texts may be the beginning of another one.
        """
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
        """Take text up to a mark, and the mark; return the text without the mark."""
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
    # A recursive descent parser of suspended generators: one level of "yield from" for each open
    # object or list, 64 at most. A value is complete with its last character. Only a number ends
    # at the character after it, which `_value` returns; for other values it returns "".

    def json_value(self, char: str, receive: Callable[[str], object] | None = None) -> Characters:
        """Take a JSON value, whose first character is `char`; NoCall for invalid JSON.

        Returns the value's text or, with `receive`, passes each character to it and returns "".
        """
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
        """Take an object or a list after its opening bracket."""
        end = "}" if begin == "{" else "]"
        self._keep(begin)
        char = yield from self._after_inner_space("")
        is_open = char != end
        while is_open:
            if end == "}":
                yield from self._string(char)
                self._keep_only(":", (yield from self._after_inner_space("")))
                char = yield from self._after_inner_space("")
            char = yield from self._value(char, depth)
            char = yield from self._after_inner_space(char)
            is_open = char != end
            if is_open:
                self._keep_only(",", char)
                char = yield from self._after_inner_space("")
        self._keep(end)

    def _string(self, char: str) -> Script:
        """Take a string, whose first character must be a quote."""
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
        """Take a number; return the next character."""
        number = ""
        while char and char in "0123456789+-.eE" and len(number) < _MOST_DIGITS:
            number += char
            self._keep(char)
            char = yield from self.take()
        if not _NUMBER.fullmatch(number) or (char and char in "0123456789+-.eE"):
            self.stop(char)
        return char

    def _after_inner_space(self, char: str) -> Characters:
        """Skip white space within a value, from `char` on; return the first other character."""
        char = char or (yield from self.take())
        while char and char in _SPACE:
            self._keep(char)
            char = yield from self.take()
        return char

    def _keep_only(self, allowed: str, char: str) -> None:
        """Keep an allowed character of the value; raise NoCall for any other character."""
        if not char or char not in allowed:
            self.stop(char)
        self._keep(char)

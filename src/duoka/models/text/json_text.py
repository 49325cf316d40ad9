"""JSON that comes character by character: whether it can still become whole, and when it is.

It is checked, not read; `duoka.base.serialization` reads what is whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable

_SPACE = " \t\n\r"
_DEEPEST = 64
_MOST_DIGITS = 400
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_WORDS = {"t": "true", "f": "false", "n": "null"}


class JsonText:
    """One JSON value, of which the characters so far are known.

    A step takes the same time however long and deep the value is.
    """

    def __init__(self) -> None:
        self.is_whole = False
        self._ends: list[str] = []  # of the objects and lists that are open
        self._state: Callable[[str], bool] = self._value
        self._is_key = False
        self._rest = ""  # of a word, or the hexadecimal digits of an escape
        self._number = ""

    def add(self, char: str) -> bool:
        """Take the next character; False, and nothing is taken, if it can't come here.

        That it can't is also how a number ends that stands alone: the value is whole then.
        """
        return self._state(char)

    def _value(self, char: str) -> bool:
        if char in _SPACE:
            return True
        if char in "{[":
            self._ends.append("}" if char == "{" else "]")
            self._state = self._first_key if char == "{" else self._first_item
            return len(self._ends) <= _DEEPEST
        if char == '"':
            self._is_key, self._state = False, self._string
        elif char in _WORDS:
            self._rest, self._state = _WORDS[char][1:], self._word
        elif char in "-0123456789":
            self._number, self._state = char, self._digits
        else:
            return False
        return True

    def _first_item(self, char: str) -> bool:
        return self._close() if char == "]" else self._value(char)

    def _first_key(self, char: str) -> bool:
        return self._close() if char == "}" else self._key(char)

    def _key(self, char: str) -> bool:
        if char == '"':
            self._is_key, self._state = True, self._string
        return char == '"' or char in _SPACE

    def _colon(self, char: str) -> bool:
        if char == ":":
            self._state = self._value
        return char == ":" or char in _SPACE

    def _after_value(self, char: str) -> bool:
        if char == self._ends[-1]:
            return self._close()
        if char == ",":
            self._state = self._key if self._ends[-1] == "}" else self._value
        return char == "," or char in _SPACE

    def _string(self, char: str) -> bool:
        if char == "\\":
            self._state = self._escape
        elif char == '"' and self._is_key:
            self._state = self._colon
        elif char == '"':
            self._end_value()
        return char >= " "

    def _escape(self, char: str) -> bool:
        if char == "u":
            self._rest, self._state = "xxxx", self._hexadecimal
        else:
            self._state = self._string
        return char in '"\\/bfnrtu'

    def _hexadecimal(self, char: str) -> bool:
        self._rest = self._rest[1:]
        if not self._rest:
            self._state = self._string
        return char in "0123456789abcdefABCDEF"

    def _word(self, char: str) -> bool:
        if char != self._rest[0]:
            return False
        self._rest = self._rest[1:]
        if not self._rest:
            self._end_value()
        return True

    def _digits(self, char: str) -> bool:
        if char in "0123456789+-.eE":
            self._number += char
            return len(self._number) <= _MOST_DIGITS
        if not _NUMBER.fullmatch(self._number):
            return False
        self._end_value()
        return self._state(char)

    def _close(self) -> bool:
        self._ends.pop()
        self._end_value()
        return True

    def _end_value(self) -> None:
        self.is_whole = not self._ends
        self._state = self._after_value if self._ends else self._nothing

    def _nothing(self, char: str) -> bool:
        return False

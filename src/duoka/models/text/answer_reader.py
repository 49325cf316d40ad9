"""An answer's text, as it comes → its parts.

A reader is a script that takes one character at a time, so that it doesn't matter into which
pieces a text was cut. What may be the beginning of a marker waits until it is clear; what looked
like a call and is none is said. No text is read again, so an answer takes time by its length.
What a call looks like is no business of this module's, but of `call_forms`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping
from typing import Any, NamedTuple, NoReturn, Protocol

from duoka.base.serialization import parse_json_object
from duoka.errors import FormatError

from .answer_parts import CallArguments, CallEnd, CallStart, Content, Part, ReasoningPart
from .json_text import JsonText

MOST_CALL_CHARACTERS = 1 << 20
MOST_CALLS = 128
_SPACE = " \t\n\r"

Script = Generator[None, str, None]
"""Takes characters; "" is the end of the answer."""
Characters = Generator[None, str, str]


class Tags(NamedTuple):
    """What a model writes around its reasoning."""

    begin: str
    end: str


class NoCall(Exception):
    """What has been read isn't a call, or no more of one."""


class CallForm(Protocol):
    """How a family writes calls of tools."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that begin calls wherever they stand."""

    @property
    def inner_marks(self) -> tuple[str, ...]:
        """Other texts that calls are told by, as far as they can be special tokens."""

    @property
    def turn(self) -> str:
        """A text that begins another message of the same answer; empty for none."""

    @property
    def is_at_start(self) -> bool:
        """Whether a message can be a call from its first character on."""

    def read(self, calls: CallReader, marker: str) -> Script:
        """Read calls after a marker, or from the start of a message if that is empty.

        NoCall ends it wherever the text isn't one; what hasn't been told of is content then.
        """


class CallReader:
    """The characters of calls, and what is told of them."""

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        self.schemas = schemas
        self.parts: list[Part] = []
        self.num_calls = 0
        self.num_whole_calls = 0
        self.has_ended = False
        self.is_open = False
        self._arguments: list[str] = []
        # Characters that have been taken and told of by no part, and those that are to be taken
        # again.
        self._taken: list[str] = []
        self._again: list[str] = []
        self._size = 0

    # ── for forms ──

    def take(self) -> Characters:
        """Take the next character; at the end there is "" again and again."""
        char = self._again.pop() if self._again else "" if self.has_ended else (yield)
        if char:
            self._taken.append(char)
            self._size += 1
        if self._size > MOST_CALL_CHARACTERS:
            self.stop(char)
        return char

    def stop(self, unread: str = "") -> NoReturn:
        """End what is no call; the characters taken last may be the beginning of something."""
        for char in reversed(unread):
            self._taken.pop()
            self._again.append(char)
        raise NoCall

    def after_space(self) -> Characters:
        """Take the next character that is no white space."""
        while (char := (yield from self.take())) and char in _SPACE:
            pass
        return char

    def give_back(self, char: str) -> None:
        """Let a character be taken again."""
        if char:
            self._taken.pop()
            self._again.append(char)
            self._size -= 1

    def take_again(self, text: str) -> None:
        """Let a text be taken again that has been told of."""
        self._again.extend(reversed(text))

    def expect(self, text: str) -> Characters:
        """Take a text after white space, which then is the one that comes."""
        char = yield from self.after_space()
        for place, wanted in enumerate(text):
            if place:
                char = yield from self.take()
            if char != wanted:
                self.stop(text[:place] + char)
        return text

    def until(self, mark: str) -> Characters:
        """Take a text and the mark that ends it, which it is returned without."""
        chars: list[str] = []
        tail = ""
        while tail != mark:
            char = yield from self.take()
            if not char:
                self.stop()
            chars.append(char)
            tail = (tail + char)[-len(mark) :]
        return "".join(chars)[: -len(mark)]

    def json_value(self, first: str, tell: Callable[[str], None] | None = None) -> Characters:
        """Take a JSON value of which the first character has been taken; `tell` of each."""
        value = JsonText()
        chars: list[str] = []
        char = first
        while True:
            is_taken = bool(char) and value.add(char)
            if not is_taken and not value.is_whole:
                self.stop(char)
            if not is_taken:  # a number ends before what follows it
                self.give_back(char)
                return "".join(chars)
            chars.append(char)
            if tell is not None:
                tell(char)
            if value.is_whole:
                return "".join(chars)
            char = yield from self.take()

    def start(self, name: str) -> None:
        """Tell that a tool is called; NoCall if there is none of that name."""
        if name not in self.schemas or self.num_calls == MOST_CALLS:
            self.stop()
        self.is_open, self._arguments = True, []
        self._tell(CallStart(self.num_calls, name))
        self.num_calls += 1

    def tell_arguments(self, text: str) -> None:
        """Tell more of the arguments."""
        self._arguments.append(text)
        self._tell(CallArguments(self.num_calls - 1, text))

    def end(self) -> None:
        """Tell that the arguments are complete; NoCall if they are no JSON object all the same."""
        try:
            parse_json_object("".join(self._arguments), "the call")
        except FormatError:
            self.stop()
        self._tell(CallEnd(self.num_calls - 1, is_whole=True))
        self.is_open, self._size = False, 0
        self.num_whole_calls += 1

    def _tell(self, part: Part) -> None:
        self.parts.append(part)
        self._taken.clear()

    # ── for the answer's reader ──

    def attempt(self, script: Script, marker: str) -> Characters:
        """Follow a script; return what is content in the end."""
        self._taken, self._size = [marker], 0
        try:
            yield from script
        except NoCall:
            text = "".join(self._taken)
        else:
            return ""
        if self.is_open:
            self.parts.append(CallEnd(self.num_calls - 1, is_whole=False))
        self.is_open = False
        return text

    @property
    def has_again(self) -> bool:
        """Whether there are characters that are to be taken again."""
        return bool(self._again)

    def drop(self) -> None:
        """Let nothing be taken again."""
        self._again.clear()

    def forget(self) -> None:
        """Let what has been taken be told of."""
        self._taken.clear()
        self._size = 0


class AnswerReader:
    """Reads one answer; see `AnswerFormat.reader`."""

    def __init__(
        self,
        form: CallForm | None,
        schemas: Mapping[str, Mapping[str, Any]],
        reasoning: Tags | None,
        *,
        is_reasoning: bool,
        is_forced: bool = False,
    ) -> None:
        self._form = form if schemas else None
        self._turn = form.turn if form else ""
        self._reasoning = reasoning
        self._is_reasoning = is_reasoning
        self._is_forced, self._is_cut = is_forced, False
        self._calls = CallReader(schemas)
        self._parts = self._calls.parts
        self._space: list[str] = []
        self._has_said = False
        self._plain = _first_of(())
        self._say_plain: Callable[[str], None] | None = None
        self._script = self._read()
        next(self._script)

    @property
    def num_calls(self) -> int:
        """How many calls are whole."""
        return self._calls.num_whole_calls

    def feed(self, text: str) -> list[Part]:
        """Take more of the answer's text; return what it certainly says."""
        at = 0
        while at < len(text):
            # Where no marker can have begun, what comes before the next one is said at once.
            if self._say_plain is not None:
                match = self._plain.search(text, at)
                stop = match.start() if match else len(text)
                self._say_plain(text[at:stop])
                at = stop
            if at < len(text):
                self._script.send(text[at])
                at += 1
        return self._new_parts()

    def finish(self, *, is_cut: bool = False) -> list[Part]:
        """Return what had to wait; of a call that a limit has cut nothing is content."""
        self._is_cut = is_cut
        if not self._calls.has_ended:
            self._calls.has_ended = True
            try:
                self._script.send("")
            except StopIteration:
                pass
            else:
                raise AssertionError("a script ends when the answer does")
        return self._new_parts()

    def _new_parts(self) -> list[Part]:
        parts = joined(self._parts)
        self._parts.clear()
        return parts

    def _read(self) -> Script:
        """The script of an answer: perhaps reasoning; messages and calls."""
        if self._is_reasoning:
            yield from self._reason()
        is_start = True
        while True:
            if is_start and self._form is not None and self._form.is_at_start:
                yield from self._attempt("")
            is_start = False
            marker = yield from self._scan(self._markers, self._say)
            if not marker:
                return
            if self._reasoning is not None and marker == self._reasoning.begin:
                is_start = not self._has_said
                if self._has_said:
                    self._say(marker)
                else:
                    yield from self._reason()
            elif marker == self._turn:
                is_start = True
                self._say(" ")
            else:
                yield from self._attempt(marker)

    @property
    def _markers(self) -> tuple[str, ...]:
        reasoning = (self._reasoning.begin,) if self._reasoning else ()
        turn = (self._turn,) if self._turn else ()
        return (*reasoning, *turn, *(self._form.markers if self._form else ()))

    def _attempt(self, marker: str) -> Script:
        assert self._form is not None, "markers are a form's"
        script, num_calls = self._form.read(self._calls, marker), self._calls.num_calls
        text = yield from self._calls.attempt(script, marker)
        if self._is_cut and (marker or self._calls.num_calls > num_calls):
            self._calls.drop()
        else:
            self._say(text)

    def _scan(self, markers: tuple[str, ...], say: Callable[[str], None]) -> Characters:
        """Say what comes before the next marker, which is returned; "" at the end."""
        text = ""
        self._plain = _first_of(markers)
        while True:
            self._say_plain = None if text or self._calls.has_again else say
            char = yield from self._calls.take()
            self._say_plain = None
            self._calls.forget()
            if not char:
                break
            text += char
            while text and not any(marker.startswith(text) for marker in markers):
                say(text[0])
                text = text[1:]
            if text in markers:
                return text
        say(text)
        return ""

    def _reason(self) -> Script:
        assert self._reasoning is not None, "what has no tags isn't read as reasoning"
        self._has_said, self._space = False, []
        yield from self._scan((self._reasoning.end,), lambda text: self._say(text, ReasoningPart))
        self._has_said, self._space = False, []

    def _say(self, text: str, kind: type[Content | ReasoningPart] = Content) -> None:
        """Tell of a text, of which the white space at both ends is left out."""
        solid = text.rstrip() if self._has_said else text.strip()
        if self._is_forced and kind is Content:
            return  # a forced answer is calls and the marks around them
        if solid:
            self._parts.append(kind("".join(self._space) + solid))
            self._space, self._has_said = [], True
        if self._has_said:
            trailing = text[len(text.rstrip()) :]
            self._space += [trailing] if trailing else []


def _first_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    """What matches the first characters of markers."""
    return re.compile("|".join(re.escape(marker[0]) for marker in markers) or "(?!)")


def joined(parts: list[Part]) -> list[Part]:
    """The same with neighbours of one kind as one."""
    groups: list[tuple[Part, list[str]]] = []
    for part in parts:
        last = groups[-1][0] if groups else None
        texts = [] if isinstance(part, CallStart | CallEnd) else [part.text]
        if texts and last is not None and _is_more(last, part):
            groups[-1][1].extend(texts)
        else:
            groups.append((part, texts))
    return [_with_text(part, "".join(texts)) for part, texts in groups]


def _is_more(first: Part, second: Part) -> bool:
    if isinstance(first, CallArguments) and isinstance(second, CallArguments):
        return first.index == second.index
    return type(first) is type(second) and isinstance(first, Content | ReasoningPart)


def _with_text(part: Part, text: str) -> Part:
    if isinstance(part, CallArguments):
        return CallArguments(part.index, text)
    return type(part)(text) if isinstance(part, Content | ReasoningPart) else part

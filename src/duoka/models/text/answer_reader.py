r"""Read the text of an answer into its parts, during generation.

The reader is a generator that receives one character at a time, so the result doesn't depend on how
the text was cut. Characters that may begin a marker wait until that is decided; text that began
like a call and is none becomes content. No text is read twice, so the work is linear in its length.
How a family writes its calls is in `call_forms`.

    feed("Sure. <tool")                          [content "Sure."]
    feed('_call>{"name": "g')                    []
    feed('et", "arguments": {}}</tool_call>')    [tool_name "get", tool_arguments "{}"]
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from duoka.base.answer_parts import AnswerPart, PartKind
from duoka.base.serialization import parse_json_object
from duoka.errors import FormatError

from .characters import CharacterReader, Characters, NoCall, Script

MOST_CALLS = 128


class Tags(NamedTuple):
    """The texts around a model's reasoning."""

    begin: str
    end: str


@dataclass(frozen=True, kw_only=True)
class CallForm(ABC):
    """The form of a family's calls of tools.

    Parameters
    ----------
    markers : tuple of str
        The texts that begin calls at any place.
    inner_marks : tuple of str
        Other texts of calls, as far as they may be special tokens.
    turn : str
        The text between messages of one answer; empty for none.
    is_at_start : bool
        Whether a message can be a call from its first character on.
    """

    markers: tuple[str, ...] = ()
    inner_marks: tuple[str, ...] = ()
    turn: str = ""
    is_at_start: bool = False

    @abstractmethod
    def read(self, calls: CallReader, marker: str) -> Script:
        """Read calls after a marker, or from the start of a message if the marker is empty.

        NoCall ends the script where the text is not a call; characters that belong to no part yet
        become content.
        """


class CallReader(CharacterReader):
    """The characters of calls, and the parts made of them.

    Parameters
    ----------
    schemas : mapping
        The parameters of each tool that may be called, by its name.
    """

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__()
        self.schemas = schemas
        self.num_started_calls = 0
        self.num_calls = 0
        self.is_open = False
        self._arguments: list[str] = []
        # Parts since the last `_pop_parts`; neighbours of one kind and call are one entry, whose
        # texts are joined once, so that a long part costs no more per character.
        self._parts: list[tuple[PartKind, int, list[str]]] = []

    # ── for forms ──

    def start(self, name: str) -> None:
        """Add the start of a call; NoCall if there is no tool of the name."""
        if name not in self.schemas or self.num_started_calls == MOST_CALLS:
            self.stop()
        self.is_open, self._arguments = True, []
        self.num_started_calls += 1
        self.add("tool_name", name)

    def add_arguments(self, text: str) -> None:
        """Add more of the arguments."""
        self._arguments.append(text)
        self.add("tool_arguments", text)

    def end(self) -> None:
        """End the call; NoCall unless its arguments are one JSON object."""
        if not is_json_object("".join(self._arguments)):
            self.stop()
        self.is_open = False
        self.forget()
        self.num_calls += 1

    def add_call(self, name: str, arguments: str) -> None:
        """Add a whole call."""
        self.start(name)
        self.add_arguments(arguments)
        self.end()

    # ── for the reader of the answer ──

    def add(self, kind: PartKind, text: str) -> None:
        """Add a part, or more of the last one."""
        call = self.num_started_calls - 1 if kind.startswith("tool") else 0
        if kind == "tool_name" or not self._parts or self._parts[-1][:2] != (kind, call):
            self._parts.append((kind, call, []))
        self._parts[-1][2].append(text)
        self._taken.clear()

    def attempt(self, script: Script, marker: str) -> Characters:
        """Follow a script; return its text if that is no call, but content."""
        # `_taken` holds the characters that no part has yet. `add` clears it: arguments that were
        # already returned stay returned, and only what follows them becomes content.
        self._taken, self._size = [marker], 0
        try:
            yield from script
        except NoCall:
            text, self._size = "".join(self._taken), 0
        else:
            return ""
        self.is_open = False
        return text

    def forget(self) -> None:
        """Forget the characters taken so far."""
        self._taken.clear()
        self._size = 0


class AnswerReader(CallReader):
    """Reads one answer; see `AnswerFormat.reader`.

    Parameters
    ----------
    form : CallForm, optional
    schemas : mapping
        The parameters of each tool that may be called; without any, nothing is read as a call.
    reasoning : Tags, optional
    is_reasoning : bool
        Whether the answer begins within reasoning.
    is_forced : bool
        Whether the answer can be nothing but calls; it has no content then.
    is_parallel : bool
        Whether more than the first call is returned.
    keeps_space : bool
        Whether white space at both ends is content, too.
    """

    def __init__(
        self,
        form: CallForm | None,
        schemas: Mapping[str, Mapping[str, Any]],
        reasoning: Tags | None,
        *,
        is_reasoning: bool = False,
        is_forced: bool = False,
        is_parallel: bool = True,
        keeps_space: bool = False,
    ) -> None:
        super().__init__(schemas)
        self._form = form if schemas else None
        self._turn = form.turn if form else ""
        self._reasoning = reasoning
        self._is_reasoning = is_reasoning
        self._is_forced, self._is_parallel, self._is_cut = is_forced, is_parallel, False
        self._keeps_space = keeps_space
        self._space: list[str] = []
        self._has_text = False
        self._first_characters = _match_first(())
        self._add_plain: Callable[[str], None] | None = None
        self._script = self._read()
        next(self._script)

    def feed(self, text: str) -> list[AnswerPart]:
        """Take more of the text; return the new parts."""
        position = 0
        while position < len(text):
            # Where no marker can have begun, all that comes before the next one is added at once.
            if self._add_plain is not None:
                match = self._first_characters.search(text, position)
                end = match.start() if match else len(text)
                self._add_plain(text[position:end])
                position = end
            if position < len(text):
                self._script.send(text[position])
                position += 1
        return self._pop_parts()

    def finish(self, *, is_cut: bool = False) -> list[AnswerPart]:
        """End the text; return the remaining parts. A call cut by a limit leaves no content."""
        self._is_cut = is_cut
        if not self.has_ended:
            self.has_ended = True
            try:
                self._script.send("")
            except StopIteration:
                pass
            else:
                raise AssertionError("a script ends when the answer does")
        return self._pop_parts()

    def _pop_parts(self) -> list[AnswerPart]:
        """Return the new parts."""
        parts = [
            AnswerPart(kind, "".join(texts), call)
            for kind, call, texts in self._parts
            if self._is_parallel or not call
        ]
        self._parts.clear()
        return parts

    # The states, with the texts that lead from one to another:
    #
    #   reasoning ── end tag ──▶ start of a message ── a form without marker, tried ──▶ content
    #   content ── marker ──▶ call, tried ──▶ content
    #   content ── turn ──▶ start of a message
    #   content without text so far ── begin tag ──▶ reasoning
    #
    # "Tried": if the text turns out to be no call, it becomes content.
    def _read(self) -> Script:
        """Read an answer: perhaps reasoning, then messages and calls."""
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
                is_start = not self._has_text
                if self._has_text:
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
        script, num_started = self._form.read(self, marker), self.num_started_calls
        text = yield from self.attempt(script, marker)
        if self._is_cut and (marker or self.num_started_calls > num_started):
            self._again.clear()
        else:
            self._say(text)

    def _scan(self, markers: tuple[str, ...], say: Callable[[str], None]) -> Characters:
        """Say the text before the next marker, and return the marker; "" at the end."""
        # `text` is a proper prefix of a marker, and waits; with "<tool_call>" and "<think>":
        #     "a"  said at once      "<t"  waits for "o" or "h"
        #     "<tx"  "<" is said, since no marker goes on so; then "t", then "x"
        text = ""
        self._first_characters = _match_first(markers)
        while True:
            self._add_plain = None if text or self._again else say
            char = yield from self.take()
            self._add_plain = None
            self.forget()
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
        assert self._reasoning is not None, "without tags nothing is read as reasoning"
        self._has_text, self._space = False, []
        yield from self._scan((self._reasoning.end,), lambda text: self._say(text, "reasoning"))
        self._has_text, self._space = False, []

    def _say(self, text: str, kind: PartKind = "content") -> None:
        """Add a text, without the white space at both ends of content and of reasoning."""
        if self._keeps_space:
            if text:
                self.add(kind, text)
            return
        # White space waits in `_space` until text follows it; at the end it is dropped. The texts
        # "\n Sure.", " I" and " \n" give the parts "Sure." and " I".
        solid = text.rstrip() if self._has_text else text.strip()
        if self._is_forced and kind == "content":
            return  # calls, and the marks around them
        if solid:
            self.add(kind, "".join(self._space) + solid)
            self._space, self._has_text = [], True
        if self._has_text:
            trailing = text[len(text.rstrip()) :]
            self._space += [trailing] if trailing else []


def _match_first(markers: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern of the first characters of markers."""
    return re.compile("|".join(re.escape(marker[0]) for marker in markers) or "(?!)")


def is_json_object(text: str) -> bool:
    """Return True if `parse_json_object` accepts a text."""
    try:
        parse_json_object(text, "the call")
    except FormatError:
        return False
    return True

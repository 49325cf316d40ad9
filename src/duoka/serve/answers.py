"""Answers in the forms of OpenAI's chats and completions: whole, or piece by piece.

Every form takes the same events, and returns the pieces of each in a stream. The answers of the
other two interfaces are in `response_answer` and `message_answer`.
"""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from codecs import getincrementaldecoder
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from .errors import HttpError
from .messages import Begun, Delta, Ended, Event, Token

Piece = dict[str, Any]
"""An object of a stream."""


@dataclass(slots=True)
class Usage:
    """The tokens of a request."""

    prompt_tokens: int = 0
    new_tokens: int = 0
    shared_tokens: int = 0

    def add(self, event: Event) -> None:
        """Count the tokens of an event."""
        if isinstance(event, Begun):
            self.prompt_tokens += event.prompt_tokens
        elif isinstance(event, Ended):
            self.new_tokens += event.new_tokens
            self.shared_tokens = max(self.shared_tokens, event.shared_tokens)

    def to_dict(self) -> dict[str, Any]:
        """Return the tokens in OpenAI's form."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.new_tokens,
            "total_tokens": self.prompt_tokens + self.new_tokens,
            "prompt_tokens_details": {"cached_tokens": self.shared_tokens},
        }


class Answer(ABC):
    """The answer to a request in the form of an interface, during generation."""

    has_names = False
    """Whether the pieces of a stream are events with names, and no mark ends it."""

    def __init__(self) -> None:
        self.usage = Usage()

    def begin(self, source: int) -> Iterator[Piece]:
        """Return the pieces before the answers to a prompt, by the number of the prompt."""
        yield from ()

    @abstractmethod
    def take(self, event: Event, source: int = 0) -> Iterator[Piece]:
        """Take an event of the answers to a prompt; return its pieces."""

    def finish(self) -> Iterator[Piece]:
        """Return the pieces after all answers."""
        yield from ()

    def fail(self, error: HttpError) -> Iterator[Piece]:
        """Return the pieces for the error of a stream."""
        yield error.body

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Return the whole answer."""


@dataclass
class _Choice:
    """A choice during generation: its content in a whole answer, and its tokens."""

    content: dict[str, Any]
    tokens: list[Token] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    finish: str | None = None
    # The number of characters so far, and the bytes of one that isn't whole.
    _offset: int = 0
    _decoder: Any = field(default_factory=lambda: getincrementaldecoder("utf-8")("replace"))

    def add(self, tokens: Sequence[Token]) -> None:
        """Add tokens, and the places in the text where they begin."""
        self.tokens += tokens
        for token in tokens:
            self.offsets.append(self._offset)
            self._offset += len(self._decoder.decode(token.data))


class OpenAIAnswer(Answer):
    """The common form of chats and completions, with several choices.

    Parameters
    ----------
    head : dict
        The fields of every piece.
    contents : sequence of dict
        The contents of the choices without a token, `n` for each prompt.
    has_logprobs, has_usage : bool
        Whether log-probabilities are wanted, and the tokens at the end of a stream.
    """

    # Fields of a whole answer in place of a piece's; the content of the last piece of a choice.
    _fields: ClassVar[dict[str, Any]] = {}
    _last: ClassVar[dict[str, Any]]

    def __init__(
        self,
        head: dict[str, Any],
        contents: Sequence[dict[str, Any]],
        n: int,
        *,
        has_logprobs: bool,
        has_usage: bool,
    ) -> None:
        super().__init__()
        self._head, self._n = head, n
        self._choices = [_Choice(content) for content in contents]
        self._has_logprobs, self._has_usage = has_logprobs, has_usage

    @abstractmethod
    def _add(self, content: dict[str, Any], delta: Delta) -> dict[str, Any]:
        """Add a part to the content of a choice; return its form in a stream."""

    @abstractmethod
    def _write_logprobs(
        self, tokens: Sequence[Token], offsets: Sequence[int]
    ) -> dict[str, Any] | None:
        """Return log-probabilities of tokens."""

    def take(self, event: Event, source: int = 0) -> Iterator[Piece]:
        """See `Answer`."""
        self.usage.add(event)
        if not isinstance(event, Delta | Ended):
            return
        number = source * self._n + event.choice
        choice = self._choices[number]
        if isinstance(event, Ended):
            choice.finish = "stop" if event.finish == "cancelled" else event.finish
            yield self._piece(number, self._last, finish=choice.finish)
        else:
            # Offsets of a stream continue: a piece has the tokens from `start` on, with the places
            # where they begin in the whole text.
            choice.add(event.tokens)
            start = len(choice.tokens) - len(event.tokens)
            content = self._add(choice.content, event)
            yield self._piece(number, content, self._logprobs(choice, start))

    def finish(self) -> Iterator[Piece]:
        """See `Answer`."""
        if self._has_usage:
            yield {**self._head, "choices": [], "usage": self.usage.to_dict()}

    def to_dict(self) -> dict[str, Any]:
        """See `Answer`."""
        choices = [
            _choice(number, choice.content, self._logprobs(choice), choice.finish)
            for number, choice in enumerate(self._choices)
        ]
        return {
            **self._head,
            **self._fields,
            "choices": choices,
            "usage": self.usage.to_dict(),
        }

    def _logprobs(self, choice: _Choice, start: int = 0) -> dict[str, Any] | None:
        if not self._has_logprobs:
            return None
        return self._write_logprobs(choice.tokens[start:], choice.offsets[start:])

    def _piece(
        self, number: int, content: dict[str, Any], logprobs: Any = None, finish: Any = None
    ) -> Piece:
        return {**self._head, "choices": [_choice(number, content, logprobs, finish)]}


def _choice(number: int, content: dict[str, Any], logprobs: Any, finish: Any) -> dict[str, Any]:
    return {"index": number, **content, "logprobs": logprobs, "finish_reason": finish}


class ChatAnswer(OpenAIAnswer):
    """The answers to a chat; for `options` see `OpenAIAnswer`."""

    _fields: ClassVar = {"object": "chat.completion"}
    _last: ClassVar = {"delta": {}}

    def __init__(self, model: str, n: int, **options: bool) -> None:
        head = {"id": make_id("chatcmpl-"), "created": int(time.time()), "model": model}
        message = {"role": "assistant", "content": "", "refusal": None}
        contents = [{"message": dict(message)} for _ in range(n)]
        super().__init__({**head, "object": "chat.completion.chunk"}, contents, n, **options)

    def begin(self, source: int) -> Iterator[Piece]:
        """See `Answer`."""
        for number in range(self._n):
            yield self._piece(number, {"delta": {"role": "assistant", "content": ""}})

    def to_dict(self) -> dict[str, Any]:
        """See `Answer`."""
        for choice in self._choices:
            message = choice.content["message"]
            if "tool_calls" in message:
                message["content"] = message["content"] or None
        return super().to_dict()

    def _add(self, content: dict[str, Any], delta: Delta) -> dict[str, Any]:
        message, text = content["message"], delta.text
        change: dict[str, Any]
        if delta.kind in ("content", "reasoning"):
            name = "content" if delta.kind == "content" else "reasoning_content"
            message[name] = message.get(name, "") + text
            change = {name: text}
        elif delta.kind == "tool_name":
            function = {"name": text, "arguments": ""}
            call = {"id": make_id("call_"), "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)
            change = {"tool_calls": [{"index": delta.call, **call, "function": {**function}}]}
        else:
            message["tool_calls"][delta.call]["function"]["arguments"] += text
            change = {"tool_calls": [{"index": delta.call, "function": {"arguments": text}}]}
        return {"delta": change}

    def _write_logprobs(self, tokens: Sequence[Token], offsets: Sequence[int]) -> dict[str, Any]:
        return write_chat_logprobs(tokens)


class CompletionAnswer(OpenAIAnswer):
    """The continuations of some texts.

    Parameters
    ----------
    prefixes : sequence of str
        For each prompt the text to repeat before its continuations; empty for none.
    n : int
        The number of continuations of each.
    options
        See `OpenAIAnswer`.
    """

    _last: ClassVar = {"text": ""}

    def __init__(self, model: str, prefixes: Sequence[str], n: int, **options: bool) -> None:
        head = {"id": make_id("cmpl-"), "object": "text_completion", "created": int(time.time())}
        contents = [{"text": prefix} for prefix in prefixes for _ in range(n)]
        super().__init__({**head, "model": model}, contents, n, **options)

    def begin(self, source: int) -> Iterator[Piece]:
        """See `Answer`."""
        for number in range(source * self._n, (source + 1) * self._n):
            if prefix := self._choices[number].content["text"]:
                yield self._piece(number, {"text": prefix})

    def _add(self, content: dict[str, Any], delta: Delta) -> dict[str, Any]:
        content["text"] += delta.text if delta.kind == "content" else ""
        return {"text": delta.text}

    def _write_logprobs(
        self, tokens: Sequence[Token], offsets: Sequence[int]
    ) -> dict[str, Any] | None:
        if not tokens:
            return None
        return {
            "tokens": [_spell(token.text, token.data) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [
                {_spell(text, data): logprob for text, data, logprob in token.likeliest}
                for token in tokens
            ],
            "text_offset": list(offsets),
        }


def make_id(prefix: str) -> str:
    """Return a random id with a prefix."""
    return f"{prefix}{uuid.uuid4().hex}"


def _spell(text: str, data: bytes) -> str:
    """Write a token as completions do; invalid UTF-8 is spelled out byte by byte."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
    return text


def write_chat_logprobs(tokens: Sequence[Token]) -> dict[str, Any]:
    """Return log-probabilities as chats have them."""

    def write(text: str, data: bytes, logprob: float) -> dict[str, Any]:
        return {"token": text, "logprob": logprob, "bytes": list(data)}

    content = [
        write(token.text, token.data, token.logprob)
        | {"top_logprobs": [write(*likely) for likely in token.likeliest]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}

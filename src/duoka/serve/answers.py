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


class OpenAIAnswer(Answer):
    """The common form of chats and completions, with several choices.

    Parameters
    ----------
    head : dict
        The fields of every piece.
    choices : sequence
        Each with its `content`, `logprobs` and `finish`.
    has_logprobs, has_usage : bool
        Whether log-probabilities are wanted, and the tokens at the end of a stream.
    """

    # Fields of a whole answer in place of a piece's.
    _fields: ClassVar[dict[str, Any]] = {}

    def __init__(
        self, head: dict[str, Any], choices: Sequence[Any], *, has_logprobs: bool, has_usage: bool
    ) -> None:
        super().__init__()
        self._head = head
        self._choices = choices
        self._has_logprobs, self._has_usage = has_logprobs, has_usage

    def finish(self) -> Iterator[Piece]:
        """See `Answer`."""
        if self._has_usage:
            yield {**self._head, "choices": [], "usage": self.usage.to_dict()}

    def to_dict(self) -> dict[str, Any]:
        """See `Answer`."""
        choices = [
            _choice(number, choice.content, self._has_logprobs and choice.logprobs, choice.finish)
            for number, choice in enumerate(self._choices)
        ]
        return {
            **self._head,
            **self._fields,
            "choices": choices,
            "usage": self.usage.to_dict(),
        }

    def _piece(self, number: int, content: dict[str, Any], logprobs: Any, finish: Any) -> Piece:
        return {**self._head, "choices": [_choice(number, content, logprobs, finish)]}


def _choice(number: int, content: dict[str, Any], logprobs: Any, finish: Any) -> dict[str, Any]:
    end = {"logprobs": logprobs or None, "finish_reason": finish}
    return {"index": number, **content, **end}


@dataclass(slots=True)
class ChatChoice:
    """A choice among the answers to a chat."""

    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    finish: str = "stop"

    def add(self, delta: Delta) -> dict[str, Any]:
        """Add a part; return its form in a stream."""
        self.tokens += delta.tokens
        if delta.kind == "content":
            self.texts.append(delta.text)
            return {"content": delta.text}
        if delta.kind == "reasoning":
            self.thoughts.append(delta.text)
            return {"reasoning_content": delta.text}
        if delta.kind == "tool_name":
            function = {"name": delta.text, "arguments": ""}
            call = {"id": make_id("call_"), "type": "function", "function": function}
            self.calls.append(call)
            return {"tool_calls": [{"index": delta.call, **call, "function": {**function}}]}
        self.calls[delta.call]["function"]["arguments"] += delta.text
        return {"tool_calls": [{"index": delta.call, "function": {"arguments": delta.text}}]}

    @property
    def logprobs(self) -> dict[str, Any]:
        """The log-probabilities of the whole answer."""
        return write_chat_logprobs(self.tokens)

    @property
    def content(self) -> dict[str, Any]:
        """The message of the whole answer."""
        content: str | None = "".join(self.texts)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if any(self.thoughts):
            message["reasoning_content"] = "".join(self.thoughts)
        if self.calls:
            message |= {"content": content or None, "tool_calls": self.calls}
        return {"message": message}


class ChatAnswer(OpenAIAnswer):
    """The answers to a chat; for `options` see `OpenAIAnswer`."""

    _fields: ClassVar = {"object": "chat.completion"}

    def __init__(self, model: str, n: int, **options: bool) -> None:
        head = {"id": make_id("chatcmpl-"), "created": int(time.time()), "model": model}
        choices = [ChatChoice() for _ in range(n)]
        super().__init__({**head, "object": "chat.completion.chunk"}, choices, **options)

    def begin(self, source: int) -> Iterator[Piece]:
        """See `Answer`."""
        for number in range(len(self._choices)):
            delta = {"role": "assistant", "content": ""}
            yield self._piece(number, {"delta": delta}, None, None)

    def take(self, event: Event, source: int = 0) -> Iterator[Piece]:
        """See `Answer`."""
        self.usage.add(event)
        if isinstance(event, Ended):
            finish = self._choices[event.choice].finish = name_finish(event)
            yield self._piece(event.choice, {"delta": {}}, None, finish)
        elif isinstance(event, Delta):
            logprobs = write_chat_logprobs(event.tokens) if self._has_logprobs else None
            delta = self._choices[event.choice].add(event)
            yield self._piece(event.choice, {"delta": delta}, logprobs, None)


class CompletionChoice:
    """A choice among the continuations of a text."""

    def __init__(self, prefix: str) -> None:
        self.texts = [prefix]
        self.logprobs: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        self.finish = "stop"
        # The number of characters so far, and the bytes of one that isn't whole.
        self._offset = 0
        self._decoder = getincrementaldecoder("utf-8")("replace")

    @property
    def content(self) -> dict[str, Any]:
        """The whole text."""
        return {"text": "".join(self.texts)}

    def add_tokens(self, tokens: Sequence[Token]) -> dict[str, list[Any]]:
        """Add the log-probabilities of tokens, and return them."""
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(token.data))
        entries: dict[str, list[Any]] = {
            "tokens": [_spell(token.text, token.data) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [
                {_spell(text, data): logprob for text, data, logprob in token.likeliest}
                for token in tokens
            ],
            "text_offset": offsets,
        }
        for name, values in entries.items():
            self.logprobs[name] += values
        return entries


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

    def __init__(self, model: str, prefixes: Sequence[str], n: int, **options: bool) -> None:
        head = {"id": make_id("cmpl-"), "object": "text_completion", "created": int(time.time())}
        choices = [CompletionChoice(prefix) for prefix in prefixes for _ in range(n)]
        super().__init__({**head, "model": model}, choices, **options)
        self._n = n

    def begin(self, source: int) -> Iterator[Piece]:
        """See `Answer`."""
        for number in range(source * self._n, (source + 1) * self._n):
            (prefix,) = self._choices[number].texts
            if prefix:
                yield self._piece(number, {"text": prefix}, None, None)

    def take(self, event: Event, source: int = 0) -> Iterator[Piece]:
        """See `Answer`."""
        self.usage.add(event)
        if not isinstance(event, Delta | Ended):
            return
        number = source * self._n + event.choice
        choice = self._choices[number]
        if isinstance(event, Ended):
            choice.finish = name_finish(event)
            yield self._piece(number, {"text": ""}, None, choice.finish)
        else:
            if event.kind == "content":
                choice.texts.append(event.text)
            has_logprobs = self._has_logprobs and event.tokens
            logprobs = choice.add_tokens(event.tokens) if has_logprobs else None
            yield self._piece(number, {"text": event.text}, logprobs, None)


def name_finish(event: Ended) -> str:
    """Return OpenAI's word for the reason why an answer ended."""
    return "stop" if event.finish == "cancelled" else event.finish


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
    content = [
        {
            "token": token.text,
            "logprob": token.logprob,
            "bytes": list(token.data),
            "top_logprobs": [
                {"token": text, "logprob": logprob, "bytes": list(data)}
                for text, data, logprob in token.likeliest
            ],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}

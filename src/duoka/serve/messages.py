"""What the server and the process of an engine tell each other, over a socket of their own.

Neither torch nor transformers is needed for it: the server's process has none of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from duoka.planner.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """The plan of an engine, and how it is opened: the first message to its process."""

    plan: Plan
    max_new_tokens: int | None = None
    trust_remote_code: bool = False
    adapter: str | None = None
    processes: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What is asked: messages of a chat in OpenAI's form, a text that goes on, or its tokens.

    `field` is where the request has it.
    """

    messages: Sequence[Mapping[str, Any]] | None = None
    text: str | None = None
    tokens: Sequence[int] | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str | Mapping[str, Any] = "auto"
    parallel_tool_calls: bool = True
    field: str = "messages"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """A message of the server: the request `number`, or something about it.

    ``generate`` asks for `n` generations by sampling parameters in the names of duoka's: `Begun`,
    then `Delta` and `Ended` of each are sent back. ``tokenize`` asks for the tokens of a prompt and
    ``detokenize`` for the text of its tokens: `Counted`. Each may end as `Failed`. ``cancel`` ends
    the request; ``status`` asks for the `Status` of the engine.
    """

    task: Literal["generate", "tokenize", "detokenize", "cancel", "status"] = "generate"
    number: int = -1
    prompt: Prompt = Prompt()
    params: Mapping[str, Any] = field(default_factory=dict)
    n: int = 1


@dataclass(frozen=True, slots=True)
class Token:
    """A token of an answer, with its log-probability, and the likeliest ones in its place."""

    text: str
    data: bytes
    logprob: float
    likeliest: tuple[tuple[str, bytes, float], ...] = ()


Kind = Literal["content", "reasoning", "tool_name", "tool_arguments"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """More of an answer; of a tool call, of which one."""

    number: int
    choice: int
    text: str
    kind: Kind = "content"
    call: int = 0
    num_tokens: int = 0
    tokens: tuple[Token, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """A request is on its way; its prompt has so many tokens."""

    number: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """An answer has ended."""

    number: int
    choice: int
    finish: Literal["stop", "length", "cancelled", "tool_calls"]
    new_tokens: int
    shared_tokens: int
    stop_text: str | None = None
    """What was asked to end it, where that did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A request can't be answered; `status` is HTTP's, the rest OpenAI's."""

    number: int
    status: int
    text: str
    code: str | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """Tokens that were asked for, or the text of some."""

    number: int
    tokens: Sequence[int] = ()
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """How an engine is."""

    running: int
    waiting: int
    pages: int
    free_pages: int
    preemptions: int = 0
    shared_tokens: int = 0
    reserved_bytes: Mapping[str, int] = field(default_factory=dict)
    busy_seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Broken:
    """No engine can be opened, or it has ended for good; `code` is the exit code that says why."""

    text: str
    code: int = 1


Event = Delta | Begun | Ended | Failed | Counted

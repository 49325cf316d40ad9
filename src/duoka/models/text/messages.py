"""Messages of a chat, independent of the model, and tool calls in their text.

Answers are untrusted text: calls are parsed, never executed.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from PIL.Image import Image

from duoka.base.serialization import parse_json_object
from duoka.errors import FormatError, UsageError

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")

Role = Literal["system", "user", "assistant", "observation"]
Tool = Mapping[str, Any]
"""A function as JSON schema: name, description, parameters; plain, or under OpenAI's "function"."""
_MAX_CHARACTERS = 1 << 16
_SHOWN = 80
TOOL_NAME = re.compile(r"[\w-][\w.-]{0,127}", re.ASCII)
_FENCED = re.compile(r"\s*```[a-z]*\n(?P<code>.*?)\n?```\s*", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call of a tool; the arguments are values of JSON or Python literals."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """A message of a chat; the role "observation" is the result of a tool.

    `metadata` is the text after the role in the ChatGLM family: the name of the called tool.
    `images` come before the content. `call_id` is the id of the call that an observation answers.
    """

    role: Role
    content: str
    metadata: str = ""
    calls: tuple[ToolCall, ...] = ()
    images: tuple[Image, ...] = ()
    call_id: str = ""

    def __post_init__(self) -> None:
        """Refuse unknown roles and invalid text."""
        if self.role not in get_args(Role):
            raise UsageError(
                f"{self.role!r} is not a message role", hint=f"roles: {', '.join(get_args(Role))}"
            )
        for name, text in (("content", self.content), ("metadata", self.metadata)):
            if not isinstance(text, str):
                raise UsageError(f"a message's {name} must be a string, not {type(text).__name__}")
            refuse_half_pairs(text, f"a message's {name}")
        if "\n" in self.metadata:
            raise UsageError(
                "metadata must be a single line", hint="put further lines into the content"
            )


Messages = Sequence[ChatMessage]
Tools = Sequence[Tool] | None


def refuse_half_pairs(text: str, what: str) -> None:
    """Raise UsageError for a text with an unpaired surrogate, which no tokenizer can encode."""
    if _LONE_SURROGATE.search(text):
        hint = "decode it as UTF-8"
        raise UsageError(f"{what} is not valid text: it contains an unpaired surrogate", hint=hint)


def read_message(message: object) -> ChatMessage:
    """Read a message in the form of transformers and OpenAI."""
    if not isinstance(message, Mapping):
        hint = 'write a chat as [{"role": "user", "content": "Hello"}]'
        raise UsageError(f"a message must be a mapping, not {type(message).__name__}", hint=hint)
    role: Any = "observation" if message.get("role") == "tool" else message.get("role")
    calls: Any = message.get("tool_calls") or []
    calls = calls if isinstance(calls, list | tuple) else [calls]
    content: Any = message.get("content")
    if content is None and calls:
        content = ""
    return ChatMessage(
        role=role,
        content=_join_texts(content) if isinstance(content, list) else content,
        metadata=message.get("metadata") or "",
        calls=tuple(map(read_tool_call, calls)),
        call_id=str(message.get("tool_call_id") or ""),
    )


def _join_texts(parts: Sequence[Any]) -> str:
    """Join the texts of a content given as parts; refuse parts other than text."""
    joined = ""
    for part in parts:
        fields = part if isinstance(part, Mapping) else {}
        texts = [text for key, text in fields.items() if key != "type" and isinstance(text, str)]
        if len(texts) != 1 or not str(fields.get("type") or "text").endswith("text"):
            kind = f", but of type {fields['type']!r}" if fields.get("type") else ""
            raise UsageError(f"a message has a part that is not text{kind}", hint="omit images")
        joined += texts[0]
    return joined


def read_tool_call(call: Any) -> ToolCall:
    """Read a call in OpenAI's form, or its "function"; arguments may be a JSON string."""
    try:
        function = call.get("function", call)
        name, arguments = function["name"], function["arguments"]
        if isinstance(arguments, str):
            arguments = parse_json_object(arguments, "the call")
        if not isinstance(name, str) or not isinstance(arguments, Mapping):
            raise TypeError
    except (AttributeError, KeyError, TypeError, FormatError) as error:
        raise UsageError(
            f"a tool call has no name, or no JSON arguments: {str(call)[:_SHOWN]}",
            hint='for example {"name": "weather", "arguments": {"city": "Beijing"}}',
        ) from error
    refuse_half_pairs(json.dumps([name, arguments], ensure_ascii=False, default=str), "a tool call")
    return ToolCall(name=name, arguments=arguments, id=str(call.get("id") or ""))


def last_is_answerable(
    messages: Messages, *, takes_images: bool = False, continues: bool = False
) -> None:
    """Raise UsageError unless the assistant can answer the last message, or continue it."""
    if not takes_images and any(message.images for message in messages):
        raise UsageError("this model takes no images", hint="omit the images")
    if not messages:
        raise UsageError("there are no messages")
    is_own = messages[-1].role == "assistant"
    if continues and (not is_own or messages[-1].calls):
        raise UsageError("only a message of the assistant without tool calls can be continued")
    if is_own and not continues:
        hint = "end the chat with the user's message; in a request, set continue_final_message"
        raise UsageError("the last message is the assistant's own", hint=hint)


def tool_function(tool: Tool) -> Mapping[str, Any]:
    """Return the function of a tool, without OpenAI's wrapping."""
    function = tool.get("function", tool) if isinstance(tool, Mapping) else tool
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UsageError(
            "a tool must be an object with a name, a description and parameters",
            hint="give its JSON schema, alone or in OpenAI's form",
        )
    return function


def parse_python_call(metadata: str, content: str) -> ToolCall | None:
    r"""Read a call in ChatGLM3's form: the tool's name, and ``tool_call(k='v')`` in a fenced block.

    Returns None if the text isn't such a call.
    """
    name = metadata.strip()
    fenced = _FENCED.fullmatch(content) if len(content) <= _MAX_CHARACTERS else None
    if fenced is None or not TOOL_NAME.fullmatch(name):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of invalid escapes in strings
            arguments = _keywords(ast.parse(fenced["code"].strip(), mode="eval").body)
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return None
    return ToolCall(name=name, arguments=arguments)


def _keywords(node: ast.expr) -> dict[str, Any]:
    """Return the literal keyword arguments of ``tool_call(...)``; raise ValueError otherwise."""
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("no call with keyword arguments only")
    if not isinstance(node.func, ast.Name) or node.func.id != "tool_call":
        raise ValueError("another function than tool_call")
    arguments: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None or keyword.arg in arguments:
            raise ValueError("an unpacked or repeated argument")
        arguments[keyword.arg] = ast.literal_eval(keyword.value)
    json.dumps(arguments, allow_nan=False)  # refuses literals that no JSON schema describes
    return arguments


def write_python_call(call: ToolCall) -> str:
    """Write a call as the content of a message of ChatGLM3."""
    arguments = ", ".join(f"{name}={value!r}" for name, value in call.arguments.items())
    return f"```python\ntool_call({arguments})\n```"


def write_json_call(call: ToolCall) -> str:
    """Write a call as the content of a message of GLM-4."""
    return json.dumps(dict(call.arguments), ensure_ascii=False)
